"""Code of a user gets the epoch, and random numbers of each sample's own, where its signature asks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each
from torch.utils.data import DataLoader

from penstock import Loader
from penstock.errors import ConfigError
from penstock.loader import mapped, mix
from penstock.loader.asked import SampleCode, asked_by
from penstock.plan.random import derive_key, generator_for

COUNT = 37


class Noisy:
    """Each sample is its number, the epoch and what it draws."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, epoch: int, rng: np.random.Generator) -> Any:
        return index, epoch, rng.standard_normal(3)


class NoisyByList(Noisy):
    """Makes lists of samples, and counts those that were made so."""

    def __init__(self) -> None:
        self.made = 0

    def __getitems__(self, indices: list[int], rngs: list[np.random.Generator], epoch: int) -> list[Any]:
        self.made += len(indices)
        return [self.__getitem__(index, epoch, rng) for index, rng in zip(indices, rngs, strict=True)]


class NoisyAlone(Noisy):
    """Has a `__getitems__` that could not give what `__getitem__` asks for."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        raise AssertionError("not to be called")


def samples_of(source: Any, **arguments: Any) -> dict[tuple[int, int], NDArray[np.float64]]:
    """Return what each sample of two epochs drew, by epoch and number."""
    seen: dict[tuple[int, int], NDArray[np.float64]] = {}
    settings = {"batch_size": 8, "epochs": 2, "seed": 5, "memory": "1 MB", "report": None, **arguments}
    with Loader(source, **settings) as loader:
        while loader.position[0] < 2:
            for ids, epochs, drawn in loader:
                for index, epoch, row in zip(ids.tolist(), epochs.tolist(), drawn, strict=True):
                    seen[epoch, index] = row.copy()
    return seen


@pytest.fixture
def expected() -> dict[tuple[int, int], NDArray[np.float64]]:
    key = derive_key(5, "data set")
    return {
        (epoch, sample): generator_for(key, epoch, sample).standard_normal(3)
        for epoch in range(2)
        for sample in range(COUNT)
    }


@pytest.mark.parametrize("make", [Noisy, NoisyByList, NoisyAlone])
@pytest.mark.parametrize(
    "arguments", [{"decoders": 0}, {"decoders": 1}, {"decoders": 4}, {"batch_size": 3, "shuffle": False}]
)
def test_a_samples_draws_are_those_of_its_seed_epoch_and_number(
    make: Callable[[], Noisy], arguments: dict[str, Any], expected: dict[Any, NDArray[np.float64]]
) -> None:
    seen = samples_of(make(), **arguments)

    assert seen.keys() == expected.keys()
    assert all((seen[each] == expected[each]).all() for each in expected)


def test_lists_of_samples_are_made_with_a_generator_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.policy.decisions.LOAD_SECONDS", 1e6)
    source = NoisyByList()

    samples_of(source, batch_size=20, decoders=1)

    assert source.made


def test_a_run_that_resumes_draws_what_the_unbroken_one_does() -> None:
    arguments: dict[str, Any] = {"batch_size": 8, "epochs": 1, "memory": "1 MB", "report": None}
    with Loader(Noisy(), seed=3, **arguments) as loader:
        unbroken = [drawn.copy() for _, _, drawn in loader]
    with Loader(Noisy(), seed=3, **arguments) as loader:
        state = loader.state_at(0, 2)
    with Loader(Noisy(), seed=None, state=state, **arguments) as loader:
        resumed = [drawn.copy() for _, _, drawn in loader]

    assert len(resumed) == len(unbroken) - 2
    assert all((one == other).all() for one, other in zip(resumed, unbroken[2:], strict=True))


def test_a_state_of_another_seed_is_refused_though_the_order_has_none() -> None:
    arguments: dict[str, Any] = {"batch_size": 8, "epochs": 1, "shuffle": False, "report": None}
    with Loader(Noisy(), seed=3, **arguments) as loader:
        assert "samples drawn with seed=3" in loader.start_lines[0]
        state = loader.state_dict()
    with (
        Loader(Noisy(), seed=4, **arguments) as loader,
        pytest.raises(ConfigError, match=r"draws\.seed was 3 and is 4"),
    ):
        loader.load_state_dict(state)


def test_a_list_that_shares_a_generator_is_refused() -> None:
    class Shared(Noisy):
        def __getitems__(self, indices: list[int], epoch: int, rng: np.random.Generator) -> list[Any]:
            return []

    with pytest.raises(ConfigError, match=r"Shared\.__getitems__ has a parameter rng.*name it rngs"):
        Loader(Shared(), batch_size=8, epochs=1)


def test_a_list_that_asks_for_more_than_a_sample_is_refused() -> None:
    class More(Noisy):
        def __getitem__(self, index: int) -> Any:  # type: ignore[override]
            return index

        def __getitems__(self, indices: list[int], rngs: list[np.random.Generator]) -> list[Any]:
            return indices

    with pytest.raises(ConfigError, match=r"has a parameter rngs, and __getitem__ has no rng"):
        Loader(More(), batch_size=8, epochs=1)


def test_a_builtin_without_a_signature_asks_for_nothing() -> None:
    assert not asked_by(max)
    assert SampleCode([5, 6].__getitem__, 0, "data set")(1, 0, 1) == 6


class WithDefaults(Noisy):
    """May be asked for samples by hand."""

    def __getitem__(self, index: int, epoch: int = 7, rng: np.random.Generator | None = None) -> Any:
        return index, epoch, rng is None


class WithDefaultsByList(WithDefaults):
    def __getitems__(
        self, indices: list[int], epoch: int = 7, rngs: list[np.random.Generator] | None = None
    ) -> list[Any]:
        return [(index, epoch, rngs is None) for index in indices]


class ListAlone(WithDefaults):
    """Has a `__getitems__` that needs what `__getitem__` does not."""

    def __getitems__(self, indices: list[int], epoch: int, rngs: list[np.random.Generator]) -> list[Any]:
        raise AssertionError("not to be called")


def mixed(dataset: Any) -> Any:
    return mix([dataset, WithDefaults()], [1, 1], at_end="stop")


def with_default(sample: Any, rng: np.random.Generator | None = None) -> Any:
    assert rng is None
    return tuple(sample)


def drawn(sample: Any, rng: np.random.Generator) -> Any:
    return sample, rng.random()


def by_torch(dataset: Any) -> list[Any]:
    """Return the first batch that a DataLoader of PyTorch's makes, as a list of samples."""
    batch: list[Any] = next(iter(DataLoader(dataset, batch_size=3, collate_fn=list)))
    return batch


