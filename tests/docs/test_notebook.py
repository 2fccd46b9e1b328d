"""The example notebook runs, and shows plans and archives as tables in which text is only text."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from streamfold.notebook import html_table
from tests.docs.test_reading import ROOT


# The kernel's own packages warn about what they deprecate in each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_example_notebook_runs_and_shows_tables() -> None:
    notebook = nbformat.read(ROOT / "examples/tour.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert "1 record from 500" in shown[0]
    assert "stock at 502" in shown[1]
    assert "stock at 501 of 502" in shown[2]


def test_a_table_for_a_notebook_escapes_text_and_is_bounded() -> None:
    rows = [(number, "<img src=x>") for number in range(1_000)]
    shown = html_table("<b>", ("<i>",), rows)
    assert "<img" not in shown
    assert "<i>" not in shown
    assert shown.count("<tr>") == 51
    assert "950 earlier rows are left out" in shown
    assert '<td style="text-align: left">999</td>' in shown
