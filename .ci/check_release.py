"""Refuses to release a tag that is not the version, or whose version has no section in the changelog.

Prints that section, which becomes the notes of the release. Run in the root of the sources:
`python .ci/check_release.py v1.2.3`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main(tag: str) -> str:
    """The notes of the release; raises SystemExit with what does not agree."""
    source = Path("src/streamfold/__init__.py").read_text()
    [version] = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if tag != f"v{version}":
        raise SystemExit(
            f"tag {tag!r} is not 'v{version}': set __version__ of the package, then tag"
        )
    chart = Path("deploy/helm/streamfold/Chart.yaml").read_text()
    if f'appVersion: "{version}"' not in chart:
        raise SystemExit(f"appVersion of the Helm chart is not {version}: set it in Chart.yaml")
    crate = Path("native/Cargo.toml").read_text()
    if f'\nversion = "{version}"' not in crate:
        raise SystemExit(f"version of the crate is not {version}: set it in native/Cargo.toml")
    sections = re.split(r"^## ", Path("CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        title, _, notes = section.partition("\n")
        if title.split(" ")[0] == version and notes.strip():
            return notes.strip()
    raise SystemExit(f"CHANGELOG.md has no section '## {version}': rename '## Unreleased'")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the tag: python .ci/check_release.py v1.2.3")
    print(main(sys.argv[1]))
