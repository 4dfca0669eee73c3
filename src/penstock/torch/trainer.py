"""The Trainer of Hugging Face saves into a snapshot store, and resumes from there."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils import WEIGHTS_NAME

from penstock.checkpoint.preemption import StopOnSignal
from penstock.checkpoint.restoring import Restored
from penstock.checkpoint.saving import Saving
from penstock.checkpoint.store import SnapshotStore
from penstock.errors import ConfigError
from penstock.torch.rng_state import random_states


class SnapshotCallback(TrainerCallback):
    """Saves a Trainer's model, optimizer, scheduler, scaler, random generators and progress.

        trainer = Trainer(model, TrainingArguments(save_strategy="no", ...), train_dataset=data)
        snapshots = SnapshotCallback(trainer, SnapshotStore("runs/a", schedule="500 steps"))
        trainer.add_callback(snapshots)
        snapshots.train()

    Training resumes as if it had not been interrupted, for the Trainer is given a folder of its own kind; it lies in
    the folder for temporary files until the first step is done.

    trainer: it trains in one process, or in several with equal states (DDP); the store is then one of all ranks.
    store: its schedule says when to save. It is closed by whoever opened it.
    beside_checkpoints: save whenever the Trainer has saved a checkpoint of its own, and not by the store's schedule.
    stop: save and end the training, on all ranks after the same step, when it is agreed on.
    Raises: ConfigError naming the argument, or if the Trainer shards its state.
    """

    def __init__(
        self,
        trainer: Trainer,
        store: SnapshotStore,
        *,
        beside_checkpoints: bool = False,
        stop: StopOnSignal | None = None,
    ) -> None:
        if not isinstance(store, SnapshotStore):
            raise ConfigError(f'store is {store!r:.80}; it is a SnapshotStore: give SnapshotStore("runs/a")')
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"trainer is {trainer!r:.80}; it is the Trainer that trains")
        if stop is not None and not isinstance(stop, StopOnSignal):
            raise ConfigError(f"stop is {stop!r:.80}; it is a StopOnSignal, of a `with` around train()")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ConfigError(
                "this Trainer shards its state (FSDP or DeepSpeed), of which a rank here sees a part: save it with "
                "torch.distributed.checkpoint and the writer of penstock.torch"
            )
        self._trainer = trainer
        self._store = store
        self._is_beside_checkpoints = beside_checkpoints
        self._stop = stop
        self._saving: Saving | None = None
        #: While a training begins from a snapshot: where the Trainer finds it.
        self._folder: Path | None = None
        #: The snapshot that the training began from: what was saved after it goes with the first save.
        self._went_back_to: int | None = None

    def train(self, step: int | None = None, **arguments: Any) -> Any:
        """Train from a snapshot on, or from the beginning where there is none.

        step: of the snapshot; None: the one saved last. Snapshots saved after it go with the first save.
        arguments: of `Trainer.train`, which returns the same.
        Raises: as `SnapshotStore.restore`, and what a save failed with.
        """
        if step is None and not self._store.list():
            return self._trainer.train(**arguments)
        restored = self._store.restore(step)
        self._went_back_to = restored.step
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            self._folder = Path(folder)
            self._write(restored, self._folder)
            del restored
            try:
                return self._trainer.train(resume_from_checkpoint=folder, **arguments)
            finally:
                self._folder = None

    # -- What the Trainer tells --------------------------------------------------------------------------

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save if it is time, or the end."""
        # The Trainer has read all of it by now, unless it may begin anew with smaller batches.
        if self._folder is not None and not args.auto_find_batch_size:
            for file in self._folder.iterdir():
                file.unlink()
            self._folder = None
        stops = self._stop is not None and self._stop.agreed(state.global_step)
        if stops or (not self._is_beside_checkpoints and self._store.is_due(state.global_step)):
            self._save(state)
        if stops:  # after the save, as the control is part of it
            control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save in addition to the Trainer, which may save twice after one step."""
        if self._is_beside_checkpoints and (self._saving is None or self._saving.step != state.global_step):
            self._save(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Return once the last snapshot is durable. Raises: what it failed with."""
        if self._saving is not None:
            self._saving.wait()

    # -- Saving ------------------------------------------------------------------------------------------

    def _save(self, state: TrainerState) -> None:
        trainer = self._trainer
        assert trainer.optimizer is not None, "a Trainer that trains has made its optimizer"
        assert trainer.lr_scheduler is not None, "and its schedule"
        if self._went_back_to is not None:
            self._store.rewind(self._went_back_to)
            self._went_back_to = None
        trainer.store_flos()
        scaler = getattr(trainer.accelerator, "scaler", None)
        callbacks: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
        exported: list[Any] = [one for one in callbacks if isinstance(one, ExportableState)]
        # As the Trainer has it, whose process 0 alone writes it.
        progress = dataclasses.replace(
            state, stateful_callbacks=exported, is_local_process_zero=True, is_world_process_zero=True
        )
        self._saving = self._store.save(
            state.global_step,
            {
                "model": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
                "scheduler": trainer.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "trainer": dataclasses.asdict(progress),
                "random": random_states(),
            },
        )

    def _write(self, restored: Restored, folder: Path) -> None:
        """Write a checkpoint as the Trainer reads it."""
        args = self._trainer.args
        torch.save(restored["model"], folder / WEIGHTS_NAME)
        torch.save(restored["optimizer"], folder / OPTIMIZER_NAME)
        torch.save(restored["scheduler"], folder / SCHEDULER_NAME)
        if restored["scaler"] is not None:
            torch.save(restored["scaler"], folder / SCALER_NAME)
        TrainerState(**restored["trainer"]).save_to_json(str(folder / TRAINER_STATE_NAME))
        ranks = restored["random"]
        if args.process_index < len(ranks):
            own = ranks[args.process_index]
            states = {"python": own["python"], "numpy": own["numpy"], "cpu": own["torch"]}
            if "cuda" in own:
                all_devices = args.parallel_mode.value == "distributed"
                states["cuda"] = own["cuda"] if all_devices else own["cuda"][torch.cuda.current_device()]
            name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
            torch.save(states, folder / name)
