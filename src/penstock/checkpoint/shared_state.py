"""The state that all ranks save together: taken apart, each tensor once, and which rank writes which."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import xxhash

from penstock.checkpoint.arguments import taken_apart
from penstock.checkpoint.files.manifest import read_layout, write_layout
from penstock.checkpoint.state.flatten import Flat, Source, flatten
from penstock.checkpoint.state.replicas import describe_differing, differing_floats, digest_of, digests_of
from penstock.checkpoint.state.sharding import Assignment, assign, check_whole
from penstock.checkpoint.state.tensors import Layout
from penstock.errors import ConfigError
from penstock.ranks import Ranks


class SharedState:
    """Takes states apart, save after save, on all ranks alike."""

    def __init__(self, ranks: Ranks, report: Callable[[str], None]) -> None:
        """report: is called with a line where floats differ between ranks."""
        self._ranks = ranks
        self._report = report
        #: The last report.
        self._differing = ""
        #: When the ranks last agreed: a digest of each rank's layouts, and who writes what.
        self._agreed: tuple[list[str], tuple[Assignment, ...]] | None = None

    def take(
        self, step: int, state: Any, per_rank: Any, before: Callable[[], None] | None
    ) -> tuple[Flat, Flat | None, list[Layout], list[Source]]:
        """Return the state, what this rank has for itself, the tensors of all ranks, and those that this one writes.

        before: is called on every rank, if it is anything; what it raises on any is raised on all.
        Raises: on all ranks, ConfigError naming what is not kept, or differs between them.
        """
        if self._ranks.size == 1:
            if before is not None:
                before()
            own = None if per_rank is None else flatten({"rank 0": per_rank}, with_state_dicts=True)
            flat = taken_apart(state)
            sources = [*flat.sources, *own.sources] if own else flat.sources
            layouts = list(map(attrgetter("layout"), sources))
            check_whole(layouts)
            return flat, own, layouts, sources
        taken: list[tuple[Flat, Flat | None]] = []

        def take_apart() -> list[str]:
            if before is not None:
                before()
            named = {f"rank {self._ranks.rank}": per_rank}
            own = None if per_rank is None else flatten(named, with_state_dicts=True)
            taken.append((taken_apart(state), own))
            rows = json.dumps(_rows(*taken[0]))
            return [xxhash.xxh3_128_hexdigest(rows.encode()), digest_of(taken[0][0])]

        digests = self._ranks.gather_then_decide(f"the state of step {step}", take_apart)
        flat, own = taken[0]
        # What differs in its layout is reported first.
        layouts, mine = self._assigned(flat, own, step, [of_layouts for of_layouts, _ in digests])
        if len({of_values for _, of_values in digests}) > 1:
            differing = self._compare(step, flat)
            # As DDP broadcasts them at the next step: those of rank 0.
            of_first = frozenset(layout for layout in layouts if layout.name in differing)
            mine = mine | of_first if self._ranks.rank == 0 else mine - of_first
        held = [*flat.sources, *(own.sources if own else [])]
        return flat, own, layouts, [source for source in held if source.layout in mine]

    def _compare(self, step: int, flat: Flat) -> list[str]:
        """Return the names of floats that differ between ranks, and report them.

        Raises: ConfigError naming what else differs.
        """
        floats = differing_floats(self._ranks.all_gather(f"the values of step {step}", digests_of(flat)))
        line = describe_differing(floats)
        if line and line != self._differing:
            self._report(f"step {step}: {line}")
        self._differing = line
        return floats

    def _assigned(
        self, flat: Flat, own: Flat | None, step: int, digests: Sequence[str]
    ) -> tuple[list[Layout], frozenset[Layout]]:
        """Return the tensors of all ranks, each once, and those that this rank writes."""
        # Digests come with every save, for one rank's model may have changed; spelled out only where it has.
        if self._agreed is None or self._agreed[0] != digests:
            of_ranks = self._ranks.all_gather(f"the layouts of step {step}", _rows(flat, own))
            known = {row[0] for row in of_ranks[0][0]}
            for rank, (same, _) in enumerate(of_ranks):
                unknown = [row[0] for row in same if row[0] not in known]
                if unknown:
                    raise ConfigError(
                        f"rank {rank} has {unknown[0]}, which rank 0 has not: a state has the same names on all ranks; "
                        "give what a rank has for itself as per_rank"
                    )
            held_by = [[read_layout(row) for row in [*same, *own_rows]] for same, own_rows in of_ranks]
            self._agreed = list(digests), assign(held_by)
        assigned = self._agreed[1]
        mine = frozenset(one.layout for one in assigned if one.writer == self._ranks.rank)
        return [one.layout for one in assigned], mine


def _rows(flat: Flat, own: Flat | None) -> list[Any]:
    """Return the layouts of what all ranks save and of what this one has for itself, as JSON."""
    return [[write_layout(layout) for layout in each.layouts] if each else [] for each in (flat, own)]
