"""When a device of a placed graph should ask for what others compute: as late as no step gets longer by it. Pure.

A tensor that arrives early lies in memory until it is needed, and takes the link from one that is needed sooner. Each
node has an earliest finish, of the placement's simulation, and a latest start: what its users, and the nodes behind it
on its device, leave it if the step is to end as early. A Recv begins before the latest start of its first user by the
time that its bytes take.
Source: Abadi et al. 2015, section 5.2 (ASAP and ALAP times of the critical path; control edges that delay a Recv).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from penstock.errors import ConfigError
from penstock.policy.graph_placement import PlacedNode, Placement, sending_seconds


@dataclass(frozen=True, slots=True)
class Receive:
    """One tensor that a device gets from another, once for all of its users there.

    source: node that gives it. device: that gets it. earliest_seconds: when it is there to be sent.
    latest_seconds: when sending must begin. transfer_seconds: that it takes.
    after: node of the device that a control edge lets the Recv wait for; "" where it may begin with the step.
    """

    source: str
    device: str
    earliest_seconds: float
    latest_seconds: float
    transfer_seconds: float
    after: str


#: What a tensor of so many bytes takes from one device to another.
_Away = Callable[[str, str, float], float]


def receive_order(
    nodes: Sequence[PlacedNode],
    placement: Placement,
    latency_seconds: float,
    bytes_per_second: float,
    links: Mapping[tuple[str, str], tuple[float, float]] | None = None,
) -> list[Receive]:
    """Return what devices receive from each other, in the order in which it must begin.

    nodes, latency_seconds, bytes_per_second, links: those that `place` got. Of two that must begin at once, the one
    whose source comes first in `nodes` is first. Raises: ConfigError if a node is not placed.
    """
    for node in nodes:
        if node.name not in placement.device:
            raise ConfigError(f"node {node.name!r} is not placed: give the placement of these nodes")
    by_name = {node.name: node for node in nodes}
    away = partial(sending_seconds, usual=(latency_seconds, bytes_per_second), links=links)
    # Nodes were placed after what they need, and run on their device in that order.
    on_device: dict[str, list[str]] = {}
    for name in placement.finish_seconds:
        on_device.setdefault(placement.device[name], []).append(name)
    place_of = {name: place for place, name in enumerate(by_name)}
    latest = _latest_starts(by_name, placement, on_device, away)
    users: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        for source in dict.fromkeys(node.inputs):
            if placement.device[source] != placement.device[node.name]:
                users.setdefault((source, placement.device[node.name]), []).append(node.name)
    found = []
    for source, device in sorted(users, key=lambda each: place_of[each[0]]):
        seconds = away(placement.device[source], device, by_name[source].nbytes)
        begin = min(latest[user] for user in users[source, device]) - seconds
        here = on_device[device]
        before = here[: min(map(here.index, users[source, device]))]
        # By its latest finish: other receives may delay it until then.
        waits_for = [name for name in before if latest[name] + by_name[name].cost_seconds[device] <= begin]
        after = waits_for[-1] if waits_for else ""
        found.append(Receive(source, device, placement.finish_seconds[source], begin, seconds, after))
    return sorted(found, key=lambda each: each.latest_seconds)


def _latest_starts(
    by_name: Mapping[str, PlacedNode],
    placement: Placement,
    on_device: Mapping[str, Sequence[str]],
    away: _Away,
) -> dict[str, float]:
    """Return the latest start of each node with which the step ends as early as in the placement."""
    device, finish = placement.device, placement.finish_seconds
    ends = dict.fromkeys(finish, max(finish.values(), default=0.0))
    following = {name: after for names in on_device.values() for name, after in pairwise(names)}
    latest: dict[str, float] = {}
    for name in reversed(list(finish)):
        if name in following:
            ends[name] = min(ends[name], latest[following[name]])
        node = by_name[name]
        latest[name] = ends[name] - node.cost_seconds[device[name]]
        for source in (*node.inputs, *node.controls):
            seconds = 0.0
            if device[source] != device[name]:
                nbytes = by_name[source].nbytes if source in node.inputs else 0.0
                seconds = away(device[source], device[name], nbytes)
            ends[source] = min(ends[source], latest[name] - seconds)
    return latest
