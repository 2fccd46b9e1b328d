"""Help: valid examples, options in sections, and words that people try first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

from streamfold.cli.examples import EXAMPLES
from streamfold.cli.main import streamfold
from streamfold.cli.menu import SECTIONS, Menu, VerbGroup
from tests.cli.commands import Shell

#: Commands that other spellings mean.
SPELLINGS = [
    ("stream list", "list-streams"), ("streams ls", "list-streams"), ("list streams", "list-streams"),
    ("basin ls", "list-basins"), ("create basin", "create-basin"), ("stream rm", "delete-stream"),
    ("stream describe", "get-stream-config"), ("basin update", "reconfigure-basin"),
    ("stream usage", "get-stream-metrics"), ("token create", "issue-access-token"),
    ("revoke token", "revoke-access-token"), ("tokens ls", "list-access-tokens"),
]  # fmt: skip


def _commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its path, groups included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path}{name} ")


def _words(example: str) -> list[str]:
    """What follows `streamfold` in a line of a shell, up to a pipe or a redirection."""
    _, _, call = example.partition("streamfold ")
    lexer = shlex.shlex(call, posix=True, punctuation_chars="|<>)")
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if word and set(word) <= set("|<>)"):
            break
        words.append(word)
    return words


def test_every_help_text_ends_with_two_examples() -> None:
    commands = dict(_commands(streamfold))
    assert commands.pop("lite") is commands["serve"]
    assert EXAMPLES.keys() == commands.keys()
    for path, command in commands.items():
        text = click.Context(command, info_name=path).get_help()
        *_, heading, first, second = text.splitlines()
        assert heading.strip() == "Examples:"
        assert [first.strip(), second.strip()] == list(EXAMPLES[path])


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_calls_of_their_command(path: str) -> None:
    for example in EXAMPLES[path]:
        context = click.Context(streamfold, info_name="streamfold")
        command: click.Command = streamfold
        words = _words(example)
        while isinstance(command, click.Group):
            name, part, words = command.resolve_command(context, words)
            assert part is not None
            command, context = part, click.Context(part, info_name=name, parent=context)
        called = context.command_path.removeprefix("streamfold ")
        assert called == path or called.startswith(f"{path} ")
        values, rest, _ = command.make_parser(context).parse_args(words)
        assert rest == []
        for parameter in command.params:
            value = values.get(parameter.name or "")
            if parameter.required and not getattr(parameter, "envvar", None):
                assert value is not None, f"{example} lacks {parameter.name}"
            if isinstance(parameter.type, click.Choice) and isinstance(value, str):
                parameter.type.convert(value, parameter, context)


@pytest.mark.parametrize(("spelling", "command"), SPELLINGS)
def test_commands_are_understood_in_other_words(spelling: str, command: str) -> None:
    context = click.Context(streamfold)
    name, _, rest = streamfold.resolve_command(context, [*spelling.split(), "my-basin"])
    assert (name, rest) == (command, ["my-basin"])
    assert any(command in entries for entries in SECTIONS.values())


def test_help_is_a_command_of_every_group(shell: Shell) -> None:
    assert shell.ok("help").text == shell.ok("--help").text
    assert shell.ok("help", "append").text == shell.ok("append", "--help").text
    assert shell.ok("help", "stream", "list").text == shell.ok("list-streams", "--help").text
    assert shell.ok("archive", "help").text == shell.ok("archive", "--help").text
    sql = shell.ok("archive", "sql", "--help").text
    assert shell.ok("help", "archive", "sql").text == shell.ok("archive", "help", "sql").text == sql
    unknown = shell("help", "apend")
    assert (unknown.status, unknown.stdout) == (2, b"")
    assert "Did you mean 'append'" in unknown.stderr


def test_a_noun_alone_is_answered_with_its_commands(shell: Shell) -> None:
    message = shell("basin").stderr
    assert "'list-basins' or 'create-basin' or 'delete-basin'" in message
    assert "'issue-access-token'" in shell("token", "frobnicate").stderr


def test_serve_lists_each_option_below_one_heading() -> None:
    group = Menu("streamfold")
    serve = group.get_command(click.Context(group), "serve")
    assert serve is not None
    lines = click.Context(serve, info_name="serve").get_help().splitlines()
    headings = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Storage", "Address", "Standby", "Access", "Console", "Durable Streams", "Commits",
        "Trims and clean-up", "Output", "Other",
    ]  # fmt: skip
    other = lines[lines.index("Other:") + 1 :]
    assert [line.split()[0] for line in other[: other.index("")]] == ["--help"]
    assert isinstance(streamfold, VerbGroup)
