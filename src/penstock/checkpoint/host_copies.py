"""The newest snapshot in a folder that each host has for itself, in its memory: what is lost with a host, the next has.

    after a save      every rank   its own part ──▶ the folder of its host
                      some ranks   parts of the host before ──message──▶ the folder of their host
    before a restore  some ranks   what their host lacks ──message──▶ its folder, from where all ranks read

`penstock.policy.host_copies` decides which. A folder in memory, such as in /dev/shm, outlives the processes; its files
are those of the snapshot, and are checked as these are. It is the work of the save's thread: training waits for it only
where it waits for the save.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from penstock.checkpoint.files.catalog import Catalog
from penstock.checkpoint.files.manifest import folder_of, step_of
from penstock.checkpoint.files.parts import checksum_of
from penstock.checkpoint.files.reading import load_manifest
from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.local import LocalTier, named_errors
from penstock.checkpoint.tiers.tier import MANIFEST
from penstock.errors import DataError, FormatError, PenstockError
from penstock.files import write_whole
from penstock.policy.host_copies import (
    Copies,
    HeldSnapshot,
    Pull,
    plan_copies,
    plan_gathering,
    restorable_chain,
)
from penstock.ranks import Ranks
from penstock.ranks.carrier_of_job import carrier_of_job, free_tag
from penstock.ranks.descriptors import host_id
from penstock.ranks.remote_peers import FarRank, Ids, RemotePeers
from penstock.ranks.transport import TIMEOUT_SECONDS, pause_seconds

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_mpi import MpiCarrier
    from penstock.ranks.carrier_zmq import ZmqCarrier

#: Files travel in pieces of so many bytes, and so many are asked for at a time.
_CHUNK_BYTES, _CHUNKS_AT_ONCE = 4 << 20, 4
#: Of a link of which nothing is known; an answer is late after several times as long.
_BYTES_PER_SECOND = 100e6
#: A file of the folder that says of which store the copies are: what has none is nobody's to empty.
_MARK = ".host-copies"
_NO_NEWS = np.empty(0, np.int64)


class _File(NamedTuple):
    """A file of a snapshot. tier: number of the one where it was saved. part: its number; None: the manifest."""

    step: int
    tier: int
    name: str
    nbytes: int
    part: int | None

    @property
    def path(self) -> str:
        return f"{folder_of(self.step)}/{self.name}"


class _CopyDecision(NamedTuple):
    """What rank 0 decided: which files, and who copies them. kept: steps that stay while they do."""

    files: list[_File]
    copies: Copies
    kept: list[int]

    @classmethod
    def read(cls, written: Any) -> _CopyDecision:
        """Return what `write` returned, from JSON."""
        files, own, pulls, kept = written
        return cls([_File(*each) for each in files], Copies(own, [Pull(*each) for each in pulls]), kept)

    def write(self) -> list[Any]:
        return [self.files, self.copies.own, self.copies.pulls, self.kept]


class _Place(NamedTuple):
    """Where a rank is.

    host: whose folder it sees. network: see `host_id`. tag: see `free_tag`.
    """

    host: str
    network: str
    tag: int


class HostCopies:
    """Copies of one store's snapshots in folders of the hosts. All ranks make the same calls; one thread at a time."""

    def __init__(
        self, folder: str | os.PathLike[str], catalog: Catalog, ranks: Ranks, report: Callable[[str], None]
    ) -> None:
        """folder: on each host, in its memory. catalog: of the store. report: called with a line; never fails."""
        self._tier = LocalTier(folder)
        self._path = self._tier.path
        self._store, self._ranks, self._report = catalog, ranks, report
        self._address = _address_of(catalog)
        #: Of the folder alone: what to restore from, once `gather` has found something.
        self.catalog = Catalog([self._tier])
        self._has_copied = False
        #: Steps of what was last gathered, and of copies that may be damaged: the next save makes these anew.
        self._gathered: set[int] = set()
        self._damaged: set[int] = set()

    def copy(self, step: int, uid: str) -> None:
        """Copy a snapshot that was just saved, and forget those that it does not need. What fails is reported."""
        what = f"the copy of step {step} on the hosts"
        try:
            places = self._places(what)
            decide = partial(self._decide_copy, step, places)
            decision = _CopyDecision.read(
                self._ranks.gather_then_decide(what, partial(self._held_cleaned, places, step, uid), decide)
            )
            self._has_copied = True
            if self._is_first(places):
                self._keep_only(set(decision.kept))
            self._move(what, places, decision)
            if self._is_first(places):
                self._keep_only({file.step for file in decision.files}, self._not_mine(places, decision))
        except Exception as error:  # whatever it is: the snapshot is durable
            self._report(f"step {step} is not copied to {self._path}, on the hosts: {error}")

    def gather(self, step: int | None) -> int | None:
        """Have each host hold all files of a snapshot that the hosts have together; return its step.

        step: of the snapshot; None: the one that was saved last.
        Returns: None where they have none, or the store has another; what fails is reported.
        """
        if self._ranks.size == 1 and not self._path.exists():
            return None
        what = "the copies of snapshots on the hosts"
        try:
            places = self._places(what)
            decide = partial(self._decide_gather, step, places)
            found = self._ranks.gather_then_decide(what, partial(self._held, places), decide)
            if found is None:
                return None
            decision = _CopyDecision.read(found)
            self._gathered = {file.step for file in decision.files}
            self._move(what, places, decision)
        except PenstockError as error:
            self._report(f"nothing is restored from {self._path}, on the hosts: {error}")
            return None
        return decision.files[-1].step

    def mark_damaged(self) -> None:
        """Have the next save make those copies anew that were gathered last: a restore found some to be damaged.

        Until then they stay: where the store cannot be read, those of other hosts may be whole.
        """
        self._damaged = self._gathered

    def remove(self) -> None:
        """Remove what this store has copied; never fails."""
        if self._has_copied and self._said_in_mark() == self._address:
            self._keep_only(set())
            with suppress(OSError):
                (self._path / _MARK).unlink(missing_ok=True)
                self._path.rmdir()

    # -- What a host has ---------------------------------------------------------------------------------------

    def _places(self, what: str) -> list[_Place]:
        """Return where each rank is, once its host has the folder."""

        def place() -> _Place:
            status = self._made()
            host = f"{host_id()} {status.st_dev} {status.st_ino}"
            return _Place(host, host_id(), free_tag(self._ranks.transport))

        return [_Place(*each) for each in self._ranks.gather_then_decide(f"{what}: the hosts", place)]

    def _is_first(self, places: Sequence[_Place]) -> bool:
        """Return whether this rank is the first of its host."""
        return _hosts_of(places)[self._ranks.rank] == self._ranks.rank

    def _held_cleaned(self, places: Sequence[_Place], step: int, uid: str) -> list[HeldSnapshot]:
        """Return what the host has once what is of no use is removed.

        That is what has no manifest, or another one of a step, what is damaged, and files that are not whole: no rank
        of this host writes one yet, for none knows what rank 0 decided.
        """
        held = self._held(places)
        if self._is_first(places):
            held = [
                each
                for each in held
                if each.step not in self._damaged and (each.step != step or each.uid == uid)
            ]
            steps = {each.step for each in held}
            self._keep_only(
                steps, {f"{folder_of(one)}/{name}" for one in steps for name in self._unfinished(one)}
            )
        self._damaged = set()
        return held

    def _unfinished(self, step: int) -> list[str]:
        """Return names of files of a snapshot that a copy that was killed left."""
        with suppress(OSError):
            return [name for name in os.listdir(self._path / folder_of(step)) if name.startswith(".")]
        return []

    def _not_mine(self, places: Sequence[_Place], decision: _CopyDecision) -> set[str]:
        """Return the paths of files that this host would not have if it had copied all of them anew."""
        hosts, files = _hosts_of(places), decision.files
        anew = plan_copies(hosts, [file.part for file in files], dict.fromkeys(hosts, ()))
        copied = [(rank, number) for rank, own in enumerate(anew.own) for number in own]
        copied += [(pull.to, pull.file) for pull in anew.pulls]
        mine = {number for rank, number in copied if hosts[rank] == self._ranks.rank}
        return {file.path for number, file in enumerate(files) if number not in mine}

    def _made(self) -> os.stat_result:
        """Make the folder if it is missing, and return what it is.

        Raises: DataError if it is not for copies of this store.
        """
        with named_errors(self._path):
            self._path.mkdir(0o700, parents=True, exist_ok=True)
            status, there = self._path.stat(), os.listdir(self._path)
            is_other = _MARK not in there and any(not name.startswith(_MARK) for name in there)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022 or is_other:
                raise DataError(
                    f"{self._path} is another user's, or others may write to it, or it holds something else, and what "
                    "holds copies is emptied: name an empty folder of your own, or one that is not there"
                )
            if _MARK not in there:
                write_whole(self._path / _MARK, self._address)
            if (other := self._said_in_mark()) != self._address:
                raise DataError(
                    f"{self._path} holds copies of {os.fsdecode(other) or 'another store'}, and this is "
                    f"{os.fsdecode(self._address)}: name another folder, or remove this one"
                )
        return status

    def _said_in_mark(self) -> bytes:
        """Return of which store the folder holds copies; empty where it does not say."""
        try:
            return (self._path / _MARK).read_bytes()
        except OSError:
            return b""

    def _held(self, places: Sequence[_Place]) -> list[HeldSnapshot]:
        """Return what the host has of snapshots whose manifest is there; its first rank says so."""
        held = []
        for folder in self._tier.folders() if self._is_first(places) else ():
            with suppress(FormatError, DataError, FileNotFoundError):
                manifest = load_manifest(self._tier, folder)
                files = {part.file: part.nbytes for part in manifest.parts} | {MANIFEST: manifest.file_bytes}
                there = [name for name, nbytes in files.items() if self._has(folder, name, nbytes)]
                reference_uid = manifest.reference.uid if manifest.reference else ""
                held.append(
                    HeldSnapshot(
                        manifest.step, manifest.uid, manifest.created_seconds, reference_uid, files, there
                    )
                )
        return held

    def _has(self, folder: str, name: str, nbytes: int) -> bool:
        try:
            return (self._path / folder / name).stat().st_size == nbytes
        except OSError:
            return False

    def _keep_only(self, steps: set[int], without: Collection[str] = ()) -> None:
        """Remove other snapshots, and some files of these."""
        kept = {folder_of(step) for step in steps}
        with suppress(DataError):
            for folder in set(self._tier.folders()) - kept:
                if step_of(folder) is None:
                    continue  # somebody else's
                shutil.rmtree(self._path / folder, ignore_errors=True)
        for path in without:
            with suppress(OSError):
                (self._path / path).unlink(missing_ok=True)

    # -- What rank 0 decides ------------------------------------------------------------------------------------

    def _decide_copy(self, step: int, places: Sequence[_Place], offers: Sequence[Any]) -> list[Any]:
        files, step_of = [], {}
        for link in self._store.chains(step)[0]:
            manifest = self._store.manifest(link.tier, link.step)
            assert manifest is not None, "what has a restore chain has manifests"
            for number, part in enumerate(manifest.parts):
                files.append(_File(link.step, link.tier, part.file, part.nbytes, number))
            files.append(_File(link.step, link.tier, MANIFEST, manifest.file_bytes, None))
            step_of[link.uid] = link.step
        hosts = _hosts_of(places)
        held_by = _held_by(hosts, offers)
        # What copies that failed left is of no use, and would fill the memory.
        before = restorable_chain((each for of_host in held_by.values() for each in of_host), None)
        copies = plan_copies(hosts, [file.part for file in files], _numbers_held(files, held_by, step_of))
        return _CopyDecision(files, copies, [*step_of.values(), *(each.step for each in before)]).write()

    def _decide_gather(
        self, step: int | None, places: Sequence[_Place], offers: Sequence[Any]
    ) -> list[Any] | None:
        hosts = _hosts_of(places)
        held = _held_by(hosts, offers)
        chain = restorable_chain((each for of_host in held.values() for each in of_host), step)
        if not chain or not self._is_of_store(chain[-1], step):
            return None
        files = [
            _File(each.step, 0, name, nbytes, None) for each in chain for name, nbytes in each.files.items()
        ]
        numbers = _numbers_held(files, held, {each.uid: each.step for each in chain})
        copies = Copies([[] for _ in hosts], plan_gathering(hosts, len(files), numbers))
        return _CopyDecision(files, copies, []).write()

    def _is_of_store(self, found: HeldSnapshot, step: int | None) -> bool:
        """Return whether the store has the same to restore, or cannot say what it has."""
        try:
            self._store.look()
        except DataError as error:
            name = self._store.tiers[-1].name
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.created_seconds))
            self._report(
                f"step {found.step}, saved {when}, is taken from the hosts' memory, the newest there of {name}, which "
                f"may have a newer one and cannot be listed: {error}"
            )
            return True
        steps = self._store.steps()
        if not steps or found.step != (steps[-1] if step is None else step):
            return False
        manifests = [copy.manifest for copy in self._store.copies(found.step)]
        return bool(manifests) and all(each is None or each.uid == found.uid for each in manifests)

    def _move(self, what: str, places: Sequence[_Place], decision: _CopyDecision) -> None:
        """Do what was decided; when this returns, all ranks have."""
        with _Move(self._path, self._store, self._ranks, places, decision) as move:
            offers = self._ranks.gather_then_decide(f"{what}: own parts", move.copy_own)
            if decision.copies.pulls:
                self._ranks.gather_then_decide(f"{what}: parts of other hosts", partial(move.pull, offers))


