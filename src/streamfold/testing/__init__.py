"""Conformance kits and fault-injecting doubles: subclass a kit to test a backend of your own.

A name is imported at its first use, so pytest and hypothesis load only with the kits that need them.
"""

from typing import TYPE_CHECKING

from streamfold.extras import lazy_exports

if TYPE_CHECKING:
    from streamfold.testing.blob_faults import (
        Fault,
        FaultKind,
        FaultPlan,
        FaultyBlobStore,
        Operation,
        ScriptedFaults,
        SeededFaults,
    )
    from streamfold.testing.blob_kit import BlobStoreConformance
    from streamfold.testing.change_decoder_kit import ChangeDecoderConformance, Sample
    from streamfold.testing.codec_kit import CodecConformance
    from streamfold.testing.destination_kit import DestinationConformance
    from streamfold.testing.engine_faults import CommitFault, FaultyEngine
    from streamfold.testing.event_faults import (
        EventFault,
        EventFaultPlan,
        FaultyEventSink,
        ScriptedEventFaults,
        SeededEventFaults,
    )
    from streamfold.testing.event_sink_kit import EventSinkConformance, SinkProbe
    from streamfold.testing.format_kit import FormatConformance
    from streamfold.testing.store_machine import StoreMachine
    from streamfold.testing.stream_client_kit import StreamClientConformance
    from streamfold.testing.stream_faults import (
        FaultyStream,
        ScriptedStreamFaults,
        SeededStreamFaults,
        StreamCall,
        StreamFault,
        StreamFaultKind,
        StreamFaultPlan,
    )
    from streamfold.testing.stream_model import StreamModel
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "BlobStoreConformance": "blob_kit",
            "ChangeDecoderConformance": "change_decoder_kit",
            "Sample": "change_decoder_kit",
            "CodecConformance": "codec_kit",
            "DestinationConformance": "destination_kit",
            "EventSinkConformance": "event_sink_kit",
            "SinkProbe": "event_sink_kit",
            "FormatConformance": "format_kit",
            "StoreMachine": "store_machine",
            "StreamClientConformance": "stream_client_kit",
            "StreamModel": "stream_model",
            "Fault": "blob_faults",
            "FaultKind": "blob_faults",
            "FaultPlan": "blob_faults",
            "FaultyBlobStore": "blob_faults",
            "Operation": "blob_faults",
            "ScriptedFaults": "blob_faults",
            "SeededFaults": "blob_faults",
            "CommitFault": "engine_faults",
            "FaultyEngine": "engine_faults",
            "EventFault": "event_faults",
            "EventFaultPlan": "event_faults",
            "FaultyEventSink": "event_faults",
            "ScriptedEventFaults": "event_faults",
            "SeededEventFaults": "event_faults",
            "FaultyStream": "stream_faults",
            "ScriptedStreamFaults": "stream_faults",
            "SeededStreamFaults": "stream_faults",
            "StreamCall": "stream_faults",
            "StreamFault": "stream_faults",
            "StreamFaultKind": "stream_faults",
            "StreamFaultPlan": "stream_faults",
        },
    )

__all__ = [
    "BlobStoreConformance",
    "ChangeDecoderConformance",
    "Sample",
    "CodecConformance",
    "DestinationConformance",
    "EventSinkConformance",
    "SinkProbe",
    "FormatConformance",
    "StoreMachine",
    "StreamClientConformance",
    "StreamModel",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyBlobStore",
    "Operation",
    "ScriptedFaults",
    "SeededFaults",
    "CommitFault",
    "FaultyEngine",
    "EventFault",
    "EventFaultPlan",
    "FaultyEventSink",
    "ScriptedEventFaults",
    "SeededEventFaults",
    "FaultyStream",
    "ScriptedStreamFaults",
    "SeededStreamFaults",
    "StreamCall",
    "StreamFault",
    "StreamFaultKind",
    "StreamFaultPlan",
]
