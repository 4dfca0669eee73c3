"""Lightning saves snapshots, and goes on from them exactly."""

from __future__ import annotations

import importlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.patience import patient
from torch.utils.data import DataLoader as PyTorchs
from torch.utils.data import DistributedSampler, Sampler

from penstock.checkpoint.store import SnapshotStore
from penstock.errors import ConfigError, DataError
from penstock.policy.retention import Keep
from penstock.torch import DataLoader, Loader

if TYPE_CHECKING:
    from tests.torch.on_lightning import (
        LoaderState,
        ModelCheckpoint,
        MPIEnvironment,
        Net,
        RandomState,
        SaveOnSignal,
        Seeing,
        Seen,
        Signalled,
        SnapshotIO,
        _update_dataloader,
        pl,
    )

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _lightning() -> None:
    """Import it, which takes 6 s, in the process that runs these tests alone: all processes of a run collect them."""
    parts = importlib.import_module("tests.torch.on_lightning")
    globals().update({name: getattr(parts, name) for name in parts.__all__})


STEPS_PER_EPOCH = 4
#: Of a Lightning trainer; what else `fit` is given is for `ModelCheckpoint`.
OPTIONS = {"accumulate_grad_batches", "val_check_interval", "limit_train_batches"}
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Batches:
    """Batches that are functions of their number, and that know how far they are: what a loader of Penstock does."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < STEPS_PER_EPOCH:
            self.next += 1
            yield torch.randn(8, 6, generator=torch.Generator().manual_seed(self.next))
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotStore]:
    with SnapshotStore(tmp_path / "store", keep=Keep(last=None), snap_dis=2, report=None, threads=1) as store:
        yield store


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Lightning from starting MPI, which it does to find out whether it runs under it."""
    monkeypatch.setattr(MPIEnvironment, "detect", staticmethod(lambda: False))


@pytest.fixture
def fit(tmp_path: Path, store: SnapshotStore) -> Callable[..., Net]:
    """Return a function that trains until a step, saving as it is told, and returns the module."""

    def run(
        until: int,
        *,
        from_path: Path | None = None,
        module: Net | None = None,
        loader: Any = None,
        validation: Any = None,
        epochs: int | None = None,
        callbacks: Sequence[Any] = (),
        **checkpoint: Any,
    ) -> Net:
        pl.seed_everything(7 if from_path is None else 99, verbose=False)
        module = module or Net()
        options = {name: checkpoint.pop(name) for name in OPTIONS & checkpoint.keys()}
        trainer = pl.Trainer(
            **options,
            max_steps=until,
            max_epochs=epochs,
            **QUIET,
            default_root_dir=tmp_path,
            plugins=[SnapshotIO(store)],
            callbacks=[
                *(callbacks or [RandomState()]),
                ModelCheckpoint(
                    dirpath=tmp_path / "names",
                    filename="{step}",
                    **{"every_n_train_steps": 3, "save_top_k": -1, **checkpoint},
                ),
            ],
        )
        trainer.fit(module, loader or Batches(), validation, ckpt_path=from_path and str(from_path))
        return module

    return run


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "names").iterdir())


def test_twice_n_steps_are_n_steps_and_a_restore_and_n_steps(
    tmp_path: Path, fit: Callable[..., Net], store: SnapshotStore
) -> None:
    """In the midst of the second epoch, with dropout, running statistics, Adam and a schedule."""
    straight = fit(12, every_n_train_steps=6)
    assert names(tmp_path) == ["step=12.ckpt", "step=6.ckpt"]
    first = store.restore(12)["optimizer_states"][0]

    again = fit(12, from_path=tmp_path / "names" / "step=6.ckpt", every_n_train_steps=6)

    assert steps(store) == [6, 12]
    expected = straight.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    second = store.restore(12)["optimizer_states"][0]
    assert torch.equal(first["state"][0]["exp_avg"], second["state"][0]["exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [{"every_n_epochs": 1, "every_n_train_steps": None}, {"every_n_train_steps": STEPS_PER_EPOCH}]
)
def test_an_epoch_that_ended_is_followed_by_the_next_as_shuffled_as_ever(
    tmp_path: Path, fit: Callable[..., Net], when: dict[str, Any]
) -> None:
    """PyTorch's loader draws at the beginning of each epoch: after the one save, before the other's draws count."""
    data = torch.randn(8 * STEPS_PER_EPOCH, 6, generator=torch.Generator().manual_seed(3))

    def loader() -> Any:
        return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)  # type: ignore[arg-type]

    straight = fit(-1, epochs=3, loader=loader(), **when)

    path = tmp_path / "names" / f"step={STEPS_PER_EPOCH}.ckpt"
    again = fit(-1, epochs=3, from_path=path, loader=loader(), **when)

    expected = straight.state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_what_lightning_no_longer_names_goes_once_nothing_is_a_difference_to_it(
    tmp_path: Path, fit: Callable[..., Net], store: SnapshotStore
) -> None:
    """Snapshots 3 and 9 are whole, 6 and 12 differences to them."""
    fit(12, save_top_k=1)

    assert names(tmp_path) == ["step=12.ckpt"]
    assert [listed.step for listed in store.list()] == [9, 12]


