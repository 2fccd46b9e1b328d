"""Manages the publication: the tables and columns that PostgreSQL sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from streamfold.extras import needing_extra
from streamfold.ingest.errors import SourceUnusableError
from streamfold.ingest.postgres.catalog import VERSION_GENERATED, Table, find_table

with needing_extra("postgres"):
    import psycopg2.errors
    from psycopg2 import sql

#: The first version with column lists, row filters and whole schemas.
_VERSION_LISTS: Final = 150_000
_PUBLISHED = """
SELECT t.schemaname || '.' || t.tablename, {lists},
       concat_ws('/', p.oid, coalesce(r.oid::text, ''), p.xmin, {schema})
FROM pg_publication_tables t
JOIN pg_publication p ON p.pubname = t.pubname
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
WHERE t.pubname = %s
"""
_SCHEMA = "(SELECT oid FROM pg_publication_namespace WHERE pnpubid = p.oid AND pnnspid = n.oid)"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table in a publication."""

    #: None if the server does not list them, which means all except generated columns.
    columns: Sequence[str] | None
    row_filter: str | None
    #: Changes whenever the table leaves the publication and returns, or the options change.
    mark: str


def published_tables(cursor: Any, publication: str) -> dict[str, PublishedTable]:
    """Return the publication's tables by full name."""
    newer = cursor.connection.server_version >= _VERSION_LISTS
    lists = "t.attnames::text[], t.rowfilter" if newer else "NULL::text[], NULL::text"
    schema = _SCHEMA if newer else "NULL"
    cursor.execute(_PUBLISHED.format(lists=lists, schema=schema), (publication,))
    return {name: PublishedTable(*row) for name, *row in cursor.fetchall()}


def is_same_mark(noted: str, mark: str) -> bool:
    """Return whether all changes have been published since a mark was noted.

    Notes of older versions have fewer parts.
    """
    parts = noted.split("/")
    return mark.split("/")[: len(parts)] == parts


def as_published(table: Table, published: PublishedTable) -> Table:
    """Return the table with its published columns. Raises if some rows are not published."""
    if published.row_filter is not None:
        raise SourceUnusableError(
            f"the publication sends only rows of {table.full_name} with {published.row_filter}, so "
            "rows that stop to match would stay in the stream: publish the table without WHERE"
        )
    sent = published.columns
    columns = tuple(column for column in table.columns if sent is None or column.name in sent)
    missing = set(table.key) - {column.name for column in columns}
    if missing:
        raise SourceUnusableError(
            f"the publication leaves out {', '.join(sorted(missing))} of the key of "
            f"{table.full_name}: add it to the list of columns"
        )
    return replace(table, columns=columns, published=published.mark)


def find_published(cursor: Any, publication: str, name: str) -> Table | None:
    """Return a table as published, or None if it does not exist or is not published."""
    table, published = find_table(cursor, name), published_tables(cursor, publication).get(name)
    return None if table is None or published is None else as_published(table, published)


def ensure_publication(cursor: Any, publication: str, tables: Sequence[Table]) -> list[Table]:
    """Create the publication if necessary, add missing tables, and return the tables as published.

    Raises SourceUnusableError if it omits changes or rows, or if the role may not change it.
    """
    cursor.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot "
        "FROM pg_publication WHERE pubname = %s",
        (publication,),
    )
    options = cursor.fetchone()
    name = sql.Identifier(publication)
    if options is None:
        _execute_as_owner(cursor, _creation(cursor, name, tables))
    elif options != (True, True):
        raise SourceUnusableError(
            f"publication {publication!r} leaves out changes: run ALTER PUBLICATION "
            f"{name.as_string(cursor)} SET (publish = 'insert, update, delete, truncate', "
            "publish_via_partition_root = true)"
        )
    published = published_tables(cursor, publication)
    added = [table for table in tables if table.full_name not in published]
    for table in added:
        addition = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(name, table.identifier)
        _execute_as_owner(cursor, addition)
    if added:
        published = published_tables(cursor, publication)
    return [as_published(table, published[table.full_name]) for table in tables]


def _creation(cursor: Any, name: sql.Identifier, tables: Sequence[Table]) -> sql.Composable:
    generated = cursor.connection.server_version >= VERSION_GENERATED
    options = ", publish_generated_columns = stored" if generated else ""
    names = sql.SQL(", ").join(table.identifier for table in tables)
    text = "CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true{})"
    return sql.SQL(text).format(name, names, sql.SQL(options))


def _execute_as_owner(cursor: Any, statement: sql.Composable) -> None:
    try:
        cursor.execute(statement)
    except psycopg2.errors.InsufficientPrivilege as error:
        raise SourceUnusableError(
            f"the role may not change the publication ({' '.join(str(error).split())}): let the owner "
            f"of the tables run {statement.as_string(cursor)}"
        ) from error


def drop_publication(cursor: Any, publication: str) -> None:
    cursor.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication)))
