"""PyTorch's DataLoader with Penstock's threads: its arguments, its order of draws, its batches."""

from __future__ import annotations

import copy
import itertools
import operator
import os
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

import torch
from torch.autograd import profiler
from torch.utils import data
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from penstock.checkpoint.state.generators import random_state, set_random_state
from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.loader import loader
from penstock.loader.asked import NAMES, SampleCode, asked_by
from penstock.loader.config import ITERABLE_WAY_OUT
from penstock.loader.dataset import DRAWS
from penstock.loader.feed import Feed
from penstock.plan.growing import Growing
from penstock.ranks import alone
from penstock.report import print_report
from penstock.torch.loader import TORCH
from penstock.torch.own_loads import OwnLoads
from penstock.units import is_integer

T = TypeVar("T", covariant=True)
_pinned: Callable[[Any, str | None], Any] = pin_memory.pin_memory

#: Of a state, which is opaque to others.
_VERSION = 1
#: Arguments that a DataLoader made like another has of it as they are.
_SAME = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class DataLoader(data.DataLoader[T]):
    """`torch.utils.data.DataLoader` whose batches Penstock makes: its arguments, attributes, order and errors.

    A sampler is asked for as many batches ahead as PyTorch asks it, at the same moments, in the same thread: with the
    same generators it gives the same batches. num_workers=0 loads in the thread of the training.

    Worker processes are started once, when the first batch is asked for, and end with the DataLoader. With
    persistent_workers=False they begin each pass with a new copy of the data set, if it has changed, and call
    worker_init_fn.

    `state_dict` and `load_state_dict` are those of torchdata's StatefulDataLoader: a run resumes in the midst of an
    epoch. The data set is not gone through again for it, the sampler is. A data set's own state is saved with
    num_workers=0; with more, samples are made ahead of the batches handed out, and a warning says that it is not.

    workers: what the num_workers are. "processes"; "threads", which share the data set, start at once and take turns to
        run Python code; "auto": processes, or threads where the data set cannot be copied, which a warning says.
    Raises: as PyTorch's; ConfigError for an IterableDataset, for a path, for multiprocessing_context, for what
        processes cannot have a copy of, and for worker_init_fn with threads.
    """

    #: Under `penstock watch` its waits are in the run, whoever loads.
    records_in_run = True

    def __init__(
        self,
        dataset: data.Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: data.Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: data.Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Literal["auto", "processes", "threads"] = "auto",
    ) -> None:
        _check_dataset(dataset)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        _check_workers(workers, multiprocessing_context, worker_init_fn)
        if num_workers > 0 and _is_stateful(dataset):
            warnings.warn(
                f"{type(dataset).__name__} has state_dict and load_state_dict, and num_workers={num_workers} makes "
                "samples ahead of the batches handed out: the state of this DataLoader leaves that of the data set "
                "out. Take num_workers=0, which saves it, or have __getitem__ ask for rng or epoch, which need none",
                RuntimeWarning,
                stacklevel=2,
            )
        self.workers = workers
        #: Of the latest pass; None before the first.
        self._progress: _Progress | None = None
        #: Of the pass that comes next, if it resumes.
        self._resumes: _Progress | None = None
        #: What the data set loads before the pass that comes next; None for nothing.
        self._dataset_state: Any = None
        #: Passes that have begun, those before a state that was loaded too, and the seed of the first.
        self._passes = 0
        self._seed: int | None = None
        #: What loads, with the pass that it loads for or loaded for last; in the process that made it.
        self._pid = os.getpid()
        self._feeds: list[tuple[weakref.ref[_Ahead], Feed]] = []
        #: What records the passes of num_workers=0, if any; by the process that it is of.
        self._own_loads: dict[int, OwnLoads | None] = {}
        #: Whether the data set asks for `epoch` or `rng`; None before the first pass.
        self._asks: bool | None = None

    @classmethod
    def of(cls, other: data.DataLoader[T], **arguments: Any) -> Self:
        """Return a DataLoader like another, such as one that a trainer has made: over its data set, by its samplers.

        arguments: in place of the other's. Raises: as the constructor.
        """
        names = (*_SAME, *(("workers",) if isinstance(other, cls) else ()))
        same = {name: getattr(other, name) for name in names}
        if other.batch_sampler is None:
            same |= {"batch_size": None, "sampler": other.sampler}
        elif other.batch_size is None or type(other.batch_sampler) is not data.BatchSampler:
            same["batch_sampler"] = other.batch_sampler
        else:
            same |= {"batch_size": other.batch_size, "sampler": other.sampler, "drop_last": other.drop_last}
        return cls(other.dataset, **{**same, **arguments})

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return _InCaller(self) if self.num_workers == 0 else _Ahead(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: threads and processes stay here."""
        return {**self.__dict__, "_feeds": [], "_iterator": None, "_own_loads": {}}

    def _feed_of(self, using: _Ahead, make: Callable[[], Feed]) -> Feed:
        """Return what loads for a pass: of one that is over or was dropped, or else a new one."""
        if (
            self._pid != os.getpid()
        ):  # this process was forked, without threads, and their processes are its parent's
            self._pid, self._feeds = os.getpid(), []
        for number, (pass_, feed) in enumerate(self._feeds):
            latest = pass_()
            if latest is None or latest.is_over:
                self._feeds[number] = _ref_of_pass(using, feed), feed
                feed.renew()
                return feed
        feed = make()
        self._feeds.append((_ref_of_pass(using, feed), feed))
        return feed

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest pass is, for `load_state_dict` of a DataLoader made alike, in any process.

        Batches that a loop was given are consumed; those loaded ahead are not. It holds the states of the generators
        that the sampler may draw from, some 15 KB, as plain values and tensors; and, with num_workers=0, what the data
        set's own `state_dict` returns now.
        """
        state: dict[str, Any] = {}
        if self._progress is not None:
            # What comes after a pass that is over is drawn from the generators as they are now.
            state = self._progress.state(_Draws.of(self) if self._progress.is_over else self._progress.draws)
        elif self._resumes is not None:
            state = self._resumes.state(self._resumes.draws)
        dataset: Any = self.dataset
        own = self._dataset_state
        if own is None and self.num_workers == 0 and _is_stateful(dataset):
            own = copy.deepcopy(dataset.state_dict())
        return state if own is None else {**state, "dataset": own, "penstock_dataloader": _VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass be the rest of the one that a state is of, or the one after it where that was over.

        The sampler draws that pass again, from the generators' states of then; no sample is made for it. The global
        generators are as they were, afterwards, but for what the data set's own `load_state_dict` sets: it is called
        as the pass begins. num_workers may be another.
        Raises: ConfigError if it is no state of a DataLoader.
        """
        if state and state.get("penstock_dataloader") != _VERSION:
            raise ConfigError(
                "this is no state of a penstock.torch.DataLoader: give what state_dict() returned, or {} to begin anew"
            )
        self._iterator = self._progress = None
        self._resumes = _Progress.of_state(state) if "number" in state else None
        self._dataset_state = state.get("dataset")
        if self._resumes is not None and self._resumes.seed != self._seed:
            self._feeds.clear()  # which draw from another seed

    def _load_dataset_state(self) -> None:
        """Have the data set load what a state has of it. Warns where it cannot."""
        own, self._dataset_state = self._dataset_state, None
        dataset: Any = self.dataset
        if own is not None and _is_stateful(dataset):
            dataset.load_state_dict(copy.deepcopy(own))
        elif own is not None:
            warnings.warn(
                f"the state has one of the data set, and {type(dataset).__name__} has no state_dict and "
                "load_state_dict: it is left out",
                RuntimeWarning,
                stacklevel=2,
            )

    @contextmanager
    def _resuming(self, *, with_seed: bool) -> Iterator[tuple[_Progress, _Progress | None]]:
        """Begin a pass: yield what keeps count of it, and what it resumes from.

        with_seed: whether the seed of workers is drawn in the block, too.
        """
        self._load_dataset_state()  # before the generators are noted: it may set them
        resumes, self._resumes = self._resumes, None
        if resumes is None or resumes.is_over:
            number = self._passes if resumes is None else resumes.number + 1
            if resumes is not None:
                self._seed = resumes.seed
                resumes.draws.set_own(self)
            self._passes, self._progress = number + 1, _Progress(number, _Draws.of(self), with_seed)
            yield self._progress, None
            return
        self._passes, self._seed = resumes.number + 1, resumes.seed
        now = _global_state()
        self._progress = progress = _Progress(resumes.number, resumes.draws, resumes.with_seed)
        try:
            resumes.draws.set_all(self)
            yield progress, resumes
        finally:
            set_random_state(now)

    def _have_seed(self, progress: _Progress, drawn: int) -> None:
        """Give a pass the seed of the first one: each pass draws other numbers from it. drawn: for this one."""
        if self._seed is None:
            self._seed = drawn
        progress.seed = self._seed


@dataclass(frozen=True, slots=True)
class _Draws:
    """What a sampler may draw from, as it was at a moment.

    of_samplers: of each sampler that there is, what it has of "generator", "state" and "epoch".
    """

    of_all: dict[str, Any]
    of_samplers: list[dict[str, Any]]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> _Draws:
        """Return the generators' states now."""
        found = []
        for sampler in _samplers_of(loader):
            state: dict[str, Any] = {}
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                state["generator"] = generator.get_state()
            if sampler is not loader and _is_stateful(sampler):
                state["state"] = copy.deepcopy(sampler.state_dict())
            if hasattr(sampler, "set_epoch") and is_integer(epoch := getattr(sampler, "epoch", None)):
                state["epoch"] = int(epoch)
            found.append(state)
        return cls(_global_state(), found)

    def set_own(self, loader: DataLoader[Any]) -> None:
        """Set what the samplers have of their own."""
        for sampler, state in zip(_samplers_of(loader), self.of_samplers, strict=False):
            if "generator" in state and isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.set_state(state["generator"])
            if "state" in state and hasattr(sampler, "load_state_dict"):
                sampler.load_state_dict(copy.deepcopy(state["state"]))
            if "epoch" in state and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(state["epoch"])

    def set_all(self, loader: DataLoader[Any]) -> None:
        """Set the global generators, too."""
        self.set_own(loader)
        set_random_state(self.of_all)


def _check_dataset(dataset: object) -> None:
    """Raise ConfigError for a data set that can only be iterated, and for a path, whose samples are its characters."""
    if isinstance(dataset, str | bytes | os.PathLike):
        raise ConfigError(
            f"dataset is {dataset!r:.200}, a path, whose samples would be its characters: penstock.torch.Loader("
            f"{dataset!r:.200}, ...) reads what is there; a DataLoader takes a data set"
        )
    if isinstance(dataset, data.IterableDataset):
        raise ConfigError(
            f"dataset is of type {type(dataset).__name__}, an IterableDataset, which can only be gone through, and "
            f"Penstock loads samples by their numbers, ahead and in any order: {ITERABLE_WAY_OUT}; or keep PyTorch's "
            "DataLoader for it"
        )


def _check_workers(workers: object, context: object, init: object) -> None:
    if workers not in ("auto", "processes", "threads"):
        raise ConfigError(f'workers is {workers!r}; it is "auto", "processes" or "threads"')
    if context is not None:
        raise ConfigError(
            "multiprocessing_context is given, and the training is never forked for worker processes: leave it out"
        )
    if init is not None and workers == "threads":
        raise ConfigError('worker_init_fn is for worker processes: leave it out, or workers="threads"')


def _is_stateful(what: object) -> bool:
    """Whether a sampler or data set has a state of its own, as torchdata's `Stateful`."""
    return hasattr(what, "state_dict") and hasattr(what, "load_state_dict")


def _global_state() -> dict[str, Any]:
    """Return the states of the global generators that a sampler may draw from, as plain values and tensors."""
    state = random_state()
    state.pop("cuda", None)
    numpy = state["numpy"]
    numpy["state"] = {**numpy["state"], "key": numpy["state"]["key"].tolist()}
    return state


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return a loader, for its generator, and its samplers, those inside others included, each once."""
    found: list[Any] = [loader]
    for each in found:
        for name in ("batch_sampler", "sampler"):
            inner = getattr(each, name, None)
            if inner is not None and not any(inner is other for other in found):
                found.append(inner)
    return found


@dataclass(slots=True)
class _Progress:
    """How far a pass is.

    number: of the pass, 0 for the first: the epoch, as a `Loader` counts. draws: at its beginning.
    with_seed: whether the workers' seed was drawn from them, too. seed: that one.
    batches: that were consumed. digest: of which samples they were. is_over: whether all were.
    """

    number: int
    draws: _Draws
    with_seed: bool
    seed: int = 0
    batches: int = 0
    digest: int = 0
    is_over: bool = False

    def consume(self, index: Any) -> None:
        """Count a batch. index: what the sampler gave for it."""
        self.batches += 1
        self.digest = zlib.crc32(repr(index).encode(), self.digest)

    def pass_by(self, draw: Callable[[], Any], resumes: _Progress) -> None:
        """Draw the batches that were consumed before. Warns if they are others."""
        try:
            for _ in range(resumes.batches):
                self.consume(draw())
        except StopIteration:
            pass
        if (self.batches, self.digest) != (resumes.batches, resumes.digest):
            warnings.warn(
                f"the sampler's first {resumes.batches} batches are not those that were consumed when the state was "
                "made: data set, sampler or batch size are others, or the sampler draws from what the state does not "
                "hold; give it state_dict and load_state_dict",
                RuntimeWarning,
                stacklevel=2,
            )

    def state(self, draws: _Draws) -> dict[str, Any]:
        """Return it as a state that begins with such draws."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "draws": [draws.of_all, draws.of_samplers], "penstock_dataloader": _VERSION}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> _Progress:
        """Return what `state` returned."""
        values = {each.name: state[each.name] for each in fields(cls)}
        return cls(**{**values, "draws": _Draws(*state["draws"])})


def _ref_of_pass(using: _Ahead, feed: Feed) -> weakref.ref[_Ahead]:
    """Return a reference to a pass, whose last step ends where it is dropped."""
    return weakref.ref(using, lambda _: feed.note_end())


def _own_loads_among(found: dict[int, OwnLoads | None], dataset: object) -> OwnLoads | None:
    """Return what records in this process. found: by process, what was found for a data set before."""
    if (me := os.getpid()) not in found:
        found.clear()
        found[me] = OwnLoads.of(dataset)
    return found[me]


class _InCaller(_SingleProcessDataLoaderIter):
    """A pass of num_workers=0: PyTorch's own, counted."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        with loader._resuming(with_seed=True) as (progress, resumes):
            super().__init__(loader)
            self._progress = progress
            loader._have_seed(progress, int(self._base_seed))
            if resumes is not None:
                if not resumes.with_seed:  # of workers that lived longer than a pass
                    resumes.draws.set_all(loader)
                    self._sampler_iter = iter(self._index_sampler)
                progress.pass_by(self._next_index, resumes)
                # What comes next is drawn from the same generators, as far as it is drawn at once.
                first = list(itertools.islice(self._sampler_iter, 1))
                self._sampler_iter = itertools.chain(first, self._sampler_iter)
        self._dataset_fetcher = _fetcher(loader, progress)
        self._own_loads = _own_loads_among(loader._own_loads, loader.dataset)
        if self._own_loads is not None:
            self._samples = _length_of(loader.dataset)
            self._own_loads.begin(self._dataset_fetcher)

    def __next__(self) -> Any:
        if profiler._is_profiler_enabled:
            return super().__next__()
        batch = self._next_data()  # PyTorch marks it for a profiler, 10 us for each batch
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        if self._own_loads is None:
            return self._load(self._draw())
        self._own_loads.ask()
        epoch = self._progress.number
        try:
            index = self._draw()
            self._own_loads.load()
            batch = self._load(index)
        except BaseException:
            self._own_loads.end_in_vain(epoch, self._progress.batches - 1)
            raise
        ids = _ids_of(index, self._samples, is_list=self._auto_collation)
        self._own_loads.end(self, epoch, self._progress.batches - 1, ids)
        return batch

    def _draw(self) -> Any:
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            self._progress.is_over = True
            raise
        self._progress.consume(index)
        return index

    def _load(self, index: Any) -> Any:
        batch = self._dataset_fetcher.fetch(index)
        return _pinned(batch, self._pin_memory_device) if self._pin_memory else batch


class _Asking:
    """A data set that asks for `rng` or `epoch`, as PyTorch's code can call it."""

    def __init__(self, dataset: Any, progress: _Progress) -> None:
        self._get, self._epoch = SampleCode(dataset.__getitem__, progress.seed, DRAWS), progress.number

    def __getitem__(self, index: int) -> Any:
        return self._get(index, self._epoch, index)


class _Ahead(_BaseDataLoaderIter):
    """A pass whose batches threads load ahead; or, of persistent workers, all passes one after the other."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        #: No circle: a DataLoader has the iterator of its persistent workers.
        self._keeps = None if loader.persistent_workers else loader
        self._ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._samples = _length_of(loader.dataset)
        self._has_warned = False
        #: What records batches that are loaded in the thread of the training, by the process that it is of.
        self._all_own_loads = loader._own_loads
        with loader._resuming(with_seed=True) as (progress, resumes):
            self._progress = progress
            super().__init__(loader)
            loader._have_seed(progress, int(self._base_seed))
            if resumes is not None and not resumes.with_seed:
                resumes.draws.set_all(loader)
            self._feed = loader._feed_of(
                self,
                lambda: Feed(
                    partial(_new_loader, weakref.proxy(loader), progress.seed, self._pinning()),
                    self._samples,
                    most=loader.batch_size if self._auto_collation else 1,
                    ahead=self._ahead,
                ),
            )
            self._begin(loader, progress, resumes)

    @property
    def is_over(self) -> bool:
        """Whether all batches were handed out."""
        return self._progress.is_over

    def _pinning(self) -> tuple[str, int] | None:
        """Return the device that batches are pinned for, which is the current one now."""
        if not self._pin_memory or self._pin_memory_device is None:
            return None
        return self._pin_memory_device, torch.accelerator.current_device_index()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next pass of persistent workers."""
        with loader._resuming(with_seed=False) as (progress, _):
            loader._have_seed(progress, int(self._base_seed))
            self._begin(loader, progress, None)

    def _begin(self, loader: DataLoader[Any], progress: _Progress, resumes: _Progress | None) -> None:
        super()._reset(loader)
        self._progress, self._steps = progress, 0
        self._dataset_fetcher = _fetcher(loader, progress)
        #: Of this pass, once such a batch came.
        self._own_loads: OwnLoads | None = None
        #: What was drawn and not handed out: its place, and what the sampler gave.
        self._drawn: deque[tuple[tuple[int, int], Any]] = deque()
        self._feed.forget_before((progress.number, 0))
        if resumes is not None:
            progress.pass_by(self._next_index, resumes)
        for _ in range(self._ahead):
            self._draw()
        self._feed.start()

    def _draw(self) -> None:
        """Draw one batch more, if the sampler has any, and have it loaded."""
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        place = self._progress.number, self._steps
        self._steps += 1
        self._drawn.append((place, index))
        if (ids := self._numbers_of(index)) is not None:
            self._feed.ask(place, ids)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the sampler gives {index!r:.80}, and threads load samples by integers from 0 to the length of the "
                f"data set ({self._samples:,}): such batches are loaded in the thread of the training",
                RuntimeWarning,
                stacklevel=4,
            )

    def _next_data(self) -> Any:
        if self._own_loads is not None:
            self._own_loads.ask()
        if not self._drawn:
            self._progress.is_over = True
            self._feed.end_step()
            if self._own_loads is not None:
                self._own_loads.end_in_vain(self._progress.number, self._progress.batches - 1)
            raise StopIteration
        place, index = self._drawn[0]
        batch, error = self._loaded(place, index)
        self._drawn.popleft()
        self._progress.consume(index)
        self._draw()
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # whose traceback refers to this frame

    def _loaded(self, place: tuple[int, int], index: Any) -> tuple[Any, Exception | None]:
        """Return a batch, or why it cannot be had."""
        if self._numbers_of(index) is None:
            return self._loaded_here(place, index)
        try:
            made, reason = self._feed.take(place)
        except WaitTimeout as error:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from error
        except Exception as error:  # that no sample is to blame for
            self._feed.close()
            if isinstance(error, DataError):
                raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from error
            raise
        if reason is not None:
            return None, reason
        batch, is_pinned = made
        if self._pin_memory and not is_pinned:
            batch = _pinned(batch, self._pin_memory_device)
        return batch, None

    def _loaded_here(self, place: tuple[int, int], index: Any) -> tuple[Any, Exception | None]:
        """Return a batch that the thread of the training loads, or why it cannot be had."""
        self._feed.end_step()
        if self._own_loads is None:
            self._own_loads = _own_loads_among(self._all_own_loads, self._dataset)
            if self._own_loads is not None:
                self._own_loads.begin(self._dataset_fetcher)
                self._own_loads.ask()
        own = self._own_loads
        if own is not None:
            own.load()
        try:
            batch = self._dataset_fetcher.fetch(index)
        except Exception as error:
            if own is not None:
                own.end_in_vain(*place)
            return None, error
        if own is not None:
            own.end(self, *place, None)
        return batch, None

    def _numbers_of(self, index: Any) -> list[int] | None:
        return _ids_of(index, self._samples, is_list=self._auto_collation)


def _ids_of(index: Any, samples: int, *, is_list: bool) -> list[int] | None:
    """Return the samples of a batch; None for other keys than 0 to the length.

    index: what the sampler gave. is_list: whether that is a batch, or one sample.
    """
    try:
        ids = list(map(operator.index, index if is_list else [index]))
    except TypeError:
        return None
    return ids if ids and 0 <= min(ids) <= max(ids) < samples else None


def _asks(dataset: Any) -> bool:
    """Whether a data set asks for the epoch or a generator, see `penstock.loader.asked`."""
    return bool(asked_by(dataset.__getitem__).intersection(NAMES))


def _fetcher(loader: DataLoader[Any], progress: _Progress) -> Any:
    """Return PyTorch's own code that makes a batch, for the thread of the training."""
    if loader._asks is None:
        loader._asks = _asks(loader.dataset)
    dataset = _Asking(loader.dataset, progress) if loader._asks else loader.dataset
    return _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
        _DatasetKind.Map, dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )


