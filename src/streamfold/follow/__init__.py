"""Snapshot and follow: restore state in seconds however long the history, then keep it current."""

from typing import TYPE_CHECKING

from streamfold.backoff import Backoff
from streamfold.extras import lazy_exports
from streamfold.follow.clients.client import Appended, StreamClient, StreamRecord
from streamfold.follow.clients.memory import MemoryStream
from streamfold.follow.encoding.codecs import (
    CODECS,
    BytesCodec,
    Codec,
    CodecType,
    JsonCodec,
    MsgpackCodec,
)
from streamfold.follow.errors import (
    HistoryTrimmedError,
    SnapshotAheadError,
    SnapshotCorruptError,
    SnapshotUnsupportedError,
)
from streamfold.follow.follower import Change, Follower, as_client, follow
from streamfold.follow.restore.plan import RestorePlan, make_plan
from streamfold.follow.restore.progress import Progress, TerminalBar
from streamfold.follow.snapshots.placement import BlobSnapshots, auto, external, in_stream
from streamfold.follow.snapshots.policy import Policy, SinceSnapshot, due, prune
from streamfold.follow.snapshots.snapshot_store import (
    Placement,
    SnapshotInfo,
    Snapshots,
    SnapshotStore,
)
from streamfold.follow.snapshots.taker import Outcome, RetentionRules, SnapshotTaker, Taken

# ArrowCodec needs the extra `archive`. It is not in `__all__`: `import *` must work without it.
# ServerSnapshots imports an HTTP client, which accounts for a third of a command's start-up time.
if TYPE_CHECKING:
    from streamfold.follow.encoding.arrow_codec import ArrowCodec as ArrowCodec
    from streamfold.follow.snapshots.server_snapshots import ServerSnapshots
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "encoding.arrow_codec": ("ArrowCodec",),
            "snapshots.server_snapshots": ("ServerSnapshots",),
        },
    )

__all__ = [
    # following
    "follow",
    "Follower",
    "Change",
    "RestorePlan",
    "make_plan",
    "Progress",
    "TerminalBar",
    "Backoff",
    # snapshots: where, how, when
    "external",
    "in_stream",
    "auto",
    "Snapshots",
    "SnapshotStore",
    "SnapshotInfo",
    "BlobSnapshots",
    "ServerSnapshots",
    "Placement",
    "Codec",
    "CodecType",
    "CODECS",
    "JsonCodec",
    "MsgpackCodec",
    "BytesCodec",
    "SnapshotTaker",
    "RetentionRules",
    "Outcome",
    "Taken",
    "Policy",
    "SinceSnapshot",
    "due",
    "prune",
    # streams
    "StreamClient",
    "StreamRecord",
    "Appended",
    "as_client",
    "MemoryStream",
    # errors
    "HistoryTrimmedError",
    "SnapshotAheadError",
    "SnapshotCorruptError",
    "SnapshotUnsupportedError",
]
