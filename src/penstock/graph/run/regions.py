"""Regions: pure primitives that wait for the same things, as one function of straight Python code.

Primitives are one region if the primitives before them that are in no region are the same set: a region then waits for
nothing that one of its members would not have waited for, and no path leaves a region and comes back. What can only
give at once (feeds, handles, variables read at the start of a run) counts for nothing.

The code of a region frees each value after its last use, and continues with what it began: of the members that are
ready, the one that became so last comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.graph.model.check import depth_first
from penstock.graph.run.lower import Flat

_AT_ONCE = {"Feed", "Variable", "Read", "FIFOQueue", "RandomShuffleQueue", "Mutex"}
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Region:
    """A function of a list of inputs, which it empties, to a tuple of outputs.

    members: by line of its code, to name what raised.
    """

    call: Callable[[list[Any]], tuple[Any, ...]]
    members: list[Flat]
    lines: dict[int, tuple[Flat, list[str]]]
    file: str
    inputs: list[tuple[int, int]]

    def culprit(self, error: BaseException) -> tuple[Flat, list[Any]] | None:
        """Return the member in whose line an error was raised, with its inputs."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                flat, names = self.lines[trace.tb_lineno]
                return flat, [trace.tb_frame.f_locals[name] for name in names]
            trace = trace.tb_next
        return None


def groups_of(flats: Sequence[Flat], frames: Sequence[int], fuses: Sequence[bool]) -> list[list[int]]:
    """Return the members of each region, in order.

    flats: each after what it needs, back edges aside. frames: of each primitive, by number. fuses: whether a primitive
    can be in a region.
    """
    Token = tuple[int, int]  # a primitive; of a Switch also the port, as one of the two is dead
    sets: dict[frozenset[Token], frozenset[Token]] = {}

    def interned(members: frozenset[Token]) -> frozenset[Token]:
        return sets.setdefault(members, members)

    nothing = interned(frozenset())
    after: dict[int, frozenset[Token]] = {}
    is_root: dict[int, bool] = {}
    groups: dict[tuple[int, int], list[int]] = {}
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
            groups.setdefault((frames[index], id(before)), []).append(index)
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
    kernels: Sequence[Callable[..., Any]],
    outputs: Sequence[tuple[int, int]],
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Region:
    """Return the function of a region.

    members: in an order in which they can run; kernels: of each member. outputs: (primitive, port) that others need.
    compiler: such as torch.compile; called with the function.
    """
    inside = set(members)
    order = depth_first(
        {
            index: {source for source, _ in flats[index].inputs if source in inside}
            | {source for source in flats[index].controls if source in inside}
            for index in members
        }
    )
    inputs: dict[tuple[int, int], str] = {}
    for index in order:
        for port in flats[index].inputs:
            if port[0] not in inside:
                inputs.setdefault(port, f"i{len(inputs)}")
    names = dict(inputs)
    last: dict[str, int] = {}
    lines: list[str] = []
    by_line: dict[int, tuple[Flat, list[str]]] = {}
    uses: list[list[str]] = []
    for index in order:
        flat = flats[index]
        given = [names[port] for port in flat.inputs]
        made = [f"v{index}_{port}" for port in range(flat.ports)]
        names.update({(index, port): name for port, name in enumerate(made)})
        target = ", ".join(made) + (" = " if made else "")
        lines.append(f"{target}k{index}({', '.join(given)})")
        by_line[len(lines) - 1] = (flat, given)
        for name in (*given, *made):
            last[name] = len(lines) - 1
        uses.append(list(dict.fromkeys((*given, *made))))
    kept = {names[port] for port in outputs}
    text = [] if compiler else ["def region(inputs):"]
    if compiler:
        text.append(f"def region({', '.join(inputs.values())}):")
    elif inputs:
        text += [f"    {''.join(f'{name}, ' for name in inputs.values())}= inputs", "    inputs.clear()"]
    numbered: dict[int, tuple[Flat, list[str]]] = {}
    for number, line in enumerate(lines):
        text.append(f"    {line}")
        numbered[len(text)] = by_line[number]
        gone = [name for name in uses[number] if last[name] == number and name not in kept]
        if gone:
            text.append(f"    del {', '.join(gone)}")
    text.append(f"    return ({''.join(f'{names[port]}, ' for port in outputs)})")
    file = f"<penstock region {next(_numbers)}>"
    space: dict[str, Any] = {f"k{index}": kernel for index, kernel in zip(members, kernels, strict=True)}
    exec(compile("\n".join(text), file, "exec"), space)
    call = space["region"]
    if compiler:
        compiled = compiler(call)
        call = lambda inputs: compiled(*inputs)  # noqa: E731
    return Region(call, [flats[index] for index in order], numbered, file, list(inputs))
