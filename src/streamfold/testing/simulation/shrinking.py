"""Shrinks a failing program: leaves operations out for as long as it still breaks a promise.

Runs are repeatable, so each attempt is exact. Numbers of operations stay, and with them their dice.
"""

from __future__ import annotations

from streamfold.testing.simulation.ledger import ViolationError
from streamfold.testing.simulation.plan import Plan
from streamfold.testing.simulation.program import simulate

#: Runs that one shrinking takes at most.
_ATTEMPTS = 400


def shrink(plan: Plan, attempts: int = _ATTEMPTS) -> tuple[Plan, str]:
    """The smallest program that was found, and what it violates; `plan` must violate something."""
    story = _violation(plan)
    if story is None:
        raise ValueError(f"seed {plan.seed} violates nothing")
    size = max(1, len(plan.operations) // 2)
    while attempts > 0:
        smaller = None
        numbers = [operation.number for operation in plan.operations]
        for start in range(0, len(numbers), size):
            attempts -= 1
            candidate = plan.keep({*numbers[:start], *numbers[start + size :]})
            if (told := _violation(candidate)) is not None:
                smaller, story = candidate, told
                break
            if attempts <= 0:
                break
        if smaller is not None:
            plan = smaller
            size = min(size, max(1, len(plan.operations) // 2))
        elif size == 1:
            break
        else:
            size //= 2
    return plan, story


def _violation(plan: Plan) -> str | None:
    try:
        simulate(plan.seed, plan=plan)
    except ViolationError as violation:
        return str(violation)
    return None
