"""On which device each node of a graph runs, by search: the greedy rule sees one node at a time, and is improved. Pure.

The search begins with the greedy placement and with all on one device, and moves a node, or a run of nodes that follow
each other alone, as long as that ends the step earlier. Moving a branch as a whole matters: moved node by node, each
one pays for the link until the last has followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.policy.graph_placement import (
    NoFeasibleDevice,
    PlacedNode,
    Placement,
    feasible_devices,
    groups_of,
    place,
)

#: Of all simulated executions, in nodes: about ten seconds.
_MOST_NODES = 1_000_000


def place_searched(
    nodes: Sequence[PlacedNode],
    devices: Sequence[str],
    latency_seconds: float,
    bytes_per_second: float,
    *,
    fixed: Mapping[str, str] | None = None,
    memory_bytes: Mapping[str, float] | None = None,
    links: Mapping[tuple[str, str], tuple[float, float]] | None = None,
) -> Placement:
    """Return where the nodes of an acyclic graph run so that a step ends as early as was found.

    Arguments, Raises: as of `place`.
    """
    groups = groups_of(nodes)
    fixed = _held(fixed, groups)
    feasible = feasible_devices(nodes, devices, groups)
    tries_left = _MOST_NODES // max(1, len(nodes))
    simulate = partial(
        place, nodes, devices, latency_seconds, bytes_per_second, memory_bytes=memory_bytes, links=links
    )

    def placed_with(device: Mapping[str, str]) -> Placement | None:
        nonlocal tries_left
        tries_left -= 1
        return _placed_with(device, nodes, simulate, memory_bytes)

    greedy = simulate(fixed=fixed)
    starts = [greedy.device, *_on_one(greedy, feasible, devices, fixed)]
    runs = [
        (names, [d for d in devices if all(d in feasible[name] for name in names)])
        for names in _runs(nodes)
        if not fixed.keys() & names
    ]
    best = greedy
    for start in starts:
        if (placed := placed_with(start)) is None:
            continue
        is_better = True
        while is_better and tries_left > 0:
            is_better = False
            for names, may in runs:
                for device in may:
                    if tries_left > 0 and any(placed.device[name] != device for name in names):
                        moved = {member.name: device for name in names for member in groups[name]}
                        found = placed_with({**placed.device, **moved})
                        if found is not None and found.end_seconds < placed.end_seconds * (1 - 1e-9):
                            placed, is_better = found, True
        if placed.end_seconds < best.end_seconds * (1 - 1e-9):
            best = placed
    return greedy if best is greedy else _explained(best, greedy)


def rivals(
    best: Placement,
    nodes: Sequence[PlacedNode],
    devices: Sequence[str],
    latency_seconds: float,
    bytes_per_second: float,
    *,
    fixed: Mapping[str, str] | None = None,
    memory_bytes: Mapping[str, float] | None = None,
    links: Mapping[tuple[str, str], tuple[float, float]] | None = None,
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
    feasible = feasible_devices(nodes, devices, groups)
    simulate = partial(
        place, nodes, devices, latency_seconds, bytes_per_second, memory_bytes=memory_bytes, links=links
    )
    found = [
        placed
        for device in _on_one(best, feasible, devices, fixed)
        if (placed := _placed_with(device, nodes, simulate, memory_bytes))
    ]
    most = best.end_seconds * (len(devices) + 0.5)
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
    device: Mapping[str, str],
    nodes: Sequence[PlacedNode],
    simulate: Callable[..., Placement],
    memory_bytes: Mapping[str, float] | None,
) -> Placement | None:
    """Return the placement that has nodes where it is said; None if it cannot be, such as for want of memory.

    simulate: `place`, of all but what is fixed.
    """
    held = dict.fromkeys(device.values(), 0.0)
    for node in nodes:
        held[device[node.name]] += node.holds_bytes
    if any(held[each] > nbytes for each, nbytes in (memory_bytes or {}).items() if each in held):
        return None
    try:
        return simulate(fixed=device)
    except NoFeasibleDevice:
        return None


def _explained(best: Placement, greedy: Placement) -> Placement:
    """Return a placement with a reason for each node that runs elsewhere than node by node."""
    why = f"the step ends at {best.end_seconds:.6g} s so, and at {greedy.end_seconds:.6g} s node by node"
    return replace(
        best,
        reason={
            name: greedy.reason[name] if device == greedy.device[name] else why
            for name, device in best.device.items()
        },
    )


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
