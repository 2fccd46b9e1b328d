"""Content types: which of them are equal, and what a stream's type says about its records."""

from __future__ import annotations

import re
from typing import Final

from streamfold.errors import InvalidError

#: Of a stream whose creation named no type, or none that can be read.
DEFAULT_CONTENT_TYPE: Final = "application/octet-stream"
JSON: Final = "application/json"

#: Characters: a type is kept with its stream and sent with every read.
CONTENT_TYPE_MAX: Final = 256

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - RFC 9110's word for a name
_CONTENT_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}[ \t]*(?:;[ \t\x21-\x7e]*)?")


def normalise_content_type(text: str) -> str:
    """The media type in lower case, without parameters: types that agree in it are the same."""
    return text.partition(";")[0].strip(" \t").lower()


def is_json(content_type: str) -> bool:
    """Whether records are JSON messages."""
    return normalise_content_type(content_type) == JSON


def is_text(content_type: str) -> bool:
    """Whether records go into server-sent events as they are, instead of in base64."""
    return is_json(content_type) or normalise_content_type(content_type).startswith("text/")


def parse_stream_type(value: str | None) -> str | None:
    """The type that a new stream is to have, as it was written; None where none was given.

    A malformed one is replaced by the default, as the protocol's servers do, and so every type that
    is kept can be sent in a header.
    """
    if value is None:
        return None
    text = value.strip(" \t")
    if len(text) > CONTENT_TYPE_MAX:
        raise InvalidError(
            f"content-type has {len(text)} characters: give at most {CONTENT_TYPE_MAX}"
        )
    return text if _CONTENT_TYPE.fullmatch(text) else DEFAULT_CONTENT_TYPE
