"""On which device each node runs if steps follow each other as in a pipeline: the busiest device decides. Pure.

Nodes are brought into a line along which tensors flow, nodes that share a device next to each other; the line is cut
into one stretch for each device. Searched are the cuts, and the order of devices, with which neither a device nor a
link has more to do in a step than it must. The least that is enough is found by bisection: for a given time, each
device takes as much of the line as it can.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.policy.graph_placement import (
    Devices,
    NoFeasibleDevice,
    PlacedNode,
    Placement,
    feasible_devices,
    groups_of,
    needs_of,
    place,
)
from penstock.units import format_seconds

#: Of more devices, not all orders are tried: they are taken as they are preferred.
_MOST_ORDERED = 8
_BISECTIONS = 60


def place_pipeline(
    nodes: Sequence[PlacedNode], devices: Devices, *, fixed: Mapping[str, str] | None = None
) -> Placement:
    """Return where the nodes of an acyclic graph run if as many steps a second as possible are to run at once.

    Arguments, Raises: as of `place`; of links, the slowest counts. Where constraints allow no such stretches, the
    placement is that of `place`.
    """
    placed = place(nodes, devices, fixed=fixed)
    slowest = min([devices.bytes_per_second, *(rate for _, rate in devices.links.values())])
    line = _Line(nodes, devices, slowest, fixed or {})
    most = sum(max(node.cost_seconds.values(), default=0.0) for node in nodes) + line.seconds_of_links()
    stretches = line.stretches(most)
    if stretches is None:
        return placed
    least = 0.0
    for _ in range(_BISECTIONS):
        middle = (least + most) / 2
        if (found := line.stretches(middle)) is None:
            least = middle
        else:
            most, stretches = middle, found
    device = {name: each for each, names in stretches for name in names}
    try:
        simulated = place(nodes, devices, fixed=device)
    except NoFeasibleDevice:  # for want of memory
        return placed
    reason = {}
    for number, (each, names) in enumerate(stretches, 1):
        load = line.load(each, names)
        for name in names:
            reason[name] = (
                f"stage {number} of {len(stretches)}, {format_seconds(load)} a step; none needs above "
                f"{format_seconds(most)}"
            )
    return replace(simulated, reason={node.name: node.with_basis(reason[node.name]) for node in nodes})


class _Line:
    """The nodes of a graph in a line, and what a stretch of it costs."""

    def __init__(
        self, nodes: Sequence[PlacedNode], devices: Devices, bytes_per_second: float, fixed: Mapping[str, str]
    ) -> None:
        self._by_name = {node.name: node for node in nodes}
        self._devices = devices.names
        groups = groups_of(nodes)
        feasible = feasible_devices(nodes, devices.names, groups)
        for name, device in fixed.items():
            for member in groups.get(name, ()):
                feasible[member.name] = [device]
        self._order = _in_line(nodes, groups)
        place_of = {name: place for place, name in enumerate(self._order)}
        count = len(self._order)
        crossing, inside = [0.0] * (count + 1), [0] * (count + 1)
        users: dict[str, list[int]] = {}
        for node in nodes:
            for source in node.inputs:
                users.setdefault(source, []).append(place_of[node.name])
        for name, places in users.items():
            places.append(place_of[name])
            crossing[min(places)] += self._by_name[name].nbytes
            crossing[max(places)] -= self._by_name[name].nbytes
        for members in groups.values():
            places = [place_of[member.name] for member in members]
            inside[min(places)] += 1
            inside[max(places)] -= 1
        #: By place p, of a cut before it: seconds of what crosses; infinite where it would part a group.
        self._cut_seconds = [0.0] + [
            float("inf") if parted else nbytes / bytes_per_second
            for nbytes, parted in zip(accumulate(crossing[:-1]), accumulate(inside[:-1]), strict=True)
        ]
        self._cut_seconds[count] = 0.0
        self._costs, self._bytes, self._barred, self._memory = {}, {}, {}, {}
        for device in devices.names:
            may = [device in feasible[name] for name in self._order]
            costs = [self._by_name[name].cost_seconds.get(device, 0.0) for name in self._order]
            self._costs[device] = [0.0, *accumulate(costs)]
            self._bytes[device] = [0.0, *accumulate(self._by_name[name].holds_bytes for name in self._order)]
            self._barred[device] = [0, *accumulate(not each for each in may)]
            self._memory[device] = devices.memory_bytes.get(device, float("inf"))

    def seconds_of_links(self) -> float:
        """Return more than any link has to do."""
        return sum(each for each in self._cut_seconds if each < float("inf"))

    def load(self, device: str, names: Sequence[str]) -> float:
        """Return the seconds of a step that a device has with some nodes."""
        return sum(self._by_name[name].cost_seconds[device] for name in names)

    def stretches(self, seconds: float) -> list[tuple[str, list[str]]] | None:
        """Return devices with their nodes, none and no link above a time; None if there are no such."""
        ends, last = [0], 0
        for here in range(1, len(self._order) + 1):
            last = here if self._cut_seconds[here] <= seconds else last
            ends.append(last)
        #: By the set of devices that are used, as bits: how far they come, the last of them, and where it begins.
        reached: dict[int, tuple[int, str, int]] = {0: (0, "", 0)}
        open_sets, full = [0], len(self._order)
        while open_sets:
            used = open_sets.pop(0)
            begin = reached[used][0]
            if begin == full:
                return self._walked(reached, used)
            for number, device in enumerate(self._devices):
                if used >> number & 1 or (len(self._devices) > _MOST_ORDERED and used != (1 << number) - 1):
                    continue
                end = ends[self._farthest(device, begin, seconds)]
                now = used | 1 << number
                if now not in reached:
                    open_sets.append(now)
                if now not in reached or end > reached[now][0]:
                    reached[now] = (max(end, begin), device, begin)
        return None

    def _farthest(self, device: str, begin: int, seconds: float) -> int:
        barred, costs, held = self._barred[device], self._costs[device], self._bytes[device]
        within = seconds * (1 + 1e-12)
        return (
            min(
                bisect_right(barred, barred[begin]),
                bisect_right(costs, costs[begin] + within),
                bisect_right(held, held[begin] + self._memory[device]),
            )
            - 1
        )

    def _walked(self, reached: Mapping[int, tuple[int, str, int]], used: int) -> list[tuple[str, list[str]]]:
        found = []
        while used:
            end, device, begin = reached[used]
            if end > begin:
                found.append((device, self._order[begin:end]))
            used &= ~(1 << self._devices.index(device))
        return found[::-1]


def _in_line(nodes: Sequence[PlacedNode], groups: Mapping[str, list[PlacedNode]]) -> list[str]:
    """Return the names of nodes along the flow of tensors: a group where its first member is, others behind inputs.

    A node without inputs and group, such as a constant, stands where its first user does.
    """
    place_of = {node.name: place for place, node in enumerate(nodes)}
    by_name = {node.name: node for node in nodes}
    users, missing = needs_of(nodes)
    ready = [place_of[name] for name, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = nodes[heapq.heappop(ready)].name
        order.append(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place_of[user])
    key: dict[str, int] = {}
    of_group: dict[str, int] = {}
    loose = []
    for number, name in enumerate(order):
        needed = [key[each] for each in (*by_name[name].inputs, *by_name[name].controls) if each in key]
        if len(groups[name]) > 1:
            key[name] = of_group.setdefault(groups[name][0].name, number)
        elif by_name[name].inputs or by_name[name].controls:
            key[name] = max(needed, default=number)
        else:
            loose.append(name)
    for name in loose:
        key[name] = min((key[user] for user in users[name] if user in key), default=0)
    number_of = {name: number for number, name in enumerate(order)}
    return sorted(order, key=lambda name: (key[name], number_of[name]))
