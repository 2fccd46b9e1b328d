"""The kernels are warm in every test: plain is called by name where it is meant."""

from __future__ import annotations

import pytest

from streamfold.records import warm_up


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    assert warm_up(), "numba is a test dependency"
