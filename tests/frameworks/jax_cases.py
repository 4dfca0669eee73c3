"""The loader as a user of JAX meets it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import penstock
import penstock.jax as pj
from penstock.errors import ConfigError, DataError, StagingError
from penstock.jax.loader import _Handed
from penstock.loader.transforms import Resize, ToTensor
from penstock.ranks import place_in_mesh

set_option: Callable[[str, Any], None] = jax.config.update
set_option("jax_num_cpu_devices", 4)  # before the first of them is looked for
set_option("jax_platforms", "cpu")

TRANSFORMS = (Resize((8, 8)), ToTensor())
DEVICES = 4


def by_rows() -> NamedSharding:
    split: Callable[..., Any] = PartitionSpec
    return NamedSharding(Mesh(jax.devices()[:DEVICES], ("data",)), split("data"))


class Numbers:
    """Sample k is filled with k. labels: of each. full: makes its array, `numpy.full` or that of JAX."""

    def __init__(
        self, samples: int, labels: Callable[[int], Any] = int, full: Callable[..., Any] = jnp.full
    ) -> None:
        self.samples, self.labels, self.full = samples, labels, full

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {
            "x": self.full((32, 32), sample, "float32"),
            "y": self.labels(sample),
            "name": f"sample {sample}",
        }


@pytest.mark.parametrize("dtype", [None, jnp.float16, "bfloat16", jnp.bfloat16])
def test_batches_are_those_of_numpy_as_arrays_of_jax(image_folder: Callable[..., Path], dtype: Any) -> None:
    options: dict[str, Any] = {
        "batch_size": 5,
        "epochs": 2,
        "seed": 3,
        "transforms": TRANSFORMS,
        "report": None,
    }
    name = None if dtype is None else np.dtype(dtype).name
    with (
        penstock.Loader(image_folder(), **options, dtype=name) as expected,
        pj.Loader(image_folder(), **options, dtype=dtype) as loader,
    ):
        for _ in range(2):
            for (images, labels), (found, found_labels) in zip(expected, loader, strict=True):
                assert isinstance(found, jax.Array)
                assert isinstance(found_labels, jax.Array)
                assert found.dtype == jnp.dtype(name or "float32")
                assert np.asarray(found).tobytes() == images.tobytes()
                assert found_labels.dtype == jnp.int32
                assert found_labels.tolist() == labels.tolist()


def test_a_data_set_of_dicts_gives_dicts_and_what_is_text_stays_so() -> None:
    with pj.Loader(Numbers(10), batch_size=4, epochs=1, shuffle=False, report=None) as loader:
        assert jax.tree.map(jnp.shape, loader.empty_batch()) == {"x": (0, 32, 32), "y": (0,), "name": []}
        batch = next(iter(loader))

    assert isinstance(batch["x"], jax.Array)
    assert batch["x"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert batch["y"].tolist() == [0, 1, 2, 3]
    assert batch["name"] == [f"sample {k}" for k in range(4)]


@pytest.mark.parametrize("sharding", [None, pytest.param("rows", id="sharded")])
def test_arrays_that_are_kept_never_change_and_those_let_go_make_room(sharding: str | None) -> None:
    """Four batches fit into memory: there are twenty, of which the last two are kept."""
    loader = pj.Loader(
        Numbers(160),
        batch_size=8,
        epochs=1,
        memory="128 KiB",
        sharding=by_rows() if sharding else None,
        report=None,
    )
    double = jax.jit(lambda x: 2 * x)
    with loader:
        order = loader.plan.order.at(0, np.arange(160)).reshape(20, 8)
        kept: list[Any] = []
        for batch in loader:
            kept = [*kept[-1:], batch["x"]]
            doubled = double(batch["x"])
            del batch
            expected = order[loader.position[1] - 2 :][: len(kept)]
            if loader.position[0] == 0 and len(kept) == 2:
                assert [each[:, 0, 0].tolist() for each in kept] == expected.tolist()
        assert doubled[:, 5, 5].tolist() == (2 * order[-1]).tolist()


@pytest.mark.parametrize("decoders", [None, 0])
def test_batches_that_jax_still_computes_with_are_waited_for_and_kept_ones_are_an_error(
    decoders: int | None,
) -> None:
    """Three batches fit into memory, and JAX begins with the next one before it has computed with those."""
    repeat: Callable[..., Any] = jax.lax.fori_loop
    compute = jax.jit(lambda x: repeat(0, 500, lambda _, y: jnp.tanh(y @ y.mT), x))
    options: dict[str, Any] = {"batch_size": 8, "epochs": 1, "memory": "128 KiB", "decoders": decoders}
    with pj.Loader(Numbers(80, full=np.full), report=None, **options) as loader:
        order = loader.plan.order.at(0, np.arange(80)).reshape(10, 8)
        computed = [compute(batch["x"])[:, 0, 0] for batch in loader]
    expected = [compute(jnp.broadcast_to(row[:, None, None], (8, 32, 32)).astype("float32")) for row in order]
    for found, value in zip(computed, expected, strict=True):
        assert found.tolist() == value[:, 0, 0].tolist()

    with (
        pj.Loader(Numbers(80, full=np.full), report=None, **options) as loader,
        pytest.raises(StagingError, match="copy what you"),
    ):
        list(loader)


@pytest.mark.parametrize("decoders", [None, 0])
@pytest.mark.parametrize(
    "share",
    [np.asarray, lambda x: x.addressable_data(0), lambda x: jax.device_put(x, jax.devices()[0])],
    ids=["asarray", "addressable_data", "device_put"],
)
def test_what_shares_the_memory_of_batches_without_their_arrays_is_an_error_too(
    share: Callable[[Any], Any], decoders: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.jax.loader._RELEASED_SECONDS", 0.2)
    options: dict[str, Any] = {"batch_size": 8, "epochs": 1, "memory": "128 KiB", "decoders": decoders}
    with (
        pj.Loader(Numbers(80, full=np.full), report=None, timeout_seconds=60, **options) as loader,
        pytest.raises(StagingError, match="copy what you"),
    ):
        _ = [share(batch["x"]) for batch in loader]


def test_arrays_are_read_while_they_are_released_or_jax_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed takes longer than it takes to release what it was computed with."""
    now, is_ready = [100.0], [True]
    live = SimpleNamespace(is_deleted=lambda: False, is_ready=lambda: is_ready[0])
    monkeypatch.setattr(jax, "live_arrays", lambda: [live])
    handed, arrays = _Handed(clock=lambda: now[0]), [np.zeros(8), np.zeros(8)]
    for array in arrays:
        handed.add(array, jnp.zeros(8))
    del array

    def look(seconds: float) -> bool:
        now[0] += seconds
        return handed.is_any_read()

    assert [look(0.0), look(4.9), look(0.2)] == [True, True, False]
    arrays.pop()  # one is released
    assert [look(1.0), look(4.9), look(0.2)] == [True, True, False]
    is_ready[0] = False
    assert [look(0.0), look(60.0)] == [True, True]
    is_ready[0] = True
    assert [look(4.9), look(0.2)] == [True, False]
    arrays.pop()
    assert not look(0.0)


