"""Files that no row names, and when they may be deleted.

Files beside the database (`chunk_files.py`, `snapshots.py`) are written before the rows that name them,
so a commit that fails leaves a file without a row. But so does damage that costs the store its rows, or
a database restored from an older backup. Then the files may be all that is left of acknowledged
records. Neither a look at storage nor the age of a file tells which it was. So the store notes when it
first found a file without a row, and deletes it after a grace of days: until then, somebody can notice,
stop the server and restore the rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final

from streamfold.store import keys, rows
from streamfold.store.engine.engine import Engine, Op
from streamfold.store.rows import LeftoversRow
from streamfold.wording import noun

logger = logging.getLogger(__name__)

_DAY: Final = 86_400.0
#: Files of a kind that are noted at once, which bounds the row; the others are noted after these are
#: deleted, and kept until then.
LEFTOVERS_MAX: Final = 10_000


class Leftovers:
    """The files of one kind that no row names."""

    def __init__(
        self,
        kind: str,
        engine: Engine,
        write: Callable[[list[Op]], Awaitable[None]],
        grace: float,
        now: Callable[[], int],
    ) -> None:
        self._kind = kind
        self._key = keys.leftovers(kind)
        self._engine = engine
        self._write = write
        #: Seconds.
        self._grace = grace
        self._now = now
        #: When to look for such files again, ms since the Unix epoch: at once until a search succeeds.
        self.due_at: float = 0

    async def overdue(self, names: Iterable[str]) -> set[str]:
        """Those of `names`, all files without a row, that may be deleted; the others are noted.

        Reads `LEFTOVERS_MAX` names and one more.
        """
        first = list(islice(names, LEFTOVERS_MAX + 1))
        value, now = await self._engine.get(self._key), self._now()
        noted = rows.decode(value, LeftoversRow).since if value else {}
        since = {name: min(noted.get(name, now), now) for name in first[:LEFTOVERS_MAX]}
        if since != noted:
            row = rows.encode(LeftoversRow(since)) if since else None
            await self._write([(self._key, row)])
        grace = self._grace * 1000
        kept = [at for at in since.values() if now < at + grace]
        self.due_at = min(kept, default=math.inf) + grace
        if kept:
            logger.info(
                "no row names %d %s %s: kept until %.1f days after they were found",
                len(kept),
                self._kind,
                noun(len(kept), "file"),
                self._grace / _DAY,
            )
        if deleted := [name for name, at in since.items() if now >= at + grace]:
            logger.info("deleting %d %s files that no row names", len(deleted), self._kind)
            if len(first) > LEFTOVERS_MAX:
                self.due_at = now
        return set(deleted)
