"""A run of a graph as parts, one for each worker; and which nodes cannot be parted. Pure.

In a part, a node of another worker is a Recv of the same name with the same outputs, so that the nodes that need it
stay as they are; on its own worker a Send hands over the outputs that are needed there, once for each worker.
Source: Abadi et al. 2015, sections 3.2.2 and 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.graph.errors import InfeasibleError, UnsupportedError
from penstock.graph.model.check import control_dependencies, dependencies
from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Endpoint, Node
from penstock.graph.ops.table import operation
from penstock.graph.run.reach import inner_nodes, is_replaced, needed_nodes, representatives
from penstock.graph.run.wanted import Wanted
from penstock.policy.graph_placement import allows_cpu

BY_HAND = ("Switch", "Merge", "Enter", "Leave", "NextIteration")


@dataclass(slots=True, eq=False)
class Part:
    """What one worker does in a run.

    nodes: of its graph, in the order in which they are to run. feeds: of the run, by number, and the endpoint here.
    fetches: number of the result, and the endpoint here. targets: nodes that run besides. holds: nodes of the run that
    are its own.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    feeds: dict[int, Endpoint] = field(default_factory=dict)
    fetches: dict[int, Endpoint] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)
    holds: dict[str, None] = field(default_factory=dict)


def task_of(device: str) -> str:
    """Return the worker that a device belongs to: "/job:ps/task:1" of "/job:ps/task:1/device:cpu:0"."""
    return device.partition("/device:")[0]


def holds_state(node: Node) -> bool:
    """Return whether a node has a state that stays on its worker: what it made, or the draws that it counted."""
    kinds = ((operation(each.op).kind, each) for each in inner_nodes(node))
    return any(kind == "random" or (kind == "state" and not each.inputs) for kind, each in kinds)


