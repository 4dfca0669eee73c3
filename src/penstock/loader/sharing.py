"""What the ranks of a host keep for each other: they meet while their loaders are made, and map each other's memory.

    together   each says what it can keep, and where it can be sent to
    together   each works out what all keep, makes its own memory, and sends it to the others of its host
    together   each receives theirs, and makes the rest of its loader

What is where is never said by message: it follows from the plan, and from the logs that lie beside the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.loader.config import HOST, LoaderConfig
from penstock.loader.setup import Draft, Setup, Sharing, finish, shared_among
from penstock.ranks import named_ranks
from penstock.ranks.descriptors import DescriptorExchange
from penstock.store import MemoryTier
from penstock.store.host_memory import HostMemory, KeptLog, PeerMemory
from penstock.units import is_integer

#: A rank sends its memory, and the log of what is in it.
_DESCRIPTORS = 2


class Meeting:
    """One rank's part: `offer`, `send` and `receive`. What it has made and nobody has taken over is closed with it.

    draft: makes the first part of the loader; what that opens is closed by its argument.
    """

    def __init__(self, draft: Callable[[ExitStack], Draft]) -> None:
        self._closing = ExitStack()
        self._new_draft = draft

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def offer(self) -> dict[str, Any]:
        """Draft the loader; return what the other ranks need to know, as JSON.

        Raises: what drafting raises; ConfigError where there can be no socket.
        """
        self._draft = draft = self._new_draft(self._closing)
        self._exchange = self._closing.enter_context(DescriptorExchange())
        return {"rank": draft.rank, "tier_bytes": draft.budget.tier_bytes, **self._exchange.offer}

    def send(self, offers: Sequence[dict[str, Any]], first: tuple[int, int]) -> dict[str, int]:
        """Make the memory of this rank and send it to the others of its host; return what they need to know of it.

        offers: of all ranks. first: (epoch, step) at which the run begins.
        Raises: ConfigError where two processes of the host read as one rank; what the policy raises.
        """
        draft, host = self._draft, self._exchange.offer["host"]
        here = {each["rank"]: each for each in offers if each["host"] == host}
        counts = Counter(each["rank"] for each in offers)
        if several := sorted(rank for rank, count in counts.items() if count > 1):
            raise ConfigError(
                f'share is "host", and several processes read as {named_ranks(several)}: those that work on the same '
                "samples, as under tensor parallelism, do not share memory yet; leave share= out"
            )
        tier_bytes = min(each["tier_bytes"] for each in here.values())
        shared = shared_among(draft, sorted(here), tier_bytes, first)
        log = KeptLog(shared.kept[draft.rank].samples.size)
        self._closing.callback(log.close)
        tier = MemoryTier(max(1, tier_bytes), partial(Arena, is_shared=True), log)
        self._closing.callback(tier.close)
        self._sharing = Sharing(shared, tuple(sorted(here)), tier)
        for rank, offer in here.items():
            if rank != draft.rank:
                self._exchange.send(offer, draft.rank, [tier.arena.descriptor, log.arena.descriptor])
        return {"rank": draft.rank, "generation": log.generation}

    def receive(self, sent: Sequence[Mapping[str, int]]) -> Setup:
        """Return what this rank's loader runs on, once all have sent. sent: what `send` returned on all ranks.

        A rank whose memory did not come keeps nothing for this one.
        """
        sharing = self._sharing
        generations = {each["rank"]: each["generation"] for each in sent if each["rank"] in sharing.ranks}
        peers = {}
        for rank, descriptors in self._exchange.receive(len(sent), _DESCRIPTORS).items():
            memory, log = (Arena.attach(each, is_read_only=True) for each in descriptors)
            if rank in generations:
                peers[rank] = PeerMemory(memory, log, generations[rank], sharing.shared.kept[rank].samples)
        self._exchange.close()
        others = HostMemory(peers, self._draft.samples.sizes_bytes)
        self._closing.callback(others.close)
        setup = finish(self._draft, replace(sharing, peers=others))
        self._closing.pop_all()  # the loader's fetcher closes what is left
        return setup


def check_sharing(config: LoaderConfig, uncompared: str, *, is_in_job: bool) -> bool:
    """Return whether ranks are to meet: not where one reads everything.

    Raises: ConfigError where they do not know each other.
    """
    if config.share != HOST or (config.world_size or 1) == 1:
        return False
    if not is_in_job:
        raise ConfigError(
            f'share is "host", and the {config.world_size} ranks of this loader do not know each other ({uncompared}): '
            "call torch.distributed.init_process_group before, under torchrun; or give ranks=; or leave share= out"
        )
    return True


def first_of(state: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the (epoch, step) at which a run begins that resumes from a state, as far as that says."""
    places = [state.get(name) if state is not None else 0 for name in ("epoch", "step")]
    epoch, step = (int(place) if is_integer(place) and place >= 0 else 0 for place in places)
    return epoch, step
