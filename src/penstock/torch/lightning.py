"""Lightning's checkpoints as snapshots: `ModelCheckpoint` says when and which stay, `fit(ckpt_path=...)` resumes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_leaves

from penstock.checkpoint.preemption import StopOnSignal
from penstock.checkpoint.saving import Saving, outcome_of
from penstock.checkpoint.state.flatten import flatten
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers.durable import whole_file
from penstock.errors import ConfigError
from penstock.torch.loader import Loader
from penstock.torch.rng_state import random_states, set_own_random_state

_KIND = "a snapshot of Penstock"
_MOST_NAME_BYTES = 1 << 16
#: What the states of loaders are called in a checkpoint.
_LOADERS = "penstock_loaders"
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class SnapshotIO(CheckpointIO):
    """Keeps what Lightning saves in a snapshot store.

        store = SnapshotStore("runs/a", keep=Keep(last=None), ranks=alone)
        trainer = Trainer(
            plugins=[SnapshotIO(store)],
            callbacks=[ModelCheckpoint(every_n_train_steps=100, save_last=True), RandomState()],
        )
        trainer.fit(module, ckpt_path="last")

    At the path that Lightning gives, a small file names the snapshot, which is that of the global step; it appears once
    the snapshot is durable. When Lightning removes the file, the snapshot goes too, as soon as no other one is stored
    as a difference to it; so the store itself keeps all. Of one step there is one snapshot, whatever the number of its
    names. Checkpoints of Lightning's own are loaded as ever.

    Hyperparameters that a snapshot does not hold are left out, with a warning that names them; anything else that it
    does not hold is an error that names it. Training is one process, or several with equal states (DDP), of which rank
    0 saves: so the store is opened with `ranks=penstock.checkpoint.alone`. It is closed by whoever opened it.

    Raises: ConfigError if the store is one of several ranks.
    """

    def __init__(self, store: SnapshotStore) -> None:
        if not isinstance(store, SnapshotStore):
            raise ConfigError(f'store is {store!r:.80}; it is a SnapshotStore: give SnapshotStore("runs/a")')
        if not store.is_alone:
            raise ConfigError(
                "Lightning saves on rank 0 alone, and the store would wait for all ranks: open it with ranks=alone"
            )
        self._store = store
        self._others = TorchCheckpointIO()
        #: The latest snapshot.
        self._latest: _Named | None = None
        #: Steps whose last name was removed.
        self._nameless: set[int] = set()
        #: Steps one of whose names another snapshot gets, once it is durable.
        self._replaced: set[int] = set()
        #: Where names are, as far as this run or the one that it resumes knows.
        self._folders: set[Path] = set()
        #: Whether a checkpoint was loaded since the last save, so that steps may come that were saved before.
        self._may_have_gone_back = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Begin to save. Raises: ConfigError, DataError, and what the save before failed with."""
        if storage_options is not None:
            raise ConfigError("storage_options are not used here: they belong to the store's own address")
        name = _local(path)
        step = int(checkpoint["global_step"])
        if self._latest is None or step != self._latest.saving.step:
            self._settle()
            if self._may_have_gone_back:
                self._leave_behind(step)
                self._may_have_gone_back = False
            self._latest = _Named(self._store.save(step, _without_foreign(checkpoint)), self._folders)
        self._folders.add(name.parent.resolve())
        with contextlib.suppress(FileNotFoundError):
            if (replaced := _step_named_by(name)) not in (None, step):  # such as last.ckpt, again and again
                self._replaced.add(replaced)
        self._latest.add(name)
        self._nameless.discard(step)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what was saved under a name; tensors are on the CPU. Raises: FileNotFoundError, and as `restore`."""
        self._settle()
        step = _step_named_by(path)
        if step is None:
            return self._others.load_checkpoint(path, map_location, weights_only)  # type: ignore[arg-type]
        state: dict[str, Any] = self._store.restore(step).state
        self._folders |= _folders_named_in(Path(path))
        # Or a test of an earlier checkpoint, after which the training continues where it was: the next save shows it.
        self._may_have_gone_back = True
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a name, if there is one, and the snapshot as soon as possible if it was the last of its names."""
        name = Path(path)
        if self._latest is not None and self._latest.remove(name):
            step: int | None = self._latest.saving.step
        else:
            try:
                step = _step_named_by(path)
            except FileNotFoundError:  # a run that was killed had removed it, and this one began before that
                return
            if step is None:
                self._others.remove_checkpoint(name)
                return
            self._folders |= _folders_named_in(name)
            name.unlink()
        self._folders.add(name.parent.resolve())
        if step is not None and step not in self._named():
            self._nameless.add(step)

    def _named(self) -> set[int | None]:
        """Return the steps that have a name, or get one."""
        named = {
            _step_named_by(other) for folder in self._folders for other in folder.glob("*") if other.is_file()
        }
        if self._latest is not None and self._latest.is_awaited:
            named.add(self._latest.saving.step)
        return named

    def teardown(self) -> None:
        """Return once everything is durable and has its names. Raises: what the last save failed with."""
        self._settle()

    def _leave_behind(self, step: int) -> None:
        """Remove the snapshots from a step on, which a training that went back will save anew."""
        steps = [listed.step for listed in self._store.list()]
        if not any(saved >= step for saved in steps):
            return
        before = [saved for saved in steps if saved < step]
        if before:
            self._store.rewind(before[-1])
        else:
            for saved in reversed(steps):
                self._store.delete(saved)

    def _settle(self) -> None:
        if self._latest is not None:
            self._latest.wait()
        if self._replaced:
            self._nameless |= self._replaced - self._named()
            self._replaced.clear()
        for step in sorted(self._nameless, reverse=True):
            try:
                self._store.delete(step)
            except ConfigError:  # others are stored as differences to it: later, then
                continue
            self._nameless.discard(step)
            if self._latest is not None and self._latest.saving.step == step:
                self._latest = None


