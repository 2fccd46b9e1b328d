"""The snapshot writer's command line, as far as it goes without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Shell


@pytest.fixture(scope="module")
def shell() -> Shell:
    """A shell that knows of no server."""
    return Shell({})


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A file with two problems."""
    file = tmp_path / "writer.toml"
    file.write_text(
        """
        [[tables]]
        source = { server = "localhost:8080", table = "orders" }
        destinations = [{ type = "local", path = "/tmp/archive" }]
        difff = { interval = "5s" }
        snapshot = { max_diff_fraction = 1.5 }
        """
    )
    return file


@pytest.mark.parametrize("verb", ["validate", "run"])
def test_problems_of_a_configuration_are_listed_one_per_line(
    shell: Shell, wrong: Path, verb: str
) -> None:
    outcome = shell("snapshotter", verb, "--config", str(wrong))
    assert outcome.status == 1
    assert outcome.stderr.splitlines() == [
        "tables[0].snapshot.max_diff_fraction: 1.5 must be between 0 and 1",
        "tables[0].difff: is not known; did you mean diff?",
        f"error: {wrong} has 2 problems, which are listed above: correct it",
    ]


def test_problems_of_a_configuration_are_one_json_line_for_scripts(
    shell: Shell, wrong: Path
) -> None:
    outcome = shell("snapshotter", "validate", "--config", str(wrong), "--json")
    assert outcome.error["code"] == "configuration_invalid"
    assert len(outcome.error["message"].splitlines()) == 2
