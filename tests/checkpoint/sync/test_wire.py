"""Weights on the wire: a worker's tensors become the trainer's bit for bit, or it is told that they did not."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.boxes import save_rows
from tests.for_each import for_each
from tests.forking import Forks

from penstock.checkpoint import Keep, Refresher, SnapshotStore
from penstock.checkpoint.codecs.codec import Kind
from penstock.checkpoint.files.parts import BLOCK
from penstock.errors import ConfigError, FormatError
from penstock.policy.delta_schemes import Scheme

HEAD = struct.Struct("<8sII8s")
RUN = struct.Struct("<III")
START, BLOCKS, END = 1, 2, 3
#: More than a block of 131,072 values.
LONG = 150_000


def bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(words[tensor.element_size()])


def model(seed: int, *, moved: float = 1e-3, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return weights that move a little from seed to seed, some that are frozen, one that is there twice."""
    base = torch.Generator().manual_seed(0)
    weight = torch.randn(LONG, generator=base)
    table = torch.randn(30, 40, generator=base)
    frozen = torch.randn(500, generator=base)
    for step in range(1, seed + 1):
        noise = torch.Generator().manual_seed(step)
        weight += moved * torch.randn(LONG, generator=noise) * (torch.rand(LONG, generator=noise) < 0.4)
        table += moved * torch.randn(30, 40, generator=noise)
    state = {"weight": weight, "table": table, "frozen": frozen, "replica": weight.clone()}
    return {name: tensor.to(dtype) for name, tensor in state.items()} | {"seen": torch.tensor(seed)}


def zeros_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in other.items():
        assert torch.equal(bits(one[name]), bits(tensor)), name


@pytest.fixture
def trainer(folder: Path) -> Iterator[Callable[..., SnapshotStore]]:
    """Return what makes a store with models of steps 0, 1, ... in it."""
    stores: list[SnapshotStore] = []

    def make(
        steps: int, dtype: torch.dtype = torch.float32, optimizer: bool = False, **settings: Any
    ) -> SnapshotStore:
        store = SnapshotStore(folder, keep=Keep(last=None), threads=1, report=None, **settings)
        stores.append(store)
        for step in range(steps):
            state: dict[str, Any] = {"model": model(step, dtype=dtype), "step": step}
            if optimizer:
                state["optimizer"] = {"moment": torch.full((1000,), float(step))}
            store.save(step, state).wait()
        return store

    yield make
    for store in stores:
        store.close()


# -- What arrives ------------------------------------------------------------------------------------------

WORKER = """
import sys
from multiprocessing.connection import Client
import torch, xxhash
from penstock.checkpoint import Refresher
from penstock.errors import FormatError

def model(dtype):
    # As an inference engine may keep it: one tensor transposed, one within a larger one.
    return {
        "weight": torch.zeros(2, 150_000, dtype=dtype)[1],
        "table": torch.zeros(40, 30, dtype=dtype).T,
        "frozen": torch.zeros(500, dtype=dtype),
        "replica": torch.zeros(300_000, dtype=dtype)[::2],
    }

state = {"model": model(torch.float32), "half": model(torch.bfloat16)}
refresher = Refresher(state)
with Client((sys.argv[1], int(sys.argv[2])), authkey=b"penstock") as connection:
    for order in iter(connection.recv, None):
        if order == "refresh":
            done = refresher.apply(iter(connection.recv_bytes, None))
            told = [done.step, done.sent_bytes]
        tensors = [*state["model"].values(), *state["half"].values()]
        words = [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
        connection.send([*told, refresher.step, [xxhash.xxh3_128_hexdigest(word) for word in words]])
"""


