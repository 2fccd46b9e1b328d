"""Whether tests run as a long proof: `make prove` sets STREAMFOLD_PROVE to a fresh seed."""

from __future__ import annotations

import os

_SEED = os.environ.get("STREAMFOLD_PROVE")
PROVING = bool(_SEED)


def seeds(count: int, proving: int) -> range:
    """Return the same `count` seeds every time, or `proving` fresh ones for a long proof."""
    if not _SEED:
        return range(count)
    return range(int(_SEED), int(_SEED) + proving)
