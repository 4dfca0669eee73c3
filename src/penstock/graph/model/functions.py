"""Subgraphs as reusable functions: copies of their nodes under other names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.graph.errors import DuplicateError, NotFoundError
from penstock.graph.model.node import Endpoint, Node, Subgraph


def copies_of(
    function: Subgraph, given: Mapping[str, Endpoint], names: Mapping[str, str]
) -> tuple[list[Node], list[Endpoint]]:
    """Return copies of a subgraph's nodes, and what it returns. given: its arguments; names: of the copies.

    Raises: NotFoundError for a port that an argument has not; DuplicateError if a body inside hides a name.
    """
    nodes = [_copy(node, names[name], given, names) for name, node in function.nodes.items()]
    return nodes, [_end(endpoint, given, names) for endpoint in function.out]


def _end(endpoint: Endpoint, given: Mapping[str, Endpoint], names: Mapping[str, str]) -> Endpoint:
    if endpoint.node in given:
        if endpoint.port:
            raise NotFoundError(f"{str(endpoint)!r} is not there: an argument has port 0 alone")
        return given[endpoint.node]
    return Endpoint(names.get(endpoint.node, endpoint.node), endpoint.port)


def _copy(node: Node, name: str, given: Mapping[str, Endpoint], names: Mapping[str, str]) -> Node:
    attr: dict[str, Any] = {
        key: _body(value, given, names, node) if isinstance(value, Subgraph) else value
        for key, value in node.attr.items()
    }
    return Node(
        name,
        node.op,
        [_end(endpoint, given, names) for endpoint in node.inputs],
        [given[each].node if each in given else names.get(each, each) for each in node.controls],
        attr,
        node.device,
        node.where,
        dict(node.placement),
    )


def _body(body: Subgraph, given: Mapping[str, Endpoint], names: Mapping[str, str], owner: Node) -> Subgraph:
    """Return a copy of a body, whose own names stay and hide those outside."""
    own = {*body.args, *body.nodes}
    given = {name: endpoint for name, endpoint in given.items() if name not in own}
    names = {name: other for name, other in names.items() if name not in own}
    hidden = own & {*names.values(), *(endpoint.node for endpoint in given.values())}
    if hidden:
        raise DuplicateError(
            f"a body of it has the name {min(hidden)!r}, which is one outside",
            node=owner.name,
            where=owner.where,
        )
    nodes = {name: _copy(node, name, given, names) for name, node in body.nodes.items()}
    return Subgraph(list(body.args), nodes, [_end(endpoint, given, names) for endpoint in body.out])
