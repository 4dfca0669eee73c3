"""What Penstock would make of another loader's run is what it makes of it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Machine
from penstock.measure.calibrate import calibrate
from penstock.measure.recorded import open_run, read_run
from penstock.measure.slow_source import SlowSource
from penstock.measure.switch import predict_switch, predict_switch_of_run
from penstock.measure.watch import watch
from penstock.store import ImageFolder, Source
from penstock.trace import JSON, Trace, TraceWriter, read_trace
from penstock.trace.file import RUN_FOLDER

SIDE, BATCH, STEP_SECONDS = 32, 8, 10e-3
#: Bytes pass one after the other, decoding is next to free.
MACHINE = """
[source]
clients = "1 kB/s"
threads = 4
[[storage]]
name = "staging"
capacity = "1 GB"
threads = 1
read = "16 GB/s"
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Images:
    """Reads and decodes a batch when it is asked for one."""

    batch_size = BATCH

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        order = np.random.default_rng(1).permutation(len(self.source))
        for first in range(0, order.size, BATCH):
            pictures = [
                Image.open(io.BytesIO(self.source.read(sample))).resize((SIDE, SIDE))
                for sample in order[first : first + BATCH].tolist()
            ]
            yield np.stack([np.asarray(each, np.float32).transpose(2, 0, 1) for each in pictures])


def watched_run(folder: Path, clock: Clock) -> Trace:
    """Each of four batches of eight images was waited for for 2 s, and computed on for 1 s."""

    def batches() -> Iterator[NDArray[np.float32]]:
        for _ in range(4):
            clock.now += 2.0
            yield np.zeros((8, 3, SIDE, SIDE), np.float32)

    watched = watch(batches(), quiet=True, clock=clock)
    for _ in watched:
        clock.now += 1.0
    return watched.trace()


