"""Extension points for other packages.

Each kind (event sinks, formats, decoders, destinations, codecs) has one `Registry`. One object
declares an extension: its id, summary, capabilities, options and how to open it. Streamfold's own
are listed in their registry. Others are entry points of installed packages, by id in the registry's
group:

    [project.entry-points."streamfold.sinks"]
    file = "acme_sinks:FILE"

Nothing is imported before it is used. Spark executors find the extensions that are installed on
them. A declaration should be cheap to import, so import large libraries in `open`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

import msgspec

from streamfold.errors import InvalidError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Base of all declarations."""

    #: Its name in configurations, stored data and on the command line.
    id: str
    #: One line for help and documentation, without a full stop.
    summary: str


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of an extension's options, each a field described by `msgspec.Meta`."""


E = TypeVar("E", bound=Extension)


class ExtensionBrokenError(InvalidError):
    """An installed package declares an unusable extension."""

    code = "extension_broken"


class Registry(Generic[E]):
    """The extensions of one kind by id.

    `builtin` lists Streamfold's own as `module:attribute`. Other packages cannot reuse their ids.
    """

    def __init__(self, group: str, noun: str, kind: type[E], builtin: Mapping[str, str]) -> None:
        self.group = group
        self.noun = noun
        self._kind = kind
        self._builtin = builtin
        self._loaded: dict[str, E] = {}
        self._installed: dict[str, list[EntryPoint]] | None = None

    def __iter__(self) -> Iterator[E]:
        """Load all extensions, Streamfold's first. Logs and skips broken ones."""
        return self.existing(self.ids())

    def existing(self, names: Iterable[str]) -> Iterator[E]:
        """Load the existing extensions among `names`. Logs and skips broken ones."""
        for name in names:
            if name in self:
                try:
                    yield self.get(name)
                except ExtensionBrokenError as error:
                    _LOG.warning("%s", error.message)

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._loaded or name in self._entry_points()

    def ids(self) -> tuple[str, ...]:
        """Return all ids, Streamfold's first, without loading any."""
        others = {*self._loaded, *self._entry_points()} - set(self._builtin)
        return (*self._builtin, *sorted(others))

    def get(self, name: str) -> E:
        """Return the extension. Raises InvalidError if unknown, ExtensionBrokenError if broken."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def register(self, extension: E) -> None:
        """Add an extension to this process only. Spark executors do not see it."""
        if extension.id in self:
            raise InvalidError(f"{self.noun} {extension.id!r} exists already: choose another id")
        self._loaded[extension.id] = extension

    def _load(self, name: str) -> E:
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            own: E = getattr(import_module(module), attribute)
            return own
        points = self._entry_points().get(name, [])
        if not points:
            raise InvalidError(f"{self.noun} {name!r} {must_be_one_of(self.ids(), name)}")
        if len(points) > 1:
            packages = " and ".join(sorted(map(_package, points)))
            raise ExtensionBrokenError(
                f"{self.noun} {name!r} is declared by {packages}: uninstall all but one"
            )
        return self._load_installed(points[0])

    def _load_installed(self, point: EntryPoint) -> E:
        try:
            extension = point.load()
        except Exception as error:  # another package's module may raise anything
            raise self._broken(point, f"{type(error).__name__}: {error}") from error
        if not isinstance(extension, self._kind):
            raise self._broken(point, f"{point.value} is not a {self._kind.__name__}")
        if extension.id != point.name:
            raise self._broken(
                point, f"its id is {extension.id!r}, not the name of the entry point"
            )
        return extension

    def _broken(self, point: EntryPoint, reason: str) -> ExtensionBrokenError:
        return ExtensionBrokenError(
            f"{self.noun} {point.name!r} of the package {_package(point)} cannot be loaded "
            f"({reason}): repair or uninstall that package"
        )

    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        if self._installed is None:
            points: dict[str, list[EntryPoint]] = {}
            for point in entry_points(group=self.group):
                if point.name in self._builtin:
                    _LOG.warning(
                        "%s %r of the package %s is ignored: Streamfold has one of that id",
                        self.noun, point.name, _package(point),
                    )  # fmt: skip
                else:
                    points.setdefault(point.name, []).append(point)
            self._installed = points
        return self._installed


def must_be_one_of(ids: Iterable[str], unknown: str) -> str:
    """Return the rule that `unknown` breaks, with the id that was probably meant."""
    names = list(ids)
    near = difflib.get_close_matches(unknown, names, 1)
    return f"must be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "that declares it"
