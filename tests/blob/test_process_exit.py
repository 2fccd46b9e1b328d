"""Processes end cleanly while native threads are inside Python."""

from __future__ import annotations

import subprocess
import sys

#: `_thread` starts threads as native code does: `threading` does not know them, and the interpreter
#: does not wait for them.
_PROGRAM = """
import _thread, time
import streamfold.blob.process_exit

running = _thread.allocate_lock()
running.acquire()

def call_back():
    running.release()
    time.sleep(0.3)
    print("returned", flush=True)

_thread.start_new_thread(call_back, ())
running.acquire()
"""


# Upstream defect 1.
def test_a_process_ends_after_the_callbacks_of_native_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "returned\n"), done.stderr
