"""Public class names exist once, and variables are named by what they hold."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import streamfold

_SOURCES = Path(streamfold.__path__[0])

#: Names that say how a value was got, and not what it is.
_VAGUE = frozenset(("found", "given", "held", "kept", "known", "taken", "wanted"))


def test_a_public_class_name_exists_once() -> None:
    defined = Counter(name for tree in _trees().values() for name in _public_classes(tree))
    too_many = {name: _files_of(name) for name, count in defined.items() if count > 1}
    assert not too_many, "rename all but one, by the noun that a reader of its package looks for"


def test_variables_are_named_by_what_they_hold() -> None:
    lines = [
        f"{file}:{line} {name}"
        for file, tree in _trees().items()
        for line, name in _bound_names(tree)
        if name.lstrip("_") in _VAGUE
    ]
    assert not lines, "name them by the thing, such as manifest, rows, request, limit"


def test_every_way_to_bind_a_name_counts() -> None:
    source = """
class Found:
    held: int
    def known(self, given, *, wanted=1):
        self.kept = [taken for taken in given]
        with open(given) as found, lambda _held: None:
            pass
match 1:
    case {**found}:
        pass
"""
    names = [name for _, name in _bound_names(ast.parse(source)) if name.lstrip("_") in _VAGUE]
    assert sorted(names) == [
        "_held", "found", "found", "given", "held", "kept", "known", "taken", "wanted",
    ]  # fmt: skip


@cache
def _trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(_SOURCES).as_posix(): ast.parse(path.read_text())
        for path in sorted(_SOURCES.rglob("*.py"))
    }


def _public_classes(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def _files_of(name: str) -> list[str]:
    return [file for file, tree in _trees().items() if name in _public_classes(tree)]


def _bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable, parameter, attribute and function that is bound."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.MatchMapping(rest=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
