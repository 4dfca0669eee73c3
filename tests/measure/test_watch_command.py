"""`penstock watch`: counters are those of the kernel's files, the command is passed on, loaders inside join the run."""

from __future__ import annotations

import errno
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import SnapshotStore
from penstock.cli.main import main
from penstock.flow.recorder import Recorder
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.measure import watch_command as module
from penstock.measure.explain import Reason, explain
from penstock.measure.kernel_file import KernelFile
from penstock.measure.recorded import read_run
from penstock.measure.sampling import Sampler
from penstock.measure.watch_command import watch_command
from penstock.recordings.devices import GONE, DeviceWriter, read_devices
from penstock.trace.file import RUN_FOLDER
from penstock.trace.schema import Kind

DISK = "  10 0 {sectors} 5 20 0 40 5 0 70 80\n"
STAT = "{pid} (a (b) c) {state} {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 3 {waited_for} 0 20 0 1 0 5 9 2 1 1"
IO = "rchar: {asked}\nwchar: 9\nread_bytes: 400\nwrite_bytes: 7\n"


class Host:
    """The kernel's files of a host with one disk, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.now = self.others_seconds = 0.0
        (self.proc / "net").mkdir(parents=True)
        (self.proc / "net" / "dev").write_text(
            "Inter-| Receive\n face |bytes\n lo: 5 0 0 0 0 0 0 0 6 0\neth0: 100 0 0 0 0 0 0 0 50 0\n"
        )
        for name, size in (("sda", "8"), ("loop0", "8"), ("sdb", "0"), ("dm-0", "8")):
            (self.sys / "block" / name / "slaves").mkdir(parents=True)
            (self.sys / "block" / name / "size").write_text(size)
        (self.sys / "block" / "dm-0" / "slaves" / "sda1").touch()
        self.disk = self.sys / "block" / "sda" / "stat"
        self.disk.write_text(DISK.format(sectors=2))
        self.process(7, 4)

    def process(
        self,
        pid: int,
        ticks: int,
        *,
        parent: int = 1,
        state: str = "S",
        waited_for: int = 0,
        asked: int = 1000,
    ) -> None:
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "stat").write_text(
            STAT.format(pid=pid, ticks=ticks, parent=parent, state=state, waited_for=waited_for)
        )
        (self.proc / str(pid) / "io").write_text(IO.format(asked=asked))

    def end(self, pid: int) -> None:
        """Make a process's files what they are when it has ended and was waited for."""
        for name in ("stat", "io"):
            (self.proc / str(pid) / name).write_text("")

    def sampler(self, tree_of: Callable[[int], list[int]], cost_seconds: float = 0.0) -> Sampler:
        """Return a sampler to which looking through a tree, or reading it, takes so long."""
        costs = itertools.count(step=cost_seconds)
        return Sampler(
            7,
            proc=self.proc,
            sys=self.sys,
            tree_of=tree_of,
            clock=lambda: self.now,
            cost_clock=lambda: self.others_seconds + next(costs),
        )


def sampled(sampler: Sampler, *, everything: bool = False) -> dict[str, int]:
    sampler.sample(everything=everything)
    (row,) = sampler.rows().tolist()
    return dict(zip(sampler.columns, row, strict=True))


def test_counters_are_those_of_disks_network_and_processes(tmp_path: Path) -> None:
    host = Host(tmp_path)
    tree: list[int] = []
    sampler = host.sampler(lambda _: tree)

    first = sampled(sampler)
    host.process(8, 10)
    tree.append(8)
    host.now = 1.5
    second = sampled(sampler)
    host.end(8)
    host.disk.write_text("")
    third = sampled(sampler)
    host.disk.rename(host.disk.with_name("old"))
    host.disk.write_text(DISK.format(sectors=1))
    host.now = 2.0
    back = [sampled(sampler)["disk:sda:read_bytes"] for _ in range(2)]
    sampler.close()
    sampler.close()

    assert [name for name in first if name.startswith("disk:") and name.endswith("_bytes")] == [
        "disk:sda:read_bytes",
        "disk:sda:written_bytes",
    ]
    assert (first["disk:sda:read_bytes"], first["disk:sda:written_bytes"]) == (2 * 512, 40 * 512)
    assert first["disk:sda:busy_milliseconds"] == 70
    assert (first["net:received_bytes"], first["net:sent_bytes"], first["pressure:io_microseconds"]) == (
        100,
        50,
        GONE,
    )
    assert [each["tree:processes"] for each in (first, second, third)] == [1, 2, 1]
    assert [each["tree:cpu_ticks"] for each in (first, second, third)] == [7, 20, 20]
    assert [each["tree:asked_bytes"] for each in (first, second, third)] == [1000, 2000, 2000]
    assert (second["nanoseconds"], third["disk:sda:read_bytes"]) == (1_500_000_000, GONE)
    assert back == [GONE, 512], "put back"


