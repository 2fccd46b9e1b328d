from __future__ import annotations

from hypothesis import HealthCheck, settings

from streamfold.store.engine.engine import Engine, EngineOpener
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.testing.store_machine import StoreMachine
from tests.proving import PROVING


class SlateMachine(StoreMachine):
    def opener(self) -> EngineOpener:
        location = open_location("memory:")

        async def open_engine() -> Engine:
            return await SlateEngine.open(location)

        return open_engine


#: `make prove` runs many more examples, at random; CI runs the same few every time.
SlateMachine.TestCase.settings = settings(
    max_examples=1000 if PROVING else 30,
    stateful_step_count=25,
    deadline=None,
    derandomize=not PROVING,
    suppress_health_check=list(HealthCheck),
)
TestSlateStore = SlateMachine.TestCase
