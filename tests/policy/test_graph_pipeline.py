"""Cuts of a line into stages, against all stages there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from penstock.policy.graph_pipeline import place_pipeline
from penstock.policy.graph_placement import Devices, PlacedNode, place
from penstock.policy.graph_search import place_searched
from penstock.units import format_seconds


def busiest(nodes: list[PlacedNode], device: dict[str, str], rate: float) -> float:
    """Return the seconds of a step of the device or cut that has most to do, in a chain."""
    loads = [
        sum(n.cost_seconds[device[n.name]] for n in nodes if device[n.name] == d) for d in device.values()
    ]
    cuts = [a.nbytes / rate for a, b in pairwise(nodes) if device[a.name] != device[b.name]]
    return max(loads + cuts)


@pytest.mark.parametrize("seed", range(12))
def test_no_stages_of_a_chain_have_a_less_busy_device_or_link(seed: int) -> None:
    random = Random(seed)
    devices = ["a", "b", "c"]
    nodes = [
        PlacedNode(
            f"n{k}",
            (f"n{k - 1}",) if k else (),
            cost_seconds={d: random.choice([1.0, 2.0, 5.0]) for d in devices},
            nbytes=random.choice([1.0, 4.0, 9.0]),
            only=random.choice(["", "", "", "a"]),
            holds_bytes=random.choice([0.0, 3000.0]),
            basis="cost measured",
        )
        for k in range(6)
    ]
    memory = {"a": 12_060.0, "b": 3060.0}  # with space for all tensors
    given = Devices(devices, 0.0, 2.0, memory)

    def allowed(names: tuple[str, ...]) -> bool:
        runs = [d for place, d in enumerate(names) if place == 0 or d != names[place - 1]]
        held = {d: sum(n.holds_bytes for n, e in zip(nodes, names, strict=True) if e == d) for d in devices}
        return (
            len(set(runs)) == len(runs)
            and all(held[d] <= memory.get(d, 99_000) for d in devices)
            and all(n.only in ("", d) for n, d in zip(nodes, names, strict=True))
        )

    names = [node.name for node in nodes]
    stages = [dict(zip(names, each, strict=True)) for each in product(devices, repeat=6) if allowed(each)]
    placed = place_pipeline(nodes, given)

    if stages:
        best = min(busiest(nodes, each, 2.0) for each in stages)
        assert busiest(nodes, placed.device, 2.0) == pytest.approx(best)
        assert placed.reason["n0"].startswith("stage 1 of")
        assert placed.reason["n0"].endswith(" (cost measured)")
    else:
        assert placed == place(nodes, given)


def test_the_search_moves_a_branch_as_a_whole_and_keeps_to_constraints_and_memory() -> None:
    """Two branches of three nodes over a link that takes one of them only as a whole; all placements are tried."""
    both, devices = {"a": 2.0, "b": 2.0}, Devices(["a", "b"], 0.0, 0.5)
    nodes = [PlacedNode("s", cost_seconds=both, nbytes=1)]
    for side in "lr":
        nodes += [
            PlacedNode(f"{side}{k}", (f"{side}{k - 1}" if k else "s",), (), both, 1, holds_bytes=100 * k)
            for k in range(3)
        ]
    nodes.append(PlacedNode("end", ("l2", "r2"), cost_seconds=both))

    def end(fixed: dict[str, str]) -> float:
        return max(place(nodes, devices, fixed=fixed).finish_seconds.values())

    names = [node.name for node in nodes]
    best = min(end(dict(zip(names, each, strict=True))) for each in product("ab", repeat=len(nodes)))
    searched = place_searched(nodes, devices)
    assert max(searched.finish_seconds.values()) == best < end({})
    for name, why in searched.reason.items():  # those of the placement that there is
        assert why.startswith(f"finishes at {format_seconds(searched.finish_seconds[name])}"), why
    assert any("; no earlier end of the step was found with " in why for why in searched.reason.values())
    kept = place_searched(nodes, replace(devices, memory_bytes={"b": 208.0}), fixed={"l0": "b", "s": "a"})
    assert (kept.device["l0"], kept.device["s"]) == ("b", "a")
    assert sum(node.holds_bytes for node in nodes if kept.device[node.name] == "b") <= 200


def test_the_search_lets_two_nodes_change_places_where_no_move_helps() -> None:
    """Six nodes between two: the link has time for one of them, and the wrong one moves first."""
    both, devices = dict.fromkeys("ab", 1.0), Devices(["a", "b"], 0.05, 1.0)
    wide = [f"w{k}" for k in range(6)]
    nodes = [PlacedNode("first", cost_seconds=both, nbytes=4)]
    nodes += [
        PlacedNode(name, ("first",), (), dict.fromkeys("ab", 1.0 + (k + 1) % 3), 4.0 * (1 + (k + 1) % 2))
        for k, name in enumerate(wide)
    ]
    nodes.append(PlacedNode("last", tuple(wide), cost_seconds=dict.fromkeys("ab", 2.0)))
    names = [node.name for node in nodes]
    best = min(
        place(nodes, devices, fixed=dict(zip(names, each, strict=True))).end_seconds
        for each in product("ab", repeat=len(nodes))
    )
    assert place_searched(nodes, devices).end_seconds == best


def test_a_variable_and_what_changes_it_stay_in_one_stage_and_constants_go_with_their_users() -> None:
    """Two layers, there and back: the second update comes before the first, and shares a device with its weight."""
    both = {"a": 1.0, "b": 1.0}
    nodes = [
        PlacedNode("x", cost_seconds=both),
        PlacedNode("w1", cost_seconds=both),
        PlacedNode("w2", cost_seconds=both),
        PlacedNode("y1", ("x", "w1"), cost_seconds=both, nbytes=1),
        PlacedNode("y2", ("y1", "w2"), cost_seconds=both, nbytes=1),
        PlacedNode("rate", cost_seconds=both, nbytes=1),
        PlacedNode("up2", ("y2", "rate"), cost_seconds=both, beside=("w2",)),
        PlacedNode("up1", ("y1", "x"), ("up2",), both, beside=("w1",)),
    ]

    device = place_pipeline(nodes, Devices(["a", "b"], 0.0, 100.0)).device

    assert device["w1"] == device["up1"] != device["w2"] == device["up2"] == device["rate"]
    # Of nine devices, not all orders are tried; the stages are as balanced.
    many = [f"d{k}" for k in range(9)]
    chain = [
        PlacedNode(f"n{k}", (f"n{k - 1}",) if k else (), (), dict.fromkeys(many, 1.0)) for k in range(18)
    ]
    assert sorted(place_pipeline(chain, Devices(many, 0.0, 1.0)).device.values()) == sorted(2 * many)
