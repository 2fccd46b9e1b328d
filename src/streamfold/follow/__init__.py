"""Snapshot and follow: restore a state in seconds, whatever the history, and keep it current."""

from streamfold.follow.client import Appended, StreamClient, StreamRecord
from streamfold.follow.codecs import BytesCodec, Codec, JsonCodec, MsgpackCodec
from streamfold.follow.external import BlobSnapshots
from streamfold.follow.failures import (
    HistoryTrimmedError,
    SnapshotAheadError,
    SnapshotCorruptError,
    SnapshotFoldError,
    SnapshotOutrunError,
    SnapshotUnsupportedError,
)
from streamfold.follow.faults import (
    FaultyStream,
    ScriptedStreamFaults,
    SeededStreamFaults,
    StreamCall,
    StreamFault,
    StreamFaultKind,
)
from streamfold.follow.follower import Change, Follower, as_client, follow
from streamfold.follow.memory import MemoryStream
from streamfold.follow.places import auto, external, in_stream
from streamfold.follow.plan import RestorePlan, make_plan
from streamfold.follow.policy import Policy, Since, due
from streamfold.follow.progress import Progress, TerminalBar
from streamfold.follow.reading import Backoff
from streamfold.follow.retention import prune
from streamfold.follow.served import ServedSnapshots
from streamfold.follow.snapshots import Place, SnapshotInfo, Snapshots, SnapshotStore
from streamfold.follow.snapshotter import Keeping, Outcome, Snapshotter, Taken

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
    "ServedSnapshots",
    "Place",
    "Codec",
    "JsonCodec",
    "MsgpackCodec",
    "BytesCodec",
    "Snapshotter",
    "Keeping",
    "Outcome",
    "Taken",
    "Policy",
    "Since",
    "due",
    "prune",
    # streams
    "StreamClient",
    "StreamRecord",
    "Appended",
    "as_client",
    "MemoryStream",
    "FaultyStream",
    "ScriptedStreamFaults",
    "SeededStreamFaults",
    "StreamCall",
    "StreamFault",
    "StreamFaultKind",
    # errors
    "HistoryTrimmedError",
    "SnapshotAheadError",
    "SnapshotCorruptError",
    "SnapshotFoldError",
    "SnapshotOutrunError",
    "SnapshotUnsupportedError",
]
