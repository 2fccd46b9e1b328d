"""Properties of the native codec on many more inputs than `cargo test` tries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.proving import PROVING

MANIFEST = Path(__file__).parents[2] / "native" / "Cargo.toml"


def test_the_codec_keeps_its_properties_on_any_bytes() -> None:
    cases = 300_000 if PROVING else 256
    subprocess.run(
        ["cargo", "test", "--release", "--locked", "--manifest-path", MANIFEST, "properties"],
        env={**os.environ, "PROPTEST_CASES": str(cases)},
        check=True,
    )