class _Move:
    """What one rank copies: `copy_own`, then, once all have, `pull`. Others are answered until it is left."""

    def __init__(
        self, path: Path, store: Catalog, ranks: Ranks, places: Sequence[_Place], decision: _CopyDecision
    ) -> None:
        self._path, self._store, self._places, self._decision = path, store, places, decision
        self._rank, self._transport = ranks.rank, ranks.transport
        self._others = _others_of(ranks.rank, decision.copies.pulls)
        self._shelf = _Shelf(path, decision.files)
        #: From when this rank listens until who reads has it.
        self._carrier: MpiCarrier | ZmqCarrier | None = None
        self._peers: RemotePeers | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._peers is not None:
            self._peers.close()
        elif self._carrier is not None:
            self._carrier.close()

    def copy_own(self) -> dict[str, Any] | None:
        """Copy this rank's own files from where they were saved; return by what others reach it, as JSON."""
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
        for number in self._decision.copies.own[self._rank]:
            file = self._decision.files[number]
            tier = self._store.tiers[file.tier]
            with (
                named_errors(self._path),
                closing(tier.open(folder_of(file.step), file.name)) as reader,
                self._new(file) as write,
            ):
                for begin, end in pairwise([*range(0, file.nbytes, _CHUNK_BYTES), file.nbytes]):
                    reader.read_into(begin, buffer[: end - begin])
                    write(buffer[: end - begin])
        if not self._others:
            return None
        self._carrier = carrier_of_job(
            self._transport,
            max(place.tag for place in self._places),
            {self._places[other].network for other in self._others},
            _CHUNK_BYTES,
            what="host_copies=",
            otherwise="leave it out",
        )
        return {"connect": self._carrier.offer, "generation": self._shelf.generation}

    def pull(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """Copy what this rank is to copy from other hosts. offers: of all ranks."""
        if self._carrier is None:
            return
        self._carrier.connect({other: offers[other]["connect"] for other in self._others})
        self._peers = peers = RemotePeers(
            self._carrier,
            self._shelf,
            {other: FarRank(offers[other]["generation"], 0) for other in self._others},
            self._shelf.sizes_bytes,
            checksum_of,
            _BYTES_PER_SECOND,
        )
        for pull in self._decision.copies.pulls:
            if pull.to == self._rank:
                with self._new(self._decision.files[pull.file]) as write:
                    for chunk in _chunks(peers, pull.source, self._shelf.chunks_of(pull.file)):
                        write(chunk)

    @contextmanager
    def _new(self, file: _File) -> Iterator[Callable[[Bytes], object]]:
        """Give what appends to a new file of this host; it has its name once it is complete."""
        path = self._path / file.path
        unfinished = path.with_name(f".{file.name}-{secrets.token_hex(4)}")
        with named_errors(path):
            path.parent.mkdir(0o700, exist_ok=True)
            try:
                with open(unfinished, "xb") as opened:
                    yield lambda data: opened.write(data.data)
                unfinished.rename(path)
            finally:
                unfinished.unlink(missing_ok=True)


class _Shelf:
    """The files that are copied, in a host's folder, in chunks that are numbered on: a `Shelf` of `RemotePeers`."""

    def __init__(self, path: Path, files: Sequence[_File]) -> None:
        self._path, self._files = path, files
        counts = [-(-file.nbytes // _CHUNK_BYTES) for file in files]
        #: First chunk of each file, and of what follows.
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.sizes_bytes = np.full(int(self._first[-1]), _CHUNK_BYTES, np.int64)
        for last, file in zip(self._first[1:] - 1, files, strict=True):
            self.sizes_bytes[last] = file.nbytes - (file.nbytes - 1) // _CHUNK_BYTES * _CHUNK_BYTES
        self.generation = secrets.randbits(63)

    def chunks_of(self, file: int) -> Ids:
        """Return the numbers of a file's chunks."""
        return np.arange(self._first[file], self._first[file + 1])

    def take_news(self) -> Ids:
        return _NO_NEWS

    def look_up(self, ids: Ids, sizes: Ids) -> list[tuple[Bytes, int] | None]:
        return [self._one(int(chunk), int(size)) for chunk, size in zip(ids, sizes, strict=True)]

    def _one(self, chunk: int, nbytes: int) -> tuple[Bytes, int] | None:
        file = int(np.searchsorted(self._first, chunk, "right")) - 1
        try:
            with open(self._path / self._files[file].path, "rb", buffering=0) as opened:
                opened.seek((chunk - int(self._first[file])) * _CHUNK_BYTES)
                data = np.frombuffer(opened.read(nbytes) or b"", np.uint8)
        except OSError:
            return None
        return (data, checksum_of(data)) if data.size == nbytes else None

    def close(self) -> None:
        """Let go of nothing: files are open while they are read."""


def _chunks(peers: RemotePeers, source: int, chunks: Ids) -> Iterator[Bytes]:
    """Yield chunks that another rank has, in their order. Raises: DataError if none comes for a minute."""
    last_seconds = time.monotonic()
    while chunks.size:
        error: DataError | None = None
        for each in peers.read(source, chunks[:_CHUNKS_AT_ONCE]):
            if isinstance(each, DataError):
                error = each
                break
            yield each
            chunks, last_seconds = chunks[1:], time.monotonic()
        if error is not None:
            waited_seconds = time.monotonic() - last_seconds
            if waited_seconds > TIMEOUT_SECONDS:
                raise error
            time.sleep(pause_seconds(waited_seconds))


def _address_of(store: Catalog) -> bytes:
    """Return what identifies a store, whether or not it can be reached now."""
    tier = store.tiers[-1]
    # Links are not followed: where the file system is gone, nobody knows them.
    return os.fsencode(os.path.abspath(tier.path) if isinstance(tier, LocalTier) else tier.name)


def _others_of(rank: int, pulls: Sequence[Pull]) -> set[int]:
    """Return from whom a rank copies, and who copies from it."""
    return {pull.source for pull in pulls if pull.to == rank} | {
        pull.to for pull in pulls if pull.source == rank
    }


def _hosts_of(places: Sequence[_Place]) -> list[int]:
    """Return the host of each rank, by the number of its first rank."""
    first: dict[str, int] = {}
    return [first.setdefault(place.host, rank) for rank, place in enumerate(places)]


def _held_by(hosts: Sequence[int], offers: Sequence[Any]) -> dict[int, list[HeldSnapshot]]:
    """Return by host what its first rank says that it has."""
    return {host: [HeldSnapshot(*each) for each in offers[host]] for host in hosts}


def _numbers_held(
    files: Sequence[_File], held: Mapping[int, Sequence[HeldSnapshot]], step_of: Mapping[str, int]
) -> dict[int, set[int]]:
    """Return by host the numbers of files that it has. step_of: of each snapshot, by its uid."""
    number_of = {(file.step, file.name): number for number, file in enumerate(files)}
    return {
        host: {
            number_of[each.step, name]
            for each in of_host
            if step_of.get(each.uid) == each.step
            for name in each.there
        }
        for host, of_host in held.items()
    }
