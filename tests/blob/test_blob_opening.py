from __future__ import annotations

from pathlib import Path

import pytest

from streamfold.archive import Destination
from streamfold.blob import (
    LocalBlobStore,
    ObstoreBlobStore,
    RequestLimits,
    location_url,
    open_blob_store,
)
from streamfold.errors import InvalidError
from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store
from streamfold.testing.blob_kit import keys_of
from tests.s3 import S3Server


@pytest.fixture(autouse=True)
def no_aws_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


async def test_two_memory_stores_share_nothing() -> None:
    one, two = open_blob_store("memory:"), open_blob_store("memory:")
    await one.put("blob", b"x")
    assert await keys_of(two) == []


async def test_a_file_url_names_a_folder_with_any_characters(tmp_path: Path) -> None:
    folder = tmp_path / "with space & ü"
    store = open_blob_store(folder.as_uri())
    assert isinstance(store, LocalBlobStore)
    await store.put("a/b", b"x")
    assert (folder / "a" / "b").read_bytes() == b"x"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
async def test_s3_takes_endpoint_and_credentials_from_the_environment(
    s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    environment = s3_server.environment()
    environment[variable] = environment.pop("AWS_ENDPOINT_URL_S3")
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    store = open_blob_store(s3_url)
    await store.put("blob", b"x")
    assert await store.get("blob") == b"x"


# Upstream defect 14.
def test_an_endpoint_that_the_environment_would_override_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere:1")
    with pytest.raises(InvalidError, match="AWS_ENDPOINT_URL_S3"):
        open_blob_store("s3://bucket", endpoint="http://here:1")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/prefix", {"skip_signature": "true"}),
        ("az://container/prefix", {"account_name": "someone", "skip_signature": "true"}),
    ],
)
def test_other_services_open_without_contact(url: str, options: dict[str, str]) -> None:
    assert isinstance(open_blob_store(url, **options), ObstoreBlobStore)


@pytest.mark.parametrize(
    "url",
    ["", "bucket", "ftp://x", "file:relative", "file://host/folder", "s3://", "s3://b?x=y"],
)
def test_urls_that_name_no_store_are_refused(url: str) -> None:
    with pytest.raises(InvalidError, match="blob store"):
        open_blob_store(url)


def test_refusals_do_not_repeat_secrets() -> None:
    with pytest.raises(InvalidError) as in_url:
        open_blob_store("s3://user:hunter2@bucket")
    with pytest.raises(InvalidError) as in_option:
        open_blob_store("s3://bucket", secret_access_key="hunter2", no_such_option="hunter2")
    for caught in (in_url, in_option):
        assert "hunter2" not in str(caught.value)
    assert "no_such_option" in str(in_option.value)


@pytest.mark.parametrize("name", ["attempts", "request_timeout"])
@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf"])
def test_limits_out_of_range_are_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidError, match=name):
        open_blob_store("s3://bucket", **{name: text})


def test_pauses_double_up_to_the_longest() -> None:
    limits = RequestLimits(attempts=6, first_pause=0.5, longest_pause=3.0)
    for pause, longest in zip(limits.pauses(), [0.5, 1.0, 2.0, 3.0, 3.0], strict=True):
        assert longest / 2 <= pause <= longest
    assert list(RequestLimits(attempts=1).pauses()) == []


def test_options_for_a_store_that_has_none_are_refused() -> None:
    with pytest.raises(InvalidError, match="takes no options"):
        open_blob_store("memory:", region="us-east-1")


def test_a_location_is_a_url_or_the_path_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert location_url("data/a b") == (tmp_path / "data/a b").as_uri()
    assert location_url(tmp_path / "data") == (tmp_path / "data").as_uri()
    assert location_url("~/data") == (tmp_path / "home/data").as_uri()
    for url in ("memory:", "file:///data", "s3://bucket/prefix"):
        assert location_url(url) == url


async def test_tables_and_stores_open_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Destination.open("tables/users").uri == f"{(tmp_path / 'tables/users').as_uri()}/"
    for path in ("data", tmp_path / "data"):
        async with open_store(path, StoreSettings(fsync=False)):
            assert (tmp_path / "data").is_dir()