def test_a_worker_in_another_process_follows_the_trainer_over_hops_and_baselines(
    folder: Path, forks: Forks
) -> None:
    listener = Listener(("127.0.0.1", 0), authkey=b"penstock")
    address = [str(part) for part in listener.address]
    script = folder.with_name("worker.py")
    script.write_text(WORKER)
    with (
        SnapshotStore(folder, keep=Keep(last=None), snap_dis=4, threads=1, report=None) as store,
        forks.start(script, [[[address]]]) as worker,
    ):
        for step in range(6):
            optimizer = {"moment": torch.full((1000,), float(step))}
            half = model(step, dtype=torch.bfloat16)
            store.save(step, {"model": model(step), "half": half, "optimizer": optimizer}).wait()
        with listener, listener.accept() as connection:

            def refreshed(begin: int | None, end: int) -> int:
                connection.send("refresh")
                sent = 0
                for message in store.refresh(begin, end, only=["model/*", "half/*"]):
                    connection.send_bytes(message)
                    sent += len(message)
                step, received, at, digests = connection.recv()
                assert (step, received, at) == (end, sent, end)
                expected = [
                    tensor.contiguous().view(torch.uint8).numpy().tobytes()
                    for dtype in (torch.float32, torch.bfloat16)
                    for name, tensor in model(end, dtype=dtype).items()
                    if name != "seen"
                ]
                assert digests == [xxhash.xxh3_128_hexdigest(words) for words in expected]
                return sent

            everything = refreshed(None, 0)
            one_hop = refreshed(0, 1)
            two_hops = refreshed(1, 3)
            over_a_baseline = refreshed(3, 5)
            nothing = refreshed(5, 5)
            back = refreshed(5, 4)
            connection.send(None)
        told, ended = worker.wait()
        assert [*ended.values()] == [0], told

    assert nothing < 10_000 < one_hop < two_hops < over_a_baseline
    assert one_hop < 0.9 * everything
    assert two_hops < 2.1 * one_hop
    assert back <= everything * 1.05, "a step back is a baseline here"


def test_what_is_frozen_costs_nothing_and_what_is_there_twice_is_sent_encoded(
    trainer: Callable[..., SnapshotStore],
) -> None:
    store = trainer(2, dtype=torch.bfloat16)
    worker = {"model": zeros_like(model(0, dtype=torch.bfloat16))}
    refresher = Refresher(worker)
    refresher.apply(store.refresh(None, 0))

    frozen = sum(map(len, store.refresh(0, 1, only=["model/frozen"])))
    once = sum(map(len, store.refresh(0, 1, only=["model/weight"])))
    both = sum(map(len, store.refresh(0, 1, only=["model/weight", "model/replica"])))

    start = max(map(len, store.refresh(1, 1)))
    assert frozen < start + 200
    assert both - start < 2.2 * (once - start), "the second is no longer than the first"
    refresher.apply(store.refresh(0, 1))
    assert_same(worker["model"], model(1, dtype=torch.bfloat16))


def test_plain_values_come_too_and_what_the_worker_lacks_is_left_out(
    trainer: Callable[..., SnapshotStore],
) -> None:
    store = trainer(3, optimizer=True)
    weights = zeros_like(model(0))
    worker: dict[str, Any] = {"model": weights, "step": -1, "own": torch.ones(3)}
    refresher = Refresher(worker)

    first = refresher.apply(store.refresh(None))
    again = refresher.apply(store.refresh(2, 2, only=["model"]))

    assert (first.step, worker["step"], first.not_found) == (2, 2, ("own",))
    assert again.not_found == ()
    assert worker["model"] is weights
    assert_same(weights, model(2))
    assert worker["own"].tolist() == [1, 1, 1]


def test_names_that_look_like_patterns_are_names(folder: Path) -> None:
    with SnapshotStore(folder, report=None) as store:
        store.save(1, {"a*": np.arange(4.0), "ab": np.arange(5.0)}).wait()
        worker = {"a*": np.zeros(4), "ab": np.full(10, 7.0)[::2]}

        Refresher(worker).apply(store.refresh(None, only=["a[*]"]))

    assert worker["a*"].tolist() == [0, 1, 2, 3]
    assert worker["ab"].tolist() == [7] * 5


