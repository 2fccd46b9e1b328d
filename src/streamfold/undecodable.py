"""What msgspec raises for bytes that it cannot decode.

Apart from `errors`, which verbs of the command line load that decode nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Errors of its own, and Python's for text that is not UTF-8 and for deep nesting.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
