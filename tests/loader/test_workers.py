"""Worker processes: the same batches as with threads, in slots that all processes share."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.for_each import for_each
from tests.interpreters import Interpreters
from tests.loader import worker_data
from tests.loader.worker_data import (
    COUNT,
    Drawn,
    Fatal,
    Faulting,
    Hanging,
    Holding,
    Informed,
    Lists,
    Mixed,
    Odd,
    Raising,
    SlowlyImported,
    drawn,
    marked,
    noisy,
    note_begin,
    padded,
)
from tests.patience import brief, patient, wait_until

import penstock.torch
from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.flow.engine import Engine
from penstock.flow.lock_use import LockUse
from penstock.flow.work import Brought, Request
from penstock.loader import Loader, LoaderConfig, SourceSamples, switching
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import ImageDecoder
from penstock.loader.making import MakingDecoder
from penstock.loader.processes import Processes, _Process
from penstock.loader.transforms import RandomResizedCrop, Resize, ToTensor
from penstock.policy import Load, decisions
from penstock.store import Arrays, JsonLines, open_source
from penstock.trace import read_trace
from penstock.trace.schema import SOURCE


def load(dataset: Any, kind: Any = Loader, **arguments: Any) -> Any:
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 1, "report": None, "timeout_seconds": patient(60)}
    return kind(dataset, **{**settings, **arguments})


def copied(batch: Any) -> Any:
    return {name: part.copy() if isinstance(part, np.ndarray) else part for name, part in batch.items()}


def assert_same(batch: Any, other: Any) -> None:
    assert batch.keys() == other.keys()
    for name in batch.keys() - {"pid"}:
        np.testing.assert_array_equal(batch[name], other[name])


def test_batches_are_those_of_threads_bit_for_bit_and_one_that_is_resumed_gives_the_rest() -> None:
    with load(Mixed(broken=3), epochs=2, on_error="skip", workers="threads") as loader:
        expected = [copied(batch) for _ in range(2) for batch in loader]

    with load(Mixed(broken=3), epochs=2, on_error="skip", workers=2) as loader:
        first = [copied(batch) for batch in loader]
        skipped = loader.skipped
        state = loader.state_dict()
    with load(Mixed(broken=3), epochs=2, on_error="skip", workers=1, state=state) as loader:
        second = [copied(batch) for batch in loader]

    for batch, other in zip(first + second, expected, strict=True):
        assert_same(batch, other)
    assert [(skip.sample, skip.error) for skip in skipped] == [
        (3, "FileNotFoundError: [Errno 2] no such picture: '3.jpg'")
    ]
    ((pid, group),) = {tuple(map(int, entry.split())) for batch in second for entry in batch["pid"]}
    assert pid == group != os.getpgid(0)  # Ctrl-C in a terminal goes to the other group


def test_lists_of_samples_are_made_by_one_call_there_too() -> None:
    with load(Lists(), workers=1, shuffle=False, ragged=[2]) as loader:
        batches = [(numbers.tolist(), texts, list(arrays)) for numbers, texts, arrays in loader]

    assert [number for numbers, *_ in batches for number in numbers] == list(range(COUNT))
    assert [text for _, texts, _ in batches for text in texts] == list(map(str, range(COUNT)))
    arrays = [array.tolist() for *_, arrays in batches for array in arrays]
    assert arrays == [[index] * (index % 4) for index in range(COUNT)]


def test_collated_batches_arrive_as_they_were_made_and_keep_their_memory_while_they_are_kept() -> None:
    with load(Mixed(), penstock.torch.Loader, collate_fn=padded, workers="threads") as loader:
        expected = list(loader)

    with load(Mixed(), penstock.torch.Loader, collate_fn=padded, workers=1, epochs=2) as loader:
        batches = list(loader)
        for _ in loader:  # fills memory that is free again
            pass

    for batch, other in zip(batches, expected, strict=True):
        assert batch["names"] == other["names"]
        assert torch.equal(batch["images"], other["images"])
        assert torch.equal(batch["few"], other["few"])
        assert not batch["is_shared"], "/dev/shm may be full, and what is made is copied once more"


def test_global_generators_give_each_sample_the_same_draws_in_any_number_of_processes() -> None:
    drawn = []
    for workers in (1, 2):
        with load(Drawn(), penstock.torch.Loader, workers=workers, epochs=2, shuffle=False) as loader:
            drawn.append([torch.stack(batch) for _ in range(2) for batch in loader])

    one, two = (torch.cat(batches, 1) for batches in drawn)
    assert torch.equal(one, two)
    assert all(len(set(row)) == 2 * COUNT for row in one.tolist())


def test_the_data_set_finds_what_a_worker_of_pytorch_has_and_its_prints_pass_through(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.loader.worker_data.begun", [9])
        patch.setattr(torch.utils.data._utils.worker, "_worker_info", ())
        patch.setattr(Informed, "__getitem__", lambda self, index: (0, 0, 0, 0, True))
        loader = load(Informed(), penstock.torch.Loader, workers=2, worker_init_fn=note_begin)
    with loader:
        ids, counts, begun, threads, is_same = (torch.cat(parts) for parts in zip(*loader, strict=True))

    assert set(ids.tolist()) == {0, 1}
    assert torch.equal(ids, begun)
    assert set(counts.tolist()) == {2}
    assert set(threads.tolist()) == {1}
    assert bool(is_same.all())
    assert "sample 5 passes by" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("how", "kind", "text"), [("key", KeyError, "no key"), ("odd", DataError, "Odd: 1 and 2")]
)
def test_an_error_arrives_with_its_type_where_it_can_its_sample_and_the_traceback_of_its_process(
    how: str, kind: type[Exception], text: str
) -> None:
    with load(Raising(how), workers=1) as loader, pytest.raises(kind, match=text) as caught:
        list(loader)

    assert "while loading Raising[7]" in str(caught.value.__notes__)
    assert "worker_data.py" in str(caught.value.__cause__)
    assert "in __getitem__" in str(caught.value.__cause__)
    assert Odd(1, 2).args


@pytest.mark.parametrize(
    ("how", "text"), [("killed", "it was killed by SIGKILL"), ("exits", "it ended with exit code 3")]
)
def test_a_process_that_dies_is_an_error_with_its_last_sample(how: str, text: str) -> None:
    with load(Fatal(how), workers=2) as loader, pytest.raises(DataError) as caught:
        list(loader)

    assert "died at sample 7 (Fatal[7])" in str(caught.value)
    assert text in str(caught.value)


def test_a_process_keeps_the_memory_that_a_sample_frees_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [each for each in os.environ if each.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)  # which would stay as it is
    with load(Faulting(), workers=1) as loader:
        faults = min(int(batch.min()) for batch in loader)

    assert faults < 1000, "to fetch 32 MiB again from the kernel takes 8,192"


@for_each("name", ["collate_fn", "worker_init_fn"])
def test_a_function_that_cannot_be_pickled_is_named_by_its_argument(name: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"need a copy of {name}, and it is .*<lambda>, which no other"),
        load(Lists(), workers=1, **{name: lambda _: 0}) as loader,
    ):
        list(loader)


def test_a_process_that_hangs_is_named_with_the_sample_that_it_is_at_and_ended_with_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs at one sample of a batch, and another of that batch waits for it."""
    monkeypatch.setattr(decisions, "LOAD_SECONDS", 0.0)  # a Load has one sample
    hanging = Hanging(tmp_path / "sample")
    with load(hanging, workers=1, batch_size=4, shuffle=False, timeout_seconds=brief(1)) as loader:
        batches = iter(loader)
        next(batches)  # the process has started
        wait_until(hanging.path.exists)
        with pytest.raises(WaitTimeout) as caught:
            next(batches)

    sample = int(hanging.path.read_text())
    assert f"longest under way: sample {sample}, Hanging[{sample}]" in str(caught.value)


