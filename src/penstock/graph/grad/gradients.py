"""The gradient of results with respect to anything they depend on: the chain rule, node by node, backward.

Most nodes get a Vjp node, which torch derives from the kernel. Loops and conditions have rules of their own: the
gradient of a While is a While that runs the iterations backward over the values that the forward one saved (it is made
to save what is needed); that of a Cond is a Cond of the same predicate. Both are made of operations that have
gradients, so that any order follows. Draws and state are read from what the forward pass gave, never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.graph.errors import MismatchError, NotFoundError, UnsupportedError, nearest
from penstock.graph.grad.links import branch_roots, connected, is_smooth, links, loop_links
from penstock.graph.model.check import TRIPS, blame, infer, saved_spec
from penstock.graph.model.dtypes import is_known
from penstock.graph.model.graph import Edge, Graph, as_constant
from penstock.graph.model.node import Endpoint, Node, Scope, Spec, Subgraph, captures, parse_endpoint
from penstock.graph.ops.control import PARALLEL_ITERATIONS
from penstock.graph.ops.stacks import element_of, spec_to_json
from penstock.graph.ops.table import operation
from penstock.graph.ops.vjp import vjp_node
from penstock.graph.run.reach import is_pure, needed_nodes

#: Operations whose gradient is a function of what they give, and what computes it.
_BY_RESULT = {
    "ReLU": "ReLUBackward",
    "aten.relu.default": "ReLUBackward",
    "Sigmoid": "SigmoidBackward",
    "aten.sigmoid.default": "SigmoidBackward",
    "SoftMax": "SoftMaxBackward",
    "Exp": "ExpBackward",
    "aten.exp.default": "ExpBackward",
}
#: The same of those that also have an axis.
_SOFTMAX = {
    "aten.softmax.int": "aten._softmax_backward_data.default",
    "aten._safe_softmax.default": "aten._softmax_backward_data.default",
    "aten.log_softmax.int": "aten._log_softmax_backward_data.default",
}
#: Of these in training, the gradient takes the mean and the deviation that they give.
_NORMS = {
    "aten.native_layer_norm.default": "LayerNormBackward",
    "aten._native_batch_norm_legit_functional.default": "BatchNormBackward",
    "aten._native_batch_norm_legit.no_stats": "BatchNormBackward",
}
_ATTENTION = "aten.scaled_dot_product_attention.default"
_MEANS_ARE_SAVED = ("layer_norm", "batch_norm", "instance_norm")
#: From an endpoint of the forward pass to one with its value where the gradient is built.
Forward = Callable[[Endpoint], Endpoint]


def gradients(
    graph: Graph,
    ys: Any,
    xs: Sequence[Any],
    grad_ys: Sequence[Any] | None = None,
    *,
    keep: Sequence[Any] | None = None,
    name: str = "gradients",
) -> list[Edge | None]:
    """Add the gradient of the sum of `ys` with respect to each of `xs`.

    ys, xs: edges or "node:port" texts; a variable stands for what is read of it. grad_ys: cotangents, one for each of
    ys; None: ones. keep: edges whose values stay for the backward pass; the others are computed again from these, and
    from state, draws, loops and conditions, once it comes to them: less memory for at most one more forward pass. None
    keeps all that it needs.
    Returns: an edge for each of xs, None where no y depends on it.
    Raises: NotFoundError; MismatchError if a y is no float; UnsupportedError through Switch and Merge made by hand.
    """
    ys = [ys] if isinstance(ys, str | Edge | Endpoint) else list(ys)
    targets, wanted = [_found(graph, each) for each in ys], [_found(graph, each) for each in xs]
    with graph.lock, graph.name_scope(name):
        scope = graph.current
        seeds: dict[Endpoint, list[Endpoint]] = {}
        for place, target in enumerate(targets):
            spec = scope.find(target)
            if not is_smooth(spec):
                raise MismatchError(
                    f"{str(target)!r} is {spec}; a gradient is that of floats", node=target.node
                )
            given = None if grad_ys is None else grad_ys[place]
            seed = graph.add("OnesLike", target) if given is None else given
            seeds.setdefault(target, []).append(graph.endpoint(seed))
        builder, nodes = _Builder(graph, scope), dict(scope.nodes)
        forward: Forward = lambda endpoint: endpoint  # noqa: E731
        if keep is not None:
            forward = _Again(builder, scope, nodes, {*wanted, *(_found(graph, each) for each in keep)}).value
        found = builder.back(scope, nodes, seeds, set(wanted), forward)
    return [None if each not in found else graph.edge(str(found[each])) for each in wanted]


def _found(graph: Graph, given: Any) -> Endpoint:
    endpoint = graph.endpoint(given)
    if graph.current.find(endpoint) is None:
        raise NotFoundError(f"{str(endpoint)!r} is not there{nearest(endpoint.node, graph.current.names())}")
    return endpoint


class _Builder:
    """Adds the nodes of a gradient to the scope that the graph is building."""

    def __init__(self, graph: Graph, scope: Scope) -> None:
        self._graph, self._outermost = graph, scope
        #: Whose gradient is being built, as far as the outermost scope goes.
        self.cotangent: Endpoint | None = None

    def add(self, op: str, *inputs: Endpoint, **attr: Any) -> list[Endpoint]:
        return self._graph.add_node(op, *inputs, **attr).endpoints()

    def one(self, op: str, *inputs: Endpoint, **attr: Any) -> Endpoint:
        (endpoint,) = self.add(op, *inputs, **attr)
        return endpoint

    def again(self, node: Node, inputs: Sequence[Endpoint], after: Endpoint) -> str:
        """Add a copy of a node, of other inputs, that waits for a value; return its name."""
        controls = [*node.controls, after.node]
        with self._graph.inside(self._outermost):  # also if the gradient of a branch asks
            return self._graph.add_node(
                node.op, *inputs, name="again", controls=controls, device=node.device, **node.attr
            ).name

    def zeros(self, spec: Spec, value: Callable[[], Endpoint]) -> Endpoint:
        """Return zeros for a gradient; value: gives the forward value, asked where the shape is not known."""
        if spec.kind == "stack":
            return self.one("StackEmpty", of=spec_to_json(element_of(spec)))
        if is_known(spec.shape):
            return self.one("Zeros", dtype=spec.dtype, shape=list(spec.shape))
        return self.one("ZerosLike", value())

    def sum(self, parts: Sequence[Endpoint]) -> Endpoint:
        total = parts[0]
        for part in parts[1:]:
            total = self.one("GradientSum", total, part)
        return total

    # -- The chain rule --------------------------------------------------------------------------------------

    def back(
        self,
        scope: Scope,
        nodes: Mapping[str, Node],
        seeds: Mapping[Endpoint, Sequence[Endpoint]],
        wanted: set[Endpoint],
        forward: Forward,
    ) -> dict[Endpoint, Endpoint]:
        """Return the gradient of each wanted endpoint of a scope that the seeds' depend on.

        nodes: of the forward pass. seeds: cotangents by endpoint.
        """
        order, _ = needed_nodes(nodes, seeds, ())
        alive = connected(scope, order, wanted)
        parts: dict[Endpoint, list[Endpoint]] = {
            endpoint: list(given) for endpoint, given in seeds.items() if endpoint in alive
        }
        done: dict[Endpoint, Endpoint] = {}
        for node in reversed(order):
            cotangents: dict[int, Endpoint] = {}
            for endpoint in node.endpoints():
                if endpoint in parts:
                    cotangents[endpoint.port] = done[endpoint] = self.sum(parts.pop(endpoint))
            followed = {
                endpoint for port in cotangents for endpoint in links(scope, node, port) if endpoint in alive
            }
            if not followed:
                continue
            if scope is self._outermost:
                self.cotangent = next(iter(cotangents.values()))
            with blame(node):
                found = self._rule(scope, node, cotangents, followed, forward)
            for endpoint, gradient in found:
                parts.setdefault(endpoint, []).append(gradient)
        # Arguments and captures: what no node of this scope makes.
        done.update({endpoint: self.sum(given) for endpoint, given in parts.items()})
        return {endpoint: gradient for endpoint, gradient in done.items() if endpoint in wanted}

    def _rule(
        self,
        scope: Scope,
        node: Node,
        cotangents: dict[int, Endpoint],
        followed: set[Endpoint],
        forward: Forward,
    ) -> Iterable[tuple[Endpoint, Endpoint]]:
        op, inputs = node.op, node.inputs
        if op == "While":
            return self._while(scope, node, cotangents, forward)
        if op == "Cond":
            return self._cond(scope, node, cotangents, followed, forward)
        if op in ("Switch", "Merge", "Enter", "Leave", "NextIteration"):
            raise UnsupportedError(f"there is no gradient through {op} made by hand: use Cond and While")
        if op == "Call":
            raise UnsupportedError("there is no gradient through a function of Python: make its parts nodes")
        if op in ("Identity", "Read", "GradientSum"):
            return [(endpoint, cotangents[0]) for endpoint in inputs]
        if op in ("Assign", "AssignAdd"):
            return [(inputs[1], cotangents[0])]
        if op == "StackPush":
            rest, top = self.add("StackPop", cotangents[0], forward(inputs[1]))
            return [(inputs[0], rest), (inputs[1], top)]
        if op == "StackPop":
            rest, top = (
                cotangents.get(port)
                or self.zeros(node.outputs[port], lambda port=port: forward(Endpoint(node.name, port)))  # type: ignore[misc]
                for port in (0, 1)
            )
            return [(inputs[0], self.one("StackPush", rest, top))]
        if op == "Shuffle":
            return [(inputs[0], self.one("Unshuffle", cotangents[0], forward(Endpoint(node.name, 1))))]
        if op in _BY_RESULT:
            return [(inputs[0], self.one(_BY_RESULT[op], forward(Endpoint(node.name)), cotangents[0]))]
        if op in _SOFTMAX and _is_softmax(node):
            return [(inputs[0], self._softmax(node, cotangents[0], forward))]
        if op in _NORMS and _is_norm(node):
            return self._norm(node, cotangents, followed, forward)
        if op == "aten.max_pool2d_with_indices.default" and not node.attr.get("kwargs"):
            return [(inputs[0], self._aten_pool(node, cotangents[0], forward))]
        if op == "MaxPool" and 0 in cotangents:
            return [(inputs[0], self._pool(scope, node, cotangents[0], forward))]
        shapes = {spec.shape for spec in (*node.takes, node.outputs[0])}
        if op in ("Add", "Sub") and len(shapes) == 1 and is_known(node.outputs[0].shape):
            other = cotangents[0] if op == "Add" else self.one("Neg", cotangents[0])
            return [(inputs[0], cotangents[0]), (inputs[1], other)]
        return self._vjp(node, cotangents, followed, forward)

    def _pool(self, scope: Scope, node: Node, cotangent: Endpoint, forward: Forward) -> Endpoint:
        _give_places(scope, node)
        attr = {name: value for name, value in node.attr.items() if name != "indices"}
        places = forward(Endpoint(node.name, 1))
        return self.one("MaxPoolBackward", forward(node.inputs[0]), places, cotangent, **attr)

    def _softmax(self, node: Node, cotangent: Endpoint, forward: Forward) -> Endpoint:
        (spec,), axis = node.outputs, node.attr["args"][1]
        return self.one(
            _SOFTMAX[node.op],
            cotangent,
            forward(Endpoint(node.name)),
            args=[{"input": 0}, {"input": 1}, axis, {"dtype": spec.dtype}],
            kwargs={},
        )

    def _norm(
        self, node: Node, cotangents: dict[int, Endpoint], followed: set[Endpoint], forward: Forward
    ) -> Iterable[tuple[Endpoint, Endpoint]]:
        if set(cotangents) != {0}:
            raise UnsupportedError(
                "there is no gradient of the mean and the deviation: compute them by nodes"
            )
        args: Sequence[Any] = node.attr["args"]
        if _NORMS[node.op] == "LayerNormBackward":
            (value, _, weight, bias, _), more = args, {"axes": len(args[1])}
        else:
            (value, weight, bias, *_), more = args, {"eps": args[-1]}
        places: list[int | None] = [None if each is None else each["input"] for each in (value, weight, bias)]
        wrt = [place is not None and node.inputs[place] in followed for place in places]
        given = [node.inputs[place] for place in places if place is not None]
        found = self.add(
            _NORMS[node.op],
            cotangents[0],
            forward(given[0]),
            *(forward(Endpoint(node.name, port)) for port in (1, 2)),
            *(forward(each) for each in given[1:]),
            **more,
            has=[each is not None for each in (weight, bias)],
            wrt=wrt,
        )
        sought = [
            node.inputs[place] for place in places if place is not None and node.inputs[place] in followed
        ]
        return list(zip(sought, found, strict=True))

    def _aten_pool(self, node: Node, cotangent: Endpoint, forward: Forward) -> Endpoint:
        defaults: list[Any] = [None, None, [], 0, 1, False]
        given = list(node.attr.get("args") or [])
        window = [*given, *defaults[len(given) :]][1:]
        return self.one(
            "aten.max_pool2d_with_indices_backward.default",
            cotangent,
            forward(node.inputs[0]),
            forward(Endpoint(node.name, 1)),
            args=[{"input": 0}, {"input": 1}, *window, {"input": 2}],
            kwargs={},
        )

    def _vjp(
        self, node: Node, cotangents: dict[int, Endpoint], followed: set[Endpoint], forward: Forward
    ) -> Iterable[tuple[Endpoint, Endpoint]]:
        assert operation(node.op).differentiable, f"{node.op} links nothing"
        if any(spec.kind == "variable" for spec in node.takes):
            raise UnsupportedError(
                "it takes a Variable itself: Read it, so that the gradient uses what was read"
            )
        _refuse_third_order(node)
        node = _differentiable_twice(node)
        places = [place for place, endpoint in enumerate(node.inputs) if endpoint in followed]
        ports = sorted(cotangents)
        attr = vjp_node(node, ports, places).attr
        given = [forward(endpoint) for endpoint in node.inputs]
        found = self.add("Vjp", *given, *(cotangents[port] for port in ports), **attr)
        return [(node.inputs[place], gradient) for place, gradient in zip(places, found, strict=True)]

    # -- Conditions ------------------------------------------------------------------------------------------

    def _cond(
        self,
        scope: Scope,
        node: Node,
        cotangents: dict[int, Endpoint],
        followed: set[Endpoint],
        forward: Forward,
    ) -> Iterable[tuple[Endpoint, Endpoint]]:
        order = sorted(followed)
        branches = {
            which: self._branch(scope, node, which, cotangents, order, forward) for which in ("then", "else")
        }
        found = self.add("Cond", forward(node.inputs[0]), then=branches["then"], else_=branches["else"])
        return list(zip(order, found, strict=True))

    def _branch(
        self,
        scope: Scope,
        node: Node,
        which: str,
        cotangents: dict[int, Endpoint],
        order: Sequence[Endpoint],
        forward: Forward,
    ) -> Subgraph:
        subgraph = node.attr[which]
        given = dict(zip(map(Endpoint, subgraph.args), node.inputs[1:], strict=True))
        built = Scope({}, {}, self._graph.current)

        def inner_forward(endpoint: Endpoint) -> Endpoint:
            if endpoint in given:
                return forward(given[endpoint])
            if endpoint.node not in subgraph.nodes:
                return forward(endpoint)
            copy = self.copied(subgraph.nodes[endpoint.node])
            return copy or forward(Endpoint(node.name, _save(scope, node, [which, str(endpoint)])))

        seeds: dict[Endpoint, list[Endpoint]] = {}
        for port, cotangent in cotangents.items():
            for root in branch_roots(node, which, port):
                seeds.setdefault(root, []).append(cotangent)
        inside = Scope(subgraph.nodes, subgraph.specs, scope)
        with self._graph.inside(built):
            inner = [each for each in (*given, *order) if each.node not in subgraph.nodes]
            found = self.back(inside, subgraph.nodes, seeds, set(inner), inner_forward)
            out = []
            for endpoint in order:
                parts = [found[arg] for arg, outer in given.items() if outer == endpoint and arg in found]
                parts += [found[endpoint]] if endpoint in found and endpoint not in given else []
                spec = scope.find(endpoint)
                assert spec is not None, "it is an input"
                value = lambda endpoint=endpoint: forward(endpoint)  # noqa: E731
                out.append(self.sum(parts) if parts else self.zeros(spec, value))
        return Subgraph([], built.nodes, out)

    def copied(self, node: Node) -> Endpoint | None:
        """Return a copy of a node that gives the same anywhere, or None if it is no such node."""
        return self.one(node.op, **node.attr) if node.op in ("Constant", "Zeros") else None

    # -- Loops -----------------------------------------------------------------------------------------------

    def _while(
        self, scope: Scope, node: Node, cotangents: dict[int, Endpoint], forward: Forward
    ) -> Iterable[tuple[Endpoint, Endpoint]]:
        return _Loop(self, self._graph, scope, node, cotangents, forward).build()


class _Again:
    """Values of the forward pass, computed again from those that are kept."""

    def __init__(
        self, builder: _Builder, scope: Scope, nodes: Mapping[str, Node], kept: set[Endpoint]
    ) -> None:
        self._build, self._scope, self._nodes, self._kept = builder, scope, nodes, kept
        self._copies: dict[str, str] = {}

    def value(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint with a value of the forward pass: what is kept, or a copy that waits for a cotangent."""
        todo = [endpoint]
        while todo:
            node = self._nodes.get(todo[-1].node)
            if todo[-1] in self._kept or node is None or not node.inputs or not _is_simple(node):
                todo.pop()
                continue
            missing = [each for each in node.inputs if not self._is_there(each)]
            if missing:
                todo += missing
                continue
            todo.pop()
            if node.name not in self._copies:
                self._copies[node.name] = self._copy(node)
        return self._there(endpoint)

    def _is_there(self, endpoint: Endpoint) -> bool:
        node = self._nodes.get(endpoint.node)
        is_made = node is None or not node.inputs or not _is_simple(node)
        return is_made or endpoint in self._kept or endpoint.node in self._copies

    def _there(self, endpoint: Endpoint) -> Endpoint:
        if endpoint in self._kept or endpoint.node not in self._copies:
            return endpoint
        return Endpoint(self._copies[endpoint.node], endpoint.port)

    def _copy(self, node: Node) -> str:
        assert self._build.cotangent is not None, "a rule asks for it"
        if node.op == "MaxPool":
            _give_places(self._scope, node)
        # The control keeps it from being merged with the first, and from running before it is needed.
        return self._build.again(node, [self._there(each) for each in node.inputs], self._build.cotangent)


