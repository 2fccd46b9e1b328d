"""The durable log: streams of records on object storage, with one writer.

An append is acknowledged once it is durable.
"""

from streamfold.store.append_queues import Submission
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import AppendAck
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import (
    ReadBatch,
    ReadRequest,
    from_seq_num,
    from_tail,
    from_timestamp,
)
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.store.stream_handle import StreamHandle

__all__ = [
    "AppendAck",
    "ReadBatch",
    "ReadRequest",
    "Reader",
    "SealingKey",
    "StoreSettings",
    "StreamHandle",
    "StreamStore",
    "Submission",
    "from_seq_num",
    "from_tail",
    "from_timestamp",
    "open_store",
]
