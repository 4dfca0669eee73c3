"""What a placed graph holds on each device, worked out by hand, and placements that memory decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests.policy.test_graph_placement import graphs

from penstock.policy.graph_memory import peaks
from penstock.policy.graph_pipeline import place_pipeline
from penstock.policy.graph_placement import Devices, NoFeasibleDevice, PlacedNode, Placement, place
from penstock.policy.graph_search import place_searched

X, BOTH = {"x": 1.0}, {"x": 1.0, "y": 1.0}


def most(nodes: list[PlacedNode], devices: Devices) -> dict[str, tuple[float, float, str]]:
    return {
        device: (peak.held_bytes, peak.live_bytes, peak.node)
        for device, peak in peaks(nodes, place(nodes, devices)).items()
    }


def test_a_tensor_lives_from_the_begin_of_its_node_until_its_last_user_has_run() -> None:
    nodes = [
        PlacedNode("w", cost_seconds={"x": 0.0}, nbytes=100, holds_bytes=100, passes_on=True),
        PlacedNode("a", ("w",), cost_seconds=X, nbytes=10),
        PlacedNode("b", ("a",), cost_seconds=X, nbytes=20),
        PlacedNode("c", ("b",), cost_seconds=X, nbytes=40),
        PlacedNode("d", ("c",), cost_seconds=X, nbytes=1),
    ]
    # a and b; b and c; c and d. Of what passes on a variable, nothing.
    assert most(nodes, Devices(["x"])) == {"x": (100, 60, "c")}
    nodes[-1] = PlacedNode("d", ("a", "c"), cost_seconds=X, nbytes=1)
    assert most(nodes, Devices(["x"])) == {"x": (100, 70, "c")}
    # A view keeps what it is of until the view's last user has run.
    nodes[-1] = PlacedNode("d", ("view", "c"), cost_seconds=X, nbytes=1)
    nodes.append(PlacedNode("view", ("a",), cost_seconds={"x": 0.0}, nbytes=10, passes_on=True))
    assert most(nodes, Devices(["x"])) == {"x": (100, 70, "c")}


def test_a_tensor_is_on_both_devices_until_it_is_sent_and_then_where_it_is_needed() -> None:
    nodes = [
        PlacedNode("a", cost_seconds=X, nbytes=100),
        PlacedNode("b", ("a",), cost_seconds={"y": 5.0}, nbytes=7),
        PlacedNode("next", cost_seconds={"x": 20.0}, nbytes=50),
        PlacedNode("end", ("b", "next"), cost_seconds={"y": 1.0}, nbytes=0),
    ]
    devices = Devices(["x", "y"], bytes_per_second=10)
    # x: a until 11, next from 1 on. y: a from 1 to 16, b from 11 to the end; next comes from 21 on.
    assert most(nodes, devices) == {"x": (0, 150, "next"), "y": (0, 107, "b")}


def test_what_takes_no_time_takes_memory_in_the_order_in_which_it_runs() -> None:
    """As with costs of 0, given or by default."""
    at_once = {"x": 0.0, "y": 0.0}
    nodes = [
        PlacedNode("a", cost_seconds=at_once, nbytes=10),
        PlacedNode("b", ("a",), cost_seconds=at_once, nbytes=20),
        PlacedNode("c", ("b",), cost_seconds={"y": 0.0}, nbytes=40),
        PlacedNode("d", ("c",), cost_seconds={"y": 0.0}, nbytes=1),
    ]
    assert most(nodes, Devices(["x", "y"])) == {"x": (0, 30, "b"), "y": (0, 60, "c")}
    nodes[0] = PlacedNode("a", cost_seconds=X, nbytes=10)
    assert most(nodes, Devices(["x", "y"])) == {"x": (0, 30, "b"), "y": (0, 60, "c")}
    with pytest.raises(NoFeasibleDevice, match="x needs 30 bytes"):
        place(nodes, Devices(["x", "y"], memory_bytes={"x": 29, "y": 19}))


def test_a_search_finds_the_space_that_going_node_by_node_took_away() -> None:
    nodes = [
        PlacedNode("small", cost_seconds={"x": 1.0, "y": 2.0}, nbytes=20),
        PlacedNode("large", cost_seconds=X, nbytes=90),
        PlacedNode("end", ("small", "large"), cost_seconds=BOTH),
    ]
    devices = Devices(["x", "y"], bytes_per_second=10, memory_bytes={"x": 100})
    with pytest.raises(NoFeasibleDevice, match="x needs 110 bytes"):
        place(nodes, devices)

    placed = place_searched(nodes, devices)

    assert (placed.device["small"], placed.device["large"]) == ("y", "x")
    assert placed.reason["small"].startswith("has space there; node by node, x needs 110 bytes")
    with pytest.raises(NoFeasibleDevice, match=r"x needs 110 bytes.*no placement that was tried has space"):
        place_searched(nodes, Devices(["x", "y"], bytes_per_second=10, memory_bytes={"x": 89}))


def test_a_placement_that_has_no_space_is_refused_by_device_bytes_and_node() -> None:
    nodes = [
        PlacedNode("v", cost_seconds={"x": 0.0}, holds_bytes=50, passes_on=True),
        PlacedNode("a", cost_seconds=X, nbytes=1000),
        PlacedNode("b", ("a",), cost_seconds=X, nbytes=500),
    ]
    assert place(nodes, Devices(["x"], memory_bytes={"x": 1550})).device["b"] == "x"
    for rule in (place, place_searched, place_pipeline):
        with pytest.raises(NoFeasibleDevice) as caught:
            rule(nodes, Devices(["x"], memory_bytes={"x": 1549}))
        assert caught.value.node == "b"
        assert str(caught.value).removesuffix("; no placement that was tried has space") == (
            "x needs 1,550 bytes when it runs, 50 of variables and 1,500 of tensors that live at once, and has 1,549"
        )


def test_a_node_goes_to_another_device_where_the_first_has_no_space_for_its_tensors() -> None:
    """The greedy rule takes tensors as kept until all have run; in the end, each leaves x once y has got it."""
    fast = {"x": 1.0, "y": 9.0}
    nodes = [PlacedNode(name, cost_seconds=fast, nbytes=100) for name in "abc"]
    nodes += [PlacedNode("sum", ("a", "b", "c"), cost_seconds={"y": 1.0})]

    def homes(nbytes: int, rule: object = place) -> str:
        devices = Devices(["x", "y"], bytes_per_second=1e9, memory_bytes={"x": nbytes})
        placed = rule(nodes, devices)  # type: ignore[operator]
        return "".join(placed.device[name] for name in "abc")

    assert homes(300) == "xxx"
    assert homes(299) == "xxy"
    assert (homes(200, place_searched), homes(199, place_searched)) == ("xxx", "xyy")
    assert homes(99) == "yyy"


@given(graphs())
def test_no_device_holds_less_than_a_node_and_its_inputs_nor_more_than_all(nodes: list[PlacedNode]) -> None:
    placed: Placement = place(nodes, Devices(["x", "y", "z"], latency_seconds=0.5, bytes_per_second=10))
    found, by_name = peaks(nodes, placed), {node.name: node for node in nodes}
    for node in nodes:
        device = placed.device[node.name]
        together = {node.name, *node.inputs} if node.cost_seconds[device] else set()
        assert found[device].live_bytes >= sum(by_name[name].nbytes for name in together)
    assert all(peak.live_bytes <= sum(node.nbytes for node in nodes) for peak in found.values())
