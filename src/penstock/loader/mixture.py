"""Mixtures as users make them: of folders, sources, or map-style data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.loader.asked import AskedDataset, listed
from penstock.loader.dataset import MapDataset
from penstock.loader.source_samples import below, describe_sample, kind_of
from penstock.plan.mixing import AtEnd, Weights
from penstock.store import MixedSource, Source, open_source
from penstock.store.mixing import Mixed


class MixedDataset(Mixed):
    """Several map-style data sets end to end, from which a loader draws by turns; made by `mix`.

    Samples are those of the data sets, as `torch.utils.data.ConcatDataset` numbers them. `epoch` and `rng` are handed
    to those that ask for them; a generator belongs to the number in the mixture.
    """

    def __init__(self, sources: Sequence[MapDataset], weights: Weights, at_end: AtEnd) -> None:
        super().__init__(sources, weights, at_end)
        self._asked = list(map(AskedDataset, self.sources))
        self._asks = frozenset[str]().union(*(each.asks for each in self._asked))

    def __repr__(self) -> str:
        return f"MixedDataset of {', '.join(map(kind_of, self.sources))}"

    def describe(self, sample: int) -> str:
        """Name a sample, and the data set that it is of."""
        number, own = self.place_of(sample)
        return f"{describe_sample(self.sources[number], own)}, of source {number}"

    @property
    def __getitem__(self) -> Callable[..., Any]:
        """A function of a sample's number, and of what the data sets ask for by name."""
        return _Item(self._item, self._asks)

    def _item(self, index: int, **given: Any) -> Any:
        number, own = self.place_of(index + len(self) if index < 0 else index)
        return self._asked[number].one(own, given)

    @property
    def __getitems__(self) -> Callable[..., Any]:
        """The same for a list of samples, where one of the data sets has it for its own."""
        if not any(hasattr(source, "__getitems__") for source in self.sources):
            raise AttributeError("none of the data sets of this mixture has __getitems__")
        return _Item(self._items, listed(self._asks))

    def _items(self, samples: list[int], **given: Any) -> list[Any]:
        found: list[Any] = [None] * len(samples)
        rngs = given.get("rngs")
        for number, members, own in self.by_source(np.asarray(samples, np.int64)):
            if rngs is not None:
                given["rngs"] = [rngs[member] for member in members.tolist()]
            values = self._asked[number].several(own.tolist(), given)
            for member, value in zip(members.tolist(), values, strict=True):
                found[member] = value
        return found


class _Item:
    """A function with a signature that names what it asks for."""

    def __init__(self, function: Callable[..., Any], asks: frozenset[str]) -> None:
        self._function, self.__signature__ = function, _signature(asks)

    def __call__(self, sample: Any, **given: Any) -> Any:
        return self._function(sample, **given)


@cache  # of few sets of names: one is made for each sample that is asked for by itself
def _signature(asks: frozenset[str]) -> Signature:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    # Each data set says itself what it cannot do without.
    asked = [Parameter(name, kind, default=None) for name in sorted(asks)]
    return Signature([Parameter("sample", kind), *asked])


def mix(
    sources: Sequence[str | os.PathLike[str] | Source | MapDataset], weights: Weights, *, at_end: AtEnd
) -> MixedSource | MixedDataset:
    """Return several sources as one, from which a loader draws by turns, in exact proportions.

    sources: paths (see `penstock.open_source`) and `Source`s; or map-style data sets.
    weights: a number for each, whose proportions count: [3, 1] takes three samples of the first source for one of the
        second. Or a schedule over the steps of the run: [(0, [3, 1]), (10_000, [1, 1])]; `LinearWeights` of such rows
        changes shares linearly from one to the next.
    at_end: what happens when a source has given all of its samples: "stop" ends the epoch before any of them would
        repeat ("first_exhausted" of datasets' `interleave_datasets`); "repeat" continues until all were read, and
        begins shorter ones anew ("all_exhausted"); "drop" leaves out those that were read
        ("all_exhausted_without_replacement").

    See `penstock.plan.Mixture` for the order, and for what an epoch has of each source.
    Raises: ConfigError naming what cannot be mixed, or weights that cannot work.
    """
    if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Sequence) or not sources:
        raise ConfigError(f"sources is {sources!r:.80}; it is a list of folders, sources or data sets")
    opened: list[Any] = [
        open_source(each) if isinstance(each, (str, os.PathLike)) else each for each in sources
    ]
    is_source = [isinstance(each, Source) for each in opened]
    for number, source in enumerate(opened):
        if is_source[number] != is_source[0]:
            raise ConfigError(
                f"source {number} of the mixture, {kind_of(source)}, is {_KINDS[is_source[number]]}, and source "
                f"0, {kind_of(opened[0])}, is {_KINDS[is_source[0]]}: mix sources with sources, data sets with "
                "data sets"
            )
        if not is_source[number] and not all(hasattr(source, name) for name in ("__len__", "__getitem__")):
            raise ConfigError(
                f"source {number} of the mixture is {source!r:.80}; it is a folder, a Source, or a data set with a "
                "length and samples by number"
            )
        if isinstance(below(source), Mixed):
            raise ConfigError(
                f"source {number} of the mixture, {kind_of(source)}, is a mixture itself, whose weights would be lost: "
                "mix all sources at once, with the products of the weights"
            )
    return MixedSource(opened, weights, at_end) if is_source[0] else MixedDataset(opened, weights, at_end)


_KINDS = {True: "a source of bytes", False: "a data set"}
