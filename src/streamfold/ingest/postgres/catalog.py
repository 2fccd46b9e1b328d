"""Reads tables from PostgreSQL's catalog, and decides whether they can be followed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from streamfold.extras import needing_extra
from streamfold.ingest.errors import SourceUnusableError
from streamfold.ingest.postgres.values import column_type

with needing_extra("postgres"):
    from psycopg2 import sql

#: The oldest version with all features used here: 14.
VERSION_MIN: Final = 140_000
#: The first version that can send stored generated columns.
VERSION_GENERATED: Final = 180_000


class Column(msgspec.Struct, frozen=True):
    """A published column, as noted in the control stream."""

    name: str
    #: Type OID; for a domain, the OID of its base type.
    type_oid: int
    modifier: int
    nullable: bool
    #: The type in PostgreSQL's notation, such as `numeric(12,2)`.
    source_type: str
    #: Whether rows older than the column have a value other than null.
    filled: bool = False
    #: Unique within the table and never reused. 0 in notes of older versions.
    number: int = 0

    @property
    def type(self) -> str:
        return column_type(self.type_oid, self.modifier)


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be followed."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    #: Estimates. -1 before the first ANALYZE.
    rows: int
    size_bytes: int
    #: Changes whenever the table leaves the publication and returns. "" outside a publication.
    published: str = ""
    #: See `table_marks`.
    marks: tuple[str, ...] = ()
    partitioned: bool = False
    #: PostgreSQL's OID, or None if unknown.
    oid: int | None = None

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"

    def declaration(self, *, named: bool = False) -> bytes:
        """Return the body that declares the columns. With `named`, it also names the table."""
        columns = [
            {"name": c.name, "type": c.type, "nullable": c.nullable, "source": c.source_type}
            for c in self.columns
        ]
        name = {"table": self.full_name} if named else {}
        return msgspec.json.encode({"op": "s", **name, "key": self.key, "columns": columns})

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def own_rows(self) -> sql.Composable:
        """The FROM item that excludes inheriting tables, which are also separate tables in the log."""
        return self.identifier if self.partitioned else sql.SQL("ONLY {}").format(self.identifier)


def shape(columns: Iterable[Column]) -> dict[str, tuple[int, int]]:
    """Return the types by column name. They decide how values are represented."""
    return {column.name: (column.type_oid, column.modifier) for column in columns}


def is_extension(old: Mapping[str, object], new: Mapping[str, object], table: Table) -> bool:
    """Return whether columns were only added, with null in older rows."""
    added = new.keys() - old.keys()
    null = {column.name for column in table.columns if not column.filled}
    return added <= null and all(new.get(name) == kind for name, kind in old.items())


def is_replaced(noted: Iterable[Column], numbers: Mapping[str, int]) -> bool:
    """Return whether a new column reuses the name of a dropped or renamed one."""
    return any(c.number and numbers.get(c.name, c.number) != c.number for c in noted)


def column_numbers(cursor: Any, table: str) -> dict[str, int]:
    """Return the column numbers by name, without waiting for a lock on the table."""
    cursor.execute(_NUMBERS, (table,))
    return dict(cursor.fetchall())


def table_marks(cursor: Any, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return, by full name, marks that reveal table changes that PostgreSQL does not log.

    | mark | gone after |
    |---|---|
    | `t` | another table took the name |
    | `k` | the key got other columns |
    | `f` | the table was rewritten: by ALTER TABLE, by VACUUM FULL and CLUSTER, or empty |
    | `x` | a column was altered or added |
    | `e`, one for each label of an enum | the label was renamed |
    | `c`, one for each composite type | its attributes were changed |
    | `p`, one for each partition | it was dropped, detached, emptied or rewritten |
    | `a` | a table that may have had rows was attached as a partition |
    """
    cursor.execute(_MARKS, (list(names),))
    return {name: tuple(marks) for name, marks in cursor.fetchall()}


