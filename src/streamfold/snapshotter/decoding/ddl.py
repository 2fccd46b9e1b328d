"""Parses schemas as people write them: `id BIGINT NOT NULL, name STRING, price DECIMAL(12,2)`.

Types are those of Spark SQL with the usual synonyms, in any case. Unusual names need backticks or
double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError

_PLAIN: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(), "BOOL": pa.bool_(),
    "TINYINT": pa.int8(), "BYTE": pa.int8(),
    "SMALLINT": pa.int16(), "SHORT": pa.int16(),
    "INT": pa.int32(), "INTEGER": pa.int32(),
    "BIGINT": pa.int64(), "LONG": pa.int64(),
    "FLOAT": pa.float32(), "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(), "TEXT": pa.string(), "VARCHAR": pa.string(), "CHAR": pa.string(),
    "BINARY": pa.binary(), "BYTEA": pa.binary(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "TIMESTAMP": pa.timestamp("us", "UTC"), "TIMESTAMP_LTZ": pa.timestamp("us", "UTC"),
    "TIMESTAMPTZ": pa.timestamp("us", "UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}  # fmt: skip
#: Precision and scale of a DECIMAL without them, as in Spark.
_DECIMAL_DEFAULT = (10, 0)
#: Digits that 128 and 256 bits hold.
_DIGITS_128, _DIGITS_256 = 38, 76
#: Characters of a number.
_NUMBER_MAX = 10
#: Nested types: the archive's limit, which is below Python's.
_DEPTH_MAX = 16

_TOKEN = re.compile(r'\s*(?:([A-Za-z_]\w*|\d+|[(),<>:])|`((?:[^`]|``)+)`|"((?:[^"]|"")+)")')


class _Token(NamedTuple):
    text: str
    #: Whether it is a name in backticks or quotes.
    is_quoted: bool
    #: Where it ends in the schema.
    end: int


_END = _Token("", False, -1)


def parse_ddl(text: str, key_fields: Sequence[str] = ()) -> TableSchema:
    """Parse the schema; InvalidError shows where parsing failed."""
    reader = _Reader(text)
    fields = reader.columns(0)
    if reader.next is not _END:
        raise reader.refusal("expected a comma or the end")
    return TableSchema.of(fields, key_fields)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._read = 0

    @property
    def next(self) -> _Token:
        return self._tokens[self._read] if self._read < len(self._tokens) else _END

    def columns(self, depth: int) -> list[pa.Field]:
        """Read columns; a nested one may have a colon between name and type."""
        fields = [self._column(depth)]
        while self._takes(","):
            fields.append(self._column(depth))
        return fields

    def _column(self, depth: int) -> pa.Field:
        name = self.next
        if not (name.is_quoted or name.text.isidentifier()):
            raise self.refusal("expected the name of a column")
        self._read += 1
        if depth:
            self._takes(":")
        kind = self._type(depth)
        required = self._takes("NOT")
        if required:
            self._expect("NULL")
        return pa.field(name.text, kind, nullable=not required)

    def _type(self, depth: int) -> pa.DataType:
        if depth > _DEPTH_MAX:
            raise InvalidError(f"types are nested more than {_DEPTH_MAX} deep: flatten the column")
        if self.next.is_quoted or not self.next.text.isidentifier():
            raise self.refusal("expected a type")
        word, self._read = self.next.text.upper(), self._read + 1
        match word:
            case "DECIMAL" | "NUMERIC" | "DEC":
                return self._decimal()
            case "ARRAY":
                [item] = self._types(depth, 1)
                return pa.list_(item)
            case "MAP":
                return pa.map_(*self._types(depth, 2))
            case "STRUCT":
                self._expect("<")
                fields = self.columns(depth + 1)
                self._expect(">")
                return pa.struct(fields)
        if word not in _PLAIN:
            names = ", ".join([*_PLAIN, "DECIMAL", "ARRAY"])
            raise self.refusal(f"{word} is not a type: use {names}, MAP, STRUCT")
        if word in ("VARCHAR", "CHAR") and self._takes("("):
            self._number()
            self._expect(")")
        return _PLAIN[word]

    def _types(self, depth: int, count: int) -> list[pa.DataType]:
        """Read so many types in angle brackets."""
        self._expect("<")
        types = [self._type(depth + 1)]
        while len(types) < count:
            self._expect(",")
            types.append(self._type(depth + 1))
        self._expect(">")
        return types

    def _decimal(self) -> pa.DataType:
        precision, scale = _DECIMAL_DEFAULT
        if self._takes("("):
            precision, scale = self._number(), 0
            if self._takes(","):
                scale = self._number()
            self._expect(")")
        if not (1 <= precision <= _DIGITS_256 and scale <= precision):
            raise self.refusal(f"DECIMAL({precision},{scale}) is not possible")
        make = pa.decimal128 if precision <= _DIGITS_128 else pa.decimal256
        return make(precision, scale)

    def _takes(self, word: str) -> bool:
        """Skip a word or sign if it comes next, and return whether it did."""
        matches = not self.next.is_quoted and self.next.text.upper() == word
        self._read += matches
        return matches

    def _expect(self, word: str) -> None:
        if not self._takes(word):
            raise self.refusal(f"expected {word}")

    def _number(self) -> int:
        word = self.next
        if word.is_quoted or not word.text.isdecimal() or len(word.text) > _NUMBER_MAX:
            raise self.refusal("expected a whole number")
        self._read += 1
        return int(word.text)

    def refusal(self, rule: str) -> InvalidError:
        end = self._tokens[self._read - 1].end if self._read else 0
        return InvalidError(f"schema, after {self._text[:end]!r}: {rule}")


def _tokens(text: str) -> list[_Token]:
    tokens, offset, text = [], 0, text.rstrip()
    while offset < len(text):
        match = _TOKEN.match(text, offset)
        if match is None:
            raise InvalidError(
                f"schema, after {text[:offset]!r}: {text[offset:].strip()[:1]!r} has no meaning here; "
                "put unusual names into backticks"
            )
        plain, ticked, quoted = match.groups()
        name = ticked.replace("``", "`") if ticked else (quoted or "").replace('""', '"')
        tokens.append(_Token(plain or name, plain is None, match.end()))
        offset = match.end()
    return tokens
