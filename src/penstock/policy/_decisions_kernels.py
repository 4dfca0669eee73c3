"""`decisions` compiled: one function, so that a compiler runs once."""

from __future__ import annotations

from typing import Any

from penstock.kernel import compiled_copy, entry, machine_code
from penstock.machine_code import MachineCode
from penstock.policy import decisions
from penstock.policy.decision_state import ACT

_act = compiled_copy(decisions)["act"]
_State = decisions.State


@entry
def act(state: Any, what: Any, rank: Any, slot: Any, count: Any, origin: Any, seconds: Any) -> Any:
    """`decisions.act` of the same arguments, the state a tuple."""
    return _act(_State(*state), what, rank, slot, count, origin, seconds)


def compile_part(name: str) -> MachineCode:
    """Return the machine code; name: "act"."""
    return machine_code(act, ACT)
