"""Graphs, and how Python programs build them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import DuplicateError, MismatchError, NotFoundError, nearest
from penstock.graph.model.check import carry_specs, check_name, check_names, check_nodes
from penstock.graph.model.dtypes import check_dtype, dtype_of_torch, to_value
from penstock.graph.model.functions import copies_of
from penstock.graph.model.node import Constant, Endpoint, Node, Scope, Spec, Subgraph, parse_endpoint
from penstock.graph.model.text import dumps, loads, nodes_from, subgraph_from_json
from penstock.graph.ops.control import PARALLEL_ITERATIONS

_PACKAGE = str(Path(__file__).parent.parent)


def _operator(op: str, *, swap: bool = False) -> Callable[[Edge, Any], Any]:
    """Return a method that adds a node to the graph of an edge. swap: the edge is the second input."""

    def apply(self: Edge, other: Any) -> Any:
        other = other if isinstance(other, Edge) else self.graph.constant(other, dtype=self.dtype)
        return self.graph.add(op, *((other, self) if swap else (self, other)))

    return apply


class Edge:
    """An output of a node, in the program that builds a graph. Arithmetic with it adds nodes."""

    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, graph: Graph, endpoint: Endpoint, spec: Spec) -> None:
        self.graph = graph
        self.endpoint = endpoint
        self.spec = spec

    @property
    def name(self) -> str:
        """Return "node:port"."""
        return str(self.endpoint)

    @property
    def dtype(self) -> str:
        """Return the dtype of the tensor."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """Return the sizes, None where one is unknown; None if their number is."""
        return self.spec.shape

    def __repr__(self) -> str:
        return f"<{self.name} {self.spec}>"

    __add__, __radd__ = _operator("Add"), _operator("Add", swap=True)
    __sub__, __rsub__ = _operator("Sub"), _operator("Sub", swap=True)
    __mul__, __rmul__ = _operator("Mul"), _operator("Mul", swap=True)
    __truediv__, __rtruediv__ = _operator("Div"), _operator("Div", swap=True)
    __matmul__ = _operator("MatMul")
    __lt__, __gt__ = _operator("Less"), _operator("Greater")

    def __neg__(self) -> Any:
        return self.graph.add("Neg", self)

    def __bool__(self) -> bool:
        raise MismatchError(f"{self.name} has no value before a run: use Graph.cond or Graph.while_loop")


class Graph:
    """Named nodes and the edges between them, checked as they are added.

        graph = Graph()
        x = graph.placeholder("float32", [None, 3], name="x")
        y = graph.add("ReLU", x @ weights + bias, name="y")

    A graph only grows, for all sessions that run it. Building is for one thread at a time, and may continue while steps
    run.
    """

    def __init__(self, nodes: Any = ()) -> None:
        """Make a graph of nodes, as `extend` takes them."""
        self.lock = threading.RLock()
        self._root = Scope({})
        self._scopes = [self._root]
        #: By scope and name: all names with lower numbers are taken.
        self._numbers: list[dict[str, int]] = [{}]
        self._names: list[str] = []
        self._device = ""
        self._controls: list[str] = []
        #: What assigns the initial values of variables.
        self.initial: list[Node] = []
        if nodes:
            self.extend(nodes)

    @classmethod
    def from_json(cls, text: str | bytes) -> Graph:
        """Return the graph that a JSON text holds. Raises: GraphErrors, as `extend` does."""
        return cls(nodes_from(loads(text)))

    def to_json(self) -> str:
        """Return the graph as strict JSON: {"penstock_graph": 1, "nodes": [...]}."""
        return dumps(list(self._root.nodes.values()))

    @property
    def scope(self) -> Scope:
        """Return where names of the whole graph are looked up."""
        return self._root

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes by name, in the order in which they were added."""
        return self._root.nodes

    # -- Adding nodes --------------------------------------------------------------------------------------

    def extend(self, nodes: Any) -> None:
        """Add nodes: a JSON text, a list of nodes as JSON has them, or of `Node`s; in any order.

        Raises: GraphErrors, each naming its node; then nothing is added.
        """
        if isinstance(nodes, str | bytes):
            nodes = nodes_from(loads(nodes))
        elif isinstance(nodes, dict) or not all(isinstance(node, Node) for node in nodes):
            nodes = nodes_from(nodes)
        with self.lock:
            self._add_to(self._root, list(nodes))

    def _add_to(self, scope: Scope, nodes: list[Node]) -> None:
        added: list[str] = []
        try:
            for node in nodes:
                if node.name in scope.nodes or node.name in scope.args:
                    raise DuplicateError("there is a node of this name", node=node.name, where=node.where)
                scope.nodes[node.name] = node
                added.append(node.name)
            check_nodes(scope, nodes)
        except BaseException:
            for name in added:
                del scope.nodes[name]
            raise

    def add(
        self,
        op: str,
        *inputs: Any,
        name: str = "",
        controls: Iterable[Any] = (),
        device: str = "",
        placement: Mapping[str, Any] | None = None,
        **attr: Any,
    ) -> Any:
        """Add a node, and return its output: an Edge, or a tuple of them where it has not exactly one.

        op: name of an operation. inputs: edges, "node:port" texts, or values for Constants. name: "" makes one up;
        a scope's name is put in front. controls: nodes that run before. placement: group, only, cost, bytes.
        Raises: GraphErrors.
        """
        node = self.add_node(
            op, *inputs, name=name, controls=controls, device=device, placement=placement, **attr
        )
        edges = self._edges(node)
        return edges[0] if len(edges) == 1 else edges

    def add_node(
        self,
        op: str,
        *inputs: Any,
        name: str = "",
        controls: Iterable[Any] = (),
        device: str = "",
        placement: Mapping[str, Any] | None = None,
        **attr: Any,
    ) -> Node:
        """Add a node as `add` does, and return the node itself: what `controls` and targets take."""
        with self.lock:
            scope = self._scopes[-1]
            attr = {each.rstrip("_"): value for each, value in attr.items()}
            node = Node(
                self.unique(name or op),
                op,
                [self.endpoint(each) for each in inputs],
                [*self._controls, *(_node_name(each) for each in controls)],
                attr,
                device or self._device,
                creation_site(),
                dict(placement or {}),
            )
            self._add_to(scope, [node])
            return node

    def unique(self, name: str) -> str:
        """Return a name that is free, with the name scopes in front."""
        full = "/".join([*self._names, name])
        check_name(full)
        number = max(numbers.get(full, 0) for numbers in self._numbers)
        found = f"{full}_{number}" if number else full
        while not self._is_free(found):
            number += 1
            found = f"{full}_{number}"
        self._numbers[-1][full] = number
        return found

    def _is_free(self, name: str) -> bool:
        """Return whether a name is free in all that is being built: an inner node may have to name an outer one."""
        return not any(name in scope.nodes or name in scope.args for scope in self._scopes)

    def endpoint(self, given: Any) -> Endpoint:
        """Return what an edge or a text names; a value becomes a Constant."""
        if isinstance(given, Edge):
            return given.endpoint
        if isinstance(given, Endpoint):
            return given
        if isinstance(given, str):
            return parse_endpoint(given)
        return self.constant(given).endpoint

    # -- Sources -------------------------------------------------------------------------------------------

    def placeholder(self, dtype: str, shape: Sequence[int | None] | None = None, *, name: str = "") -> Edge:
        """Add what has to be fed; shape: None for a size that is not known, or for all."""
        edge: Edge = self.add(
            "Placeholder", name=name, dtype=dtype, shape=None if shape is None else list(shape)
        )
        return edge

    def constant(self, value: Any, dtype: str = "", *, name: str = "") -> Edge:
        """Add a value. dtype: "" takes that of the array; of Python's numbers, float32, int32 or bool."""
        constant = as_constant(value, dtype)
        edge: Edge = self.add("Constant", name=name, value=constant)
        return edge

    def variable(
        self,
        dtype: str,
        shape: Sequence[int | None] | None = None,
        *,
        initial: Any = None,
        name: str = "",
        container: str = "",
        shared_name: str = "",
    ) -> Edge:
        """Add a handle to a tensor that lives longer than a run; "Read" gives its value.

        initial: an edge or a value that `initialize_all` assigns.
        """
        edge: Edge = self.add(
            "Variable",
            name=name,
            dtype=dtype,
            shape=None if shape is None else list(shape),
            container=container,
            shared_name=shared_name,
        )
        if initial is not None:
            name = name or "Variable"
            if not isinstance(initial, Edge):
                initial = self.constant(initial, dtype=dtype, name=f"{name}/initial")
            self.initial.append(self.add_node("Assign", edge, initial, name=f"{name}/assign"))
        return edge

    def initialize_all(self, *, name: str = "initialize_all") -> Node:
        """Add an operation that gives all variables made so far their initial values."""
        return self.add_node("NoOp", name=name, controls=self.initial)

    # -- Scopes --------------------------------------------------------------------------------------------

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put "name/" in front of the names of nodes that are added inside."""
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()

    @contextmanager
    def on_device(self, device: str) -> Iterator[None]:
        """Give nodes that are added inside a device, such as "/job:a/task:0" or "/job:a/task:0/device:cpu:0".

        Of two, one in the other, the inner one alone holds: it is not joined to the outer one.
        """
        before, self._device = self._device, device
        try:
            yield
        finally:
            self._device = before

    @contextmanager
    def after(self, *nodes: Any) -> Iterator[None]:
        """Let nodes that are added inside wait for others: control edges."""
        before, self._controls = self._controls, [*self._controls, *map(_node_name, nodes)]
        try:
            yield
        finally:
            self._controls = before

    @contextmanager
    def inside(self, scope: Scope) -> Iterator[None]:
        """Add nodes to a scope of a subgraph that is being built."""
        with self.lock:
            before = (self._controls, self._names)
            self._controls, self._names = [], []
            self._scopes.append(scope)
            self._numbers.append({})
            try:
                yield
            finally:
                self._numbers.pop()
                self._scopes.pop()
                self._controls, self._names = before

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Take back all nodes that are added inside if one is refused."""
        with self.lock:
            scope, count, assigned = self.current, len(self.current.nodes), len(self.initial)
            try:
                yield
            except BaseException:
                for added in list(scope.nodes)[count:]:
                    del scope.nodes[added]
                del self.initial[assigned:]
                self._numbers[-1].clear()  # names that were taken are free again
                raise

    @property
    def current(self) -> Scope:
        """Return the scope that nodes are added to now."""
        return self._scopes[-1]

    # -- Functions and control flow ------------------------------------------------------------------------

    def call(
        self, function: str | bytes | Mapping[str, Any] | Subgraph, *inputs: Any, name: str = "function"
    ) -> tuple[Edge, ...]:
        """Add the nodes of a function, a subgraph, as often as it is called, and return what it returns.

        function: `{"args", "nodes", "out"}`, as JSON has it, or the text of it, from any program. inputs: one for each
        argument, as `add` takes them. name: goes in front of the names of its nodes.
        Raises: GraphErrors; then nothing is added. MismatchError if the number of inputs is another.
        """
        if isinstance(function, str | bytes):
            function = loads(function)
        if not isinstance(function, Subgraph):
            if not isinstance(function, Mapping) or function.keys() != {"args", "nodes", "out"}:
                raise MismatchError(f"a function has args, nodes and out, and this is {function!r:.80}")
            function = subgraph_from_json(dict(function))
        if len(inputs) != len(function.args):
            raise MismatchError(
                f"the function takes {len(function.args)} inputs, and {len(inputs)} are given"
            )
        check_names(function, "the function")
        with self.all_or_nothing():
            given = dict(zip(function.args, [self.endpoint(each) for each in inputs], strict=True))
            nodes, out = copies_of(function, given, self._free_names(function.nodes, name))
            for node in nodes:
                node.controls += self._controls
                node.device = node.device or self._device
            self._add_to(self.current, nodes)
            return tuple(self.edge(str(endpoint)) for endpoint in out)

    def _free_names(self, names: Iterable[str], scope: str) -> dict[str, str]:
        """Return names for copies of nodes, in a scope that no other has."""
        numbers, key = self._numbers[-1], "/".join([*self._names, scope, ""])
        while True:
            number = numbers.get(key, 0)
            found = self._named(names, f"{scope}_{number}" if number else scope)
            if all(map(self._is_free, found.values())):
                return found
            numbers[key] = number + 1

    def _named(self, names: Iterable[str], scope: str) -> dict[str, str]:
        return {name: "/".join([*self._names, scope, name]) for name in names}

    def subgraph(self, function: Callable[..., Any], specs: Sequence[Spec], names: Sequence[str]) -> Subgraph:
        """Return what a Python function of edges adds, called once, as a subgraph."""
        with self.lock:
            args = [self.unique(name) for name in names]
            scope = Scope({}, dict(zip(args, specs, strict=True)), self.current)
            with self.inside(scope):
                edges = [Edge(self, Endpoint(arg), spec) for arg, spec in zip(args, specs, strict=True)]
                results = function(*edges)
                results = results if isinstance(results, list | tuple) else [results]
                out = [self.endpoint(result) for result in results]
            return Subgraph(args, scope.nodes, out)

    def while_loop(
        self,
        cond: Callable[..., Any],
        body: Callable[..., Any],
        carries: Sequence[Any],
        *,
        parallel_iterations: int = PARALLEL_ITERATIONS,
        carry_shapes: Sequence[Sequence[int | None] | str | None] | None = None,
        name: str = "While",
    ) -> tuple[Edge, ...]:
        """Add a loop: `carries` become what `body` returns of them for as long as `cond` says.

        cond, body: functions from as many edges as there are carries to a bool edge, and to the next carries.
        parallel_iterations: how many may be under way at most. carry_shapes: for each carry whose shape
        changes, what of it stays, "any" where nothing does; None for the others.
        Returns: the carries at the end.
        """
        edges = [each if isinstance(each, Edge) else self.constant(each) for each in carries]
        specs = carry_specs(carry_shapes, [edge.spec for edge in edges])
        names = [f"carry{place}" for place in range(len(edges))]
        parts = {"cond": self.subgraph(cond, specs, names), "body": self.subgraph(body, specs, names)}
        attr: dict[str, Any] = {**parts, "parallel_iterations": parallel_iterations}
        if carry_shapes is not None:
            attr["carry_shapes"] = list(carry_shapes)
        return self._edges(self.add_node("While", *edges, name=name, **attr))

    def cond(
        self,
        predicate: Edge,
        then: Callable[..., Any],
        otherwise: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        name: str = "Cond",
    ) -> tuple[Edge, ...]:
        """Add a condition: what one of two functions of `args` returns; only what the taken one added runs."""
        edges = [each if isinstance(each, Edge) else self.constant(each) for each in args]
        specs = [edge.spec.value() for edge in edges]
        names = [f"arg{place}" for place in range(len(edges))]
        attr: dict[str, Any] = {
            "then": self.subgraph(then, specs, names),
            "else": self.subgraph(otherwise, specs, names),
        }
        return self._edges(self.add_node("Cond", predicate, *edges, name=name, **attr))

    def _edges(self, node: Node) -> tuple[Edge, ...]:
        return tuple(Edge(self, *each) for each in zip(node.endpoints(), node.outputs, strict=True))

    # -- Looking up ----------------------------------------------------------------------------------------

    def edge(self, endpoint: str) -> Edge:
        """Return an output by "node:port", as seen from where nodes are added now. Raises: NotFoundError."""
        found = parse_endpoint(endpoint)
        spec = self.current.find(found)
        if spec is None:
            raise NotFoundError(f"{endpoint!r:.80} is not there{nearest(found.node, self.current.names())}")
        return Edge(self, found, spec)


def as_constant(value: Any, dtype: str = "") -> Constant:
    """Return a value as a Constant holds it. Raises: MismatchError."""
    if isinstance(value, Node):
        raise MismatchError(
            f'{value.name!r} is a node, and a value is needed: give its output, graph.edge("{value.name}:0")'
        )
    dtype = check_dtype(dtype or _dtype_of(value))
    return Constant(to_value(value, dtype), dtype)


def _dtype_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return dtype_of_torch(value.dtype)
    array = np.asarray(value)
    if array.dtype.kind in "OS" and not (isinstance(value, np.ndarray) and array.dtype.kind == "S"):
        return "bytes"
    if not isinstance(value, np.ndarray | np.generic):
        return {"f": "float32", "i": "int32", "b": "bool", "c": "complex64"}.get(
            array.dtype.kind, str(array.dtype)
        )
    return str(array.dtype)


def _node_name(given: Any) -> str:
    if isinstance(given, Node):
        return given.name
    if isinstance(given, Edge):
        return given.endpoint.node
    return str(given)


def creation_site() -> str:
    """Return file:line of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
