"""The states of a loader's run: what `state_dict` returns, and the place that `load_state_dict` resumes at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.agreeing import Agreed
from penstock.loader.front_end import FrontEnd
from penstock.loader.resume import describe_run, read_state, seed_of_state, write_state
from penstock.loader.setup import Setup
from penstock.trace.trace import JSON


class RunState:
    """Writes and reads states of one run. is_seed_drawn: whether nobody gave its seed."""

    def __init__(self, agreed: Agreed, setup: Setup, front_end: FrontEnd, *, is_seed_drawn: bool) -> None:
        self._agreed, self._setup, self._is_seed_drawn = agreed, setup, is_seed_drawn
        self._as_array = front_end.as_array

    @cached_property
    def _described(self) -> dict[str, JSON]:
        setup, agreed = self._setup, self._agreed
        return describe_run(
            setup.plan,
            setup.source,
            setup.pipeline,
            agreed.data,
            setup.draws_seed,
            config=agreed.config,
            as_array=self._as_array,
            has_functions=True,
        )

    def at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state of a run whose next step is this one."""
        plan = self._setup.plan
        if epoch == plan.epochs and plan.last_steps is not None:  # a longer run continues that epoch
            epoch, step = epoch - 1, plan.last_steps
        return write_state(self._described, epoch, step)

    def place_of(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> tuple[int, int]:
        """Return where this run resumes from a state. Raises: ConfigError as `Loader.load_state_dict`."""
        drawn, seed = self._setup.seed, seed_of_state(state)
        if self._is_seed_drawn and seed not in (None, drawn):
            raise ConfigError(
                f"seed was left out, so that {drawn} was drawn, and the state is of seed {seed}: give the state when "
                "the loader is made, Loader(..., state=state), which takes its seed, or give seed="
            )
        return read_state(state, self._described, self._setup.plan, self._setup.rank, allow)
