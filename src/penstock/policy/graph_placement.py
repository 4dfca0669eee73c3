"""On which device each node of a dataflow graph runs: the greedy rule of the white paper. Pure.

An execution is simulated: a node is ready when all it needs has finished; ready nodes are taken by the time at which
they became ready, then by their place in the list. A node runs on the feasible device on which it would finish first,
given what the device already does and when its inputs are there; the first of the list on a tie. A link takes one
tensor after the other, each way, as a device does nodes.
Source: Abadi et al. 2015, sections 3.2.1 (placement) and 4.3 (constraints).
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.errors import ConfigError
from penstock.policy.graph_memory import Occupancy, peaks
from penstock.units import format_names, format_seconds


def is_allowed(device: str, only: str) -> bool:
    """Return whether a constraint allows a device: parts of its name such as "/job:ps/task:1", or a piece of it.

    A part fits as a whole: "/task:1" is not task 17. "/job:worker/task:1/device:cpu:0", "gpu" and "gpu:0" are
    constraints, too. Case counts in the names of jobs alone.
    """
    parts = _parts(only)
    if not only.startswith("/") and not all(part.startswith(_KINDS) for part in parts):
        return only.lower() in device.lower()
    return all(any(f"{each}:".startswith(f"{part}:") for each in _parts(device)) for part in parts)


def allows_cpu(only: str) -> bool:
    """Return whether a constraint allows the CPU of some worker: it may ask for any job and task, for no other device.

    A piece of a name, such as "ps", may be that of a job, unless it is another type of device.
    """
    return all(
        is_allowed("/device:cpu:0", f"/{part}") if part.startswith("device:") else part not in _OTHER_TYPES
        for part in _parts(only)
    )


@lru_cache(1024)
def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of the name of a device, or of a constraint; "cpu:0" is "device:cpu:0"."""
    lower = (part if part.startswith("job:") else part.lower() for part in name.split("/") if part)
    return tuple(
        f"device:{part}" if _DEVICE.fullmatch(part) and not part.startswith(_KINDS) else part
        for part in lower
    )


#: A type of device and its number.
_DEVICE = re.compile(r"\w+:\d+")
#: Words that are no piece of a job's name.
_OTHER_TYPES = ("gpu", "cuda", "hip", "hpu", "ipu", "mps", "mtia", "npu", "tpu", "xpu")
#: What the parts of a device's name begin with.
_KINDS = ("job:", "task:", "device:")


class NoFeasibleDevice(ConfigError):
    """No device can run a node, or all members of its group. node: its name."""

    def __init__(self, node: str, text: str) -> None:
        super().__init__(text)
        self.node = node


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """What placement knows of a node.

    inputs, controls: names of nodes. cost_seconds: by device that has a kernel for it. nbytes: of its output.
    group: nodes of one group run on one device; "" is none. only: which devices are allowed; see `is_allowed`.
    beside: nodes that run on the same device as this one. holds_bytes: of state that stays on its device.
    needs: what, besides a kernel, only devices in cost_seconds have, for errors; "" is nothing. hop_seconds: what
    sending its output to another device keeps both from their nodes, however long it is under way. basis: where its
    costs are from, for people; "" is nowhere. passes_on: whether its output is what it takes, or something
    that outlives the step: it takes no memory of its own.
    """

    name: str
    inputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    cost_seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: float = 0.0
    group: str = ""
    only: str = ""
    beside: tuple[str, ...] = ()
    holds_bytes: float = 0.0
    needs: str = ""
    hop_seconds: float = 0.0
    basis: str = ""
    passes_on: bool = False

    def with_basis(self, why: str) -> str:
        """Return a reason with where the costs are from that it uses, if there are any."""
        return f"{why} ({self.basis})" if self.basis and any(self.cost_seconds.values()) else why


#: Of links of which nothing is known.
USUAL_LATENCY_SECONDS, USUAL_BYTES_PER_SECOND = 50e-6, 1e9
#: Of devices of which nothing is known, by what their names have: FLOP/s that kernels reach, bytes/s of the memory.
_USUAL_RATES = {"gpu": (1e13, 1e12), "cuda": (1e13, 1e12), "": (1e11, 2e10)}


