"""A system clock that is wrong, for one server: Python's and that of SlateDB's library.

Python reads the time through two functions, SlateDB through one pointer of its import table. Both get
the time of a machine whose clock is some seconds ahead or behind, from before the server starts. The
monotonic clock is left alone, as it is when a real clock is moved.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm

from streamfold.store.engine import clock_shift, slatedb_clock

_NANOSECONDS = 1_000_000_000
#: `clock_gettime(clock, answer)`: calls the C library and, for the real-time clock, adds the shift.
_SOURCE = """
define i32 @read_clock(i32 %clock, i64* %answer) {{
  %read = inttoptr i64 {address} to i32 (i32, i64*)*
  %status = call i32 %read(i32 %clock, i64* %answer)
  %realtime = icmp eq i32 %clock, 0
  %success = icmp eq i32 %status, 0
  %shifted = and i1 %realtime, %success
  br i1 %shifted, label %shift, label %end
shift:
  %nanos = getelementptr i64, i64* %answer, i64 1
  %old_seconds = load i64, i64* %answer
  %old_nanos = load i64, i64* %nanos
  %whole = mul i64 %old_seconds, 1000000000
  %before = add i64 %whole, %old_nanos
  %now = add i64 %before, {shift}
  %new_seconds = sdiv i64 %now, 1000000000
  %new_nanos = srem i64 %now, 1000000000
  store i64 %new_seconds, i64* %answer
  store i64 %new_nanos, i64* %nanos
  br label %end
end:
  ret i32 %status
}}
"""
#: Compiled clocks; never freed, because threads of SlateDB may still be calling them.
_compiled: list[llvm.ExecutionEngine] = []


def move_clock(seconds: float) -> None:
    """Let everything in this process read a system clock that is `seconds` ahead."""
    shift = round(seconds * _NANOSECONDS)
    read, read_ns = time.time, time.time_ns
    time.time = lambda: read() + seconds
    time.time_ns = lambda: read_ns() + shift
    (slot,) = clock_shift.import_slots(b"clock_gettime")
    slot.set(_compile(shift))

    @contextmanager
    def clock_ahead(milliseconds: int) -> Iterator[None]:
        """As `clock_shift.clock_ahead`, which only starts from the C library's own clock."""
        slot.set(_compile(shift + milliseconds * 1_000_000))
        try:
            yield
        finally:
            slot.set(_compile(shift))

    for module in (clock_shift, slatedb_clock):
        setattr(module, "clock_ahead", clock_ahead)  # noqa: B010 - imported there


def _compile(shift: int) -> int:
    """The address of a clock with that shift (ns)."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    address = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
    module = llvm.parse_assembly(_SOURCE.format(address=address, shift=shift))
    engine = llvm.create_mcjit_compiler(
        module, llvm.Target.from_default_triple().create_target_machine()
    )
    engine.finalize_object()
    _compiled.append(engine)
    return int(engine.get_function_address("read_clock"))