def is_altered(noted: Iterable[str], marks: Iterable[str]) -> bool:
    """Return whether rows may have changed, appeared or disappeared since the marks were noted."""
    gone = {mark[0] for mark in set(noted).difference(marks)}
    if "k" in gone and not any(mark[0] == "k" for mark in marks):
        gone.remove("k")  # between two statements that replace the key, only inserts can occur
    # VACUUM FULL changes no column, and most column changes leave rows unchanged.
    return bool(gone - {"f", "x"}) or gone == {"f", "x"}


def adopted_marks(noted: Iterable[str], marks: Sequence[str]) -> tuple[str, ...]:
    """Return the marks to note in place of `noted` if the table is not altered.

    Then the loss of a new label or partition is noticed, and VACUUM FULL followed by a column change is
    not mistaken for an alteration. The key's mark is kept while there is no key.
    """
    keys = [] if any(mark[0] == "k" for mark in marks) else [m for m in noted if m[0] == "k"]
    return (*marks, *keys)


def check_server(cursor: Any) -> None:
    """Raise SourceUnusableError unless the server can send changes."""
    version = cursor.connection.server_version
    if version < VERSION_MIN:
        raise SourceUnusableError(
            f"the server has PostgreSQL {version // 10_000}: 14 or newer is needed"
        )
    cursor.execute("SELECT pg_is_in_recovery(), current_setting('wal_level')")
    in_recovery, level = cursor.fetchone()
    if in_recovery:
        raise SourceUnusableError("the server is a replica: connect to the primary")
    if level != "logical":
        raise SourceUnusableError(
            f"wal_level is {level}: run ALTER SYSTEM SET wal_level = logical, and restart PostgreSQL"
        )


def key_values(table: Table, key: Sequence[str]) -> sql.Composable:
    """Return a key, whose values are passed as text, as a row of typed values."""
    types = {column.name: column.source_type for column in table.columns}
    values = (
        sql.SQL("CAST({} AS {})").format(sql.Literal(text), sql.SQL(types[name]))
        for name, text in zip(table.key, key, strict=True)
    )
    return sql.SQL("({})").format(sql.SQL(", ").join(values))


def identifiers(names: Iterable[str]) -> sql.Composable:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def row_query(cursor: Any, table: Table, columns: Sequence[str], key: Sequence[str]) -> str:
    """Return the COPY of columns of the row with a key.

    Its texts equal those of the log. A cast to text would change some types, such as char(n).
    """
    query = sql.SQL("COPY (SELECT {} FROM {} WHERE ({}) = {}) TO STDOUT").format(
        identifiers(columns), table.own_rows, identifiers(table.key), key_values(table, key)
    )
    return str(query.as_string(cursor))


