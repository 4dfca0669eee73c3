"""What a run needs of a scope, and which of its nodes are one computation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.graph.model.check import control_dependencies, dependencies, in_order
from penstock.graph.model.dtypes import bits_of
from penstock.graph.model.node import Constant, Endpoint, Node, Scope, Subgraph
from penstock.graph.ops.table import operation

#: State that is only looked at, or made: a body runs it where something needs it.
_WITHOUT_EFFECT = {
    "Placeholder",
    "Variable",
    "Read",
    "FIFOQueue",
    "RandomShuffleQueue",
    "Mutex",
    "QueueSize",
    "Restore",
}


def needed_nodes(
    nodes: Mapping[str, Node],
    roots: Iterable[Endpoint],
    controls: Iterable[str],
    fed: Collection[Endpoint] = (),
) -> tuple[list[Node], set[Endpoint]]:
    """Return the nodes that a run needs, in an order in which they can run, and the endpoints that are used.

    roots: what is fetched or returned; controls: nodes that have to run; fed: endpoints whose nodes are not asked.
    """
    used: set[Endpoint] = set()
    needed: set[str] = set()
    open_names: list[str] = []

    def need(endpoints: Iterable[Endpoint], names: Iterable[str]) -> None:
        endpoints = list(endpoints)
        used.update(endpoints)
        for name in (*(endpoint.node for endpoint in endpoints if endpoint not in fed), *names):
            if name in nodes and name not in needed and not is_replaced(nodes[name], fed):
                needed.add(name)
                open_names.append(name)

    need(roots, controls)
    while open_names:
        node = nodes[open_names.pop()]
        need(dependencies(node), control_dependencies(node))
    return in_order({name: node for name, node in nodes.items() if name in needed}), used


def is_replaced(node: Node, fed: Collection[Endpoint]) -> bool:
    """Return whether a feed stands for a whole node: of a Placeholder, nothing is left to run."""
    return node.op == "Placeholder" and Endpoint(node.name) in fed


def has_effect(node: Node) -> bool:
    """Return whether a body runs a node even where nothing needs its outputs."""
    if any(has_effect(inner) for _, subgraph in node.subgraphs() for inner in subgraph.nodes.values()):
        return True
    kind = operation(node.op).kind
    return kind == "waiting" or (kind == "state" and node.op not in _WITHOUT_EFFECT)


def is_pure(node: Node) -> bool:
    """Return whether two nodes like this one give the same: no state, no draw, no primitive of control flow."""
    if node.op in ("While", "Cond"):
        return all(is_pure(inner) for _, subgraph in node.subgraphs() for inner in subgraph.nodes.values())
    return operation(node.op).kind == "pure"


def representatives(order: Iterable[Node], fed: Collection[Endpoint] = ()) -> dict[str, str]:
    """Return, for each node that computes what one before it does, the name of that one."""
    fed_names = {endpoint.node for endpoint in fed}
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for node in order:
        if node.name in fed_names or not is_pure(node):
            continue
        key = (
            node.op,
            node.device,
            tuple((same.get(name, name), port) for name, port in dependencies(node)),
            tuple(sorted({same.get(name, name) for name in control_dependencies(node)})),
            _attribute_key(node.attr),
        )
        found = first.setdefault(key, node.name)
        if found != node.name:
            same[node.name] = found
    return same


class Inlined:
    """Which loops and conditions run as code of a region: those whose bodies are pure and take no handles.

    Such a region waits for all that its loop takes. That must not be more than the loop's results wait for: where nodes
    of control flow are made by hand, an input may be dead; and where a queue, a mutex or a function of Python waits for
    a result of the loop, an input of the loop may in turn wait for that.
    """

    def look(self, scope: Scope, order: Sequence[Node]) -> None:
        """Learn what a run needs of a whole graph, in order."""
        self._scope = scope
        self._by_hand = any(map(_is_by_hand, order))
        waited_for = {node.name for node in order if _can_release(node)}
        self._has_waiting = bool(waited_for)
        for node in reversed(order):
            if node.name in waited_for:
                waited_for.update(endpoint.node for endpoint in dependencies(node))
                waited_for.update(control_dependencies(node))
        self._waited_for = waited_for

    def has(self, scope: Scope, node: Node) -> bool:
        """Return whether a While or Cond of a scope is one of them."""
        if self._by_hand or not node.inputs or not is_pure(node):
            return False
        if self._has_waiting and (scope is not self._scope or node.name in self._waited_for):
            return False
        return all(
            spec is not None and spec.kind in ("tensor", "stack")
            for spec in map(scope.find, dependencies(node))
        )


def inner_nodes(node: Node) -> Iterator[Node]:
    """Yield a node, and all those in its bodies."""
    yield node
    for _, subgraph in node.subgraphs():
        for inner in subgraph.nodes.values():
            yield from inner_nodes(inner)


def _is_by_hand(node: Node) -> bool:
    return any(each.op in ("Switch", "Merge", "Enter", "Leave") for each in inner_nodes(node))


def _can_release(node: Node) -> bool:
    return any(
        each.op == "Call" or any(spec.kind in ("queue", "mutex") for spec in each.takes)
        for each in inner_nodes(node)
    )


def _attribute_key(attr: Mapping[str, Any]) -> str:
    return json.dumps(attr, sort_keys=True, default=_as_key)


def _as_key(value: Any) -> Any:
    if isinstance(value, Constant):
        bits = bits_of(value.value)
        digest = hashlib.blake2b(digest_size=16)
        for part in bits if isinstance(bits, tuple) else (bits,):
            digest.update(len(part).to_bytes(8, "little") + part)
        return [value.dtype, list(value.value.shape), digest.hexdigest()]
    if isinstance(value, Subgraph):
        nodes = [
            [node.name, node.op, node.inputs, node.controls, node.attr, node.device]
            for node in value.nodes.values()
        ]
        return [value.args, nodes, value.out]
    return str(value)
