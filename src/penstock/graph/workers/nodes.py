"""The nodes of a part in a message: as JSON, but the values of constants as they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.graph.model.dtypes import zeros
from penstock.graph.model.node import Constant, Node
from penstock.graph.model.text import dumps, loads, nodes_from


def sent_nodes(nodes: Mapping[str, Node]) -> dict[str, Any]:
    """Return what a message says of nodes. Constants inside of bodies stay in the text."""
    values = {
        name: each for name, node in nodes.items() if isinstance(each := node.attr.get("value"), Constant)
    }
    plain = [
        replace(
            node, attr={**node.attr, "value": Constant(zeros(values[name].dtype, (0,)), values[name].dtype)}
        )
        if name in values
        else node
        for name, node in nodes.items()
    ]
    return {"graph": dumps(plain), "constants": {name: each.value for name, each in values.items()}}


def received_nodes(message: Mapping[str, Any]) -> list[Node]:
    """Return the nodes that a message has. Raises: CorruptError, MismatchError."""
    nodes, values = nodes_from(loads(message["graph"])), message["constants"]
    for node in nodes:
        if node.name in values:
            node.attr["value"] = Constant(values[node.name], node.attr["value"].dtype)
    return nodes