def test_the_start_of_processes_is_no_wait_that_times_out(tmp_path: Path) -> None:
    path, lines, seconds = tmp_path / "go", list[str](), brief(1)

    def report(line: str) -> None:
        lines.append(line)
        if sum("waits for worker processes to start" in each for each in lines) == 3:
            path.touch()

    settings: dict[str, Any] = {"report": report, "patience_seconds": seconds / 2, "timeout_seconds": seconds}
    with load(SlowlyImported(path), workers=1, **settings) as loader:
        list(loader)

    assert path.exists(), lines
    assert any("; the start of worker processes limits it: 50 samples in" in each for each in lines), lines


def test_a_first_read_that_hangs_before_a_process_has_anything_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "0.png")
    answers, fetch = threading.Event(), SourceFetcher.fetch

    def hang(fetcher: Any, request: Request) -> Any:
        answers.wait(patient(60))
        return fetch(fetcher, request)

    monkeypatch.setattr(SourceFetcher, "fetch", hang)
    steps = [marked, ToTensor()]
    with load(str(tmp_path), workers=1, transforms=steps, batch_size=1, timeout_seconds=brief(1)) as loader:
        with pytest.raises(WaitTimeout, match="png"):
            list(loader)
        answers.set()


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (threading.Lock(), "is a lock, which belongs to one process"),
        (sys.stdout, "which belongs to one process"),
        (lambda: 0, "define it at the top of a module"),
    ],
)
def test_a_data_set_that_cannot_be_pickled_is_an_error_that_names_the_part_and_the_remedy(
    held: Any, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Holding(held), workers=1)

    assert "dataset.parts['second'][0]" in str(caught.value)
    assert text in str(caught.value)