@dataclass(frozen=True, slots=True)
class Devices:
    """What nodes may run on, and what joins it.

    names: in order of preference. latency_seconds, bytes_per_second: of the link between any two of them, but those
    that links has, by both devices. memory_bytes: by device, for variables and tensors; without end where it says
    none. flops_per_second, memory_bytes_per_second: by device, as usual for its type where they say none.
    """

    names: Sequence[str]
    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_second: Mapping[str, float] = field(default_factory=dict)

    def kernel_seconds(self, device: str, flops: float, nbytes: float) -> float:
        """Return how long a device computes and moves so much: whichever takes longer, by the roofline.

        Source: Williams, Waterman and Patterson, "Roofline", CACM 52 (2009).
        """
        usual = next(rates for part, rates in _USUAL_RATES.items() if part in device)
        return max(
            flops / self.flops_per_second.get(device, usual[0]),
            nbytes / self.memory_bytes_per_second.get(device, usual[1]),
        )

    def link(self, one: str, other: str) -> tuple[float, float]:
        """Return the latency and the bytes a second from one device to another."""
        return self.links.get((one, other), (self.latency_seconds, self.bytes_per_second))


@dataclass(frozen=True, slots=True)
class Sending:
    """When a tensor takes a link in the simulation, and until when; it is there a latency later."""

    begin_seconds: float
    end_seconds: float
    there_seconds: float

    @property
    def takes_link(self) -> bool:
        """Return whether others wait for it: not for a control edge, nor for a tensor without bytes."""
        return self.end_seconds > self.begin_seconds


@dataclass(frozen=True, slots=True)
class Placement:
    """Of each node: its device, when it finishes in the simulation, and why it is there.

    sent: when tensors take links, by the node that gives them and the device that gets them.
    """

    device: dict[str, str]
    finish_seconds: dict[str, float]
    reason: dict[str, str]
    sent: dict[tuple[str, str], Sending] = field(default_factory=dict)

    @property
    def end_seconds(self) -> float:
        """When the last node finishes in the simulation."""
        return max(self.finish_seconds.values(), default=0.0)


def groups_of(nodes: Sequence[PlacedNode]) -> dict[str, list[PlacedNode]]:
    """Return, by name, the nodes that run on one device with each node, itself among them, in their order.

    Source: Abadi et al. 2015, section 4.3: union-find over the constraints.
    """
    parent = {node.name: node.name for node in nodes}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    first_of: dict[str, str] = {}
    for node in nodes:
        for other in (*node.beside, *((first_of.setdefault(node.group, node.name),) if node.group else ())):
            parent[root(node.name)] = root(other)
    groups: dict[str, list[PlacedNode]] = {}
    for node in nodes:
        groups.setdefault(root(node.name), []).append(node)
    return {node.name: groups[root(node.name)] for node in nodes}


def feasible_devices(
    nodes: Sequence[PlacedNode], devices: Sequence[str], groups: Mapping[str, list[PlacedNode]] | None = None
) -> dict[str, list[str]]:
    """Return the devices that each node may run on, in their order of preference. groups: as `groups_of` returns them.

    Raises: NoFeasibleDevice.
    """
    groups = groups_of(nodes) if groups is None else groups
    own = {
        node.name: [d for d in devices if d in node.cost_seconds and is_allowed(d, node.only)]
        for node in nodes
    }
    for node in nodes:
        if not own[node.name]:
            raise NoFeasibleDevice(node.name, _why_nowhere(node, devices))
    shared: dict[str, list[str]] = {}
    for node in nodes:
        members = groups[node.name]
        first = members[0].name
        if first not in shared:
            shared[first] = [d for d in devices if all(d in own[member.name] for member in members)]
            if not shared[first]:
                raise NoFeasibleDevice(first, _contradiction(members))
    return {node.name: shared[groups[node.name][0].name] for node in nodes}


def _why_nowhere(node: PlacedNode, devices: Sequence[str]) -> str:
    there = ", ".join(devices) or "no devices"
    if node.only and not any(is_allowed(device, node.only) for device in devices):
        return f"{node.name!r} asks for {node.only!r}, and nobody has that: there are {there}"
    allowed = f" that {node.only!r} allows" if node.only else ""
    having = ", ".join(node.cost_seconds) or "none"
    needs = f" and {node.needs}; those that have: {having}" if node.needs else f": its costs name {having}"
    return f"none of {there}{allowed} has a kernel for {node.name!r}{needs}"


def _contradiction(members: Sequence[PlacedNode]) -> str:
    bound = [member for member in members if member.only] or list(members)
    names = (f"{member.name!r}" + (f" on {member.only!r}" if member.only else "") for member in bound)
    said = format_names(names, _MOST_NAMED)
    group = next((f" {member.group!r}" for member in members if member.group), "")
    return f"no device can run all of the group{group}, whose nodes share a device: {said}"