def test_donating_a_batch_writes_nothing_into_the_loaders_memory() -> None:
    """The array is compiled away in place of being written over."""
    overwrite = jax.jit(lambda x: jnp.zeros_like(x) - 1, donate_argnums=0)
    with penstock.Loader(
        Numbers(64, full=np.full), batch_size=8, epochs=1, shuffle=False, report=None
    ) as loader:
        for number, batch in enumerate(loader):
            array = jax.device_put(batch["x"])
            assert array.unsafe_buffer_pointer() == batch["x"].ctypes.data, "nothing was copied"
            assert overwrite(array)[0, 0, 0] == -1
            assert batch["x"][:, 0, 0].tolist() == list(range(8 * number, 8 * number + 8))


def test_numbers_that_jax_would_wrap_around_are_an_error() -> None:
    data = Numbers(8, lambda k: 2**31 + k)
    message = "from 2147483648 to 2147483655, and JAX makes int32 of int64"
    with (
        pj.Loader(data, batch_size=8, epochs=1, report=None) as loader,
        pytest.raises(DataError, match=message),
    ):
        next(iter(loader))
    with jax.enable_x64(), pj.Loader(data, batch_size=8, epochs=1, report=None) as loader:
        assert sorted(next(iter(loader))["y"].tolist()) == [2**31 + k for k in range(8)]


def test_a_sharding_lays_rows_out_over_devices() -> None:
    with pj.Loader(
        Numbers(32), batch_size=8, epochs=1, shuffle=False, sharding=by_rows(), report=None
    ) as loader:
        batch = next(iter(loader))

    shards = sorted(batch["x"].addressable_shards, key=lambda shard: shard.device.id)
    assert [shard.data[:, 0, 0].tolist() for shard in shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert batch["y"].sharding.is_equivalent_to(by_rows(), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 6}, "sharding .* does not lay out the 6 rows of a batch"),
        (
            {"batch_size": 16},
            "an epoch's last batch has 2 samples, which .* does not divide evenly.*drop_last=True",
        ),
        ({"batch_size": 8, "world_size": 2, "rank": 0}, "mesh is given beside rank or world_size"),
    ],
)
def test_batches_that_cannot_be_laid_out_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pj.Loader(Numbers(34), epochs=1, sharding=by_rows(), report=None, **arguments)
    gc.collect()


class Held:
    """The sharding of one process among several: which rows its devices hold."""

    def __init__(self, *rows: slice) -> None:
        self.rows = rows

    def addressable_devices_indices_map(self, shape: tuple[int]) -> dict[int, tuple[slice]]:
        return {device: (rows,) for device, rows in enumerate(self.rows)}


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ((slice(0, 4), slice(4, 8)), (0, 4)),
        ((slice(24, 28), slice(28, 32)), (3, 4)),
        ((slice(8, 16), slice(8, 16)), (1, 4)),  # tensor parallelism within the process
        ((slice(None), slice(None)), (0, 1)),
    ],
)
def test_a_process_has_the_rank_of_the_rows_that_its_devices_hold(
    rows: tuple[slice, ...], place: tuple[int, int]
) -> None:
    assert place_in_mesh(Held(*rows), 32) == place
    assert place_in_mesh(SingleDeviceSharding(jax.devices()[0]), 32) == (0, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((slice(0, 4), slice(8, 12)), "hold rows 0 to 3, 8 to 11 of a batch of 32"),
        ((slice(4, 12),), "one of several equal parts"),
        ((), "has no device of this process"),
    ],
)
def test_a_process_whose_rows_are_no_part_of_its_own_is_refused(
    rows: tuple[slice, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place_in_mesh(Held(*rows), 32)
