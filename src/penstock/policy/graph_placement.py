"""On which device each node of a dataflow graph runs: the greedy rule of the white paper. Pure.

An execution is simulated: a node is ready when all it needs has finished; ready nodes are taken by the time at which
they became ready, then by their place in the list. A node goes to the feasible device on which it would finish first,
given what the device already does and how long its inputs take to get there; the first of the list on a tie.
Source: Abadi et al. 2015, sections 3.2.1 (placement) and 4.3 (constraints).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import ConfigError


class NoFeasibleDevice(ConfigError):
    """No device can run a node, or all members of its group. node: its name."""

    def __init__(self, node: str, text: str) -> None:
        super().__init__(text)
        self.node = node


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """What placement knows of a node.

    inputs, controls: names of nodes. cost_seconds: by device that has a kernel for it. nbytes: of its output.
    group: nodes of one group run on one device; "" is none. only: a part of the names of the devices allowed.
    """

    name: str
    inputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    cost_seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: float = 0.0
    group: str = ""
    only: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Of each node: its device, when it finishes in the simulation, and why it is there."""

    device: dict[str, str]
    finish_seconds: dict[str, float]
    reason: dict[str, str]


def feasible_devices(nodes: Sequence[PlacedNode], devices: Sequence[str]) -> dict[str, list[str]]:
    """Return the devices that each node may run on, in their order of preference.

    Raises: NoFeasibleDevice.
    """
    own = {
        node.name: [device for device in devices if device in node.cost_seconds and node.only in device]
        for node in nodes
    }
    groups: dict[str, list[PlacedNode]] = {}
    for node in nodes:
        if not own[node.name]:
            allowed = f" whose name has {node.only!r} in it" if node.only else ""
            raise NoFeasibleDevice(
                node.name,
                f"none of {', '.join(devices) or 'no devices'}{allowed} has a kernel for {node.name!r}",
            )
        if node.group:
            groups.setdefault(node.group, []).append(node)
    for group, members in groups.items():
        shared = [device for device in devices if all(device in own[member.name] for member in members)]
        if not shared:
            names = ", ".join(repr(member.name) for member in members)
            raise NoFeasibleDevice(members[0].name, f"no device can run all of the group {group!r}: {names}")
        own.update({member.name: shared for member in members})
    return own


def place(
    nodes: Sequence[PlacedNode], devices: Sequence[str], latency_seconds: float, bytes_per_second: float
) -> Placement:
    """Return where the nodes of an acyclic graph run.

    devices: in order of preference. latency_seconds, bytes_per_second: of the link between any two of them.
    Raises: NoFeasibleDevice; ConfigError if nodes need each other in a circle, or one that is not there.
    """
    feasible = feasible_devices(nodes, devices)
    by_name = {node.name: node for node in nodes}
    position = {node.name: place for place, node in enumerate(nodes)}
    users: dict[str, list[str]] = {node.name: [] for node in nodes}
    missing: dict[str, int] = {}
    for node in nodes:
        needed = {*node.inputs, *node.controls}
        for name in needed:
            if name not in by_name:
                raise ConfigError(f"node {node.name!r} needs {name!r}, which is not there")
            users[name].append(node.name)
        missing[node.name] = len(needed)
    ready = [(0.0, position[name], name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    free = dict.fromkeys(devices, 0.0)
    chosen: dict[str, str] = {}
    finish: dict[str, float] = {}
    reason: dict[str, str] = {}
    group_device: dict[str, str] = {}

    def finish_on(node: PlacedNode, device: str) -> float:
        start = free[device]
        for name in (*node.inputs, *node.controls):
            there = finish[name]
            if chosen[name] != device:
                nbytes = by_name[name].nbytes if name in node.inputs else 0.0
                there += latency_seconds + nbytes / bytes_per_second
            start = max(start, there)
        return start + node.cost_seconds[device]

    while ready:
        _, _, name = heapq.heappop(ready)
        node = by_name[name]
        follows = node.group in group_device
        candidates = [group_device[node.group]] if follows else feasible[name]
        ends = {device: finish_on(node, device) for device in candidates}
        device = min(ends, key=lambda each: ends[each])
        chosen[name], finish[name] = device, ends[device]
        free[device] = ends[device]
        if node.group:
            group_device.setdefault(node.group, device)
        reason[name] = f"follows its group {node.group!r}" if follows else _reason(device, ends)
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                at = max(finish[each] for each in (*by_name[user].inputs, *by_name[user].controls))
                heapq.heappush(ready, (at, position[user], user))
    if len(chosen) < len(nodes):
        left = next(node.name for node in nodes if node.name not in chosen)
        raise ConfigError(f"node {left!r} needs itself: placement takes graphs without loops")
    return Placement(chosen, finish, reason)


def _reason(device: str, ends: Mapping[str, float]) -> str:
    others = ", ".join(f"{seconds:.6g} s on {each}" for each, seconds in ends.items() if each != device)
    return f"finishes at {ends[device]:.6g} s, against {others}" if others else "the only device for it"