def test_every_type_of_number_and_every_bit_pattern_arrives(folder: Path) -> None:
    generator = np.random.default_rng(3)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int16]
    dtypes += [torch.uint8, torch.complex64]

    def state() -> dict[str, torch.Tensor]:
        words = torch.from_numpy(generator.integers(0, 256, 4096, np.uint8))
        tensors = {str(dtype): words.clone().view(dtype) for dtype in dtypes}
        return tensors | {"bool": torch.rand(100) < 0.5, "empty": torch.empty(0, 3), "scalar": torch.rand(())}

    first, second = state(), state()
    worker = zeros_like(first)
    refresher = Refresher(worker)
    with SnapshotStore(folder, report=None) as store:
        store.save(1, first).wait()
        store.save(2, second).wait()
        for begin, end, expected in ((None, 1, first), (1, 2, second)):
            refresher.apply(store.refresh(begin, end))
            for name, tensor in expected.items():
                assert (
                    worker[name].numpy(force=True).tobytes() == tensor.numpy().tobytes()
                    if (name == "bool")
                    else torch.equal(worker[name].view(torch.uint8), tensor.view(torch.uint8))
                    if (tensor.dim())
                    else torch.equal(worker[name], tensor)
                ), name


@pytest.mark.parametrize(
    ("scheme", "codec"),
    [("progressive", "dynrle"), ("chain", "balance"), ("complete", "gzip-delta"), ("progressive", "stored")],
)
def test_whichever_way_the_store_keeps_it(folder: Path, scheme: Scheme, codec: str) -> None:
    states = [{"weight": model(step)["weight"][:3000]} for step in range(4)]
    worker = zeros_like(states[0])
    refresher = Refresher(worker)
    with SnapshotStore(folder, scheme=scheme, codec=codec, threads=1, report=None) as store:
        for step, state in enumerate(states):
            store.save(step, state).wait()
        for begin, end in ((None, 1), (1, 3), (3, 2)):
            assert refresher.apply(store.refresh(begin, end)).step == end
            assert_same(worker, states[end])


def test_a_worker_at_a_step_that_was_removed_or_never_was_gets_everything(folder: Path) -> None:
    worker = {"weight": np.zeros(3000)}
    refresher = Refresher(worker)
    with SnapshotStore(folder, keep=Keep(last=1), scheme="complete", threads=1, report=None) as store:
        store.save(1, {"weight": np.arange(3000.0)}).wait()
        refresher.apply(store.refresh(None, 1))
        for step in (2, 3):
            store.save(step, {"weight": np.arange(3000.0) + step}).wait()
        assert [one.step for one in store.list()] == [3]

        for begin in (1, 999):
            worker["weight"][:] = -1
            assert refresher.apply(store.refresh(begin, 3)).step == 3
            assert worker["weight"].tolist() == (np.arange(3000.0) + 3).tolist()
        with pytest.raises(ConfigError, match="no snapshot of step 999"):
            store.refresh(3, 999)


def test_with_a_burst_buffer_the_differences_of_the_slow_tier_are_sent(folder: Path, tmp_path: Path) -> None:
    with SnapshotStore(folder, fast=tmp_path / "fast", report=None) as store:
        for step in range(2):
            store.save(step, {"model": model(step, dtype=torch.bfloat16)}).wait()
            store.drain()
        worker = {"model": zeros_like(model(0, dtype=torch.bfloat16))}
        refresher = Refresher(worker)

        everything = refresher.apply(store.refresh(None, 0)).sent_bytes
        difference = refresher.apply(store.refresh(0, 1)).sent_bytes

        assert_same(worker["model"], model(1, dtype=torch.bfloat16))
    raw = 2 * (2 * LONG + 1200 + 500)
    assert everything < 0.95 * raw, "encoded, although the nearest copy is as it was"
    assert difference < 0.5 * raw


def test_a_tensor_that_is_spread_over_ranks_is_refreshed_whole(folder: Path) -> None:
    """Rows of one tensor are two ranks'; a worker without ranks has all of it."""
    generator = np.random.default_rng(5)
    first = generator.normal(size=(40, 50)).astype(np.float32)
    second = first + np.float32(1e-3) * generator.normal(size=first.shape).astype(np.float32)
    for step, table in enumerate((first, second)):
        save_rows(folder, step, table)
    with SnapshotStore(folder, report=None) as store:
        worker = {"table": np.zeros((50, 40), np.float32).T}
        refresher = Refresher(worker)

        for begin, end, expected in ((None, 0, first), (0, 1, second)):
            refresher.apply(store.refresh(begin, end))
            assert worker["table"].tobytes() == expected.tobytes()


