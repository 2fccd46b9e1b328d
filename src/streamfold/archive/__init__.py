"""Tables published as files that anyone can rebuild without a server."""

from typing import TYPE_CHECKING

from streamfold.extras import lazy_exports, needing_extra

with needing_extra("archive"):
    from streamfold.archive.destinations.destination import Destination, check_compare_and_swap
    from streamfold.archive.destinations.mirrors import Mirrors
    from streamfold.archive.errors import (
        ArtifactCorruptError,
        ChainGapError,
        CommitConflictError,
        CommitUnknownError,
        ManifestInvalidError,
        ManifestNotFoundError,
        PositionInvalidError,
        PositionPrunedError,
        SchemaIncompatibleError,
        WriterFencedOutError,
    )
    from streamfold.archive.maintenance.garbage_collection import (
        Collected,
        Collector,
        Retention,
        UnreachableFile,
    )
    from streamfold.archive.maintenance.verification import Checked, Verification
    from streamfold.archive.manifest.encoding import read_manifest, write_manifest
    from streamfold.archive.manifest.model import (
        MANIFEST_VERSION,
        Artifact,
        FormatFiles,
        Manifest,
        Part,
        Pin,
        Source,
        SourceRange,
        Writer,
    )
    from streamfold.archive.manifest.positions import LSN, SEQ_NUM, PositionOrder
    from streamfold.archive.read.change_feed import Changes, Rows
    from streamfold.archive.read.decoding import DecodedLimit
    from streamfold.archive.read.part_files import Cache, PartGoneError
    from streamfold.archive.read.plan import ChangesPlan, TablePlan
    from streamfold.archive.read.reader import Archive
    from streamfold.archive.read.reader import open_archive as open  # noqa: A004
    from streamfold.archive.schema import TableSchema
    from streamfold.archive.write.artifacts import PartPlan, WrittenDiff, WrittenPart, write_part
    from streamfold.archive.write.layout import LAREDO, STREAMFOLD, Layout
    from streamfold.archive.write.thresholds import (
        Action,
        ChainState,
        Decision,
        Pending,
        Thresholds,
        chain_state,
        decide,
    )
    from streamfold.archive.write.writer import GAP, ArchiveWriter

if TYPE_CHECKING:
    from streamfold.archive.destinations.aws_credentials import Profiles
else:
    __getattr__ = lazy_exports(__name__, {"destinations.aws_credentials": ("Profiles",)})

__all__ = [
    "open",
    "Archive",
    "Cache",
    "DecodedLimit",
    "TablePlan",
    "ChangesPlan",
    "Changes",
    "Rows",
    "Checked",
    "Verification",
    "PartGoneError",
    "ArchiveWriter",
    "GAP",
    "Layout",
    "STREAMFOLD",
    "LAREDO",
    "TableSchema",
    "Destination",
    "check_compare_and_swap",
    "Source",
    "SourceRange",
    "Mirrors",
    "Profiles",
    "PartPlan",
    "WrittenPart",
    "WrittenDiff",
    "write_part",
    "Manifest",
    "MANIFEST_VERSION",
    "Artifact",
    "FormatFiles",
    "Part",
    "Pin",
    "Writer",
    "read_manifest",
    "write_manifest",
    "PositionOrder",
    "SEQ_NUM",
    "LSN",
    "Thresholds",
    "ChainState",
    "Pending",
    "Decision",
    "Action",
    "chain_state",
    "decide",
    "Collector",
    "Collected",
    "UnreachableFile",
    "Retention",
    "ArtifactCorruptError",
    "ChainGapError",
    "CommitConflictError",
    "CommitUnknownError",
    "ManifestInvalidError",
    "ManifestNotFoundError",
    "PositionInvalidError",
    "PositionPrunedError",
    "SchemaIncompatibleError",
    "WriterFencedOutError",
]
