"""How far automatic placements of a graph are behind the best fixed one, over rates of links and speeds of workers.

    python benchmarks/graph/placement.py [--quick]

For small graphs of several shapes, two workers, and each rate and speed: the simulated end of a step under the white
paper's greedy rule, under the search that sessions use, and under the best of all fixed placements, which are all
tried; and under the best single worker. It fails where the search is over 5 % behind the best, or nowhere ahead of a
single worker. Everything is computed; nothing of it depends on what else runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence

from penstock.policy.graph_placement import Devices, PlacedNode, place
from penstock.policy.graph_search import place_searched

LATENCY_SECONDS = 50e-6
RATES = (1e6, 1e7, 1e8, 1e9, 1e10)
SPEEDS = (1, 2, 5, 10)


def shapes() -> Iterator[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """Yield graphs: a name, and nodes with their inputs."""
    yield "chain", [(f"n{k}", (f"n{k - 1}",) if k else ()) for k in range(8)]
    yield (
        "branches",
        [
            ("a", ()),
            *((f"{side}{k}", (f"{side}{k - 1}" if k else "a",)) for side in "bc" for k in range(3)),
            ("z", ("b2", "c2")),
        ],
    )
    wide = tuple(f"w{k}" for k in range(6))
    yield "wide", [("a", ()), *((name, ("a",)) for name in wide), ("z", wide)]
    yield (
        "diamonds",
        [
            ("a", ()),
            ("b", ("a",)),
            ("c", ("a",)),
            ("d", ("b", "c")),
            ("e", ("d",)),
            ("f", ("d",)),
            ("g", ("e", "f")),
        ],
    )


def ends(shape: Sequence[tuple[str, tuple[str, ...]]], speed: float, rate: float) -> Mapping[str, float]:
    """Return the end of a step: greedy, searched, best, single."""
    nodes = [
        PlacedNode(
            name,
            inputs,
            (),
            {d: 1e-3 * (1 + k % 3) * by for d, by in (("a", 1), ("b", speed))},
            4e5 * (1 + k % 2),
        )
        for k, (name, inputs) in enumerate(shape)
    ]
    devices = Devices(["a", "b"], LATENCY_SECONDS, rate)
    names = [node.name for node in nodes]
    fixed = {
        where: place(nodes, devices, fixed=dict(zip(names, where, strict=True))).end_seconds
        for where in itertools.product("ab", repeat=len(names))
    }
    return {
        "greedy": place(nodes, devices).end_seconds,
        "searched": place_searched(nodes, devices).end_seconds,
        "best": min(fixed.values()),
        "single": min(end for where, end in fixed.items() if len(set(where)) == 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate and speed, for a test")
    quick = parser.parse_args(words).quick
    found: dict[str, list[Mapping[str, float]]] = {
        name: [
            ends(shape, speed, rate)
            for speed in SPEEDS[: 1 if quick else None]
            for rate in RATES[:: 4 if quick else 1]
        ]
        for name, shape in shapes()
    }
    for name, each in found.items():
        behind = {rule: max(e[rule] / e["best"] for e in each) for rule in ("greedy", "searched")}
        ahead = max(e["single"] / e["searched"] for e in each)
        print(
            f"{name}: behind the best fixed placement at most {behind['searched'] - 1:.1%} "
            f"(greedy {behind['greedy'] - 1:.1%}); ahead of a single worker at most {ahead:.2f} x"
        )
        assert behind["searched"] <= 1.05, f"{name}: {behind['searched'] - 1:.1%} behind"
    assert any(e["single"] > 1.05 * e["searched"] for each in found.values() for e in each), "nowhere ahead"


if __name__ == "__main__":
    main()
