"""Regions: pure primitives that wait for the same things, as one function of straight Python code.

Primitives are one region if the primitives before them that are in no region are the same set, and the same Sends and
Recvs wait for them: a region then waits for nothing that one of its members would not have waited for, other workers
wait for nothing that they do not need, and no path leaves a region and comes back. What can only give at once (feeds,
handles, variables read at the start of a run) counts for nothing.

The code of a region frees each value after its last use, and continues with what it began: of the members that are
ready, the one that became so last comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.graph.model.check import depth_first
from penstock.graph.ops.table import operation
from penstock.graph.run.live import may_count
from penstock.graph.run.lower import Flat, Inline, Port

_AT_ONCE = {"Feed", "Variable", "Read", "FIFOQueue", "RandomShuffleQueue", "Mutex"}
#: What gives tensors that are there before a step and after it.
OUTLIVE_STEPS = {"Variable", "Read", "Constant"}
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Region:
    """A function of a list of inputs, which it empties, to a tuple of outputs.

    members: by line of its code, to name what raised. is_counted: whether it counts the bytes of live tensors.
    """

    call: Callable[[list[Any]], tuple[Any, ...]]
    members: list[Flat]
    lines: dict[int, tuple[Flat, list[str]]]
    file: str
    inputs: list[tuple[int, int]]
    is_counted: bool = False

    def culprit(self, error: BaseException) -> tuple[Flat, list[Any]] | None:
        """Return the member in whose line an error was raised, with its inputs."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                flat, names = self.lines[trace.tb_lineno]
                return flat, [trace.tb_frame.f_locals[name] for name in names]
            trace = trace.tb_next
        return None


def exchanges_behind(flats: Sequence[Flat], frames: Sequence[int]) -> list[int]:
    """Return, as bits, which Sends and Recvs wait for each primitive, or are it; none for those in loops.

    flats, frames: as of `groups_of`.
    """
    numbers = itertools.count()
    found = [1 << next(numbers) if flat.op in ("Send", "Recv") else 0 for flat in flats]
    for index in reversed(range(len(flats))):
        if frames[index]:
            found[index] = 0
        for source in (*(each for each, _ in flats[index].inputs), *flats[index].controls):
            if source < index:
                found[source] |= found[index]
    return found


def groups_of(
    flats: Sequence[Flat], frames: Sequence[int], fuses: Sequence[bool], exchanges: Sequence[int]
) -> list[list[int]]:
    """Return the members of each region, in order.

    flats: each after what it needs, back edges aside. frames: of each primitive, by number. fuses: whether a primitive
    can be in a region. exchanges: that wait for each, as `exchanges_behind` returns them.
    """
    Token = tuple[int, int]  # a primitive; of a Switch also the port, as one of the two is dead
    sets: dict[frozenset[Token], frozenset[Token]] = {}

    def interned(members: frozenset[Token]) -> frozenset[Token]:
        return sets.setdefault(members, members)

    nothing = interned(frozenset())
    after: dict[int, frozenset[Token]] = {}
    is_root: dict[int, bool] = {}
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, flat in enumerate(flats):
        before = nothing
        needed = [
            port for port in (*flat.inputs, *((each, -1) for each in flat.controls)) if port[0] in after
        ]
        for source, port in needed:
            added = after[source]
            if flats[source].op == "Switch":
                added = interned(added | {(source, port)})
            if added is not before:
                before = interned(before | added)
        if fuses[index]:
            after[index] = before
            is_root[index] = False
            groups.setdefault((frames[index], id(before), exchanges[index]), []).append(index)
            continue
        is_root[index] = (
            flat.op in _AT_ONCE
            and frames[index] == 0
            and not before
            and all(is_root[source] for source, _ in needed)
        )
        after[index] = nothing if is_root[index] else interned(before | {(index, -1)})
    return list(groups.values())


def region_of(
    flats: Sequence[Flat],
    members: Sequence[int],
    outputs: Sequence[tuple[int, int]],
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    counts: bool = False,
) -> Region:
    """Return the function of a region.

    members: in an order in which they can run. outputs: (primitive, port) that others need.
    compiler: such as torch.compile; called with the function. counts: whether it counts the bytes of live tensors by
    the step's `live`, unless it is compiled.
    """
    inside = set(members)
    order = depth_first(
        {
            index: {source for source, _ in flats[index].inputs if source in inside}
            | {source for source in flats[index].controls if source in inside}
            for index in members
        }
    )
    inputs: dict[Port, str] = {}
    for index in order:
        for port in flats[index].inputs:
            if port[0] not in inside:
                inputs.setdefault(port, f"i{len(inputs)}")
    is_counted = counts and not compiler
    code = _Code(is_counted)
    if compiler:
        code.write(f"def region({', '.join(inputs.values())}):")
    else:
        code.write("def region(inputs, step):")
        if inputs:
            code.write(f"    {''.join(f'{name}, ' for name in inputs.values())}= inputs")
            code.write("    inputs.clear()")
    names = dict(inputs)
    code.block(flats, order, names, outputs, set(inputs.values()), "    ")
    code.write(f"    return ({''.join(f'{names[port]}, ' for port in outputs)})")
    file = f"<penstock region {next(_numbers)}>"
    exec(compile("\n".join(code.text), file, "exec"), code.space)
    call = code.space.pop("region")  # a name of itself would keep it, and its constants, until a collection
    if compiler:
        compiled = compiler(call)
        call = lambda inputs, step: compiled(*inputs)  # noqa: E731
    return Region(call, [flats[index] for index in order], code.lines, file, list(inputs), is_counted)