def test_a_run_that_a_store_bounds_takes_as_long_as_its_bytes(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = image_folder(images=32)
    nbytes = int(ImageFolder(folder).sizes_bytes.sum())

    found = predict_switch(
        watched_run(folder, Clock()), folder, machine=Machine.from_toml("preprocess = '1 GB/s'\n" + MACHINE)
    )

    assert (found.steps, found.measured_seconds, found.measured_stall_seconds) == (4, 12.0, 8.0)
    # All bytes at 1 kB/s, and the last step.
    assert found.predicted_seconds == pytest.approx(nbytes / 1000 + 1.0, rel=0.01)
    assert found.predicted_stall_seconds == pytest.approx(nbytes / 1000 - 3.0, rel=0.01)
    assert str(found).startswith("with Penstock's loader ")


def test_a_watched_loader_joins_the_run_and_explain_says_what_a_switch_would_bring(
    image_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, run, machine = image_folder(images=32), tmp_path / "run", tmp_path / "machine.toml"
    run.mkdir()
    machine.write_text(MACHINE.replace("1 kB/s", "1 GB/s"))
    monkeypatch.setenv(RUN_FOLDER, str(run))
    loader, lines = Images(ImageFolder(folder)), list[str]()
    for _ in range(2):
        watched = watch(loader, report=lines.append)  # anew in each epoch, as some scripts do
        for _batch in watched:
            pass
    del loader, watched
    monkeypatch.delenv(RUN_FOLDER)
    watch([], quiet=True)  # lets go of loaders that are gone; the end of the process does, too

    assert len(lines) == 2
    assert len(list(run.iterdir())) == 1
    recorded = read_run(run)
    assert [each.steps for each in recorded.epochs()] == [4, 4]
    assert recorded.is_complete
    assert {name: recorded.meta[name] for name in ("watched", "batch_size", "shape", "dtype")} == {
        "watched": "Images",
        "batch_size": BATCH,
        "shape": [BATCH, 3, SIDE, SIDE],
        "dtype": "float32",
    }
    words = ["explain", str(run), "--source", str(folder), "--machine", str(machine), "--memory", "64MiB"]
    assert main([*words, "--json"]) == 0
    switch = json.loads(capsys.readouterr().out)["switch"]
    assert switch["steps"] == 8
    assert switch["predicted_seconds"] < switch["measured_seconds"]
    assert main(["explain", str(run)]) == 0
    assert "add --source FOLDER --machine FILE" in capsys.readouterr().out

    # A loader anew, and one of other data, as for validation.
    monkeypatch.setenv(RUN_FOLDER, str(run))
    for data in (folder, image_folder(images=12, name="validation")):
        for _batch in watch(Images(ImageFolder(data)), quiet=True):
            pass
    monkeypatch.delenv(RUN_FOLDER)
    watch([], quiet=True)
    assert [each.steps for each in read_run(run).epochs()] == [4, 4, 4, 2]
    assert main([*words, "--json"]) == 0
    all_three = json.loads(capsys.readouterr().out)
    assert {each["reason"]: each["batches"] for each in all_three["results"]}["unseen"] == 14
    alone = [
        predict_switch(read_trace(file), folder, machine=str(machine), memory="64 MiB")
        for file in run.iterdir()
        if len(read_trace(file).spans) > 6
    ]
    both = all_three["switch"]
    assert both["steps"] == 12
    assert both["measured_seconds"] == pytest.approx(sum(each.measured_seconds for each in alone))
    assert "of 3 loaders, 2 are replaced" in " ".join(both["notes"])
    third = image_folder(images=3, name="third")
    assert main(["explain", str(run), "--source", str(third), "--machine", str(machine)]) == 0
    assert "give penstock explain the .trace of one" in " ".join(capsys.readouterr().out.split())


def write(file: Path, trace: Trace, steps: int, **more: JSON) -> None:
    """Write the first steps of a trace to a file, as a rank would."""
    with TraceWriter(file, {**trace.meta, **more}) as writer:
        writer.append(trace.spans[trace.spans["step"] < steps])


def test_the_only_loader_of_each_rank_counts_whatever_its_steps_and_of_several_those_of_the_source(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Two ranks, whose epochs a number of steps cut; then each has another loader, and its sampler fills up."""
    folder, machine = image_folder(images=44), Machine.from_toml("preprocess = '1 GB/s'\n" + MACHINE)
    trace = watched_run(folder, Clock())
    for rank in (0, 1):
        write(tmp_path / f"{rank}.trace", trace, 2 + rank, rank=rank, ranks=2)

    cut = predict_switch_of_run(open_run(tmp_path), folder, machine=machine)

    assert (cut.steps, cut.measured_seconds) == (3, 9.0)
    assert not any("left out" in note for note in cut.notes)
    for rank in (0, 1, 2):
        # Of 44 samples each of three ranks has 15, one of them twice, and of these three batches of 5.
        more: dict[str, JSON] = {"rank": rank, "ranks": 3, "batch_size": 5, "drop_last": True}
        write(tmp_path / f"{rank}.trace", trace, 3, **more)
        write(tmp_path / f"{rank}-validation.trace", trace, 4, **more)
    both = predict_switch_of_run(open_run(tmp_path), folder, machine=machine)
    assert (both.steps, both.measured_seconds) == (3, 9.0)
    assert "of 6 loaders, 3 are replaced" in " ".join(both.notes)


def test_what_a_command_did_is_summed_up_whatever_a_switch_would_bring(
    image_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source is not there; then it is, and one of Penstock's own loaders began before the other."""
    run, machine, folder = tmp_path / "run", tmp_path / "machine.toml", image_folder(images=32)
    machine.write_text(MACHINE)
    write(tmp_path / "0.trace", watched_run(folder, Clock()), 4)
    watch_it = ["watch", "--machine", str(machine), "--json", "--out"]

    words = [
        *watch_it,
        str(run),
        "--source",
        str(tmp_path / "none"),
        "--",
        "cp",
        str(tmp_path / "0.trace"),
        str(run),
    ]
    assert main(words) == 0

    found = capsys.readouterr()
    data = json.loads(found.out)
    assert data["switch"] is None
    assert data["verdict"] is not None
    assert "what a switch would bring is not known" in found.err
    transforms, own = (Resize(SIDE), ToTensor()), tmp_path / "own.trace"
    with Loader(
        folder,
        batch_size=8,
        epochs=1,
        transforms=transforms,
        memory="16 MiB",
        machine=machine,
        trace=own,
        report=None,
    ) as loader:
        next(iter(loader))
    both = tmp_path / "both"
    words = [
        *watch_it,
        str(both),
        "--source",
        str(folder),
        "--",
        "cp",
        str(own),
        str(tmp_path / "0.trace"),
        str(both),
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["switch"]["steps"] == 4
    assert "own.trace is Penstock's already, and is left out of both sides" in data["switch"]["notes"]
    assert [part.name for part in open_run(both).parts] == ["own.trace", "0.trace"]
    words = [
        "explain", str(both), "--source", str(folder), "--machine", str(machine), "--memory", "64MiB",
        "--json",
    ]  # fmt: skip
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["switch"]["steps"] == 4
    assert len(data["changes"]) == 3
    assert "0.trace is not replayed and counts as it was: it is another loader" in " ".join(data["notes"])
    assert main(["explain", str(tmp_path / "0.trace"), "--memory", "64MiB"]) == 0
    assert "have no effect" in capsys.readouterr().out


def test_what_a_switch_needs_and_the_run_does_not_say_is_named(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, machine = image_folder(images=8), Machine.from_toml(MACHINE)
    watched = watch([1, 2], quiet=True)
    for _ in watched:
        pass

    with pytest.raises(ConfigError, match="batch_size is missing"):
        watched.switch(folder, machine=machine)
    with pytest.raises(ConfigError, match="not one of a loader in"):
        predict_switch(Trace(watched.trace().spans), folder, machine=machine)


@pytest.mark.slow
def test_what_a_switch_would_bring_comes_true(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = image_folder(images=240)

    def slowed() -> SlowSource:
        return SlowSource(ImageFolder(folder), 0.0, 10e-3, 1e9)

    def train(batches: Any) -> None:
        for _ in batches:
            time.sleep(STEP_SECONDS)

    with slowed() as source:
        machine = calibrate(source, max_seconds=3.0)
        watched = watch(Images(source), quiet=True)
        for _ in range(2):
            train(watched)
        found = watched.switch(source, machine=machine, epochs=2, readers=2, memory="64 MiB")
    with (
        slowed() as source,
        Loader(
            source,
            batch_size=BATCH,
            epochs=2,
            readers=2,
            memory="64 MiB",
            transforms=(Resize((SIDE, SIDE)), ToTensor()),
            machine=machine,
            trace=tmp_path / "run.trace",
            report=None,
        ) as loader,
    ):
        for _ in range(2):
            train(loader)

    epochs = read_trace(tmp_path / "run.trace").epochs()
    seconds = sum(epoch.stall_seconds + epoch.own_seconds for epoch in epochs)
    assert found.measured_seconds > 2 * seconds
    assert found.predicted_seconds == pytest.approx(seconds, rel=0.2)