@for_each(
    ("arguments", "text"),
    [
        ({"workers": 0}, "decoders=0 loads in the training's own thread"),
        ({"workers": "processes"}, 'it is "auto", "threads" or a number'),
        ({"workers": 2, "decoders": 2}, "decoders counts threads"),
        ({"worker_init_fn": 3}, "worker_init_fn is 3"),
        ({"worker_init_fn": print, "workers": "threads"}, "starts none"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_argument(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LoaderConfig(Lists(), batch_size=8, epochs=1, **arguments)


@pytest.fixture
def turns_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and processes of two processors take turns of one Load or more, and neither is ever chosen."""
    monkeypatch.setattr(switching, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(switching, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(switching, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(switching, "_BEGINNING_SECONDS", 0.0)
    monkeypatch.setattr(switching, "_WAITED_SHARE", 0.0)
    monkeypatch.setattr(switching, "_MOST_PAIRS", 1 << 30)
    monkeypatch.setattr(switching, "_LEAST_PAIRS", 1 << 30)
    monkeypatch.setattr(switching, "_CLEAR", 1e9)
    monkeypatch.setattr(switching.Switching, "_may_pay", lambda self, seen, rate: True)
    monkeypatch.setattr("penstock.loader.setup.cpu_limit", lambda: (2, "of this test"))
    # Several threads in turns of threads, too: one alone would give all Loads of the next turn to the first process.
    fix_threads = Engine.fix_threads
    monkeypatch.setattr(
        Engine, "fix_threads", lambda self, count, least=None: fix_threads(self, count or 4, least)
    )


@pytest.mark.usefixtures("turns_without_end")
def test_threads_and_processes_take_turns_and_the_batches_are_the_same() -> None:
    epochs, pids, sums, lines = 0, set[str](), list[Any](), list[str]()
    with load(Mixed(), epochs=None, shuffle=False, memory="64 MiB", report=lines.append) as loader:
        while len(pids) < 3 or epochs < 4:
            assert not [line for line in lines if "from here on" in line or "and stay" in line], (
                "nothing is settled"
            )
            batches = list(map(copied, loader))
            pids |= {entry for batch in batches for entry in batch["pid"]}
            sums.append(np.concatenate([batch["array"] for batch in batches]))
            epochs += 1

    with load(Mixed(), epochs=epochs, shuffle=False, workers="threads") as loader:
        for found in sums:
            np.testing.assert_array_equal(found, np.concatenate([batch["array"].copy() for batch in loader]))


@pytest.mark.parametrize(("speed", "chosen"), [(1.5, "processes"), (1.15, "processes"), (1.0, "threads")])
def test_what_is_faster_goes_on_once_both_had_their_turns(speed: float, chosen: str) -> None:
    lines: list[str] = []
    now = [0.0]
    busy: Any = Busy()
    switch = switching.Switching(
        busy, busy, lambda count: busy.processes, lines.append, cpus=2, samples=np.inf, clock=lambda: now[0]
    )
    switch.watch(busy)
    pauses = itertools.count(1)

    while not switch._is_settled:
        switch.fetch(Request(ONE, print))
        switch.decode(NO_LOAD, Brought([0], ONE, [None]), (), print)
        now[0] += 0.01 / (speed if switch._in_use else 1.0)
        if switch._starting is not None:
            switch._starting.join()
        if not next(pauses) % 150:  # in each turn the training validates for a minute, and then finds a batch
            now[0] += 60.0
            busy.is_waited_for = False
            switch.fetch(Request(ONE, print))
            switch.decode(NO_LOAD, Brought([0], ONE, [None]), (), print)
            busy.is_waited_for = True

    assert f"{chosen} from here on" in lines[0]
    assert f"2 worker processes load {speed:.2f} x as fast" in lines[0]
    assert switch._in_use == (chosen == "processes")
    assert busy.processes.is_closed == (chosen == "threads")


@for_each(
    ("waits", "processors", "samples", "size", "starts"),
    [
        (False, 1.0, np.inf, 1, False),
        (True, 0.1, np.inf, 1, False),
        (True, 1.9, np.inf, 1, False),
        (True, 1.0, 2000, 1, False),
        (True, 1.0, np.inf, 1000, False),  # of 10 us each, which is what handing over takes, too
        (True, 1.0, np.inf, 500, True),  # of 20 us each
        (False, 1.0, np.inf, 10_000, False),  # threads keep up, with more than could be handed over
    ],
)
def test_processes_start_only_where_they_can_help(
    waits: bool, processors: float, samples: float, size: int, starts: bool
) -> None:
    now = [0.0]
    busy: Any = Busy(waits, processors)
    switch = switching.Switching(
        busy, busy, lambda count: busy.processes, print, cpus=2, samples=samples, clock=lambda: now[0]
    )
    switch.watch(busy)

    ids = np.zeros(size, np.int64)
    for _ in range(2000):
        switch.fetch(Request(ids, print))
        switch.decode(NO_LOAD, Brought(range(size), ids, [None] * size), (), print)
        now[0] += 0.01

    assert (switch._starting is not None) == starts
    assert starts or switch.pause_if_left_to_threads() or size < 200


@for_each(("cannot_help", "is_starting"), [(True, False), (False, False), (True, True)])
def test_threads_have_all_of_the_work_only_where_no_process_starts_and_none_does_from_there_on(
    cannot_help: bool, is_starting: bool
) -> None:
    busy: Any = Busy()
    switch = switching.Switching(busy, busy, lambda count: busy.processes, print, cpus=2, samples=np.inf)
    switch._cannot_help, switch._starting = cannot_help, threading.Thread() if is_starting else None

    is_left = switch.pause_if_left_to_threads()

    assert is_left == switch.is_paused == (cannot_help and not is_starting)


NO_LOAD: Any = None
ONE = np.zeros(1, np.int64)


class Busy:
    """An engine, a fetcher, a decoder and processes that do nothing."""

    def __init__(self, waits: bool = True, processors: float = 1.0) -> None:
        self.is_waited_for = waits
        self.lock_use = LockUse(10.0, 10.0 * processors, 100, 0)
        self.is_closed = False

    @property
    def processes(self) -> Any:
        return self

    def fetch(self, request: Request) -> list[Any]:
        return [None] * request.ids.size

    def decode(self, *_: Any) -> list[Any]:
        return []

    def fix_threads(self, count: int | None, least_load_seconds: float | None = None) -> None:
        """Threads are what they are."""

    def start(self) -> None:
        """It is ready."""

    def close_processes(self) -> None:
        self.is_closed = True


def noted_who_decodes(monkeypatch: pytest.MonkeyPatch, decoder: Any) -> set[Any]:
    """Return where the number of each process that decodes comes to stand, and "thread" once one does."""
    who = set[Any]()

    def noted(call: Any, name: Callable[[Any], Any]) -> Callable[..., Any]:
        def noting(self: Any, *given: Any) -> Any:
            who.add(name(self))
            return call(self, *given)

        return noting

    monkeypatch.setattr(_Process, "do", noted(_Process.do, lambda process: process._number))
    monkeypatch.setattr(decoder, "decode", noted(decoder.decode, lambda _: "thread"))
    return who


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of 20 pictures in two classes, one of which is damaged."""
    pixels = np.random.default_rng(0)
    for number in range(20):
        (tmp_path / f"c{number % 2}").mkdir(exist_ok=True)
        picture = Image.fromarray(pixels.integers(0, 256, (40, 50, 3), np.uint8))
        picture.save(tmp_path / f"c{number % 2}" / f"{number:02}.png")
    (tmp_path / "c1" / "03.png").write_bytes(b"no picture")
    return tmp_path


@pytest.mark.usefixtures("turns_without_end")
def test_they_take_turns_with_the_python_transforms_of_a_folder_too(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "_COMPARED", 2)
    monkeypatch.setattr(switching, "_COMPARED_EVERY", 3)
    who = noted_who_decodes(monkeypatch, ImageDecoder)
    arguments: Any = {
        "epochs": None,
        "transforms": [RandomResizedCrop(24), drawn],
        "dtype": "uint8",
        "layout": "NHWC",
        "on_error": "skip",
        "memory": "64 MiB",
        "seed": 1,
    }
    found, lines = list[Any](), list[str]()
    with load(str(pictures), report=lines.append, **arguments) as loader:
        assert loader._parts.switching is not None
        while len(who) < 3 or len(found) < 8:
            assert not [line for line in lines if "from here on" in line or "and stay" in line], lines
            found.append([(images.copy(), labels.copy()) for images, labels in loader])
        skipped = {(each.name, each.error) for each in loader.skipped}

    with load(str(pictures), workers="threads", **arguments) as loader:
        for batches in found:
            for (images, labels), (others, same) in zip(batches, loader, strict=True):
                np.testing.assert_array_equal(images, others)
                np.testing.assert_array_equal(labels, same)
        assert skipped == {(each.name, each.error) for each in loader.skipped}


@pytest.mark.usefixtures("turns_without_end")
def test_they_take_turns_with_what_a_data_set_makes_of_stored_bytes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "_COMPARED", 2)
    monkeypatch.setattr(switching, "_COMPARED_EVERY", 3)
    lines = [
        json.dumps({"n": number, "text": f"row {number}"}) if number != 7 else "no" for number in range(50)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    samples = SourceSamples(JsonLines(tmp_path / "a.jsonl")).map(worker_data.of_line)
    arguments: Any = {"epochs": None, "shuffle": False, "memory": "64 MiB", "seed": 1, "on_error": "skip"}
    who, found, reported = noted_who_decodes(monkeypatch, MakingDecoder), list[Any](), list[str]()
    with load(samples, policy="frequency", report=reported.append, **arguments) as loader:
        while len(who) < 3 or len(found) < 8:
            assert not [line for line in reported if "from here on" in line or "and stay" in line], reported
            found.append(list(map(copied, loader)))
        skipped = {(each.sample, each.name) for each in loader.skipped}

    with load(samples, workers="threads", **arguments) as loader:
        for batches in found:
            for batch, other in zip(batches, loader, strict=True):
                assert_same(batch, other)
        assert skipped == {(each.sample, each.name) for each in loader.skipped}


@pytest.mark.usefixtures("turns_without_end")
@pytest.mark.filterwarnings("ignore:transforms draw from the global")
@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (worker_data.by_global, "makes other values of"),
        (worker_data.by_global_draw, "makes other values of"),
        (worker_data.only_here, "has KeyError: 'it is not set here'"),
    ],
)
def test_where_a_process_has_other_globals_than_the_program_no_batch_is_of_one_and_threads_go_on(
    pictures: Path, transform: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_data, "level", 77)
    (pictures / "c1" / "03.png").unlink()
    lines, levels = list[str](), set[int]()
    steps = [Resize((8, 8)), transform]
    with load(
        str(pictures), epochs=None, transforms=steps, dtype="uint8", layout="NHWC", report=lines.append
    ) as loader:
        switch = loader._parts.switching
        while not (settled := [line for line in lines if "threads from here on" in line]):
            levels |= {int(pixel) for images, _ in loader for pixel in images[:, 0, 0, 0]}
        assert not switch._in_use
        levels |= {int(pixel) for images, _ in loader for pixel in images[:, 0, 0, 0]}

    assert text in settled[0]
    assert "neither globals of the program nor later changes" in settled[0]
    assert len(settled) == 1
    assert levels == {77} or transform is not worker_data.by_global


@pytest.mark.usefixtures("turns_without_end")
@pytest.mark.parametrize("function", [worker_data.named_by_global, worker_data.described_by_global])
def test_text_and_objects_of_a_process_are_compared_before_a_batch_has_them(
    tmp_path: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_data, "level", 77)
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"n": {number}}}' for number in range(50)))
    samples = SourceSamples(JsonLines(tmp_path / "a.jsonl")).map(function)
    lines, expected, settled = list[str](), function({"n": 0})["text"], list[str]()

    with load(samples, policy="frequency", epochs=None, memory="64 MiB", report=lines.append) as loader:
        while not settled:
            settled = [line for line in lines if "threads from here on" in line]
            assert all(text == expected for batch in loader for text in batch["text"])

    assert "makes other text or objects in the batch of" in settled[0]


