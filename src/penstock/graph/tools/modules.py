"""A torch.nn.Module as nodes of a graph, by torch.export: parameters become variables, ATen calls nodes."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import TensorArgument
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from penstock.graph.errors import MismatchError, UnsupportedError
from penstock.graph.model.dtypes import dtype_of_torch, is_known, torch_dtype
from penstock.graph.model.graph import Edge, Graph
from penstock.graph.model.node import Endpoint, Node, Scope, Spec, Subgraph
from penstock.graph.ops.aten import draws, encode

#: What computes the same and gives behind it what the gradient needs, which would else compute it again.
_GIVES_MORE = {
    "aten.max_pool2d.default": "aten.max_pool2d_with_indices.default",
    "aten.layer_norm.default": "aten.native_layer_norm.default",
}

#: Draws, which become those of a graph.
_DRAWS = ("aten.native_dropout.default", "aten.bernoulli.p")
_ATTENTION = "aten.scaled_dot_product_attention.default"


def add_module(
    graph: Graph, module: torch.nn.Module, inputs: Sequence[Edge], *, name: str = "module"
) -> tuple[tuple[Edge, ...], list[Node]]:
    """Add what a module computes of inputs whose shapes are all known, in training or not as the module is.

    Parameters that are tied are one variable, by the first of their names.
    In training, dropout is keyed as all draws are, and a run that computes a result updates the buffers that the module
    does, such as the running means of BatchNorm.
    Returns: the results; and the nodes that assign the module's parameters and buffers to their variables, which are
    to be run once; `Graph.initialize_all` runs them, too.
    Raises: MismatchError for an input that is no edge; UnsupportedError naming what a graph cannot hold, such as a draw
        that is no dropout. Then nothing is added.
    """
    for number, edge in enumerate(inputs):
        if not isinstance(edge, Edge):
            raise MismatchError(
                f"inputs[{number}] is a {type(edge).__name__}; give an edge, such as graph.placeholder(...)"
            )
    examples = tuple(torch.zeros(_known(edge), dtype=torch_dtype(edge.dtype)) for edge in inputs)
    try:
        program = torch.export.export(module, examples).run_decompositions({})
    except Exception as error:
        raise UnsupportedError(f"torch.export refuses the module: {error!s:.300}") from error
    importer = _Importer(graph)
    before = len(graph.initial)
    values: dict[str, Endpoint] = {}
    given = iter(inputs)
    variables: dict[str, Edge] = {}
    held: dict[Any, tuple[Edge, Endpoint]] = {}
    state = {**program.state_dict, **program.constants}
    with graph.all_or_nothing(), graph.name_scope(name):
        for spec in program.graph_signature.input_specs:
            target = spec.target
            if target is None:
                values[spec.arg.name] = next(given).endpoint
                continue
            tensor = state[target].detach()
            dtype = dtype_of_torch(tensor.dtype)
            # Weights that are tied, one tensor by several names, are one variable.
            key = (tensor.data_ptr(), dtype, tensor.shape, tensor.stride()) if tensor.numel() else target
            if key not in held:
                variable = graph.variable(dtype, list(tensor.shape), initial=tensor, name=target)
                held[key] = variable, graph.add("Read", variable, name=f"{target}/read").endpoint
            variables[target], values[spec.arg.name] = held[key]
        found = importer.translate(program.graph_module, values)
        results, updates = [], []
        tensors = [
            spec for spec in program.graph_signature.output_specs if isinstance(spec.arg, TensorArgument)
        ]
        for result, spec in zip(found, tensors, strict=True):
            if spec.kind.name == "USER_OUTPUT":
                results.append(graph.edge(str(result)))
            elif spec.kind.name == "BUFFER_MUTATION":
                name = f"{spec.target}/update"
                updates.append(graph.add_node("Assign", variables[spec.target], result, name=name))
            else:
                raise UnsupportedError(f"the module changes {spec.target}, which is no buffer of it")
        if updates:
            results = [graph.add("Identity", each, controls=updates, name="result") for each in results]
    return tuple(results), graph.initial[before:]


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
                given = node.args[0]  # of a loop's condition, one alone
                parts = given if isinstance(given, list | tuple) else [given]
                return [self._value(known[each.name]) for each in parts if isinstance(each, FxNode)]
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
        op = f"aten.{target._opname}.{target._overloadname}"
        if op == "aten.instance_norm.default" and node.args[5] and node.args[3] is not None:
            raise UnsupportedError(
                "an InstanceNorm in training with track_running_stats=True changes its running means where no graph"
                " sees it: take track_running_stats=False, or module.eval()"
            )
        if op in _DRAWS:
            return self._draw(op, [self._known(each, known) for each in node.args])
        if op == _ATTENTION and draws(target, node.args, node.kwargs):
            return self._attention([self._known(each, known) for each in node.args], node.kwargs)
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
        if op == "aten.layer_norm.default":
            args = [*args, *(None, None, None, None, 1e-5)[len(args) :]][:5]  # less whether cuDNN may
        ports = self._graph.add_node(_GIVES_MORE.get(op, op), *inputs, args=args, kwargs=kwargs).endpoints()
        return ports[0] if len(ports) == 1 or op in _GIVES_MORE else ports

    def _aten(self, op: str, *args: Any, **kwargs: Any) -> Endpoint:
        """Add an operation of ATen, of endpoints and plain values."""
        inputs = [each for each in args if isinstance(each, Endpoint)]
        numbers = iter(range(len(inputs)))
        given = [{"input": next(numbers)} if isinstance(each, Endpoint) else encode(each) for each in args]
        options = {key: encode(each) for key, each in kwargs.items()}
        return self._graph.add_node(f"aten.{op}", *inputs, args=given, kwargs=options).endpoints()[0]

    def _draw(self, op: str, args: Sequence[Any]) -> Any:
        value, share = self._value(args[0]), args[1]
        (spec,) = self._specs([value])
        if op == "aten.bernoulli.p":
            return self._kept(spec, share)[0]
        kept, is_kept = self._kept(spec, 1 - share)
        return [self._dropped(value, kept, share), is_kept]

    def _kept(self, spec: Spec, share: float) -> tuple[Endpoint, Endpoint]:
        """Return a draw of which elements are kept: ones and zeros of the dtype, and booleans."""
        draw = self._graph.add("RandomUniform", dtype=spec.dtype, shape=list(spec.shape or ()), name="draw")
        is_kept = self._aten("lt.Scalar", draw.endpoint, share)
        return self._aten("_to_copy.default", is_kept, dtype=torch_dtype(spec.dtype)), is_kept

    def _dropped(self, value: Endpoint, kept: Endpoint, share: float) -> Endpoint:
        scale = 0.0 if share == 1 else 1 / (1 - share)
        return self._aten("mul.Tensor", value, self._aten("mul.Scalar", kept, scale))

    def _attention(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Endpoint:
        """Add attention whose weights are dropped in part."""
        query, key, value, *more = args
        given: dict[str, Any] = dict(zip(("attn_mask", "dropout_p", "is_causal"), more, strict=False))
        given |= kwargs
        mask, share = given.get("attn_mask"), given["dropout_p"]
        if given.get("enable_gqa"):
            raise UnsupportedError("attention with dropout is not imported with enable_gqa")
        spec, keys = self._specs([query, key])
        length, width, count = (size or 0 for size in (*(spec.shape or ())[-2:], (keys.shape or ())[-2]))
        if given.get("is_causal"):
            mask = self._graph.constant(torch.ones(length, count, dtype=torch.bool).tril()).endpoint
        scores = self._aten("matmul.default", query, self._aten("transpose.int", key, -2, -1))
        scores = self._aten("mul.Scalar", scores, given.get("scale") or width**-0.5)
        if mask is not None and self._specs([mask])[0].dtype == "bool":
            scores = self._aten(
                "masked_fill.Scalar", scores, self._aten("logical_not.default", mask), -math.inf
            )
        elif mask is not None:
            scores = self._aten("add.Tensor", scores, mask)
        # Of a query that may see no key, zeros, as PyTorch's own attention gives.
        weights = self._aten("_safe_softmax.default", scores, -1)
        kept, _ = self._kept(self._specs([weights])[0], 1 - share)
        return self._aten("matmul.default", self._dropped(weights, kept, share), value)

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
