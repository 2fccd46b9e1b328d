"""Alternative spellings: `stream list`, `list streams`, `streams ls` for `list-streams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: The objects of commands, by the words that people use for them.
_NOUNS: Final = {
    "basin": "basin",
    "basins": "basin",
    "stream": "stream",
    "streams": "stream",
    "token": "access-token",
    "tokens": "access-token",
    "access-token": "access-token",
    "access-tokens": "access-token",
}
#: The actions of commands, by the words that people use for them.
_ACTIONS: Final = {
    "list": "list",
    "ls": "list",
    "create": "create",
    "new": "create",
    "add": "create",
    "issue": "create",
    "delete": "delete",
    "rm": "delete",
    "remove": "delete",
    "revoke": "delete",
    "config": "config",
    "describe": "config",
    "get": "config",
    "show": "config",
    "reconfigure": "reconfigure",
    "set": "reconfigure",
    "update": "reconfigure",
    "metrics": "metrics",
    "usage": "metrics",
}
_COMMANDS: Final = {
    ("basin", "list"): "list-basins",
    ("basin", "create"): "create-basin",
    ("basin", "delete"): "delete-basin",
    ("basin", "config"): "get-basin-config",
    ("basin", "reconfigure"): "reconfigure-basin",
    ("basin", "metrics"): "get-basin-metrics",
    ("stream", "list"): "list-streams",
    ("stream", "create"): "create-stream",
    ("stream", "delete"): "delete-stream",
    ("stream", "config"): "get-stream-config",
    ("stream", "reconfigure"): "reconfigure-stream",
    ("stream", "metrics"): "get-stream-metrics",
    ("access-token", "list"): "list-access-tokens",
    ("access-token", "create"): "issue-access-token",
    ("access-token", "delete"): "revoke-access-token",
}


def canonical(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the command's canonical name if they spell it in two words."""
    for noun, action in (arguments[:2], arguments[1::-1]) if len(arguments) > 1 else ():
        command = _COMMANDS.get((_NOUNS.get(noun, ""), _ACTIONS.get(action, "")))
        if command is not None:
            return [command, *arguments[2:]]
    return list(arguments)


def commands_on(noun: str) -> list[str]:
    """Return the commands for the objects that `noun` names, if any."""
    kind = _NOUNS.get(noun)
    return [command for (other, _), command in _COMMANDS.items() if other == kind]
