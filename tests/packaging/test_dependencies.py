"""Licences of dependencies are checked, and an audit that learned nothing never passes for one."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest

from tests.packaging.conftest import ROOT


@pytest.fixture(scope="module")
def dependencies() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / ".ci/dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runtime_dependencies_are_those_of_all_extras_but_no_test_tool(
    dependencies: ModuleType,
) -> None:
    packages = dependencies.runtime_packages()
    assert {"obstore", "uvloop", "pyspark", "py4j", "h2"} <= packages.keys()
    assert not {"streamfold", "pytest", "hypothesis", "ruff", "sphinx", "moto"} & packages.keys()


def test_what_integrations_need_is_no_dependency_of_the_package(dependencies: ModuleType) -> None:
    further = dependencies.runtime_packages(integrations=True).keys()
    further -= dependencies.runtime_packages().keys()
    assert {"langgraph-checkpoint", "langchain-core"} <= further
    assert not {"langgraph", "langgraph-checkpoint-sqlite"} & further


def test_licences_of_all_runtime_dependencies_are_allowed(
    dependencies: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dependencies.check_licences() == 0
    assert "0 not allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", True),
        ("Apache Software License; MIT License", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT License; Other/Proprietary License", False),
        ("AGPL-3.0", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_every_part_of_a_licence_must_be_allowed(
    dependencies: ModuleType, licence: str, allowed: bool
) -> None:
    assert dependencies.is_allowed(licence) is allowed


def report(*entries: dict[str, Any]) -> str:
    return json.dumps({"dependencies": entries, "fixes": []})


AUDITED = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found"}


def test_an_advisory_fails_the_audit(
    dependencies: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dependencies.judge(report(AUDITED), "") == 0
    assert dependencies.judge(report(AUDITED, VULNERABLE, SKIPPED), "") == 1
    assert "b 2: PYSEC-1, fixed in 3" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [report(AUDITED, SKIPPED), report(SKIPPED), "", "no network"])
def test_an_audit_without_an_answer_is_none(dependencies: ModuleType, answer: str) -> None:
    with pytest.raises(dependencies.NotAuditedError):
        dependencies.judge(answer, "Failed to resolve the host")