_TABLES = """
SELECT n.nspname, c.relname, c.oid, c.relkind, c.relreplident,
       c.reltuples::bigint, pg_total_relation_size(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%'
ORDER BY 1, 2
"""
_COLUMNS = """
WITH RECURSIVE base AS (
    SELECT a.attnum, a.attname, a.attnotnull, a.attgenerated, a.atttypmod AS typmod,
           a.atthasdef OR a.atthasmissing OR a.attnotnull OR a.attidentity <> '' OR EXISTS (
               SELECT FROM pg_partition_tree(a.attrelid) p JOIN pg_attribute m ON m.attrelid = p.relid
               WHERE m.attname = a.attname AND m.atthasmissing) AS filled,
           format_type(a.atttypid, a.atttypmod) AS shown, t.oid, t.typtype, t.typbasetype, t.typtypmod
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT b.attnum, b.attname, b.attnotnull, b.attgenerated, b.typtypmod, b.filled, b.shown,
           t.oid, t.typtype, t.typbasetype, t.typtypmod
    FROM base b JOIN pg_type t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
)
SELECT attname, oid, typmod, NOT attnotnull, shown, filled, attnum, attgenerated
FROM base WHERE typtype <> 'd' ORDER BY attnum
"""
_NUMBERS = """
SELECT a.attname, a.attnum FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
"""
_MARKS = """
WITH RECURSIVE chosen AS (
    SELECT c.oid, n.nspname || '.' || c.relname AS name, c.relfilenode, c.relkind, c.relreplident
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND n.nspname || '.' || c.relname = ANY (%s)
), types AS (
    SELECT c.oid AS relation, a.atttypid AS type
    FROM chosen c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE a.attnum > 0 AND NOT a.attisdropped
  UNION
    SELECT types.relation, part.type FROM types JOIN pg_type t ON t.oid = types.type
    CROSS JOIN LATERAL (
        SELECT t.typbasetype WHERE t.typbasetype <> 0
      UNION ALL
        SELECT t.typelem WHERE t.typelem <> 0
      UNION ALL
        SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
      UNION ALL
        SELECT a.atttypid FROM pg_attribute a
        WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) part (type)
), parts AS (
    SELECT c.oid AS relation, p.relid, l.relfilenode,
           -- Its row in pg_inherits comes 3 commands after its first columns if it was created as a
           -- partition, and 7 at least, or in a later transaction, if it was attached.
           i.xmin <> a.xmin OR i.cmin::text::bigint > a.cmin::text::bigint + 4 AS attached
    FROM chosen c CROSS JOIN LATERAL pg_partition_tree(c.oid) p
    JOIN pg_class l ON l.oid = p.relid JOIN pg_inherits i ON i.inhrelid = p.relid
    JOIN pg_attribute a ON a.attrelid = p.relid AND a.attname = 'tableoid'
    WHERE p.relid <> c.oid
), marks AS (
    SELECT oid, 't' || oid FROM chosen
  UNION ALL
    SELECT oid, 'f' || relfilenode FROM chosen WHERE relkind = 'r'
  UNION ALL
    SELECT c.oid, 'k' || i.indkey::text || '/' || i.indnkeyatts
    FROM chosen c JOIN pg_index i ON i.indrelid = c.oid
    WHERE CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END
  UNION ALL
    SELECT c.oid, 'x' || md5(string_agg(a.attnum || ':' || a.xmin, ' ' ORDER BY a.attnum))
    FROM chosen c JOIN pg_attribute a ON a.attrelid = c.oid WHERE a.attnum > 0 GROUP BY c.oid
  UNION ALL
    SELECT types.relation, 'e' || e.oid || ' ' || e.enumlabel
    FROM types JOIN pg_enum e ON e.enumtypid = types.type
  UNION ALL
    SELECT types.relation, 'c' || t.oid || ' '
           || string_agg(a.attnum || ':' || a.atttypid, ' ' ORDER BY a.attnum)
    FROM types JOIN pg_type t ON t.oid = types.type JOIN pg_attribute a ON a.attrelid = t.typrelid
    WHERE a.attnum > 0 AND NOT a.attisdropped GROUP BY types.relation, t.oid
  UNION ALL
    SELECT relation, 'p' || relid || ':' || relfilenode FROM parts
  UNION ALL
    SELECT c.oid, 'a' || md5(coalesce(string_agg(p.relid::text, ' ' ORDER BY p.relid), ''))
    FROM chosen c LEFT JOIN parts p ON p.relation = c.oid AND p.attached
    WHERE c.relkind = 'p' GROUP BY c.oid
)
SELECT c.name, array_agg(m.mark) FROM chosen c JOIN marks m (oid, mark) ON m.oid = c.oid
GROUP BY c.name
"""
_KEY = """
SELECT a.attname FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, n)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %s AND i.indimmediate AND {which} ORDER BY k.n
"""
_BARE_PARTITIONS = """
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname)
FROM pg_partition_tree(%s) p JOIN pg_class c ON c.oid = p.relid
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.isleaf AND c.relreplident = 'n'
"""


