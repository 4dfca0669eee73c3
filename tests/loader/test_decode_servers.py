"""decode_servers=: other machines decode, and every batch is that of a loader which decodes by itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
from tests.interpreters import Interpreters
from tests.patience import brief, patient, wait_until

from penstock.errors import ConfigError
from penstock.flow.work import InParts, Request
from penstock.loader import Loader, decode_servers, decode_work
from penstock.loader.decode_servers import DecodeServers, ServedFetcher, _Counter
from penstock.loader.decode_serving import serving
from penstock.loader.decode_work import CropMaker, StoredSamples, describe_work, maker_of, steps_served
from penstock.loader.opened import reader_of
from penstock.loader.transforms import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    Pad,
    RandAugment,
    RandomApply,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ToTensor,
    TrivialAugmentWide,
    compile_pipeline,
)
from penstock.loader.transforms.memory import DecodeMemory
from penstock.policy.decisions import SOURCE_TOGETHER
from penstock.policy.decode_split import HERE, DecodeSplit, Given
from penstock.ranks import carrier_zmq
from penstock.ranks.access import Address
from penstock.ranks.decode_access import KEY
from penstock.ranks.decode_server import DecodeServer
from penstock.ranks.reaching import At
from penstock.ranks.remote_peers import RemotePeers
from penstock.store import ImageFolder, MemoryTier
from penstock.trace.schema import SOURCE, STAGING

COUNT, EPOCHS, DAMAGED = 30, 3, 11
RANDOM = [
    RandomResizedCrop(20),
    RandomHorizontalFlip(),
    ToTensor(),
    Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)),
]
CROP = [RandomResizedCrop(20, interpolation="bicubic"), RandomHorizontalFlip()]
JITTER = ColorJitter(0.4, 0.4, 0.4, 0.1)


def inverted(picture: Any) -> Any:
    """A user's own step, which writes to what it is given."""
    picture[:] = 255 - picture
    return picture


