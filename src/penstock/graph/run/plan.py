"""A plan: what one signature of a run executes, as arrays that the executor reads. Made once, shared by threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.errors import MismatchError
from penstock.graph.model.node import Node
from penstock.graph.ops.control import PARALLEL_ITERATIONS
from penstock.graph.ops.exchange import writing
from penstock.graph.ops.table import operation
from penstock.graph.run.lower import Flat
from penstock.graph.run.regions import Region, exchanges_behind, groups_of, kernel_of, region_of

#: Kinds of units, as the executor distinguishes them.
KERNEL, REGION, WAITING, SENDING, RANDOM, SWITCH, MERGE, ENTER, LEAVE, NEXT, FETCH, FEED, NOTHING = range(13)
_CONTROL = {
    "Switch": SWITCH,
    "Merge": MERGE,
    "Enter": ENTER,
    "Leave": LEAVE,
    "NextIteration": NEXT,
    "NoOp": NOTHING,
    "Fetch": FETCH,
    "Feed": FEED,
}


@dataclass(slots=True, eq=False)
class Unit:
    """What is executed at once.

    frame: number of its frame. local: its place among the units of the frame. slot: place of its first input among
    those of the frame; inputs: how many. needs: how many inputs and controls it waits for; of a Merge, controls alone.
    targets: by port, (unit, slot); followers: units that wait for it alone. turn: of what
    is ready at once, the least comes first.
    """

    kind: int
    flat: Flat
    call: Callable[..., Any] | None = None
    region: Region | None = None
    frame: int = 0
    local: int = 0
    slot: int = 0
    inputs: int = 0
    needs: int = 0
    ports: int = 1
    targets: list[list[tuple[Unit, int]]] = field(default_factory=list)
    followers: list[Unit] = field(default_factory=list)
    turn: int = -1
    #: Of its spans, and of the nodes of a region; see `names_of`.
    names: tuple[str, ...] = ()
    #: Of an Enter: the frame that it leads into, and whether it gives each iteration the same.
    child: int = 0
    is_constant: bool = False
    #: Of a Merge: how many inputs come from no NextIteration. It is dead when all of these are.
    alternatives: int = 0


@dataclass(slots=True, eq=False)
class FramePlan:
    """A loop, or the whole graph: frame 0.

    enters: how many there are; needs, slots: of its units. parallel_iterations: that live at once.
    """

    path: tuple[str, ...]
    number: int
    enters: int = 0
    parallel_iterations: int = 1
    needs: list[int] = field(default_factory=list)
    slots: int = 0
    leaves: list[Unit] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Plan:
    """The units of a run. roots: that need nothing, the first at the end; frames: by number; fetches: how many.

    has_turns: whether units have turns; otherwise, of what is ready, what became so last comes first.
    """

    units: list[Unit]
    frames: list[FramePlan]
    roots: list[Unit]
    fetches: int
    has_turns: bool


def frames_of(flats: Sequence[Flat]) -> tuple[list[int], list[FramePlan]]:
    """Return the frame of each primitive. Raises: MismatchError where one takes inputs of two frames."""
    frames = [FramePlan((), 0)]
    numbers: dict[tuple[str, ...], int] = {(): 0}
    found: list[int] = []
    for index, flat in enumerate(flats):
        sources = [source for source, _ in flat.inputs if source < index] + [
            c for c in flat.controls if c < index
        ]
        inside = {found[source] for source in sources} or {0}
        if len(inside) > 1:
            names = sorted("/".join(frames[each].path) or "the graph" for each in inside)
            raise MismatchError(
                f"its inputs come from {' and '.join(names)}: Enter brings a value into a loop, Leave out of it",
                node=flat.name,
                where=flat.where,
            )
        (number,) = inside
        path = frames[number].path
        if flat.op == "Enter":
            path = (*path, flat.attr["frame"])
            number = numbers.setdefault(path, len(frames))
            if number == len(frames):
                frames.append(FramePlan(path, number))
            frames[number].enters += 1
            frames[number].parallel_iterations = flat.attr.get("parallel_iterations", PARALLEL_ITERATIONS)
        elif flat.op == "Leave":
            if not path:
                raise MismatchError("Leave is not in a loop", node=flat.name, where=flat.where)
            number = numbers[path[:-1]]
        found.append(number)
    return found, frames


def make_plan(
    flats: list[Flat],
    resources: Any,
    *,
    regions: bool = True,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    turns: Mapping[str, int] | None = None,
    counts: bool = False,
) -> Plan:
    """Return the plan of primitives, whose fetches are primitives of op "Fetch".

    resources: of the session, for kernels that need them. regions: whether pure primitives run as one function. turns:
    of nodes, by name; what has none, such as a node of a function's body, comes before them. counts: whether regions
    count the bytes of live tensors.
    """
    numbers, frames = frames_of(flats)
    # Where a primitive runs: a Leave in its loop, an Enter outside of it.
    runs_in = [_runs_in(flats, index, numbers) for index in range(len(flats))]
    fuses = [
        flat.call is not None or flat.inline is not None or (flat.node is not None and _is_pure(flat))
        for flat in flats
    ]
    unit_of: dict[int, Unit] = {}
    inner: dict[tuple[int, int], tuple[Unit, int]] = {}
    units: list[Unit] = []
    needed = _users(flats)
    if resources.mail is not None:
        _write_where_sent(flats, needed, resources.mail)
    exchanges = exchanges_behind(flats, runs_in)
    groups = groups_of(flats, runs_in, fuses, exchanges)
    for members in groups if regions else [[index] for group in groups for index in group]:
        group = set(members)
        outputs = [
            (index, port)
            for index in members
            for port in range(flats[index].ports)
            if any(user not in group for user in needed.get((index, port), ()))
        ]
        region = region_of(flats, members, outputs, compiler if len(members) > 1 else None, counts)
        unit = Unit(REGION, Flat("Region", region.inputs, name=flats[members[0]].name), region.call, region)
        unit.frame, unit.ports = runs_in[members[0]], len(outputs)
        for place, port in enumerate(outputs):
            inner[port] = (unit, place)
        for index in members:
            unit_of[index] = unit
        outside = {control for index in members for control in flats[index].controls if control not in group}
        unit.flat.controls = sorted(outside)
        units.append(unit)
    for index, flat in enumerate(flats):
        if not fuses[index]:
            unit = _unit(flat, resources)
            unit.frame, unit.child = runs_in[index], numbers[index]
            unit.alternatives = sum(flats[source].op != "NextIteration" for source, _ in flat.inputs)
            unit_of[index] = unit
            units.append(unit)
    for index, unit in unit_of.items():
        unit.turn = max(unit.turn, (turns or {}).get(flats[index].name, -1))
    _connect(units, unit_of, inner, frames)
    order = {
        unit: place for place, unit in enumerate(dict.fromkeys(unit_of[index] for index in range(len(flats))))
    }
    roots = [unit for unit in units if unit.needs == 0 and unit.kind != MERGE]
    roots.sort(key=lambda unit: (unit.turn, unit.kind not in (FEED, KERNEL), order[unit]), reverse=True)
    return Plan(units, frames, roots, sum(unit.kind == FETCH for unit in units), bool(turns))


def _runs_in(flats: Sequence[Flat], index: int, numbers: Sequence[int]) -> int:
    flat = flats[index]
    if flat.op in ("Leave", "Enter"):
        return numbers[flat.inputs[0][0]]
    return numbers[index]


def _is_pure(flat: Flat) -> bool:
    return flat.op not in _CONTROL and operation(flat.op).kind == "pure"


def _users(flats: Sequence[Flat]) -> dict[tuple[int, int], list[int]]:
    needed: dict[tuple[int, int], list[int]] = {}
    for index, flat in enumerate(flats):
        for port in flat.inputs:
            needed.setdefault(port, []).append(index)
    return needed


def _write_where_sent(flats: Sequence[Flat], needed: dict[tuple[int, int], list[int]], mail: Any) -> None:
    """Let kernels write a value that nothing takes but one Send where its receiver has it.

    Once it is sent it is the receiver's alone, which may change it as it does what it made itself.
    """
    for index, flat in enumerate(flats):
        users = [flats[user] for user in needed.get((index, 0), ())]
        if [user.op for user in users] != ["Send"] or flat.ports != 1 or flat.node is None:
            continue
        sent = users[0].node
        assert sent is not None, "parting puts Sends in"
        if sent.attr.get("is_asked"):  # it may lie here for long
            continue
        if _is_pure(flat) and operation(flat.op).takes_out and not flat.node.attr.get("kernel"):
            flat.call = writing(kernel_of(flat), mail, sent.attr["to"])


def _unit(flat: Flat, resources: Any) -> Unit:
    if flat.op in _CONTROL:
        unit = Unit(_CONTROL[flat.op], flat, ports=flat.ports)
        unit.is_constant = bool(flat.attr.get("is_constant")) and flat.op == "Enter"
        if flat.op in ("NoOp", "Fetch"):
            unit.ports = 0
        return unit
    node = flat.node
    assert isinstance(node, Node), "what lowering adds is pure, or control"
    table = operation(flat.op)
    kind = {"state": KERNEL, "random": RANDOM, "waiting": WAITING}[table.kind]
    if flat.op == "Send" and not node.attr.get("is_asked"):
        kind = SENDING
    return Unit(kind, flat, table.kernel(node)(node, resources), ports=flat.ports)


def _connect(
    units: list[Unit],
    unit_of: dict[int, Unit],
    inner: dict[tuple[int, int], tuple[Unit, int]],
    frames: list[FramePlan],
) -> None:
    for unit in units:
        frame = frames[unit.frame]
        unit.local = len(frame.needs)
        unit.slot, unit.inputs = frame.slots, len(unit.flat.inputs)
        frame.slots += unit.inputs
        unit.targets = [[] for _ in range(unit.ports)]
        controls = len({unit_of[each] for each in unit.flat.controls})
        unit.needs = controls + (0 if unit.kind == MERGE else unit.inputs)
        frame.needs.append(unit.needs)
        if unit.kind == LEAVE:
            frame.leaves.append(unit)
    for unit in units:
        for place, port in enumerate(unit.flat.inputs):
            source, output = inner.get(port) or (unit_of[port[0]], port[1])
            source.targets[output].append((unit, unit.slot + place))
        for source in dict.fromkeys(unit_of[each] for each in unit.flat.controls):
            source.followers.append(unit)