def test_snapshots_go_whose_name_another_got(
    tmp_path: Path, fit: Callable[..., Net], store: SnapshotStore
) -> None:
    """`save_last=True` gives each snapshot the name last.ckpt in turn; of a run that resumes, too."""
    every_step = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}

    fit(3, **every_step)
    # Of two snapshots the second is a difference to the first.
    assert [listed.step for listed in store.list()] == [3]
    fit(6, from_path=tmp_path / "names" / "last.ckpt", **every_step)

    assert names(tmp_path) == ["last.ckpt", "step=6.ckpt"]
    assert [listed.step for listed in store.list()] == [5, 6]


def test_a_snapshot_that_has_a_name_in_another_folder_stays(tmp_path: Path, store: SnapshotStore) -> None:
    """Two ModelCheckpoints, one that keeps all and one that keeps the newest, and then another run of the second."""
    everywhere, latest = tmp_path / "all", tmp_path / "latest"
    saver = SnapshotIO(store)
    for step in (1, 2):
        saver.save_checkpoint({"global_step": step}, everywhere / f"{step}.ckpt")
        saver.save_checkpoint({"global_step": step}, latest / f"{step}.ckpt")
    saver.remove_checkpoint(latest / "1.ckpt")
    saver.teardown()
    assert steps(store) == [1, 2]

    later = SnapshotIO(store)
    later.remove_checkpoint(latest / "2.ckpt")
    later.teardown()
    assert steps(store) == [1, 2]
    later.remove_checkpoint(everywhere / "2.ckpt")
    later.teardown()

    assert steps(store) == [1]


def test_a_test_of_an_earlier_checkpoint_removes_no_later_ones(tmp_path: Path, store: SnapshotStore) -> None:
    saver = SnapshotIO(store)
    for step in (10, 20, 30):
        saver.save_checkpoint({"global_step": step}, tmp_path / f"{step}.ckpt")

    assert saver.load_checkpoint(tmp_path / "10.ckpt")["global_step"] == 10
    saver.save_checkpoint({"global_step": 40}, tmp_path / "40.ckpt")
    saver.teardown()

    assert steps(store) == [10, 20, 30, 40]


def test_a_value_that_a_snapshot_does_not_hold_is_left_out_of_the_hyperparameters_and_named(
    fit: Callable[..., Net], store: SnapshotStore
) -> None:
    with pytest.warns(UserWarning, match=r"hyper_parameters/odd: .* left out"):
        fit(3, module=Net(width=16, odd=object()))

    assert store.restore()["hyper_parameters"] == {"width": 16}


# -- A loader of Penstock ------------------------------------------------------------------------------


