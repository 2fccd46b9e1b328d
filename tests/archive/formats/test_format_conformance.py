from __future__ import annotations

import pytest

from streamfold.archive.formats import (
    FileCompression,
    Format,
    JsonlFormat,
    ParquetFormat,
    ProtobufFormat,
    TypedProtobufFormat,
)
from streamfold.testing.format_kit import FormatConformance


class TestJsonl(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return JsonlFormat()


class TestJsonlGzip(FormatConformance):
    checksummed = True
    knows_its_end = True

    @pytest.fixture
    def format(self) -> Format:
        return JsonlFormat(FileCompression.GZIP)


class TestJsonlZstd(FormatConformance):
    checksummed = True
    knows_its_end = True

    @pytest.fixture
    def format(self) -> Format:
        return JsonlFormat(FileCompression.ZSTD)


class TestProtobuf(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return ProtobufFormat()


class TestTypedProtobuf(FormatConformance):
    checksummed = True
    knows_its_end = True

    @pytest.fixture
    def format(self) -> Format:
        return TypedProtobufFormat()


class TestParquet(FormatConformance):
    checksummed = True
    knows_its_end = True

    @pytest.fixture
    def format(self) -> Format:
        return ParquetFormat()
