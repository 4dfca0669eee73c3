"""The greedy rule, worked out by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.policy import graph_search
from penstock.policy.graph_placement import (
    Devices,
    NoFeasibleDevice,
    PlacedNode,
    allows_cpu,
    is_allowed,
    link_of,
    place,
)
from penstock.policy.graph_search import place_searched

BOTH = {"gpu": 1.0, "cpu": 4.0}


def test_a_node_goes_where_it_finishes_first_transfers_and_queues_included() -> None:
    nodes = [
        PlacedNode("a", cost_seconds=BOTH, nbytes=100),
        PlacedNode("b", cost_seconds={"gpu": 5.0, "cpu": 3.0}),
        PlacedNode("c", ("a",), ("b",), BOTH, 10),
        PlacedNode("far", ("c",), cost_seconds={"cpu": 1.0}),
    ]

    placed = place(nodes, Devices(["gpu", "cpu"], latency_seconds=0.5, bytes_per_second=50))

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
        found = place_searched(nodes, Devices(["x", "y"], 0.0, 1.0))
        # On x: all in turn. Away: a hop there and one back, and x is kept by both.
        assert found.finish_seconds["end"] == pytest.approx(2.1 + min(0.1, 2 * hop))
        return found.device

    assert placed(0.0)["small"] == "y"
    assert placed(0.2)["small"] == "x"
    assert placed(0.02)["small"] == "y"


def test_a_constraint_means_the_same_on_workers_as_in_one_process() -> None:
    """That is every job and task, and has one CPU. Case counts in names of jobs alone."""
    device = "/job:ps/task:1/device:cpu:0"
    for only in (
        "cpu",
        "CPU:0",
        "/cpu:0",
        "/device:CPU:0",
        "ps",
        "Task:1",
        "/job:ps",
        "ps/task:1",
        device,
        "",
    ):
        assert is_allowed(device, only), only
        assert allows_cpu(only), only
    for only in (
        "GPU:0",
        "/gpu",
        "npu:0",
        "cpu:1",
        "/device:cpu:1",
        "/job:ps/task:1/device:gpu:0",
        "worker:3",
    ):
        assert not is_allowed(device, only), only
        assert not allows_cpu(only), only
    assert not any(is_allowed(device, only) for only in ("/job:PS", "/task:17", "/job:p"))
    assert is_allowed("gpu:10", "gpu:10")
    assert not is_allowed("gpu:10", "gpu:1")


def test_a_search_spreads_no_node_by_which_the_step_does_not_end_earlier() -> None:
    """z would take b off x, for nothing: the step ends with y's long node."""
    same = dict.fromkeys("xyz", 1.0)
    nodes = [
        PlacedNode("long", cost_seconds={"y": 10.0}),
        PlacedNode("a", cost_seconds=same),
        PlacedNode("b", cost_seconds=same),
        PlacedNode("c", ("a", "b"), cost_seconds=same),
    ]
    devices = Devices("xyz", latency_seconds=0.5)
    assert place(nodes, devices).device["b"] == "z"
    assert place_searched(nodes, devices).device == {"long": "y", "a": "x", "b": "x", "c": "x"}


