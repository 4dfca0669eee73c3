"""The greedy rule, worked out by hand."""

from __future__ import annotations

import pytest

from penstock.policy.graph_placement import NoFeasibleDevice, PlacedNode, place
from penstock.policy.graph_search import place_searched

BOTH = {"gpu": 1.0, "cpu": 4.0}


def test_a_node_goes_where_it_finishes_first_transfers_and_queues_included() -> None:
    nodes = [
        PlacedNode("a", cost_seconds=BOTH, nbytes=100),
        PlacedNode("b", cost_seconds={"gpu": 5.0, "cpu": 3.0}),
        PlacedNode("c", ("a",), ("b",), BOTH, 10),
        PlacedNode("far", ("c",), cost_seconds={"cpu": 1.0}),
    ]

    placed = place(nodes, ["gpu", "cpu"], latency_seconds=0.5, bytes_per_second=50)

    # a: gpu at 1. b: gpu at 6 or cpu at 3. c, ready at 3: gpu at 3 + 0.5 + 1 (b's control crosses), cpu at 7.
    # far: cpu at 4.5 + 0.5 + 10/50 + 1.
    assert placed.device == {"a": "gpu", "b": "cpu", "c": "gpu", "far": "cpu"}
    assert placed.finish_seconds == pytest.approx({"a": 1, "b": 3, "c": 4.5, "far": 6.2})
    assert "4.5 s" in placed.reason["c"]


def test_a_small_node_stays_where_handing_it_over_costs_the_sender_more() -> None:
    """Two long nodes, and a short one after the first: elsewhere, it runs beside the second long one."""
    same = {"x": 1.0, "y": 1.0}
    short = dict.fromkeys(same, 0.1)

    def placed(hop: float) -> dict[str, str]:
        nodes = [
            PlacedNode("a", cost_seconds=same, only="x", hop_seconds=hop),
            PlacedNode("b", cost_seconds=same, only="x", hop_seconds=hop),
            PlacedNode("small", ("a",), cost_seconds=short, hop_seconds=hop),
            PlacedNode("end", ("small", "b"), cost_seconds=short, only="x"),
        ]
        found = place_searched(nodes, ["x", "y"], 0.0, 1.0)
        # On x: all in turn. Away: a hop there and one back, and x is kept by both.
        assert found.finish_seconds["end"] == pytest.approx(2.1 + min(0.1, 2 * hop))
        return found.device

    assert placed(0.0)["small"] == "y"
    assert placed(0.2)["small"] == "x"
    assert placed(0.02)["small"] == "y"


def test_ready_nodes_go_by_time_then_by_the_list_and_ties_to_the_first_device() -> None:
    same = {"x": 1.0, "y": 1.0}
    nodes = [
        PlacedNode("late", ("first",), cost_seconds=same),
        PlacedNode("first", cost_seconds=same),
        PlacedNode("second", cost_seconds=same),
        PlacedNode("third", cost_seconds=same),
    ]

    placed = place(nodes, ["x", "y"], 0, 1)

    assert placed.device == {"first": "x", "second": "y", "third": "x", "late": "y"}
    assert placed.finish_seconds["late"] == 2


def test_a_group_shares_the_devices_of_its_members_and_follows_the_first_that_is_placed() -> None:
    nodes = [
        PlacedNode("a", cost_seconds={"gpu:0": 1.0, "gpu:1": 1.0, "cpu": 1.0}, group="g"),
        PlacedNode("b", ("a",), cost_seconds={"gpu:0": 9.0, "gpu:1": 1.0}, group="g"),
        PlacedNode("c", cost_seconds={"gpu:0": 1.0, "cpu": 9.0}, only="cpu"),
    ]

    placed = place(nodes, ["cpu", "gpu:0", "gpu:1"], 0, 1)

    assert placed.device == {"a": "gpu:0", "b": "gpu:0", "c": "cpu"}
    assert placed.reason["b"] == "follows its group 'g'"
    assert placed.reason["c"] == "the only device for it"
    for bad, named in (
        ([PlacedNode("n", cost_seconds={"cpu": 1.0}, only="gpu")], "n"),
        (
            [
                PlacedNode("m", cost_seconds={"cpu": 1.0}, group="g"),
                PlacedNode("n", cost_seconds={"gpu": 1.0}, group="g"),
            ],
            "m",
        ),
    ):
        with pytest.raises(NoFeasibleDevice) as caught:
            place(bad, ["cpu", "gpu"], 0, 1)
        assert caught.value.node == named
