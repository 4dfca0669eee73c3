"""A command is recorded while it runs, really, by strace and by the hook; what it asked for is known beforehand."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.for_each import for_each
from tests.patience import patient, wait_until

from penstock.errors import ConfigError
from penstock.measure.blocks import record
from penstock.recordings.blocks import Access, Phase, Recording, read_recording

SAMPLES, EPOCHS, WORKERS, BATCH = 24, 3, 2, 4
SAMPLE_BYTES = 9_000  # three blocks

#: Reads samples in worker processes: batch b of an epoch by worker b % WORKERS, as PyTorch's DataLoader deals them;
#: saves into a temporary file that is renamed, appends to a log, and prints its workers' process ids.
TRAINING = """
import multiprocessing, os, random, sys
from pathlib import Path

data, saves, samples, epochs, workers, batch = *map(Path, sys.argv[1:3]), *map(int, sys.argv[3:])
files = sorted(data.iterdir())

def read(worker, orders):
    for order in orders:
        for at in range(0, samples, batch):
            if at // batch % workers == worker:
                for sample in order[at:at + batch]:
                    files[sample].read_bytes()

if __name__ == "__main__":
    random.seed(5)
    orders = [random.sample(range(samples), samples) for _ in range(epochs)]
    fork = multiprocessing.get_context("fork")
    for epoch in range(epochs):
        running = [fork.Process(target=read, args=(worker, [orders[epoch]])) for worker in range(workers)]
        for process in running:
            process.start()
        print("epoch", *(process.pid for process in running), ":", *orders[epoch])
        for process in running:
            process.join()
        unfinished = saves / "unfinished"
        unfinished.write_bytes(bytes(20_000))
        unfinished.rename(saves / f"{epoch}.pt")
        with open(saves / "log.txt", "a") as log:
            log.write("done\\n")
    sys.exit(3)