def _new_loader(
    of: DataLoader[Any], seed: int, pinning: tuple[str, int] | None, order: Growing
) -> loader.Loader:
    """Return a loader of a DataLoader's batches in an order."""
    source: Any = of.dataset
    init = of.worker_init_fn
    collate = _Collate(of.collate_fn, of._auto_collation)
    if of._auto_collation and getattr(source, "__getitems__", None) and not _asks(source):
        source = _Numbers(source)
        collate = _CollateLists(of.collate_fn, True, numbers=source)
        init = partial(_begin_worker, init)
    elif isinstance(source, (list, tuple, Mapping)):
        source, init = _Wrapped(source), partial(_begin_worker, init)

    def make(collate: _Collate, **arguments: Any) -> loader.Loader:
        return loader.Loader(
            source,
            front_end=TORCH,
            ranks=alone,
            report=_report_waits,
            batch_sampler=order,
            epochs=None,
            collate_fn=collate,
            seed=seed,
            rank=0,
            world_size=1,
            timeout_seconds=of.timeout or None,
            **arguments,
        )

    if of.workers != "threads":
        try:
            made = make(collate, workers=of.num_workers, worker_init_fn=init)
            assert made._parts.processes is not None, "they were asked for"
            reason = made._parts.processes.repeats_script
            if of.workers == "processes" or not reason:
                return made
            made.close()
        except ConfigError as error:
            if of.workers == "processes" or of.worker_init_fn is not None:
                raise
            reason = str(error)
        warnings.warn(
            f"{of.num_workers} threads load in place of worker processes, and share the data set: {reason}",
            RuntimeWarning,
            stacklevel=7,
        )
    return make(replace(collate, device=pinning), workers="threads", decoders=of.num_workers)


