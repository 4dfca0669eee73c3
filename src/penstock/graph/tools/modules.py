"""A torch.nn.Module as nodes of a graph, by torch.export: parameters become variables, ATen calls nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from penstock.graph.errors import MismatchError, UnsupportedError
from penstock.graph.model.dtypes import dtype_of_torch, is_known, torch_dtype
from penstock.graph.model.graph import Edge, Graph
from penstock.graph.model.node import Endpoint, Node, Scope, Spec, Subgraph
from penstock.graph.ops.aten import encode

#: What computes the same and gives behind it what the gradient needs, which would else compute it again.
_GIVES_MORE = {
    "aten.max_pool2d.default": "aten.max_pool2d_with_indices.default",
    "aten.layer_norm.default": "aten.native_layer_norm.default",
}


def add_module(
    graph: Graph, module: torch.nn.Module, inputs: Sequence[Edge], *, name: str = "module"
) -> tuple[tuple[Edge, ...], list[Node]]:
    """Add what a module computes of inputs whose shapes are all known.

    Returns: the results; and the nodes that assign the module's parameters and buffers to their variables, which are
    to be run once; `Graph.initialize_all` runs them, too.
    Raises: MismatchError for an input that is no edge; UnsupportedError naming what a graph cannot hold, such as an
        operation that draws.
    """
    for number, edge in enumerate(inputs):
        if not isinstance(edge, Edge):
            raise MismatchError(
                f"inputs[{number}] is a {type(edge).__name__}; give an edge, such as graph.placeholder(...)"
            )
    examples = tuple(torch.zeros(_known(edge), dtype=torch_dtype(edge.dtype)) for edge in inputs)
    program = torch.export.export(module, examples).run_decompositions({})
    importer = _Importer(graph)
    before = len(graph.initial)
    values: dict[str, Endpoint] = {}
    given = iter(inputs)
    state = {**program.state_dict, **program.constants}
    with graph.lock, graph.name_scope(name):
        for spec in program.graph_signature.input_specs:
            target = spec.target
            if target is None:
                values[spec.arg.name] = next(given).endpoint
                continue
            tensor = state[target].detach()
            dtype = dtype_of_torch(tensor.dtype)
            variable = graph.variable(dtype, list(tensor.shape), initial=tensor, name=target)
            values[spec.arg.name] = graph.add("Read", variable, name=f"{target}/read").endpoint
        results = importer.translate(program.graph_module, values)
    kept = [
        result
        for result, spec in zip(results, program.graph_signature.output_specs, strict=True)
        if spec.kind.name == "USER_OUTPUT"
    ]
    return tuple(graph.edge(str(each)) for each in kept), graph.initial[before:]


def _known(edge: Edge) -> tuple[int, ...]:
    if not is_known(edge.shape):
        raise UnsupportedError(f"{edge!r} has sizes that are not known; torch.export needs them")
    return edge.shape


class _Importer:
    """Translates fx graphs into the scope that is being built."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def translate(self, module: GraphModule, values: dict[str, Endpoint]) -> list[Endpoint]:
        """Add the nodes of an fx graph, and return what it gives. values: of its placeholders by name."""
        known: dict[str, Any] = dict(values)
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._value(known[each.name]) for each in node.args[0] if isinstance(each, FxNode)]
            if node.op == "get_attr":
                found = getattr(module, node.target)
                known[node.name] = (
                    self._graph.constant(found).endpoint if isinstance(found, torch.Tensor) else found
                )
            elif node.op == "call_function":
                known[node.name] = self._call(node, known)
        raise AssertionError("an fx graph has an output")

    def _value(self, given: Any) -> Endpoint:
        found: Endpoint = given[0] if isinstance(given, list) else given
        return found

    def _call(self, node: FxNode, known: dict[str, Any]) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            source, port = node.args
            assert isinstance(source, FxNode), "an item of a node"
            return known[source.name][port]
        name = getattr(target, "__name__", str(target))
        if name == "cond":
            return self._cond(node, known)
        if name == "while_loop":
            return self._while(node, known)
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            raise UnsupportedError(f"the module calls {target}, which is no ATen operation")
        inputs: list[Endpoint] = []

        def template(given: Any) -> Any:
            if isinstance(given, FxNode):
                inputs.append(self._value(known[given.name]))
                return {"input": len(inputs) - 1}
            if isinstance(given, list | tuple):
                return [template(each) for each in given]
            return encode(given)

        args = [template(each) for each in node.args]
        kwargs = {key: template(each) for key, each in node.kwargs.items()}
        op = f"aten.{target._opname}.{target._overloadname}"
        if op == "aten.layer_norm.default":
            args = [*args, *(None, None, None, None, 1e-5)[len(args) :]][:5]  # less whether cuDNN may
        ports = self._graph.add_node(_GIVES_MORE.get(op, op), *inputs, args=args, kwargs=kwargs).endpoints()
        return ports[0] if len(ports) == 1 or op in _GIVES_MORE else ports

    def _subgraph(self, module: GraphModule, specs: Sequence[Spec]) -> Subgraph:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        built = Scope({}, {}, self._graph.current)
        with self._graph.inside(built):
            args = [self._graph.unique(name) for name in names]
            built.args.update(zip(args, specs, strict=True))
            out = self.translate(module, dict(zip(names, map(Endpoint, args), strict=True)))
        return Subgraph(args, built.nodes, out)

    def _specs(self, endpoints: Sequence[Endpoint]) -> list[Spec]:
        found = [self._graph.current.find(endpoint) for endpoint in endpoints]
        return [spec.value() for spec in found if spec is not None]

    def _cond(self, node: FxNode, known: dict[str, Any]) -> list[Endpoint]:
        predicate, then, other, operands = (self._known(each, known) for each in node.args)
        specs = self._specs(operands)
        branches = {"then": self._subgraph(then, specs), "else": self._subgraph(other, specs)}
        added = self._graph.add_node("Cond", predicate, *operands, **branches)  # type: ignore[arg-type]
        return added.endpoints()

    def _while(self, node: FxNode, known: dict[str, Any]) -> list[Endpoint]:
        cond, body, carries, extra = (self._known(each, known) for each in node.args)
        operands = [*carries, *extra]
        specs = self._specs(operands)
        inside = self._subgraph(body, specs)
        # What torch passes along unchanged is carried, too.
        inside.out += [Endpoint(arg) for arg in inside.args[len(carries) :]]
        added = self._graph.add_node("While", *operands, cond=self._subgraph(cond, specs), body=inside)
        return added.endpoints()[: len(carries)]

    def _known(self, given: Any, known: dict[str, Any]) -> Any:
        if isinstance(given, FxNode):
            return known[given.name]
        return [self._known(each, known) for each in given] if isinstance(given, list | tuple) else given
