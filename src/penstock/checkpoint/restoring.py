"""Gives back the state of a snapshot, from whichever of its copies is good."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from penstock.checkpoint.files.catalog import (
    Catalog,
    Link,
    Removed,
    looking_again,
    open_links,
    read_first,
    step_of_fault,
)
from penstock.checkpoint.files.fast_folders import describe_newer_on_fast, look_and_choose
from penstock.checkpoint.files.reading import Chain, Wanted, parts_by_name, read_wanted, tree_of, tree_of_rank
from penstock.checkpoint.inspecting import can_be_opened
from penstock.checkpoint.state.tree import ArrayLeaf, Framework, Tree, numpy_dtype, select
from penstock.checkpoint.state.unflatten import Loading, plan_loading, plan_loading_into
from penstock.errors import ConfigError, DataError, FormatError
from penstock.flow.ordered import Workers
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.ranks import Ranks
from penstock.trace.schema import Kind
from penstock.units import format_count, format_names

T = TypeVar("T")

#: In place of a span.
_UNRECORDED: AbstractContextManager[Callable[[int], None]] = nullcontext(lambda _: None)


@dataclass(eq=False, repr=False)
class Restored(Mapping[str, Any]):
    """A state that was restored: the mapping that was saved, or that was loaded into.

    step: of the snapshot. not_loaded: names of values that it has and that were not asked for, or had no place in what
    was loaded into. not_found: names of values of what was loaded into that it does not have; they are unchanged.
    replaced: names of values of what was loaded into that are others now, put into its mappings and lists: where these
    were made by `state_dict()`, they have to be passed on to `load_state_dict`. Arrays are overwritten and not named.
    per_rank: what this rank saved for itself; None if it saved nothing, or another number of ranks saved.
    """

    step: int
    state: Any
    not_loaded: tuple[str, ...]
    not_found: tuple[str, ...]
    per_rank: Any = None
    replaced: tuple[str, ...] = field(default=(), kw_only=True)

    def report_lines(self) -> list[str]:
        """Return what to say of a state that was loaded into another one, which did not take it as it is."""
        lines = []
        parts = []
        if self.not_loaded:
            parts.append(
                f"{_counted(self.not_loaded, 'of the snapshot')} not loaded: {_some(self.not_loaded)}"
            )
        if self.not_found:
            parts.append(f"{_counted(self.not_found, 'of `into`')} not found in it: {_some(self.not_found)}")
        if parts:
            lines.append("; ".join(parts))
        if self.replaced:
            lines.append(
                f"{_counted(self.replaced, 'of `into`')} replaced there: {_some(self.replaced)}; pass what came from "
                "state_dict() on to load_state_dict()"
            )
        return lines

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)

    def __repr__(self) -> str:
        """Return the step and the names of the parts."""
        lost = [f"{len(self.not_loaded)} not loaded"] if self.not_loaded else []
        lost += [f"{len(self.not_found)} not found"] if self.not_found else []
        more = f"; {', '.join(lost)}" if lost else ""
        # A state that DCP saved under the keys 0, 1, ... is a list.
        is_mapping = isinstance(self.state, Mapping)
        parts = ", ".join(map(str, self.state)) if is_mapping else type(self.state).__name__
        return f"<Restored step {self.step}: {parts}{more}>"


class Restorer:
    """Restores the snapshots of one store, on all ranks of a job alike. Used by one thread."""

    def __init__(
        self,
        catalog: Catalog,
        ranks: Ranks,
        threads: int,
        spans: SnapshotSpans,
        report: Callable[[str], None],
    ) -> None:
        """threads: that decode. report: called with a line on what a restore skips or does not load."""
        self._catalog = catalog
        self._ranks = ranks
        self._threads = threads
        self._spans = spans
        self._report = report

    def look(self) -> None:
        """Look at the tiers anew, and report a fast one that has newer snapshots. Raises: DataError."""
        self._catalog.look()
        if newer := describe_newer_on_fast(self._catalog):
            self._report(newer)

    def choose(self, step: int | None, *, is_again: bool = False) -> int:
        """Look, and return the step of a snapshot that is there. Raises: ConfigError; DataError.

        step: None: the one that was saved last. is_again: whether it was there at the look before.
        """
        return self._candidates(step, fallback=False, is_again=is_again)[0]

    def restore(
        self,
        step: int | None,
        into: Any,
        only: Iterable[str] | None,
        framework: Framework | None,
        *,
        fallback: bool,
        strict: bool,
        before_looking: Callable[[], None],
    ) -> Restored:
        """Restore a snapshot; all ranks call it. See `SnapshotStore.restore`.

        only: can be gone through more than once, as what `checked_only` returns: it is asked for each candidate anew.
        before_looking: is called on rank 0; what it raises is raised on all.
        """

        def attempt(is_again: bool) -> Restored:
            def choose() -> list[int]:
                before_looking()
                return self._candidates(step, fallback=fallback, is_again=is_again)

            # Ranks that ask for different steps are not at the same place.
            what = "the choice of a snapshot" if step is None else f"the restore of step {step}"
            return self._restore_first(self._ranks.on_rank_zero(what, choose), load, fallback=fallback)

        def load(chain: Chain) -> Restored:
            return self._load(chain, into, only, framework, strict)

        return looking_again(attempt)

    def _candidates(self, step: int | None, *, fallback: bool, is_again: bool) -> list[int]:
        """Return the steps to try, on rank 0, which alone looks: others may be shown what was there a while ago."""
        step = look_and_choose(self._catalog, step, self._report, was_there=is_again)
        steps = self._catalog.steps()
        return [step, *(reversed(steps[: steps.index(step)]) if fallback else ())]

    def _restore_first(
        self, candidates: Sequence[int], load: Callable[[Chain], Restored], *, fallback: bool
    ) -> Restored:
        """Return the first of some snapshots that can be restored. Raises: `Removed`; what is wrong with the last."""
        for candidate in candidates:
            try:
                restored = self.read(self.chains(candidate), load)
            except Removed:
                raise
            except (FormatError, DataError) as error:
                if isinstance(error, FormatError):
                    self._catalog.mark_damaged(candidate)
                if candidate == candidates[-1]:
                    advice = "" if fallback else self._advice(candidate, error)
                    if not advice:
                        raise
                    raise type(error)(f"{error}; {advice}") from error
                self._report(f"step {candidate} is not restored: {error}")
            else:
                for line in restored.report_lines():
                    self._report(f"step {candidate}: {line}")
                return restored
        raise AssertionError("the last candidate returns or raises")

    def _advice(self, step: int, error: FormatError | DataError) -> str:
        """Return what to do where a snapshot cannot be restored, or ""."""

        def on_first() -> int | None:
            steps = self._catalog.steps()
            fault_step = step_of_fault(error, steps, step)
            for older in reversed(steps[: steps.index(step)]):
                if can_be_opened(self._catalog, older) and any(
                    fault_step not in (link.step for link in links) for links in self._catalog.chains(older)
                ):
                    return older
            return None

        older = self._ranks.on_rank_zero("the choice of another snapshot", on_first)
        return (
            "" if older is None else f"step {older} is the newest intact one: restore(fallback=True) takes it"
        )

    def chains(self, step: int) -> list[list[Link]]:
        """Return how a snapshot can be read, as rank 0 saw when it looked last; all ranks call it.

        Raises: `Removed`; FormatError or DataError if there is no restore chain: why not.
        """
        chains = self._ranks.on_rank_zero(f"the restore of step {step}", lambda: self._chains(step))
        if not chains:
            raise Removed(f"the snapshot of step {step} was removed meanwhile")
        return [[Link(*link) for link in links] for links in chains]

    def read(
        self, chains: Sequence[Sequence[Link]], load: Callable[[Chain], T], *, is_state: bool = True
    ) -> T:
        """Return what a function returns on the first restore chain on which it succeeds on all ranks. All call it.

        is_state: whether it reads the state, which is recorded as a load; False: only what it is made of.
        Raises: `Removed`; FormatError or DataError: what is wrong with the last chain; what else `load` raises.
        """
        step = chains[0][-1].step
        what = f"the restore of step {step}"
        loaded: list[T] = []

        def open_and_load(links: Sequence[Link]) -> None:
            span = self._spans.span(Kind.LOAD, step, links[-1].tier) if is_state else _UNRECORDED
            with span as count, closing(open_links(self._catalog, links)) as chain:
                count(sum(link.manifest.stored_bytes for link in chain.links))
                loaded.append(load(chain))

        def read(links: Sequence[Link]) -> T:
            self._ranks.gather_then_decide(what, partial(open_and_load, links))
            return loaded[-1]

        def was_removed(links: Sequence[Link]) -> bool:
            return bool(self._ranks.on_rank_zero(what, partial(self._catalog.was_removed, links)))

        return read_first(chains, read, was_removed, self._report)

    def _chains(self, step: int) -> list[list[Link]]:
        """Return `Catalog.chains`, and report copies that are on none of them; none if they are there no more."""
        copies = self._catalog.copies(step)
        if not copies:
            return []
        chains = self._catalog.chains(step)
        for copy in copies:
            if copy.fault is not None:
                self._report(f"step {step} is read from another copy: {copy.fault}")
        if other := self._catalog.describe_other_versions(step):
            self._report(other)
        return chains

    def _load(
        self, chain: Chain, into: Any, only: Iterable[str] | None, framework: Framework | None, strict: bool
    ) -> Restored:
        manifest = chain.manifest
        by_name = parts_by_name(manifest)
        tree = tree_of(manifest, by_name)
        loading = (
            plan_loading(tree, only=only, framework=framework)
            if into is None
            else plan_loading_into(into, tree, only=only, in_parts=True)
        )
        if into is not None and loading.fits_nothing:
            raise ConfigError(
                f"nothing in `into` is in the snapshot of step {manifest.step}: that has "
                f"{_some(loading.not_loaded)}, and `into` has {_some(loading.not_found)}"
            )
        if strict and (loading.not_loaded or loading.not_found):
            raise ConfigError(_describe_mismatch(manifest.step, loading))
        if framework == "numpy":
            _check_numpy(tree, only)
        own: Loading | None = None
        if len(manifest.rank_trees) == self._ranks.size:
            own_tree = tree_of_rank(manifest, self._ranks.rank, tree)
            own = None if own_tree is None else plan_loading(own_tree, framework=framework)
        destinations = {
            destination.layout.name: destination
            for destination in (*loading.destinations, *(own.destinations if own else ()))
        }
        with Workers(self._threads, f"penstock-decode-{manifest.step}") as workers:
            wanted = (
                Wanted(destination.layout, by_name[name], destination.memory)
                for name, destination in destinations.items()
            )
            for done in read_wanted(chain, wanted, workers):
                destinations[done.layout.name].finish()
        per_rank = own.state()[f"rank {self._ranks.rank}"] if own else None
        state = loading.state()
        of_names = loading.not_loaded, loading.not_found
        return Restored(manifest.step, state, *of_names, per_rank, replaced=tuple(loading.replaced))


def _check_numpy(tree: Tree, only: Iterable[str] | None) -> None:
    """Raise ConfigError naming a tensor of a type that NumPy lacks: as integers it would be taken for numbers."""
    chosen = None if only is None else select(tree.names, only)
    for leaf in tree.leaves:
        if isinstance(leaf, ArrayLeaf) and (chosen is None or leaf.name in chosen):
            dtype = leaf.view.dtype
            if leaf.quantizer is not None:
                raise ConfigError(
                    f"{leaf.name} is a quantised tensor of {leaf.type_name}, which NumPy has not: ask for "
                    'framework="torch"'
                )
            if not hasattr(np, dtype.name) and numpy_dtype(dtype).kind == "u":
                raise ConfigError(
                    f"{leaf.name or 'the state'} is of {dtype.name}, which NumPy has not: install ml_dtypes "
                    '(pip install ml_dtypes), or ask for framework="torch"'
                )


def _describe_mismatch(step: int, loading: Loading) -> str:
    """Return which names only `into` or only the snapshot has."""
    differences = []
    if loading.not_found:
        differences.append(f"missing in the snapshot: {_some(loading.not_found)}")
    if loading.not_loaded:
        differences.append(f"unexpected in the snapshot: {_some(loading.not_loaded)}")
    return (
        f"`into` and the snapshot of step {step} differ in their names: {'; '.join(differences)}. Nothing was changed. "
        "An optimizer has no state before its first step: restore() without `into` and give it the result by "
        "load_state_dict. Else name what to restore, such as only=['model/*'], or give strict=False, which leaves out "
        "what only one of them has"
    )


def _some(names: Sequence[str]) -> str:
    return format_names((name or "the state" for name in names), 5, none="nothing")


def _counted(names: Sequence[str], where: str) -> str:
    return f"{format_count(len(names), 'value')} {where} {'were' if len(names) > 1 else 'was'}"
