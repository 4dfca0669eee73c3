"""When a device of a placed graph should ask for what others compute: as late as no step gets longer by it. Pure.

A tensor that arrives early lies in memory until it is needed, and takes the link from one that is needed sooner. Each
node has an earliest finish, of the placement's simulation, and a latest start: what its users, and the nodes behind it
on its device, leave it if the step is to end as early. A Recv begins before the latest start of its first user by the
time that its bytes take.
Source: Abadi et al. 2015, section 5.2 (ASAP and ALAP times of the critical path; control edges that delay a Recv).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from penstock.errors import ConfigError
from penstock.policy.graph_placement import Devices, PlacedNode, Placement, link_of


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


def receive_order(nodes: Sequence[PlacedNode], placement: Placement, devices: Devices) -> list[Receive]:
    """Return what devices receive from each other, in the order in which it must begin.

    nodes, devices: those that `place` got. Of two that must begin at once, the one whose source comes first in `nodes`
    is first. Two things that the placement's simulation counts are left out here, and a receive may begin too late by
    as much as they take: what sending keeps both devices from (`hop_seconds`), and that a control edge waits for a
    tensor of the same node that goes to the same device.
    Raises: ConfigError if a node is not placed.
    """
    for node in nodes:
        if node.name not in placement.device:
            raise ConfigError(f"node {node.name!r} is not placed: give the placement of these nodes")
    by_name = {node.name: node for node in nodes}
    # Nodes were placed after what they need, and run on their device in that order.
    on_device: dict[str, list[str]] = {}
    for name in placement.finish_seconds:
        on_device.setdefault(placement.device[name], []).append(name)
    place_of = {name: place for place, name in enumerate(by_name)}
    latest = _latest_begins(by_name, placement, on_device, devices)
    found = []
    for source, device in sorted(placement.sent, key=lambda each: place_of[each[0]]):
        begin, sending = latest[source, device], placement.sent[source, device]
        seconds = sending.there_seconds - sending.begin_seconds
        here = on_device[device]
        first = next(index for index, name in enumerate(here) if source in by_name[name].inputs)
        # By its latest finish: other receives may delay it until then.
        waits_for = [
            name for name in here[:first] if latest[name,] + by_name[name].cost_seconds[device] <= begin
        ]
        after = waits_for[-1] if waits_for else ""
        found.append(Receive(source, device, placement.finish_seconds[source], begin, seconds, after))
    return sorted(found, key=lambda each: each.latest_seconds)


def _latest_begins(
    by_name: Mapping[str, PlacedNode],
    placement: Placement,
    on_device: Mapping[str, Sequence[str]],
    devices: Devices,
) -> dict[tuple[str, ...], float]:
    """Return the latest begin of each node, and of each tensor on its link, with which the step ends as early.

    By (node,), and by (node, device that gets its tensor).
    """
    device, sent = placement.device, placement.sent
    cost = {name: by_name[name].cost_seconds[device[name]] for name in placement.finish_seconds}
    #: What waits for each of them, and how long after its begin that can begin.
    waiting: dict[tuple[str, ...], list[tuple[tuple[str, ...], float]]] = {}
    for name in placement.finish_seconds:
        for source in dict.fromkeys((*by_name[name].inputs, *by_name[name].controls)):
            hop, lag = (source, device[name]), cost[source]
            if device[source] != device[name] and source in by_name[name].inputs:
                waiting.setdefault((source,), []).append((hop, lag))
                waiting.setdefault(hop, []).append(
                    ((name,), sent[hop].there_seconds - sent[hop].begin_seconds)
                )
            else:
                lag += (
                    devices.link(device[source], device[name])[0] if device[source] != device[name] else 0.0
                )
                waiting.setdefault((source,), []).append(((name,), lag))
        waiting.setdefault((name,), [])
    for names in on_device.values():
        for one, other in pairwise(names):
            waiting.setdefault((one,), []).append(((other,), cost[one]))
    on_link: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for hop in sorted(sent, key=lambda each: sent[each].begin_seconds):
        if sent[hop].takes_link:
            on_link.setdefault(link_of(device[hop[0]], hop[1]), []).append(hop)
    for hops in on_link.values():
        for hop, following in pairwise(hops):
            waiting.setdefault(hop, []).append((following, sent[hop].end_seconds - sent[hop].begin_seconds))
    # Not sorted by when they begin: by a rounding, one may begin before what it waits for.
    last_first = TopologicalSorter({each: [other for other, _ in others] for each, others in waiting.items()})
    end, latest = placement.end_seconds, dict[tuple[str, ...], float]()
    for each in last_first.static_order():
        most = end - cost[each[0]] if len(each) == 1 else end
        latest[each] = min([most, *(latest[other] - lag for other, lag in waiting[each])])
    return latest
