"""On which device each node of a graph runs, by search: the greedy rule sees one node at a time, and is improved. Pure.

The search begins with the greedy placement and with all on one device, and moves a node, or a run of nodes that follow
each other alone, as long as that ends the step earlier. Moving a branch as a whole matters: moved node by node, each
one pays for the link until the last has followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
    fixed = dict(fixed or {})
    groups = groups_of(nodes)
    feasible = feasible_devices(nodes, devices, groups)
    bound = {member.name for name in fixed for member in groups.get(name, ())}
    tries_left = _MOST_NODES // max(1, len(nodes))

    def placed_with(device: Mapping[str, str]) -> tuple[float, Placement] | None:
        nonlocal tries_left
        tries_left -= 1
        held = dict.fromkeys(devices, 0.0)
        for node in nodes:
            held[device[node.name]] += node.holds_bytes
        if any(held[each] > nbytes for each, nbytes in (memory_bytes or {}).items() if each in held):
            return None
        try:
            found = place(
                nodes,
                devices,
                latency_seconds,
                bytes_per_second,
                fixed=device,
                memory_bytes=memory_bytes,
                links=links,
            )
        except NoFeasibleDevice:
            return None
        return max(found.finish_seconds.values(), default=0.0), found

    greedy = place(
        nodes, devices, latency_seconds, bytes_per_second, fixed=fixed, memory_bytes=memory_bytes, links=links
    )
    starts = [greedy.device]
    starts += [
        {name: d if d in may else greedy.device[name] for name, may in feasible.items()} | fixed
        for d in devices
    ]
    runs = [
        (names, [d for d in devices if all(d in feasible[name] for name in names)])
        for names in _runs(nodes)
        if not bound.intersection(names)
    ]
    best_seconds, best = max(greedy.finish_seconds.values(), default=0.0), greedy
    for start in starts:
        if (found := placed_with(start)) is None:
            continue
        seconds, placed = found
        is_better = True
        while is_better and tries_left > 0:
            is_better = False
            for names, may in runs:
                for device in may:
                    if tries_left > 0 and any(placed.device[name] != device for name in names):
                        moved = {member.name: device for name in names for member in groups[name]}
                        found = placed_with({**placed.device, **moved})
                        if found is not None and found[0] < seconds * (1 - 1e-9):
                            (seconds, placed), is_better = found, True
        if seconds < best_seconds * (1 - 1e-9):
            best_seconds, best = seconds, placed
    return greedy if best is greedy else _explained(best, best_seconds, greedy)


def _explained(best: Placement, seconds: float, greedy: Placement) -> Placement:
    """Return a placement with a reason for each node that runs elsewhere than node by node."""
    first = max(greedy.finish_seconds.values())
    why = f"the step ends at {seconds:.6g} s so, and at {first:.6g} s node by node"
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
