"""Samples that other machines decode: asked for by the threads that read, finished by those that decode.

    reader thread ── which place? (`DecodeSplit`) ──here──> stored bytes, as without servers ──> decoded ──> slot
                                 └──a server──> a crop, uint8 (`steps_served`) ──> normalised, laid out ──> slot
                                     late, absent, other bytes ──> stored bytes, from here

Whatever a server does, a sample that is not had from it is read and decoded here, with the bits that it has anyway.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, printable
from penstock.flow.pieces import Pieces
from penstock.flow.work import Failed, InParts, Request
from penstock.loader.crops import FinishingDecoder
from penstock.loader.decode_work import describe_work, steps_served
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import ImageGroup
from penstock.loader.transforms import Pipeline
from penstock.loader.transforms.crops import Crop, CropPass
from penstock.policy.decisions import GROUP_SECONDS
from penstock.policy.decode_split import HERE, DecodeSplit, Given
from penstock.ranks.access import Address, needing_zmq
from penstock.ranks.decode_access import KEY, SERVER, TRAINING, address_of
from penstock.ranks.decode_server import MOST_ANSWER_BYTES, digest_of
from penstock.ranks.peer_messages import GREET, NO_IDS, Message, packed
from penstock.ranks.reaching import LOOK_SECONDS, At, at_once, in_words, look_at
from penstock.ranks.remote_peers import FarRank, Ids, RemotePeers
from penstock.store import Source
from penstock.store.host_memory import checksum_of
from penstock.trace.schema import SOURCE, STAGING

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_zmq import ZmqCarrier

#: Servers that do not answer for so long when a loader is made are asked again later.
_GREETED_SECONDS = 3.0
#: What a server is thought to deliver before it has shown: about 70 crops of 224 x 224 a second.
_UNKNOWN_BYTES_PER_SECOND = 10e6
#: At which bytes are received by one processor: decrypting is most of it (docs/decisions/0037).
_RECEIVED_BYTES_PER_SECOND = 0.75e9
#: Requests that are under way to a server at once, and samples of one where many are wanted.
_REQUESTS, _MOST_TOGETHER = 3, 16
#: How many groups each place has of the samples that are under way, at least, so that none runs out of work.
_GROUPS = 4
#: By so much each group that is read here lets the least that a sample took grow.
_FORGETTING = 1.1
#: Samples that were given to this process and not decoded after so long never are: another step was sought.
_FORGOTTEN_SECONDS = 30.0


class ServedCrop(np.ndarray[Any, np.dtype[np.uint8]]):
    """A crop as a server made it, uint8[height, width, 3]. epoch: for which."""

    epoch: int


class _Wanted(NamedTuple):
    """Crops that a reader waits for. ids: as a server knows them. answer: gets what there is of each, or TURN."""

    ids: Ids
    answer: SimpleQueue[Any]


#: Says to a reader that it is to ask for what all wait for.
_TURN = object()


class _Counter:
    """Where readers that want something of one server meet, so that few messages carry what many want.

    A few requests are under way at once. Who comes meanwhile waits, until one who has an answer gives it the turn to
    ask for all that wait. read: asks; it does not raise. most: samples of a request.
    """

    def __init__(self, read: Callable[[Ids], Sequence[Any]], most: int) -> None:
        self._read, self._most = read, most
        #: Guards what follows.
        self._lock = threading.Lock()
        self._waiting: list[_Wanted] = []
        self._under_way = 0

    def get(self, ids: Ids) -> Sequence[Any]:
        """Return what the server has of some ids."""
        own = _Wanted(ids, SimpleQueue())
        with self._lock:
            has_turn = self._under_way < _REQUESTS
            if has_turn:
                self._under_way += 1
            else:
                self._waiting.append(own)
        if not has_turn and (found := own.answer.get()) is not _TURN:
            return found  # type: ignore[no-any-return]
        with self._lock:
            some, size = [own], ids.size
            while self._waiting and size + self._waiting[0].ids.size <= self._most:
                some.append(self._waiting.pop(0))
                size += some[-1].ids.size
        found = self._read(np.concatenate([each.ids for each in some]))
        with self._lock:
            if self._waiting:
                self._waiting.pop(0).answer.put(_TURN)
            else:
                self._under_way -= 1
        begin = ids.size
        for each in some[1:]:
            each.answer.put(found[begin : begin + each.ids.size])
            begin += each.ids.size
        return found[: ids.size]


class DecodeServers:
    """The servers of a loader, and what is decoded where. Any thread may call anything.

    peers: the servers, as ranks 1, 2 and so on. addresses: of each. samples: of the data set. shape: of a crop.
    steps: of the pipeline, that they make. report: gets a line about a server that refuses later, or did not answer in
        time, each once.
    """

    def __init__(
        self,
        peers: RemotePeers,
        addresses: Sequence[Address],
        samples: int,
        shape: tuple[int, ...],
        steps: int,
        report: Callable[[str], None],
    ) -> None:
        self._peers, self.addresses, self._samples, self._shape = peers, addresses, samples, shape
        self.steps, self._report = steps, report
        crop_bytes = math.prod(shape)
        self._most = max(1, MOST_ANSWER_BYTES // crop_bytes)
        together = min(self._most, _MOST_TOGETHER)
        self._counters = {place: _Counter(partial(peers.read, place), together) for place in peers.ranks}
        #: Guards what follows.
        self._lock = threading.Lock()
        #: Servers of which it was reported that they refuse, or did not answer.
        self._refused, self._lost = set(peers.refused), set[int]()
        self.split = DecodeSplit(len(addresses), crop_bytes / _RECEIVED_BYTES_PER_SECOND)
        #: By sample, what it was given with to this process; in the order of that.
        self._here: dict[int, Given] = {}
        #: Samples that servers decoded, and that they did not though asked.
        self.served = self.missed = 0

    def sends(self) -> bool:
        """Return whether a server may be given something now. Never waits: what it sees may be just past."""
        return self.split.is_worth_sending and not all(map(self._peers.is_away, self._peers.ranks))

    def give(self, samples: int) -> Given:
        """Choose where some samples are decoded: all of them, or the first few."""
        with self._lock:
            has_changes = self._peers.has_news or len(self._peers.refused) > len(self._refused)
            lines = self._changes() if has_changes else []
            now = time.monotonic()
            for sample, given in list(self._here.items()):
                if now - given.began < _FORGOTTEN_SECONDS:
                    break
                self._end_here(sample, None)
            is_long = samples > self._most
            away = [place for place in self._peers.ranks if is_long or self._peers.is_away(place)]
            given = self.split.give(samples, now, away)
        for line in lines:
            self._report(line)
        return given

    def _changes(self) -> list[str]:
        """Return lines about servers that refuse or did not answer, each once."""
        refused = dict(self._peers.refused)
        silent = {place for place, ids in self._peers.take_news() if ids is None}
        lines = [
            _refusal(self.addresses[place - 1], reason)
            for place, reason in refused.items()
            if place not in self._refused
        ] + [
            f"decode server {self.addresses[place - 1]} did not answer in time: what it was given is decoded here, and "
            "it is used again once it answers"
            for place in sorted(silent - self._lost - set(refused))
        ]
        self._refused |= set(refused)
        self._lost |= silent
        return lines

    def make(self, given: Given, epoch: int, ids: Ids) -> list[ServedCrop | None]:
        """Have a server decode samples for an epoch; None for what is not had."""
        found = self._counters[given.place].get(epoch * self._samples + ids)
        crops = [None if isinstance(each, DataError) else self._as_crop(each, epoch) for each in found]
        with self._lock:
            had = sum(crop is not None for crop in crops)
            self.served, self.missed = self.served + had, self.missed + ids.size - had
            if had:
                self.split.done(given, time.monotonic(), had)
            else:
                self.split.missed(given)
        return crops

    def _as_crop(self, data: Crop, epoch: int) -> ServedCrop:
        crop = data.reshape(self._shape).view(ServedCrop)
        crop.epoch = epoch
        return crop

    def keep_here(self, given: Given, ids: Ids) -> None:
        """Take note of samples that are decoded by this process, one after the other."""
        with self._lock:
            before = given.line - given.samples
            for place, sample in enumerate(ids.tolist(), 1):
                self._end_here(sample, None)
                self._here[sample] = given._replace(samples=1, line=before + place)

    def are_here(self, ids: Ids) -> bool:
        """Return whether all of these samples were given to this process, and are not decoded yet."""
        with self._lock:
            return all(sample in self._here for sample in ids.tolist())

    def computed(self, ids: Ids, seconds: float, *, is_here: bool) -> None:
        """Take note of what a thread computed for samples, which are in their slots now."""
        with self._lock:
            self.split.computed(ids.size, seconds, is_here=is_here)
            now = time.monotonic()
            for sample in ids.tolist() if is_here else ():
                self._end_here(sample, now)

    def _end_here(self, sample: int, now: float | None) -> None:
        """Take a sample out of this process's line. now: None if it was not decoded."""
        given = self._here.pop(sample, None)
        if given is None:
            return
        if now is None:
            self.split.missed(given)
        else:
            self.split.done(given, now)

    def end_waits(self) -> None:
        self._peers.end_waits()

    def close(self) -> None:
        self._peers.close()


