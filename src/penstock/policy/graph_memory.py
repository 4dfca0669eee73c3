"""How much memory a placed graph takes on each device: its variables, and the tensors that live at once. Pure.

On the device that makes it, a tensor lives from when its node begins until all that take it there have run, and it was
sent to all others that take it; on a device that gets it, from when it is sent until all that take it there have run.
What happens at one time, as all does where nothing takes time, happens in the order in which the nodes run.
Source: Abadi et al. 2015, sections 4.3 (memory restricts devices) and 5.2 (a schedule decides how long tensors live).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.policy.graph_placement import PlacedNode, Placement


class Peak(NamedTuple):
    """The most that a device holds at a time.

    held_bytes: of variables. live_bytes: of tensors other than those. node: that begins, or whose tensor comes, then.
    """

    held_bytes: float
    live_bytes: float
    node: str


def peaks(nodes: Sequence[PlacedNode], placed: Placement) -> dict[str, Peak]:
    """Return the peak of each device that has any nodes, by the placement's simulation."""
    found = {device: Peak(0.0, 0.0, "") for device in placed.device.values()}
    for node in nodes:
        held, _, name = found[placed.device[node.name]]
        found[placed.device[node.name]] = Peak(held + node.holds_bytes, 0.0, name or node.name)
    changes: dict[str, list[tuple[_When, float, str]]] = {device: [] for device in found}
    for name, device, begin, end, nbytes in _lives(nodes, placed):
        if nbytes:
            changes[device] += [(begin, nbytes, name), (end, -nbytes, name)]
    for device, each in changes.items():
        live = 0.0
        for _, nbytes, name in sorted(each):
            live += nbytes
            if live > found[device].live_bytes:
                found[device] = Peak(found[device].held_bytes, live, name)
    return found


#: Seconds, and a place among what happens then: that of a node in their order, and a half after it has run.
_When = tuple[float, float]


def _lives(nodes: Sequence[PlacedNode], placed: Placement) -> list[tuple[str, str, _When, _When, float]]:
    """Return node, device, begin, end and bytes of each tensor on each device that has it."""
    by_name, finish = {node.name: node for node in nodes}, placed.finish_seconds
    order = {name: place for place, name in enumerate(finish)}
    ends: dict[tuple[str, str], _When] = {}

    def lasts(name: str, device: str, until: _When) -> None:
        ends[name, device] = max(until, ends.get((name, device), until))

    for (name, _), sending in placed.sent.items():
        lasts(name, placed.device[name], (sending.end_seconds, -1))
    found: list[tuple[str, str, _When, _When, float]] = []
    for name in reversed(finish):  # each after all that take what it gives
        node, device, end = by_name[name], placed.device[name], (finish[name], order[name] + 0.5)
        lasts(name, device, end)
        for source in node.inputs:
            # What passes a tensor on keeps it for those that take it from there.
            lasts(source, device, ends[name, device] if node.passes_on else end)
        if not node.passes_on:
            begin = (finish[name] - node.cost_seconds[device], order[name])
            found.append((name, device, begin, ends[name, device], node.nbytes))
    for (name, device), sending in placed.sent.items():
        begin = (sending.begin_seconds, order[name])
        found.append((name, device, begin, ends[name, device], by_name[name].nbytes))
    return found


class Occupancy:
    """What devices hold while nodes are placed one after the other, in the order in which they run.

    Where the users of a tensor run is not known yet, so it is taken to be held wherever it is until all have run.
    """

    def __init__(
        self,
        nodes: Mapping[str, PlacedNode],
        users: Mapping[str, Sequence[str]],
        memory_bytes: Mapping[str, float],
    ) -> None:
        self._nodes, self._memory = nodes, memory_bytes
        self._used = dict.fromkeys(memory_bytes, 0.0)
        self._left = {name: sum(name in nodes[user].inputs for user in users[name]) for name in nodes}
        #: By node: the bytes that its tensor takes on devices.
        self._at: dict[str, dict[str, float]] = {}

    def fits(self, node: PlacedNode, device: str) -> bool:
        """Return whether a device has space for what a node takes and gives."""
        return self._used.get(device, 0.0) + sum(self._new(node, device).values()) <= self._memory.get(
            device, float("inf")
        )

    def hold(self, device: str, nbytes: float) -> None:
        """Count variables."""
        self._used[device] = self._used.get(device, 0.0) + nbytes

    def run(self, node: PlacedNode, device: str) -> None:
        """Count a node as run on a device."""
        for name, nbytes in self._new(node, device).items():
            self._at.setdefault(name, {})[device] = nbytes
            self.hold(device, nbytes)
        for name in dict.fromkeys(node.inputs):
            self._left[name] -= 1
        for name in (node.name, *node.inputs):
            if not self._left[name]:
                for where, nbytes in self._at.pop(name, {}).items():
                    self.hold(where, -nbytes)

    def _new(self, node: PlacedNode, device: str) -> dict[str, float]:
        """Return the bytes that a device gets by running a node, by what gives them."""
        got = {name: self._nodes[name].nbytes for name in node.inputs if device not in self._at.get(name, ())}
        return got | {node.name: 0.0 if node.passes_on else node.nbytes}