def neighbours(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each node, nodes that have to be on its device: what it takes is a handle, or may be dead."""
    nodes = graph.nodes
    found = {node.name: tuple(_handles(graph, node)) for node in nodes.values()}
    by_hand = [node.name for node in nodes.values() if node.op in BY_HAND]
    if by_hand:
        users: dict[str, list[str]] = {name: [] for name in nodes}
        for node in nodes.values():
            for name in (*(each.node for each in dependencies(node)), *control_dependencies(node)):
                users[name].append(node.name)
        reached, open_names = set(by_hand), list(by_hand)
        while open_names:
            for user in users[open_names.pop()]:
                if user not in reached:
                    reached.add(user)
                    open_names.append(user)
        for name in reached:
            found[name] = (*found[name], by_hand[0])
    return found


def _handles(graph: Graph, node: Node) -> Iterator[str]:
    for endpoint in dependencies(node):
        spec = graph.scope.find(endpoint)
        kind = "tensor" if spec is None else spec.kind
        if kind != "tensor" and (kind != "variable" or _takes_as_such(node, endpoint)):
            yield endpoint.node


def _takes_as_such(node: Node, variable: Endpoint) -> bool:
    """Return whether a node, or one in its bodies, takes a variable and not its value."""
    return any(variable in each.inputs and operation(each.op).handles for each in inner_nodes(node))


def constraint_of(node: Node) -> str:
    """Return the device that a node asks for: its own, or that of the nodes in its bodies.

    Raises: UnsupportedError where these ask for several.
    """
    asked = {only for each in inner_nodes(node) if (only := each.placement.get("only") or each.device)}
    if len(asked) > 1:
        raise UnsupportedError(
            f"a {kind_of_flow(node)} runs on one device, and its nodes ask for {', '.join(map(repr, sorted(asked)))}; "
            + to_one_device(min(asked)),
            node=node.name,
            where=node.where,
        )
    return asked.pop() if asked else ""


def check_of_one_process(nodes: Iterable[Node]) -> None:
    """Raise InfeasibleError naming a node that asks for another device than the CPU of this process.

    A process alone is every job and task, so that a graph for workers runs in it, too.
    """
    for node in nodes:
        for each in inner_nodes(node):
            asked = each.placement.get("only") or each.device
            if asked and not allows_cpu(asked):
                raise InfeasibleError(
                    f"it asks for {asked!r}, and this process has /device:cpu:0: kernels of graphs run on CPUs alone, "
                    "so leave the device out",
                    node=node.name,
                    where=each.where or node.where,
                )


def kind_of_flow(node: Node) -> str:
    """Return what errors call a node with bodies."""
    return "loop" if node.op == "While" else "condition"


def to_one_device(device: str) -> str:
    """Return what to do where nodes that have to be on one device are not."""
    return f"make all of them in one with graph.on_device({device!r}):"


def parts_of(
    graph: Graph,
    task: Mapping[str, str],
    wanted: Wanted,
    after: Mapping[tuple[str, str], str] | None = None,
    order: Sequence[str] = (),
) -> dict[str, Part]:
    """Return the part of each worker in a run.

    task: of each node.
    after: by node and worker that receives from it, the node there after which it asks for that, where both run.
    order: in which nodes are to run; Sends and Recvs come first, as soon as they can.
    """
    cut = _Cut(graph, task, wanted)
    for (name, where), other in (after or {}).items():
        cut.delay(name, where, other)
    turn = {name: number for number, name in enumerate(order)}
    for part in cut.parts.values():
        nodes = sorted(
            part.nodes.values(), key=lambda n: -1 if n.op in ("Send", "Recv") else turn.get(n.name, -1)
        )
        part.nodes = {node.name: node for node in nodes}
    return cut.parts


class _Cut:
    """Follows what a run asks for from worker to worker."""

    def __init__(self, graph: Graph, task: Mapping[str, str], wanted: Wanted) -> None:
        endpoints, operations, fed = wanted
        self.parts: dict[str, Part] = {}
        self._nodes, self._task = graph.nodes, task
        self._fed = {endpoint: number for number, endpoint in enumerate(fed)}
        order, _ = needed_nodes(graph.nodes, endpoints, operations, set(fed))
        self._runs = {node.name for node in order}
        self._same = representatives(order, fed)
        #: What a worker needs of a node of another: its ports.
        self._wanted: dict[tuple[str, str], dict[int, None]] = {}
        self._open: list[tuple[Part, str, Node]] = []
        for number, endpoint in enumerate(endpoints):
            if endpoint not in self._fed:
                at = self._kept(endpoint)
                self._need(self._home(at.node), at)
                self._part(self._home(at.node)).fetches[number] = at
        for name in operations:
            if name in self._runs:
                name = self._same.get(name, name)
                self._need_done(self._home(name), name)
                self._part(self._home(name)).targets.append(name)
        while self._open:
            part, home, node = self._open.pop()
            self._add(part, home, node)
        for (name, where), ports in self._wanted.items():
            self._send(name, where, list(ports))

    def _home(self, name: str) -> str:
        return self._task[name]

    def _part(self, task: str) -> Part:
        return self.parts.setdefault(task, Part())

    def _kept(self, endpoint: Endpoint) -> Endpoint:
        return Endpoint(self._same.get(endpoint.node, endpoint.node), endpoint.port)

    def _need(self, where: str, endpoint: Endpoint) -> None:
        """Let a worker have an output."""
        part, node = self._part(where), self._nodes[endpoint.node]
        if endpoint in self._fed:
            part.feeds[self._fed[endpoint]] = endpoint
            part.nodes.setdefault(node.name, node if not (node.inputs or node.controls) else _stand_in(node))
            return
        self._need_done(where, node.name)
        if self._home(node.name) != where:
            self._wanted[node.name, where][endpoint.port] = None

    def _need_done(self, where: str, name: str) -> None:
        """Let a worker wait for a node."""
        home = self._home(name)
        if name in self._runs and name not in self._part(home).holds:
            part = self._part(home)
            part.holds[name] = None
            self._open.append((part, home, self._nodes[name]))
        if home != where and (name, where) not in self._wanted:
            self._wanted[name, where] = {}
            self._part(where).nodes.setdefault(name, _stand_in(self._nodes[name]))

    def _add(self, part: Part, home: str, node: Node) -> None:
        """Add a node to the part of its worker, with all that it needs."""
        own = replace(
            node,
            inputs=[self._kept(endpoint) for endpoint in node.inputs],
            controls=[self._same.get(name, name) for name in node.controls],
        )
        part.nodes[node.name] = own
        # The names in bodies stay as they are written.
        for endpoint in dict.fromkeys(dependencies(own)):
            self._need(home, endpoint)
        for name in control_dependencies(own):
            fed = Endpoint(name)
            if fed in self._fed and is_replaced(self._nodes[name], self._fed):
                self._need(home, fed)
            else:
                self._need_done(home, name)

    def delay(self, name: str, where: str, after: str) -> None:
        """Let a worker ask for what another node of it gives, and only after one of its own."""
        after = self._same.get(after, after)
        if (name, where) not in self._wanted or after not in self._part(where).holds:
            return
        if self._needs(after, name):  # of equal nodes another one was kept
            return
        home = self._home(name)
        received = self._part(where).nodes[name]
        self._part(where).nodes[name] = replace(
            received, controls=[*received.controls, after], attr={**received.attr, "asks": home}
        )
        sent = self._part(home).nodes[_name_of_send(name, where)]
        sent.attr["is_asked"] = True

    def _needs(self, name: str, other: str) -> bool:
        """Return whether a node needs another, on whichever workers."""
        seen, open_names = {name}, [name]
        while open_names:
            node = self._nodes[open_names.pop()]
            for each in (*(endpoint.node for endpoint in dependencies(node)), *control_dependencies(node)):
                each = self._same.get(each, each)
                if each == other:
                    return True
                if each not in seen and each in self._runs:
                    seen.add(each)
                    open_names.append(each)
        return False

    def _send(self, name: str, where: str, ports: list[int]) -> None:
        source, home = self._nodes[name], self._part(self._home(name))
        sent = Node(
            _name_of_send(name, where),
            "Send",
            [Endpoint(name, port) for port in ports],
            [] if ports else [name],
            {"node": name, "ports": ports, "to": where},
            where=source.where,
        )
        home.nodes[sent.name] = sent
        home.targets.append(sent.name)


def _name_of_send(name: str, where: str) -> str:
    return f"{name} to {where.replace(':', '')}"


def _stand_in(node: Node) -> Node:
    """Return what is in a part for a node of another worker."""
    outputs = [[spec.dtype, None if spec.shape is None else list(spec.shape)] for spec in node.outputs]
    return Node(node.name, "Recv", attr={"outputs": outputs}, where=node.where)
