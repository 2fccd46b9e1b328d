"""What holds for all tests: which stay together when two processes share the work, as `pytest -n 2
--dist loadgroup` has them do, and that random examples are the same each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

#: Neither chance nor the speed of the machine decides: the same examples, however long each takes.
settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

ROOT = Path(__file__).parent
#: Folders whose files stay together: those of Spark share a session, which takes long to start and much
#: memory, and those of other clients install packages into the same folder.
SPARK, INTEROP = "spark", "interop"


@pytest.hookimpl(tryfirst=True)  # xdist looks at the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file stay together, for their fixtures; those of Spark all do, and begin first."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _group(item) != SPARK)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run where groups are not kept: a Spark session in each process takes much memory."""
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError("this pytest-xdist does not keep groups together under this pytest")


def _group(item: pytest.Item) -> str:
    relative = item.path.relative_to(ROOT)
    return relative.parts[0] if relative.parts[0] in (SPARK, INTEROP) else relative.as_posix()