def _refuse_third_order(node: Node) -> None:
    """Refuse the gradient of a second one where PyTorch's is wrong: it takes saved means for constants."""
    depth, op, attr = 0, node.op, node.attr
    while op == "Vjp":
        depth, op, attr = depth + 1, attr["of"]["op"], attr["of"]["attr"]
    name: str = op
    is_backward = name in _NORMS.values()
    # Evaluated, a batch norm computes no means.
    is_such = is_backward or ("no_training" not in name and any(each in name for each in _MEANS_ARE_SAVED))
    if is_such and depth + is_backward >= 2:
        raise UnsupportedError(f"the third derivative of {name} is wrong in PyTorch: compute it by nodes")


def _differentiable_twice(node: Node) -> Node:
    """Return the node, but the gradient of attention, which PyTorch has no gradient of, as that of its formula."""
    of = node.attr["of"] if node.op == "Vjp" else {}
    if of.get("op") != _ATTENTION:
        return node
    formula = {**of, "op": "aten._scaled_dot_product_attention_math.default", "outputs": 2}
    return replace(node, attr={**node.attr, "of": formula})


def _is_softmax(node: Node) -> bool:
    """Return whether it is called as add_module calls it, and changes no dtype."""
    args: Sequence[Any] = node.attr.get("args") or ()
    is_plain = len(args) == 2 or (len(args) == 3 and args[2] is None)
    return is_plain and not node.attr.get("kwargs") and isinstance(args[1], int)