class _Named:
    """A snapshot that is being saved, and its names, which a thread of its own writes once it is durable.

    The thread is no daemon: an interpreter that ends waits for it, so what is saved last is found again.
    """

    def __init__(self, saving: Saving, folders: set[Path]) -> None:
        """folders: where names are, which more may be added to."""
        self.saving = saving
        self._folders = folders
        #: Guards the names and the files of that name: nobody else waits for either but who removes one.
        self._names_lock = threading.Lock()
        self._names: list[Path] = []
        self._is_durable = False
        self._thread = threading.Thread(target=self._run, name=f"penstock-name-{saving.step}")
        self._thread.start()

    @property
    def is_awaited(self) -> bool:
        with self._names_lock:
            return bool(self._names)

    def add(self, name: Path) -> None:
        """Give it a name, now or once it is durable."""
        with self._names_lock:
            if self._is_durable:
                _write_name(name, self.saving.step, self._folders)
            else:
                self._names.append(name)

    def remove(self, name: Path) -> bool:
        """Forget a name that is not written yet. Returns: whether it was such."""
        with self._names_lock:
            if name not in self._names:
                return False
            self._names.remove(name)
            return True

    def wait(self) -> None:
        """Return once the snapshot is durable and its names are written. Raises: what it failed with."""
        self._thread.join()
        self.saving.wait()

    def _run(self) -> None:
        # Not `wait`: a failure is for the next save or close to raise, not for this thread.
        if outcome_of(self.saving) is None:
            return
        with self._names_lock:
            self._is_durable = True
            for name in self._names:
                _write_name(name, self.saving.step, self._folders)
            self._names = []


