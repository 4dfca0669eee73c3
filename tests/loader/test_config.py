"""What a loader is asked to do, as a value; and what it will do, predicted from that alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from tests.for_each import for_each

import penstock
import penstock.torch
from penstock.errors import ConfigError, DataError
from penstock.loader import Loader, LoaderArguments, LoaderConfig
from penstock.loader.transforms import (
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, Batches, BundleShuffle, Explicit, Sequential
from penstock.policy.loading import Job, Loading, Staging
from penstock.store import FlatFolder, ImageFolder
from penstock.trace import SOURCE, Kind

TO_ARRAY = (Resize((8, 8)), ToTensor())


def of_photos(source: Any = "photos", **arguments: Any) -> LoaderConfig:
    return LoaderConfig(source, **{"batch_size": 4, "epochs": 2, "transforms": TO_ARRAY, **arguments})


def of_any(name: str, **arguments: Any) -> LoaderConfig:
    """Return a configuration that may have this argument."""
    if name in OF_DATA_SETS:
        return of_photos(range(23), transforms=(), **arguments)
    return of_photos(**arguments)


#: A value of each argument that has a default, another than that; and one that cannot work, with what is said of it.
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "batch_size": (8, 0, "batch_size is 0"),
    "batch_sampler": (Batches([[0, 1], [2]], 3), 5, "batch_sampler is 5"),
    "epochs": (None, 0, "epochs is 0"),
    "steps": (20, 0, "steps is 0"),
    "transforms": ([Resize(6), ToTensor()], [ToTensor(), Resize(6)], "transform 1 .*stands behind ToTensor"),
    "mix_images": (MixUp(3), 5, "mix_images is 5; it is MixUp"),
    "collate_fn": (list, "stack", "collate_fn is 'stack'"),
    "optional": ({}, "caption", "optional is 'caption'; it maps names"),
    "ragged": ([], "tokens", "ragged is 'tokens'; it is a list of names"),
    "padded": ({}, ["tokens"], r"padded is \['tokens'\]; it maps names"),
    "cache": ("rows", "everything", "cache is 'everything'; it is"),
    "shuffle": (BundleShuffle(23, 1, 0.3), [3, 1], r"shuffle is \[3, 1\]"),
    "seed": (7, -1, "seed is -1"),
    "drop_last": (True, "yes", "drop_last is 'yes'"),
    "rank": (1, 2, "rank is 2"),
    "world_size": (4, 0, "world_size is 0"),
    "split": ("strided", "evenly", "split is 'evenly'"),
    "dtype": ("float16", "float12", "dtype is 'float12'"),
    "layout": ("NHWC", "HWCN", "layout is 'HWCN'"),
    "memory": ("1 GiB", "lots", "memory: .*lots"),
    "prefetch": (2, 0, "prefetch is 0; it must be at least 1"),
    "keep": ("crops", "1 crops", "keep is '1 crops'"),
    "local_disk": ("/scratch/penstock", 7, "local_disk is 7"),
    "machine": ("machine.toml", 5, "machine is 5"),
    "policy": ("staging", "frequent", "policy 'frequent' is not known"),
    "share": ("host", "rack", "share is 'rack'"),
    "decode_servers": (
        ("node7:7447", "[::1]:9"),
        ["node7:http"],
        "'node7:http' is no address of a decode server",
    ),
    "readers": (3, 0, "readers is 0"),
    "decoders": (3, 1025, "decoders is 1025"),
    "workers": ("threads", 0, "workers is 0"),
    "worker_init_fn": (print, 3, "worker_init_fn is 3"),
    "on_error": ("skip", "ignore", "on_error is 'ignore'"),
    "skip": ("bad.jsonl", [3], r"skip is \[3\]"),
    "refresh": ("never", "sometimes", "refresh is 'sometimes'"),
    "storage_options": ({}, "anon", "storage_options is of type str"),
    "patience_seconds": (1.0, None, "patience_seconds is None"),
    "timeout_seconds": (np.float32(1.0), True, "timeout_seconds is True; it must be a number"),
}
WITH_DEFAULT = [each.name for each in fields(LoaderConfig) if each.default is not MISSING]
#: Those that a data set alone may have: an object is equal to itself alone.
OF_DATA_SETS = ["collate_fn", "worker_init_fn", "cache"]
#: Those that are given in place of others, and are objects.
INSTEAD = ["batch_sampler"]


def test_every_argument_of_a_loader_is_a_field_and_the_other_way_round() -> None:
    assert list(OTHERS) == WITH_DEFAULT
    assert ["source", *LoaderArguments.__annotations__] == [each.name for each in fields(LoaderConfig)]
    for name, kind in get_type_hints(LoaderArguments).items():
        assert get_type_hints(LoaderConfig)[name] == kind


@for_each("name", [name for name in WITH_DEFAULT if name not in OF_DATA_SETS + INSTEAD])
def test_a_configuration_that_is_printed_can_be_read_and_copied_and_is_equal(name: str) -> None:
    both = {"world_size": 2} if name == "rank" else {}
    config, usual = of_photos(**{name: OTHERS[name][0]}, **both), of_photos(**both)

    assert eval(repr(config)) == config == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config)
    assert replace(usual, **{name: OTHERS[name][0]}) == config
    assert hash(replace(usual)) == hash(usual)
    assert config != usual
    assert name == "epochs" or f"{name}=" in repr(config)
    assert name in ("transforms", "epochs", "batch_size") or f"{name}=" not in repr(usual)


@for_each("name", WITH_DEFAULT)
def test_a_wrong_value_is_refused_where_it_is_given_by_the_name_that_was_typed(name: str) -> None:
    _, wrong, message = OTHERS[name]
    changed = {name: wrong, **({"world_size": 2} if name == "rank" else {})}
    if name in INSTEAD:
        changed["batch_size"] = None
    with pytest.raises(ConfigError, match=message):
        of_any(name, **changed)
    with pytest.raises(ConfigError, match=message):
        replace(of_any(name), **changed)


def test_a_configuration_says_in_a_line_what_differs_from_the_usual() -> None:
    config = LoaderConfig(
        Path("photos/train"),
        batch_size=np.int64(64),  # type: ignore[arg-type]
        epochs=90,
        transforms=[RandomHorizontalFlip(), ToTensor(), Normalize((0, 0, 0), (1, 1, 1))],
        memory="8 GiB",
    )

    assert repr(config) == (
        "LoaderConfig('photos/train', batch_size=64, epochs=90, transforms=(RandomHorizontalFlip(p=0.5), ToTensor(), "
        "Normalize(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))), memory='8 GiB')"
    )
    with pytest.raises(FrozenInstanceError):
        config.epochs = 1  # type: ignore[misc]


def test_a_source_that_is_an_object_is_equal_to_itself_alone_and_printed_in_short() -> None:
    rows = [(np.zeros(2), k) for k in range(1000)]
    array = np.zeros((5, 2))
    for one, other in ((rows, [*rows]), (array, array.copy())):
        config = LoaderConfig(one, batch_size=4, epochs=1)
        assert config == LoaderConfig(one, batch_size=4, epochs=1)
        assert config != LoaderConfig(other, batch_size=4, epochs=1)
        assert len(repr(config)) < 500
    order, same = (Explicit([[0, 1, 2]], samples=3) for _ in range(2))
    assert of_photos(shuffle=order, epochs=1) == of_photos(shuffle=order, epochs=1)
    assert of_photos(shuffle=order, epochs=1) != of_photos(shuffle=same, epochs=1)


@pytest.mark.parametrize("make", [penstock.Loader, penstock.torch.Loader])
def test_a_loader_is_made_from_a_configuration_as_from_its_arguments(make: Any) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "epochs": 1, "memory": "1 MB", "seed": 3}
    dataset = [(np.full(2, k), k) for k in range(10)]
    config = LoaderConfig(dataset, **arguments)

    with make(config, report=None) as one, make(dataset, report=None, **arguments) as other:
        assert one.config is config
        assert other.config == config
        for (rows, labels), (same_rows, same_labels) in zip(one, other, strict=True):
            assert type(rows) is (torch.Tensor if make is penstock.torch.Loader else np.ndarray)
            assert rows.tolist() == same_rows.tolist()
            assert labels.tolist() == same_labels.tolist()
        assert (isinstance(one, penstock.Loader), isinstance(one, make)) == (True, True)
    with pytest.raises(ConfigError, match=r"epochs given with a LoaderConfig.*replace\(config, epochs="):
        make(config, epochs=2)
    with pytest.raises(ConfigError, match="epochs is missing: give how many"):
        make(dataset, batch_size=4)
    with pytest.raises(ConfigError, match="the list of paths is empty"):
        make([], **arguments)
    with pytest.raises(ConfigError, match="num_workers is no argument of a loader: threads are counted"):
        make(dataset, num_workers=4, **arguments)
    with pytest.raises(ConfigError, match=r"epoch is no argument of a loader: see penstock\.LoaderConfig"):
        make(dataset, epoch=4, **arguments)


def test_the_loader_for_pytorch_adds_what_trainers_ask_a_dataloader_for_and_overrides_nothing() -> None:
    own = {name for name in vars(penstock.torch.Loader) if not name.startswith("__")}

    assert own == {"sampler", "batch_sampler", "dataset", "collate_fn", "generator", "prefetch_factor"}
    assert not own & set(dir(Loader))
    assert penstock.torch.Loader.__mro__[1] is Loader
    assert not inspect.isabstract(Loader)


# Predicted


def machine(memory_bytes: int = 10**7, compute: Any = None) -> Machine:
    memory = Curve(((1, 1e9),))
    return Machine(
        SharedStore(None, Curve(((1, 1e6),)), 1e-3, 8),
        (StorageClass("staging", 10**7, 1, memory), StorageClass("memory", memory_bytes, 1, memory)),
        compute=compute,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle": False, "drop_last": True, "batch_size": 5},
        {"rank": 1, "world_size": 2, "seed": 9},
        {"policy": "staging", "readers": 2, "decoders": 1},
        {"policy": Staging(), "dtype": "uint8", "transforms": [Resize((8, 8))]},
        {"machine": machine(memory_bytes=6000)},
        {"transforms": [RandomResizedCrop(8), ToTensor()], "keep": "decoded", "memory": "1 MB"},
        {"transforms": [Resize(8), ToTensor()]},
    ],
)
def test_a_configuration_is_predicted_as_its_loader_is_nothing_is_started_and_one_sample_read(
    image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    config = LoaderConfig(
        image_folder(),
        **{"batch_size": 4, "epochs": 3, "transforms": TO_ARRAY, "memory": "32 MiB", **arguments},
    )
    with Loader(config, report=None) as loader:
        expected = loader.predict(machine=machine(), step_seconds=0.01)
    before, reads, read = set(threading.enumerate()), list[int](), ImageFolder.read

    def noted(source: ImageFolder, sample: int) -> bytes:
        reads.append(sample)
        return read(source, sample)

    with monkeypatch.context() as patched:
        patched.setattr(ImageFolder, "read", noted)
        patched.setattr(ImageFolder, "read_into", lambda *_: pytest.fail("a sample was read"))
        patched.setattr("penstock.loader.samples.MemoryTier", lambda *_: pytest.fail("memory was taken"))
        patched.setattr("penstock.flow.engine.Engine", lambda *_: pytest.fail("an engine was made"))
        predicted = penstock.predict(config, machine(), step_seconds=0.01)

    assert set(threading.enumerate()) <= before
    assert len(set(reads)) == 1
    assert predicted.meta == expected.meta
    assert np.array_equal(predicted.spans, expected.spans)
    assert predicted.spans.size


def test_a_policy_draws_from_the_loaders_seed_where_it_runs_and_where_it_is_predicted(
    image_folder: Callable[..., Path],
) -> None:
    asked: list[int] = []

    class Draws(Staging):
        def prepare(self, job: Job) -> Loading:
            asked.append(job.seed)
            return super().prepare(job)

    config = of_photos(image_folder(), seed=7, policy=Draws(name="draws"), memory="32 MiB", machine=machine())
    with Loader(config, report=None) as loader:
        loader.predict(step_seconds=0.01)
    penstock.predict(config, step_seconds=0.01)

    assert set(asked) == {7}


def test_a_prediction_takes_the_machine_of_the_configuration_and_its_file(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "machine.toml").write_text(machine().to_toml())
    root = image_folder()

    traces = [
        penstock.predict(of_photos(root, machine=machine()), step_seconds=0.01),
        penstock.predict(of_photos(root, machine=tmp_path / "machine.toml"), step_seconds=0.01),
    ]

    assert np.array_equal(traces[0].spans, traces[1].spans)
    with pytest.raises(ConfigError, match=r"machine is not known, here or in the configuration"):
        penstock.predict(of_photos(root), step_seconds=0.01)
    with pytest.raises(ConfigError, match="step_seconds is not given"):
        penstock.predict(of_photos(root), machine())


def test_more_memory_than_this_computer_has_can_be_predicted(image_folder: Callable[..., Path]) -> None:
    config = of_photos(image_folder(), memory="100 TB")

    predicted = penstock.predict(config, machine(), step_seconds=0.01)

    reads = predicted.spans[(predicted.spans["kind"] == Kind.READ) & (predicted.spans["place"] == SOURCE)]
    assert sorted(reads["sample"].tolist()) == list(range(12)), "all is kept after the first epoch"
    with pytest.raises(ConfigError, match="memory is 100 TB, and this process may use"):
        Loader(config)


def test_what_cannot_be_predicted_says_why(image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    with pytest.raises(ConfigError, match="costs is known to its own code alone"):
        penstock.predict(LoaderConfig([np.zeros(2)], batch_size=1, epochs=1), machine(), step_seconds=0.01)
    with pytest.raises(
        ConfigError, match=r"config is of type AccessPlan; .*penstock\.simulate\.predict\(Job\(plan"
    ):
        penstock.predict(AccessPlan(Sequential(4), 2, 1), machine())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="missing does not exist"):
        penstock.predict(of_photos(root / "missing"), machine(), step_seconds=0.01)


def test_memory_that_does_not_hold_a_picture_while_it_is_decoded_is_refused_by_a_prediction_too(
    image_folder: Callable[..., Path],
) -> None:
    config = of_photos(image_folder(images=2, width=1200, height=900, quality=5), memory="100 kB")

    with pytest.raises(ConfigError, match="memory is 100 kB") as refused:
        Loader(config, report=None)
    with pytest.raises(ConfigError, match=re.escape(str(refused.value))):
        penstock.predict(config, machine(), step_seconds=0.01)


def test_a_source_of_ones_own_is_predicted_by_its_sizes_alone(image_folder: Callable[..., Path]) -> None:
    class Big(FlatFolder):
        """Three files said to be of a megabyte each."""

        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.sizes_bytes = np.full(len(self), 1_000_000)

    source = Big(image_folder() / "cat")
    predicted = penstock.predict(of_photos(source, epochs=1), machine(), step_seconds=0.0)

    # A store of 1 MB/s: a second for each file.
    assert predicted.epochs()[0].seconds == pytest.approx(len(source), rel=0.01)


def test_a_source_that_is_open_already_is_not_refreshed(image_folder: Callable[..., Path]) -> None:
    source = ImageFolder(image_folder())

    assert of_photos(source, refresh="auto").source is source
    with pytest.raises(
        ConfigError, match="refresh is 'full', and the source is open already: give it to what opens"
    ):
        of_photos(source, refresh="full")