@for_each("make", [WithDefaults, WithDefaultsByList, ListAlone])
def test_outside_of_a_loader_defaults_serve_whatever_a_data_set_is_inside_of(
    make: Callable[[], Noisy],
) -> None:
    outers: list[Any] = [
        mixed(make()),
        mapped(make(), tuple),
        mapped(make(), with_default),
        mapped(mapped(mixed(make()), tuple), tuple),
    ]
    for outer in outers:
        assert outer[2] == (2, 7, True)
        assert by_torch(outer) == [(0, 7, True), (1, 7, True), (2, 7, True)]
        assert outer.__getitem__(2, epoch=1) == (2, 1, True)


@for_each(
    ("outer", "message"),
    [
        (mixed(Noisy()), r"Noisy asks for epoch and rng, .* call data\.__getitem__\(number, epoch=0, rng=np"),
        (mapped(NoisyByList(), tuple), "NoisyByList asks for epoch and rng, which a penstock.Loader gives"),
        (
            mapped(WithDefaults(), drawn),
            r"WithDefaults\.map\(drawn\) asks for rng, .* call data\.__getitem__\(number, rng=np\.random",
        ),
    ],
)
def test_outside_of_a_loader_what_has_no_default_is_an_error_that_says_how(outer: Any, message: str) -> None:
    for ask in (lambda: outer[3], lambda: by_torch(outer)):
        with pytest.raises(ConfigError, match=message):
            ask()

    assert outer.__getitem__(3, epoch=0, rng=np.random.default_rng(0))
