"""`_clock` compiled, with the decisions that it asks."""

from __future__ import annotations

from typing import Any

from penstock.kernel import compiled_copy, entry, indexed_from_zero, machine_code
from penstock.machine_code import MachineCode
from penstock.policy import decisions
from penstock.simulate import _clock
from penstock.simulate.loading import RUN

_run = compiled_copy(_clock, compiled_copy(decisions))["run"]
_State, _Clock = decisions.State, _clock.Clock


@entry
def run(state: Any, clock: Any) -> Any:
    """`_clock.run` of the same arguments, each a tuple."""
    return _run(_State(*state), _Clock(*clock))


def compile_part(name: str) -> MachineCode:
    """Return the machine code; name: "run"."""
    with indexed_from_zero():
        return machine_code(run, RUN)
