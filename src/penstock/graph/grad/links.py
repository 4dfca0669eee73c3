"""What a result depends on in a way that a gradient can follow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.graph.model.check import TRIPS
from penstock.graph.model.dtypes import DIFFERENTIABLE
from penstock.graph.model.node import Endpoint, Node, Scope, Spec, Subgraph, parse_endpoint
from penstock.graph.ops.table import operation

#: Operations with rules of their own, and which of their inputs the gradient follows (None: all).
FOLLOWED: dict[str, tuple[int, ...] | None] = {
    "Read": None,
    "Assign": (1,),
    "AssignAdd": (1,),
    "GradientSum": None,
    "StackPush": None,
    "StackPop": (0,),
    "Shuffle": (0,),
    # PyTorch's own derivative knows that mean and deviation come from the values.
    "LayerNormBackward": (0, 1, 4),
    "BatchNormBackward": (0, 1, 4),
    "Call": None,
    "Switch": (0,),
    "Merge": None,
    "Enter": None,
    "Leave": None,
    "NextIteration": None,
}


def is_smooth(spec: Spec | None) -> bool:
    """Return whether a gradient can flow through an edge."""
    return spec is not None and spec.dtype in DIFFERENTIABLE and spec.kind in ("tensor", "variable", "stack")


def links(scope: Scope, node: Node, port: int) -> set[Endpoint]:
    """Return the endpoints, inputs and captures, that an output of a node depends on smoothly."""
    if port >= len(node.outputs) or not is_smooth(node.outputs[port]):
        return set()
    if node.op == "While":
        return loop_links(scope, node, port)[1]
    if node.op == "Cond":
        found: set[Endpoint] = set()
        for which in ("then", "else"):
            for endpoint in branch_roots(node, which, port):
                found |= branch_sources(scope, node, which, endpoint)
        return found
    table = operation(node.op)
    if not table.differentiable and node.op not in FOLLOWED:
        return set()
    places = FOLLOWED.get(node.op)
    return {
        endpoint
        for place, endpoint in enumerate(node.inputs)
        if (places is None or place in places) and is_smooth(scope.find(endpoint))
    }


def sources(scope: Scope, subgraph: Subgraph, endpoint: Endpoint) -> set[Endpoint]:
    """Return the arguments and the captures that an endpoint of a subgraph depends on smoothly."""
    inner = Scope(subgraph.nodes, subgraph.specs, scope)
    found: set[Endpoint] = set()
    seen: set[Endpoint] = set()
    open_endpoints = [endpoint]
    while open_endpoints:
        each = open_endpoints.pop()
        if each in seen or not is_smooth(inner.find(each)):
            continue
        seen.add(each)
        if each.node in subgraph.nodes:
            open_endpoints += links(inner, subgraph.nodes[each.node], each.port)
        else:
            found.add(each)
    return found


def branch_roots(node: Node, which: str, port: int) -> Iterator[Endpoint]:
    """Yield what a branch of a Cond gives for an output."""
    out = node.attr[which].out
    if port < len(out):
        yield out[port]
    else:
        owner, text = node.attr["saved"][port - len(out)]
        if owner == which:
            yield parse_endpoint(text)


def branch_sources(scope: Scope, node: Node, which: str, endpoint: Endpoint) -> set[Endpoint]:
    """Return the inputs of a Cond and the captures that an endpoint of a branch depends on."""
    subgraph = node.attr[which]
    given = dict(zip(map(Endpoint, subgraph.args), node.inputs[1:], strict=True))
    return {given.get(each, each) for each in sources(scope, subgraph, endpoint)}


def loop_links(scope: Scope, node: Node, port: int) -> tuple[set[int], set[Endpoint]]:
    """Return the carries that an output of a While depends on over its iterations, and the endpoints.

    Carries are counted as outputs are: those that the loop saves come after its own.
    """
    body = node.attr["body"]
    places = {Endpoint(arg): place for place, arg in enumerate(body.args)}
    carries: set[int] = set()
    outside: set[Endpoint] = set()
    open_carries = [port]
    while open_carries:
        place = open_carries.pop()
        if place in carries:
            continue
        carries.add(place)
        for each in sources(scope, body, _body_root(node, place)):
            if each in places:
                open_carries.append(places[each])
            else:
                outside.add(each)
    outside |= {node.inputs[place] for place in carries if place < len(node.inputs)}
    return carries, {each for each in outside if is_smooth(scope.find(each))}


def _body_root(node: Node, place: int) -> Endpoint:
    count = len(node.inputs)
    if place < count:
        root: Endpoint = node.attr["body"].out[place]
        return root
    text = node.attr["saved"][place - count]
    assert text != TRIPS, "a count is not smooth"
    return parse_endpoint(text)


def connected(scope: Scope, order: Iterable[Node], wanted: set[Endpoint]) -> set[Endpoint]:
    """Return the endpoints of a scope that depend smoothly on wanted ones, these included."""
    found = set(wanted)
    for node in order:
        found.update(each for each in node.endpoints() if links(scope, node, each.port) & found)
    return found
