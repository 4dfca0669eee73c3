"""Receives begin as late as they may: no step gets longer, and nothing lies longer in memory than before."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.policy.graph_placement import Devices, PlacedNode, Placement, place
from penstock.policy.graph_receives import Receive, receive_order

LATENCY, RATE = 0.5, 10.0
DEVICES = Devices(["x", "y"], LATENCY, RATE)


def on(device: str, name: str, seconds: float, *inputs: str, nbytes: float = 0.0) -> PlacedNode:
    return PlacedNode(name, inputs, cost_seconds={device: seconds}, nbytes=nbytes)


def test_a_receive_waits_for_the_last_node_that_leaves_it_time_enough() -> None:
    nodes = [
        on("x", "early", 1.0, nbytes=5),
        on("y", "one", 2.0),
        on("y", "two", 2.0, "one"),
        on("y", "three", 2.0, "two"),
        on("y", "last", 1.0, "three", "early"),
        on("y", "urgent", 1.0, "last", "needed"),
        on("x", "needed", 5.0, "early", nbytes=5),
    ]
    placed = place(nodes, DEVICES)

    # needed is there at 6, and urgent starts at 7, when last has ended: both are on the critical path.
    # early is there at 1; last starts at 6, so it must be sent at 5, when one and two have ended.
    assert receive_order(nodes, placed, DEVICES) == [
        Receive("early", "y", 1.0, 5.0, 1.0, "two"),
        Receive("needed", "y", 6.0, 6.0, 1.0, "three"),
    ]
    with pytest.raises(ConfigError, match="'last' is not placed"):
        receive_order(nodes[4:5], Placement({}, {}, {}), DEVICES)


def test_a_receive_does_not_wait_for_a_node_that_another_receive_may_delay_for_too_long() -> None:
    nodes = [
        on("x", "first", 1.0, nbytes=5),
        on("x", "second", 1.0, nbytes=5),
        on("x", "long", 10.0),
        on("y", "a", 9.0),
        on("y", "b", 1.0, "first"),
        on("y", "c", 1.0, "second"),
        on("y", "end", 1.0, "c", "long"),
    ]

    # long is there at 12.5, so that c, b and a may end at 12.5, 11.5 and 10.5; b ends at 10 if it need not wait.
    assert receive_order(nodes, place(nodes, DEVICES), DEVICES) == [
        Receive("first", "y", 1.0, 9.5, 1.0, ""),
        Receive("second", "y", 2.0, 10.5, 1.0, "a"),
        Receive("long", "y", 12.0, 12.0, 0.5, "b"),
    ]


def test_of_two_tensors_on_a_link_the_first_leaves_time_for_the_second() -> None:
    nodes = [on("x", "a", 1.0, nbytes=10), on("x", "b", 1.0, nbytes=10), on("y", "end", 1.0, "a", "b")]

    # b has the link from 2 to 3, as soon as it is there; a must have left it by then.
    assert receive_order(nodes, place(nodes, DEVICES), DEVICES) == [
        Receive("a", "y", 1.0, 1.0, 1.5, ""),
        Receive("b", "y", 2.0, 2.0, 1.5, ""),
    ]


@st.composite
def graphs(draw: st.DrawFn) -> list[PlacedNode]:
    nodes = []
    for number in range(draw(st.integers(1, 12))):
        inputs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        allowed = draw(st.sampled_from([("x",), ("y",), ("x", "y")]))
        cost = {device: float(draw(st.integers(0, 4))) for device in allowed}
        nbytes = float(draw(st.integers(0, 30)))
        nodes.append(PlacedNode(f"n{number}", tuple(f"n{each}" for each in sorted(inputs)), (), cost, nbytes))
    return nodes


def run(
    nodes: list[PlacedNode], placed: Placement, receives: list[Receive] | None
) -> tuple[float, dict[tuple[str, str], float]]:
    """Run nodes and links in the order of the placement; return when all is done, and when each tensor was sent."""
    by_name = {node.name: node for node in nodes}
    waits_for = {(each.source, each.device): each.after for each in receives or ()}
    before: dict[Any, Any] = {}
    for device in "xy":
        before |= {
            b: a for a, b in pairwise(name for name in placed.finish_seconds if placed.device[name] == device)
        }
        # What has no bytes takes no link, and waits for none.
        hops = [hop for hop in placed.sent if hop[1] == device and by_name[hop[0]].nbytes]
        before |= {b: a for a, b in pairwise(sorted(hops, key=lambda hop: placed.sent[hop].begin_seconds))}

    @cache
    def sent(hop: tuple[str, str]) -> float:
        link, after = before.get(hop), waits_for.get(hop, "")
        free = sent(link) + by_name[link[0]].nbytes / RATE if link else 0.0
        return max(free, end(hop[0]), end(after) if after else 0.0)

    @cache
    def end(name: str) -> float:
        node, device = by_name[name], placed.device[name]
        there = [end(before[name]) if name in before else 0.0]
        for source in node.inputs:
            if placed.device[source] == device:
                there.append(end(source))
            else:
                there.append(sent((source, device)) + LATENCY + by_name[source].nbytes / RATE)
        return max(there) + node.cost_seconds[device]

    return max(map(end, by_name)), {hop: sent(hop) for hop in placed.sent}


# By a rounding, "long" begins before "none" ends.
@example(
    [on("y", "far", 0.0, nbytes=1), on("x", "one", 1.0, "far"), on("x", "none", 0.0), on("x", "long", 3.0)]
)
@given(graphs())
def test_no_step_gets_longer_and_nothing_is_sent_earlier(nodes: list[PlacedNode]) -> None:
    placed = place(nodes, DEVICES)
    receives = receive_order(nodes, placed, DEVICES)

    at_once, first = run(nodes, placed, None)
    delayed, sent = run(nodes, placed, receives)

    assert at_once == pytest.approx(max(placed.finish_seconds.values()))
    assert delayed == pytest.approx(at_once)
    assert sent.keys() == {(each.source, each.device) for each in receives}
    for each in receives:
        assert first[each.source, each.device] <= sent[each.source, each.device] <= each.latest_seconds + 1e-9
    assert [each.latest_seconds for each in receives] == sorted(each.latest_seconds for each in receives)
