"""Release contents, and agreement of tag, version and changelog."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from streamfold import __version__
from tests.packaging.conftest import ROOT, build, run

#: Seconds: the crate is compiled once more, perhaps after another process has done so.
pytestmark = pytest.mark.timeout(1800)

CHECK = ROOT / ".ci/check_release.py"
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def files_of(wheel: Path) -> set[str]:
    with ZipFile(wheel) as files:
        return {name for name in files.namelist() if not name.endswith("/")}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "src").split()
    package = {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    found = files_of(wheel)
    metadata = {name for name in found if ".dist-info/" in name}
    assert found - metadata == package | {"streamfold/_native.abi3.so"}
    assert "streamfold/py.typed" in package
    assert any(name.startswith("streamfold/server/console/static/") for name in package)
    assert any(name.endswith(".proto") for name in package)


def test_the_sdist_has_the_sources_and_builds_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.11.4
        files.extractall(tmp_path / "sources")
    (sources,) = (tmp_path / "sources").iterdir()
    top = {path.name for path in sources.iterdir()}
    assert top == {
        "src", "native", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt",
        "PKG-INFO",
    }  # fmt: skip
    assert not list(sources.rglob("__pycache__"))
    assert files_of(build("wheel", tmp_path / "wheel", sources)) == files_of(wheel)


def test_the_command_line_is_also_a_module() -> None:
    shown = run(sys.executable, "-m", "streamfold", "--version")
    assert shown == f"streamfold, version {__version__}\n"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources whose changelog has the version's section."""
    for name in (
        "pyproject.toml",
        "src/streamfold/__init__.py",
        "native/Cargo.toml",
        "deploy/helm/streamfold/Chart.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## Unreleased\n\n## {__version__}\n### Added\n- Streams.\n\n## 0.0.1\n- Old.\n"
    )
    return tmp_path


def check(sources: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), tag]
    return subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)


def test_a_release_prints_the_section_of_its_version(sources: Path) -> None:
    done = check(sources, f"v{__version__}")
    assert (done.returncode, done.stdout) == (0, "### Added\n- Streams.\n"), done.stderr


@pytest.mark.parametrize("tag", ["v99.0.0", __version__, "main"])
def test_a_tag_that_is_not_the_version_is_refused(sources: Path, tag: str) -> None:
    done = check(sources, tag)
    assert done.returncode == 1
    assert f"tag {tag!r} is not 'v{__version__}'" in done.stderr


def test_a_version_without_its_section_is_refused(sources: Path) -> None:
    (sources / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n- Streams.\n")
    done = check(sources, f"v{__version__}")
    assert done.returncode == 1
    assert f"CHANGELOG.md has no section '## {__version__}'" in done.stderr


def test_a_chart_of_another_version_is_refused(sources: Path) -> None:
    chart = sources / "deploy/helm/streamfold/Chart.yaml"
    chart.write_text(chart.read_text().replace(__version__, "99.0.0"))
    done = check(sources, f"v{__version__}")
    assert done.returncode == 1
    assert "appVersion" in done.stderr


def test_a_crate_of_another_version_is_refused(sources: Path) -> None:
    crate = sources / "native/Cargo.toml"
    crate.write_text(crate.read_text().replace(__version__, "99.0.0", 1))
    done = check(sources, f"v{__version__}")
    assert done.returncode == 1
    assert "version of the crate" in done.stderr


def test_a_release_is_built_and_tested_before_it_is_published() -> None:
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # `on` is a boolean of YAML
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    for job in jobs.values():
        for step in job["steps"]:
            assert "secrets." not in str(step), "publishing is by the identity of the workflow"
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    assert ".ci/check_release.py" in commands
    assert ".ci/run" in commands


def test_every_extra_is_tried_on_the_versions_of_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        line.rpartition(" ")[2]
        for line in project["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
    }
    others = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["python"]
    assert named == {"3.11", *others}  # all tests run on the first
    matrix = WORKFLOW["jobs"]["extras"]["strategy"]["matrix"]
    assert named == set(matrix["python"])
    assert project["optional-dependencies"].keys() == set(matrix["extra"])
