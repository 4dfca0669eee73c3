"""On which device each node of a graph runs, by search: the greedy rule sees one node at a time, and is improved. Pure.

The search begins with the greedy placement and with all on one device, and moves a node, or a run of nodes that follow
each other alone, as long as that ends the step earlier. Moving a branch as a whole matters: moved node by node, each
one pays for the link until the last has followed. In the best placement that moves lead to, two nodes of two devices
change places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from penstock.policy.graph_placement import (
    Devices,
    NoFeasibleDevice,
    PlacedNode,
    Placement,
    feasible_devices,
    groups_of,
    place,
)

#: Of all simulated executions, in nodes: about ten seconds.
_MOST_NODES = 1_000_000
#: Of tries: moves help more, and there are more pairs of nodes than time.
_MOVES_PER_EXCHANGE = 10


def place_searched(
    nodes: Sequence[PlacedNode], devices: Devices, *, fixed: Mapping[str, str] | None = None
) -> Placement:
    """Return where the nodes of an acyclic graph run so that a step ends as early as was found.

    Where the greedy placement has no space, what may run on one device is there. Arguments, Raises: as of `place`.
    """
    groups = groups_of(nodes)
    fixed = _held(fixed, groups)
    feasible = feasible_devices(nodes, devices.names, groups)
    refused: NoFeasibleDevice | None = None
    try:
        greedy = best = place(nodes, devices, fixed=fixed)
    except NoFeasibleDevice as error:
        refused = error
        greedy = best = _with_space(error, nodes, devices, feasible, fixed)
    loose = {name: may for name, may in feasible.items() if name not in fixed}
    search = _Search(nodes, devices, groups, loose, greedy)
    for start in (greedy.device, *_on_one(greedy, feasible, devices.names, fixed)):
        placed = _placed_with(start, nodes, devices)
        if placed is not None:
            search.placed = placed
            search.improve()
            if search.is_better(search.placed, best):
                best = search.placed
    search.placed = best
    search.exchange()
    best = search.placed
    if refused is not None:
        why = f"has space there; node by node, {refused}"
        return replace(
            best, reason={n.name: greedy.reason[n.name] if n.name in fixed else why for n in nodes}
        )
    # The greedy reasons have times of a placement that was left.
    return greedy if best is greedy else place(nodes, devices, fixed=fixed, found=best.device)


def _with_space(
    refused: NoFeasibleDevice,
    nodes: Sequence[PlacedNode],
    devices: Devices,
    feasible: Mapping[str, Sequence[str]],
    fixed: Mapping[str, str],
) -> Placement:
    """Return a placement that has as much as may run there on one device, and space in all memory.

    Raises: NoFeasibleDevice with why the greedy placement was refused, if none has.
    """
    for device in devices.names:
        there = {name: device for name, may in feasible.items() if device in may}
        if placed := _placed_with({**there, **fixed}, nodes, devices):
            return placed
    raise NoFeasibleDevice(refused.node, f"{refused}; no placement that was tried has space") from refused


class _Search:
    """A placement that is made better as long as a move or an exchange helps, and not too many of either were tried.

    feasible: devices of the nodes that may move.
    """

    def __init__(
        self,
        nodes: Sequence[PlacedNode],
        devices: Devices,
        groups: Mapping[str, Sequence[PlacedNode]],
        feasible: Mapping[str, Sequence[str]],
        placed: Placement,
    ) -> None:
        self._rank = {name: rank for rank, name in enumerate(devices.names)}
        self._nodes, self._devices, self._groups, self._feasible = nodes, devices, groups, feasible
        self._runs = [
            (names, [d for d in devices.names if all(d in feasible[name] for name in names)])
            for names in _runs(nodes)
            if feasible.keys() >= set(names)
        ]
        tries = _MOST_NODES // max(1, len(nodes))
        self._tries, self._exchange_tries = iter(range(tries)), iter(range(tries // _MOVES_PER_EXCHANGE))
        self.placed = placed

    def improve(self) -> None:
        """Change the placement until no move helps."""
        while self._is_better(self._moves(), self._tries):
            pass

    def exchange(self) -> None:
        """Change the placement until no exchange helps, nor a move after one."""
        while self._is_better(self._exchanges(), self._exchange_tries):
            self.improve()

    def _is_better(self, changes: Iterator[dict[str, str]], tries: Iterator[int]) -> bool:
        """Make each change that helps, and return whether any did."""
        is_better = False
        for moved, _ in zip(changes, tries, strict=False):
            found = _placed_with({**self.placed.device, **moved}, self._nodes, self._devices)
            if found is not None and self.is_better(found, self.placed):
                self.placed, is_better = found, True
        return is_better

    def is_better(self, one: Placement, other: Placement) -> bool:
        """Return whether a step ends earlier; of two that end at once, which sends less, or has preferred devices."""
        if abs(one.end_seconds - other.end_seconds) > 1e-9 * other.end_seconds:
            return one.end_seconds < other.end_seconds
        return self._price(one) < self._price(other)

    def _price(self, placed: Placement) -> tuple[int, int]:
        return len(placed.sent), sum(map(self._rank.__getitem__, placed.device.values()))

    def _moves(self) -> Iterator[dict[str, str]]:
        """Yield where nodes run if some of them move to another device."""
        for names, may in self._runs:
            for device in may:
                if any(self.placed.device[name] != device for name in names):
                    yield {member.name: device for name in names for member in self._groups[name]}

    def _exchanges(self) -> Iterator[dict[str, str]]:
        """Yield where nodes go if two that are on two devices, with their groups, change places.

        First come those that run after each other: there are more pairs than tries.
        """
        may = {name for name in self._feasible if self._groups[name][0].name == name}
        firsts = [name for name in self.placed.finish_seconds if name in may]
        pairs = (
            pair for apart in range(1, len(firsts)) for pair in zip(firsts, firsts[apart:], strict=False)
        )
        # Of a large graph, few pairs may be on two devices.
        for one, other in islice(pairs, _MOST_NODES):
            here, there = self.placed.device[one], self.placed.device[other]
            if here != there and there in self._feasible[one] and here in self._feasible[other]:
                yield {member.name: there for member in self._groups[one]} | {
                    member.name: here for member in self._groups[other]
                }


def rivals(
    best: Placement, nodes: Sequence[PlacedNode], devices: Devices, *, fixed: Mapping[str, str] | None = None
) -> list[Placement]:
    """Return other placements that may be faster than `best`, for a trial of real steps: three at most.

    They have on one device whatever may run there. The simulation does not know what devices that compute at once keep
    from each other, such as memory's rate or half of a processor: it may find these up to as many times too slow as
    there are devices. Those that it finds slower than that, and a half, or that move next to nothing, are left out.
    The soonest comes first.
    Arguments: as of `place`. Raises: NoFeasibleDevice.
    """
    groups = groups_of(nodes)
    fixed = _held(fixed, groups)
    feasible = feasible_devices(nodes, devices.names, groups)
    found = [
        placed
        for device in _on_one(best, feasible, devices.names, fixed)
        if (placed := _placed_with(device, nodes, devices))
    ]
    most = best.end_seconds * (len(devices.names) + 0.5)
    takes = {node.name: node.cost_seconds[best.device[node.name]] for node in nodes}

    def is_other(placed: Placement) -> bool:
        moved = sum(takes[name] for name, device in placed.device.items() if device != best.device[name])
        return moved > _LEAST_MOVED * sum(takes.values())

    others = {tuple(each.device.items()): each for each in found if is_other(each)}
    likely = [each for each in others.values() if each.end_seconds <= most]
    return sorted(likely, key=lambda each: each.end_seconds)[:MOST_RIVALS]


#: Each takes a few steps, which may be slower than the others.
MOST_RIVALS = 3
#: Of the time that all nodes take, what those that moved take at least: less can hardly be seen.
_LEAST_MOVED = 0.05


def _held(fixed: Mapping[str, str] | None, groups: Mapping[str, Sequence[PlacedNode]]) -> dict[str, str]:
    """Return where nodes stay: those that are fixed, and all that share a device with them."""
    return {member.name: device for name, device in (fixed or {}).items() for member in groups.get(name, ())}


def _on_one(
    placed: Placement, feasible: Mapping[str, list[str]], devices: Sequence[str], fixed: dict[str, str]
) -> list[dict[str, str]]:
    """Return for each device where nodes are if all that may be there are, and the others as they are placed."""
    return [
        {name: device if device in may else placed.device[name] for name, may in feasible.items()} | fixed
        for device in devices
    ]


def _placed_with(
    device: Mapping[str, str], nodes: Sequence[PlacedNode], devices: Devices
) -> Placement | None:
    """Return the placement that has nodes where it is said; None if it cannot be, such as for want of memory."""
    try:
        return place(nodes, devices, fixed=device)
    except NoFeasibleDevice:
        return None


def _runs(nodes: Sequence[PlacedNode]) -> Iterator[tuple[str, ...]]:
    """Yield nodes, and runs of nodes of which each is the only user of the one before."""
    users: dict[str, list[str]] = {}
    for node in nodes:
        for source in node.inputs:
            users.setdefault(source, []).append(node.name)
    for node in nodes:
        run = [node.name]
        yield (node.name,)
        while len(following := users.get(run[-1], [])) == 1:
            run.append(following[0])
            yield tuple(run)
