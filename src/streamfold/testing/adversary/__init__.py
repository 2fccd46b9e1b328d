"""Attacks a real server from outside its process through both faces, and accounts for every record.

    python -m streamfold.testing.adversary --seed 7 --rounds 100 --storage s3

Clients (`workload`: `writers`, `readers`, `lifecycle`) record every request and its answer in a
`ledger`. A `campaign` runs rounds of such work. Meanwhile it kills, stops, pauses or replaces the
server, moves its clock, and cuts its power. Storage fails too: S3 behind a `proxy`, local disk
within the server's process (`machine`). Then `accounting` reads the whole store through a fresh
server, and `comparison` decides for each stream whether the content is what the answers promised.
An unanswered request may or may not have taken effect, until a reader has seen its effect or an
accounting has missed it. After that, it must stay so. `report` prints a broken promise as a script
with the steps that concern the affected stream, and `shrinking` looks for a smaller `program` that
also breaks it.
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
