"""Human-readable durations (`30s`, `1h30m`, `250ms`) and sizes (`32MiB`, `1GB`, `4096`).

Parses and formats both for the command line, configurations and environment variables.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal, getcontext

#: Nanoseconds of each unit of time.
_TIME_UNITS = {
    "ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9,
    "d": 86400 * 10**9, "w": 7 * 86400 * 10**9,
}  # fmt: skip
_TIME_WORDS = {
    "microsecond": "us", "millisecond": "ms", "second": "s", "sec": "s", "minute": "m", "min": "m",
    "hour": "h", "hr": "h", "day": "d", "week": "w",
}  # fmt: skip
_SIZE_UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]+)\s*")
#: Maximum duration: ten years. Anything longer is a mistake.
_LONGEST = timedelta(days=3653)
#: Maximum bytes: 63 bits.
_LARGEST = 2**63 - 1


def parse_duration(text: str) -> timedelta:
    """Parse a duration. Raises ValueError with the rule it breaks. 0 needs no unit."""
    total = _nanoseconds(text) / 1000
    if total != int(total) or total > _LONGEST / timedelta(microseconds=1):
        raise ValueError("must be whole microseconds, and at most ten years")
    return timedelta(microseconds=int(total))


def parse_seconds(text: str) -> int:
    """Parse a duration in whole numbers, of any length, to seconds. Raises ValueError otherwise."""
    total = _nanoseconds(text)
    if "." in text or total % 10**9:
        raise ValueError("must be whole seconds, such as 30s, 5m, 6h or 1d")
    return int(total) // 10**9


def _nanoseconds(text: str) -> Decimal:
    total, end = Decimal(0), 0
    if text.strip() == "0":
        return total
    for part in _PART.finditer(text):
        unit = _time_unit(part[2])
        if part.start() != end or unit is None:
            break
        total, end = total + Decimal(part[1]) * _TIME_UNITS[unit], part.end()
    if not end or end != len(text):
        raise ValueError("must be a time with a unit, such as 250ms, 30s, 5m, 6h or 1d")
    if total.adjusted() >= getcontext().prec:
        raise ValueError("must be shorter")  # the amount is no longer exact
    return total


def _time_unit(word: str) -> str | None:
    if word in _TIME_UNITS:
        return word
    return _TIME_WORDS.get(word.lower().removesuffix("s"))


def parse_size(text: str) -> int:
    """Parse a size to bytes. Raises ValueError with the rule it breaks."""
    plain = text.strip()
    part = _PART.fullmatch(plain)
    if plain.isdecimal() and plain.isascii():
        size = Decimal(plain)
    elif part and (unit := _SIZE_UNITS.get(part[2].lower())):
        size = Decimal(part[1]) * unit
    else:
        raise ValueError("must be a number of bytes, or a size with a unit, such as 32MiB or 1GB")
    if size != int(size) or size > _LARGEST:
        raise ValueError("must be a whole number of bytes below 2^63")
    return int(size)


def duration_text(value: timedelta) -> str:
    """Format a duration in the largest exact unit."""
    nanos = value // timedelta(microseconds=1) * 1000
    if not nanos:
        return "0"
    unit = next(u for u in ("d", "h", "m", "s", "ms", "us") if nanos % _TIME_UNITS[u] == 0)
    return f"{nanos // _TIME_UNITS[unit]}{unit}"


def size_text(value: int) -> str:
    """Format a size in the largest exact binary unit."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{unit}"
    return str(value)


def approximate_size(value: int) -> str:
    """Format a size rounded to the binary unit that leaves one to four digits."""
    number, units = float(value), iter(("KiB", "MiB", "GiB"))
    shown = f"{value} B"
    while number >= 1024 and (unit := next(units, "")):
        number /= 1024
        shown = f"{number:.1f} {unit}"
    return shown
