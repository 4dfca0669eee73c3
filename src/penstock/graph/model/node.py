"""Nodes, the ends of edges, and subgraphs, as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.graph.model.dtypes import Shape, Value, shape_text


class Endpoint(NamedTuple):
    """An output of a node, written "node:port"."""

    node: str
    port: int = 0

    def __str__(self) -> str:
        return f"{self.node}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint that "node:port" names; "node" is its port 0."""
    node, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and len(port) < 10:
        return Endpoint(node, int(port))
    return Endpoint(text, 0)


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of an edge before it runs.

    dtype, shape: of the tensor, or of what a variable holds. kind: "tensor"; "variable", "queue" or "mutex" for a
    handle; "stack" for the values that a loop keeps for its gradient. parts: the components of a queue, the elements
    of a stack.
    """

    dtype: str
    shape: Shape = None
    kind: str = "tensor"
    parts: tuple[Spec, ...] = ()

    def value(self) -> Spec:
        """Return what the edge is where a value is needed: of a variable's handle, what it holds."""
        return Spec(self.dtype, self.shape) if self.kind == "variable" else self

    def __str__(self) -> str:
        return f"{self.dtype}{shape_text(self.shape)}" if self.kind == "tensor" else f"a {self.kind}"


@dataclass(frozen=True, slots=True)
class Constant:
    """The value of a Constant, with the dtype of its edge."""

    value: Value
    dtype: str


@dataclass(slots=True, eq=False)
class Node:
    """A node of a graph.

    attr: checked and parsed: a Constant's value is a `Constant`, a body is a `Subgraph`.
    placement: `group`, `only`, `cost` (seconds by device) and `bytes` (of the output), where given.
    takes, outputs: what is known of each input and of each port; filled in by the checks.
    """

    name: str
    op: str
    inputs: list[Endpoint] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    attr: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    where: str = ""
    placement: dict[str, Any] = field(default_factory=dict)
    takes: tuple[Spec, ...] = ()
    outputs: tuple[Spec, ...] = ()

    def endpoints(self) -> list[Endpoint]:
        """Return the ends of the node's outputs."""
        return [Endpoint(self.name, port) for port in range(len(self.outputs))]

    def subgraphs(self) -> Iterator[tuple[str, Subgraph]]:
        """Yield each subgraph of the node with the name of its attribute."""
        for name, value in self.attr.items():
            if isinstance(value, Subgraph):
                yield name, value


@dataclass(slots=True, eq=False)
class Subgraph:
    """A body of a loop, a condition or a branch.

    args: names of its arguments; nodes: by name, as given; out: what it returns, possibly endpoints outside.
    specs: of the arguments; filled in by the checks.
    """

    args: list[str]
    nodes: dict[str, Node]
    out: list[Endpoint]
    specs: dict[str, Spec] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Scope:
    """Where names are looked up: a subgraph's arguments and nodes, then those of what surrounds it."""

    nodes: dict[str, Node]
    args: dict[str, Spec] = field(default_factory=dict)
    parent: Scope | None = None

    def find(self, endpoint: Endpoint) -> Spec | None:
        """Return what an endpoint gives, or None if there is none of this name and port."""
        scope: Scope | None = self
        while scope is not None:
            if endpoint.node in scope.args:
                return scope.args[endpoint.node] if endpoint.port == 0 else None
            if endpoint.node in scope.nodes:
                outputs = scope.nodes[endpoint.node].outputs
                return outputs[endpoint.port] if endpoint.port < len(outputs) else None
            scope = scope.parent
        return None

    def names(self) -> Iterator[str]:
        """Yield every name that can be seen from here."""
        scope: Scope | None = self
        while scope is not None:
            yield from scope.args
            yield from scope.nodes
            scope = scope.parent


def captures(subgraph: Subgraph) -> list[Endpoint]:
    """Return the endpoints outside that a subgraph and those in it use, each once, in order of use."""
    found: dict[Endpoint, None] = {}
    for endpoint in subgraph.out:
        found[endpoint] = None
    for node in subgraph.nodes.values():
        for endpoint in node.inputs:
            found[endpoint] = None
        for _, inner in node.subgraphs():
            for endpoint in captures(inner):
                found[endpoint] = None
    own = {*subgraph.args, *subgraph.nodes}
    return [endpoint for endpoint in found if endpoint.node not in own]


def outer_controls(subgraph: Subgraph) -> list[str]:
    """Return the names outside that nodes of a subgraph, and of those in it, wait for."""
    found: dict[str, None] = {}
    for node in subgraph.nodes.values():
        for name in node.controls:
            found[name] = None
        for _, inner in node.subgraphs():
            for name in outer_controls(inner):
                found[name] = None
    own = {*subgraph.args, *subgraph.nodes}
    return [name for name in found if name not in own]
