"""Graphs as JSON, for tests: what a stranger's adapter would write."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from penstock.graph import Graph, Session

FIELDS = ("ctrl", "where", "group", "only", "cost", "bytes")


def node(name: str, op: str, inputs: str = "", **attr: Any) -> dict[str, Any]:
    """Return a node as JSON has it; inputs separated by blanks, `FIELDS` apart from the attributes."""
    fields: dict[str, Any] = {key: attr.pop(key) for key in FIELDS if key in attr}
    attr = {key.rstrip("_"): value for key, value in attr.items()}
    return {"name": name, "op": op, "in": inputs.split(), "attr": attr, **fields}


def value(data: Any, dtype: str = "float32") -> dict[str, Any]:
    """Return a value as JSON has it, of plain numbers."""
    array = np.array(data)
    return {"dtype": dtype, "shape": list(array.shape), "data": array.ravel().tolist()}


def constant(name: str, data: Any, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    """Return a Constant node."""
    return node(name, "Constant", value=value(data, dtype), **fields)


def body(args: str, nodes: list[dict[str, Any]], out: str) -> dict[str, Any]:
    """Return a subgraph as JSON has it."""
    return {"args": args.split(), "nodes": nodes, "out": out.split()}


def evaluate(
    nodes: list[dict[str, Any]], fetches: Any, feeds: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Run a graph once."""
    with Session(Graph(nodes), **options) as session:
        return session.run(fetches, feeds)


def any_value(graph: Graph, random: Random, pool: list[Any], counts: list[Any], depth: int = 0) -> Any:
    """Add a random computation on what is in the pool: arithmetic, a loop or a condition, nested three deep at most."""
    one, other = random.choice(pool), random.choice(pool)
    kind = random.randrange(6 if depth < 3 else 4)
    if kind < 4:
        return [lambda: graph.add("Sigmoid", one + other), lambda: one - other, lambda: -one, lambda: one][
            kind
        ]()
    results = random.randrange(1, 4)

    def inside(*given: Any) -> list[Any]:
        inner = [*pool, *given]
        for _ in range(random.randrange(3)):
            inner.append(any_value(graph, random, inner, counts, depth + 1))
        return [random.choice(inner[-4:]) for _ in range(results)]

    if kind == 4:
        is_data = random.random() < 0.6
        predicate = graph.add("Sum", one) < 0.0 if is_data else random.choice(counts) < 2
        args = [random.choice(pool) for _ in range(random.randrange(3))]
        return random.choice(graph.cond(predicate, inside, inside, args))
    limit, carries = random.choice(counts), [random.choice(pool) for _ in range(results)]
    found = graph.while_loop(
        lambda i, *_: i < limit, lambda i, *given: [i + 1, *inside(*given)], [graph.constant(0), *carries]
    )
    return random.choice(found[1:])
