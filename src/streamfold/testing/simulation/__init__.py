"""Runs a store in simulated time on simulated storage: one seed is one run, repeatable step by step."""

from streamfold.testing.simulation.ledger import ViolationError
from streamfold.testing.simulation.loop import SimulationLoop, SimulationStuckError
from streamfold.testing.simulation.program import SimulationReport, simulate

__all__ = [
    "SimulationLoop",
    "SimulationReport",
    "SimulationStuckError",
    "ViolationError",
    "simulate",
]
