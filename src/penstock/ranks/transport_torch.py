"""Messages between the ranks of torch.distributed, through the store by which its processes found each other."""

from __future__ import annotations

import itertools
import os
from typing import Any

from penstock.ranks.transport import TIMEOUT_SECONDS
from penstock.ranks.transport_store import StoreTransport, asked_in_time, keep_until_taken, name_of_life

_KEEPER = "rank 0, or the launcher, which keeps the store of torch.distributed,"

#: The store in which ranks met, and what their messages begin with there.
_life: tuple[Any, str] | None = None
_made = itertools.count()  # equal on all ranks, since all make their transports in the same order


def torch_transport(*, timeout_seconds: float = TIMEOUT_SECONDS) -> StoreTransport:
    """Return a new transport between the ranks of torch.distributed; every rank calls this, in the same order.

    It uses the default group's store, not the group: any backend will do, and no collective of the training is
    disturbed.

    timeout_seconds: after which a store that does not answer is given up.

    Raises: RankError or WaitTimeout if the store cannot be reached; ValueError of torch.distributed if it is not
        initialised.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    default = distributed_c10d._get_default_store()
    # A connection of its own, where PyTorch has that (2.8): one that is shared answers one thread after the other.
    own = asked_in_time(default.clone, _KEEPER, timeout_seconds) if hasattr(default, "clone") else default
    transport = StoreTransport(
        distributed_c10d.PrefixStore(f"{_life_in(default, own, timeout_seconds)}/{next(_made)}", own),
        distributed.get_rank(),
        distributed.get_world_size(),
        keeper=_KEEPER,
        timeout_seconds=timeout_seconds,
    )
    keep_until_taken(transport, default)
    return transport


def _life_in(default: Any, own: Any, timeout_seconds: float) -> str:
    """Return what messages of these processes begin with in a store, and no others that it may have.

    torchrun restarts processes over one store. How often it did is no name: an agent that joins later has counted none.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    global _life
    if _life is None or _life[0] is not default:
        name = "0"
        if "TORCHELASTIC_RESTART_COUNT" in os.environ:
            name = name_of_life(
                distributed_c10d.PrefixStore("penstock/lives", own),
                distributed.get_rank(),
                distributed.get_world_size(),
                keeper=_KEEPER,
                timeout_seconds=timeout_seconds,
            )
        _life = default, f"penstock/{name}"
    return _life[1]
