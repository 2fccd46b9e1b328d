"""Resource files: compared, applied, applied again without effect, and refused if they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Shell


def _spec(basin: str) -> dict[str, Any]:
    """Everything that S2's resource files can say, and what Streamfold adds."""
    return {
        "basins": [
            {
                "name": basin,
                "config": {
                    "default_stream_config": {"retention_policy": "infinite"},
                    "create_stream_on_append": True,
                    "create_stream_on_read": False,
                    "stream_cipher": "aegis-256",
                },
                "streams": [
                    {"name": "plain"},
                    {
                        "name": "special/one ü",
                        "config": {
                            "storage_class": "standard",
                            "retention_policy": "1h 30m",
                            "timestamping": {"mode": "arrival", "uncapped": True},
                            "delete_on_empty": {"min_age": "2d"},
                            "trim_on_snapshot": True,
                        },
                    },
                ],
            }
        ]
    }


def _actions(shell: Shell, *arguments: str) -> list[str]:
    return [one["action"] for one in shell.ok(*arguments, "--json").objects]


def test_a_file_is_compared_applied_and_then_changes_nothing(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "resources.json"
    file.write_text(json.dumps(_spec("applied-basin")))
    assert _actions(shell, "apply", str(file), "--dry-run") == ["create"] * 3
    missing = shell("get-basin-config", "applied-basin")
    assert missing.status == 4, "a dry run must create nothing"
    compared = shell("diff", str(file), "--json")
    assert (compared.status, compared.error["code"]) == (7, "differs")
    assert len(compared.objects) == 3

    assert _actions(shell, "apply", str(file)) == ["create"] * 3
    config = shell.json("get-stream-config", "applied-basin/special/one ü")
    assert config == {
        "storage_class": "standard",
        "retention_policy": 5400,
        "timestamping": {"mode": "arrival", "uncapped": True},
        "delete_on_empty_min_age": 172_800,
    }
    assert shell.json("get-basin-config", "applied-basin")["stream_cipher"] == "aegis-256"
    assert shell.ok("diff", "--file", str(file)).text == ""
    assert _actions(shell, "apply", "-f", str(file)) == ["none"] * 3


def test_what_drifted_is_shown_and_returns_to_what_the_file_says(
    shell: Shell, tmp_path: Path
) -> None:
    content = json.dumps(_spec("drifting-basin")).encode()
    shell.ok("apply", "-", stdin=content)
    shell.ok("create-stream", "drifting-basin/not-in-the-file")
    shell.ok("reconfigure-stream", "drifting-basin/plain", "--retention-policy", "1d")
    compared = shell("diff", "-", stdin=content)
    assert compared.text == (
        "~ stream drifting-basin/plain  would be updated\n    retention_policy: 1d -> infinite\n"
    )
    (changed,) = [
        one for one in shell.ok("apply", "-", "--json", stdin=content).objects if one["changes"]
    ]
    assert changed == {
        "kind": "stream", "name": "drifting-basin/plain", "action": "update", "applied": True,
        "changes": [{"member": "retention_policy", "before": 86400, "after": "infinite"}],
    }  # fmt: skip
    assert shell.json("get-stream-config", "drifting-basin/plain")["retention_policy"] == "infinite"
    assert "not-in-the-file" in shell.ok("ls", "s2://drifting-basin").text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "truncated"),
        (b'{"basins": [{"name": "good-name-1"}, {"name": "short"}]}', "8 to 48"),
        (b'{"basins": [{"name": "good-name-1", "shards": 3}]}', "shards"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_is_changed(
    shell: Shell, content: bytes, complaint: str
) -> None:
    failed = shell("apply", "-", stdin=content)
    assert failed.status == 1
    assert failed.stderr.startswith("error: standard input: ")
    assert complaint in failed.stderr
    assert shell("get-basin-config", "good-name-1").status == 4


def test_a_file_is_needed_and_one_is_enough(shell: Shell) -> None:
    assert shell("apply").status == shell("diff", "a.json", "-f", "b.json").status == 2
    absent = shell("apply", "nothing.json")
    assert "nothing.json cannot be read: No such file" in absent.stderr