def _is_norm(node: Node) -> bool:
    """Return whether it is called as add_module calls it, and computes the means."""
    args: Sequence[Any] = node.attr.get("args") or ()
    if node.attr.get("kwargs"):
        return False
    return len(args) == 5 or (len(args) in (6, 8) and args[-3] is True)


def _is_simple(node: Node) -> bool:
    return node.op not in ("While", "Cond", "Switch", "Merge") and is_pure(node)


def _give_places(scope: Scope, node: Node) -> None:
    """Let a MaxPool give the places of its maxima, too."""
    if not node.attr.get("indices"):
        node.attr["indices"] = True
        node.outputs = tuple(infer(scope, node))


class _Loop:
    """The gradient of a While: a While over its iterations, from the last to the first.

    Carries: how many iterations are left; the cotangent of each carry that matters; the sum so far for each capture;
    the stacks of what the forward loop saved.
    """

    def __init__(
        self,
        builder: _Builder,
        graph: Graph,
        scope: Scope,
        node: Node,
        cotangents: dict[int, Endpoint],
        forward: Forward,
    ) -> None:
        self._build, self._graph, self._scope = builder, graph, scope
        self._node, self._forward = node, forward
        self._body: Subgraph = node.attr["body"]
        self._cotangents = cotangents
        active: set[int] = set()
        outside: set[Endpoint] = set()
        for port in cotangents:
            carries, endpoints = loop_links(scope, node, port)
            active |= carries
            outside |= endpoints
        self._active = sorted(place for place in active if is_smooth(node.outputs[place]))
        inputs = {node.inputs[place] for place in active if place < len(node.inputs)}
        inside = set(captures(self._body))
        captured = {each for each in outside if each not in inputs or each in inside}
        self._captures = sorted(captured)
        #: Of the backward body: names of arguments with their specs, and what they start from.
        self._args: dict[str, Spec] = {}
        self._starts: list[Endpoint] = []
        self._popped: dict[str, tuple[Endpoint, Endpoint]] = {}
        self._built = Scope({}, self._args, graph.current)

    def build(self) -> Iterable[tuple[Endpoint, Endpoint]]:
        trips = Endpoint(self._node.name, _save(self._scope, self._node, TRIPS))
        left = self._argument("left", Spec("int64", ()), self._forward(trips))
        gradients_ = {place: self._cotangent(place) for place in self._active}
        sums = {each: self._sum_of(each) for each in self._captures}
        with self._graph.inside(self._built):
            found, seeds_rest = self._back(gradients_)
            results = [self._build.one("Sub", left, self._constant(1))]
            for place in self._active:
                results.append(self._next(place, found, seeds_rest))
            for each in self._captures:
                results.append(
                    self._build.one("GradientSum", sums[each], found[each]) if each in found else sums[each]
                )
            results += [rest for rest, _ in self._popped.values()]
        cond = self._cond()
        body = Subgraph(list(self._args), self._built.nodes, results)
        outputs = self._build.add(
            "While",
            *self._starts,
            cond=cond,
            body=body,
            parallel_iterations=self._node.attr.get("parallel_iterations", PARALLEL_ITERATIONS),
            carry_shapes=[_open(spec) for spec in self._args.values()],
        )
        pairs = []
        for number, place in enumerate(self._active, 1):
            if place < len(self._node.inputs):
                pairs.append((self._node.inputs[place], outputs[number]))
        for number, each in enumerate(self._captures, 1 + len(self._active)):
            pairs.append((each, outputs[number]))
        return pairs

    def _argument(self, name: str, spec: Spec, start: Endpoint) -> Endpoint:
        with self._graph.inside(self._built):
            free = self._graph.unique(name)
        self._args[free] = spec
        self._starts.append(start)
        return Endpoint(free)

    def _cotangent(self, place: int) -> Endpoint:
        spec = self._node.outputs[place]
        start = self._cotangents.get(place)
        if start is None:
            start = self._build.zeros(spec, lambda: self._forward(Endpoint(self._node.name, place)))
        return self._argument(f"grad{place}", spec, start)

    def _sum_of(self, endpoint: Endpoint) -> Endpoint:
        spec = self._scope.find(endpoint)
        assert spec is not None, "it is captured"
        start = self._build.zeros(spec, lambda: self._forward(endpoint))
        return self._argument("sum", spec.value(), start)

    def _constant(self, number: int) -> Endpoint:
        return self._build.one("Constant", value=as_constant(number, "int64"))

    def _cond(self) -> Subgraph:
        built = Scope({}, dict(self._args), self._graph.current)
        with self._graph.inside(built):
            test = self._build.one("Greater", Endpoint(next(iter(self._args))), self._constant(0))
        return Subgraph(list(self._args), built.nodes, [test])

    def _back(self, given: dict[int, Endpoint]) -> tuple[dict[Endpoint, Endpoint], dict[int, Endpoint]]:
        """Add the gradient of one iteration; return it, and what is left of the cotangents that are stacks."""
        seeds: dict[Endpoint, list[Endpoint]] = {}
        rests: dict[int, Endpoint] = {}
        count = len(self._node.inputs)
        for place, cotangent in given.items():
            if place < count:
                seeds.setdefault(self._body.out[place], []).append(cotangent)
                continue
            saved = parse_endpoint(self._node.attr["saved"][place - count])
            rest, top = self._build.add("StackPop", cotangent, self._value(saved))
            rests[place] = rest
            seeds.setdefault(saved, []).append(top)
        inner = Scope(self._body.nodes, self._body.specs, self._scope)
        wanted = {*map(Endpoint, self._body.args), *self._captures}
        return self._build.back(inner, self._body.nodes, seeds, wanted, self._value), rests

    def _next(self, place: int, found: dict[Endpoint, Endpoint], rests: dict[int, Endpoint]) -> Endpoint:
        if place in rests:
            return rests[place]
        arg = Endpoint(self._body.args[place])
        if arg in found:
            return found[arg]
        return self._build.zeros(self._body.specs[arg.node], lambda: self._value(arg))

    def _value(self, endpoint: Endpoint) -> Endpoint:
        """Return a value of the forward body in the iteration that is being undone."""
        if endpoint.node not in self._body.nodes and endpoint.node not in self._body.args:
            return self._forward(endpoint)
        if endpoint.node in self._body.nodes:
            copy = self._build.copied(self._body.nodes[endpoint.node])
            if copy is not None:
                return copy
        text = str(endpoint)
        if text not in self._popped:
            port = _save(self._scope, self._node, text)
            stack = Endpoint(self._node.name, port)
            spec = self._node.outputs[port]
            argument = self._argument("saved", spec, self._forward(stack))
            # In this body, whatever inner one asks.
            with self._graph.inside(self._built):
                rest, top = self._build.add("StackPop", argument)
            self._popped[text] = (rest, top)
        return self._popped[text][1]


def _open(spec: Spec) -> Any:
    """Return what a loop says of a gradient's shape: no more than is known."""
    if spec.kind != "tensor":
        return None
    return "any" if spec.shape is None else list(spec.shape)


def _save(scope: Scope, node: Node, what: Any) -> int:
    """Let a loop or condition save a value of its body, and return the port that gives it."""
    saved = [list(each) if not isinstance(each, str) else each for each in node.attr.get("saved", ())]
    if what not in saved:
        node.outputs = (*node.outputs, saved_spec(scope, node, what))
        saved.append(what)
        node.attr["saved"] = saved
    first = len(node.outputs) - len(saved)
    return first + saved.index(what)