class OwnGrayscale(Grayscale):
    """A user's own step, which looks like one of Penstock's."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG, some PNG, and one that is cut off."""
    folder = tmp_path_factory.mktemp("photos") / "a"
    folder.mkdir()
    random = np.random.default_rng(3)
    for sample in range(COUNT):
        height, width = random.integers(30, 300, 2)
        coarse = random.integers(0, 256, (height // 6 + 1, width // 6 + 1, 3), np.uint8)
        picture = cv2.resize(coarse, (int(width), int(height)), interpolation=cv2.INTER_CUBIC)
        path = folder / f"{sample:02}.{'png' if sample % 9 == 4 else 'jpg'}"
        assert cv2.imwrite(str(path), picture)
        if sample == DAMAGED:
            path.write_bytes(path.read_bytes()[:100])
    return folder.parent


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    monkeypatch.setenv(KEY.variable, str(path))
    return path


@pytest.fixture
def servers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are decoded by servers in turn, as far as these answer; no answer is late."""
    monkeypatch.setattr("penstock.policy.peer_patience.LEAST_SECONDS", patient(20))
    monkeypatch.setattr("penstock.policy.peer_patience.MOST_SECONDS", patient(20))
    turn = itertools.count()

    def choose(split: DecodeSplit, samples: int, away: Sequence[int]) -> tuple[int, int]:
        there = [place for place in range(1, len(split.places)) if place not in away]
        return (there[next(turn) % len(there)] if there else HERE), samples

    monkeypatch.setattr(DecodeSplit, "_choose", choose)


@contextlib.contextmanager
def server(photos: Path, memory_bytes: int = 10**8) -> Iterator[tuple[DecodeServer, str]]:
    with serving(ImageFolder(photos), Address("127.0.0.1", 0), memory_bytes=memory_bytes, threads=2) as made:
        thread = threading.Thread(target=made.server.run)
        thread.start()
        try:
            yield made.server, made.address
        finally:
            made.server.stop()
            thread.join()


def batches_of(
    photos: Path,
    transforms: Any,
    servers: list[str],
    seen: Callable[[DecodeServers], object] = id,
    **arguments: Any,
) -> list[tuple[bytes, bytes]]:
    """Return all batches of a run, epoch by epoch."""
    how = {"batch_size": 7, "seed": 5, "report": None, "decoders": 2, "on_error": "skip", "policy": "staging"}
    with Loader(
        photos, epochs=EPOCHS, transforms=transforms, decode_servers=servers, **(how | arguments)
    ) as loader:
        found = [(images.tobytes(), labels.tobytes()) for _ in range(EPOCHS) for images, labels in loader]
        if servers:
            assert isinstance(loader._parts.fetcher, ServedFetcher)
            seen(loader._parts.fetcher._servers)
    return found


@pytest.mark.usefixtures("servers_first")
@pytest.mark.parametrize(
    ("transforms", "arguments"),
    [
        (RANDOM, {}),
        pytest.param(RANDOM, {"layout": "NHWC", "dtype": "float16"}, marks=pytest.mark.slow),
        ([Resize(25), CenterCrop(20), ColorJitter(brightness=0.5), ToTensor()], {}),
        pytest.param(RANDOM[:2], {"dtype": "uint8"}, marks=pytest.mark.slow),
        (
            [*CROP, JITTER, RandAugment(), RandomGrayscale(0.3), *RANDOM[2:], RandomErasing(0.9)],
            {"layout": "NHWC", "dtype": "bfloat16"},
        ),
        ([*CROP, RandomErasing(0.9, value=9), RandomVerticalFlip(), inverted, JITTER, *RANDOM[2:]], {}),
        ([*CROP, Grayscale(), JITTER, CenterCrop(16), ToTensor()], {}),
        ([*CROP, RandomApply([JITTER], 0.7), TrivialAugmentWide(), ToTensor()], {"dtype": "float64"}),
    ],
)
def test_batches_are_those_without_servers_bit_by_bit(photos: Path, transforms: Any, arguments: Any) -> None:
    alone = batches_of(photos, transforms, [], **arguments)
    seen: list[tuple[int, int]] = []

    with server(photos) as (one, first), server(photos, memory_bytes=64 << 20) as (other, second):
        served = batches_of(
            photos,
            transforms,
            [first, second],
            lambda found: seen.append((found.served, found.missed)),
            **arguments,
        )

    assert served == alone
    ((count, missed),) = seen
    assert count > COUNT // 2  # not those that two epochs need at about the same time
    # What is damaged is found out by who decodes it here.
    assert missed <= EPOCHS
    assert one.made + other.made == count + missed


@pytest.mark.parametrize(
    ("behind", "count"),
    [
        ([], 0),
        ([JITTER, RandAugment(), RandomVerticalFlip(), RandomErasing(), ToTensor()], 4),
        (
            [
                RandomApply([GaussianBlur(3), RandomRotation(5)]),
                TrivialAugmentWide(fill=(1, 2, 3)),
                ToTensor(),
            ],
            2,
        ),
        ([JITTER, inverted, Grayscale(), ToTensor()], 1),
        ([OwnGrayscale(), JITTER, ToTensor()], 0),
        ([RandomApply([OwnGrayscale()]), ToTensor()], 0),
        ([RandomApply([Pad(2)]), CenterCrop(20), ToTensor()], 0),
        ([Grayscale(), CenterCrop(16), ToTensor()], 1),
        ([RandomGrayscale(cast("float", np.float32(0.1))), ToTensor()], 0),
        ([ToTensor(), RandomErasing()], 0),
    ],
)
def test_servers_make_the_crop_and_the_named_steps_behind_it_that_leave_its_size(
    photos: Path, behind: list[Any], count: int
) -> None:
    pipeline = compile_pipeline(
        [*CROP, *behind], 0, "float32" if ToTensor() in behind else "uint8", runs=False
    )

    assert steps_served(pipeline) == ([2 + count, 2] if count else [2])
    described = json.loads(describe_work(pipeline, ImageFolder(photos), 2 + count))
    assert [decode_work._step_of(each) for each in described["steps"]] == [*CROP, *behind][: 2 + count]


@pytest.mark.usefixtures("servers_first")
def test_a_server_whose_processor_makes_other_bytes_of_a_crop_makes_the_crop_alone(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, other, seen, lines = decode_work._trial, itertools.count(), list[DecodeServers](), list[str]()
    monkeypatch.setattr(
        decode_work, "_trial", lambda steps: f"{trial(steps)} {next(other) if JITTER in steps else ''}"
    )
    transforms = [*CROP, JITTER, ToTensor()]
    alone = batches_of(photos, transforms, [])

    with server(photos) as (_, address):
        served = batches_of(photos, transforms, [address], seen.append, report=lines.append)

    assert served == alone
    assert (seen[0].steps, seen[0].served > 0) == (2, True)
    assert any(
        f"decode server {address} refuses: steps behind the crop make other bytes here" in line
        and "servers make crops alone" in line
        for line in lines
    )


def test_the_trial_of_steps_tells_one_from_another() -> None:
    some: list[list[Any]] = [
        [],
        [JITTER],
        [Grayscale()],
        [RandAugment()],
        [RandAugment(magnitude=10)],
        [JITTER, Grayscale()],
    ]
    assert len({decode_work._trial(steps) for steps in some}) == len(some)
    assert decode_work._trial([*CROP, JITTER]) == decode_work._trial([JITTER])


class OneServer:
    """Makes what it is given, all but sample 5, and is given all but the last one."""

    def __init__(self) -> None:
        self.here: list[int] = []

    def give(self, samples: int) -> Given:
        place, given = (HERE, 1) if samples == 1 else (1, samples - 1)
        return Given(place, given, given, 0.0)

    def make(self, given: Given, epoch: int, ids: Any) -> list[Any]:
        return [None if each == 5 else np.full((1, 1, 3), each, np.uint8) for each in ids.tolist()]

    def keep_here(self, given: Given, ids: Any) -> None:
        self.here += ids.tolist()

    def are_here(self, ids: Any) -> bool:
        return set(ids.tolist()) <= set(self.here)

    def close(self) -> None:
        pass


class NoServer(OneServer):
    """Is given nothing."""

    def give(self, samples: int) -> Given:
        return Given(HERE, samples, samples, 0.0)


@pytest.mark.parametrize("is_slow", [True, False])
def test_samples_that_no_server_gets_are_read_by_several_threads_from_a_store_that_is_slow(
    photos: Path, is_slow: bool
) -> None:
    source, servers = ImageFolder(photos), NoServer()
    fetcher = ServedFetcher(cast("DecodeServers", servers), source, {})

    def fetched(*ids: int) -> Any:
        return fetcher.fetch(Request(np.array(ids), lambda sample: None, SOURCE, lasting=True))

    with contextlib.closing(fetcher):
        assert len(fetched(0)) == 1  # what a read takes is known now
        fetcher._read_seconds = 2e-3 if is_slow else 1e-4

        found = fetched(*range(1, 7))

        assert isinstance(found, InParts) == is_slow
        assert servers.here == list(range(7))
        if is_slow:
            found = [each for ids in ([1, 2, 3], [4], [5, 6]) for each in fetched(*ids)]
        assert [each.tobytes() for each in found] == [source.read(each) for each in range(1, 7)]
        assert servers.here == list(range(7)), "nothing is given twice"


def test_of_samples_that_are_read_together_a_server_gets_those_that_no_tier_keeps(photos: Path) -> None:
    source, servers, tier = ImageFolder(photos), OneServer(), MemoryTier(10**7)
    fetcher = ServedFetcher(cast("DecodeServers", servers), source, {1: tier})
    rests = [1, STAGING, STAGING, 1, STAGING, STAGING, STAGING]

    with contextlib.closing(fetcher):
        found = fetcher.fetch(Request(np.arange(7), lambda sample: None, SOURCE, rests, lasting=True))

        assert [each.ndim for each in found] == [1, 3, 3, 1, 3, 1, 1]
        assert [found[each].tobytes() for each in (0, 3, 5, 6)] == [
            source.read(each) for each in (0, 3, 5, 6)
        ]
        assert [each for each in range(7) if tier.contains(each)] == [0, 3]
        assert servers.here == [6]


def test_readers_read_one_sample_after_the_other_only_while_a_server_answers_and_is_worth_it(
    photos: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key.write_text(32 * "ab")
    key.chmod(0o600)
    monkeypatch.setattr("penstock.loader.decode_servers._GREETED_SECONDS", 0.0)
    with Loader(
        photos,
        epochs=1,
        transforms=RANDOM,
        decode_servers=["127.0.0.1:1"],
        batch_size=7,
        seed=5,
        report=None,
        on_error="skip",
        policy="staging",
    ) as loader:
        assert loader._parts.setup.limits.read_together > 1
        for _ in loader:
            pass
        assert loader._parts.engine._scheduler._ints[SOURCE_TOGETHER] == 1
        fetcher = loader._parts.fetcher
        assert isinstance(fetcher, ServedFetcher)
        assert not fetcher.sends()
        monkeypatch.setattr(fetcher._servers._peers, "is_away", lambda rank: False)
        assert fetcher.sends()
        fetcher._servers.split.decode_seconds, fetcher._servers.split.finish_seconds = 1e-3, 1.0
        assert not fetcher.sends()


def test_readers_that_want_something_of_one_server_meanwhile_share_a_request() -> None:
    asked: list[list[int]] = []
    first, go_on = threading.Semaphore(0), threading.Event()

    def read(ids: Any) -> list[int]:
        asked.append(ids.tolist())
        first.release()
        go_on.wait(patient(20))
        return [10 * each for each in ids.tolist()]

    counter = _Counter(read, most=4)
    with ThreadPoolExecutor(12) as pool:
        found = [pool.submit(counter.get, np.array([each, each + 100])) for each in range(3)]
        for _ in range(3):
            assert first.acquire(timeout=patient(20))
        found += [pool.submit(counter.get, np.array([each, each + 100])) for each in range(3, 12)]
        wait_until(lambda: len(counter._waiting) == 9)
        go_on.set()
        results = [each.result(patient(20)) for each in found]

    assert results == [[10 * each, 10 * each + 1000] for each in range(12)]
    assert list(map(len, asked[:3])) == [2, 2, 2]
    assert list(map(len, asked[3:6])) == [4, 4, 4]
    assert counter._under_way == 0


@pytest.mark.usefixtures("servers_first")
def test_a_server_that_is_gone_costs_time_alone(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.policy.peer_patience.LEAST_SECONDS", brief(0.5))
    monkeypatch.setattr("penstock.policy.peer_patience.MOST_SECONDS", brief(0.5))
    monkeypatch.setattr("penstock.loader.decode_servers._GREETED_SECONDS", brief(1))
    alone = batches_of(photos, RANDOM, [])
    lines: list[str] = []
    with server(photos) as (running, address):
        make, calls = CropMaker.make, itertools.count()

        def make_two(maker: CropMaker, ids: Any) -> Any:
            if next(calls) == 2:
                running.stop()
            return make(maker, ids)

        monkeypatch.setattr(CropMaker, "make", make_two)
        served = batches_of(photos, RANDOM, [address, "127.0.0.1:1"], report=lines.append)

    assert served == alone
    assert next(calls) > 2
    assert any("2 decode threads, as decoders= says, 2 decode servers beside, and" in line for line in lines)
    assert any(
        "127.0.0.1:1 does not answer: nobody listens; it is used once it does" in line for line in lines
    )


class FewPeers:
    """Two servers, of which news are given."""

    ranks = (1, 2)

    def __init__(self) -> None:
        self.refused: dict[int, str] = {}
        self.silent: list[int] = []

    @property
    def has_news(self) -> bool:
        return bool(self.silent)

    def take_news(self) -> list[tuple[int, None]]:
        found, self.silent = self.silent, []
        return [(place, None) for place in found]

    def is_away(self, place: int) -> bool:
        return True

    def read(self, place: int, ids: Any) -> list[Any]:
        raise AssertionError("nothing is asked of who is away")


def test_a_server_that_does_not_answer_or_refuses_in_mid_run_is_reported_once() -> None:
    peers, lines = FewPeers(), list[str]()
    addresses = [Address("a", 7447), Address("b", 7447)]
    servers = DecodeServers(cast("RemotePeers", peers), addresses, 10, (2, 2, 3), 1, lines.append)

    for silent, refused in (
        ([], {}),
        ([1], {}),
        ([1], {}),
        ([2], {2: "other data"}),
        ([], {1: "another version"}),
    ):
        peers.silent = silent
        peers.refused |= refused
        for _ in range(2):
            servers.give(1)

    assert lines == [
        "decode server a:7447 did not answer in time: what it was given is decoded here, and it is used again once it "
        "answers",
        "decode server b:7447 refuses: other data",
        "decode server a:7447 refuses: another version",
    ]


def test_a_server_of_other_data_version_or_decoder_is_refused_in_one_line(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "a"
    other.mkdir(parents=True)
    cv2.imwrite(str(other / "b.jpg"), np.zeros((30, 30, 3), np.uint8))

    def refusal(address: str) -> str:
        with pytest.raises(ConfigError) as caught:
            batches_of(photos, RANDOM, [address])
        assert "\n" not in str(caught.value)
        assert f"decode server {address} refuses" in str(caught.value)
        return str(caught.value)

    with server(other.parent) as (_, address):
        assert "another number of samples: 30 there, 1 here" in refusal(address)
    with server(photos) as (running, address):
        (photos / "a" / "more.jpg").write_bytes(b"")
        (photos / "a" / "00.jpg").rename(tmp_path / "00.jpg")
        assert "other data than" in refusal(address).replace("another data", "other data")
        (tmp_path / "00.jpg").rename(photos / "a" / "00.jpg")
        (photos / "a" / "more.jpg").unlink()
        same = decode_work._here(ImageFolder(photos)) | {"form": 2, "seed": 0, "steps": []}
        for name, value in (("penstock", "0.0.0"), ("pixels", {"decoder": "by hand"})):
            with pytest.raises(
                ConfigError, match=r"(0\.0\.0|by hand) there, .* here; install the same version"
            ):
                running._accept(json.dumps(same | {name: value}).encode())


@pytest.mark.parametrize(
    "steps",
    [
        *(5, [["open", {"file": "/etc/passwd"}]], [["Resize", {"size": "large"}]], [["Resize"]], []),
        [["Grayscale", {}]],
        [["CenterCrop", {"size": 20}], ["RandomApply", {"transforms": [["Pad", {"padding": 2}]]}]],
    ],
)
def test_a_description_of_anything_but_steps_of_penstock_is_refused(photos: Path, steps: Any) -> None:
    good = decode_work._here(source := ImageFolder(photos)) | {
        "form": 2,
        "seed": 0,
        "trial": decode_work._trial([]),
        "steps": [["CenterCrop", {"size": 20}]],
    }
    stored = StoredSamples(source, reader_of(source), 0)
    maker_of(json.dumps(good).encode(), stored, DecodeMemory(10**8))
    others: list[Any] = [good | {"steps": steps}, good | {"trial": ""}, {"form": 1}, [], None]
    for each in others:
        with pytest.raises(ConfigError):
            maker_of(json.dumps(each).encode(), stored, DecodeMemory(10**8))
    with pytest.raises(ConfigError):
        maker_of(b"\xff", stored, DecodeMemory(10**8))


@pytest.mark.parametrize(
    ("transforms", "arguments", "message"),
    [
        ([Resize(20), ToTensor()], {}, "do not begin with steps of Penstock that fix the size"),
        (RANDOM, {"keep": "decoded"}, "keep='decoded', which keeps what is decoded here"),
        (RANDOM, {"workers": 1, "decoders": None}, "workers=1, processes that decode"),
        (RANDOM, {"decoders": 0}, "decoders=0"),
    ],
)
def test_what_cannot_be_decoded_elsewhere_is_refused(
    photos: Path, key: Path, transforms: Any, arguments: Any, message: str
) -> None:
    key.write_text(f"{bytes(32).hex()}\n")
    key.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        batches_of(photos, transforms, ["127.0.0.1:1"], **arguments)


def test_without_a_key_there_is_no_server_to_ask(photos: Path) -> None:
    with pytest.raises(ConfigError, match="with the key of the decode servers is not there"):
        batches_of(photos, RANDOM, ["127.0.0.1:1"])


def test_a_server_with_another_key_is_refused_as_such(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.decode_servers._GREETED_SECONDS", 0.0)
    monkeypatch.setattr("penstock.loader.decode_servers.LOOK_SECONDS", patient(5))
    other = tmp_path / "other"
    KEY.make(other)

    with server(photos) as (_, address):
        monkeypatch.setenv(KEY.variable, str(other))
        with pytest.raises(
            ConfigError, match=f"^decode server {address} has another key than {other}: both need"
        ):
            batches_of(photos, RANDOM, [address])


def test_servers_that_do_not_answer_are_asked_for_their_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take half a second."""
    together = threading.Barrier(3, timeout=patient(5))

    def has_key(*_: Any) -> None:
        together.wait()

    monkeypatch.setattr(decode_servers, "look_at", lambda address: (At.THERE, ""))
    monkeypatch.setattr(carrier_zmq, "has_key", has_key)

    found = decode_servers._why_silent([Address("127.0.0.1", port) for port in (1, 2, 3)], bytes(32))

    assert found == 3 * [At.THERE.value]


SERVER = """
    from penstock.cli.main import main

    main(["decode-server", sys.argv[1], "--listen", "127.0.0.1:" + sys.argv[2], "--threads", "1"])
"""


@contextlib.contextmanager
def process(interpreters: Interpreters, photos: Path, port: int) -> Iterator[subprocess.Popen[Any]]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    program = "import sys\n" + SERVER.replace("\n    ", "\n")
    with interpreters.start(program, str(photos), str(port), text=True, **pipes) as started:
        assert started.stdout is not None
        while f"decodes 30 samples at 127.0.0.1:{port} by 1 thread in " not in (
            line := started.stdout.readline()
        ):
            assert line, "it ended"
        try:
            yield started
        finally:
            started.send_signal(signal.SIGCONT)
            started.kill()
            started.stdout.read()


@pytest.mark.parametrize(
    "fault",
    [
        signal.SIGINT,
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_server_in_a_process_of_its_own_serves_until_it_ends_and_its_end_loses_no_sample(
    photos: Path, interpreters: Interpreters, fault: signal.Signals
) -> None:
    alone = batches_of(photos, RANDOM, [])
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    with process(interpreters, photos, port) as running:
        whole = batches_of(photos, RANDOM, [f"127.0.0.1:{port}"], lambda found: seen.append(found.served))

        with Loader(
            photos,
            batch_size=7,
            seed=5,
            report=None,
            on_error="skip",
            epochs=EPOCHS,
            transforms=RANDOM,
            decode_servers=[f"127.0.0.1:{port}"],
        ) as loader:
            found = [(images.tobytes(), labels.tobytes()) for images, labels in loader]
            os.kill(running.pid, fault)
            found += [
                (images.tobytes(), labels.tobytes()) for _ in range(EPOCHS - 1) for images, labels in loader
            ]

    assert whole == alone == found
    assert seen[0] > 0
