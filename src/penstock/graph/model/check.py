"""What lets nodes into a graph: names, attributes, cycles, dtypes and shapes. Pure: nothing is added here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from penstock.graph.errors import (
    CycleError,
    DuplicateError,
    GraphError,
    MismatchError,
    NotFoundError,
    nearest,
)
from penstock.graph.model.dtypes import check_shape, common, fits, is_known, shape_text
from penstock.graph.model.node import (
    Endpoint,
    Node,
    Scope,
    Spec,
    Subgraph,
    captures,
    outer_controls,
    parse_endpoint,
)
from penstock.graph.ops.arrays import integer, same_kind
from penstock.graph.ops.control import check_predicate
from penstock.graph.ops.stacks import stack_of
from penstock.graph.ops.table import checked_attributes, operation

#: In `saved` of a While: how many iterations it took, an int64 scalar.
TRIPS = "#trips"
_MOST_NAME = 2000
_Key = TypeVar("_Key")


@contextmanager
def blame(node: Node) -> Iterator[None]:
    """Name a node in the errors raised inside."""
    try:
        yield
    except GraphError as error:
        if error.node:
            raise
        raise type(error)(error.text, node=node.name, where=node.where) from error.__cause__
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        # Attributes may be any JSON; each operation checks what it needs to say something better.
        text = f"the attributes of {node.op} cannot be used: {type(error).__name__}: {error}"
        raise MismatchError(text, node=node.name, where=node.where) from error


def dependencies(node: Node) -> Iterator[Endpoint]:
    """Yield each endpoint that a node needs: inputs, and what its subgraphs capture."""
    yield from node.inputs
    for _, subgraph in node.subgraphs():
        yield from captures(subgraph)


def control_dependencies(node: Node) -> Iterator[str]:
    """Yield the name of each node that a node, or one in its subgraphs, waits for."""
    yield from node.controls
    for _, subgraph in node.subgraphs():
        yield from outer_controls(subgraph)


def is_back_edge(source: Node, target: Node) -> bool:
    """Return whether an edge closes a loop."""
    return source.op == "NextIteration" and target.op == "Merge"


def depth_first(needs: dict[_Key, set[_Key]]) -> list[_Key]:
    """Return keys so that each comes after those it needs; those on a cycle, and those that need one, are left out.

    Of the keys that are ready, the one that became so last comes first; else their order is the mapping's.
    """
    waiting = {key: len(needed) for key, needed in needs.items()}
    users: dict[_Key, list[_Key]] = {key: [] for key in needs}
    for key, needed in needs.items():
        for each in needed:
            users[each].append(key)
    ready = [key for key in reversed(needs) if waiting[key] == 0]
    order = []
    while ready:
        order.append(ready.pop())
        for user in reversed(users[order[-1]]):
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return order


def in_order(nodes: Mapping[str, Node]) -> list[Node]:
    """Return nodes so that each comes after those it needs, loops cut at their back edges.

    Raises: CycleError naming a node of a cycle.
    """
    needs = {}
    for node in nodes.values():
        sources = {endpoint.node for endpoint in dependencies(node)} | set(control_dependencies(node))
        needs[node.name] = {name for name in sources if name in nodes and not is_back_edge(nodes[name], node)}
    order = depth_first(needs)
    if len(order) < len(nodes):
        placed = set(order)
        left = next(node for node in nodes.values() if node.name not in placed)
        raise CycleError(
            "it is on a cycle, or needs one; only NextIteration into Merge closes a loop",
            node=left.name,
            where=left.where,
        )
    return [nodes[name] for name in order]


def check_name(name: str) -> None:
    """Raise MismatchError unless a text can name a node."""
    if (
        not isinstance(name, str)
        or not name
        or len(name) > _MOST_NAME
        or ":" in name
        or not name.isprintable()
    ):
        raise MismatchError(f"{name!r:.80} cannot name a node; give a printable text without a colon")


def check_nodes(scope: Scope, nodes: Sequence[Node]) -> None:
    """Check nodes that are in a scope by now, and fill in their outputs.

    Raises: GraphErrors, each naming its node.
    """
    new = {node.name: node for node in nodes}
    for node in nodes:
        with blame(node):
            check_name(node.name)
            operation(node.op)
            _check_inputs(scope, node)
            checked_attributes(node)
    order = in_order(new)
    relaxed: dict[str, Spec] = {}
    while True:
        for node in order:
            node.outputs = ()
        for node in order:
            with blame(node):
                node.outputs = tuple(infer(scope, node))
                if node.name in relaxed:
                    node.outputs = (relaxed[node.name], *node.outputs[1:])
        # A loop may change a shape: what is known of its Merge is what stays.
        changed = False
        for node in order:
            if node.op == "Merge":
                with blame(node):
                    spec = _joined(scope, node)
                if spec != node.outputs[0]:
                    relaxed[node.name], changed = spec, True
        if not changed:
            return


def _joined(scope: Scope, node: Node) -> Spec:
    specs = [node.outputs[0]]
    for endpoint in node.inputs:
        spec = scope.find(endpoint)
        if spec is None:
            raise NotFoundError(f"input {str(endpoint)!r} is not there: its node has no such port")
        specs.append(spec.value())
    return same_kind(specs, "Merge")


def _check_inputs(scope: Scope, node: Node) -> None:
    least, most = operation(node.op).inputs
    if len(node.inputs) < least or (most is not None and len(node.inputs) > most):
        bound = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
        raise MismatchError(f"{node.op} takes {bound} inputs, and {len(node.inputs)} are given")
    for endpoint in node.inputs:
        if not _is_there(scope, endpoint.node):
            raise NotFoundError(
                f"input {str(endpoint)!r} is not there{nearest(endpoint.node, scope.names())}"
            )
    for name in node.controls:
        if not _is_there(scope, name):
            raise NotFoundError(f"control input {name!r} is not there{nearest(name, scope.names())}")


def _is_there(scope: Scope | None, name: str) -> bool:
    while scope is not None:
        if name in scope.args or name in scope.nodes:
            return True
        scope = scope.parent
    return False


def infer(scope: Scope, node: Node) -> Sequence[Spec]:
    """Return what a node's outputs are. Raises: MismatchError, NotFoundError."""
    specs = []
    for endpoint in node.inputs:
        spec = scope.find(endpoint)
        if spec is None:
            own = scope.nodes.get(endpoint.node)
            if own is not None and not own.outputs and is_back_edge(own, node):
                continue
            raise NotFoundError(f"input {str(endpoint)!r} is not there: its node has no such port")
        specs.append(spec)
    node.takes = tuple(specs)
    if node.op == "While":
        return _infer_while(scope, node, specs)
    if node.op == "Cond":
        return _infer_cond(scope, node, specs)
    return operation(node.op).infer(node, specs)


