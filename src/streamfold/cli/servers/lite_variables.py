"""Variables of S2's own server: those that `serve` reads, and replacements for the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from streamfold.errors import InvalidError

FLUSH_INTERVAL = "SL8_FLUSH_INTERVAL"
_PREFIXES = ("SL8_", "S2LITE_")
#: Those that are read, each with the option that it sets.
_FOLLOWED = frozenset((FLUSH_INTERVAL, "S2LITE_INIT_FILE"))
#: The options closest to settings of SlateDB.
_OPTIONS = {
    "SL8_MAX_UNFLUSHED_BYTES": "--append-inflight-bytes",
    "SL8_OBJECT_STORE_MAX_RETRIES": "--commit-timeout",
}
#: Seconds.
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def flush_interval(environment: Mapping[str, str]) -> float | None:
    """Return the variable's seconds between flushes; None if it is not set."""
    text = environment.get(FLUSH_INTERVAL, "").strip()
    if not text:
        return None
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]+)", text)
    if "".join(number + unit for number, unit in parts) != re.sub(r"\s", "", text) or any(
        unit not in _UNITS for _, unit in parts
    ):
        raise InvalidError(
            f"{FLUSH_INTERVAL} {text!r} is not a duration: write it like 10ms, or unset it and "
            "give --commit-interval"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def unused(environment: Mapping[str, str], options: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each variable without effect; `options` are those of `serve`."""
    known = frozenset(options)
    for name in sorted(environment):
        if not name.startswith(_PREFIXES) or name in _FOLLOWED:
            continue
        option = _OPTIONS.get(name, f"--{name.partition('_')[2].lower().replace('_', '-')}")
        if option in known:
            yield f"{name} is not used: give {option} instead"
        else:
            yield f"{name} is not used, and no option replaces it: see 'streamfold serve --help'"
