"""Reads a whole store and verifies its content."""

from streamfold.store.inspection.inspection import inspect_store
from streamfold.store.inspection.report import CheckCounts, CheckFinding, CheckReport, Severity

__all__ = ["CheckCounts", "CheckFinding", "CheckReport", "Severity", "inspect_store"]
