"""Decoders by the kinds that configurations name."""

from __future__ import annotations

from typing import Any

from streamfold.extensions import Registry
from streamfold.snapshotter.decoding.decoder import DecoderType

_DECODING = "streamfold.snapshotter.decoding"

#: Every kind of decoder that a configuration may name.
DECODERS: Registry[DecoderType[Any]] = Registry(
    "streamfold.decoders",
    "change decoder",
    DecoderType,
    {
        "envelope": f"{_DECODING}.envelope:ENVELOPE",
        "debezium": f"{_DECODING}.debezium:DEBEZIUM",
        "upserts": f"{_DECODING}.upserts:UPSERTS",
    },
)