def test_what_a_process_read_counts_once_when_its_parent_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits after its own counters were read, and before those of the process are."""
    host = Host(tmp_path)
    host.process(8, 10, parent=7)
    sampler = host.sampler(lambda _: [8])

    running = sampled(sampler)
    host.process(8, 12, parent=7, state="Z", asked=1500)
    ended = sampled(sampler, everything=True)
    host.end(8)
    read = KernelFile.read

    def read_and_waited_for(file: KernelFile) -> bytes:
        if file._path == host.proc / "8" / "stat":
            host.process(7, 4, waited_for=15, asked=2500)
        return read(file)

    with monkeypatch.context() as patched:
        patched.setattr(KernelFile, "read", read_and_waited_for)
        between = sampled(sampler)
    waited_for = sampled(sampler, everything=True)
    sampler.close()

    rows = (running, ended, between, waited_for)
    assert [each["tree:asked_bytes"] for each in rows] == [2000, 2500, 2500, 2500]
    assert [each["tree:cpu_ticks"] for each in rows] == [20, 22, 22, 22]
    assert [each["tree:processes"] for each in rows] == [2, 1, 1, 1]


def test_what_a_process_read_counts_where_its_parent_is_ended_with_it(tmp_path: Path) -> None:
    """A rank and its worker are killed, whose launcher waits for the rank alone and starts another one."""
    host, tree = Host(tmp_path), [8, 9]
    host.process(8, 1, parent=7, asked=100)
    host.process(9, 5, parent=8, asked=50_000)
    sampler = host.sampler(lambda _: tree)

    rows = [sampled(sampler)]
    host.end(8)
    host.end(9)
    host.process(7, 4, waited_for=4, asked=1100)
    rows.append(sampled(sampler, everything=True))
    tree[:] = [10]
    for asked in (0, 10_000, 60_000):
        host.process(10, 0, parent=7, asked=asked)
        rows.append(sampled(sampler, everything=True))
    sampler.close()

    assert [each["tree:asked_bytes"] for each in rows] == [51_100, 51_100, 51_100, 61_100, 111_100]
    assert [each["tree:cpu_ticks"] for each in rows] == [19, 19, 22, 22, 22]
    assert [each["tree:processes"] for each in rows] == [3, 1, 2, 2, 2]


def test_what_processes_read_counts_where_their_parent_waits_for_none(tmp_path: Path) -> None:
    host, tree = Host(tmp_path), [8]
    sampler = host.sampler(lambda _: tree)

    rows = []
    for tree[0] in (8, 9, 10):
        host.process(tree[0], 0, parent=7, asked=100_000)
        rows.append(sampled(sampler, everything=True)["tree:asked_bytes"])
        host.end(tree[0])
    sampler.close()

    assert rows == [101_000, 201_000, 301_000]


def test_a_large_tree_is_read_and_looked_through_each_two_seconds_and_its_new_processes_at_once(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    host.process(8, 4)
    sampler = host.sampler(lambda _: [8] if host.now else [], cost_seconds=0.015)

    rows = []
    for tick, host.now in enumerate((0.0, 1.5, 2.0, 3.5, 4.0, 4.5)):
        host.process(7, tick)
        host.disk.write_text(DISK.format(sectors=tick))
        rows.append(sampled(sampler, everything=host.now == 4.5))
    sampler.close()

    assert [each["disk:sda:read_bytes"] // 512 for each in rows] == [0, 1, 2, 3, 4, 5]
    assert [each["tree:processes"] for each in rows] == [1, 1, 2, 2, 2, 2]
    assert [each["tree:cpu_ticks"] for each in rows] == [3, 3, 12, 12, 14, 15]
    assert [each["tree:nanoseconds"] / 1e9 for each in rows] == [0.0, 0.0, 2.0, 2.0, 4.0, 4.5]


@pytest.mark.parametrize(("others_seconds", "least", "most"), [(2e-4, 50, 50), (4e-4, 7, 25), (6e-4, 3, 6)])
def test_processes_are_read_for_each_row_unless_all_together_takes_too_much_of_a_core(
    tmp_path: Path, others_seconds: float, least: int, most: int
) -> None:
    """Ten rows a second, each of which takes so long without the processes; reading these takes 0.1 ms."""
    host = Host(tmp_path)
    sampler = host.sampler(lambda _: [], cost_seconds=1e-4)

    times = []
    for number in range(100):
        host.now, host.others_seconds = number / 10, number * others_seconds
        times.append(sampled(sampler)["tree:nanoseconds"])
    sampler.close()

    assert least <= len(set(times[50:])) <= most


def test_a_command_is_recorded_to_its_end_and_its_status_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    run = tmp_path / "run"

    assert main(["watch", "--out", str(run), "--json", "--", "sh", "-c", "echo out; exit 3"]) == 3

    found = capfd.readouterr()
    data = json.loads(found.out)
    assert found.err == "out\n"
    assert (data["exit_status"], data["verdict"]) == (3, None)
    record = read_devices(run)
    assert (record.exit_status, record.meta["command"]) == (3, ["sh", "-c", "echo out; exit 3"])
    assert main(["trace", str(run), "--export", "parquet"]) == 0
    table = pq.read_table(tmp_path / "run-devices.parquet")
    assert table["nanoseconds"].to_pylist() == record.rows[:, record.columns.index("nanoseconds")].tolist()
    assert json.loads(table.schema.metadata[b"penstock"])["command"] == ["sh", "-c", "echo out; exit 3"]
    assert str(tmp_path / "run-devices.parquet") in capfd.readouterr().out
    assert main(["watch", "--out", str(run), "--", "true"]) == 1
    assert "has the record of another run" in capfd.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    assert "ended with status 3" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "no command is given"),
        (["--", "/none/of/these"], "'/none/of/these' is not found"),
        (["--period", "1ms", "--", "true"], "--period is '1ms'"),
        (["--source", "photos", "--", "true"], "--source and --machine belong together"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--out", str(tmp_path / "run"), *words]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (': > "$0/x.trace"', "x.trace"),
        ('until [ -e "$0/devices.penwatch" ]; do :; done; rm -r "$0"', "No such file or directory"),
    ],
)
def test_the_status_of_a_command_outlives_a_run_that_cannot_be_summed_up(
    script: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    assert main(["watch", "--out", str(run), "--", "sh", "-c", f"{script}; exit 7", str(run)]) == 7

    assert message in capsys.readouterr().err


def test_a_full_disk_ends_the_record_and_not_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnFullDisk(DeviceWriter):
        def append(self, rows: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "DeviceWriter", OnFullDisk)
    lines: list[str] = []

    watched = watch_command(
        [sys.executable, "-S", "-c", "raise SystemExit(5)"], tmp_path, report=lines.append
    )

    assert watched.exit_status == 5
    assert len(lines) == 1
    assert lines[0].startswith("the record breaks off here; the command continues")
    assert read_devices(tmp_path).exit_status is None


def read(folder: Path, trace: Path | None = None) -> None:
    with Loader(
        folder,
        batch_size=4,
        epochs=1,
        transforms=(Resize(8), ToTensor()),
        memory="16 MiB",
        trace=trace,
        report=None,
    ) as loader:
        for _batch in loader:
            pass


def save(folder: Path, recorder: Recorder | None = None) -> None:
    with SnapshotStore(folder, report=None, trace=recorder) as store:
        for step in (1, 2):
            store.save(step, {"w": np.zeros(4)}).wait()
        store.restore()


def test_a_loader_and_a_store_inside_join_the_run(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = image_folder(images=8), tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv(RUN_FOLDER, str(run))

    read(folder, tmp_path / "own.trace")
    save(tmp_path / "0", Recorder(64))
    assert list(run.iterdir()) == []

    save(tmp_path / "1")
    alone = read_run(run)
    assert alone.is_complete
    assert Counter(alone.spans["kind"].tolist()) == {Kind.SAVE: 2, Kind.WRITE: 2, Kind.LOAD: 1}
    found = explain(alone)
    saves = alone.spans[alone.spans["kind"] == Kind.SAVE]
    assert found.blocked_seconds == pytest.approx((saves["end"] - saves["start"]).sum())
    assert found.first == Reason.SAVE
    assert {moment.when for moment in found.moments} == {"save at step 1", "save at step 2"}
    assert main(["report", str(run), "-o", str(tmp_path / "saves.html")]) == 0
    assert main(["trace", str(run)]) == 0

    read(folder)
    both = read_run(run)
    assert [each.steps for each in both.epochs()] == [2]
    assert Counter(both.spans["kind"].tolist())[Kind.SAVE] == 2
    assert both.spans["start"][both.spans["kind"] == Kind.WAIT].min() > saves["start"].max()

    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "gone"))
    read(folder)
    save(tmp_path / "2")


def test_a_run_that_cannot_be_written_is_reported_once_and_the_saves_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "run"))
    lines: list[str] = []
    spans = SnapshotSpans(report=lines.append)
    (tmp_path / "run").rmdir()

    for step in (1, 2):
        with spans.span(Kind.SAVE, step):
            pass
    spans.close()

    assert len(lines) == 1
    assert "saves are not recorded" in lines[0]
