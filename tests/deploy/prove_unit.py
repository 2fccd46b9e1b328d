"""The systemd unit, verified by systemd-analyze. Run by `make prove`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.deploy.test_manifests import UNIT, run


def test_systemd_accepts_the_unit_and_finds_it_well_protected(tmp_path: Path) -> None:
    # The program must exist where it is verified.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/streamfold/bin/streamfold", sys.executable))
    verified = run("systemd-analyze", "verify", "--man=no", str(unit)).stderr
    assert f"{UNIT.name}:" not in verified, verified
    # 10 is exposed, 0 is not; 2.0 is what systemd calls OK at most. The threshold is ten times that.
    run("systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit))
