"""What `streamfold doctor` checks: each finding says what was seen, and how to correct it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from uuid import uuid4

from streamfold.cli.contexts import config_path, readable_by_others
from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.target import Target, tls_advice
from streamfold.errors import StreamfoldError
from streamfold.wording import reason_of

#: Seconds that a server may take to answer.
_TIMEOUT: Final = 10.0
#: Seconds between the clocks of two machines: beyond the first, timestamps of records look wrong;
#: beyond the second, S3 refuses requests.
_SKEW_NOTED, _SKEW_MAX = 5.0, 900.0
#: Syncs that are measured, and bytes written before each: what one small append costs.
_SYNCS, _SYNC_BYTES = 50, 4096
#: Seconds: no device is as fast as the first; above the second, every append is slow.
_SYNC_MIN, _SYNC_SLOW = 5e-6, 0.05
#: File systems that lose all at a restart, and those whose syncs and renames depend on a server.
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})
#: A package of each extra.
_EXTRAS: Final = {
    "server": ("granian", "streamfold serve"),
    "client": ("s2_sdk", "the verbs that talk to a server"),
    "archive": ("pyarrow", "tables published as files"),
    "duckdb": ("duckdb", "archive sql, and exports to DuckDB"),
    "delta": ("deltalake", "tables that readers of Delta Lake read"),
    "iceberg": ("pyiceberg", "exports to Iceberg"),
    "aws": ("boto3", "profiles and roles of AWS, and its events"),
    "spark": ("pyspark", "the snapshotter"),
    "postgres": ("psycopg2", "tables of PostgreSQL as streams"),
    "fast": ("numba", "compiled kernels: a faster server"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    #: ok, warning, failure, or skipped: not needed here.
    status: str
    message: str
    fix: str | None = None


def check_config_file() -> Finding:
    """Look at who can read the tokens in the configuration file."""
    path = config_path()
    if not path.exists():
        fix = "`streamfold config set endpoint URL` makes one"
        return Finding("config", "skipped", f"there is no file {path}", fix)
    if readable_by_others(path):
        message = f"other users of this machine can read {path}, and the tokens in it"
        return Finding("config", "warning", message, f"run chmod 600 {path}")
    return Finding("config", "ok", f"{path}, for its owner alone")


def check_server(target: Target | VerbFailedError) -> Iterator[Finding]:
    """Send one request; find out about the address, the token and the clock."""
    if isinstance(target, VerbFailedError):
        missing = "no server is named by an option, a variable or a context"
        yield Finding("endpoint", "skipped", missing, target.message)
        return
    import httpx

    from streamfold.http_client import build_request, cause_of, open_transport

    headers = {"authorization": f"Bearer {target.token}"} if target.token else {}
    try:
        origin = httpx.URL(target.account)
        with open_transport(origin) as transport:
            request = build_request("GET", origin, "/v1/basins?limit=1", headers, timeout=_TIMEOUT)
            sent = time.time()
            response = transport.handle_request(request)
            response.read()
            answered = time.time()
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        cause = reason_of(cause_of(error))
        yield Finding(
            "endpoint",
            "failure",
            f"{target.account} ({target.endpoint_from}) does not answer: {cause}",
            tls_advice(target.account, cause)
            or "start it with `streamfold serve`, or correct the address "
            "(`streamfold config set endpoint URL`)",
        )
        return
    took = f"{(answered - sent) * 1000:.0f} ms"
    yield from _check_answer(target, response.status_code, took)
    yield _check_clock(response.headers.get("date"), sent, answered)


def _check_answer(target: Target, status: int, took: str) -> Iterator[Finding]:
    reached = f"{target.account} ({target.endpoint_from})"
    if status in (200, 401, 403):
        yield Finding("endpoint", "ok", f"{reached} answers in {took}")
    elif status >= 500:
        fix = "look at the server's log, and at /ready and /metrics of the server"
        yield Finding("endpoint", "failure", f"{reached} answers with status {status}", fix)
        return
    else:
        fix = "give the address of a server with the S2 API, without a path"
        yield Finding("endpoint", "failure", f"{reached} answers {status} to /v1/basins", fix)
        return
    given = f"the token ({target.token_from})" if target.token else "a request without a token"
    if status == 401:
        fix = "set one that the server knows: `streamfold config set access_token -`"
        yield Finding("token", "failure", f"the server does not accept {given}", fix)
    elif status == 403:
        message = f"the server accepts {given}, but the token may not list basins"
        fix = "give it `--op-group-perms account=r` if it should"
        yield Finding("token", "warning", message, fix)
    else:
        yield Finding("token", "ok", f"the server accepts {given}")


def _check_clock(date: str | None, sent: float, answered: float) -> Finding:
    """Compare with the server's `Date`, which has whole seconds."""
    if date is None:
        return Finding("clock", "skipped", "the server does not say what time it is")
    try:
        there = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return Finding("clock", "skipped", f"the server's date {date[:40]!r} is not one")
    skew = max(there - answered, sent - (there + 1), 0.0)
    here = datetime.fromtimestamp(answered, UTC).isoformat(timespec="seconds")
    if skew < _SKEW_NOTED:
        return Finding("clock", "ok", f"{here}, within {_SKEW_NOTED:.0f} s of the server's")
    status = "failure" if skew > _SKEW_MAX else "warning"
    message = f"this machine and the server differ by {skew:.0f} s (here it is {here})"
    return Finding("clock", status, message, "synchronise both clocks by NTP")


