"""Archive errors, as classes of the tree in `streamfold.errors`.

InvalidError
├── PositionInvalidError              give a position of the table's order, after the head
└── SchemaIncompatibleError           publish under another name, or change the source
NotFoundError
├── ManifestNotFoundError             look elsewhere, or write a base first
└── PositionPrunedError               read from a newer position, or from a base
ConflictError
├── ChainGapError                     continue from the head, or write a base that marks the gap
└── CommitConflictError               the table moved on: look at its head, then decide
OutcomeUnknownError
└── CommitUnknownError                may be committed: read the manifest before repeating
WriterFencedError
└── WriterFencedOutError              another writer took the table: stop
StorageError
└── DataCorruptError
    ├── ManifestInvalidError          restore the manifest, or write the table anew
    └── ArtifactCorruptError          restore the file, or read another format of it
"""

from __future__ import annotations

from streamfold.errors import (
    ConflictError,
    DataCorruptError,
    InvalidError,
    NotFoundError,
    OutcomeUnknownError,
    StreamfoldError,
    WriterFencedError,
)


class PositionInvalidError(InvalidError):
    """A position is missing, does not fit the table's order, or is not after the one before it."""

    code = "position_invalid"


class SchemaIncompatibleError(InvalidError):
    """A column changed in a way that existing files cannot follow. Nothing was committed."""

    code = "schema_incompatible"

    def __init__(self, column: str, old: object, new: object) -> None:
        super().__init__(
            f"column {column!r} cannot change from {old} to {new}: types may only widen and added "
            "columns must be nullable; keep the type, or publish a new table"
        )
        self.column, self.old, self.new = column, old, new


class ManifestNotFoundError(NotFoundError):
    """There is no archive at that address."""

    code = "manifest_not_found"


class PositionPrunedError(NotFoundError):
    """The archive no longer reaches back to that position."""

    code = "position_pruned"


class ChainGapError(ConflictError):
    """Changes are missing between two positions, so later changes cannot be applied."""

    code = "chain_gap"


class CommitConflictError(ConflictError):
    """The manifest changed in a way that conflicts with this commit. Nothing was committed."""

    code = "commit_conflict"


class CommitUnknownError(OutcomeUnknownError):
    """The commit may or may not have taken effect. Its files must stay."""

    code = "commit_unknown"


class WriterFencedOutError(WriterFencedError):
    """Another writer has taken the table. This writer may never write to it again."""

    code = "writer_fenced_out"

    def __init__(self, table: str, writer_id: str, other_id: str, token: int) -> None:
        StreamfoldError.__init__(
            self,
            f"writer {writer_id!r} no longer owns table {table!r}: writer {other_id!r} took it with "
            f"fencing token {token}; stop this one, or open the table again to take it back",
        )


class ManifestInvalidError(DataCorruptError):
    """The manifest breaks a rule of its own version. No part of it is used."""

    code = "manifest_invalid"


class ArtifactCorruptError(DataCorruptError):
    """An artifact's bytes are truncated, changed, or not in the format that their name states."""

    code = "artifact_corrupt"
