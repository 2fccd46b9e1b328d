"""One configuration model for file, environment and flags."""

from streamfold.snapshotter.configuration.description import describe
from streamfold.snapshotter.configuration.files import load_configuration, read_file
from streamfold.snapshotter.configuration.model import (
    Configuration,
    DeadLetterSettings,
    DecoderSettings,
    DestinationSettings,
    EventSettings,
    FormatSettings,
    HttpSettings,
    SourceSettings,
    TableSettings,
)
from streamfold.snapshotter.configuration.tables import read_configuration

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
