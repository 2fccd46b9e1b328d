"""Finds the handler of a request by its raw path: names in it may contain encoded slashes."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from streamfold.model.access_tokens import Right

#: Results that are cached, and characters of their arguments: a client may send 64 KiB.
KEPT: Final = 4096
SHORT_MAX: Final = 1024

Texts = TypeVar("Texts", bound="str | bytes | tuple[str | bytes, ...]")
Result = TypeVar("Result")
#: Takes the request and the segments that stand at the pattern's placeholders, still encoded.
Handler: TypeAlias = Callable[..., Awaitable[None]]
_PLACEHOLDER: Final = "{}"
#: At the end of a path: one or more segments, which the handler gets joined by slashes.
_REST: Final = "{...}"


class _Results(dict[Texts, Result], Generic[Texts, Result]):
    """Results of a function by its argument."""

    def __init__(self, function: Callable[[Texts], Result]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, texts: Texts) -> Result:
        result = self._function(texts)
        if _length(texts) <= SHORT_MAX:
            if len(self) >= KEPT:
                self.clear()
            self[texts] = result
        return result


def memoize_short(function: Callable[[Texts], Result]) -> Callable[[Texts], Result]:
    """`function` of a text, or of a tuple of texts, with its results for short ones cached.

    A known result is looked up without a call in Python: each request looks up several.
    """
    return _Results(function).__getitem__


def _length(texts: str | bytes | tuple[str | bytes, ...]) -> int:
    return sum(map(len, texts)) if isinstance(texts, tuple) else len(texts)


class OtherRule(enum.Enum):
    """What a route needs that is not a right of an access token."""

    #: Nothing.
    PUBLIC = enum.auto()
    #: A valid token, of the one who owns what the route names.
    OWNER = enum.auto()
    #: The token of a wake, which a subscription gave to a worker.
    WAKE_TOKEN = enum.auto()


PUBLIC: Final = OtherRule.PUBLIC
#: What a route needs. The handler checks it: only it knows which names the request is about.
AccessRule: TypeAlias = Right | OtherRule


class Route(NamedTuple):
    """A route as it was declared."""

    method: str
    path: str
    needs: AccessRule


class Match(NamedTuple):
    """The handlers of a path by method, and the segments that they take."""

    handlers: dict[str, Handler]
    segments: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """The value of an `allow` header."""
        return ", ".join(sorted(self.handlers))


class Router:
    """Paths of fixed words and placeholders; the first pattern that fits wins."""

    def __init__(self) -> None:
        self._patterns: dict[int, list[_Pattern]] = {}
        #: Those that end in {...}, written {}.
        self._open_patterns: list[_Pattern] = []
        self.routes: list[Route] = []
        self.match = memoize_short(self._match)

    def add(self, method: str, path: str, needs: AccessRule, handler: Handler) -> None:
        """Route `method` on `path`: {} stands for any one segment, {...} for all that follow."""
        self.routes.append(Route(method, path, needs))
        words = tuple(path.split("/"))
        if words[-1] == _REST:
            words = (*words[:-1], _PLACEHOLDER)
            patterns = self._open_patterns
        else:
            patterns = self._patterns.setdefault(len(words), [])
        for pattern in patterns:
            if pattern.words == words:
                pattern.handlers[method] = handler
                return
        patterns.append(_Pattern.of(words, method, handler))

    def _match(self, raw_path: str) -> Match | None:
        words = raw_path.split("/")
        for pattern in self._patterns.get(len(words), ()):
            if pattern.pick_fixed(words) == pattern.fixed:
                return Match(pattern.handlers, tuple([words[at] for at in pattern.placeholders]))
        for pattern in self._open_patterns:
            last = len(pattern.words) - 1
            joined = [*words[:last], "/".join(words[last:])]
            if len(words) > last and pattern.pick_fixed(joined) == pattern.fixed:
                return Match(pattern.handlers, tuple([joined[at] for at in pattern.placeholders]))
        return None


@dataclass(frozen=True, slots=True)
class _Pattern:
    words: tuple[str, ...]
    #: Takes the words at the fixed positions out of a path. Every path begins with an empty word, so
    #: that there are at least two, and `itemgetter` returns a tuple.
    pick_fixed: Callable[[Sequence[str]], tuple[str, ...]]
    fixed: tuple[str, ...]
    placeholders: tuple[int, ...]
    handlers: dict[str, Handler]

    @classmethod
    def of(cls, words: tuple[str, ...], method: str, handler: Handler) -> _Pattern:
        fixed = [at for at, word in enumerate(words) if word != _PLACEHOLDER]
        placeholders = tuple(at for at, word in enumerate(words) if word == _PLACEHOLDER)
        pick_fixed = itemgetter(*fixed)
        return cls(words, pick_fixed, pick_fixed(words), placeholders, {method: handler})
