"""Dashboards and alerts use existing series, and every alert has a runbook page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from streamfold.ingest.progress import IngestProgress, IngestTableProgress, serve_metrics
from streamfold.server.main import running_server
from streamfold.snapshotter.status.http_server import StatusServer
from streamfold.snapshotter.status.table_status import (
    ArtifactStatus,
    Counts,
    SparkCounts,
    State,
    TableStatus,
    TableWriters,
)
from tests.ports import free_port
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.frames import PATH
from tests.server.raw_h2 import h2_client

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((DEPLOY / "grafana/streamfold.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PAGES = ROOT / "docs/operations"
#: Labels that Prometheus adds, and the series that it makes itself.
SCRAPED = {"job", "instance"}
UP = {"up": SCRAPED}


class _Table:
    """One table that has a base and a diff, errors, and more to read."""

    def statuses(self) -> dict[str, TableStatus]:
        artifact = ArtifactStatus("99", "2026-06-03T12:00:00Z", 2, 1234, 100)
        counts = Counts(bases=1, diffs=1, destination_errors={"s3://b/": 1}, event_errors={"e": 1})
        status = TableStatus(
            table="orders", stream="orders", state=State.RUNNING, counts=counts,
            manifest_head="99", last_diff=artifact, snapshot_age_seconds=1.0, churn_records=1,
            buffer_depth=1, lag_records=1, lag_seconds=1.0, rows_per_second=1.0,
        )  # fmt: skip
        return {"orders": status}

    def spark(self) -> SparkCounts:
        return SparkCounts(jobs=1, tasks=1, rows=1, bytes=1)

    def request_snapshot(self, table: str) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of all series that the processes serve, with the names of their labels."""
    served = asyncio.run(_of_server(tmp_path_factory.mktemp("data")))
    writers: TableWriters = _Table()
    with StatusServer(writers, "127.0.0.1", 0) as snapshotter:
        served += _fetch(snapshotter.port)
    port = free_port()
    serve_metrics(IngestProgress(tables={"public.orders": IngestTableProgress()}), port)
    return {**UP, **_series(served + _fetch(port))}


async def _of_server(data: Path) -> str:
    """What a server on local disk serves, once it has measured its storage."""
    async with running_server(configuration(location=data.as_uri())) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            headers = (("s2-basin", BASIN), ("content-type", "application/json"))
            await h2.exchange("POST", PATH, headers, b'{"records":[{"body":"a"}]}')
            while not (use := server.store.storage_use) or not use.live:
                await h2.exchange("GET", "/health")
            return (await h2.exchange("GET", "/metrics")).body.decode()


def _fetch(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def _series(served: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(served):
        for sample in family.samples:
            found.setdefault(sample.name, set(SCRAPED)).update(sample.labels)
    return found


def _selectors(expression: promql.Expr) -> Iterator[promql.VectorSelector]:
    if isinstance(expression, promql.VectorSelector):
        yield expression
    elif isinstance(expression, promql.MatrixSelector):
        yield expression.vector_selector
    elif isinstance(expression, promql.BinaryExpr):
        yield from _selectors(expression.lhs)
        yield from _selectors(expression.rhs)
    elif isinstance(expression, promql.Call):
        for argument in expression.args:
            yield from _selectors(argument)
    elif isinstance(expression, promql.AggregateExpr | promql.ParenExpr | promql.SubqueryExpr):
        yield from _selectors(expression.expr)


def _check(query: str, series: dict[str, set[str]]) -> set[str]:
    """Refuse what is not PromQL, or names what does not exist; returns the labels of the series."""
    selectors = list(_selectors(promql.parse(query)))
    assert selectors, query
    labels: set[str] = set()
    for selector in selectors:
        assert selector.name in series, f"{query}: no process has {selector.name}"
        known = series[selector.name]
        named = {matcher.name for matcher in selector.matchers.matchers}
        assert named <= known, f"{query}: {selector.name} has no label {named - known}"
        labels |= known
    return labels


def _without_variables(query: str) -> str:
    return query.replace("$__rate_interval", "5m")


def test_every_query_of_the_dashboard_names_series_that_exist(
    series: dict[str, set[str]],
) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = _check(_without_variables(target["expr"]), series)
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= labels, (panel["title"], shown - labels)
    variables = DASHBOARD["templating"]["list"]
    for query in (variable["query"] for variable in variables if variable["type"] == "query"):
        [(selector, label)] = re.findall(r"^label_values\((.+), (\w+)\)$", query)
        assert label in _check(selector, series)


def test_every_alert_names_series_and_labels_that_exist(
    series: dict[str, set[str]],
) -> None:
    for rule in RULES:
        labels = _check(rule["expr"], series)
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert used <= labels, (rule["alert"], used - labels)


def test_the_check_refuses_a_series_or_a_label_that_does_not_exist(
    series: dict[str, set[str]],
) -> None:
    for query in ("streamfold_no_such_series > 0", 'streamfold_connections{table="a"}'):
        with pytest.raises(AssertionError, match="streamfold_"):
            _check(query, series)
    with pytest.raises(ValueError, match="parenthesis"):
        _check("sum(", series)


def test_panels_of_the_dashboard_have_their_own_numbers_and_do_not_overlap() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in taken) < 24
        assert not taken & cells, panel["title"]
        cells |= taken


def test_every_alert_names_a_page_that_exists_and_names_the_alert() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        page = ROOT / rule["annotations"]["runbook"]
        assert page.is_file(), rule["alert"]
        assert f"`{rule['alert']}`" in page.read_text(), page


def test_every_page_of_operations_is_in_the_index_and_has_the_same_sections() -> None:
    pages = sorted(set(PAGES.glob("*.md")) - {PAGES / "index.md"})
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / "index.md").read_text())
    assert sorted(linked) == [page.name for page in pages]
    sections = ["What you see", "Why", "What to do", "How to verify"]
    work = {
        PAGES / name
        for name in ("backup.md", "checking.md", "high-availability.md", "scale.md", "upgrade.md")
    }
    for page in set(pages) - work:
        assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == sections, page.name


def test_pages_of_operations_name_series_alerts_and_pages_that_exist() -> None:
    alerts = {rule["alert"] for rule in RULES}
    for page in PAGES.glob("*.md"):
        text = page.read_text()
        assert set(re.findall(r"`(Streamfold[A-Z]\w+)`", text)) <= alerts, page.name
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_metrics_that_pages_of_operations_name_exist(series: dict[str, set[str]]) -> None:
    named = re.compile(r"`((?:streamfold|s2|snapshotter|process)_[a-z_]+)(?:\{[^`]*\})?`")
    for page in PAGES.glob("*.md"):
        for name in named.findall(page.read_text()):
            histogram = f"{name}_bucket"
            assert name in series or histogram in series, f"{page.name}: {name}"
