"""collate_fn: a function of a step's samples makes its batch, in the worker that has loaded them."""

from __future__ import annotations

import pickle
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import penstock
import penstock.torch
from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.loader import Loader
from penstock.loader.collating import CollatingDecoder
from penstock.loader.transforms import ToTensor
from penstock.plan import FullShuffle

COUNT, BATCH = 22, 4


class Unequal:
    """Sample k is a list of k numbers, but for those that are broken."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> list[int]:
        if index in self.broken:
            raise OSError(f"sample {index} is gone")
        return [index] * index


def firsts(batch: list[list[int]]) -> list[int]:
    return [len(sample) for sample in batch]


def load(dataset: Any, collate_fn: Any, **arguments: Any) -> Loader:
    settings: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "report": None, "timeout_seconds": 60}
    return Loader(dataset, collate_fn=collate_fn, **{**settings, **arguments})


@pytest.mark.parametrize("decoders", [0, 1, 3])
def test_it_gets_all_samples_of_a_step_in_the_order_of_the_plan_and_its_result_is_the_batch(
    decoders: int,
) -> None:
    order = FullShuffle(COUNT, seed=5)
    callers: set[int] = set()

    def collate(samples: list[list[int]]) -> dict[str, Any]:
        callers.add(threading.get_ident())
        return {"lengths": tuple(firsts(samples)), "array": np.ones(2)}

    with load(Unequal(), collate, shuffle=order, decoders=decoders) as loader:
        for epoch in range(2):
            batches = [batch["lengths"] for batch in loader]
            expected = order.at(epoch, np.arange(COUNT)).tolist()
            assert batches == [tuple(expected[at : at + BATCH]) for at in range(0, COUNT, BATCH)]

    assert (threading.get_ident() in callers) == (decoders == 0)


def test_the_result_is_handed_out_as_it_is_by_the_loader_of_pytorch_too() -> None:
    kept: list[Any] = []

    def collate(samples: list[list[int]]) -> Any:
        kept.append((np.zeros(3), samples))
        return kept[-1]

    with penstock.torch.Loader(
        Unequal(), batch_size=COUNT, epochs=1, collate_fn=collate, report=None
    ) as loader:
        (batch,) = loader

    assert batch is kept[0]


def test_pytorchs_default_collate_gives_what_pytorchs_loader_gives() -> None:
    rows: Any = [(torch.full((2,), float(k)), k, str(k)) for k in range(COUNT)]

    with load(rows, default_collate, shuffle=False, epochs=1) as loader:
        batches = list(loader)

    for mine, theirs in zip(batches, torch.utils.data.DataLoader(rows, BATCH), strict=True):
        assert [type(part) for part in mine] == [type(part) for part in theirs]
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        assert mine[2] == theirs[2]


def test_a_run_resumes_after_the_batches_that_were_handed_out() -> None:
    with load(Unequal(), firsts, seed=3) as loader:
        batches = iter(loader)
        first = [next(batches), next(batches)]
        state = loader.state_dict()
        rest = [*batches, *loader]

    with load(Unequal(), firsts, seed=3, state=state) as resumed:
        assert [*resumed, *resumed] == rest
    assert len(first) + len(rest) == 2 * 6


def test_a_function_that_asks_for_a_generator_draws_the_same_in_any_thread_and_after_a_resume() -> None:
    def noisy(samples: list[list[int]], rng: np.random.Generator, epoch: int) -> tuple[int, float]:
        return epoch, float(rng.random())

    runs = []
    for decoders in (0, 1, 3):
        with load(Unequal(), noisy, seed=3, decoders=decoders) as loader:
            batches = iter(loader)
            first, state = next(batches), loader.state_dict()
            runs.append([first, *batches, *loader])

    assert runs[0] == runs[1] == runs[2]
    assert len({drawn for _, drawn in runs[0]}) == 12
    assert [epoch for epoch, _ in runs[0]] == 6 * [0] + 6 * [1]
    with load(Unequal(), noisy, seed=3, state=state) as resumed:
        assert [*resumed, *resumed] == runs[0][1:]
    assert state["draws"] == {"seed": 3}


def test_samples_that_are_skipped_are_not_in_the_list_and_the_rest_of_their_step_is() -> None:
    with load(Unequal(5, 16, 17, 18, 19), firsts, shuffle=False, epochs=1, on_error="skip") as loader:
        batches = list(loader)

    assert batches == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [20, 21]]
    assert [each.sample for each in loader.skipped] == [5, 16, 17, 18, 19]


def test_a_sample_that_fails_is_its_own_error_and_the_function_is_not_called_without_it() -> None:
    calls: list[list[int]] = []

    def collate(samples: list[list[int]]) -> list[int]:
        calls.append(firsts(samples))
        return calls[-1]

    with (
        load(Unequal(5), collate, shuffle=False) as loader,
        pytest.raises(OSError, match="sample 5 is gone") as caught,
    ):
        list(loader)

    assert "while loading Unequal[5]" in caught.value.__notes__
    assert [4, 6, 7] not in calls


def test_a_sample_that_hangs_is_an_error_of_its_batch_and_keeps_no_loader_from_being_made() -> None:
    released = threading.Event()

    class Hanging(Unequal):
        def __getitem__(self, index: int) -> list[int]:
            released.wait()
            return super().__getitem__(index)

    with pytest.warns(RuntimeWarning, match=r"left while a store does not answer: Hanging\[0\]"):
        loader = load(Hanging(), firsts, shuffle=False, timeout_seconds=0.1)
    with loader:
        batches = iter(loader)
        with pytest.raises(WaitTimeout):
            next(batches)
        released.set()


def test_a_function_that_raises_names_itself_the_step_and_the_samples() -> None:
    def picky(samples: list[list[int]]) -> list[int]:
        if [8] * 8 in samples:
            raise RuntimeError("no eights")
        return firsts(samples)

    with load(Unequal(), picky, shuffle=False) as loader:
        batches = iter(loader)
        assert [next(batches), next(batches)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(RuntimeError, match="no eights") as caught:
            next(batches)
        assert loader.state_dict()["step"] == 2

    notes = "\n".join(caught.value.__notes__)
    assert f"while collate_fn {__name__}." in notes
    assert f"picky ({__file__}:{picky.__code__.co_firstlineno}) made a batch of samples 8, 9, 10, 11" in notes
    assert "in the batch of epoch 0, step 2" in notes

    with load(Unequal(), picky, shuffle=False, epochs=1, on_error="skip") as loader:
        assert [batch[0] for batch in loader] == [0, 4, 12, 16, 20]
    assert [each.sample for each in loader.skipped] == [8, 9, 10, 11]


def test_a_function_that_returns_none_is_named() -> None:
    def forgetful(samples: list[Any]) -> None:
        samples.sort()

    with (
        load(Unequal(), forgetful) as loader,
        pytest.raises(DataError, match=r"forgetful \(.*\) returned None: return the batch") as caught,
    ):
        list(loader)

    assert any(") made a batch" in note for note in caught.value.__notes__)


def test_batches_that_the_caller_keeps_do_not_stop_the_loader_and_those_it_drops_are_gone() -> None:
    class Batch:
        alive: ClassVar[set[int]] = set()

        def __init__(self, samples: list[Any]) -> None:
            self.number = max(map(len, samples))
            self.alive.add(self.number)

        def __del__(self) -> None:
            self.alive.discard(self.number)

    with load([[0] * k for k in range(400)], Batch, shuffle=False, epochs=1) as loader:
        kept = list(loader)
        assert len(kept) == 100
        assert len(Batch.alive) == 100
        del kept
    del loader
    assert not Batch.alive


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the source is no data set, .*SourceSamples\(source\)"):
        Loader("photos", batch_size=2, epochs=1, collate_fn=firsts, transforms=[ToTensor()])
    with pytest.raises(ConfigError, match="collate_fn is 'stack'; it is a function of a list"):
        Loader([[1], [2]], batch_size=2, epochs=1, collate_fn="stack")  # type: ignore[arg-type]


def test_a_batch_without_samples_cannot_be_made() -> None:
    with (
        load(Unequal(), firsts) as loader,
        pytest.raises(ConfigError, match=r"collate_fn .*\.firsts \(.* makes batches"),
    ):
        loader.empty_batch()


def test_what_another_process_has_made_is_put_in_its_slot() -> None:
    decoder = CollatingDecoder(firsts, leaves_out=False)
    decoder.put(0, range(3), lambda: "a batch that threads have made")
    there, here = (pickle.loads(pickle.dumps(decoder)) for _ in range(2))
    there.put(2, range(3), [7, 8, 9])

    here.put(5, range(3), there.take(2, range(3)))

    assert here.finish(5, (), range(3)) == [7, 8, 9]
    assert there.take(2, range(3)) is None
