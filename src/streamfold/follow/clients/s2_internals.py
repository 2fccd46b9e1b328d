"""The parts of the S2 SDK that it does not promise to keep, and that its public names do not offer.

Only this module imports them: how a request ended, as far as the SDK knows (upstream defect 17), and
the wrapper that makes all failures errors of the SDK.
`pyproject.toml` bounds the version of the SDK for their sake.
"""

from streamfold.extras import needing_extra

with needing_extra("client"):
    from s2_sdk._exceptions import (
        AppendIndefiniteFailureError,
        ConnectError,
        TransportError,
        fallible,
    )
    from s2_sdk._retrier import has_no_side_effects

__all__ = [
    "AppendIndefiniteFailureError",
    "ConnectError",
    "TransportError",
    "fallible",
    "has_no_side_effects",
]
