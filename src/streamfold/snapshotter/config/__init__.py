"""One configuration model for file, environment and flags."""

from streamfold.snapshotter.config.files import load_configuration, read_file
from streamfold.snapshotter.config.model import (
    Configuration,
    DeadLetterSettings,
    DecoderSettings,
    DestinationSettings,
    EventSettings,
    FormatSettings,
    HttpSettings,
    SourceSettings,
    TableSettings,
    describe,
)
from streamfold.snapshotter.config.tables import read_configuration

__all__ = [
    "Configuration",
    "load_configuration",
    "read_configuration",
    "read_file",
    "describe",
    "TableSettings",
    "SourceSettings",
    "DestinationSettings",
    "FormatSettings",
    "EventSettings",
    "DecoderSettings",
    "DeadLetterSettings",
    "HttpSettings",
]