# -- What does not arrive ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """Return the messages of some refreshes between small models, whose deltas are also kept as they are."""
    generator = np.random.default_rng(0)

    def state(step: int) -> dict[str, Any]:
        noise = generator.normal(size=300).astype(np.float32)
        return {
            "a": np.arange(300, dtype=np.float32),
            "b": noise,
            "c": noise[:200] * step,
            "d": np.float64(step),
        }

    with SnapshotStore(
        tmp_path_factory.mktemp("sent"), keep=Keep(last=None), threads=1, report=None
    ) as store:
        for step in range(4):
            store.save(step, state(step)).wait()
        return {
            "whole": list(store.refresh(None, 0)),
            "hops": list(store.refresh(0, 2)),
            "hop": list(store.refresh(2, 3)),
            "to the end": list(store.refresh(0, 3)),
            **{f"again {time}": list(store.refresh(None, 2)) for time in range(10)},
            "expected": [store.restore(step=2, framework="numpy")[name].tobytes() for name in "abc"],
        }


def worker_at_0(sent: dict[str, list[bytes]]) -> tuple[dict[str, Any], Refresher]:
    state: dict[str, Any] = {
        "a": np.zeros(300, np.float32),
        "b": np.zeros(300, np.float32),
        "c": np.zeros(200, np.float32),
        "d": 0.0,
    }
    refresher = Refresher(state)
    refresher.apply(sent["whole"])
    return state, refresher


def assert_refused(sent: dict[str, list[bytes]], messages: list[bytes]) -> None:
    """Assert that messages are not taken for a refresh, and that the worker gets over them."""
    state, refresher = worker_at_0(sent)
    before = [state[name].tobytes() for name in "abc"]

    with pytest.raises(FormatError):
        refresher.apply(messages)

    if refresher.step is None:
        with pytest.raises(FormatError, match="no known step"):
            refresher.apply(sent["hops"])
        refresher.apply(sent["whole"])
    else:
        assert [state[name].tobytes() for name in "abc"] == before, "it says that nothing is changed"
    refresher.apply(sent["hops"])
    assert refresher.step == 2
    assert [state[name].tobytes() for name in "abc"] == sent["expected"]


def test_messages_that_are_lost_come_twice_or_out_of_order_are_found(sent: dict[str, list[bytes]]) -> None:
    hops = sent["hops"]
    assert len(hops) == 2 + 2 * 3, "a start, two hops of three tensors, an end"

    for place in range(len(hops)):
        assert_refused(sent, hops[:place] + hops[place + 1 :])
        assert_refused(sent, hops[:place])
        if place < len(hops) - 1:
            assert_refused(sent, [*hops[: place + 1], *hops[place:]])
        for other in range(place):
            swapped = list(hops)
            swapped[place], swapped[other] = swapped[other], swapped[place]
            assert_refused(sent, swapped)
            replaced = list(hops)
            replaced[place] = hops[other]
            assert_refused(sent, replaced)
            replaced = list(hops)
            replaced[other] = hops[place]
            assert_refused(sent, replaced)


def test_messages_of_another_refresh_are_found_in_any_place(sent: dict[str, list[bytes]]) -> None:
    for other in ("whole", "hop", "to the end"):
        for place in range(1, len(sent["hops"]) - 1):
            if place < len(sent[other]):
                mixed = list(sent["hops"])
                mixed[place] = sent[other][place]
                assert_refused(sent, mixed)


