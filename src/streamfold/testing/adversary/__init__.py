"""An adversary outside the process: it drives a real server through both faces, hurts it, and accounts
for every record afterwards.

    python -m streamfold.testing.adversary --seed 7 --rounds 100 --storage s3

Clients (`workload`: `writers`, `readers`, `lifecycle`) note every request and its answer in a `ledger`.
A `campaign` runs rounds of such work, and kills, stops, pauses or replaces the server meanwhile, moves
its clock, and cuts its power. Storage fails too: S3 behind a `proxy`, local disk within the server's
process (`machine`). Then `accounting` reads the whole store through a fresh server, and
`comparison` decides for each stream whether that is what the answers promised. What has no answer may
have happened or not, until a reader has seen it or an accounting has missed it: then it stays so.
`report` prints a broken promise as a script with the steps that concern the affected stream, and
`shrinking` looks for a smaller `program` that breaks it, too.
"""

from streamfold.testing.adversary.accounting import Accountant
from streamfold.testing.adversary.campaign import Campaign
from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger, Totals
from streamfold.testing.adversary.program import Program
from streamfold.testing.adversary.storage import FlakyBucket, LocalFolder, Storage

__all__ = [
    "Accountant",
    "Campaign",
    "FlakyBucket",
    "Ledger",
    "LocalFolder",
    "Program",
    "Storage",
    "Totals",
    "BrokenPromiseError",
]
