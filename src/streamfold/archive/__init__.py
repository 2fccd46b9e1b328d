"""A table published as files that anyone can rebuild without asking a server."""

from streamfold.extras import needing_extra

with needing_extra("archive"):
    from streamfold.archive.cache import Cache
    from streamfold.archive.changes import Changes
    from streamfold.archive.collection import Collected, Collector, Doomed, Retention
    from streamfold.archive.destination import Destination, check_compare_and_swap
    from streamfold.archive.failures import (
        ArtifactCorruptError,
        ChainGapError,
        CommitConflictError,
        CommitUnknownError,
        ManifestInvalidError,
        ManifestNotFoundError,
        ManifestVersionError,
        PositionInvalidError,
        PositionPrunedError,
        SchemaIncompatibleError,
        SwapUnsupportedError,
        WriterFencedOutError,
    )
    from streamfold.archive.following import Rows
    from streamfold.archive.manifest import (
        MANIFEST_VERSION,
        Artifact,
        FormatFiles,
        Manifest,
        Part,
        Pin,
        Source,
        Writer,
    )
    from streamfold.archive.manifest_json import read_manifest, write_manifest
    from streamfold.archive.mirrors import Mirrors
    from streamfold.archive.part_files import PartGoneError
    from streamfold.archive.parts import PartPlan, WrittenDiff, WrittenPart, write_part
    from streamfold.archive.plan import ChangesPlan, TablePlan
    from streamfold.archive.positions import LSN, SEQ_NUM, PositionOrder
    from streamfold.archive.reader import Archive
    from streamfold.archive.reader import open_archive as open  # noqa: A004
    from streamfold.archive.schema import TableSchema
    from streamfold.archive.thresholds import (
        Action,
        ChainState,
        Decision,
        Pending,
        Thresholds,
        chain_state,
        decide,
    )
    from streamfold.archive.verification import Checked, Verification
    from streamfold.archive.writer import GAP, ArchiveWriter

__all__ = [
    "open",
    "Archive",
    "Cache",
    "TablePlan",
    "ChangesPlan",
    "Changes",
    "Rows",
    "Checked",
    "Verification",
    "PartGoneError",
    "ArchiveWriter",
    "GAP",
    "TableSchema",
    "Destination",
    "check_compare_and_swap",
    "Source",
    "Mirrors",
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
    "Doomed",
    "Retention",
    "ArtifactCorruptError",
    "ChainGapError",
    "CommitConflictError",
    "CommitUnknownError",
    "ManifestInvalidError",
    "ManifestNotFoundError",
    "ManifestVersionError",
    "PositionInvalidError",
    "PositionPrunedError",
    "SchemaIncompatibleError",
    "SwapUnsupportedError",
    "WriterFencedOutError",
]
