"""npm `@durable-streams/server-conformance-tests`, as published: all of it, nothing left out.

The store is on local disk and syncs every commit; the suite has its own time limits.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interop.serving import serving

FOLDER = Path(__file__).parent / "durable"
#: Tests in version 0.3.6 of the suite.
TESTS_MIN = 338

pytestmark = pytest.mark.timeout(600)


@pytest.mark.usefixtures("durable_packages")
def test_every_test_of_the_protocol_passes_on_local_disk_with_fsync(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--local-root", str(tmp_path / "store"), "--long-poll", "3", "--no-access-log"]
    options.append("--local-webhooks")
    with serving("--host", "127.0.0.1", *options) as exports:
        done = subprocess.run(
            ["npx", "vitest", "run", "--reporter=json", f"--outputFile={report}"],
            cwd=FOLDER,
            env=os.environ | {"STREAMFOLD_URL": exports["S2_ACCOUNT_ENDPOINT"]},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert _not_passed(found) == []
    assert (found["numFailedTests"], found["numPendingTests"], found["numTodoTests"]) == (0, 0, 0)
    assert found["numPassedTests"] >= TESTS_MIN


def _not_passed(report: dict[str, Any]) -> list[str]:
    """Names and first words of what did not pass."""
    return [
        f"{test['fullName']}: {test['status']} {''.join(test['failureMessages'])[:300]}"
        for file in report["testResults"]
        for test in file["assertionResults"]
        if test["status"] != "passed"
    ]