def test_every_flipped_bit_and_every_cut_of_a_message_is_found(sent: dict[str, list[bytes]]) -> None:
    hops = sent["hops"]
    generator = np.random.default_rng(1)
    for place, message in enumerate(hops):
        for byte in [
            *range(place % 3, 32, 3),
            *range(len(message) - 4, len(message)),
            *generator.integers(0, len(message), 8),
        ]:
            damaged = bytearray(message)
            damaged[byte] ^= 1 << int(generator.integers(8))
            assert_refused(sent, [*hops[:place], bytes(damaged), *hops[place + 1 :]])
        for cut in (0, 1, 23, 24, 31, 32, len(message) // 2, len(message) - 1):
            if cut < len(message):
                assert_refused(sent, [*hops[:place], message[:cut], *hops[place + 1 :]])


def damaged(messages: list[bytes], place: int, byte: int, bit: int) -> list[bytes]:
    wrong = bytearray(messages[place % len(messages)])
    wrong[byte % len(wrong)] ^= 1 << bit
    return [
        bytes(wrong) if message == place % len(messages) else each for message, each in enumerate(messages)
    ]


#: Which message of a refresh is damaged, and where: often in its head.
DAMAGES = st.tuples(st.integers(0, 7), st.integers(0, 31) | st.integers(0, 10_000), st.integers(0, 7))


@given(damages=st.lists(DAMAGES, min_size=1, max_size=4), is_tampered=st.booleans())
def test_a_worker_at_a_queue_gets_over_messages_that_are_left_of_failed_refreshes(
    sent: dict[str, list[bytes]], damages: list[tuple[int, int, int]], is_tampered: bool
) -> None:
    """After each error it asks for everything, which comes behind what is left of the refresh that failed.

    A worker that waits for more than comes stands still for ever: here `get_nowait` raises.
    """
    state, refresher = worker_at_0(sent)
    if is_tampered:
        state["b"][0] += 1
    queue: SimpleQueue[bytes] = SimpleQueue()

    def send(messages: list[bytes]) -> None:
        for message in damaged(messages, *damages.pop(0)) if damages else messages:
            queue.put(message)

    def received() -> Iterator[bytes]:
        while True:
            yield queue.get_nowait()

    send(sent["hops"])
    errors = 0
    while not queue.empty():
        try:
            assert refresher.apply(received()).step == 2
        except FormatError:
            errors += 1
            send(sent[f"again {errors}"])
            continue
        assert [state[name].tobytes() for name in "abc"] == sent["expected"]

    assert refresher.step == 2
    assert not damages


def test_messages_that_are_lost_before_a_queue_are_told_at_the_end_of_the_refresh(
    sent: dict[str, list[bytes]],
) -> None:
    _, refresher = worker_at_0(sent)
    messages = iter([*sent["hops"][:3], *sent["hops"][4:], *sent["again 1"][1:], *sent["again 2"]])

    with pytest.raises(FormatError, match="message 4 of a refresh came where message 3 should have"):
        refresher.apply(messages)
    with pytest.raises(FormatError, match="the first message of a refresh was lost"):
        refresher.apply(messages)

    assert refresher.apply(messages).step == 2
    assert not list(messages)


def test_a_transport_that_fails_leaves_a_refresh_that_is_passed_over(sent: dict[str, list[bytes]]) -> None:
    """Such as a time-out in the middle: the rest comes later."""
    _, refresher = worker_at_0(sent)

    def cut_short() -> Iterator[bytes]:
        yield from sent["hops"][:3]
        raise TimeoutError

    with pytest.raises(TimeoutError):
        refresher.apply(cut_short())

    assert refresher.step is None
    assert refresher.apply([*sent["hops"][3:], *sent["again 1"]]).step == 2


def test_a_worker_that_changed_its_weights_is_told_and_gets_everything(sent: dict[str, list[bytes]]) -> None:
    state, refresher = worker_at_0(sent)
    state["a"][7] += 1

    with pytest.raises(FormatError, match="'a' is not what the messages begin with"):
        refresher.apply(sent["hops"])

    assert refresher.step is None
    refresher.apply(sent["whole"])
    refresher.apply(sent["hops"])
    assert [state[name].tobytes() for name in "abc"] == sent["expected"]


def test_a_worker_at_another_step_is_told_which_and_nothing_is_changed(sent: dict[str, list[bytes]]) -> None:
    state, refresher = worker_at_0(sent)
    before = state["b"].tobytes()

    with pytest.raises(FormatError, match=r"begin at step 2, and the tensors are of step 0"):
        refresher.apply(sent["hop"])

    assert (refresher.step, state["b"].tobytes()) == (0, before)


def test_a_part_that_was_left_out_before_is_not_taken_for_refreshed(
    trainer: Callable[..., SnapshotStore],
) -> None:
    """Only the table was brought to step 1, so its differences to step 1 do not fit the weight."""
    store = trainer(3)
    worker = {"model": zeros_like(model(0))}
    refresher = Refresher(worker)
    refresher.apply(store.refresh(None, 0))
    refresher.apply(store.refresh(0, 1, only=["model/table"]))

    with pytest.raises(FormatError, match="is not what the messages begin with"):
        refresher.apply(store.refresh(1, 2))

    refresher.apply(store.refresh(None, 2))
    assert_same(worker["model"], model(2))


def test_a_state_that_does_not_fit_is_named_and_left_alone(trainer: Callable[..., SnapshotStore]) -> None:
    store = trainer(1)
    worker = {"model": zeros_like(model(0)) | {"table": torch.full((40, 30), 5.0)}}

    with pytest.raises(ConfigError, match="model/table is float32 of shape"):
        Refresher(worker).apply(store.refresh(None, 0))

    assert worker["model"]["weight"].count_nonzero() == 0
    assert (worker["model"]["table"] == 5).all()


def test_nothing_is_sent_of_a_damaged_snapshot(trainer: Callable[..., SnapshotStore], folder: Path) -> None:
    store = trainer(2)
    part = folder / "step-000000000000" / "part-00000.pst"
    data = bytearray(part.read_bytes())
    data[5000] ^= 1
    part.write_bytes(data)
    worker = {"model": zeros_like(model(0))}
    refresher = Refresher(worker)

    with pytest.raises(FormatError, match=r"part-00000\.pst is damaged"):
        refresher.apply(store.refresh(None, 1))

    assert refresher.step is None


def test_a_pattern_that_fits_nothing_and_a_step_that_is_gone_are_named(
    trainer: Callable[..., SnapshotStore],
) -> None:
    store = trainer(1)

    with pytest.raises(ConfigError, match="'modell"):
        list(store.refresh(None, 0, only=["modell/*"]))
    with pytest.raises(ConfigError, match="no snapshot of step 5"):
        list(store.refresh(None, 5))
    with pytest.raises(ConfigError, match="give a list"):
        list(store.refresh(None, 0, only="model/*"))


# -- What a stranger sends ---------------------------------------------------------------------------------


def sealed(kinds_and_bodies: list[tuple[int, bytes]]) -> list[bytes]:
    """Return messages with right numbers and checksums, whatever is in them."""
    checksum, messages = bytes(8), []
    for number, (kind, body) in enumerate(kinds_and_bodies):
        head = HEAD.pack(b"PENSTRE2", kind, number, b"a stream")
        checksum = xxhash.xxh3_64_digest(checksum + head + body)
        messages.append(head + body + checksum)
    return messages


def start_of(**changes: Any) -> bytes:
    said: dict[str, Any] = {
        "from": None,
        "to": [1, "00" * 16],
        "hops": 1,
        "only": None,
        "tree": {"map": {"a": {"array": {"of": "a", "kind": "numpy"}}}},
        "layouts": [["a", "float32", [300], None]],
    }
    return json.dumps(said | changes).encode()


def run_of(
    values: np.ndarray[Any, Any], number: int = 0, first: int = 0, count: int = 1, **row: Any
) -> bytes:
    payload = values.tobytes()
    fields: dict[str, Any] = {
        "offset": 0,
        "checksum": xxhash.xxh3_64_intdigest(payload),
        "raw_checksum": xxhash.xxh3_128_intdigest(payload) % 2**64,
        "stored": len(payload),
        "raw": len(payload),
        "kind": 0,
        "zero": b"",
    }
    fields |= row
    return RUN.pack(number, first, count) + np.array([tuple(fields.values())], BLOCK).tobytes() + payload


VALUES = np.arange(300, dtype=np.float32)


def test_the_hostile_messages_of_these_tests_are_good_where_nothing_is_wrong_with_them() -> None:
    state = {"a": np.zeros(300, np.float32)}

    Refresher(state).apply(sealed([(START, start_of()), (BLOCKS, run_of(VALUES)), (END, b"")]))

    assert state["a"].tobytes() == VALUES.tobytes()


HUGE = 2**44
STARTS = {
    "no object": b"[1]",
    "no JSON": b"{",
    "deep": b"[" * 100_000,
    "bytes that are no text": b"\xff\xfe",
    "missing": json.dumps({"from": None}).encode(),
    "more": start_of(more=1),
    "from a number": start_of(**{"from": 5}),
    "from nothing": start_of(**{"from": []}),
    "from text": start_of(**{"from": ["a", "b"]}),
    "from truth": start_of(**{"from": [True, "b"]}),
    "from a mapping": start_of(**{"from": {}}),
    "to nowhere": start_of(to=None),
    "to a half": start_of(to=[1.5, "a"]),
    "to three": start_of(to=[1, "a", 2]),
    "no hops": start_of(hops=0),
    "hops below zero": start_of(hops=-1),
    "hops of text": start_of(hops="1"),
    "hops without end": start_of(hops=2**80),
    "only text": start_of(only="a"),
    "only numbers": start_of(only=[1]),
    "only what there is not": start_of(only=["b"]),
    "a tree of nothing known": start_of(tree={"array": {"of": "b", "kind": "numpy"}}),
    "a tree with an unknown tag": start_of(tree={"surprise": 1}),
    "a view beyond its tensor": start_of(
        tree={
            "map": {
                "a": {
                    "array": {
                        "of": "a",
                        "kind": "numpy",
                        "view": {"dtype": "float32", "shape": [300], "strides": [4], "offset": 4},
                    }
                }
            }
        }
    ),
    "layouts of text": start_of(layouts="a"),
    "layouts of numbers": start_of(layouts=[1]),
    "a layout of five": start_of(layouts=[["a", "float32", [300], None, 1]]),
    "a shape below zero": start_of(layouts=[["a", "float32", [-300], None]]),
    "a shape beyond memory": start_of(layouts=[["a", "float32", [2**62, 2**62], None]]),
    "an unknown type": start_of(layouts=[["a", "float33", [300], None]]),
    "two of one name": start_of(layouts=[["a", "float32", [300], None]] * 2),
    "a part without the others": start_of(layouts=[["a", "float32", [100], [[300], [0]]]]),
    "parts that overlap": start_of(
        layouts=[["a", "float32", [200], [[300], [0]]], ["a", "float32", [200], [[300], [100]]]]
    ),
    "parts of different wholes": start_of(
        layouts=[["a", "float32", [150], [[300], [0]]], ["a", "float32", [150], [[400], [150]]]]
    ),
    "parts of different types": start_of(
        layouts=[["a", "float32", [150], [[300], [0]]], ["a", "float64", [150], [[300], [150]]]]
    ),
    "a part and a whole": start_of(
        layouts=[["a", "float32", [300], None], ["a", "float32", [300], [[300], [0]]]]
    ),
}


def test_an_absurd_first_message_is_refused_before_anything_is_changed() -> None:
    for name, start in STARTS.items():
        state = {"a": np.full(300, 3, np.float32)}

        with pytest.raises(FormatError):  # noqa: PT012, to say which is not refused
            Refresher(state).apply(sealed([(START, start), (BLOCKS, run_of(VALUES)), (END, b"")]))
            pytest.fail(f"{name} passes")

        assert (state["a"] == 3).all(), name


def test_a_tensor_beyond_all_memory_is_refused_although_what_is_seen_of_it_is_small() -> None:
    view = {"dtype": "float32", "shape": [300], "strides": [2**40], "offset": 0}
    tree = {"map": {"a": {"array": {"of": "a", "kind": "numpy", "view": view}}}}
    start = start_of(tree=tree, layouts=[["a", "float32", [2**48], None]])
    state = {"a": np.full(300, 3, np.float32)}

    with pytest.raises(FormatError, match="no memory has"):
        Refresher(state).apply(sealed([(START, start), (BLOCKS, run_of(VALUES)), (END, b"")]))

    assert (state["a"] == 3).all()


LAST = (END, b"")
REST = {
    "nothing": [],
    "the end at once": [LAST],
    "the end with something in it": [(BLOCKS, run_of(VALUES)), (END, b"{}")],
    "a start again": [(START, start_of()), LAST],
    "an unknown kind": [(7, b""), LAST],
    "blocks without blocks": [(BLOCKS, b""), LAST],
    "a run that is cut": [(BLOCKS, RUN.pack(0, 0, 1)), LAST],
    "no block": [(BLOCKS, RUN.pack(0, 0, 0)), LAST],
    "another tensor": [(BLOCKS, run_of(VALUES, number=1)), LAST],
    "a tensor far away": [(BLOCKS, run_of(VALUES, number=2**32 - 1)), LAST],
    "another block": [(BLOCKS, run_of(VALUES, first=1)), LAST],
    "blocks without end": [(BLOCKS, run_of(VALUES, count=2**32 - 1)), LAST],
    "two blocks of one": [(BLOCKS, run_of(VALUES, count=2)), LAST],
    "a block twice": [(BLOCKS, run_of(VALUES)), (BLOCKS, run_of(VALUES)), LAST],
    "a longer block": [(BLOCKS, run_of(np.zeros(301, np.float32))), LAST],
    "more bytes than it says": [(BLOCKS, run_of(VALUES) + b"x"), LAST],
    "fewer bytes than it says": [(BLOCKS, run_of(VALUES)[:-1]), LAST],
    "a length without end": [(BLOCKS, run_of(VALUES, stored=2**32 - 1)), LAST],
    "a size without end": [(BLOCKS, run_of(VALUES, raw=2**32 - 1)), LAST],
    "another checksum": [(BLOCKS, run_of(VALUES, raw_checksum=1)), LAST],
    "what equals nothing": [(BLOCKS, run_of(VALUES, kind=Kind.EQUAL)), LAST],
    "a replica": [(BLOCKS, run_of(VALUES, kind=Kind.REPLICA)), LAST],
    "an unknown kind of block": [(BLOCKS, run_of(VALUES, kind=200)), LAST],
    **{
        f"kind {kind.name} of bytes that are none": [(BLOCKS, run_of(VALUES, kind=kind)), LAST]
        for kind in Kind
        if kind not in (Kind.STORED, Kind.EQUAL, Kind.REPLICA)
    },
}


def test_absurd_messages_after_a_good_first_one_are_refused() -> None:
    for name, rest in REST.items():
        refresher = Refresher({"a": np.zeros(300, np.float32)})

        with pytest.raises(FormatError):  # noqa: PT012, to say which is not refused
            refresher.apply(sealed([(START, start_of()), *rest]))
            pytest.fail(f"{name} passes")

        assert refresher.step is None, name


def test_hops_of_nothing_do_not_take_time() -> None:
    """Four thousand million hops of a tensor without numbers: there is nothing to send, and nothing to count."""
    start = start_of(hops=2**32 - 1, layouts=[["a", "float32", [0], None]])
    refresher = Refresher({"a": np.zeros(0, np.float32)})

    assert refresher.apply(sealed([(START, start), LAST])).step == 1


@given(
    messages=st.lists(
        st.tuples(
            st.sampled_from([START, BLOCKS, END, 9]),
            st.one_of(
                st.binary(max_size=100),
                st.just(start_of()),
                st.just(run_of(VALUES)),
                st.builds(
                    lambda body, at, value: (
                        body[: at % len(body)] + bytes([value]) + body[at % len(body) + 1 :]
                    ),
                    st.sampled_from([start_of(), run_of(VALUES)]),
                    st.integers(0, 10_000),
                    st.integers(0, 255),
                ),
            ),
        ),
        max_size=5,
    )
)
def test_whatever_comes_the_weights_are_right_or_it_is_refused(messages: list[tuple[int, bytes]]) -> None:
    state = {"a": np.zeros(300, np.float32)}

    try:
        Refresher(state).apply(sealed(messages))
    except (FormatError, ConfigError):  # the latter: another name or shape than the state has
        return

    assert state["a"].tobytes() in (VALUES.tobytes(), bytes(1200))


@for_each("wrong", [["text"], [3], 3, None, "text", b"one message"])
def test_what_are_no_messages_is_refused_by_its_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^messages (is of type|has a) "):
        Refresher({}).apply(wrong)