@pytest.mark.usefixtures("turns_without_end")
def test_an_object_that_changes_after_processes_have_a_copy_of_it_brings_threads_back(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "_COMPARED", 1)
    monkeypatch.setattr(switching, "_COMPARED_EVERY", 3)
    lines, curriculum = list[str](), worker_data.Curriculum()
    (pictures / "c1" / "03.png").unlink()
    with load(
        str(pictures),
        epochs=None,
        transforms=[Resize((8, 8)), curriculum],
        dtype="uint8",
        layout="NHWC",
        report=lines.append,
    ) as loader:
        switch = loader._parts.switching
        while not switch._alike:
            assert {int(pixel) for images, _ in loader for pixel in images[:, 0, 0, 0]} == {0}
        curriculum.level = 9
        while not [line for line in lines if "threads from here on" in line]:
            list(loader)
        epochs = ({int(pixel) for images, _ in loader for pixel in images[:, 0, 0, 0]} for _ in range(100))
        assert {9} in epochs, "what was read ahead comes before"


def test_loaders_of_any_memory_begin_where_slots_are_no_whole_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of 80,000 bytes in the one arena that processes would have, and samples are kept in the rest."""
    monkeypatch.setattr("penstock.loader.setup.cpu_limit", lambda: (2, "of this test"))
    np.save(tmp_path / "a.npy", np.zeros((1500, 1000)))
    samples = SourceSamples(Arrays(tmp_path / "a.npy"))

    for memory in range(1_000_000, 9_000_000, 500_000):
        with load(samples, batch_size=10, epochs=2, memory=memory, policy="frequency") as loader:
            assert loader._parts.staging.arena is not None


def test_transforms_that_cannot_be_copied_stay_with_threads_by_a_line_that_says_why(pictures: Path) -> None:
    lines: list[str] = []
    steps = [Resize((8, 8)), lambda picture: picture]
    with load(str(pictures), transforms=steps, dtype="uint8", report=lines.append) as loader:
        loader._parts.switching._start()  # as it does where threads leave processors idle

    (line,) = (line for line in lines if "and stay" in line)
    assert "define it at the top of a module" in line


@pytest.mark.parametrize(
    ("transforms", "more"),
    [
        ([Resize((8, 8))], {}),
        ([Resize((8, 8)), noisy], {"workers": "threads"}),
        ([Resize((8, 8)), noisy], {"decoders": 2}),
        ([RandomResizedCrop(8), noisy], {"keep": "decoded"}),
    ],
)
def test_threads_alone_decode_what_processes_could_not_or_are_not_to(
    pictures: Path, transforms: Any, more: dict[str, Any]
) -> None:
    with load(str(pictures), transforms=transforms, dtype="uint8", **more) as loader:
        assert loader._parts.switching is None
        assert loader._parts.staging.arena is None


def test_what_a_process_has_no_memory_to_decode_a_thread_decodes(pictures: Path) -> None:
    class Part(Busy):
        def done(self, load: Load, brought: Brought, *_: Any) -> Any:
            failed = [(index, DataError("too large")) for index, data in enumerate(brought.data) if data > 1]
            return failed, "of a process"

    class Whole(Busy):
        def apart(self) -> Any:
            return self

        def take(self, slot: int, rows: Any) -> str:
            return "of a thread"

        def put(self, slot: int, rows: Any, what: str) -> None:
            kept.append((list(rows), what))

        def decode(self, load: Load, brought: Brought, *_: Any) -> list[Any]:
            decoded.append((list(brought.rows), brought.ids.tolist(), brought.data))
            return [(index, DataError("damaged")) for index, data in enumerate(brought.data) if data > 2]

    decoded, kept = list[Any](), list[Any]()
    whole: Any = Whole()
    part: Any = Part()
    source = SourceFetcher(open_source(str(pictures)), {})
    switch = switching.Switching(source, whole, lambda count: part, print, cpus=2, samples=np.inf)
    switch._is_settled = switch._in_use = True
    switch._processes = part
    switch._alike, switch._done_by_processes = 8, 1  # it is not compared

    load: Any = SimpleNamespace(slot=0)
    failed = switch.decode(load, Brought([4, 5, 6], np.array([10, 11, 12]), [1, 2, 3]), (), print)

    assert kept == [([4, 5, 6], "of a process"), ([5, 6], "of a thread")]
    assert decoded == [([5, 6], [11, 12], [2, 3])]
    assert [(index, str(error)) for index, error in failed] == [(2, "damaged")]


def test_transforms_of_a_folder_that_are_python_run_in_processes_and_tiers_keep_what_is_read(
    pictures: Path,
) -> None:
    def run(workers: int) -> Any:
        steps = [RandomResizedCrop(24), marked]
        with load(
            str(pictures),
            epochs=2,
            transforms=steps,
            dtype="uint8",
            layout="NHWC",
            workers=workers,
            on_error="skip",
            memory="64 MiB",
            trace=trace,
        ) as loader:
            batches = [(images.copy(), labels.copy()) for _ in range(2) for images, labels in loader]
            return *map(np.concatenate, zip(*batches, strict=True)), loader.skipped

    trace = pictures.with_suffix(".trace")
    images, labels, skipped = run(2)
    assert [set(epoch.reads_by_place) for epoch in read_trace(trace).epochs()] == [{SOURCE}, set()]
    others, same, _ = run(1)

    pids = {tuple(pixel) for pixel in images[:, 0, 0].tolist()}
    assert len(pids) == 2
    own = os.getpid()
    assert (own >> 16 & 255, own >> 8 & 255, own & 255) not in pids
    images[:, 0, 0] = others[:, 0, 0] = 0
    np.testing.assert_array_equal(images, others)
    np.testing.assert_array_equal(labels, same)
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == 38
    assert {(skip.name, skip.error.startswith(skip.name)) for skip in skipped} == {
        (str(pictures / "c1" / "03.png"), True)
    }


def test_processes_for_transforms_that_run_without_python_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "0.png")

    with pytest.raises(ConfigError, match="no step of transforms is Python code"):
        load(str(tmp_path), transforms=[Resize(8), ToTensor()], workers=2, batch_size=1)
    with pytest.raises(ConfigError, match="define it at the top of a module"):
        load(str(tmp_path), transforms=[Resize(8), lambda picture: picture], workers=2, batch_size=1)


SCRIPT = """
import os, sys, time
import penstock

