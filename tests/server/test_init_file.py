"""Basins and streams from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamfold.errors import InvalidError
from streamfold.model.configs import BasinReconfiguration, Cipher, TimestampMode
from streamfold.model.resource_spec import read_resource_spec
from streamfold.server.main import running_server
from tests.server.conftest import configuration

SPEC = {
    "basins": [
        {
            "name": "from-a-file",
            "config": {
                "default_stream_config": {"retention_policy": "infinite"},
                "create_stream_on_append": True,
            },
            "streams": [
                {"name": "plain"},
                {
                    "name": "special/one",
                    "config": {
                        "storage_class": "standard",
                        "retention_policy": "1h 30m",
                        "timestamping": {"mode": "arrival", "uncapped": True},
                        "delete_on_empty": {"min_age": "2d"},
                    },
                },
            ],
        },
        {"name": "another-one", "config": {"stream_cipher": "aegis-256"}},
    ]
}


def write(folder: Path, spec: object) -> Path:
    path = folder / "init.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return path


async def test_what_the_file_says_is_there_from_the_start_and_after_drift(tmp_path: Path) -> None:
    settings = configuration(
        init_file=write(tmp_path, SPEC), location=(tmp_path / "store").as_uri()
    )
    async with running_server(settings) as server:
        special = await server.store.stream_config("from-a-file", "special/one")
        assert special.retention == 5400
        assert special.timestamp_mode is TimestampMode.ARRIVAL
        assert special.delete_on_empty_secs == 172_800
        assert (await server.store.stream_config("from-a-file", "plain")).retention == "infinite"
        assert (await server.store.basin_config("another-one")).stream_cipher is Cipher.AEGIS_256
        drift = BasinReconfiguration(create_stream_on_append=False)
        await server.store.reconfigure_basin("from-a-file", drift)
    async with running_server(settings) as server:
        assert (await server.store.basin_config("from-a-file")).create_stream_on_append


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("{", "truncated"),
        ({"basin": []}, "basin"),
        ({"basins": [{"name": "short"}]}, "8 to 48"),
        ({"basins": [{"name": "same-name"}, {"name": "same-name"}]}, "twice"),
        ({"basins": [{"name": "a-basin-", "streams": []}]}, "begin and end"),
        ({"basins": [{"name": "a-basin-1", "streams": [{"name": "s"}, {"name": "s"}]}]}, "twice"),
        ({"basins": [{"name": "a-basin-1", "streams": [{"name": ""}]}]}, "not be empty"),
        (
            {"basins": [{"name": "a-basin-1", "config": {"default_stream_config": {
                "retention_policy": "soon"}}}]},
            "not a duration",
        ),
        (
            {"basins": [{"name": "a-basin-1", "config": {"default_stream_config": {
                "retention_policy": "0s"}}}]},
            "positive",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_the_reason(
    tmp_path: Path, spec: object, complaint: str
) -> None:
    with pytest.raises(InvalidError, match=complaint) as refused:
        read_resource_spec(write(tmp_path, spec), "init file")
    assert "init.json" in refused.value.message


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"nothing\.json cannot be read"):
        read_resource_spec(tmp_path / "nothing.json", "init file")
