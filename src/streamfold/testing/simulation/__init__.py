"""Simulation of stores and faces in simulated time on simulated storage. Seeds repeat exactly."""

from streamfold.testing.simulation.books import SimulationReport
from streamfold.testing.simulation.ledger import ViolationError
from streamfold.testing.simulation.loop import SimulationLoop, SimulationStuckError
from streamfold.testing.simulation.plan import draw_plan
from streamfold.testing.simulation.program import simulate

__all__ = [
    "SimulationLoop",
    "SimulationReport",
    "SimulationStuckError",
    "ViolationError",
    "draw_plan",
    "simulate",
]
