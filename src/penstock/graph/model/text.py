"""A graph as strict JSON: nodes, subgraphs and the values of constants."""

from __future__ import annotations

import json
import os
from typing import Any

from penstock.graph.errors import CorruptError, DuplicateError, MismatchError
from penstock.graph.model.dtypes import value_from_json, value_to_json
from penstock.graph.model.node import Constant, Node, Subgraph, parse_endpoint

VERSION = 1
_MOST_BYTES = 1 << 31
_MOST_DEPTH = 50
_FIELDS = {"name", "op", "in", "ctrl", "attr", "device", "where"}
_PLACEMENT = ("group", "only", "cost", "bytes")


def loads(text: str | bytes) -> Any:
    """Return what strict JSON says. Raises: CorruptError if it is none, or too deep or long."""
    if len(text) > _MOST_BYTES:
        raise CorruptError(f"the text has {len(text):,} bytes; a graph has at most {_MOST_BYTES:,}")

    def refuse(word: str) -> Any:
        raise CorruptError(f"{word} is no strict JSON; such values are texts")

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"this is no JSON text of a graph: {error!s:.200}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptError("an object of the text has a key twice")
    return found


def dumps(nodes: list[Node]) -> str:
    """Return nodes as strict JSON."""
    document = {"penstock_graph": VERSION, "nodes": [node_to_json(node) for node in nodes]}
    return json.dumps(document, allow_nan=False, indent=1)


def nodes_from(document: Any) -> list[Node]:
    """Return the nodes of a document: a list of nodes, or what `dumps` wrote.

    Raises: CorruptError, MismatchError.
    """
    if isinstance(document, dict):
        if document.keys() != {"penstock_graph", "nodes"} or document["penstock_graph"] != VERSION:
            raise CorruptError(f"this is no graph of version {VERSION}: {document!r:.80}")
        document = document["nodes"]
    if not isinstance(document, list):
        raise CorruptError(f"a graph is a list of nodes, and this is {document!r:.80}")
    return [node_from_json(each) for each in document]


def node_to_json(node: Node) -> dict[str, Any]:
    """Return a node as JSON has it."""
    return {
        "name": node.name,
        "op": node.op,
        "in": [str(endpoint) for endpoint in node.inputs],
        "ctrl": list(node.controls),
        "attr": {name: _attribute_to_json(value) for name, value in node.attr.items()},
        "device": node.device,
        "where": node.where,
        **node.placement,
    }


def _attribute_to_json(value: Any) -> Any:
    if isinstance(value, Constant):
        return value_to_json(value.value, value.dtype)
    if isinstance(value, Subgraph):
        return subgraph_to_json(value)
    if isinstance(value, list | tuple):
        return [_attribute_to_json(each) for each in value]
    if isinstance(value, dict):
        return {name: _attribute_to_json(each) for name, each in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def subgraph_to_json(subgraph: Subgraph) -> dict[str, Any]:
    """Return `{"args", "nodes", "out"}`."""
    return {
        "args": list(subgraph.args),
        "nodes": [node_to_json(node) for node in subgraph.nodes.values()],
        "out": [str(endpoint) for endpoint in subgraph.out],
    }


def node_from_json(given: Any, depth: int = 0) -> Node:
    """Return the node that JSON describes. Raises: MismatchError."""
    if depth > _MOST_DEPTH:
        raise MismatchError(f"subgraphs are nested more than {_MOST_DEPTH} deep")
    if (
        not isinstance(given, dict)
        or not isinstance(given.get("name"), str)
        or not isinstance(given.get("op"), str)
    ):
        raise MismatchError(f"a node has the texts name and op, and this is {given!r:.80}")
    name, where = given["name"], given.get("where") or ""
    unknown = given.keys() - _FIELDS - set(_PLACEMENT)
    problem = f"it has the unknown field {min(unknown)!r:.80}" if unknown else ""
    attr = {} if given.get("attr") is None else given["attr"]
    if not isinstance(attr, dict):
        problem = f"attr is {attr!r:.80}; give an object"
    for field in ("in", "ctrl"):
        texts = given.get(field) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            problem = f"{field} is {texts!r:.80}; give a list of texts"
    for field in ("device", "where"):
        if not isinstance(given.get(field) or "", str):
            problem = f"{field} is {given[field]!r:.80}; give a text"
    if problem:
        raise MismatchError(problem, node=name, where=where if isinstance(where, str) else "")
    try:
        parsed = {each: _attribute_from_json(each, value, depth) for each, value in attr.items()}
    except MismatchError as error:
        if error.node:
            raise
        raise MismatchError(error.text, node=name, where=where) from error
    return Node(
        name,
        given["op"],
        [parse_endpoint(text) for text in given.get("in") or []],
        list(given.get("ctrl") or []),
        parsed,
        given.get("device") or "",
        where,
        {field: given[field] for field in _PLACEMENT if field in given},
    )


def _attribute_from_json(name: str, value: Any, depth: int) -> Any:
    if name == "value" and isinstance(value, dict):
        return Constant(*value_from_json(value))
    if isinstance(value, dict) and value.keys() == {"args", "nodes", "out"}:
        return subgraph_from_json(value, depth)
    return value


def subgraph_from_json(given: dict[str, Any], depth: int = 0) -> Subgraph:
    """Return the subgraph that JSON describes. Raises: MismatchError."""
    if not all(isinstance(given[field], list) for field in given):
        raise MismatchError(f"a subgraph has lists of args, nodes and out, and this is {given!r:.80}")
    args = [arg["name"] if isinstance(arg, dict) and "name" in arg else arg for arg in given["args"]]
    if not all(isinstance(text, str) for text in (*args, *given["out"])):
        raise MismatchError(
            f"args and out of a subgraph are texts, and these are {args!r:.80}, {given['out']!r:.80}"
        )
    nodes: dict[str, Node] = {}
    for each in given["nodes"]:
        node = node_from_json(each, depth + 1)
        if node.name in nodes:
            raise DuplicateError("its subgraph has two nodes of this name", node=node.name, where=node.where)
        nodes[node.name] = node
    return Subgraph(args, nodes, [parse_endpoint(text) for text in given["out"]])