#: Of the nodes of a group whose constraints contradict each other, how many an error names.
_MOST_NAMED = 8


def link_of(one: str, other: str) -> tuple[str, str]:
    """Return what a tensor takes from one device to another: devices of two workers share the link between these."""
    ends = tuple(device.partition("/device:")[0] for device in (one, other))
    return (one, other) if ends[0] == ends[1] else (ends[0], ends[1])


class _Links:
    """When links between devices are taken."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._taken: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def sending(
        self, one: str, other: str, nbytes: float, ready: float, others: Iterable[tuple[str, Sending]]
    ) -> Sending:
        """Return when something that is ready then would be sent.

        others: what is to be sent to the same device with it, and where it comes from.
        """
        latency, rate = self._devices.link(one, other)
        seconds, link = nbytes / rate, link_of(one, other)
        if seconds:
            taken = self._taken.get(link, [])
            also = [
                (e.begin_seconds, e.end_seconds)
                for d, e in others
                if e.takes_link and link_of(d, other) == link
            ]
            taken = sorted(taken + also) if also else taken
            for begin, end in taken[max(0, bisect_right(taken, (ready,)) - 1) :]:
                if ready + seconds <= begin:
                    break
                ready = max(ready, end)
        return Sending(ready, ready + seconds, ready + seconds + latency)

    def take(self, one: str, other: str, sending: Sending) -> None:
        """Count something as sent."""
        if sending.takes_link:
            taken = self._taken.setdefault(link_of(one, other), [])
            insort(taken, (sending.begin_seconds, sending.end_seconds))


def place(
    nodes: Sequence[PlacedNode],
    devices: Devices,
    *,
    fixed: Mapping[str, str] | None = None,
    found: Mapping[str, str] | None = None,
) -> Placement:
    """Return where the nodes of an acyclic graph run.

    fixed: where nodes are already. found: where a search that kept to all constraints put them, which stays; a reason
    then says when the node would finish on other devices.
    A device whose memory has no space for a node's tensors is taken where there is no other.
    Raises: NoFeasibleDevice, also where what lives at once on a device has no space in its memory; ConfigError if nodes
    need each other in a circle, or one that is not there.
    """
    groups = groups_of(nodes)
    feasible = feasible_devices(nodes, devices.names, groups)
    by_name = {node.name: node for node in nodes}
    position = {node.name: place for place, node in enumerate(nodes)}
    users, missing = needs_of(nodes)
    ready = [(0.0, position[name], name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    left_bytes = {device: devices.memory_bytes.get(device, float("inf")) for device in devices.names}
    reason: dict[str, str] = {}
    group_device: dict[str, str] = {}  # by the first node of a group
    for name, device in (fixed or {}).items():
        if name in by_name:
            group_device[groups[name][0].name] = device
    execution = _Execution(by_name, devices)
    finish = execution.finish
    memory = Occupancy(by_name, users, devices.memory_bytes) if devices.memory_bytes else None

    while ready:
        _, _, name = heapq.heappop(ready)
        node, members = by_name[name], groups[name]
        follows = (first := members[0].name) in group_device
        candidates = [group_device[first]] if follows else feasible[name]
        holds = sum(member.holds_bytes for member in members)
        if not follows and holds and found is None:
            candidates = [device for device in candidates if holds <= left_bytes[device]]
            if not candidates:
                room = ", ".join(f"{left_bytes[d]:,.0f} on {d}" for d in feasible[name])
                raise NoFeasibleDevice(name, f"its state of {holds:,.0f} bytes has no space: {room} are left")
        if memory is not None and not follows and found is None:
            candidates = [device for device in candidates if memory.fits(node, device)] or candidates
        device, ends = execution.run(node, candidates, None if found is None else found[name])
        if not follows:
            group_device[first] = device
            left_bytes[device] -= holds
        if memory is not None:
            memory.hold(device, node.holds_bytes)
            memory.run(node, device)
        reason[name] = _reason_to_follow(node, members, fixed) if follows else _reason(node, device, ends)
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                at = max(finish[each] for each in (*by_name[user].inputs, *by_name[user].controls))
                heapq.heappush(ready, (at, position[user], user))
    if len(finish) < len(nodes):
        left = next(node.name for node in nodes if node.name not in finish)
        raise ConfigError(f"node {left!r} needs itself: placement takes graphs without loops")
    placed = Placement(execution.device, finish, reason, execution.sent)
    _check_memory(nodes, placed, devices.memory_bytes)
    return placed


def _check_memory(nodes: Sequence[PlacedNode], placed: Placement, memory_bytes: Mapping[str, float]) -> None:
    """Raise NoFeasibleDevice naming a device whose variables and live tensors have no space in its memory."""
    for device, peak in peaks(nodes, placed).items() if memory_bytes else ():
        there = memory_bytes.get(device, float("inf"))
        if (needed := peak.held_bytes + peak.live_bytes) > there:
            raise NoFeasibleDevice(
                peak.node,
                f"{device} needs {needed:,.0f} bytes when it runs, {peak.held_bytes:,.0f} of variables and "
                f"{peak.live_bytes:,.0f} of tensors that live at once, and has {there:,.0f}",
            )


class _Execution:
    """A step as it is simulated: which nodes have run, where and until when."""

    def __init__(self, nodes: Mapping[str, PlacedNode], devices: Devices) -> None:
        self._nodes, self._links = nodes, _Links(devices)
        self._free = dict.fromkeys(devices.names, 0.0)
        self.device: dict[str, str] = {}
        self.finish: dict[str, float] = {}
        #: Tensors, and what has no bytes as only a control edge needs it.
        self.sent: dict[tuple[str, str], Sending] = {}
        self._told: dict[tuple[str, str], Sending] = {}

    def run(
        self, node: PlacedNode, candidates: Sequence[str], found: str | None
    ) -> tuple[str, dict[str, float]]:
        """Run a node where it was found to go, or finishes first; return that device, and when it finishes on each."""
        tries = {device: self._try(node, device) for device in candidates}
        device = min(tries, key=lambda each: tries[each][0]) if found is None else found
        end, new = tries[device]
        self.device[node.name], self.finish[node.name] = device, end
        self._free[device] = end
        for name, sending in new.items():
            source = self.device[name]
            self._links.take(source, device, sending)
            (self.sent if name in node.inputs else self._told)[name, device] = sending
            self._free[source] += self._nodes[name].hop_seconds
        return device, {each: end for each, (end, _) in tries.items()}

    def _try(self, node: PlacedNode, device: str) -> tuple[float, dict[str, Sending]]:
        """Return when a node would finish on a device, and what would be sent there for it, by its source."""
        start, busy, new = self._free[device], node.cost_seconds[device], dict[str, Sending]()
        needed = dict.fromkeys((*node.inputs, *node.controls))
        for name in sorted(needed, key=self.finish.__getitem__):
            source, there = self.device[name], self.finish[name]
            if source != device:
                is_tensor = name in node.inputs
                sending = self.sent.get((name, device)) or (
                    None if is_tensor else self._told.get((name, device))
                )
                if sending is None:
                    nbytes = self._nodes[name].nbytes if is_tensor else 0.0
                    others = ((self.device[each], one) for each, one in new.items())
                    new[name] = sending = self._links.sending(source, device, nbytes, there, others)
                    busy += self._nodes[name].hop_seconds
                there = sending.there_seconds
            start = max(start, there)
        return start + busy, new


def needs_of(nodes: Sequence[PlacedNode]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return by node which others need it, and how many it needs. Raises: ConfigError if one is not there."""
    users: dict[str, list[str]] = {node.name: [] for node in nodes}
    missing: dict[str, int] = {}
    for node in nodes:
        needed = {*node.inputs, *node.controls}
        for name in needed:
            if name not in users:
                raise ConfigError(f"node {node.name!r} needs {name!r}, which is not there")
            users[name].append(node.name)
        missing[node.name] = len(needed)
    return users, missing


def _reason_to_follow(
    node: PlacedNode, members: Sequence[PlacedNode], fixed: Mapping[str, str] | None
) -> str:
    if node.name in (fixed or {}):
        return "is there already"
    if node.group:
        return f"follows its group {node.group!r}"
    return f"shares a device with {next(each.name for each in members if each.name != node.name)!r}"


def _reason(node: PlacedNode, device: str, ends: Mapping[str, float]) -> str:
    if len(ends) == 1:
        return "the only device for it"

    def others(sooner: bool) -> str:
        chosen = [each for each in ends if each != device and (ends[each] < ends[device]) == sooner]
        return ", ".join(f"{format_seconds(ends[each])} on {each}" for each in chosen)

    why = f"finishes at {format_seconds(ends[device])}"
    if later := others(sooner=False):
        why += f", against {later}"
    if sooner := others(sooner=True):  # by a search
        why += f"; no earlier end of the step was found with {sooner}"
    return node.with_basis(why)