class ServedFetcher(SourceFetcher):
    """A `Fetcher` that has uint8[rows, columns, 3] of samples that a server decoded, and stored bytes of the others.

    What a tier keeps is read here, and so is what a decode thread reads by itself.
    """

    def __init__(self, servers: DecodeServers, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._servers = servers
        #: Of a sample that is decoded here: of late, the least. inf: not known. Any thread may set it.
        self._read_seconds = math.inf

    @property
    def addresses(self) -> Sequence[Address]:
        """Where the servers are."""
        return self._servers.addresses

    def sends(self) -> bool:
        """Return whether a server may be given something now. Never waits."""
        return self._servers.sends()

    def fetch(self, request: Request) -> list[Any] | Pieces:
        if request.origin != SOURCE:
            return super().fetch(request)
        ids, rests = request.ids, request.rests
        if not request.lasting or self._servers.are_here(ids):  # it was divided
            return self._read_here(request)
        found: list[Any] = [None] * ids.size
        request.at(int(ids[0]))
        # What a tier keeps, it keeps as stored.
        left = (
            [index for index, rest in enumerate(rests) if rest == STAGING] if rests else list(range(ids.size))
        )
        while left:
            given = self._servers.give(len(left))
            some, left = left[: given.samples], left[given.samples :]
            if given.place == HERE:
                self._servers.keep_here(given, ids[some])
                if 1 < given.samples == ids.size and GROUP_SECONDS < self._read_seconds < math.inf:
                    return InParts()
                continue
            for index, crop in zip(some, self._servers.make(given, request.epoch, ids[some]), strict=True):
                found[index] = crop
        missing = [index for index, crop in enumerate(found) if crop is None]
        if len(missing) == ids.size:
            return self._read_here(request)
        if missing:
            rest = request._replace(
                ids=ids[missing], rests=[rests[each] for each in missing if rests], into=None
            )
            for index, data in zip(missing, super().fetch(rest), strict=True):
                found[index] = data
        return found

    def _read_here(self, request: Request) -> list[Any] | Pieces:
        began = time.monotonic()
        data = super().fetch(request)
        each = (time.monotonic() - began) / request.ids.size
        self._read_seconds = min(each, _FORGETTING * self._read_seconds)
        return data

    def read_again(self, sample: int, at: Callable[[int], None]) -> NDArray[np.uint8] | Failed:
        """Return the stored bytes of a sample, in memory of their own: a thread may ask amid what it was brought."""
        (data,) = super().fetch(Request(np.array([sample]), at, lasting=True))
        return data

    def end_waits(self) -> None:
        self._servers.end_waits()
        super().end_waits()

    def close(self) -> None:
        self._servers.close()
        super().close()


class ServedDecoder(FinishingDecoder):
    """An `ImageDecoder` that finishes crops which servers made, and decodes what else it gets.

    fetcher: brings what it decodes.
    """

    def __init__(self, servers: DecodeServers, fetcher: ServedFetcher, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._servers, self._fetcher = servers, fetcher

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        data, epoch = list(group.data), group.load.epoch
        failed: list[tuple[int, Exception]] = []
        # A sample that two epochs need at about the same time is fetched once, and a crop is good for one of them.
        for index in which:
            if data[index].ndim == 3 and data[index].epoch != epoch:
                data[index] = self._fetcher.read_again(group.sample(index), at)
                if isinstance(data[index], Failed):
                    failed.append((index, data[index].error))
        wrong = {index for index, _ in failed}
        group = group._replace(data=data)
        for is_here in (True, False):
            some = [index for index in which if index not in wrong and (data[index].ndim == 1) is is_here]
            if not some:
                continue
            began = time.thread_time()
            if is_here:
                failed += super()._write_images(group, some, at)
            else:
                self._finish(group, [(index, data[index]) for index in some], failed)
            self._servers.computed(group.ids[some], time.thread_time() - began, is_here=is_here)
        return failed


def wanted_under_way(servers: int) -> int:
    """Return for how many samples there is to be space with servers, so that the largest groups keep all places busy.

    Twice what places have: of the oldest batches, which all wait for, most samples are done.
    """
    return 2 * _GROUPS * _MOST_TOGETHER * (servers + 1) if servers else 0


def given_together(under_way: int, servers: int, crop_bytes: int) -> int:
    """Return how many samples are given to a place at once; 0 without servers.

    A choice, a message and what threads hand over cost about a millisecond of a processor, whatever they are about.
    under_way: samples that there is space for.
    """
    if not servers:
        return 0
    most = min(_MOST_TOGETHER, MOST_ANSWER_BYTES // max(1, crop_bytes))
    return max(1, min(most, under_way // (_GROUPS * (servers + 1))))


def served_by(
    servers: DecodeServers, pipeline: Pipeline, reads: Sequence[Any], how: Sequence[Any]
) -> tuple[SourceFetcher, FinishingDecoder]:
    """Return what fetches and decodes with servers. reads, how: as `SourceFetcher` and `ImageDecoder` take them."""
    fetcher, crops = ServedFetcher(servers, *reads), CropPass(pipeline, servers.steps)
    crops.prepare(makes=False)
    return fetcher, ServedDecoder(servers, fetcher, crops, *how)


def connect(
    named: Sequence[str],
    pipeline: Pipeline,
    source: Source,
    epochs: int,
    report: Callable[[str], None],
) -> DecodeServers:
    """Connect to decode servers, and describe to them what they will be asked for.

    named: their addresses. epochs: of the run, at most.
    One that does not answer is reported, and used once it does. Where one refuses all that they could make, servers
    make the crop alone.
    Raises: ConfigError if one refuses that, if there is no key, or pyzmq is not installed.
    """
    most, *fewer = steps_served(pipeline)
    try:
        return _connected(named, pipeline, source, epochs, most, report)
    except ConfigError as refused:
        if not fewer:
            raise
        servers = _connected(named, pipeline, source, epochs, fewer[0], report)
        report(f"{refused}; servers make crops alone, and the steps behind are done here")
        return servers


def _connected(
    named: Sequence[str],
    pipeline: Pipeline,
    source: Source,
    epochs: int,
    steps: int,
    report: Callable[[str], None],
) -> DecodeServers:
    """Connect as `connect` does. steps: that servers make."""
    addresses = [address_of(each) for each in named]
    shape = CropPass(pipeline).shape
    secret, description = KEY.read(KEY.path()), describe_work(pipeline, source, steps)
    carrier = _carrier_to(addresses, math.prod(shape), secret)
    generation = digest_of(description)
    greeting = [packed(Message(GREET, 0, generation, NO_IDS)), description]
    ranks = {place: FarRank(generation, 0, greeting) for place in range(1, len(addresses) + 1)}
    crops = min(len(source) * epochs, np.iinfo(np.int64).max >> 4)
    sizes = np.broadcast_to(np.int64(math.prod(shape)), (crops,))  # of one number
    peers = RemotePeers(carrier, _NothingKept(), ranks, sizes, checksum_of, _UNKNOWN_BYTES_PER_SECOND)
    try:
        peers.greeted.wait(_GREETED_SECONDS)
        for place, reason in peers.refused.items():
            raise ConfigError(_refusal(addresses[place - 1], reason))
        silent = [addresses[place - 1] for place in ranks if peers.is_away(place)]
        for address, why in zip(silent, _why_silent(silent, secret), strict=True):
            report(f"decode server {address} does not answer: {why}; it is used once it does")
        return DecodeServers(peers, addresses, len(source), shape, steps, report)
    except BaseException:
        peers.close()
        raise


def _carrier_to(addresses: Sequence[Address], most_part_bytes: int, secret: bytes) -> ZmqCarrier:
    with needing_zmq("decode_servers needs pyzmq"):
        from penstock.ranks.carrier_zmq import KeyPair, ZmqCarrier
    carrier = ZmqCarrier(None, most_part_bytes, keys=KeyPair.of(secret, TRAINING))
    key = KeyPair.of(secret, SERVER).public.decode("ascii")
    offers = {place: {"address": f"tcp://{each}", "key": key} for place, each in enumerate(addresses, 1)}
    try:
        carrier.connect(offers)
    except BaseException:
        carrier.close()
        raise
    return carrier


def _why_silent(addresses: Sequence[Address], secret: bytes) -> list[str]:
    """Return why nobody answers at each address, in a second. Raises: ConfigError where the server has another key."""
    from penstock.ranks.carrier_zmq import KeyPair, has_key

    key, own = KeyPair.of(secret, SERVER).public, KeyPair.of(secret, TRAINING)

    def look(address: Address) -> str:
        at, more = look_at(place := f"tcp://{address}")
        if at == At.THERE and has_key(place, key, own, LOOK_SECONDS) is False:
            raise ConfigError(
                f"decode server {address} has another key than {KEY.path()}: both need the same file; copy it from "
                f"there, or name its copy as ${KEY.variable}"
            )
        return in_words(at, more)

    return at_once(look, addresses)


def _refusal(address: Address, reason: str) -> str:
    return f"decode server {address} refuses: {printable(reason)}"


class _NothingKept:
    """What a loader keeps for its servers: nothing."""

    generation = 0

    def take_news(self) -> Ids:
        return NO_IDS

    def look_up(self, ids: Ids, sizes: Ids) -> list[tuple[NDArray[np.uint8], int] | None]:
        return [None] * ids.size

    def close(self) -> None:
        """It holds nothing."""