class _Code:
    """The text of a region's function. Its names are its own: each is assigned once, carries of loops aside."""

    def __init__(self, counts: bool) -> None:
        self._counts = counts
        self.text: list[str] = []
        #: By line: what to blame for what it raises, with the names of its inputs.
        self.lines: dict[int, tuple[Flat, list[str]]] = {}
        self.space: dict[str, Any] = {}
        self._number = 0

    def write(self, line: str, flat: Flat | None = None, given: Sequence[str] = ()) -> None:
        self.text.append(line)
        if flat is not None:
            self.lines[len(self.text)] = (flat, list(given))

    def block(
        self,
        flats: Sequence[Flat],
        order: Sequence[int],
        names: dict[Port, str],
        outputs: Sequence[Port],
        mortal: set[str],
        indent: str,
    ) -> list[str]:
        """Write primitives, each value deleted after its last use; return what of the outputs the block made.

        names: of ports outside; those of the block are added. mortal: of the names outside, what may be deleted.
        """
        made: dict[int, list[str]] = {}
        last: dict[str, int] = {}
        for index in order:
            self._number += 1
            made[index] = [f"v{self._number}_{port}" for port in range(flats[index].ports)]
            names.update({(index, port): name for port, name in enumerate(made[index])})
            for name in (*(names[port] for port in flats[index].inputs), *made[index]):
                last[name] = index
        own = {name for each in made.values() for name in each}
        kept = {names[port] for port in outputs}
        for index in order:
            flat = flats[index]
            given = [names[port] for port in flat.inputs]
            gone = [
                name
                for name in dict.fromkeys((*given, *made[index]))
                if last[name] == index and name not in kept and (name in own or name in mortal)
            ]
            if flat.inline is None:
                self._number += 1
                self.space[f"k{self._number}"] = kernel_of(flat)
                target = ", ".join(made[index]) + (" = " if made[index] else "")
                self.write(f"{indent}{target}k{self._number}({', '.join(given)})", flat, given)
                # What lowering adds passes on what is there, or numbers of its own.
                if self._counts and flat.node is not None and may_count(flat.node):
                    count = "leave_out" if flat.op in OUTLIVE_STEPS else "add"
                    self.write(f"{indent}step.live.{count}({', '.join(made[index])})")
            elif flat.op == "While":
                gone = self._loop(flat, flat.inline, given, made[index], gone, indent)
            else:
                self._condition(flat, flat.inline, given, made[index], indent)
            self._delete(gone, indent)
        return [name for name in dict.fromkeys(names[port] for port in outputs) if name in own]

    def _delete(self, names: Sequence[str], indent: str) -> None:
        if names:
            self.write(f"{indent}del {', '.join(names)}")

    def _body(
        self, inline: Inline, which: str, given: Sequence[str], mortal: set[str], indent: str
    ) -> tuple[str, list[str]]:
        """Write a body; return its results, separated by commas, and what of them it made."""
        flats, out = inline.bodies[which]
        names = {(-1 - place, 0): name for place, name in enumerate(given)}
        own = self.block(flats, range(len(flats)), names, out, mortal, indent)
        return ", ".join(names[port] for port in out), own

    def _loop(
        self,
        flat: Flat,
        inline: Inline,
        given: Sequence[str],
        carries: Sequence[str],
        gone: Sequence[str],
        indent: str,
    ) -> list[str]:
        """Write a While; return what is still to be deleted after it."""
        starts, outside = given[: inline.carries], given[inline.carries :]
        # Results that nobody needs are carries, too.
        self.write(f"{indent}{', '.join(carries)} = {', '.join(starts)}")
        early = [name for name in gone if name not in outside and name not in carries]
        self._delete(early, indent)
        self.write(f"{indent}while True:")
        inner = [*carries, *outside]
        test, _ = self._body(inline, "cond", inner, set(), indent + "    ")
        self.write(f"{indent}    if not {test}: break", flat)
        results, own = self._body(inline, "body", inner, set(carries), indent + "    ")
        self.write(f"{indent}    {', '.join(carries)} = {results}")
        self._delete(own, indent + "    ")
        self.write(f"{indent}    if step.stops: step.check()", flat)
        return [name for name in gone if name not in early]

    def _condition(
        self, flat: Flat, inline: Inline, given: Sequence[str], made: Sequence[str], indent: str
    ) -> None:
        self.write(f"{indent}if {given[0]}:", flat)
        for which in ("then", "else"):
            if which == "else":
                self.write(f"{indent}else:")
            results, own = self._body(inline, which, given, set(), indent + "    ")
            self.write(f"{indent}    " + (f"{', '.join(made)} = {results}" if made else "pass"))
            self._delete(own, indent + "    ")


def kernel_of(flat: Flat) -> Callable[..., Any]:
    """Return the kernel of a pure primitive."""
    if flat.call is not None:
        return flat.call
    assert flat.node is not None, "lowering gives what it adds a call"
    return operation(flat.op).kernel(flat.node)(flat.node)
