"""`streamfold doctor`: prints one line for each thing that must work, with a fix if it does not."""

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

import click

from streamfold.cli.contexts import config_path, readable_by_others
from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output
from streamfold.cli.target import JSON_OPTION, TARGET_OPTIONS, Target, find_target, tls_advice
from streamfold.cli.terminal import inert, styled
from streamfold.errors import StreamfoldError
from streamfold.wording import reason_of

#: Seconds for a server to respond.
_TIMEOUT: Final = 10.0
#: Seconds between the clocks of two machines. Beyond the first, record timestamps look wrong;
#: beyond the second, S3 rejects requests.
_SKEW_NOTED, _SKEW_MAX = 5.0, 900.0
#: Number of measured syncs, and bytes written before each, to find the cost of a small append.
_SYNCS, _SYNC_BYTES = 50, 4096
#: Seconds: no device is faster than the first, and above the second every append is slow.
_SYNC_MIN, _SYNC_SLOW = 5e-6, 0.05
#: File systems that lose everything at a restart, and those whose syncs and renames depend on a
#: server.
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})
#: One package of each extra.
_EXTRAS: Final = {
    "server": ("uvloop", "streamfold serve"),
    "client": ("s2_sdk", "the commands that talk to a server"),
    "archive": ("pyarrow", "tables published as files"),
    "duckdb": ("duckdb", "archive sql, and exports to DuckDB"),
    "delta": ("deltalake", "tables that readers of Delta Lake read"),
    "iceberg": ("pyiceberg", "exports to Iceberg"),
    "aws": ("boto3", "profiles and roles of AWS, and its events"),
    "spark": ("pyspark", "the snapshotter"),
    "postgres": ("psycopg2", "tables of PostgreSQL as streams"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    #: One of ok, warning, failure and skipped (not needed here).
    status: str
    message: str
    fix: str | None = None


def check_config_file() -> Finding:
    """Check who can read the tokens in the configuration file."""
    path = config_path()
    if not path.exists():
        fix = "`streamfold config set endpoint URL` makes one"
        return Finding("config", "skipped", f"there is no file {path}", fix)
    if readable_by_others(path):
        message = f"other users of this machine can read {path}, and the tokens in it"
        return Finding("config", "warning", message, f"run chmod 600 {path}")
    return Finding("config", "ok", f"{path}, for its owner alone")


def check_server(target: Target | VerbFailedError) -> Iterator[Finding]:
    """Send one request to check the address, the token and the clock."""
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
    sent = f"the token ({target.token_from})" if target.token else "a request without a token"
    if status == 401:
        fix = "set one that the server knows: `streamfold config set access_token -`"
        yield Finding("token", "failure", f"the server does not accept {sent}", fix)
    elif status == 403:
        message = f"the server accepts {sent}, but the token may not list basins"
        fix = "give it `--op-group-perms account=r` if it should"
        yield Finding("token", "warning", message, fix)
    else:
        yield Finding("token", "ok", f"the server accepts {sent}")


def _check_clock(date: str | None, sent: float, answered: float) -> Finding:
    """Compare the clock with the server's `Date`, which has whole seconds."""
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
    """Write and sync small files where a server would store its records."""
    while not folder.exists():  # a server creates it on the disk of its parent
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
    """Return the type of the file system that contains a folder, as Linux names it."""
    best, kind = Path(), "unknown"
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, file_system, *_ = line.split()
        mounted = Path(point.encode().decode("unicode_escape"))
        if folder.resolve().is_relative_to(mounted) and len(mounted.parts) >= len(best.parts):
            best, kind = mounted, file_system
    return kind


def check_bucket(bucket: str, path: str) -> Finding:
    """Create an object under a new name with conditional writes, then delete it."""
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
    """Check the packages of each extra, and Java for Spark."""
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


_MARKS = {"ok": "OK", "warning": "WARNING", "failure": "FAILURE", "skipped": "-"}
_MEANINGS = {"ok": "ok", "warning": "warning", "failure": "failure", "skipped": "faint"}


@click.command()
@click.option(
    "--local-root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of a server's records, to measure its disk.  [default: a temporary folder]",
)
@click.option("--bucket", help="S3 bucket of a server's records, to test its conditional writes.")
@click.option("--path", default="", help="Prefix within the bucket.")
def doctor(
    local_root: Path | None,
    bucket: str | None,
    path: str,
    endpoint: str | None,
    token_file: Path | None,
    context: str | None,
    as_json: bool,
) -> None:
    """Check that everything works, and explain how to fix what does not.

    Checks the server's address, the token, the clock, disk syncs, conditional writes of S3,
    installed extras and Java. The bucket is written to: one small object, which is deleted.
    """
    output = Output(as_json=as_json)
    failures = 0
    for finding in _findings(_target(endpoint, token_file, context), local_root, bucket, path):
        _show(output, finding)
        failures += finding.status == "failure"
    if failures:
        raise VerbFailedError(
            "checks_failed",
            f"{failures} of the checks failed: correct what the lines above name, then repeat this",
            ExitStatus.FAILURE,
        )


doctor.params.extend((*TARGET_OPTIONS, JSON_OPTION))


def _target(
    endpoint: str | None, token_file: Path | None, context: str | None
) -> Target | VerbFailedError:
    try:
        return find_target(endpoint, token_file, context)
    except VerbFailedError as error:
        if error.reason != "endpoint_missing":
            raise
        return error


def _findings(
    target: Target | VerbFailedError, local_root: Path | None, bucket: str | None, path: str
) -> Iterator[Finding]:
    yield check_config_file()
    yield from check_server(target)
    yield check_disk(local_root or Path(tempfile.gettempdir()))
    if bucket is None:
        fix = "give --bucket NAME to test one"
        yield Finding("bucket", "skipped", "no bucket is named", fix)
    else:
        yield check_bucket(bucket, path)
    yield from check_extras()


def _show(output: Output, finding: Finding) -> None:
    shape = {
        "check": finding.check,
        "status": finding.status,
        "message": finding.message,
        "fix": finding.fix,
    }
    mark = styled(f"{_MARKS[finding.status]:<7}", _MEANINGS[finding.status])
    text = f"{mark}  {finding.check:<14}  {inert(finding.message)}"
    if finding.fix and finding.status != "ok":
        text += f"\n{'':<25}{styled('→ ' + inert(finding.fix), 'faint')}"
    output.show(shape, text)
