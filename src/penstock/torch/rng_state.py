"""The random state of all ranks, saved and restored next to the training state, whichever framework trains."""

from __future__ import annotations

from typing import Any

from penstock.checkpoint.state.generators import random_state, set_random_state


def random_states() -> list[dict[str, Any]]:
    """Return the state of every rank's random generators, equal on all ranks: they call it together."""
    import torch.distributed

    own = random_state()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def set_own_random_state(states: list[dict[str, Any]], rank: int) -> None:
    """Set this rank's random generators; a rank that was not there keeps its own."""
    if rank < len(states):
        set_random_state(states[rank])