def _begin_worker(init: Callable[[int], None] | None, number: int) -> None:
    """Have a worker process say which data set it has, and begin. init: worker_init_fn."""
    info: Any = data.get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.values)  # it is frozen
    if init is not None:
        init(number)


def _report_waits(line: str) -> None:
    """Report who waits for what, and nothing else: a DataLoader is silent."""
    if "waits" in line:
        print_report(line)


def _length_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


class _Wrapped:
    """Values by their numbers, of a list, a range or a mapping: a loader would take them for something else."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


class _Numbers(_Wrapped):
    """The numbers of a data set's samples."""

    def __getitem__(self, index: int) -> Any:
        return index


@dataclass(frozen=True)
class _Collate:
    """What workers make of the samples of a batch: it, and whether it is pinned.

    is_batch: False where a batch is one sample. device: to pin for, in a thread of the training's process.
    """

    function: Callable[[Any], Any]
    is_batch: bool
    device: tuple[str, int] | None = None

    def __call__(self, samples: list[Any]) -> tuple[Any, bool]:
        made = self.function(samples if self.is_batch else samples[0])
        if self.device is None:
            return made, False
        kind, number = self.device
        torch.accelerator.set_device_index(number)
        return _pinned(made, kind), True


@dataclass(frozen=True)
class _CollateLists(_Collate):
    """What workers make of sample numbers, for a data set whose `__getitems__` makes whole batches as it likes."""

    numbers: Any = None

    def __call__(self, samples: list[Any]) -> tuple[Any, bool]:
        return super().__call__(self.numbers.values.__getitems__(samples))
