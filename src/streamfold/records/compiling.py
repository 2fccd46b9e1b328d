"""Compiles kernels with numba, and keeps them on disk; importing this module needs numba.

Kernels run without the interpreter's lock and allocate nothing, so they need no reference counts: by
default, numba counts every array that one function passes to another, atomically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from numba.extending import is_jitted

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: Final = {"nogil": True, "_nrt": False}
#: Globals of these types are part of the compiled code.
_CONSTANTS: Final = (int, float, str, bytes, tuple, np.generic)


def inner(function: Function) -> Function:
    """Compile as a part of the kernels that call it."""
    return cast("Function", numba.njit(forceinline=True, **_OPTIONS)(function))


def kernel(function: Function) -> Function:
    """Compile at the first call; without a folder for the cache, at the first in each process.

    numba compiles again if the file of the kernel has changed. But the kernel also contains functions
    and constants of other files: their digest is in the name under which it is cached.
    """
    plain = cast("FunctionType", function)
    plain.__qualname__ += f"_{digest(plain)}"
    try:
        return cast("Function", numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:
        return cast("Function", numba.njit(**_OPTIONS)(function))


def digest(function: FunctionType) -> str:
    """Changes with everything that becomes part of the compiled function."""
    found = hashlib.sha256()
    for part in _parts(function, set()):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(function: FunctionType, known: set[str]) -> Iterator[bytes]:
    code = function.__code__
    yield code.co_code
    yield repr(code.co_consts).encode()
    for name in code.co_names:
        value: Any = function.__globals__.get(name)
        if is_jitted(value):
            if (whole_name := f"{value.__module__}.{name}") not in known:
                known.add(whole_name)
                yield from _parts(value.py_func, known)
        elif isinstance(value, np.ndarray):
            yield value.tobytes()
        elif isinstance(value, _CONSTANTS):
            yield f"{name}={value!r}".encode()
