"""Conformance tests for snapshot codecs.

    class TestMyCodec(CodecConformance):
        @pytest.fixture
        def codec(self) -> Codec[Any]:
            return MyCodec()

        def states(self) -> list[Any]:
            return [{}, {"a": 1}]    # must round-trip; include one of several MiB

Needs pytest: `pip install streamfold[testing]`.
"""

from __future__ import annotations

import re
from typing import Any

from streamfold.extras import needing_extra
from streamfold.follow import Codec

with needing_extra("testing"):
    import pytest

#: Bytes per piece passed to `decode`. Matches no writer's piece size.
PIECE = 1009


class CodecConformance:
    """Conformance suite. Subclass it and override the `codec` fixture and `states`."""

    #: Whether the codec always detects truncation. Snapshots also carry a digest.
    notices_cuts = True

    @pytest.fixture
    def codec(self) -> Codec[Any]:
        raise NotImplementedError("override the `codec` fixture: return a codec")

    def states(self) -> list[Any]:
        """Return states that must round-trip unchanged."""
        return [
            {},
            [],
            "ü",
            {"a": [1, 2.5, None, True], "b": {}},
            {str(n): n for n in range(200_000)},
        ]

    def test_its_name_fits_into_keys_and_content_types(self, codec: Codec[Any]) -> None:
        assert re.fullmatch(r"[a-z0-9_-]+", codec.name)

    def test_a_state_survives_being_cut_anywhere(self, codec: Codec[Any]) -> None:
        for state in self.states():
            data = encoded(codec, state)
            pieces = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
            assert codec.decode(pieces) == state

    def test_one_codec_encodes_many_states(self, codec: Codec[Any]) -> None:
        for state in self.states():
            assert encoded(codec, state) == encoded(codec, state)

    def test_cut_bytes_are_refused(self, codec: Codec[Any]) -> None:
        for state in self.states() if self.notices_cuts else ():
            data = encoded(codec, state)
            for end in {0, len(data) // 2, len(data) - 1}:
                with pytest.raises(Exception):  # noqa: B017, PT011 - any error means "cannot use it"
                    codec.decode(iter([data[:end]]))


def encoded(codec: Codec[Any], state: Any) -> bytes:
    """Return the encoded state as one `bytes`. The codec's pieces may be memory views."""
    return b"".join(bytes(piece) for piece in codec.encode(state))
