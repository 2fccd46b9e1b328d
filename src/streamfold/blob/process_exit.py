"""Waits for native threads to leave Python before the interpreter shuts down, so no exit aborts.

obstore finishes a request in a thread of its Rust runtime, which calls the event loop's
`call_soon_threadsafe`. That call wakes the loop and only then returns. On a busy machine, the main
thread may meanwhile take the result, finish the program and shut the interpreter down. Up to Python
3.13, when the native thread then asks for the interpreter's lock again, `pthread_exit` ends it, but
cannot unwind the Rust frames below it: SIGABRT, status 134, after the program has done all its
work. SlateDB's callbacks do the same (upstream defect 1).

Importing this module registers an exit step that runs just before that point. It waits until Python
code runs only in threads that Python started. Once a request is answered, its thread never enters
Python again, so nothing can follow the wait.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time

#: Seconds after which the exit proceeds anyway. A callback takes microseconds, or a few hundred
#: milliseconds on an overloaded machine. Another library's thread may never return.
LONGEST_WAIT = 5.0
#: Seconds between checks. Sleeping releases the GIL, which the native thread waits for.
PAUSE = 0.001


def wait_for_native_threads() -> None:
    """Wait until no native thread runs Python code, for at most `LONGEST_WAIT` seconds."""
    deadline = time.monotonic() + LONGEST_WAIT
    while _native_threads_in_python() and time.monotonic() < deadline:
        time.sleep(PAUSE)


def _native_threads_in_python() -> set[int]:
    """Return the ids of threads that run Python code but were not started by `threading`."""
    started = {thread.ident for thread in threading.enumerate()}
    return {ident for ident in sys._current_frames() if ident not in started}


atexit.register(wait_for_native_threads)
