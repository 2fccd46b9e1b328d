"""The example notebook runs, and shows streams, plans and archives as tables with inert text."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from streamfold import Record
from streamfold.follow import MemoryStream, follow
from streamfold.notebook import html_table
from tests.docs.test_reading import ROOT


# The kernel's own packages warn about what they deprecate in each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_example_notebook_runs_and_shows_tables() -> None:
    notebook = nbformat.read(ROOT / "examples/tour.ipynb", as_version=4)
    NotebookClient(
        notebook,
        timeout=300,
        startup_timeout=300,
        resources={"metadata": {"path": str(ROOT)}},
        # Ports that the kernel chooses could be taken before it listens.
        config=Config(KernelManager={"transport": "ipc"}),
    ).execute()
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert "memory, first 0, tail 500" in shown[0]
    assert "1 record from 500" in shown[1]
    assert "stock at 502" in shown[2]
    assert "stock at 501 of 502" in shown[3]


async def test_a_stream_and_its_follower_show_themselves_with_inert_text() -> None:
    stream = MemoryStream("<b>orders</b>")
    await stream.append([Record(b"<script>1</script>"), Record(b"\xff" * 500)])
    assert repr(stream) == "<MemoryStream <b>orders</b>, first 0, tail 2>"
    shown = stream._repr_html_()
    assert "&lt;script&gt;1&lt;/script&gt;" in shown
    assert "\\xff\\xff" in shown
    assert len(shown) < 1_000
    follower = follow(stream, fold=lambda state, record: [*state, record.body], initial=list)
    assert "not entered" in follower._repr_html_()
    async with follower as state:
        shown += state._repr_html_()
    assert "Follower of &lt;b&gt;orders&lt;/b&gt; at 2" in shown
    assert "2 records from 0" in shown
    assert "<script>" not in shown
    assert "<b>orders" not in shown


def test_a_table_for_a_notebook_escapes_text_and_is_bounded() -> None:
    rows = [(number, "<img src=x>") for number in range(1_000)]
    shown = html_table("<b>", ("<i>",), rows)
    assert "<img" not in shown
    assert "<i>" not in shown
    assert shown.count("<tr>") == 51
    assert "950 earlier rows are left out" in shown
    assert '<td style="text-align: left">999</td>' in shown
