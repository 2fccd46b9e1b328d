"""A mutation: one guarantee, the lines that break it, and the check that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: What pytest says of a test that failed, rather than could not run.
FAILED = r"(?m)^FAILED \S+::\w+.*"
#: Stands for the folder with the sources under test among the arguments of a check.
SOURCES = "{sources}"


class StaleMutationError(Exception):
    """The sources no longer have the text that a mutation replaces."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces text that occurs exactly once in a file below `src/streamfold`."""

    file: str
    old: str
    new: str

    def path(self, sources: Path) -> Path:
        return sources / "streamfold" / self.file

    def apply(self, text: str) -> str:
        """The changed text; StaleMutationError unless `old` occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise StaleMutationError(
                f"{self.file} has this text {count} times, not once: {self.old!r}; adapt the mutation "
                "to what the file says now"
            )
        return text.replace(self.old, self.new)


def change(file: str, old: str, new: str) -> tuple[Edit]:
    """A single edit."""
    return (Edit(file, old, new),)


@dataclass(frozen=True, slots=True)
class Check:
    """A command that passes on sound sources; `name` says what it is in the table."""

    name: str
    #: Arguments of Python; `SOURCES` stands for the folder with the sources under test.
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(["python", *self.arguments])

    @property
    def takes_sources(self) -> bool:
        """Whether the check itself runs from today's sources, and only its servers from others."""
        return SOURCES in self.arguments


@dataclass(frozen=True, slots=True)
class Mutation:
    """A guarantee that is broken on purpose."""

    name: str
    #: What no longer holds.
    promise: str
    edits: tuple[Edit, ...]
    check: Check
    #: What the check says about it: a regular expression for a part of its output.
    violation: str
    #: Seconds within which the check must find it, on two cores that others use, too.
    seconds: int = 120


def simulation(*more: str, seeds: int = 400) -> Check:
    """Random programs on simulated storage, in one process."""
    options = ("--first", "1", "--seeds", str(seeds), "--no-shrink", *more)
    return Check("simulation", ("-m", "streamfold.testing.simulation", *options))


def adversary(*more: str, seed: int = 8, rounds: int = 6) -> Check:
    """A real server on local disk, attacked from outside."""
    options = ("--seed", str(seed), "--rounds", str(rounds), "--source", SOURCES, *more)
    return Check("adversary", ("-m", "streamfold.testing.adversary", *options))


def test(path: str) -> Check:
    """One test, or all tests of a file."""
    return Check(f"`{path}`", ("-m", "pytest", "-x", "-q", "--no-header", path))
