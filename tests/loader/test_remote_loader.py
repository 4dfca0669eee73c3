"""A loader over a store that fails now and then: its batches are those of the files."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from tests.for_each import for_each
from tests.patience import wait_until
from tests.store.web_server import Answer, Request, WebServer, serving

from penstock import open_source
from penstock.errors import ConfigError, DataError
from penstock.loader import Loader, LoaderConfig
from penstock.loader.transforms import DecodeRaw, RandomHorizontalFlip, Resize, ToTensor
from penstock.trace import Kind, read_trace

pytestmark = pytest.mark.usefixtures("obstore_threads")

COUNT = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(COUNT):
        place = tmp_path / "data" / f"label{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number:03d}.png"), np.full((8, 8, 3), number, np.uint8))
    return tmp_path / "data"


@pytest.fixture
def server(folder: Path) -> Iterator[WebServer]:
    objects = {f"train/{file.relative_to(folder)}": file.read_bytes() for file in folder.rglob("*.png")}
    with serving(objects) as found:
        yield found


def make(source: Any, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": 16,
        "epochs": 2,
        "transforms": [RandomHorizontalFlip(), Resize((8, 8)), ToTensor()],
        "memory": "32 MiB",
        "policy": "staging",
        "report": None,
        **options,
    }
    return Loader(source, **settings)


def batches(loader: Loader) -> list[tuple[np.ndarray, np.ndarray]]:
    with loader:
        return [(images.copy(), labels.copy()) for _ in range(2) for images, labels in loader]


def assert_same(
    found: list[tuple[np.ndarray, np.ndarray]], expected: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    assert len(found) == len(expected)
    for (images, labels), (those, others) in zip(found, expected, strict=True):
        assert np.array_equal(images, those)
        assert np.array_equal(labels, others)


def some_errors(share: float) -> Any:
    """Have this share of the requests for content fail, in all ways that pass."""
    draws = random.Random(3)
    ways = [Answer(status=503), Answer(status=500), Answer(status=429), Answer(reset=True), Answer(cut=10)]
    return lambda request: draws.choice(ways) if request.method == "GET" and draws.random() < share else None


def test_one_of_ten_requests_fails_and_no_batch_is_another(
    server: WebServer, folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    loader = make(f"{server.address}/train", report=lines.append, trace=tmp_path / "trace")
    server.fault = some_errors(0.1)

    found = batches(loader)

    assert_same(found, batches(make(folder)))
    retries = [span for span in read_trace(tmp_path / "trace").spans if span["kind"] == Kind.RETRY]
    assert len(retries) > 5
    assert all(span["end"] > span["start"] for span in retries)
    (line, *_) = [line for line in lines if ": epoch 0" in line]
    assert "requests to the store failed and were made again, which took them" in line


def test_as_many_objects_are_read_at_once_as_the_store_rewards_also_more_than_128() -> None:
    """Nothing is answered before 200 requests are under way."""
    objects = {f"d/{number:03}.bin": bytes([number % 256]) * 8 for number in range(512)}
    with serving(objects) as server:
        source = open_source(f"{server.address}/d", extensions=[".bin"])
        assert source.objects is not None
        source.objects._limit.limit = 250
        # By the first reads workers find out whether to read by themselves: not from a store that answers so late.
        server.seconds = 0.02
        begun = len(server.requests) + 64
        server.holds = lambda request: len(server.requests) > begun
        server.most_at_once, server.together = 0, 200

        loader = make(
            source,
            batch_size=64,
            epochs=1,
            transforms=[DecodeRaw("u1", (8,))],
            timeout_seconds=20.0,
            shuffle=False,
        )
        with loader:
            numbers = np.concatenate([rows[:, 0] for rows, _ in loader])

    assert numbers.tolist() == [number % 256 for number in range(512)]
    assert 200 <= server.most_at_once <= 1024


@for_each(
    ("most", "text"),
    [
        (1024, "128 reading threads, up to 1,024 where the store rewards as many requests;"),
        (100, "128 reading threads, as many requests as the store rewards, at most;"),
    ],
)
def test_the_start_says_how_many_readers_there_may_be(server: WebServer, most: int, text: str) -> None:
    source = open_source(f"{server.address}/train")
    assert source.objects is not None
    source.objects.most = most  # as `ulimit -n` says
    lines: list[str] = []

    with make(source, report=lines.append) as loader:
        loader.start()

    assert text in "\n".join(lines)


def failing_until(seconds: float) -> Callable[[Request], Answer | None]:
    return lambda request: Answer(status=503) if time.monotonic() < seconds else None


def outage_of(seconds: float, server: WebServer, folder: Path) -> list[str]:
    """Have a store fail for so long in the midst of a run; return what was reported."""
    lines: list[str] = []
    loader = make(f"{server.address}/train", report=lines.append, patience_seconds=seconds / 4)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    with loader:
        for epoch in range(2):
            for step, (images, labels) in enumerate(loader):
                found.append((images.copy(), labels.copy()))
                if (epoch, step) == (0, 2):
                    server.fault = failing_until(time.monotonic() + seconds)
    assert_same(found, batches(make(folder)))
    return lines


@pytest.mark.slow
def test_an_outage_changes_no_batch_and_is_reported_as_what_is_waited_for(
    server: WebServer, folder: Path
) -> None:
    # Few are read ahead, so that the training notices.
    lines = outage_of(2.0, server, folder)

    waits = [line for line in lines if "the training waits for the batch" in line]
    assert not waits or any(f"which waits for {server.address}/train/label" in line for line in waits)


@pytest.mark.slow
def test_an_outage_of_ninety_seconds_changes_no_batch(server: WebServer, folder: Path) -> None:
    lines = outage_of(90.0, server, folder)

    assert any(f"which waits for {server.address}/train/label" in line for line in lines)


def test_what_cannot_be_had_for_good_is_an_error_or_skipped(server: WebServer) -> None:
    def refuse(request: Request) -> Answer | None:
        return Answer(status=403) if request.method == "GET" and request.path.endswith("017.png") else None

    server.fault = refuse
    with pytest.raises(DataError, match=r"017\.png may not be read by anonymous .403 Forbidden."):
        batches(make(f"{server.address}/train"))
    found = batches(make(f"{server.address}/train", on_error="skip"))
    assert sum(len(labels) for _, labels in found) == 2 * (COUNT - 1)


def test_closing_does_not_wait_for_a_store_that_fails(server: WebServer) -> None:
    loader = make(f"{server.address}/train", timeout_seconds=3600.0)
    server.fault = lambda request: Answer(status=503)
    loader.start()
    before = len(server.requests)
    wait_until(lambda: len(server.requests) > before + 3)

    loader.close()  # which warns if threads are left


def test_the_options_of_a_store_are_not_shown(folder: Path) -> None:
    config = LoaderConfig(
        "s3://bucket/train",
        batch_size=1,
        transforms=[ToTensor()],
        storage_options={"key": "me", "secret": "hush"},
    )

    assert "hush" not in repr(config)
    assert "storage_options={'key': ..., 'secret': ...}" in repr(config)
    with pytest.raises(ConfigError, match="storage_options"):
        make(folder, storage_options={"anon": True})
