"""A run's nodes as primitives: loops and conditions become Switch, Merge, Enter, Leave and NextIteration.

While, for each carry:   Enter -> Merge -> Switch -(false)-> Leave
                                   ^         `-(true)-> body -> NextIteration -.
                                   `---------------------------------------------'
Cond, for each argument: Switch -(true)-> then -> Merge
                            `--(false)-> else ----^
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from penstock.graph.errors import MismatchError
from penstock.graph.model.check import TRIPS
from penstock.graph.model.dtypes import fits, is_known, shape_text
from penstock.graph.model.node import Endpoint, Node, Scope, Spec, Subgraph, outer_controls, parse_endpoint
from penstock.graph.ops.control import PARALLEL_ITERATIONS
from penstock.graph.ops.table import operation
from penstock.graph.run.reach import Inlined, has_effect, is_replaced, needed_nodes, representatives


@dataclass(slots=True, eq=False)
class Flat:
    """A primitive of a plan.

    node: as written, but with its full name; None for what lowering adds. call: the kernel of a pure primitive that
    lowering adds. inputs: (primitive, port); controls: primitives. inline: the bodies of a loop or condition that runs
    inside of a region.
    """

    op: str
    inputs: list[tuple[int, int]]
    controls: list[int] = field(default_factory=list)
    node: Node | None = None
    call: Callable[..., Any] | None = None
    ports: int = 1
    attr: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    counts: bool = True
    inline: Inline | None = None

    @property
    def where(self) -> str:
        """Return where its node was made, "" if unknown."""
        return self.node.where if self.node is not None else ""


Port = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Inline:
    """A loop or condition whose bodies are pure, as code of the region that it is in.

    The inputs of its primitive are the carries (of a condition, the predicate and the arguments), then what the bodies
    take from outside. Inside of a body, input n is (-1 - n, 0).
    bodies: by name, primitives and what they give.
    """

    bodies: dict[str, tuple[list[Flat], list[Port]]]
    carries: int


class _Env:
    """What names mean in a scope: primitives and ports; what lies outside comes in as `bring` says."""

    def __init__(self, parent: _Env | None = None, bring: Callable[[Port], Port] | None = None) -> None:
        self.parent = parent
        self.ports: dict[Endpoint, Port] = {}
        self.done: dict[str, Callable[[], int]] = {}
        self._bring = bring
        self._brought: dict[Port, Port] = {}

    def find(self, endpoint: Endpoint) -> Port:
        found = self.ports.get(endpoint)
        if found is None:
            assert self.parent is not None, f"{endpoint} is not there"
            assert self._bring is not None, "only the whole graph has nothing around it"
            outside = self.parent.find(endpoint)
            found = self._brought.get(outside)
            if found is None:
                found = self._brought[outside] = self._bring(outside)
            self.ports[endpoint] = found
        return found


class Lowering:
    """Collects the primitives of a plan."""

    def __init__(self, inlined: Inlined | None = None) -> None:
        """Begin. inlined: which loops and conditions become code of regions; None: no one."""
        self.flats: list[Flat] = []
        self._inlined = inlined

    def add(self, op: str, inputs: Iterable[Port], **more: Any) -> int:
        self.flats.append(Flat(op, list(inputs), **more))
        return len(self.flats) - 1

    # -- A scope ---------------------------------------------------------------------------------------------

    def top(
        self, scope: Scope, roots: Sequence[Endpoint], targets: Sequence[str], fed: Sequence[Endpoint]
    ) -> _Env:
        """Lower what a run needs of a whole graph; feeds become primitives of op "Feed"."""
        order, used = needed_nodes(scope.nodes, roots, targets, set(fed))
        if self._inlined is not None:
            self._inlined.look(scope, order)
        env = _Env()
        for place, endpoint in enumerate(fed):
            index = self.add("Feed", [], attr={"feed": place}, name=str(endpoint), counts=False)
            env.ports[endpoint] = (index, 0)
            if is_replaced(scope.nodes[endpoint.node], fed):
                env.done[endpoint.node] = _always(index)
        self._scope(scope, order, used, env, "", None, set(fed))
        return env

    def _scope(
        self,
        scope: Scope,
        order: Sequence[Node],
        used: set[Endpoint],
        env: _Env,
        prefix: str,
        pivot: Callable[[], int] | None,
        fed: Collection[Endpoint] = (),
    ) -> None:
        same = representatives(order, fed)
        own = {*scope.nodes, *scope.args}
        later: list[tuple[int, Node]] = []
        for node in order:
            if node.name in same:
                kept = same[node.name]
                for port in range(len(node.outputs)):
                    env.ports[Endpoint(node.name, port)] = env.ports[Endpoint(kept, port)]
                env.done[node.name] = env.done[kept]
                continue
            self._node(scope, node, used, env, prefix, pivot, own, later, fed)
        for index, node in later:
            self.flats[index].inputs = [env.find(endpoint) for endpoint in node.inputs]

    def _node(
        self,
        scope: Scope,
        node: Node,
        used: set[Endpoint],
        env: _Env,
        prefix: str,
        pivot: Callable[[], int] | None,
        own: set[str],
        later: list[tuple[int, Node]],
        fed: Collection[Endpoint],
    ) -> None:
        controls = [env.done[name]() for name in node.controls if name in env.done]
        outside = [endpoint.node not in own for endpoint in node.inputs]
        # What comes from outside of a loop is live in its last iteration, too, in which the body is not taken: a node
        # needs one dead input then, a loop or condition all of them.
        if pivot is not None and (all(outside) or (node.op in ("While", "Cond") and any(outside))):
            controls.append(pivot())
        named = replace(node, name=prefix + node.name)
        # Outer nodes that nodes of a subgraph wait for: the loop or condition waits.
        if node.op in ("While", "Cond"):
            for _, subgraph in node.subgraphs():
                controls += [env.done[name]() for name in outer_controls(subgraph) if name in env.done]
            if self._inlined is not None and self._inlined.has(scope, node):
                ports, done = self._inline(scope, named, used, env, controls, node.name)
            elif node.op == "While":
                ports, done = self._while(scope, named, used, env, controls, node.name, pivot)
            else:
                ports, done = self._cond(scope, named, used, env, controls, node.name)
        else:
            back = any(endpoint not in env.ports and endpoint.node in scope.nodes for endpoint in node.inputs)
            inputs = [] if back else [self._input(named, place, env) for place in range(len(node.inputs))]
            index = self.add(
                node.op,
                inputs,
                controls=controls,
                node=named,
                ports=len(node.outputs),
                attr=node.attr,
                name=named.name,
            )
            if back:
                later.append((index, node))
            ports = [(index, port) for port in range(len(node.outputs))]
            done = _always(index)
        for port, found in enumerate(ports):
            if found is not None and Endpoint(node.name, port) not in fed:
                env.ports[Endpoint(node.name, port)] = found
        env.done[node.name] = done

    def _input(self, node: Node, place: int, env: _Env) -> Port:
        """Return an input; a variable where a value is needed is read."""
        found = env.find(node.inputs[place])
        if node.takes[place].kind == "variable" and not operation(node.op).handles:
            return self.read(found, node.takes[place], node)
        return found

    def read(self, handle: Port, spec: Spec, user: Node) -> Port:
        read = Node(f"{user.name}/Read", "Read", where=user.where, takes=(spec,), outputs=(spec.value(),))
        return (self.add("Read", [handle], node=read, name=read.name, counts=False), 0)

    def _pass(self, port: Port, controls: Sequence[int] = ()) -> int:
        return self.add("Pass", [port], controls=list(controls), call=_same, counts=False)

    def _roots(self, subgraph: Subgraph, saved: Iterable[str]) -> tuple[list[Endpoint], list[str]]:
        """Return what a subgraph has to give, and the nodes that it runs for their effect."""
        extra = [parse_endpoint(text) for text in saved if text != TRIPS]
        return [*subgraph.out, *extra], [node.name for node in subgraph.nodes.values() if has_effect(node)]

    def _body(
        self,
        scope: Scope,
        subgraph: Subgraph,
        args: Sequence[Port],
        env: _Env,
        prefix: str,
        pivot: Callable[[], int] | None,
        saved: Iterable[str] = (),
    ) -> list[int]:
        """Lower a subgraph into its environment; return what has to be done for its effects."""
        roots, effects = self._roots(subgraph, saved)
        for name, port in zip(subgraph.args, args, strict=True):
            env.ports[Endpoint(name)] = port
        inner = Scope(subgraph.nodes, subgraph.specs, scope)
        order, used = needed_nodes(subgraph.nodes, roots, effects)
        self._scope(inner, order, used, env, prefix, pivot)
        reached, _ = needed_nodes(subgraph.nodes, subgraph.out, ())
        unreached = set(effects) - {node.name for node in reached}
        return [env.done[name]() for name in effects if name in unreached]

    def _result(self, endpoint: Endpoint, subgraph: Subgraph, scope: Scope, env: _Env, node: Node) -> Port:
        found = env.find(endpoint)
        spec = Scope(subgraph.nodes, subgraph.specs, scope).find(endpoint)
        if spec is not None and spec.kind == "variable":
            return self.read(found, spec, node)
        return found

    # -- Cond ------------------------------------------------------------------------------------------------

    def _cond(
        self, scope: Scope, node: Node, used: set[Endpoint], env: _Env, controls: list[int], name: str
    ) -> tuple[list[Port | None], Callable[[], int]]:
        predicate = self._input(node, 0, env)
        if controls:
            predicate = (self._pass(predicate, controls), 0)
        args = [self._input(node, place, env) for place in range(1, len(node.inputs))]
        number = len(node.attr["then"].out)
        saved = [
            (number + place, which, text)
            for place, (which, text) in enumerate(node.attr.get("saved", ()))
            if Endpoint(name, number + place) in used
        ]

        def switched_to(port: int) -> Callable[[Port], Port]:
            return lambda value: (self._switch(node, value, predicate), port)

        results: dict[str, list[Port]] = {}
        kept: dict[int, Port] = {}
        ends: dict[str, Callable[[], int]] = {}
        for port, which in ((1, "then"), (0, "else")):
            subgraph = node.attr[which]
            side = switched_to(port)
            branch = _Env(env, bring=side)
            pivot = _once(lambda side=side: self._pass(side(predicate)))  # type: ignore[misc]
            inside = [side(arg) for arg in args]
            texts = [text for _, owner, text in saved if owner == which]
            effects = self._body(scope, subgraph, inside, branch, f"{node.name}/", pivot, texts)
            results[which] = [self._result(out, subgraph, scope, branch, node) for out in subgraph.out]
            for place, owner, text in saved:
                if owner == which:
                    kept[place] = branch.find(parse_endpoint(text))
                else:
                    nothing = self.add("Nothing", [], controls=[pivot()], call=_nothing, counts=False)
                    results.setdefault(f"saved{place}", []).append((nothing, 0))
            ends[which] = _once(partial(self._end, pivot, effects, results[which]))
        ports: list[Port | None] = [
            (self.add("Merge", [other, then], ports=2, name=node.name, counts=place == 0), 0)
            for place, (then, other) in enumerate(zip(results["then"], results["else"], strict=True))
        ]
        ports += [None] * len(node.attr.get("saved", ()))
        for place, _, _ in saved:
            (nothing_port,) = results[f"saved{place}"]
            ports[place] = (self.add("Merge", [nothing_port, kept[place]], ports=2, counts=False), 0)
        done = _once(
            lambda: self.add("Merge", [(ends["else"](), 0), (ends["then"](), 0)], ports=2, counts=False)
        )
        return ports, done

    def _end(self, pivot: Callable[[], int], effects: Sequence[int], outs: Sequence[Port]) -> int:
        """Return what is done once a branch is, dead if it was not taken."""
        passed = [self._pass(out) for out in outs]
        return self._pass((pivot(), 0), [*effects, *passed])

    def _switch(self, node: Node, value: Port, predicate: Port) -> int:
        return self.add("Switch", [value, predicate], node=node, ports=2, name=node.name, counts=False)

    # -- Inside of regions -----------------------------------------------------------------------------------

    def _inline(
        self, scope: Scope, node: Node, used: set[Endpoint], env: _Env, controls: list[int], name: str
    ) -> tuple[list[Port | None], Callable[[], int]]:
        is_loop = node.op == "While"
        count = len(node.inputs) if is_loop else len(node.attr["then"].out)
        texts = node.attr.get("saved", ())
        saved = [place for place in range(len(texts)) if Endpoint(name, count + place) in used]
        inputs = [self._input(node, place, env) for place in range(len(node.inputs))]
        if is_loop:
            inputs += [self._start_of(texts[place], controls) for place in saved]
        outside: dict[Port, Port] = {}

        def bring(port: Port) -> Port:
            return outside.setdefault(port, (-1 - len(inputs) - len(outside), 0))

        given: list[Port] = [(-1 - place, 0) for place in range(len(inputs))]
        chosen = [texts[place] for place in saved]
        bodies = {}
        for which, subgraph in node.subgraphs():
            inner, around = Lowering(self._inlined), _Env(env, bring)
            args = given[: len(node.inputs)] if is_loop else given[1:]
            own = chosen if is_loop else [text for owner, text in chosen if owner == which]
            inner._body(scope, subgraph, args, around, f"{node.name}/", None, () if which == "cond" else own)
            if which == "body":
                out = [inner._next_of(node, place, around, scope, None, given) for place in range(count)]
                out += [inner._kept(text, given[count + place], around) for place, text in enumerate(chosen)]
            else:
                out = [inner._result(each, subgraph, scope, around, node) for each in subgraph.out]
            if not is_loop:
                out += [
                    around.find(parse_endpoint(text))
                    if owner == which
                    else (inner.add("Nothing", [], call=_nothing), 0)
                    for owner, text in chosen
                ]
            bodies[which] = (inner.flats, out)
        spec = _predicate_of(scope, node)
        if not is_known(spec.shape):
            flats, out = bodies["cond"] if is_loop else (self.flats, inputs[:1])
            asking = Flat("Predicate", out[:1], call=_as_predicate, node=node, name=node.name, counts=False)
            flats.append(asking)
            out[0] = (len(flats) - 1, 0)
            if not is_loop:
                inputs[0] = out[0]
        index = self.add(
            node.op,
            [*inputs, *outside],
            controls=controls,
            node=node,
            ports=count + len(saved),
            name=node.name,
            inline=Inline(bodies, len(inputs)),
        )
        ports: list[Port | None] = [(index, port) for port in range(count)]
        ports += [None] * len(texts)
        for port, place in enumerate(saved, count):
            ports[count + place] = (index, port)
        return ports, _always(index)

    # -- While -----------------------------------------------------------------------------------------------

    def _while(
        self,
        scope: Scope,
        node: Node,
        used: set[Endpoint],
        env: _Env,
        controls: list[int],
        name: str,
        outer_pivot: Callable[[], int] | None,
    ) -> tuple[list[Port | None], Callable[[], int]]:
        cond, body = node.attr["cond"], node.attr["body"]
        count = len(node.inputs)
        texts = list(node.attr.get("saved", ()))
        saved = [place for place in range(len(texts)) if Endpoint(name, count + place) in used]
        starts = [self._input(node, place, env) for place in range(count)]
        begun = [*controls, *([outer_pivot()] if outer_pivot else [])]
        starts += [self._start_of(texts[place], begun) for place in saved]
        hidden = not starts
        if hidden:
            starts.append((self.add("Start", [], controls=begun, call=_zero, counts=False), 0))
        enters = [self._enter(node, start, controls, is_constant=False) for start in starts]
        merges = [self.add("Merge", [(enter, 0)], ports=2, counts=False) for enter in enters]

        def bring(outside: Port) -> Port:
            return (self._enter(node, outside, [], is_constant=True), 0)

        around = _Env(env, bring)
        asked = _Env(around, bring=lambda outside: outside)
        self._body(
            scope, cond, [(merge, 0) for merge in merges[:count]], asked, f"{node.name}/", _always(merges[0])
        )
        (test,) = cond.out
        predicate = self._result(test, cond, scope, asked, node)
        switches = [self._switch(node, (merge, 0), predicate) for merge in merges]
        leaves = [
            self.add("Leave", [(switch, 0)], name=node.name, counts=place == 0)
            for place, switch in enumerate(switches)
        ]
        done = _once(lambda: self._pass((leaves[0], 0), leaves[1:]))
        taken = _Env(around, bring=lambda outside: outside)
        pivot = _once(lambda: self._pass((switches[0], 1)))
        args = [(switch, 1) for switch in switches]
        chosen = [texts[place] for place in saved]
        effects = self._body(scope, body, args[:count], taken, f"{node.name}/", pivot, chosen)
        results = [self._next_of(node, place, taken, scope, pivot, args) for place in range(count)]
        for place, text in enumerate(chosen):
            results.append(self._kept(text, args[count + place], taken))
        if hidden:
            results.append(args[0])
        if effects:
            results[0] = (self._pass(results[0], effects), 0)
        for merge, result in zip(merges, results, strict=True):
            following = self.add("NextIteration", [result], counts=False)
            self.flats[merge].inputs.append((following, 0))
        ports: list[Port | None] = [(leave, 0) for leave in leaves[:count]]
        ports += [None] * len(texts)
        for place, leave in zip(saved, leaves[count : count + len(saved)], strict=True):
            ports[count + place] = (leave, 0)
        return ports, done

    def _enter(self, node: Node, value: Port, controls: Sequence[int], *, is_constant: bool) -> int:
        attr = {
            "frame": node.name,
            "is_constant": is_constant,
            "parallel_iterations": node.attr.get("parallel_iterations", PARALLEL_ITERATIONS),
        }
        return self.add("Enter", [value], controls=list(controls), attr=attr, counts=False)

    def _start_of(self, text: str, controls: Sequence[int]) -> Port:
        call = _zero if text == TRIPS else _nothing
        return (self.add("Start", [], controls=list(controls), call=call, counts=False), 0)

    def _kept(self, text: str, arg: Port, taken: _Env) -> Port:
        if text == TRIPS:
            return (self.add("Count", [arg], call=_one_more, counts=False), 0)
        return (self.add("StackPush", [arg, taken.find(parse_endpoint(text))], call=_push, counts=False), 0)

    def _next_of(
        self,
        node: Node,
        place: int,
        taken: _Env,
        scope: Scope,
        pivot: Callable[[], int] | None,
        args: Sequence[Port],
    ) -> Port:
        body = node.attr["body"]
        endpoint = body.out[place]
        found = self._result(endpoint, body, scope, taken, node)
        if pivot is not None and endpoint.node not in body.nodes and endpoint.node not in body.args:
            found = (self._pass(found, [pivot()]), 0)
        carry = node.outputs[place]
        given = Scope(body.nodes, body.specs, scope).find(endpoint)
        if carry.kind != "tensor" or endpoint == Endpoint(body.args[place]):
            return found
        if given is not None and is_known(given.shape) and is_known(carry.shape):
            return found
        return (
            self.add(
                "KeepShape", [found, args[place]], call=_keeps(node, place), counts=False, name=node.name
            ),
            0,
        )


def _keeps(node: Node, place: int) -> Callable[..., Any]:
    shapes = node.attr.get("carry_shapes")
    is_open = shapes is not None and shapes[place] is not None

    def check(value: Any, before: Any) -> Any:
        asked = node.outputs[place].shape if is_open else tuple(before.shape)
        now = tuple(value.shape)
        if not fits(asked, now):
            raise MismatchError(
                f"carry {place} had shape {shape_text(asked)}, and body returned {shape_text(now)}: a carry keeps its "
                "shape (carry_shapes may leave sizes open)",
                node=node.name,
                where=node.where,
            )
        return value

    return check


def _predicate_of(scope: Scope, node: Node) -> Spec:
    if node.op == "Cond":
        return node.takes[0]
    cond = node.attr["cond"]
    spec = Scope(cond.nodes, cond.specs, scope).find(cond.out[0])
    assert spec is not None, "it was checked"
    return spec


def _as_predicate(value: Any) -> Any:
    if value.ndim:
        raise MismatchError(f"the predicate has shape {list(value.shape)}, and a scalar is needed")
    return value


def _same(value: Any) -> Any:
    return value


def _nothing() -> None:
    return None


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def _one_more(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def _push(stack: Any, value: Any) -> Any:
    return (value, stack)


def _always(index: int) -> Callable[[], int]:
    return lambda: index


def _once(make: Callable[[], int]) -> Callable[[], int]:
    made: list[int] = []

    def get() -> int:
        if not made:
            made.append(make())
        return made[0]

    return get