def find_tables(cursor: Any, patterns: Sequence[str]) -> list[Table]:
    """Return the tables with these names. `*` and `?` match any characters.

    Raises SourceUnusableError if a name matches no table, or a table cannot be followed.
    """
    rows = _rows(cursor)
    chosen: dict[str, Any] = {}
    for pattern in patterns:
        full = pattern if "." in pattern else f"public.{pattern}"
        names = [name for name in rows if fnmatch.fnmatchcase(name, full)]
        if not names:
            raise SourceUnusableError(
                f"no table matches {full!r}: `streamfold ingest tables` lists those there are"
            )
        chosen.update((name, rows[name]) for name in names)
    marks = table_marks(cursor, list(chosen))
    return [
        replace(_table(cursor, name, row), marks=marks.get(name, ()))
        for name, row in chosen.items()
    ]


def _rows(cursor: Any) -> dict[str, Any]:
    """Return tables by full name; None for a name shared by two, as by "a"."b.c" and "a.b"."c"."""
    cursor.execute(_TABLES)
    rows: dict[str, Any] = {}
    for row in cursor.fetchall():
        name = f"{row[0]}.{row[1]}"
        rows[name] = None if name in rows else row
    return rows


def find_table(cursor: Any, name: str) -> Table | None:
    """Return the table with this full name, if there is one."""
    rows = _rows(cursor)
    if name not in rows:
        return None
    return replace(
        _table(cursor, name, rows[name]), marks=table_marks(cursor, [name]).get(name, ())
    )


def describe_tables(cursor: Any) -> Iterable[tuple[str, Table | str]]:
    """Yield every table by name: as it would be followed, or why it cannot be."""
    for name, row in _rows(cursor).items():
        try:
            yield name, _table(cursor, name, row)
        except SourceUnusableError as error:
            yield name, error.message


def _table(cursor: Any, full_name: str, row: Any) -> Table:
    if row is None:
        raise SourceUnusableError(
            f"two tables have the name {full_name}, because names may have dots: rename one of them, "
            "or its schema"
        )
    schema, name, oid, kind, identity, rows, size_bytes = row
    key = _key(cursor, schema, name, oid, identity)
    partitioned = kind == "p"
    if partitioned:
        _check_partitions(cursor, oid)
    cursor.execute(_COLUMNS, (oid,))
    generated = "s" if cursor.connection.server_version >= VERSION_GENERATED else ""
    columns = tuple(Column(*row) for *row, how in cursor.fetchall() if how in ("", generated))
    return Table(schema, name, columns, key, rows, size_bytes, partitioned=partitioned, oid=oid)


def _key(cursor: Any, schema: str, name: str, oid: int, identity: str) -> tuple[str, ...]:
    """Return the columns that identify a row. PostgreSQL must send them with updates and deletes."""
    shown = f"{schema}.{name}"
    quoted = sql.Identifier(schema, name).as_string(cursor)
    if identity == "n":
        raise SourceUnusableError(
            f"table {shown} has replica identity nothing, so updates and deletes do not say which row "
            f"they change: run ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT"
        )
    which = "i.indisreplident" if identity == "i" else "i.indisprimary"
    cursor.execute(_KEY.format(which=which), (oid,))
    key = tuple(column for (column,) in cursor.fetchall())
    if not key:
        raise SourceUnusableError(
            f"table {shown} has no primary key that is not DEFERRABLE, so its rows cannot be told "
            f"apart at any moment: run ALTER TABLE {quoted} ADD PRIMARY KEY (…), or, with a unique "
            "index on columns that are NOT NULL, "
            f"ALTER TABLE {quoted} REPLICA IDENTITY USING INDEX …"
        )
    return key


def _check_partitions(cursor: Any, oid: int) -> None:
    cursor.execute(_BARE_PARTITIONS, (oid,))
    bare = cursor.fetchone()
    if bare is not None:
        raise SourceUnusableError(
            f"partition {bare[0]} has replica identity nothing: run ALTER TABLE {bare[0]} REPLICA "
            "IDENTITY DEFAULT"
        )
