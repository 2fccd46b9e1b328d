"""SlateDB's Python binding, as far as its own copies of bytes are avoided."""

from __future__ import annotations

from streamfold.store.engine import slatedb_binding


# Upstream defect 5.
def test_this_version_of_the_binding_can_be_called_without_its_copies() -> None:
    assert slatedb_binding._missing() == []
