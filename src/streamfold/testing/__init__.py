"""Conformance kits and fault-injecting doubles. Subclass a kit to test your own backend.

Names import lazily, so pytest and hypothesis load only with the kits that need them.
"""

from typing import TYPE_CHECKING

from streamfold.extras import lazy_exports

if TYPE_CHECKING:
    from streamfold.testing.blob_faults import FaultyBlobStore, Operation
    from streamfold.testing.blob_kit import BlobStoreConformance
    from streamfold.testing.change_decoder_kit import ChangeDecoderConformance, Sample
    from streamfold.testing.codec_kit import CodecConformance
    from streamfold.testing.destination_kit import DestinationConformance
    from streamfold.testing.engine_faults import CommitFault, FaultyEngine
    from streamfold.testing.event_faults import FaultyEventSink, SinkCall
    from streamfold.testing.event_sink_kit import EventSinkConformance, SinkProbe
    from streamfold.testing.faults import (
        Fault,
        FaultKind,
        FaultPlan,
        FaultyCall,
        ScriptedFaults,
        SeededFaults,
    )
    from streamfold.testing.format_kit import FormatConformance
    from streamfold.testing.store_machine import StoreMachine
    from streamfold.testing.stream_client_kit import StreamClientConformance
    from streamfold.testing.stream_faults import FaultyStream, StreamCall
    from streamfold.testing.stream_model import StreamModel
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "blob_faults": ("FaultyBlobStore", "Operation"),
            "blob_kit": ("BlobStoreConformance",),
            "change_decoder_kit": ("ChangeDecoderConformance", "Sample"),
            "codec_kit": ("CodecConformance",),
            "destination_kit": ("DestinationConformance",),
            "engine_faults": ("CommitFault", "FaultyEngine"),
            "event_faults": ("FaultyEventSink", "SinkCall"),
            "event_sink_kit": ("EventSinkConformance", "SinkProbe"),
            "faults": (
                "Fault", "FaultKind", "FaultPlan", "FaultyCall", "ScriptedFaults", "SeededFaults",
            ),
            "format_kit": ("FormatConformance",),
            "store_machine": ("StoreMachine",),
            "stream_client_kit": ("StreamClientConformance",),
            "stream_faults": ("FaultyStream", "StreamCall"),
            "stream_model": ("StreamModel",),
        },
    )  # fmt: skip

__all__ = [
    "BlobStoreConformance",
    "ChangeDecoderConformance",
    "CodecConformance",
    "CommitFault",
    "DestinationConformance",
    "EventSinkConformance",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyBlobStore",
    "FaultyCall",
    "FaultyEngine",
    "FaultyEventSink",
    "FaultyStream",
    "FormatConformance",
    "Operation",
    "Sample",
    "ScriptedFaults",
    "SeededFaults",
    "SinkCall",
    "SinkProbe",
    "StoreMachine",
    "StreamCall",
    "StreamClientConformance",
    "StreamModel",
]
