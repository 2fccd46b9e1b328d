"""How an archive names its files and positions: our own layout, or Laredo's published one.

Readers of the published layout derive names from positions, order positions as LSNs, and identify
rows by the text of their keys. So in that layout an artifact has one file per format, names have no
random part, and sequence numbers are written as LSNs. Everything else in an archive is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfold.archive.errors import CommitConflictError
from streamfold.archive.formats.format import Format
from streamfold.archive.manifest.encoding import (
    PUBLISHED_EXTENSIONS,
    artifact_path,
    derived_path,
)
from streamfold.archive.manifest.model import PUBLISHED_LAYOUT, Manifest
from streamfold.archive.manifest.positions import LSN, SEQ_NUM, PositionOrder
from streamfold.errors import InvalidError
from streamfold.extensions import must_be_one_of

Formats = tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout by its name. An archive keeps the layout that it began with."""

    name: str
    #: The order of positions made from sequence numbers.
    order: PositionOrder
    #: Whether names derive from positions alone, as readers of the published layout expect.
    is_published: bool

    def position(self, seq_num: int) -> str:
        """Return a record's position. -1 stands for the position before the first record."""
        if not self.is_published:
            return str(seq_num)
        return LSN.position(seq_num + 1)  # LSNs are not negative

    def seq_num(self, position: str) -> int:
        """Return the seq_num of the record from which `position` was made."""
        return self.order.rank(position) - (1 if self.is_published else 0)

    def path(
        self,
        form: Format,
        order: PositionOrder,
        *,
        epoch: int,
        from_position: str | None,
        to_position: str,
        attempt: str,
        bucket: int | None,
    ) -> str:
        """Return the path of one file, relative to the manifest's folder."""
        if self.is_published:
            if bucket:
                raise InvalidError(
                    f"bucket {bucket} has no name in layout {self.name}: write one part"
                )
            return derived_path(epoch, from_position, to_position, form.extension)
        return artifact_path(
            order,
            epoch=epoch,
            from_position=from_position,
            to_position=to_position,
            attempt=attempt,
            extension=form.extension,
            bucket=bucket,
        )

    def formats(self, bases: Sequence[Format], diffs: Sequence[Format]) -> tuple[Formats, Formats]:
        """Return the formats as this layout writes them. Raises if its readers cannot read one."""
        if not self.is_published:
            return tuple(bases), tuple(diffs)
        for form in (*bases, *diffs):
            if form.id in PUBLISHED_EXTENSIONS and form.for_published_readers() is None:
                raise InvalidError(
                    f"format {form.id} with compression {form.compression} has no name in layout "
                    f"{self.name}: write it without compression"
                )
        readable = [{f.id for f in forms if f.for_published_readers()} for forms in (bases, diffs)]
        if not readable[0] & readable[1]:
            raise InvalidError(
                f"layout {self.name} needs one of {', '.join(PUBLISHED_EXTENSIONS)} for both "
                "bases and diffs: its readers know no other format"
            )
        return _published(bases), _published(diffs)

    def check(self, manifest: Manifest) -> None:
        """Raise CommitConflictError if our archive has another layout.

        Archives by other writers have none.
        """
        layout = manifest.layout or STREAMFOLD.name
        if manifest.commit_id is not None and layout != self.name:
            raise CommitConflictError(
                f"the archive of table {manifest.table!r} has layout {layout}, and {self.name} is "
                f"wanted: keep layout {layout}, or use an empty folder"
            )


def _published(formats: Sequence[Format]) -> Formats:
    return tuple(form.for_published_readers() or form for form in formats)


#: Unique names, and any number of files per artifact.
STREAMFOLD = Layout("streamfold", SEQ_NUM, is_published=False)
#: The layout that Laredo's reader can rebuild.
LAREDO = Layout(PUBLISHED_LAYOUT, LSN, is_published=True)
LAYOUTS = {layout.name: layout for layout in (STREAMFOLD, LAREDO)}


def layout_of(manifest: Manifest) -> Layout:
    """Return the layout of an archive. Raises InvalidError if it is unknown."""
    name = manifest.layout or STREAMFOLD.name
    if name not in LAYOUTS:
        raise InvalidError(
            f"table {manifest.table!r} has layout {name!r}, which {must_be_one_of(LAYOUTS, name)}"
        )
    return LAYOUTS[name]