class Own:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index + 1, os.getpid(), os.getppid()

def main():
    with penstock.Loader(Own(), batch_size=8, epochs=1, workers=1, shuffle=False, report=None) as loader:
        for numbers, pids, servers in loader:
            print(*numbers, pids[0], servers[0], flush=True)
            if sys.argv[1:] == ["wait"]:
                time.sleep(3600)
"""
#: Once is said what is wrong, though each process would make both loaders.
CATCHING = """
try:
    main()
except Exception as error:
    print(error)
    try:
        penstock.Loader([1], batch_size=1, epochs=1, report=None).close()
    except Exception as error:
        print(error)
"""
GUARDED = SCRIPT + "\nif __name__ == '__main__':\n    main()\n"


def test_a_script_that_holds_the_class_of_its_data_set_without_a_guard_is_refused_and_so_is_a_typed_one(
    tmp_path: Path, interpreters: Interpreters
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(SCRIPT + "\nmain()\n")

    refused = interpreters.run(f"import runpy; runpy.run_path({str(plain)!r}, run_name='__main__')")
    plain.write_text(SCRIPT + CATCHING)
    caught = interpreters.run(f"import runpy; runpy.run_path({str(plain)!r}, run_name='__main__')")
    typed = interpreters.run(GUARDED)

    assert "under `if __name__ == '__main__':`" in refused.stderr
    assert caught.stdout.count("this script makes a loader as soon as it is imported") == 1, caught.stdout
    assert "Own is defined in a notebook, on the command line or at a prompt" in typed.stderr


UNDER_GUARD = """
import penstock

