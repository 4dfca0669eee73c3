"""Graphs as JSON, for tests: what a stranger's adapter would write."""

from __future__ import annotations

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
