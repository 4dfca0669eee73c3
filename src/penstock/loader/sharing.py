"""What ranks keep for each other: they meet while their loaders are made, map memory of one host, connect to others.

Of what a rank keeps on local disks, the others of its host read the file; those of other hosts ask it, as for memory.

    together   each says what it can keep, and where it can be sent to
    together   one of each host works out what all keep, and sends it to the others of its host
    together   each makes its own memory, sends it to the others of its host, and listens
    together   each receives theirs, connects to ranks of other hosts, and makes the rest of its loader

What shall be where is never said by message: it follows from the plan. What is there already is in the logs that lie
beside the samples; ranks of other hosts are sent the ids in it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.loader.agreeing import Agreed
from penstock.loader.config import HOST, HOSTS, LoaderConfig
from penstock.loader.front_end import FrontEnd
from penstock.loader.local_disk import Disk, place_ids
from penstock.loader.opened import data_of
from penstock.loader.pixels_on_disk import HEAD_BYTES
from penstock.loader.ranks_memory import RanksMemory, Sharing
from penstock.loader.setup import Draft, Setup, drafted, finish, job_among, set_up, tiers_of, without_disks
from penstock.loader.source_samples import stored_of
from penstock.policy.loading import Fill, Loading
from penstock.policy.runnable import shared_loading, shared_of
from penstock.ranks import Ranks, named_ranks
from penstock.ranks.carrier_of_job import carrier_of_job, free_tag
from penstock.ranks.descriptors import DescriptorExchange, host_id
from penstock.ranks.peer_messages import MOST_SAMPLES_BYTES
from penstock.ranks.remote_peers import FarRank, RemotePeers
from penstock.store import MemoryTier, Source
from penstock.store.blocks import BlockTier
from penstock.store.calls import Calls
from penstock.store.disk import DiskTier
from penstock.store.host_memory import FileBytes, HostMemory, KeptLog, PeerMemory, PeerTiers, checksum_of
from penstock.units import is_integer

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_mpi import MpiCarrier
    from penstock.ranks.carrier_zmq import ZmqCarrier


class Meeting:
    """One rank's part: `offer`, `place`, `send`, `receive`. What it has made and nobody has taken is closed with it.

    draft: makes the first part of the loader; what that opens is closed by its argument. job: the ranks that meet.
    report: called with a line.
    """

    def __init__(
        self, draft: Callable[[ExitStack], Draft], job: Ranks, report: Callable[[str], None]
    ) -> None:
        self._closing, self._sent = ExitStack(), ExitStack()
        self._closing.callback(self._sent.close)
        self._new_draft, self._report = draft, report
        self._transport = job.transport
        #: To ranks of other hosts, from `send` until `receive` has them.
        self._carrier: MpiCarrier | ZmqCarrier | None = None

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
        #: By which one rank of the host sends the others what all keep.
        self._placing = self._closing.enter_context(DescriptorExchange())
        source = draft.opened.source
        stored = source if isinstance(source, Source) else stored_of(source)
        assert stored is not None, "of no other data set is anything shared"
        about: dict[str, Any] = {
            "rank": draft.rank,
            "source": data_of(source).place,
            "places": place_ids(stored),
            "tiers_bytes": tiers_of(draft),
            "form_bytes": None if draft.form is None else draft.form.crop_bytes,
            "held": _packed_ids(draft.disks, len(draft.samples.sizes_bytes)),
            "network": host_id(),
            "tag": free_tag(self._transport),
            "placing": self._placing.offer,
        }
        self._offer = about | self._exchange.offer
        return self._offer

    def place(self, offers: Sequence[dict[str, Any]], first: tuple[int, int]) -> None:
        """Work out what all keep, where this rank is the first of its host, and send it to the others there.

        offers: of all ranks. first: (epoch, step) at which the run begins.
        Raises: ConfigError where two processes of the host read as one rank, or one has no memory; what the policy
            raises.
        """
        draft, host = self._draft, self._offer["host"]
        self._here = here = {each["rank"]: each for each in offers if each["host"] == host}
        self._far = far = [each for each in offers if each["host"] != host and draft.config.share == HOSTS]
        counts = Counter(each["rank"] for each in offers)
        if several := sorted(rank for rank, count in counts.items() if count > 1):
            raise ConfigError(
                f'share is "{draft.config.share}", and several processes read as {named_ranks(several)}: those '
                'that work on the same samples, as under tensor parallelism, share by share="jobs", on each host'
            )
        if draft.rank == min(here) and (line := _other_places(here)):
            self._report(line)
        ranks = tuple(sorted([*here, *(each["rank"] for each in far)]))
        of_ranks = {each["rank"]: each["tiers_bytes"] for each in (*here.values(), *far)}
        if none := sorted(rank for rank, tiers in of_ranks.items() if not tiers[0]):
            raise ConfigError(
                f'share is "{draft.config.share}", and no memory is left on {named_ranks(none)} of '
                f"{draft.opened.plan.ranks} for samples that others could read: raise memory= there, or leave share= "
                "out"
            )
        disks = {rank: len(tiers) - 1 for rank, tiers in of_ranks.items()}
        if len(set(disks.values())) > 1:  # one has failed, or was not given: memory alone
            without = named_ranks([rank for rank, count in disks.items() if count < max(disks.values())])
            for disk in draft.disks:
                if disk.tier is not None:
                    disk.tier.close()
            if draft.disks:
                self._report(f"no local disk keeps samples, as there is none, or one less, on {without}")
            draft = self._draft = without_disks(draft)
        of_form = [each["form_bytes"] for each in (*here.values(), *far)]
        if draft.form is not None:
            # How large pictures are each has judged by another one; without memory none keeps any.
            largest = None if None in of_form else replace(draft.form, crop_bytes=max(of_form))
            draft = self._draft = draft._replace(form=largest)
        self._tiers_bytes = {rank: tiers[: 1 + len(draft.disks)] for rank, tiers in of_ranks.items()}
        held = {
            each["rank"]: _ids_of(each["held"])
            for each in (*here.values(), *far)
            if each["held"] and draft.disks
        }
        self._job = job_among(draft, ranks, self._tiers_bytes, first, held)
        self._loading: Loading | None = None
        if draft.rank == min(here):
            self._loading = shared_loading(draft.config.loading_policy, self._job)
            with contextlib.closing(_as_arena(self._loading)) as arena:
                for rank, offer in here.items():
                    if rank != draft.rank:
                        self._placing.send(offer["placing"], draft.rank, [arena.descriptor])

    def _placed(self) -> Loading:
        """Return what all keep, as the first rank of the host has it; where that did not come, work it out."""
        if self._loading is not None:
            return self._loading
        received = self._placing.receive(1, 1).get(min(self._here))
        if received is None:
            return shared_loading(self._draft.config.loading_policy, self._job)
        with contextlib.closing(Arena.attach(received[0], is_read_only=True)) as arena:
            return _of_arena(arena)

    def send(self, offers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make the memory of this rank and send it to the others of its host; return what all need to know of it.

        offers: of all ranks, which have been through `place`. Raises: ConfigError where this rank cannot listen.
        """
        draft, host, here, far = self._draft, self._offer["host"], self._here, self._far
        assert self._job.sharing is not None, "these ranks share"
        ranks = tuple(self._job.sharing)
        shared = replace(shared_of(self._placed(), self._job, [draft.rank]), is_mapped=not far)
        self._placing.close()
        if far:
            self._carrier = carrier_of_job(
                self._transport,
                max(each["tag"] for each in offers),
                {each["network"] for each in far},
                self._most_part_bytes,
                what='share="hosts"',
                otherwise='give share="host"',
            )
            self._closing.callback(self._close_carrier)
        wakes_by = None if self._carrier is None else self._carrier.wakes_by
        count = shared.kept[draft.rank].samples.size
        log = KeptLog(count, wakes_by)
        self._logs = [log, *(KeptLog(count, wakes_by, log.generation) for _ in draft.disks)]
        for each in self._logs:
            self._closing.callback(each.close)
        tier = self._new_tier(max(1, self._tiers_bytes[draft.rank][0]), log)
        self._closing.callback(tier.close)
        self._sharing = Sharing(shared, ranks, self._job.tiers_bytes, self._job.held or {}, tier)
        #: Of each tier, memory or the file that has its samples, and its log.
        self._descriptors = [tier.arena.descriptor, log.arena.descriptor]
        for disk, each in zip(draft.disks, self._logs[1:], strict=True):
            assert isinstance(disk.tier, DiskTier), "others are not shared"
            file = os.open(disk.tier.samples_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._sent.callback(os.close, file)
            self._descriptors += [file, each.arena.descriptor]
        for rank, offer in here.items():
            if rank != draft.rank:
                self._exchange.send(offer, draft.rank, self._descriptors)
        connect = {} if self._carrier is None else {"connect": self._carrier.offer}
        return {"rank": draft.rank, "generation": log.generation, "host": host, **connect}

    def receive(self, sent: Sequence[Mapping[str, Any]]) -> Setup:
        """Return what this rank's loader runs on, once all have sent. sent: what `send` returned on all ranks.

        A rank whose memory did not come keeps nothing for this one.
        """
        sharing = self._sharing
        generations = {each["rank"]: each["generation"] for each in sent if each["rank"] in sharing.ranks}
        received = self._exchange.receive(len(sent), len(self._descriptors))
        peers = {rank: self._attached(rank, generations[rank], each) for rank, each in received.items()}
        self._exchange.close()
        others = RanksMemory(HostMemory(peers, self._sizes_bytes), self._far_of(sent))
        self._closing.callback(others.close)
        setup = finish(self._draft, replace(sharing, peers=others))
        for disk, log in zip(self._draft.disks, self._logs[1:], strict=True):
            assert isinstance(disk.tier, DiskTier)
            disk.tier.tell(log)  # without what `finish` has it give up
        self._sent.close()
        self._closing.pop_all()  # the loader's fetcher closes what is left
        return setup

    @property
    def _has_pictures(self) -> bool:
        return self._draft.form is not None and self._draft.form.is_decoded

    @property
    def _most_part_bytes(self) -> int:
        """What a sample takes at most on its way to another rank; a picture may go as it is stored."""
        if not self._has_pictures:
            return int(self._sizes_bytes.max())
        return max(MOST_SAMPLES_BYTES, int(self._draft.samples.sizes_bytes.max()) + HEAD_BYTES)

    @property
    def _sizes_bytes(self) -> NDArray[np.int64]:
        """What ranks have of each sample; -n: about n bytes."""
        sizes_bytes, form = self._draft.samples.sizes_bytes, self._draft.form
        if form is None:
            return sizes_bytes
        return np.full(sizes_bytes.size, -form.crop_bytes if form.is_decoded else form.crop_bytes)

    def _new_tier(self, capacity_bytes: int, log: KeptLog) -> MemoryTier | BlockTier:
        """Return memory that others map, for samples in their form."""
        new_arena, shape = partial(Arena, is_shared=True), self._draft.samples.crop_shape
        if shape is None:
            return MemoryTier(capacity_bytes, new_arena, log)
        return BlockTier(capacity_bytes, shape, new_arena, log)

    def _far_of(self, sent: Sequence[Mapping[str, Any]]) -> RemotePeers | None:
        """Return the ranks of other hosts, connected to; None where there are none."""
        if self._carrier is None:
            return None
        far = {each["rank"]: each for each in sent if each["host"] != self._offer["host"]}
        self._carrier.connect({rank: each["connect"] for rank, each in far.items()})
        kept, rank = self._sharing.shared.kept, self._draft.rank
        # As another process would attach them: they stay until the last answer was given.
        own = self._attached(rank, self._logs[0].generation, [os.dup(each) for each in self._descriptors])
        carrier, self._carrier = self._carrier, None
        return RemotePeers(
            carrier,
            own,
            {rank: FarRank(each["generation"], kept[rank].samples.size) for rank, each in far.items()},
            self._sizes_bytes,
            checksum_of,
            self._draft.on.network_bytes_per_second,
        )

    def _attached(self, rank: int, generation: int, descriptors: Sequence[int]) -> PeerTiers:
        """Return what a rank of this host keeps. descriptors: that it has sent."""
        kept = self._sharing.shared.kept[rank].samples
        places: list[Arena | FileBytes] = [Arena.attach(descriptors[0], is_read_only=True)]
        places += map(FileBytes, descriptors[2::2])
        logs = (Arena.attach(each, is_read_only=True) for each in descriptors[1::2])
        return PeerTiers(
            [
                PeerMemory(place, log, generation, kept, number)
                for number, (place, log) in enumerate(zip(places, logs, strict=True), 1)
            ]
        )

    def _close_carrier(self) -> None:
        if self._carrier is not None:
            self._carrier.close()


def set_up_together(
    agreed: Agreed,
    front_end: FrontEnd,
    calls: Calls,
    first: tuple[int, int],
    make: Callable[[Callable[[], Setup]], None],
) -> None:
    """Set up what this rank reads with, together with the ranks that keep samples for it, if any do.

    first: (epoch, step) from which on these promise each other what they read first.
    make: makes the rest, by what it is given; called on all ranks together.
    Raises: what setting up and `make` raise, on this rank; an error that names the rank where another one raised it;
        ConfigError where ranks share and do not know each other.
    """
    config, opened = agreed.config, agreed.opened
    if not _are_to_meet(config, agreed.uncompared, is_in_job=agreed.job is not None):
        agreed.together(partial(make, partial(set_up, config, front_end, calls, opened=opened)))
        return
    assert agreed.job is not None, "checked above"
    draft = partial(drafted, config, front_end, calls, opened=opened)
    with Meeting(draft, agreed.job, calls.report) as meeting:
        offers = agreed.together(meeting.offer)
        agreed.together(partial(meeting.place, offers, first))
        sent = agreed.together(partial(meeting.send, offers))
        agreed.together(partial(make, partial(meeting.receive, sent)))


#: Of a fill in an arena: rank, tier, whether it is promised, and how many samples follow behind all of these.
_FILL_COLUMNS = 4


def _as_arena(loading: Loading) -> Arena:
    """Return fills from the store as another process of the host maps them: a head, their columns, and all samples."""
    about = [[each.rank, each.tier, each.is_promised, each.samples.size] for each in loading.fills]
    numbers_of_fills = (number for each in about for number in each)
    head = np.array([loading.reads_for_others, len(about), *numbers_of_fills], np.int64)
    arena = Arena(head.nbytes + 8 * sum(each.samples.size for each in loading.fills), is_shared=True)
    numbers = np.frombuffer(arena.mapping, np.int64)
    numbers[: head.size] = head
    at = head.size
    for each in loading.fills:
        numbers[at : at + each.samples.size] = each.samples
        at += each.samples.size
    return arena


def _of_arena(arena: Arena) -> Loading:
    """Return the decisions of `_as_arena`; their samples are views of it."""
    numbers = np.frombuffer(arena.array, np.int64)
    at = 2 + _FILL_COLUMNS * int(numbers[1])
    fills = []
    for rank, tier, is_promised, count in numbers[2:at].reshape(-1, _FILL_COLUMNS).tolist():
        fills.append(Fill(rank, tier, numbers[at : at + count], is_promised=bool(is_promised)))
        at += count
    return Loading(fills, stages_from_peers=True, reads_for_others=bool(numbers[0]))


def _other_places(here: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a line that names where ranks of a host read from, if that is not one place; else "".

    here: what each has offered, by rank.
    """
    by_place: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(here):
        by_place.setdefault(tuple(here[rank]["places"]), []).append(rank)
    if len(by_place) == 1:
        return ""
    listed = "; ".join(f"{named_ranks(ranks)}: {here[ranks[0]]['source']}" for ranks in by_place.values())
    return (
        f"ranks of this host read from different places and give each other samples ({listed}): names, sizes and "
        "labels are compared, contents are not, so that all have to be copies of one data set"
    )


def _packed_ids(disks: Sequence[Disk], samples: int) -> str:
    """Return which samples disks have, as text; empty where there are none."""
    is_held = np.zeros(samples, bool)
    for disk in disks:
        if disk.tier is not None:
            is_held[disk.tier.held()] = True
    return (
        base64.b64encode(zlib.compress(np.packbits(is_held).tobytes(), 1)).decode() if is_held.any() else ""
    )


def _ids_of(text: str) -> NDArray[np.int64]:
    """Return the samples that `_packed_ids` has packed."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)))


def _are_to_meet(config: LoaderConfig, uncompared: str, *, is_in_job: bool) -> bool:
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