class Rows:
    """32 rows that say which they are: 8 batches an epoch."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((6,), row / 32)


def load(epochs: int | None = 8, **options: Any) -> Loader:
    return Loader(Rows(), batch_size=4, seed=1, epochs=epochs, report=None, **options)


@pytest.mark.slow
def test_a_training_that_ended_by_its_steps_left_a_state_within_the_epoch(fit: Callable[..., Net]) -> None:
    with load() as loader:
        fit(20, loader=loader)

        state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (2, 4)


#: What Lightning does between batches: nothing, two batches to an optimizer's step, validation within the epoch, and
#: epochs that are cut short; and how many batches of an epoch and of a step that makes.
WAYS: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": ({}, 8, 1),
    "accumulating": ({"accumulate_grad_batches": 2}, 8, 2),
    "validating": ({"val_check_interval": 3}, 8, 1),
    "cut short": ({"limit_train_batches": 5}, 5, 1),
}


@pytest.mark.parametrize(
    ("way", "epochs"),
    [
        ("accumulating", None),
        *(
            pytest.param(way, epochs, marks=pytest.mark.slow)
            for way in WAYS
            for epochs in (None, 8)
            if (way, epochs) != ("accumulating", None)
        ),
    ],
)
def test_the_batches_that_follow_are_those_of_an_unbroken_run(
    fit: Callable[..., Net], tmp_path: Path, way: str, epochs: int | None
) -> None:
    """Saved within an epoch, and with its last batch; the loader for validation is without end and starts anew."""
    options, of_epoch, of_step = WAYS[way]

    def run(until: int, path: Path | None = None) -> tuple[list[list[float]], int]:
        module = Seeing()
        callbacks = [LoaderState(), RandomState()]
        with load() as loader, load(None, shuffle=False) as validation:
            settings = {"loader": loader, "validation": validation, "callbacks": callbacks, "epochs": epochs}
            fit(until, module=module, from_path=path, every_n_train_steps=1, **settings, **options)
            return module.seen, loader.position[0]

    until = 2 * of_epoch // of_step
    straight, at_epoch = run(until)
    assert at_epoch == 2
    for saved in (of_epoch // of_step - 1, of_epoch // of_step):
        path = tmp_path / "names" / f"step={saved}.ckpt"
        assert run(until, path) == (straight[saved * of_step :], 2)


@pytest.mark.slow
def test_an_epochs_end_is_followed_by_the_next_epoch(fit: Callable[..., Net], tmp_path: Path) -> None:
    """Where Lightning saves once an epoch, and loads no state of loaders."""

    def run(path: Path | None = None) -> list[list[float]]:
        module = Seeing()
        with load() as loader:
            when: dict[str, Any] = {"every_n_train_steps": None, "every_n_epochs": 1}
            callbacks = [LoaderState(), RandomState()]
            fit(-1, module=module, loader=loader, from_path=path, epochs=3, callbacks=callbacks, **when)
        return module.seen

    straight = run()
    assert run(tmp_path / "names" / "step=8.ckpt") == straight[8:]


def test_a_signal_has_the_step_finished_and_saved_and_ends_the_process(
    fit: Callable[..., Net], tmp_path: Path, store: SnapshotStore
) -> None:
    """Three batches to a step; with a sanity check, and without one where training resumes."""
    module, before = Signalled(at=3), signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "every_n_train_steps": 100, "epochs": 2}

    def callbacks() -> list[Any]:
        return [LoaderState(), RandomState(), SaveOnSignal(grace_seconds=60)]

    with load() as loader, load(None, shuffle=False) as validation, pytest.raises(SystemExit) as ended:
        fit(-1, module=module, loader=loader, validation=validation, callbacks=callbacks(), **options)

    assert ended.value.code == 128 + signal.SIGTERM
    assert len(module.seen) == 6
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps(store) == [2]
    again = Seeing()
    with load() as loader:
        path = tmp_path / "names" / "last.ckpt"
        fit(-1, module=again, loader=loader, from_path=path, callbacks=callbacks(), **options)
    assert signal.getsignal(signal.SIGTERM) is before
    with load() as loader:
        assert module.seen + again.seen == [batch[:, 0].tolist() for _ in range(2) for batch in loader]


def test_after_a_signal_no_rank_ends_before_the_snapshot_is_durable(
    tmp_path: Path, held_back: SnapshotStore, may_end: threading.Event
) -> None:
    """With the first rank that ends, torchrun ends the others: the one that writes, too."""
    found: list[list[str]] = []

    class Ending(pl.Callback):
        def on_exception(self, *_: Any) -> None:
            found.append(names(tmp_path))

    trainer = pl.Trainer(
        max_steps=8,
        **QUIET,
        default_root_dir=tmp_path,
        plugins=[SnapshotIO(held_back)],
        callbacks=[SaveOnSignal(grace_seconds=60), Ending(), ModelCheckpoint(dirpath=tmp_path / "names")],
    )
    (tmp_path / "names").mkdir()
    timer = threading.Timer(0.3, may_end.set)  # else nothing ends, and no time suffices
    timer.start()
    with load() as loader, pytest.raises(SystemExit):
        trainer.fit(Signalled(at=1), loader)
    timer.join()

    assert found == [["last.ckpt"]]


def test_a_training_that_saves_on_a_signal_has_to_know_where(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_steps=1,
        **QUIET,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=[SaveOnSignal(grace_seconds=60)],
    )

    with pytest.raises(ConfigError, match="SaveOnSignal saves where ModelCheckpoint does"):
        trainer.fit(Net(), Batches())


# -- Names ---------------------------------------------------------------------------------------------


def checkpoint(step: int, **more: Any) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": torch.full((4,), float(step))}, **more}


def steps(store: SnapshotStore) -> list[int]:
    return [listed.step for listed in store.list()]


@pytest.fixture
def may_end() -> threading.Event:
    return threading.Event()


@pytest.fixture
def held_back(tmp_path: Path, may_end: threading.Event) -> Iterator[SnapshotStore]:
    """A store whose saves end when they may."""

    def report(_: str) -> None:
        assert may_end.wait(patient(60))

    with SnapshotStore(tmp_path / "store", report=report, threads=1) as store:
        yield store


def test_a_name_appears_once_its_snapshot_is_durable(
    tmp_path: Path, held_back: SnapshotStore, may_end: threading.Event
) -> None:
    """A process that dies before leaves no name that leads nowhere."""
    snapshots, name = SnapshotIO(held_back), tmp_path / "deep" / "first.ckpt"
    snapshots.save_checkpoint(checkpoint(1), name)
    assert not name.exists()

    may_end.set()
    snapshots.teardown()

    assert [path.name for path in name.parent.iterdir()] == ["first.ckpt"]
    weight = SnapshotIO(held_back).load_checkpoint(name)["state_dict"]["weight"]
    assert torch.equal(weight, torch.full((4,), 1.0))


def test_a_snapshot_can_be_unnamed_before_it_is_durable(
    tmp_path: Path, held_back: SnapshotStore, may_end: threading.Event
) -> None:
    snapshots = SnapshotIO(held_back)
    snapshots.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")

    snapshots.remove_checkpoint(tmp_path / "a.ckpt")
    may_end.set()
    snapshots.teardown()

    assert not (tmp_path / "a.ckpt").exists()
    assert steps(held_back) == []


def test_a_name_that_a_killed_run_has_removed_may_be_removed_again(
    tmp_path: Path, store: SnapshotStore
) -> None:
    snapshots = SnapshotIO(store)
    snapshots.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    snapshots.teardown()

    snapshots.remove_checkpoint(tmp_path / "step=1.ckpt")
    snapshots.teardown()

    assert steps(store) == [1]


def test_a_checkpoint_saved_after_fitting_has_its_name_too(tmp_path: Path, store: SnapshotStore) -> None:
    snapshots = SnapshotIO(store)
    snapshots.save_checkpoint(checkpoint(1), tmp_path / "step=1.ckpt")
    snapshots.teardown()

    snapshots.save_checkpoint(checkpoint(1), tmp_path / "final.ckpt")

    assert snapshots.load_checkpoint(tmp_path / "final.ckpt")["global_step"] == 1
    assert steps(store) == [1]


def test_a_step_with_two_names_is_one_snapshot_until_both_are_removed(
    tmp_path: Path, store: SnapshotStore
) -> None:
    snapshots = SnapshotIO(store)
    for name in ("best.ckpt", "last.ckpt"):
        snapshots.save_checkpoint(checkpoint(1), tmp_path / name)
    snapshots.teardown()
    assert steps(store) == [1]

    later = SnapshotIO(store)
    later.remove_checkpoint(tmp_path / "best.ckpt")
    later.teardown()
    assert steps(store) == [1]
    later.remove_checkpoint(tmp_path / "last.ckpt")
    later.teardown()

    assert steps(store) == []


def test_a_training_that_goes_back_replaces_what_was_saved_after(
    tmp_path: Path, store: SnapshotStore
) -> None:
    snapshots = SnapshotIO(store)
    for step in (1, 2, 3):
        snapshots.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
    snapshots.teardown()

    again = SnapshotIO(store)
    again.load_checkpoint(tmp_path / "1.ckpt")
    again.save_checkpoint(checkpoint(2, again=True), tmp_path / "2.ckpt")
    again.teardown()

    assert steps(store) == [1, 2]
    assert again.load_checkpoint(tmp_path / "2.ckpt")["again"]


def test_checkpoints_of_lightnings_own_are_loaded_and_removed_as_ever(
    tmp_path: Path, store: SnapshotStore
) -> None:
    snapshots, path = SnapshotIO(store), tmp_path / "plain.ckpt"
    torch.save(checkpoint(5), path)

    assert snapshots.load_checkpoint(path, weights_only=True)["global_step"] == 5
    snapshots.remove_checkpoint(path)

    assert not path.exists()


def test_what_a_save_failed_with_is_raised_when_fitting_ends(tmp_path: Path, store: SnapshotStore) -> None:
    snapshots = SnapshotIO(store)
    snapshots.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    snapshots.teardown()
    (tmp_path / "store").rename(tmp_path / "gone")

    def save() -> None:
        snapshots.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        snapshots.teardown()

    with pytest.raises((DataError, FileNotFoundError)):
        save()
    assert not (tmp_path / "2.ckpt").exists()


def test_a_value_that_a_snapshot_does_not_hold_elsewhere_is_an_error_that_names_it(
    tmp_path: Path, store: SnapshotStore
) -> None:
    with pytest.raises(ConfigError, match="mine/odd"):
        SnapshotIO(store).save_checkpoint(checkpoint(1, mine={"odd": object()}), tmp_path / "1.ckpt")


def test_names_on_other_machines_and_storage_options_are_refused(
    tmp_path: Path, store: SnapshotStore
) -> None:
    snapshots = SnapshotIO(store)

    with pytest.raises(ConfigError, match="dirpath"):
        snapshots.save_checkpoint(checkpoint(1), "s3://bucket/1.ckpt")
    with pytest.raises(ConfigError, match="storage_options"):
        snapshots.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt", storage_options={})
    with pytest.raises(FileNotFoundError):
        snapshots.load_checkpoint(tmp_path / "absent.ckpt")


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^store is 'runs/a'; it is a SnapshotStore"):
        SnapshotIO("runs/a")  # type: ignore[arg-type]


# -- The drop-in DataLoader ----------------------------------------------------------------------------

NUMBERS: Any = range(30)


def test_a_loader_that_lightning_makes_for_another_sampler_is_one_of_penstocks() -> None:
    loader = DataLoader(
        NUMBERS, 4, workers="threads", shuffle=True, num_workers=1, timeout=60, drop_last=True
    )
    sampler: Sampler[int] = DistributedSampler(NUMBERS, 2, 1, shuffle=False)

    made = _update_dataloader(loader, sampler)

    assert type(made) is DataLoader
    assert made.workers == "threads"
    assert (made.num_workers, made.timeout, made.batch_size, made.drop_last) == (1, 60, 4, True)
    assert [batch.tolist() for batch in made] == [
        batch.tolist() for batch in PyTorchs(NUMBERS, 4, sampler=sampler, drop_last=True)
    ]


def test_a_training_of_lightning_resumes_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    """Lightning saves the state of a loader that has one; it resumes here with another number of workers."""

    def fit(workers: int, checkpoint: Path | None = None) -> list[list[int]]:
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=11, save_top_k=-1)
        module = Seen()
        trainer = pl.Trainer(
            max_epochs=2,
            **QUIET,
            callbacks=[] if checkpoint else [saving],
            enable_checkpointing=checkpoint is None,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(
                module,
                DataLoader(NUMBERS, 4, workers="threads", shuffle=True, num_workers=workers),
                ckpt_path=checkpoint,
            )
        return module.seen

    torch.manual_seed(6)
    straight = fit(2)
    torch.manual_seed(7)
    assert fit(0, tmp_path / "step=11.ckpt") == straight[11:]
    assert len(straight) == 16