if __name__ == "__main__":
    class Own:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

    with penstock.Loader(Own(), batch_size=4, epochs=1, workers=1, report=None) as loader:
        list(loader)
"""


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        (
            '__name__ == "__main__"',
            "Own is defined under `if __name__ == '__main__':`, which worker processes do",
        ),
        (
            '"__main__" in __name__',
            "Own is not there where a worker process imports the script that defines it",
        ),
    ],
)
def test_a_class_that_is_defined_only_where_the_script_is_the_program_is_refused(
    tmp_path: Path, interpreters: Interpreters, guard: str, message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_GUARD.replace('__name__ == "__main__"', guard))

    refused = interpreters.run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")

    assert f"ConfigError: {message}" in refused.stderr


CHOSEN = """
import os
import penstock

class Own:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return index, os.getpid()

def main():
    lines = []
    with penstock.Loader(Own(), batch_size=4, epochs=1, prefetch=2, report=lines.append) as loader:
        batches = iter(loader)
        next(batches)
        loader._parts.switching._start()  # as it does where threads leave processors idle
        found = {pid for _, pids in batches for pid in pids.tolist()}
    print(len(found - {os.getpid()}), *[line for line in lines if "and stay" in line])

"""


def test_processes_are_chosen_for_a_data_set_of_the_script_itself_if_that_does_not_run_again(
    tmp_path: Path, interpreters: Interpreters
) -> None:
    told = []
    for number, end in enumerate(("if __name__ == '__main__':\n    main()\n", "main()\n")):
        script = tmp_path / f"{number}.py"
        script.write_text(CHOSEN + end)
        run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        told.append(interpreters.run(run).stdout)

    assert int(told[0]) > 0
    assert told[1].startswith("0 ")
    assert "1.py', which has no `if __name__ == '__main__':`: put what the script does under that" in told[1]


def test_processes_of_a_script_with_a_guard_end_when_the_training_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(GUARDED))
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), "wait"], stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        *numbers, worker, server = map(int, training.stdout.readline().split())
        assert numbers == [1, 2, 3, 4, 5, 6, 7, 8]
        assert server != training.pid
        training.send_signal(signal.SIGKILL)

        wait_until(lambda: not is_running(worker) and not is_running(server))


def is_running(pid: int) -> bool:
    """Return whether there is a process that is no zombie."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and command.read_bytes() != b""


def test_what_comes_next_goes_to_a_process_that_has_nothing_to_do() -> None:
    """Each process has two threads: those of one begin at the same time, while another process is idle."""
    first: Any = SimpleNamespace(tasks=0)
    second: Any = SimpleNamespace(tasks=0)
    processes = Processes.__new__(Processes)
    processes.__dict__ |= {"_all": [second, first], "_all_lock": threading.Lock()}
    processes._threads = SimpleNamespace(process=first)  # type: ignore[assignment]

    with processes._idlest() as one, processes._idlest() as other, processes._idlest() as third:
        assert (one, other, third) == (first, second, first)
    with processes._idlest() as later:
        assert later is first
