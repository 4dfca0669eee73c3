"""`decisions` compiled: one function, so that a compiler runs once."""

from __future__ import annotations

from typing import Any

from penstock.kernel import compiled_copy, entry, indexed_from_zero, machine_code
from penstock.machine_code import MachineCode
from penstock.policy import decisions
from penstock.policy.decision_state import EVENT

_event = compiled_copy(decisions)["event"]
_State = decisions.State


@entry
def event(state: Any, what: Any, rank: Any, slot: Any, count: Any, origin: Any, seconds: Any) -> Any:
    """`decisions.event` of the same arguments, the state a tuple."""
    return _event(_State(*state), what, rank, slot, count, origin, seconds)


def compile_part(name: str) -> MachineCode:
    """Return the machine code; name: "event"."""
    with indexed_from_zero():
        return machine_code(event, EVENT)
