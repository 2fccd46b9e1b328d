"""`streamfold doctor`: one line for everything that must work, with its fix."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output
from streamfold.cli.setup import checks
from streamfold.cli.setup.checks import Finding
from streamfold.cli.target import JSON_OPTION, TARGET_OPTIONS, Target, find_target
from streamfold.cli.terminal import inert, styled

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
    """Check everything that must work, and say how to correct what does not.

    Looks at the server's address, the token, the clock, the disk's syncs, conditional writes of S3,
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
    yield checks.check_config_file()
    yield from checks.check_server(target)
    yield checks.check_disk(local_root or Path(tempfile.gettempdir()))
    if bucket is None:
        fix = "give --bucket NAME to test one"
        yield Finding("bucket", "skipped", "no bucket is named", fix)
    else:
        yield checks.check_bucket(bucket, path)
    yield from checks.check_extras()


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
