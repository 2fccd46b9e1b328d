"""Private parts of other packages are imported in one module at most."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import streamfold

ALLOWED = {"follow/clients/s2_internals.py"}


# Upstream defect 17.
def test_private_parts_of_the_s2_sdk_are_imported_by_one_module() -> None:
    folder = Path(streamfold.__path__[0])
    importing = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if any(_is_private(name) for name in _imported(ast.parse(path.read_text())))
    }
    assert importing == ALLOWED


def _is_private(name: str) -> bool:
    package, *parts = name.split(".")
    return package == "s2_sdk" and any(part.startswith("_") for part in parts)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