"""


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    for sample in range(SAMPLES):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{sample:03}").write_bytes(bytes(SAMPLE_BYTES))
    (tmp_path / "saves").mkdir()
    (tmp_path / "train.py").write_text(TRAINING)
    arguments = [tmp_path / "data", tmp_path / "saves", SAMPLES, EPOCHS, WORKERS, BATCH]
    return [sys.executable, str(tmp_path / "train.py"), *map(str, arguments)]


def recorded(job: list[str], tmp_path: Path, by: str) -> tuple[Recording, list[tuple[list[int], list[int]]]]:
    """Record the training; return the recording, and for each epoch its workers and its order."""
    with (tmp_path / "said").open("w+") as said:
        made = record(
            job,
            tmp_path / "out",
            by=by,
            data=[tmp_path / "data"],
            checkpoints=[tmp_path / "saves"],
            stdout=said.fileno(),
        )
        said.seek(0)
        lines = said.read().splitlines()
    assert (made.exit_status, made.interrupted_by, made.rings) == (3, None, 0)
    assert made.recording.is_complete
    told = [line.removeprefix("epoch").split(":") for line in lines]
    return made.recording, [([*map(int, pids.split())], [*map(int, order.split())]) for pids, order in told]


def reads_of(recording: Recording, process: int) -> list[tuple[int, int, int]]:
    """Return what a process read of the data set: sample, offset, bytes."""
    rows = recording.rows
    of = (rows["process"] == process) & (recording.file_phases()[rows["file"]] == Phase.DATA)
    return [
        (int(Path(recording.files[row["file"]]).name), int(row["offset"]), int(row["bytes"]))
        for row in rows[of]
    ]


def share_of(order: list[int], worker: int) -> list[int]:
    return [sample for place, sample in enumerate(order) if place // BATCH % WORKERS == worker]


@pytest.mark.parametrize("by", [pytest.param("strace", marks=pytest.mark.system), "opens"])
def test_every_workers_reads_are_recorded_in_the_order_that_is_known(
    job: list[str], tmp_path: Path, by: str
) -> None:
    recording, epochs = recorded(job, tmp_path, by)

    assert len(epochs) == EPOCHS
    for workers, order in epochs:
        for worker, process in enumerate(workers):
            expected = [(sample, 0, SAMPLE_BYTES) for sample in share_of(order, worker)]
            assert reads_of(recording, process) == expected
    string = recording.string(phases=[Phase.DATA])
    assert string.numbers.size == EPOCHS * SAMPLES * 3
    # The first epoch counts up, whatever its order; each later one has the same blocks.
    assert string.numbers[: SAMPLES * 3].tolist() == list(range(1, SAMPLES * 3 + 1))
    for epoch in range(EPOCHS):
        of_epoch = string.numbers[epoch * SAMPLES * 3 : (epoch + 1) * SAMPLES * 3]
        assert sorted(of_epoch.tolist()) == list(range(1, SAMPLES * 3 + 1))
    assert read_recording(tmp_path / "out").rows.tolist() == recording.rows.tolist()


@pytest.mark.system
def test_saves_are_recorded_under_their_last_names_as_files_of_their_own(
    job: list[str], tmp_path: Path
) -> None:
    recording, _ = recorded(job, tmp_path, "strace")

    rows = recording.rows[recording.rows["access"] == Access.WRITE]
    saved = [
        (Path(recording.files[row["file"]]).name, int(row["offset"]), int(row["bytes"]))
        for row in rows
        if recording.file_phases()[row["file"]] == Phase.CHECKPOINT
    ]
    assert saved == [
        each for epoch in range(EPOCHS) for each in ((f"{epoch}.pt", 0, 20_000), ("log.txt", 5 * epoch, 5))
    ]
    # 5 blocks of each save, and one block of the log, appended to.
    assert recording.string(phases=[Phase.CHECKPOINT]).blocks == 5 * EPOCHS + 1


@pytest.mark.parametrize("by", [pytest.param("strace", marks=pytest.mark.system), "opens"])
def test_nothing_but_the_recording_is_left(
    job: list[str], tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    recorded(job, tmp_path, by)

    assert os.listdir(tmp_path / "temporary") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data",
        "out",
        "said",
        "saves",
        "temporary",
        "train.py",
    ]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@pytest.mark.system
def test_a_training_of_pytorchs_reads_what_its_sampler_gave_out(tmp_path: Path) -> None:
    """DataLoader deals batch b to worker b % 2, which reads its samples one after the other."""
    script = Path(__file__).parents[2] / "benchmarks" / "_blocks_training.py"
    samples, batch, epochs = 160, 32, 2
    tools = runpy.run_path(str(script))
    tools["make_data"](tmp_path / "data", samples)
    options = ["--sampler", "alternate", "--epochs", str(epochs)]
    with (tmp_path / "said").open("w+") as said:
        made = record(
            [sys.executable, str(script), str(tmp_path / "data"), str(tmp_path / "saves"), *options],
            tmp_path / "out",
            data=[tmp_path / "data"],
            checkpoints=[tmp_path / "saves"],
            stdout=said.fileno(),
        )
        said.seek(0)
        orders = [[*map(int, line.split()[1:])] for line in said]

    assert made.exit_status == 0
    expected = [
        [sample for at in range(worker * batch, samples, 2 * batch) for sample in order[at : at + batch]]
        for order in orders
        for worker in (0, 1)
    ]
    recording = made.recording
    rows = recording.rows[recording.file_phases()[recording.rows["file"]] == Phase.DATA]
    read = {
        int(process): [
            int(Path(recording.files[file]).stem) for file in rows["file"][rows["process"] == process]
        ]
        for process in np.unique(rows["process"])
    }
    assert sorted(read.values()) == sorted(expected)
    assert set(rows["bytes"]) == {4 * tools["FEATURES"]}
    saves = {Path(path).name for path in recording.files if path.startswith(str(tmp_path / "saves"))}
    assert saves == {"epoch-0.pt", "epoch-1.pt"}


# -- Interruption ------------------------------------------------------------------------------------------

#: Reads one file, then tells us, then waits to be interrupted; `stubborn` takes no notice.
WAITING = """
import os, signal, sys
if sys.argv[2] == "stubborn":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os.write(1, b"no\\n"))
open(sys.argv[1], "rb").read()
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
RECORDER = """
import sys
from penstock.measure.blocks import record
made = record(sys.argv[3:], sys.argv[1], by=sys.argv[2])
sys.exit(made.exit_status)
"""


