"""Writes the reference pages whose source is the code, whenever the site is built.

They are below `docs/reference/generated`, which is not kept: all commands with their options, variables
and settings with their defaults, every error with its code, every metric of a running server, and the
routes of both protocols.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx
from openapi import descriptions
from prometheus_client.parser import text_string_to_metric_families

from streamfold.cli.main import streamfold as command_line
from streamfold.errors import StreamfoldError
from streamfold.server.config import Configuration
from streamfold.server.http.router import Route
from streamfold.server.main import running_server
from streamfold.snapshotter.config.model import describe
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.wire.s2.errors import CODES, OWN_CODES, describe_failure

if TYPE_CHECKING:
    from sphinx.application import Sphinx

#: Packages that add errors to the tree.
_WITH_ERRORS = ("archive", "follow", "ingest", "snapshotter", "spark")
#: Metrics of the Python runtime, which its own documentation describes.
_FOREIGN = ("python_", "process_")
#: A parameter for tests alone, with its type and its default: the clock, new ids, an engine that fails.
_TEST_HOOK = re.compile(
    r"(?:, )?\b(?:now|new_id|opener|disk_usage): "
    r"(?:[^,()\[\]=]|\[(?:[^\[\]]|\[[^\]]*\])*\])* = "
    r"(?:[^,()\[\]]|\[(?:[^\[\]]|\[[^\]]*\])*\]|\((?:[^()]|\([^()]*\))*\))*"
)
#: What a configuration of the snapshotter must say; everything else has a default.
_REQUIRED: dict[str, Any] = {
    "source": {"server": "http://localhost:8080", "table": "orders"},
    "destinations": [{"type": "local", "path": "/tables"}],
}
#: Parts of that configuration whose settings are listed.
_PARTS = (
    "http", "source", "diff", "snapshot", "formats", "retention", "dead_letters", "transactions",
)  # fmt: skip


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx call this before it reads the pages."""
    app.connect("builder-inited", lambda _: write_pages(Path(app.srcdir)))
    app.connect("autodoc-process-docstring", lambda *given: mark_code(given[-1]))
    app.connect("autodoc-process-signature", lambda *event: without_test_hooks(*event[5:]))
    return {"parallel_read_safe": True}


def write_pages(docs: Path) -> None:
    """Write all pages below `docs`; a page that did not change keeps its time."""
    folder = docs / "reference" / "generated"
    folder.mkdir(exist_ok=True)
    metrics, routes = asyncio.run(_ask_a_server())
    pages = {
        "commands.md": commands_page(),
        "configuration.md": configuration_page(),
        "errors.md": errors_page(),
        "metrics.md": metrics,
        "routes.md": routes_page(routes),
        **{f"openapi-{name}.json": text for name, text in openapi_files(routes).items()},
    }
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def mark_code(lines: list[str]) -> None:
    """Mark the indented blocks of a docstring as code, which reStructuredText takes for quotations."""
    text, code = list(lines), False
    lines.clear()
    for before, line in zip(["", *text], text, strict=False):
        starts = line.startswith("    ") and not before
        if starts and not code:
            lines += ["::", ""]
        code = line.startswith("    ") or (code and not line)
        lines.append(line)