def test_exchanges_have_tries_of_their_own_after_all_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 nodes, moves and exchanges take all tries that they may have."""
    draw = random.Random(0)
    nodes = []
    for number in range(200):
        near = range(max(0, number - 12), number)
        inputs = draw.sample(near, min(len(near), draw.randint(1, 3)))
        seconds = draw.choice((1e-3, 2e-3, 3e-3))
        cost = {"a": seconds, "b": seconds * draw.choice((1, 1, 2))}
        named = tuple(f"n{each}" for each in inputs)
        nodes.append(PlacedNode(f"n{number}", named, (), cost, draw.choice((1e4, 4e5))))
    devices = Devices(["a", "b"], 50e-6, 1e9)

    # The default takes seconds.
    monkeypatch.setattr(graph_search, "_MOST_NODES", 40_000)
    both = place_searched(nodes, devices).end_seconds
    monkeypatch.setattr(graph_search, "_MOVES_PER_EXCHANGE", 40_000)
    moves = place_searched(nodes, devices).end_seconds

    assert both < moves < place(nodes, devices).end_seconds


def test_ready_nodes_go_by_time_then_by_the_list_and_ties_to_the_first_device() -> None:
    same = {"x": 1.0, "y": 1.0}
    nodes = [
        PlacedNode("late", ("first",), cost_seconds=same),
        PlacedNode("first", cost_seconds=same),
        PlacedNode("second", cost_seconds=same),
        PlacedNode("third", cost_seconds=same),
    ]

    placed = place(nodes, Devices(["x", "y"]))

    assert placed.device == {"first": "x", "second": "y", "third": "x", "late": "y"}
    assert placed.finish_seconds["late"] == 2


def test_a_group_shares_the_devices_of_its_members_and_follows_the_first_that_is_placed() -> None:
    nodes = [
        PlacedNode("a", cost_seconds={"gpu:0": 1.0, "gpu:1": 1.0, "cpu": 1.0}, group="g"),
        PlacedNode("b", ("a",), cost_seconds={"gpu:0": 9.0, "gpu:1": 1.0}, group="g"),
        PlacedNode("c", cost_seconds={"gpu:0": 1.0, "cpu": 9.0}, only="cpu"),
    ]

    placed = place(nodes, Devices(["cpu", "gpu:0", "gpu:1"]))

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
            place(bad, Devices(["cpu", "gpu"]))
        assert caught.value.node == named


def test_a_link_takes_one_tensor_after_the_other_each_way_and_what_is_ready_sooner_in_a_gap() -> None:
    """x gives three tensors to y, 2 s each on the link, and gets one back."""
    nodes = [
        PlacedNode("a", cost_seconds={"x": 1.0}, nbytes=20),
        PlacedNode("b", ("a",), cost_seconds={"x": 1.0}, nbytes=20),
        PlacedNode("late", ("b",), cost_seconds={"x": 6.0}, nbytes=20),
        PlacedNode("ya", ("a",), cost_seconds={"y": 0.5}, nbytes=10),
        PlacedNode("yb", ("b", "ya"), cost_seconds={"y": 0.5}),
        PlacedNode("back", ("ya",), cost_seconds={"x": 1.0}),
        PlacedNode("end", ("yb", "late"), cost_seconds={"y": 1.0}),
    ]
    placed = place(nodes, Devices(["x", "y"], latency_seconds=0.25, bytes_per_second=10))

    # a takes the link from 1 to 3 and is there at 3.25; b, ready at 2, has it from 3 to 5; late from 8 to 10.
    times = {hop: (each.begin_seconds, each.there_seconds) for hop, each in placed.sent.items()}
    assert times == {
        ("a", "y"): (1, 3.25),
        ("b", "y"): (3, 5.25),
        ("late", "y"): (8, 10.25),
        ("ya", "x"): (3.75, 5),
    }
    assert placed.finish_seconds == {
        "a": 1, "b": 2, "late": 8, "ya": 3.75, "yb": 5.75, "back": 9, "end": 11.25
    }  # fmt: skip

    # Its user comes later, but "first" is ready while the link is free.
    gap = [
        PlacedNode("first", cost_seconds={"x": 0.0}, nbytes=20),
        PlacedNode("second", ("first",), cost_seconds={"x": 4.0}, nbytes=20),
        PlacedNode("uses second", ("second",), cost_seconds={"y": 1.0}),
        PlacedNode("third", ("second",), cost_seconds={"x": 1.0}, nbytes=20),
        PlacedNode("uses both", ("first", "third"), cost_seconds={"y": 1.0}),
    ]
    sent = place(gap, Devices(["x", "y"], bytes_per_second=10)).sent
    assert [(name, each.begin_seconds) for (name, _), each in sent.items()] == [
        ("second", 4),
        ("first", 0),
        ("third", 6),
    ]

    # Of one node's two inputs, too.
    both = [PlacedNode(name, cost_seconds={"x": 0.0}, nbytes=20) for name in "pq"]
    both.append(PlacedNode("user", ("p", "q"), cost_seconds={"y": 1.0}))
    placed = place(both, Devices(["x", "y"], bytes_per_second=10))
    assert [each.begin_seconds for each in placed.sent.values()] == [0, 2]
    assert placed.end_seconds == 5


def test_devices_of_two_workers_share_the_link_between_these() -> None:
    ends = [f"/job:w/task:{task}/device:{device}" for task in (0, 1) for device in ("cpu:0", "gpu:0")]
    here, gpu, there, other = ends

    def sent(*users: tuple[str, str]) -> list[float]:
        """Return when what each source gives to its user is sent."""
        nodes = [PlacedNode(f"s{k}", cost_seconds={one: 0.0}, nbytes=10) for k, (one, _) in enumerate(users)]
        nodes += [PlacedNode(f"u{k}", (f"s{k}",), cost_seconds={to: 0.0}) for k, (_, to) in enumerate(users)]
        placed = place(nodes, Devices(ends, bytes_per_second=10))
        return [each.begin_seconds for each in placed.sent.values()]

    assert sent((here, there), (gpu, other)) == [0, 1]
    assert sent((here, there), (other, gpu)) == [0, 0]
    assert sent((here, gpu), (here, there)) == [0, 0]


@st.composite
def graphs(draw: st.DrawFn) -> list[PlacedNode]:
    """Nodes on three devices, with control edges, and tensors without bytes."""
    nodes = []
    for number in range(draw(st.integers(2, 12))):
        names = [f"n{each}" for each in range(number)]
        some = st.lists(st.sampled_from(names), max_size=4, unique=True) if names else st.just([])
        device, seconds = draw(st.sampled_from("xyz")), float(draw(st.integers(0, 4)))
        nbytes = draw(st.sampled_from([0.0, 1.0, 5.0, 20.0]))
        nodes.append(
            PlacedNode(f"n{number}", tuple(draw(some)), tuple(draw(some)), {device: seconds}, nbytes)
        )
    return nodes


# While a takes the link, none is ready, has no bytes, and takes nothing; b has to wait for a all the same.
@example(
    [
        PlacedNode("a", cost_seconds={"x": 0.0}, nbytes=20),
        PlacedNode("none", cost_seconds={"x": 1.0}),
        PlacedNode("b", ("none",), cost_seconds={"x": 0.5}, nbytes=20),
        PlacedNode("user", ("a", "none", "b"), cost_seconds={"y": 1.0}),
    ]
)
@given(graphs())
def test_no_two_tensors_take_a_link_at_once(nodes: list[PlacedNode]) -> None:
    placed = place(nodes, Devices(["x", "y", "z"], latency_seconds=0.5, bytes_per_second=10))

    links: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (name, device), each in placed.sent.items():
        assert each.begin_seconds >= placed.finish_seconds[name]
        if each.takes_link:
            link = link_of(placed.device[name], device)
            links.setdefault(link, []).append((each.begin_seconds, each.end_seconds))
    for taken in links.values():
        for (_, end), (begin, _) in pairwise(sorted(taken)):
            assert end <= begin
