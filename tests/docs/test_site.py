"""The documentation site builds without warnings and names only existing things."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: Seconds: the build takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning fails it: a link that leads nowhere, a page that no other leads to."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-b", "html", "-d", str(folder / "doctrees"), "docs", str(folder / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert built.stdout + built.stderr == ""
    return folder / "html"


def test_the_generated_reference_has_verbs_settings_errors_metrics_and_routes(site: Path) -> None:
    reference = site / "reference" / "generated"
    for page, text in {
        "commands.html": "create-stream",
        "configuration.html": "snapshot.max_diff_fraction",
        "errors.html": "StreamNotFoundError",
        "metrics.html": "s2_append_ack_latency_seconds",
        "routes.html": "/v1/streams/{stream}/records",
    }.items():
        assert text in (reference / page).read_text(), page


def test_every_page_has_the_style_of_the_site_and_no_empty_copyright(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 60
    for page in pages:
        text = page.read_text()
        assert "_static/site.css" in text, page
        assert "Copyright &#169;" not in text, page


def test_signatures_show_no_parameters_for_tests(site: Path) -> None:
    for page, shown in (("store", "accept_loss"), ("follow", "fold_name")):
        text = (site / "reference" / "python" / f"{page}.html").read_text()
        assert shown in text
        assert not re.search(r"\b(opener|disk_usage|new_id)\b", text)


def test_every_reference_in_an_openapi_file_resolves(site: Path) -> None:
    files = list((ROOT / "docs" / "reference" / "generated").glob("openapi-*.json"))
    assert len(files) == 3, "one for each protocol, and one for operations"
    for file in files:
        described = json.loads(file.read_text())
        known = set(described["components"]["schemas"])
        named = {
            line.split("schemas/")[1].split('"')[0]
            for line in file.read_text().splitlines()
            if '"$ref"' in line
        }
        assert named <= known, file.name
        assert described["paths"], file.name
