"""Parses schemas as people write them: `id BIGINT NOT NULL, name STRING, price DECIMAL(12,2)`.

Names of types are those of Spark SQL, with the usual synonyms. Case does not matter; names with other
characters are put into backticks or double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
#: Nested types; the archive's limit, which is below Python's own.
_DEPTH_MAX = 16

_TOKEN = re.compile(r'\s*(?:([A-Za-z_]\w*|\d+)|`((?:[^`]|``)+)`|"((?:[^"]|"")+)"|([(),<>:]))')


def parse_ddl(text: str, key_fields: Sequence[str] = ()) -> TableSchema:
    """Parse the schema; InvalidError shows where it is not understood."""
    reader = _Reader(text)
    fields = [reader.column(0)]
    while reader.takes(","):
        fields.append(reader.column(0))
    reader.end()
    return TableSchema.of(fields, key_fields)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        #: (text, is it a plain word, end offset)
        self._tokens = list(_tokens(text))
        self._next = 0

    def column(self, depth: int, colon: bool = False) -> pa.Field:
        name = self._name()
        if colon:
            self.takes(":")
        kind = self._type(depth)
        required = self.takes("NOT") and self._expect("NULL")
        return pa.field(name, kind, nullable=not required)

    def _type(self, depth: int) -> pa.DataType:
        if depth > _DEPTH_MAX:
            raise InvalidError(f"types are nested more than {_DEPTH_MAX} deep: flatten the column")
        word = self._word().upper()
        if word in ("DECIMAL", "NUMERIC", "DEC"):
            return self._decimal()
        if word == "ARRAY":
            self._expect("<")
            item = self._type(depth + 1)
            self._expect(">")
            return pa.list_(item)
        if word == "MAP":
            return self._map(depth)
        if word == "STRUCT":
            return self._struct(depth)
        if word not in _PLAIN:
            raise self._refusal(
                f"{word} is not a type: use {', '.join([*_PLAIN, 'DECIMAL', 'ARRAY'])}, MAP, STRUCT"
            )
        if word in ("VARCHAR", "CHAR") and self.takes("("):
            self._number()
            self._expect(")")
        return _PLAIN[word]

    def _decimal(self) -> pa.DataType:
        precision, scale = _DECIMAL_DEFAULT
        if self.takes("("):
            precision, scale = self._number(), 0
            if self.takes(","):
                scale = self._number()
            self._expect(")")
        if not (1 <= precision <= _DIGITS_256 and scale <= precision):
            raise self._refusal(f"DECIMAL({precision},{scale}) is not possible")
        make = pa.decimal128 if precision <= _DIGITS_128 else pa.decimal256
        return make(precision, scale)

    def _map(self, depth: int) -> pa.DataType:
        self._expect("<")
        key = self._type(depth + 1)
        self._expect(",")
        value = self._type(depth + 1)
        self._expect(">")
        return pa.map_(key, value)

    def _struct(self, depth: int) -> pa.DataType:
        self._expect("<")
        fields = [self.column(depth + 1, colon=True)]
        while self.takes(","):
            fields.append(self.column(depth + 1, colon=True))
        self._expect(">")
        return pa.struct(fields)

    def takes(self, what: str) -> bool:
        """Skip `what` if it comes next, and return whether it did."""
        if self._next < len(self._tokens) and self._tokens[self._next][:2] == (what, True):
            self._next += 1
            return True
        if what.isalpha() and self._peek().upper() == what:
            self._next += 1
            return True
        return False

    def end(self) -> None:
        if self._next < len(self._tokens):
            raise self._refusal("expected a comma or the end")

    def _peek(self) -> str:
        plain = self._next < len(self._tokens) and self._tokens[self._next][1]
        return self._tokens[self._next][0] if plain else ""

    def _expect(self, what: str) -> bool:
        if not self.takes(what):
            raise self._refusal(f"expected {what}")
        return True

    def _word(self) -> str:
        word = self._peek()
        if not word.isidentifier():
            raise self._refusal("expected a type")
        self._next += 1
        return word

    def _number(self) -> int:
        word = self._peek()
        if not word.isdecimal() or len(word) > len(str(_DIGITS_256)) + 8:
            raise self._refusal("expected a whole number")
        self._next += 1
        return int(word)

    def _name(self) -> str:
        if self._next >= len(self._tokens) or not (
            not self._tokens[self._next][1] or self._peek().isidentifier()
        ):
            raise self._refusal("expected the name of a column")
        self._next += 1
        return self._tokens[self._next - 1][0]

    def _refusal(self, rule: str) -> InvalidError:
        end = self._tokens[self._next - 1][2] if self._next else 0
        return InvalidError(f"schema, after {self._text[:end]!r}: {rule}")


def _tokens(text: str) -> list[tuple[str, bool, int]]:
    found, offset = [], 0
    text = text.rstrip()
    while offset < len(text):
        match = _TOKEN.match(text, offset)
        if match is None:
            raise InvalidError(
                f"schema, after {text[:offset]!r}: {text[offset:].strip()[:1]!r} has no meaning here; "
                "put unusual names into backticks"
            )
        word, ticked, quoted, sign = match.groups()
        if ticked or quoted:
            found.append(
                ((ticked or quoted).replace("``", "`").replace('""', '"'), False, match.end())
            )
        else:
            found.append((word or sign, True, match.end()))
        offset = match.end()
    return found
