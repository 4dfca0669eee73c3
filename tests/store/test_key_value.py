"""A tier of keys and values: found again by later runs, and whatever the store does, nothing wrong is read."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.store import FlatFolder
from penstock.store.key_value import KeyValueTier

SIZES = np.array([5, 300, 0, 4096, 17, 999], np.int64)
CONTENTS = [np.random.default_rng(sample).bytes(size) for sample, size in enumerate(SIZES.tolist())]
DATA, OTHER = bytes(range(16)), bytes(range(1, 17))
ENOUGH = 1 << 20
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "a-tier-of-your-own.md"


class Dictionary:
    """A store in this process. fails: methods that raise."""

    #: By path, what outlives a store.
    kept: dict[str, dict[str, bytes]] = {}  # noqa: RUF012

    def __init__(self, path: str = "") -> None:
        self.values = self.kept.setdefault(path, {})
        self.fails: set[str] = set()
        self.closed = 0

    def __repr__(self) -> str:
        return "a dictionary"

    def _check(self, name: str) -> None:
        if name in self.fails:
            raise ConnectionError(f"no {name} today")

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        self._check("get")
        return [self.values.get(key) for key in keys]

    def put(self, key: str, value: bytes) -> bool:
        self._check("put")
        self.values[key] = value
        return True

    def delete(self, keys: Sequence[str]) -> None:
        self._check("delete")
        for key in keys:
            self.values.pop(key, None)

    def keys(self, prefix: str) -> Iterable[str | bytes]:
        self._check("keys")
        return [key.encode() for key in self.values if key.startswith(prefix)]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def store() -> Iterator[Dictionary]:
    yield Dictionary()
    Dictionary.kept.clear()


def tier_of(store: Any, capacity_bytes: int = ENOUGH, fingerprint: bytes = DATA, **more: Any) -> KeyValueTier:
    return KeyValueTier(store, capacity_bytes, fingerprint, SIZES, **more)


def put_all(tier: KeyValueTier) -> None:
    for sample, content in enumerate(CONTENTS):
        assert tier.put(sample, content)


def found_in(tier: KeyValueTier, ids: Sequence[int] | None = None) -> dict[int, bytes]:
    chosen = tier.held() if ids is None else np.array(ids)
    begins = np.concatenate(([0], np.cumsum(SIZES[chosen])))
    into = np.empty(int(begins[-1]), np.uint8)
    failed = {index for index, _ in tier.read_group(chosen, into, begins)}
    return {
        int(sample): into[begins[index] : begins[index + 1]].tobytes()
        for index, sample in enumerate(chosen)
        if index not in failed
    }


def test_a_later_run_over_the_same_data_finds_all_and_one_over_others_nothing(store: Dictionary) -> None:
    put_all(tier_of(store))

    assert found_in(tier_of(store)) == dict(enumerate(CONTENTS))
    assert tier_of(store, fingerprint=OTHER).held().size == 0
    assert tier_of(store, number=1).held().size == 0
    assert found_in(tier_of(store)) == dict(enumerate(CONTENTS))


def test_what_does_not_fit_is_not_kept_and_what_is_evicted_makes_space(store: Dictionary) -> None:
    tier = tier_of(store, 4500)

    assert [tier.put(sample, CONTENTS[sample]) for sample in (3, 1, 5)] == [True, True, False]
    assert tier.used_bytes == 4396
    tier.evict(np.array([3, 4]))
    assert not tier.contains(3)
    assert tier.put(5, CONTENTS[5])
    assert found_in(tier) == {1: CONTENTS[1], 5: CONTENTS[5]}
    # A smaller capacity, later: the others are deleted.
    assert found_in(tier_of(store, 1000)) == {1: CONTENTS[1]}
    assert len(store.values) == 1


def test_a_value_that_is_gone_or_another_is_never_handed_out(store: Dictionary) -> None:
    """Deleted by somebody, cut off, one byte flipped."""
    tier = tier_of(store)
    put_all(tier)
    prefix = next(iter(store.values)).removesuffix("0")
    del store.values[prefix + "0"]
    store.values[prefix + "1"] = store.values[prefix + "1"][:-1]
    flipped = bytearray(store.values[prefix + "3"])
    flipped[100] ^= 1
    store.values[prefix + "3"] = bytes(flipped)

    assert found_in(tier) == {sample: CONTENTS[sample] for sample in (2, 4, 5)}
    assert tier.held().tolist() == [2, 4, 5]
    assert tier.used_bytes == SIZES[[2, 4, 5]].sum()
    assert tier.put(3, CONTENTS[3])
    assert found_in(tier, [3]) == {3: CONTENTS[3]}


def test_two_jobs_at_once_read_what_either_stored_and_what_one_deletes_the_other_stores_again(
    store: Dictionary,
) -> None:
    """The second one may keep less, and deletes what is too much for it."""
    first = tier_of(store)
    put_all(first)
    second = tier_of(store, 1000)
    second.evict(np.array([1]))

    assert found_in(second) == {sample: CONTENTS[sample] for sample in (0, 2, 4)}
    assert found_in(first) == {sample: CONTENTS[sample] for sample in (0, 2, 4)}
    assert first.held().tolist() == [0, 2, 4]
    assert first.put(3, CONTENTS[3])
    assert found_in(first, [3]) == {3: CONTENTS[3]}


def test_a_store_that_fails_is_reported_once_and_is_read_while_it_can_be(store: Dictionary) -> None:
    lines: list[str] = []
    tier = tier_of(store, report=lines.append)
    assert tier.put(0, CONTENTS[0])

    store.fails = {"put"}
    assert not tier.put(1, CONTENTS[1])
    store.fails = set()
    assert not tier.put(3, CONTENTS[3])  # not asked again
    assert found_in(tier) == {0: CONTENTS[0]}
    store.fails = {"get", "delete"}
    assert found_in(tier) == {}
    tier.evict(np.array([0]))

    assert lines == ["a dictionary takes no more samples: no put today: its samples are read from the source"]


def test_a_closed_tier_and_wrong_arguments_are_errors(store: Dictionary) -> None:
    tier = tier_of(store)
    with pytest.raises(DataError, match="sample 1 has 300 bytes, not 2"):
        tier.put(1, b"ab")
    tier.close()
    tier.close()
    assert store.closed == 1
    with pytest.raises(ClosedError):
        tier.put(0, CONTENTS[0])
    with pytest.raises(ConfigError, match="capacity_bytes"):
        tier_of(store, 0)
    store.fails = {"keys"}
    with pytest.raises(DataError, match="a dictionary cannot say what it keeps: no keys today"):
        tier_of(store)
    assert store.closed == 2


def machine_with(backend: str, path: str) -> Machine:
    flat = Curve.flat(1e9)
    return Machine(
        SharedStore(None, Curve.flat(1e6), 0.01),
        (
            StorageClass("staging", 10**6, 1, flat),
            StorageClass("own", 10**6, 2, flat, backend=backend, path=path),
        ),
    )


def batches_of(data: Path, **arguments: Any) -> tuple[list[bytes], list[str]]:
    lines: list[str] = []
    with Loader(
        FlatFolder(data, extensions=None),
        batch_size=8,
        epochs=2,
        seed=5,
        memory="3 MB",
        transforms=[DecodeRaw("uint8", (2000,))],
        dtype="uint8",
        report=lines.append,
        **arguments,
    ) as loader:
        return [images.tobytes() for _ in range(2) for images, _ in loader], lines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for sample in range(64):
        (folder / f"{sample:03}.bin").write_bytes(np.random.default_rng(sample).bytes(2000))
    return folder


def test_a_loader_keeps_samples_by_the_class_that_its_machine_names(store: Dictionary, data: Path) -> None:
    machine = machine_with(f"{__name__}:Dictionary", "a place")
    assert Machine.from_toml(machine.to_toml()) == machine

    expected, _ = batches_of(data)
    first, _ = batches_of(data, machine=machine)
    second, lines = batches_of(data, machine=machine)

    assert first == second == expected
    assert len(Dictionary.kept["a place"]) == 64
    assert any(f"by {__name__}:Dictionary 'a place', 64 samples there already" in line for line in lines)


@pytest.mark.parametrize(
    ("backend", "message"),
    [("nowhere.to:Be", "ModuleNotFoundError"), (f"{__name__}:Nobody", "AttributeError")],
)
def test_a_class_that_cannot_be_made_is_named(data: Path, backend: str, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"'own' has the backend '{backend}', which cannot be made with '7': .*{message}"
    ):
        batches_of(data, machine=machine_with(backend, "7"))


def test_a_backend_that_is_no_name_of_a_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'package\.module:Name'"):
        machine_with("redis", "x")


@pytest.mark.system
def test_the_example_of_the_page_works_with_a_real_redis(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-server by the Debian package of that name, and the client as the page has it."""
    place = tmp_path / "code"
    place.mkdir()
    (place / "redis_store.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(place))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path), "--daemonize", "no"]
    server = subprocess.Popen(
        [shutil.which("redis-server") or "redis-server", *command[1:]], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        assert any(b"Ready to accept connections" in line for line in server.stdout)
        machine = machine_with("redis_store:RedisStore", f"redis://127.0.0.1:{port}/0")
        expected, _ = batches_of(data)
        first, _ = batches_of(data, machine=machine)
        second, lines = batches_of(data, machine=machine)
        assert first == second == expected
        assert any("64 samples there already" in line for line in lines)
    finally:
        server.kill()
        server.communicate()
        sys.modules.pop("redis_store", None)
    with pytest.raises(DataError, match="cannot say what it keeps"):
        batches_of(data, machine=machine)
