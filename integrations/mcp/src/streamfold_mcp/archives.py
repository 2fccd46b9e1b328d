"""Tools for archives, limited to those named at server start."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from streamfold_mcp.shapes import RESULT_BYTES, Shape
from streamfold_mcp.streams import explained

Rows = Annotated[int, Field(ge=1, le=1000)]
#: DuckDB's limits in bytes: the server runs beside an assistant, on somebody's own machine.
_MEMORY, _SPILLED = 256 << 20, 2 << 30


class ArchiveTools:
    """Tools that read tables published as files."""

    def __init__(self, archives: Mapping[str, str]) -> None:
        self._archives = archives

    async def list_archives(self) -> Shape:
        """List the archives that `archive_sql` can query, each with the name of its table."""
        from streamfold import archive as archives

        found = []
        for name, uri in self._archives.items():
            async with explained():
                manifest = (await archives.open(uri)).manifest
            found.append({"name": name, "table": manifest.table})
        return {"archives": found}

    async def archive_sql(
        self,
        archive: str,
        statement: str,
        position: str | None = None,
        time: datetime | None = None,
        limit: Rows = 100,
    ) -> Shape:
        """Run one SELECT of DuckDB's SQL over an archive's table: now, at a position, or at a time.

        The statement can read nothing but the table, which `list_archives` names, and cannot write.
        """
        uri = self._archives.get(archive)
        if uri is None:
            known = ", ".join(map(repr, self._archives))
            raise ToolError(f"not_found: archive {archive!r} is unknown, there are {known}")
        async with explained():
            return await _query(uri, statement, position, time, limit)


async def _query(
    uri: str, statement: str, position: str | None, time: datetime | None, limit: int
) -> Shape:
    from streamfold import archive as archives
    from streamfold.archive.engines.sql import open_sql

    rows: list[Any] = []
    used, more = 0, False
    archive = await archives.open(uri)
    async with open_sql(
        archive, position=position, time=time, memory=_MEMORY, spilled=_SPILLED
    ) as session:
        async for batch in session.run(statement):
            columns = batch.schema.names
            for row in batch.to_pylist():
                values = msgspec.to_builtins(list(row.values()), enc_hook=str)
                size = len(msgspec.json.encode(values))
                if size > RESULT_BYTES:
                    raise ToolError(
                        f"too_large: row {len(rows)} has {size:,} bytes, and a result at most "
                        f"{RESULT_BYTES:,}; select fewer columns, or a part of a long one"
                    )
                used += size
                more = len(rows) == limit or used > RESULT_BYTES
                if more:
                    break
                rows.append(values)
            if more:
                break
        return {"position": session.position, "columns": columns, "rows": rows, "has_more": more}