# -- Loops and conditions ------------------------------------------------------------------------------


def check_names(subgraph: Subgraph, what: str) -> None:
    """Check the names of its arguments and nodes. Raises: as `check_name`; DuplicateError."""
    names = [*subgraph.args, *subgraph.nodes]
    for name in names:
        check_name(name)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DuplicateError(f"{what} has {twice!r} twice")


def check_subgraph(scope: Scope, subgraph: Subgraph, specs: Sequence[Spec], what: str) -> list[Spec]:
    """Check a subgraph with its arguments, and return what it gives."""
    if not isinstance(subgraph, Subgraph):
        raise MismatchError(f"{what} is {subgraph!r:.80}; give {{args, nodes, out}}")
    if len(subgraph.args) != len(specs):
        raise MismatchError(f"{what} takes {len(subgraph.args)} arguments, and {len(specs)} are given")
    check_names(subgraph, what)
    subgraph.specs = dict(zip(subgraph.args, (spec.value() for spec in specs), strict=True))
    inner = Scope(subgraph.nodes, subgraph.specs, scope)
    check_nodes(inner, list(subgraph.nodes.values()))
    found = []
    for endpoint in subgraph.out:
        spec = inner.find(endpoint)
        if spec is None:
            raise NotFoundError(f"{what} returns {str(endpoint)!r}, which is not there")
        found.append(spec.value())
    return found