def start_recorder(tmp_path: Path, by: str, manner: str) -> tuple[subprocess.Popen[str], int]:
    """Start a recorder of the waiting program; return it and the program's process id once it waits."""
    (tmp_path / "sample").write_bytes(bytes(100))
    recorder = subprocess.Popen(
        [
            *(sys.executable, "-c", RECORDER, str(tmp_path / "out"), by),
            *(sys.executable, "-c", WAITING, str(tmp_path / "sample"), manner),
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal that would tell the program as well
        env={**os.environ, "TMPDIR": str(tmp_path)},  # where a recorder that is killed leaves its pipe
    )
    assert recorder.stdout is not None
    return recorder, int(recorder.stdout.readline())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("by", [pytest.param("strace", marks=pytest.mark.system), "opens"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_command_and_keeps_what_was_recorded(
    tmp_path: Path, by: str, number: int, status: int
) -> None:
    recorder, program = start_recorder(tmp_path, by, "obedient")
    with recorder:
        recorder.send_signal(number)
        assert recorder.wait(patient(30)) == status

    assert not is_alive(program)
    recording = read_recording(tmp_path / "out")
    assert not recording.is_complete
    assert str(tmp_path / "sample") in [recording.files[row["file"]] for row in recording.rows]


@pytest.mark.system
def test_a_second_interruption_kills_a_command_that_does_not_end(tmp_path: Path) -> None:
    recorder, program = start_recorder(tmp_path, "strace", "stubborn")
    with recorder:
        assert recorder.stdout is not None
        recorder.send_signal(signal.SIGINT)
        assert recorder.stdout.readline() == "no\n"
        assert is_alive(program)
        recorder.send_signal(signal.SIGINT)
        assert recorder.wait(patient(30)) == 128 + signal.SIGKILL

    assert not is_alive(program)
    assert not read_recording(tmp_path / "out").is_complete


@pytest.mark.system
def test_a_recorder_that_is_killed_leaves_a_recording_of_before_and_the_command_running(
    tmp_path: Path,
) -> None:
    recorder, program = start_recorder(tmp_path, "strace", "obedient")
    with recorder:
        wait_until(lambda: recording_has_rows(tmp_path / "out") or recorder.poll() is not None)
        assert recorder.poll() is None
        recorder.kill()
        recorder.wait(patient(30))
    assert is_alive(program)
    os.kill(program, signal.SIGKILL)

    recording = read_recording(tmp_path / "out")
    assert not recording.is_complete
    assert recording.rows.size > 0


def recording_has_rows(path: Path) -> bool:
    return read_recording(path).rows.size > 0


# -- What cannot be recorded -------------------------------------------------------------------------------


@for_each(
    ("command", "out", "by", "said"),
    [
        ([], "out", "strace", "no command is given"),
        (["no-such-command"], "out", "opens", "'no-such-command' is not found"),
        (["true"], "none/out", "opens", "there is no folder"),
        (["true"], "out", "ptrace", "'ptrace' is no means of recording: give one of strace, opens"),
    ],
)
def test_what_cannot_run_is_told_before_anything_is_written(
    tmp_path: Path, command: list[str], out: str, by: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        record(command, tmp_path / out, by=by)

    assert list(tmp_path.iterdir()) == []


def test_without_strace_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="strace is not found: apt-get install strace"):
        record([sys.executable, "-V"], tmp_path / "out")


def test_a_strace_that_is_too_old_is_told_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "strace").write_text(
        "#!/bin/sh\necho \"strace: unrecognized option '--seccomp-bpf'\" >&2\nexit 1\n"
    )
    (tmp_path / "bin" / "strace").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    with pytest.raises(ConfigError, match=r"unrecognized option .* has to be 5\.3 or newer"):
        record([sys.executable, "-V"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.system
def test_where_nothing_may_be_traced_it_says_what_to_allow(tmp_path: Path) -> None:
    """A process that is traced already cannot be traced again: here the recorder and all that it starts are."""
    inner = [sys.executable, "-c", RECORDER, str(tmp_path / "out"), "strace", "true"]

    done = subprocess.run(
        ["strace", "-f", "-e", "trace=none", "-o", os.devnull, *inner], capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "ConfigError: strace may not trace here (" in done.stderr
    assert "--cap-add SYS_PTRACE" in done.stderr


def test_a_command_without_python_cannot_be_recorded_by_its_opens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Python in it loaded the hook"):
        record(["true"], tmp_path / "out", by="opens")
    with pytest.raises(ConfigError, match="no Python in it loaded the hook"):
        record([sys.executable, "-I", "-c", ""], tmp_path / "out", by="opens")


@pytest.mark.system
def test_a_disk_that_takes_no_more_ends_the_command(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; the command only reads, and would go on for ever."""
    command = [sys.executable, "-c", "while True: open('/etc/passwd').read()"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            record(command, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not read_recording(tmp_path / "out").is_complete


def test_a_command_ended_by_a_signal_has_the_status_that_shells_give(tmp_path: Path) -> None:
    made = record([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "out", by="opens")

    assert made.exit_status == 137
    assert made.recording.is_complete
    assert np.isfinite(made.seconds)
