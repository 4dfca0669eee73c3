"""Which files of a snapshot each host of a job keeps in its own memory, and who copies them from whom.

    host 0   parts of its ranks ──┐
    host 1   parts of its ranks ◀─┘─┐        each host keeps its own parts, those of the host before it,
    host 2   parts of its ranks   ◀─┘─┐      and the manifest
    host 0                          ◀─┘

So a snapshot outlives the loss of any hosts of which no two follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Pull(NamedTuple):
    """A file that a rank copies from the memory of another rank's host. file: its number."""

    to: int
    source: int
    file: int


@dataclass(frozen=True, slots=True)
class Copies:
    """What is copied for one snapshot.

    own: by rank, numbers of the files that it copies from where they were saved; before `pulls`.
    """

    own: Sequence[Sequence[int]]
    pulls: Sequence[Pull]


class HeldSnapshot(NamedTuple):
    """What one host has of a snapshot.

    reference_uid: of the snapshot that it is a difference to; "" for a baseline.
    files: bytes of all its files, by name. there: names of those that the host has in full.
    """

    step: int
    uid: str
    created_seconds: float
    reference_uid: str
    files: Mapping[str, int]
    there: Collection[str]


def plan_copies(
    hosts: Sequence[int], parts: Sequence[int | None], held: Mapping[int, Collection[int]]
) -> Copies:
    """Return what is copied so that each host has its own parts and those of the host before it.

    hosts: by rank, its host. parts: by file, the number of the part, None for a manifest. held: by host, the files that
    it has. A part is of the rank of its number; where more ranks saved than there are, those begin anew.

    >>> plan_copies([0, 1], [0, 1, None], {0: [], 1: []})
    Copies(own=[[0, 2], [1, 2]], pulls=[Pull(to=1, source=0, file=0), Pull(to=0, source=1, file=1)])
    """
    ranks_of = _ranks_of(hosts)
    order = list(ranks_of)
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    own: list[list[int]] = [[] for _ in hosts]
    pulls = []
    for number, part in enumerate(parts):
        if part is None:
            for host, ranks in ranks_of.items():
                if number not in held[host]:
                    own[ranks[0]].append(number)
            continue
        owner = part % len(hosts)
        home = hosts[owner]
        if number not in held[home]:
            own[owner].append(number)
        if after[home] != home and number not in held[after[home]]:
            ranks = ranks_of[after[home]]
            pulls.append(Pull(ranks[part % len(ranks)], owner, number))
    return Copies(own, pulls)


def plan_gathering(hosts: Sequence[int], files: int, held: Mapping[int, Collection[int]]) -> list[Pull]:
    """Return what is copied so that each host has all of some files, each of which a host has.

    hosts: by rank, its host. held: by host, the numbers of the files that it has.
    """
    ranks_of = _ranks_of(hosts)
    pulls = []
    for number in range(files):
        holders = [host for host in ranks_of if number in held[host]]
        sources = ranks_of[holders[number % len(holders)]]
        for host, ranks in ranks_of.items():
            if host not in holders:
                pulls.append(Pull(ranks[number % len(ranks)], sources[number % len(sources)], number))
    return pulls


def restorable_chain(held: Iterable[HeldSnapshot], step: int | None) -> list[HeldSnapshot]:
    """Return the snapshot of which hosts have all files together, and before it those that it is a difference to.

    held: of all hosts. step: of the snapshot; None: the one that was saved last. Returns: empty where there is none.
    """
    known: dict[str, HeldSnapshot] = {}
    there: dict[str, set[str]] = {}
    for one in held:
        known[one.uid] = one
        there.setdefault(one.uid, set()).update(one.there)
    for last in sorted(known.values(), key=lambda one: one.created_seconds, reverse=True):
        chain: list[HeldSnapshot] = []
        uid = last.uid if step in (None, last.step) else ""
        while uid in known and there[uid] >= known[uid].files.keys() and known[uid] not in chain:
            chain.insert(0, known[uid])
            uid = known[uid].reference_uid
        if chain and not chain[0].reference_uid:
            return chain
    return []


def _ranks_of(hosts: Sequence[int]) -> dict[int, list[int]]:
    """Return the ranks of each host, in the order of the hosts' first ranks."""
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    return ranks_of