def _infer_while(scope: Scope, node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    integer(node, "parallel_iterations", 1) if "parallel_iterations" in node.attr else None
    carries = carry_specs(node.attr.get("carry_shapes"), specs)
    tests = check_subgraph(scope, node.attr["cond"], carries, "cond")
    if len(tests) != 1:
        raise MismatchError(f"cond returns {len(tests)} values, and one bool is needed")
    check_predicate(tests[0], "what cond returns")
    results = check_subgraph(scope, node.attr["body"], carries, "body")
    if len(results) != len(carries):
        raise MismatchError(f"body returns {len(results)} values, and there are {len(carries)} carries")
    for place, (carry, result) in enumerate(zip(carries, results, strict=True)):
        same = (carry.dtype, carry.kind) == (result.dtype, result.kind)
        if not same or (carry.kind == "tensor" and not fits(carry.shape, result.shape)):
            raise MismatchError(
                f"carry {place} is {carry}, and body returns {result} for it: a carry keeps dtype and shape "
                "(carry_shapes may leave sizes open)"
            )
    return [*carries, *(saved_spec(scope, node, what) for what in node.attr.get("saved", ()))]


def saved_spec(scope: Scope, node: Node, what: Any) -> Spec:
    """Return what a loop or condition gives of a value that its `saved` names. Raises: NotFoundError."""
    if what == TRIPS:
        return Spec("int64", ())
    which, text = ("body", what) if node.op == "While" else what
    inner = Scope(node.attr[which].nodes, node.attr[which].specs, scope)
    spec = inner.find(parse_endpoint(text)) if isinstance(text, str) else None
    if spec is None:
        raise NotFoundError(f"saved names {text!r:.80}, which is not in {which}")
    return stack_of(spec.value()) if node.op == "While" else spec.value()


def carry_specs(given: Any, specs: Sequence[Spec]) -> list[Spec]:
    """Return what the carries of a While are: as they come in, but for the shapes that `carry_shapes` gives."""
    carries = [spec.value() for spec in specs]
    if given is None:
        return carries
    if not isinstance(given, list | tuple) or len(given) != len(specs):
        raise MismatchError(
            f"carry_shapes is {given!r:.80}; give a shape or null for each of {len(specs)} carries"
        )
    open_carries = []
    for place, (spec, shape) in enumerate(zip(carries, given, strict=True)):
        if shape is not None and shape != "any":
            shape = check_shape(shape)
            if not fits(spec.shape, shape):
                raise MismatchError(f"carry {place} is {spec}, and carry_shapes says {shape_text(shape)}")
            spec = replace(spec, shape=shape)
        elif shape == "any":
            spec = replace(spec, shape=None)
        open_carries.append(spec)
    return open_carries


def _infer_cond(scope: Scope, node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    check_predicate(specs[0], "the first input of Cond")
    branches = {name: check_subgraph(scope, node.attr[name], specs[1:], name) for name in ("then", "else")}
    then, other = branches["then"], branches["else"]
    if len(then) != len(other):
        raise MismatchError(f"then returns {len(then)} values, and else {len(other)}")
    outputs = []
    for place, (one, two) in enumerate(zip(then, other, strict=True)):
        if (one.dtype, one.kind) != (two.dtype, two.kind):
            raise MismatchError(f"result {place} is {one} of then and {two} of else: they need one dtype")
        if not fits(one.shape, two.shape) and is_known(one.shape) and is_known(two.shape):
            raise MismatchError(f"result {place} is {one} of then and {two} of else: they need one shape")
        outputs.append(replace(one, shape=common(one.shape, two.shape)))
    return [*outputs, *(saved_spec(scope, node, what) for what in node.attr.get("saved", ()))]
