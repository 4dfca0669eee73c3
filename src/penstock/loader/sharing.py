"""What ranks keep for each other: they meet while their loaders are made, map memory of one host, connect to others.

    together   each says what it can keep, and where it can be sent to
    together   each works out what all keep, makes its own memory, sends it to the others of its host, and listens
    together   each receives theirs, connects to ranks of other hosts, and makes the rest of its loader

What shall be where is never said by message: it follows from the plan. What is there already is in the logs that lie
beside the samples; ranks of other hosts are sent the ids in it.
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.loader.config import HOST, HOSTS, LoaderConfig
from penstock.loader.ranks_memory import RanksMemory
from penstock.loader.setup import Draft, Setup, Sharing, finish, shared_among
from penstock.ranks import named_ranks
from penstock.ranks.descriptors import DescriptorExchange, host_id
from penstock.ranks.remote_peers import FarRank, RemotePeers
from penstock.store import MemoryTier
from penstock.store.host_memory import HostMemory, KeptLog, PeerMemory, checksum_of
from penstock.units import is_integer

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_zmq import ZmqCarrier

#: A rank sends its memory, and the log of what is in it.
_DESCRIPTORS = 2


class Meeting:
    """One rank's part: `offer`, `send` and `receive`. What it has made and nobody has taken over is closed with it.

    draft: makes the first part of the loader; what that opens is closed by its argument.
    """

    def __init__(self, draft: Callable[[ExitStack], Draft]) -> None:
        self._closing = ExitStack()
        self._new_draft = draft
        #: To ranks of other hosts, from `send` until `receive` has them.
        self._carrier: ZmqCarrier | None = None

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
        about: dict[str, Any] = {
            "rank": draft.rank,
            "tier_bytes": draft.budget.tier_bytes,
            "network": host_id(),
        }
        self._offer = about | self._exchange.offer
        return self._offer

    def send(self, offers: Sequence[dict[str, Any]], first: tuple[int, int]) -> dict[str, Any]:
        """Make the memory of this rank and send it to the others of its host; return what all need to know of it.

        offers: of all ranks. first: (epoch, step) at which the run begins.
        Raises: ConfigError where two processes of the host read as one rank, or this one cannot listen; what the policy
            raises.
        """
        draft, host = self._draft, self._offer["host"]
        here = {each["rank"]: each for each in offers if each["host"] == host}
        far = [each for each in offers if each["host"] != host and draft.config.share == HOSTS]
        counts = Counter(each["rank"] for each in offers)
        if several := sorted(rank for rank, count in counts.items() if count > 1):
            raise ConfigError(
                f'share is "{draft.config.share}", and several processes read as {named_ranks(several)}: those '
                "that work on the same samples, as under tensor parallelism, do not share memory yet; leave share= out"
            )
        ranks = tuple(sorted([*here, *(each["rank"] for each in far)]))
        tier_bytes = min(each["tier_bytes"] for each in (*here.values(), *far))
        shared = replace(shared_among(draft, ranks, tier_bytes, first), is_mapped=not far)
        if far:
            self._carrier = _new_carrier(far, self._offer["network"], int(draft.samples.sizes_bytes.max()))
            self._closing.callback(self._close_carrier)
        wakes_by = None if self._carrier is None else self._carrier.wakes_by
        log = KeptLog(shared.kept[draft.rank].samples.size, wakes_by)
        self._closing.callback(log.close)
        tier = MemoryTier(max(1, tier_bytes), partial(Arena, is_shared=True), log)
        self._closing.callback(tier.close)
        self._sharing = Sharing(shared, ranks, tier)
        self._log = log
        for rank, offer in here.items():
            if rank != draft.rank:
                self._exchange.send(offer, draft.rank, [tier.arena.descriptor, log.arena.descriptor])
        connect = {} if self._carrier is None else {"connect": self._carrier.offer}
        return {"rank": draft.rank, "generation": log.generation, "host": host, **connect}

    def receive(self, sent: Sequence[Mapping[str, Any]]) -> Setup:
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
        others = RanksMemory(HostMemory(peers, self._draft.samples.sizes_bytes), self._far_of(sent))
        self._closing.callback(others.close)
        setup = finish(self._draft, replace(sharing, peers=others))
        self._closing.pop_all()  # the loader's fetcher closes what is left
        return setup

    def _far_of(self, sent: Sequence[Mapping[str, Any]]) -> RemotePeers | None:
        """Return the ranks of other hosts, connected to; None where there are none."""
        if self._carrier is None:
            return None
        far = {each["rank"]: each for each in sent if each["host"] != self._offer["host"]}
        self._carrier.connect({rank: each["connect"] for rank, each in far.items()})
        kept, tier = self._sharing.shared.kept, self._sharing.tier
        assert tier is not None, "it was made with the carrier"
        # As another process would attach them: they stay until the last answer was given.
        memory, log = (
            Arena.attach(os.dup(each.descriptor), is_read_only=True) for each in (tier.arena, self._log.arena)
        )
        carrier, self._carrier = self._carrier, None
        return RemotePeers(
            carrier,
            PeerMemory(memory, log, self._log.generation, kept[self._draft.rank].samples),
            {rank: FarRank(each["generation"], kept[rank].samples.size) for rank, each in far.items()},
            self._draft.samples.sizes_bytes,
            checksum_of,
            self._draft.on.network_bytes_per_second,
        )

    def _close_carrier(self) -> None:
        if self._carrier is not None:
            self._carrier.close()


def _new_carrier(far: Sequence[Mapping[str, Any]], network: str, largest_bytes: int) -> ZmqCarrier:
    """Return what connects this rank to those of other hosts. far: what these offered. network: of this rank.

    Raises: ConfigError where pyzmq is missing, or there is no address by which other hosts reach this one.
    """
    try:
        from penstock.ranks.carrier_zmq import INTERFACE, ZmqCarrier, address_of_this_host
    except ImportError as error:
        raise ConfigError(
            'share="hosts" needs pyzmq on several hosts, which is not installed: '
            "pip install 'penstock[peers]', or give share=\"host\""
        ) from error
    address = address_of_this_host()
    if ipaddress.ip_address(address).is_loopback and any(each["network"] != network for each in far):
        raise ConfigError(
            f"this host has the address {address} for other ranks, by which no other host reaches it: set {INTERFACE} "
            "to the network interface that the hosts have in common, such as eth0, or to its address"
        )
    return ZmqCarrier(address, largest_bytes)


def check_sharing(config: LoaderConfig, uncompared: str, *, is_in_job: bool) -> bool:
    """Return whether ranks are to meet: not where one reads everything.

    Raises: ConfigError where they do not know each other.
    """
    if config.share not in (HOST, HOSTS) or (config.world_size or 1) == 1:
        return False
    if not is_in_job:
        raise ConfigError(
            f'share is "{config.share}", and the {config.world_size} ranks of this loader do not know each other '
            f"({uncompared}): call torch.distributed.init_process_group before, under torchrun; or give ranks=; or "
            "leave share= out"
        )
    return True


def first_of(state: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the (epoch, step) at which a run begins that resumes from a state, as far as that says."""
    places = [state.get(name) if state is not None else 0 for name in ("epoch", "step")]
    epoch, step = (int(place) if is_integer(place) and place >= 0 else 0 for place in places)
    return epoch, step