def check_disk(folder: Path) -> Finding:
    """Write and sync small files where a server would keep its records."""
    while not folder.exists():  # a server creates it; it will be on the disk of its parent
        folder = folder.absolute().parent
    try:
        kind = _file_system(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".streamfold-doctor-") as file:
            times = [_sync_once(file.fileno()) for _ in range(_SYNCS)]
    except OSError as error:
        fix = "give this user the right to write there, or another --local-root"
        return Finding("disk", "failure", f"{folder}: {error.strerror}", fix)
    median = sorted(times)[_SYNCS // 2]
    shown = f"{folder} ({kind}) syncs {_SYNC_BYTES} bytes in {median * 1000:.2f} ms (median)"
    if kind in _VOLATILE:
        fix = "keep records in a folder on a disk"
        return Finding("disk", "warning", f"{shown}, and loses them at a restart", fix)
    if kind in _REMOTE:
        fix = "use a local disk, or --bucket for object storage"
        return Finding("disk", "warning", f"{shown}, by another machine", fix)
    if median < _SYNC_MIN:
        message, fix = f"{shown}: no device is that quick", "find out what ignores fsync here"
        return Finding("disk", "warning", message, fix)
    if median > _SYNC_SLOW:
        return Finding("disk", "warning", f"{shown}: every ack waits for it", "use a quicker disk")
    return Finding("disk", "ok", shown)


def _sync_once(descriptor: int) -> float:
    os.write(descriptor, os.urandom(_SYNC_BYTES))
    began = time.perf_counter()
    os.fsync(descriptor)
    return time.perf_counter() - began


def _file_system(folder: Path) -> str:
    """Return the type of the mounted file system that holds a folder, as Linux names it."""
    best, kind = Path(), "unknown"
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, found, *_ = line.split()
        mounted = Path(point.encode().decode("unicode_escape"))
        if folder.resolve().is_relative_to(mounted) and len(mounted.parts) >= len(best.parts):
            best, kind = mounted, found
    return kind


def check_bucket(bucket: str, path: str) -> Finding:
    """Write an object under a new name by conditional writes, then delete it."""
    url = f"s3://{bucket}/{path}".rstrip("/")
    try:
        return asyncio.run(_check_conditions(url))
    except StreamfoldError as error:
        fix = "see docs/reference/cli.md, Storage on S3"
        return Finding("bucket", "failure", f"{url}: {error.message}", fix)


async def _check_conditions(url: str) -> Finding:
    from streamfold.blob.blob_store import BlobChangedError
    from streamfold.blob.destinations import open_blob_store
    from streamfold.errors import BlobExistsError

    store, key = open_blob_store(url), f"streamfold-doctor-{uuid4()}"
    fix = (
        "use storage with conditional writes (If-None-Match, If-Match): without them, two writers "
    )
    fix += "could overwrite each other"
    first = await store.put_if_absent(key, b"first")
    try:
        try:
            await store.put_if_absent(key, b"second")
        except BlobExistsError:
            pass
        else:
            message = f"{url} replaced an object that If-None-Match should keep"
            return Finding("bucket", "failure", message, fix)
        await store.put_if_match(key, b"third", first)
        try:
            await store.put_if_match(key, b"fourth", first)
        except BlobChangedError:
            return Finding("bucket", "ok", f"{url} honours conditional writes")
        message = f"{url} replaced an object although its etag had changed"
        return Finding("bucket", "failure", message, fix)
    finally:
        await store.delete(key)


def check_extras() -> Iterator[Finding]:
    """Look for the packages of each extra, and for the Java of Spark."""
    for extra, (package, purpose) in _EXTRAS.items():
        if find_spec(package) is None:
            fix = f"pip install 'streamfold[{extra}]'"
            yield Finding(f"extra {extra}", "skipped", f"not installed: {purpose}", fix)
        else:
            yield Finding(f"extra {extra}", "ok", f"installed: {purpose}")
    if find_spec("pyspark") is not None:
        yield _check_java()


def _check_java() -> Finding:
    from streamfold.spark.errors import JavaMissingError
    from streamfold.spark.java import find_java

    try:
        return Finding("java", "ok", str(find_java(os.environ)))
    except JavaMissingError as error:
        return Finding("java", "failure", error.message, "pip install 'streamfold[spark]'")
