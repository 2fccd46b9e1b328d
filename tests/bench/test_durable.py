"""The Durable Streams benchmark page names the faster server and the measured versions."""

from __future__ import annotations

import os
from pathlib import Path

from bench.durable import RUST, RUST_COMMAND, standing, version_of
from bench.report import Row, Sample


def row(measure: str, ours: float, rust: float, *, more: bool) -> Row:
    samples = [Sample("Streamfold", [ours]), Sample(RUST, [rust])]
    return Row(measure, "ms", samples, more=more)


def test_the_page_says_how_often_each_server_is_ahead() -> None:
    rows = [
        row("ack", 2.0, 1.0, more=False),
        row("appends", 10.0, 40.0, more=True),
        row("bytes", 1.0, 2.0, more=False),
        row("delivery", 1.0, 1.05, more=False),
    ]
    assert standing(rows) == (
        "Where they differ by more than a tenth, the Rust server is ahead in 2 of 4 measures and "
        "Streamfold in 1."
    )


def test_the_version_is_the_one_that_cargo_installed(tmp_path: Path) -> None:
    server = tmp_path / "bin" / RUST_COMMAND
    server.parent.mkdir()
    server.touch(mode=0o755)
    assert version_of(os.fspath(server)) == "of an unknown version"
    (tmp_path / ".crates.toml").write_text(
        '[v1]\n"durable-streams 0.1.5 (registry+https://github.com/rust-lang/crates.io-index)" = '
        f'["{RUST_COMMAND}"]\n"other 2.0.0 (registry+x)" = ["other"]\n'
    )
    assert version_of(os.fspath(server)) == "durable-streams 0.1.5"