class RandomState(pl.Callback):
    """Makes the random generators of every rank part of Lightning's checkpoints, which leave them out.

    They are set again after `fit(ckpt_path=...)`, so that shuffling, dropout and the like go on as if nothing had
    happened.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the states; all ranks call it together."""
        return {"random": random_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states, to be set later."""
        self._states = state_dict["random"]

    # A loader draws when it is iterated anew, at the beginning of an epoch. Saved at the end of one, the states are
    # those before that draw: they are set before Lightning makes the iterator. Saved within an epoch, they are those
    # after it: they are set once Lightning has come to the batch.

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set them before the iterator of an epoch that was not begun."""
        set_own_random_state(self._states, trainer.global_rank)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set them once more where the epoch before had all its batches: that one's iterator has drawn in vain."""
        if not trainer.fit_loop.is_resuming:
            states, self._states = self._states, []
            set_own_random_state(states, trainer.global_rank)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set them within an epoch: what Lightning and its loaders drew on the way here is undone."""
        states, self._states = self._states, []
        if batch_idx > 0:
            set_own_random_state(states, trainer.global_rank)


class LoaderState(pl.Callback):
    """Has the training go on with the batch that comes next, wherever in an epoch or between two it was saved.

    Lightning loads the state of a `penstock.torch.Loader` by itself only within an epoch, and takes an epoch that
    `limit_train_batches` cuts short for one to go on in. `fit` is given a new loader.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of each loader."""
        is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        checkpoint[_LOADERS] = states = [loader.state_dict() for loader in _loaders(trainer)]
        for number, loader in enumerate(_loaders(trainer)):
            if is_over and states[number]["step"]:
                states[number] = loader.state_at(states[number]["epoch"] + 1, 0)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the states, to be loaded once there are loaders."""
        self._states = checkpoint.get(_LOADERS, [])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load them: the iterators that Lightning has made by now have asked for no batch yet."""
        states, self._states = self._states, []
        if states:  # Lightning itself has compared their number
            for loader, state in zip(_loaders(trainer), states, strict=True):
                loader.load_state_dict(state)


class SaveOnSignal(pl.Callback):
    """Saves, and ends the process, on all ranks after the same optimizer step once one of them gets a signal.

    The checkpoint is `last.ckpt` in the folder of the `ModelCheckpoint`, which `fit(ckpt_path="last")` resumes from.
    The process ends by SystemExit with 128 + the signal: 143 after a SIGTERM. Between two batches of one step nothing
    is saved, as a checkpoint of Lightning has no gradients.

    grace_seconds, signals, report: as for `penstock.checkpoint.StopOnSignal`.
    Raises: ConfigError, when training begins, if there is no `ModelCheckpoint`; as `StopOnSignal` does, then and later.
    """

    def __init__(
        self,
        *,
        grace_seconds: float,
        signals: Sequence[int] = (signal.SIGTERM,),
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._make = partial(StopOnSignal, grace_seconds=grace_seconds, signals=signals, report=report)
        #: While it trains.
        self._stop: StopOnSignal | None = None
        #: Global step at which `agreed` was called last.
        self._step = 0

    # As late as can be: Lightning, just before, sets a handler that takes part in a collective on this rank alone.

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to handle signals."""
        if not isinstance(trainer.checkpoint_callback, ModelCheckpoint):
            raise ConfigError(
                "SaveOnSignal saves where ModelCheckpoint does, and the Trainer has none: add one"
            )
        if self._stop is None:
            self._stop = self._make().__enter__()
            self._step = trainer.global_step

    on_train_start = on_sanity_check_start  # there may be no sanity check

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save and raise SystemExit if all ranks stop here."""
        assert self._stop is not None, "a training that runs has begun"
        if self._step == trainer.global_step:  # gradients are accumulated
            return
        self._step = trainer.global_step
        if self._stop.agreed(self._step):
            assert isinstance(trainer.checkpoint_callback, ModelCheckpoint), "as when it began"
            folder, last = trainer.checkpoint_callback.dirpath, ModelCheckpoint.CHECKPOINT_NAME_LAST
            trainer.save_checkpoint(os.path.join(str(folder), f"{last}{ModelCheckpoint.FILE_EXTENSION}"))
            # Until it is durable, on all ranks: with the first that ends, torchrun ends the others.
            trainer.strategy.checkpoint_io.teardown()
            trainer.strategy.barrier()
            raise SystemExit(self._stop.exit_code)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle signals no longer."""
        self._leave(None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Handle signals no longer."""
        self._leave(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Handle signals no longer, where there was nothing to train."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop.__exit__(None if error is None else type(error), error, None)


def _loaders(trainer: pl.Trainer) -> list[Loader]:
    """Return the loaders of ours that a training reads from."""
    loaders = tree_leaves(trainer.train_dataloader)
    return [loader for loader in loaders if isinstance(loader, Loader)]


def _without_foreign(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without the hyperparameters that a snapshot does not hold."""
    kept, left_out = dict(checkpoint), []
    for part in _HYPER_PARAMETERS:
        if part in kept:
            kept[part] = {name: value for name, value in kept[part].items() if _fits(value)}
            left_out += [f"{part}/{name}" for name in checkpoint[part].keys() - kept[part].keys()]
    if left_out:
        warnings.warn(
            f"{', '.join(sorted(left_out))}: a snapshot does not hold such values, and runs no code to make them; they "
            "are left out",
            stacklevel=2,
        )
    return kept


def _fits(value: Any) -> bool:
    try:
        flatten({"value": value})
    except ConfigError:
        return False
    return True


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ConfigError(
            f"{path} is an address; names of snapshots are small local files: give ModelCheckpoint a folder as "
            "dirpath (the snapshots may be anywhere: that is up to the store)"
        )
    return Path(path)


def _write_name(name: Path, step: int, folders: Iterable[Path]) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    # The folders, so that who removes this name knows where else the snapshot may have one.
    marker = {"what": _KIND, "step": step, "folders": sorted(map(str, folders))}
    with whole_file(name) as file:
        file.write(json.dumps(marker).encode())


def _step_named_by(path: str | os.PathLike[str]) -> int | None:
    """Return the step that a file names; None if it is no name. Raises: FileNotFoundError."""
    marker = _marker_of(path)
    return None if marker is None else marker["step"]


def _folders_named_in(name: Path) -> set[Path]:
    """Return the folders of names that one knows of, its own included."""
    marker = _marker_of(name) or {}
    folders = marker.get("folders")
    known = [folder for folder in folders if isinstance(folder, str)] if isinstance(folders, list) else []
    return {name.parent.resolve(), *map(Path, known)}


def _marker_of(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    if "://" in os.fspath(path) or Path(path).is_dir():
        return None
    with open(path, "rb") as file:
        text = file.read(_MOST_NAME_BYTES)
    try:
        marker = json.loads(text)
    except ValueError:
        return None
    is_name = isinstance(marker, dict) and marker.get("what") == _KIND and type(marker.get("step")) is int
    return marker if is_name else None
