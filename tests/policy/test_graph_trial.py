"""Placements that are tried by real steps: which are, and which of them stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.policy.graph_placement import Devices, PlacedNode, Placement
from penstock.policy.graph_search import place_searched, rivals
from penstock.policy.graph_trial import MOST_STEPS, PlacementTrial
from penstock.units import format_seconds

DEVICES = Devices(["a", "b"], 0.01, 1e9, {"b": 4.0})


def branches(seconds: float) -> list[PlacedNode]:
    """Two nodes that take so long on "b" and a second on "a", and what adds them up."""
    cost = {"a": 1.0, "b": seconds}
    return [
        PlacedNode("x", (), (), cost),
        PlacedNode("y", (), (), cost),
        PlacedNode("z", ("x", "y"), (), cost),
    ]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param(branches(1.0), [{"a"}, {"b"}], id="alike"),
        pytest.param(branches(9.0), [], id="all on the fast one at once"),
        pytest.param(branches(1.9), [{"a"}, {"b"}], id="at most as many times slower as there are devices"),
        pytest.param(branches(1.0)[:1], [{"b"}], id="one node"),
        pytest.param(
            [PlacedNode("x", (), (), {"a": 1.0}), PlacedNode("y", (), (), dict.fromkeys("ab", 0.01))],
            [],
            id="only what takes next to nothing may move",
        ),
        pytest.param(
            [replace(each, holds_bytes=2.0) for each in branches(1.0)], [{"a"}], id="no memory for all on b"
        ),
    ],
)
def test_all_on_one_device_is_tried_where_it_is_not_hopeless(
    nodes: list[PlacedNode], expected: list[set[str]]
) -> None:
    best = place_searched(nodes, DEVICES)
    found = rivals(best, nodes, DEVICES)
    assert [set(each.device.values()) for each in found] == expected
    # What is fixed stays, and the others go to one device.
    for each in rivals(best, nodes, DEVICES, fixed={nodes[0].name: "a"}):
        assert each.device[nodes[0].name] == "a"
        assert len({device for name, device in each.device.items() if name != nodes[0].name}) <= 1


def placements(count: int) -> list[Placement]:
    return [
        Placement({"x": f"device {n}", "w": "device 0"}, {}, {"x": "first", "w": "w"}) for n in range(count)
    ]


@pytest.mark.parametrize(
    ("seconds", "stays"),
    [([1.0, 0.5, 0.7], 1), ([1.0, 0.99, 1.5], 0), ([1.0, 1.2, 0.9], 2)],
    ids=["the fastest", "a hundredth is chance", "the last"],
)
def test_the_placement_of_the_fastest_steps_stays(seconds: list[float], stays: int) -> None:
    tried = placements(len(seconds))
    trial, found, steps, seen = PlacementTrial(tried), None, 0, [0] * len(seconds)
    while found is None:
        turn = trial.begin()
        # The first step of each compiles, and one of the others meets another program.
        slow = 100.0 if seen[turn] in (0, 3) else 0.0
        found = trial.end(turn, seconds[turn] + slow)
        seen[turn] += 1
        steps += 1
    assert set(seen) == {8}
    assert found.device == tried[stays].device
    assert found.reason["w"] == "w"
    assert found.reason["x"] == (
        "first"
        if not stays
        else f"a step took {format_seconds(seconds[stays])} so, and 1 s where the simulation ends it first"
    )


def test_short_steps_are_tried_for_a_second_and_at_most_fifty_times_each() -> None:
    def steps_of(seconds: float) -> int:
        trial, steps = PlacementTrial(placements(3)), 1
        while trial.end(trial.begin(), seconds) is None:
            steps += 1
        return steps

    assert [steps_of(each) for each in (1 / 32, 1.0)] == [32, 24]
    assert steps_of(0.001) == 150 <= MOST_STEPS


def test_a_placement_under_which_a_step_fails_is_not_tried_again() -> None:
    """The simulated best is: it is what runs without a trial."""
    trial = PlacementTrial(placements(3))
    assert [trial.begin() for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert trial.end(0, None) is None
    assert trial.end(1, None) is None
    assert {trial.begin() for _ in range(6)} == {0, 2}
    assert [trial.end(2, 0.5) for _ in range(99)] == [None] * 99
    ends = [trial.end(0, 1.0) for _ in range(8)]
    assert ends[:7] == [None] * 7
    assert ends[7] is not None
    assert ends[7].device["x"] == "device 2"
    last = PlacementTrial(placements(2))
    assert last.end(1, None) == placements(2)[0]


def test_what_shares_a_device_with_state_stays_with_it() -> None:
    """Only the variable is fixed: what changes it, or a group's other nodes, would take it along."""
    cost = {"a": 1.0, "b": 0.5}
    nodes = [
        PlacedNode("w", (), (), dict.fromkeys("ab", 0.0), holds_bytes=1.0),
        PlacedNode("more", ("w",), (), cost, beside=("w",)),
        PlacedNode("x", (), (), cost),
        PlacedNode("y", ("x", "more"), (), cost),
    ]
    best = place_searched(nodes, DEVICES, fixed={"w": "a"})
    found = rivals(best, nodes, DEVICES, fixed={"w": "a"})
    assert found
    for each in (best, *found):
        assert (each.device["w"], each.device["more"]) == ("a", "a")