def without_test_hooks(
    arguments: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Remove the parameters from a signature that only tests pass; None leaves it as it is."""
    if arguments is None:
        return None
    shown = _TEST_HOOK.sub("", arguments).replace("*)", ")").replace(", )", ")")
    return None if shown == arguments else (shown, returned)


async def _ask_a_server() -> tuple[str, list[Route]]:
    """What a server in memory says of its metrics, and its routes."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a build prints warnings alone
    async with running_server(Configuration(host="127.0.0.1", port=0, access_log=False)) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        async with httpx.AsyncClient() as client:
            answer = (await client.get(url)).raise_for_status()
        return metrics_page(answer.text), list(server.routes)


# The command line.


def commands_page() -> str:
    """Every command with its options, as `--help` shows them."""
    root = click.Context(command_line, info_name="streamfold")
    lines = ["# Commands and options", "", _made("`streamfold COMMAND --help`"), ""]
    known: dict[int, str] = {}
    for title, context, verb in _verbs(command_line, root):
        first = known.setdefault(id(verb.callback), title)
        same = [f"The same as `streamfold {first}`.", ""]
        lines += [f"## {title}", "", *(_verb(context, verb) if first == title else same)]
    return "\n".join(lines)


def _verbs(
    group: click.Group, context: click.Context
) -> Iterator[tuple[str, click.Context, click.Command]]:
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        if verb is None or verb.hidden:
            continue
        below = click.Context(verb, info_name=name, parent=context)
        if isinstance(verb, click.Group):
            yield from _verbs(verb, below)
        else:
            yield below.command_path.removeprefix("streamfold "), below, verb


def _verb(context: click.Context, verb: click.Command) -> list[str]:
    usage = " ".join([context.command_path, *verb.collect_usage_pieces(context)])
    text = cleandoc(verb.help or verb.short_help or "").replace("\b\n", "").replace("\f", "")
    lines = ["```text", usage, "```", "", text, ""]
    rows = [row for parameter in verb.params if (row := parameter.get_help_record(context))]
    if rows:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| {_code(names)} | {_cell(meaning)} |" for names, meaning in rows]
        lines.append("")
    return lines


# Configuration.


def configuration_page() -> str:
    """Every environment variable, and every snapshotter setting with its default."""
    lines = ["# Variables and settings", "", _made("the options and the model"), ""]
    lines += ["## Variables", "", "An option overrides its variable.", ""]
    lines += ["| variable | option | command |", "|---|---|---|"]
    found: dict[tuple[str, str], list[str]] = {}
    root = click.Context(command_line, info_name="streamfold")
    for title, _, verb in _verbs(command_line, root):
        for option in verb.params:
            for name in [option.envvar] if isinstance(option.envvar, str) else option.envvar or ():
                found.setdefault((name, option.opts[0]), []).append(title)
    lines += [
        f"| {_code(name)} | {_code(option)} | {', '.join(map(_code, verbs))} |"
        for (name, option), verbs in sorted(found.items())
    ]
    lines += [
        "",
        "[The command line](../cli.md) has the variables for a server and its tokens.",
        "",
        "## Snapshotter settings",
        "",
        "[Snapshotter configuration](../snapshotter-config.md) explains each setting. The defaults are",
        "those of a table `orders`; `destinations`, `events` and `decoder` have options by their kind.",
        "",
    ]
    lines += ["| setting | default |", "|---|---|"]
    defaults = dict(
        line.removeprefix("tables[0].").split(" = ", 1)
        for line in describe(read_configuration(_REQUIRED)).splitlines()
    )
    required = {"source.server", "source.table", "destinations"}
    for name in _settings():
        default = _code(defaults[name]) if name in defaults else ""
        lines.append(f"| {_code(name)} | {'required' if name in required else default} |")
    return "\n".join([*lines, ""])


def _settings() -> list[str]:
    """The names of all settings: the reader lists those of a part that has an unknown one."""
    source = {**_REQUIRED["source"], "?": 0}
    wrong = {**_REQUIRED, **{part: {"?": 0} for part in _PARTS}, "source": source, "?": 0}
    try:
        read_configuration(wrong)
    except ConfigurationError as refused:
        known = [
            problem.partition("?: is not known; the settings are ") for problem in refused.problems
        ]
        names = [part + name for part, sep, rest in known if sep for name in rest.split(", ")]
        return sorted(name for name in names if name not in _PARTS)
    return []


# Errors.


def errors_page() -> str:
    """The error tree: meaning, whether it is definite, and the HTTP response."""
    for package in _WITH_ERRORS:
        import_module(f"streamfold.{package}.errors")
    lines = ["# Errors", "", _made("`streamfold.errors`"), ""]
    lines += [
        "Codes are stable. *Definite* means that the failed call certainly changed nothing. After any",
        "other error the outcome is unknown: read before you repeat the call.",
        "",
        "| error | code | definite | meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {'&nbsp;' * 4 * depth}`{kind.__name__}` | `{kind.code}` | "
        f"{'yes' if kind.definite else 'no'} | {_cell(cleandoc(kind.__doc__ or ''))} |"
        for depth, kind in _tree(StreamfoldError)
    ]
    lines += ["", "## Codes over HTTP", "", "| code | status | nothing happened |", "|---|---|---|"]
    codes = sorted({**CODES, **OWN_CODES}.items(), key=lambda entry: (entry[1].status, entry[0]))
    lines += [
        f"| `{code}` | {known.status} | {'yes' if known.clean else 'not certain'} |"
        for code, known in codes
    ]
    unexpected = describe_failure(RuntimeError())
    lines += ["", "The response to an error without its own code:", "", "```json"]
    lines += [json.dumps(json.loads(unexpected.body)), "```", ""]
    return "\n".join(lines)


def _tree(
    kind: type[StreamfoldError], depth: int = 0
) -> Iterator[tuple[int, type[StreamfoldError]]]:
    yield depth, kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("streamfold.") and not below.__name__.startswith("_"):
            yield from _tree(below, depth + 1)


# Metrics.


def metrics_page(exposition: str) -> str:
    """Every series of a server's `/metrics`."""
    lines = ["# Server metrics", "", _made("`GET /metrics`"), ""]
    lines += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in text_string_to_metric_families(exposition):
        if family.name.startswith(_FOREIGN):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        shown = ", ".join(f"`{label}`" for label in labels)
        name = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |")
    return "\n".join([*lines, ""])


# Routes.


def routes_page(routes: list[Route]) -> str:
    """Every route with the right it needs, and the OpenAPI files."""
    lines = ["# Routes", "", _made("the router of a server"), ""]
    for name, described in descriptions(routes).items():
        lines += [f"## {described['info']['title']}", ""]
        lines += [f"OpenAPI: [openapi-{name}.json](openapi-{name}.json)", ""]
        lines += ["| route | needs | what it does |", "|---|---|---|"]
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                lines.append(
                    f"| `{method.upper()} {path}` | {operation['x-needs']} | {operation['summary']} |"
                )
        lines.append("")
    return "\n".join(lines)


def openapi_files(routes: list[Route]) -> dict[str, str]:
    """The OpenAPI description of each protocol, as JSON."""
    return {
        name: json.dumps(described, indent=2) + "\n"
        for name, described in descriptions(routes).items()
    }


def _made(source: str) -> str:
    return f"This page is generated from {source}."


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """Text on one line, in which nothing is markup of a table or of HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
