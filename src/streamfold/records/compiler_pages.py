"""Gives back the memory of the compiler's library once kernels are loaded.

numba loads kernels through LLVM. That touches 70 MiB of its library, of which the kernels use nothing
when they run.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_log = logging.getLogger(__name__)

_LIBRARY: Final = "libllvmlite"
_SMAPS: Final = Path("/proc/self/smaps")
#: The first line of a mapping: its addresses, rights, offset, device, inode and file.
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_SIZE: Final = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


class Mapping(NamedTuple):
    """A part of a file in memory; sizes in bytes."""

    start: int
    size: int
    rights: str
    file: str
    #: What is in memory; of that and of what is swapped out, what differs from the file.
    resident: int
    changed: int

    @property
    def disposable(self) -> bool:
        """Whether all pages are as the file has them, and stay so."""
        return "w" not in self.rights and not self.changed


def release_compiler() -> int:
    """Have the process keep no page of the compiler's library that it can read again; returns bytes.

    The system keeps the pages while it has room: what uses the compiler later finds them there.
    """
    try:
        text = _SMAPS.read_text()
        advise, how = ctypes.CDLL(None, use_errno=True).madvise, mmap.MADV_DONTNEED
    except (OSError, AttributeError):
        return 0  # not Linux: nothing tells which pages are unchanged
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    released = 0
    for mapping in mappings(text):
        if _LIBRARY in Path(mapping.file).name and mapping.disposable:
            if advise(mapping.start, mapping.size, how):
                _log.debug("pages of %s stay: %s", mapping.file, os.strerror(ctypes.get_errno()))
            else:
                released += mapping.resident
    return released


def mappings(smaps: str) -> Iterator[Mapping]:
    """The mappings that Linux lists in `smaps`; one without the needed sizes counts as changed."""
    starts = list(_MAPPING.finditer(smaps))
    ends = [*(found.start() for found in starts[1:]), len(smaps)]
    for found, end in zip(starts, ends, strict=True):
        first, last, rights, file = found.groups()
        start, sizes = int(first, 16), dict(_SIZE.findall(smaps, found.end(), end))
        resident, *changed = (
            int(sizes.get(name, 1)) << 10 for name in ("Rss", "Anonymous", "Swap")
        )
        yield Mapping(start, int(last, 16) - start, rights, file, resident, sum(changed))
