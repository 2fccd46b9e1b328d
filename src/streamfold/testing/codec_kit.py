"""What every codec of snapshots guarantees, as tests.

    class TestMyCodec(CodecConformance):
        @pytest.fixture
        def codec(self) -> Codec[Any]:
            return MyCodec()

        def states(self) -> list[Any]:
            return [{}, {"a": 1}]    # what the codec must keep; small ones and one of some MiB

Needs pytest: `pip install streamfold[testing]`.
"""

from __future__ import annotations

import re
from typing import Any

from streamfold.extras import needing_extra
from streamfold.follow import Codec

with needing_extra("testing"):
    import pytest

#: Bytes per piece when a state is decoded: one that no writer used.
PIECE = 1009


class CodecConformance:
    """Subclass it in a test module and override the `codec` fixture and `states`."""

    #: Whether bytes that are cut are always noticed; snapshots have a digest besides.
    notices_cuts = True

    @pytest.fixture
    def codec(self) -> Codec[Any]:
        raise NotImplementedError("override the `codec` fixture: return a codec")

    def states(self) -> list[Any]:
        """States that the codec must keep."""
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
    """Return the bytes of a state, whose pieces may be views."""
    return b"".join(bytes(piece) for piece in codec.encode(state))
