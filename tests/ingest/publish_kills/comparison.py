"""Compares an archive with its table, row by row, by two readers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import streamfold.archive
from tests.ingest.publish_kills.published_rules import RuleBrokenError, read_rows

Row = tuple[Any, ...]


def compare(table: str, archive: Path, expected: list[Row]) -> int:
    """Compare the archive with the rows of the database by both readers; returns the differences."""
    library, problems = asyncio.run(read_by_library(archive))
    for problem in problems:
        print(f"{table}: {problem}")
    count = len(problems) + differences(f"{table}, by the library,", library, expected)
    try:
        rules = [tuple(row.values()) for row in read_rows(archive)]
    except RuleBrokenError as error:
        print(f"{table}: {error}")
        return count + 1
    in_lines = [tuple(map(in_json, row)) for row in expected]
    return count + differences(f"{table}, by the published rules,", rules, in_lines)


async def read_by_library(folder: Path) -> tuple[list[Row], list[object]]:
    """Return the rows, and what is wrong with any file or with the table at any re-base."""
    archive = await streamfold.archive.open(folder)
    problems = (await archive.verify(deep=True)).problems
    rows = (await archive.table()).to_pylist()
    return [tuple(row.values()) for row in rows], list(problems)


def in_json(value: object) -> object:
    """Return a value of PostgreSQL as JSON lines have it."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return str(value) if isinstance(value, date | Decimal) else value


def differences(reader: str, actual: Iterable[Row], expected: Iterable[Row]) -> int:
    """Return how many rows are lost, doubled or stale; prints a few of them."""
    more, less = Counter(actual), Counter(expected)
    lost, extra = less - more, more - less
    for word, rows in (("lacks", lost), ("has", extra)):
        for row in list(rows)[:3]:
            print(f"{reader} {word} {str(row)[:400]}")
    return max(lost.total(), extra.total())
