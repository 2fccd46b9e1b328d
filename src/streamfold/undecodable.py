"""The exceptions that msgspec raises for undecodable bytes.

Separate from `errors`, which commands that decode nothing also load.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: msgspec's own, and Python's for invalid UTF-8 and deep nesting.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
