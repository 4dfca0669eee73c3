"""The scripts of the page "Killed, and on other machines" are killed, and have the batches of unbroken runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.forking import Forks
from tests.patience import patient

from penstock import SnapshotStore
from penstock.trace import Kind, read_trace

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "killed-and-elsewhere.md"
LAUNCH = Path(__file__).with_name("launch.py")
STEPS, EPOCHS, BATCH = 12, 2, 12
#: What the page has, and a quick test instead.
SMALLER = {
    "EPOCHS = 90": f"EPOCHS = {EPOCHS}",
    "batch_size=256": f"batch_size={BATCH}, memory='16 MiB'",
    "transforms, **where)": "transforms, **{'decoders': 1, **where})",
    "RandomResizedCrop(224)": "RandomResizedCrop(8)",
    "3 * 224 * 224": "3 * 8 * 8",
    "1000 steps": "2 steps",
    "every_n_train_steps=1000": "every_n_train_steps=2",
    "max_epochs=EPOCHS,": 'max_epochs=EPOCHS, accelerator="cpu", '
    'devices=int(__import__("os").environ.get("WORLD_SIZE", 1)), '
    "logger=False, enable_progress_bar=False, enable_model_summary=False,",
    "Accelerator(": "Accelerator(cpu=True, ",
    "report_to=[]": "report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=12",
}
#: By trainer, what makes its script evaluate within an epoch; and what is put into data.py for it.
EVALUATING = {
    "Accelerate": {
        "import EPOCHS, build, load": "import EPOCHS, build, evaluate, load",
        "                step += 1\n": "                step += 1\n                evaluate()\n",
    },
    "Lightning": {
        "import EPOCHS, build, load": "import EPOCHS, build, evaluate, load, validation",
        "    def training_step": "    def validation_step(self, batch, _):\n        pass\n\n"
        "    def val_dataloader(self):\n        return validation\n\n    def training_step",
        "accumulate_grad_batches=2,": "accumulate_grad_batches=2, val_check_interval=1, limit_val_batches=2,",
    },
    "The Trainer of Hugging Face": {
        "import EPOCHS, build, load": "import EPOCHS, build, evaluate, load",
        "    def compute_loss": "    def evaluate(self, *_, **__):\n        return evaluate()\n\n    def compute_loss",
        "report_to=[]": 'report_to=[], eval_strategy="steps", eval_steps=1',
        "Reading(build(), arguments)": "Reading(build(), arguments, eval_dataset=[0])",
    },
}
VALIDATION = """
validation = pt.Loader("photos/train", batch_size=5, epochs=None, shuffle=False, transforms=[RandomResizedCrop(8),
    ToTensor()], world_size=1, decoders=1, memory="4 MiB", report=None)

def evaluate():
    return {"seen": sum(len(images) for _, (images, _) in zip(range(3), validation))}
"""
#: What has the trainers' ranks imported before they are forked.
TRAINERS = ("accelerate", "penstock.torch.lightning", "penstock.torch.trainer")
#: How many ranks each life of a trainer has, and the batch at which one of them gets its signal. Two make a step of the
#: optimizer, with which it stops: five times within the first epoch, after its first step, in the middle, with its end.
FIVE_STOPS = ((4, 0), (2, 3), (3, 6), (4, 9), (2, 10), (3, None))
ONE_STOP = ((2, 3), (1, None))
#: The signal comes in an evaluation after the fifth batch.
IN_EVALUATION = ((2, "4e"), (3, None))
Rows = list[str]


def blocks(kind: str = "python") -> dict[str, str]:
    """Return the first block under each heading."""
    found: dict[str, str] = {}
    for section in PAGE.read_text().split("\n## "):
        if block := re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL):
            found[section.partition("\n")[0]] = block.group(1)
    return found


def smaller(script: str) -> str:
    for long, short in SMALLER.items():
        script = script.replace(long, short)
    return script


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data.py and what it reads."""
    place = tmp_path_factory.mktemp("howto")
    for number in range(STEPS * BATCH):
        folder = place / "photos" / "train" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize((9, 8)).rotate(5 * number).convert("RGB").save(
            folder / f"{number}.png"
        )
    (place / "data.py").write_text(smaller(blocks()["# Killed, and on other machines"]))
    return place


@pytest.fixture(scope="module")
def straight(place: Path, forks: Forks) -> dict[tuple[int, int], Rows]:
    """Return what an unbroken run of one process reads at each epoch and step."""
    script = place / "straight.py"
    script.write_text(
        "from data import EPOCHS, load\nwith load() as loader:\n  for _ in range(EPOCHS):\n    [*loader]\n"
    )
    with forks.start(LAUNCH, [[[[str(script), str(place / "straight"), "{}", "0", "0", ""]]]]) as forked:
        told, statuses = forked.wait()
    assert set(statuses.values()) == {0}, told
    return read_by(place / "straight")


def read_by(*notes: Path) -> dict[tuple[int, int], Rows]:
    """Return the rows of each step, of all ranks that noted theirs."""
    found: dict[tuple[int, int], Rows] = {}
    for each in notes:
        for line in each.read_text().splitlines():
            epoch, step, rows = json.loads(line)
            found.setdefault((epoch, step), []).extend(rows)
    return found


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    named = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in named.items()} | {"GLOO_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    """Return a port that is still free when a later life begins: none that the system gives to whoever asks for any."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(15_000, 32_000))) as free,
        ):
            return int(free.getsockname()[1])


Lives = Sequence[tuple[int, int | str | None]]


def prepare(place: Path, heading: str, script: str, data: str = "") -> Path:
    """Return a folder with a script, and what it imports and reads."""
    folder = place / re.sub(r"\W+", "-", heading)
    folder.mkdir()
    (folder / "photos").symlink_to(place / "photos")
    (folder / "data.py").write_text((place / "data.py").read_text() + data)
    (folder / "train.py").write_text(script)
    return folder


def jobs_of(folder: Path, lives: Lives, number: int, awaited: str = "") -> list[list[list[str]]]:
    """Return a job for each life: of so many ranks, of which the last gets a signal as it asks for a batch."""
    jobs = []
    for life, (count, at) in enumerate(lives):
        port = free_port()
        jobs.append(
            [
                [
                    str(folder / "train.py"),
                    str(folder / f"notes-{life}-{rank}"),
                    json.dumps(
                        environment(rank, count, port) if any(count > 1 for count, _ in lives) else {}
                    ),
                    str(0 if at is None or rank < count - 1 else number),
                    str(at),
                    awaited,
                ]
                for rank in range(count)
            ]
        )
    return jobs


def check(folder: Path, lives: Lives, straight: dict[tuple[int, int], Rows]) -> list[tuple[int, int]]:
    """Each life of a run reads what the unbroken run read, from the step of its snapshot; the last reads to the end.

    Returns: the first batch of each life.
    """
    done: set[tuple[int, int]] = set()
    begins = []
    for life, (count, _) in enumerate(lives):
        found = read_by(*(folder / f"notes-{life}-{rank}" for rank in range(count)))
        assert found == {place: straight[place] for place in found}
        if life:
            first = min(found)
            assert first > (0, 0), "it began anew"
            assert set(filter(lambda place: place < first, straight)) <= done, "it left batches out"
        begins.append(min(found))
        done |= found.keys()
    assert done == straight.keys()
    return begins


@pytest.mark.slow
def test_ddp_and_fsdp_go_on_with_other_ranks(
    place: Path, straight: dict[tuple[int, int], Rows], forks: Forks
) -> None:
    lives: dict[str, Lives] = {"DDP": ((2, 3), (3, None)), "FSDP2": ((2, 8), (1, None))}
    folders = {name: prepare(place, name, smaller(blocks()[name])) for name in lives}
    rows = [jobs_of(folders[name], lives[name], signal.SIGTERM) for name in lives]
    with forks.start(LAUNCH, rows) as forked:
        told, statuses = forked.wait()

    assert set(statuses.values()) <= {0, 143}, told
    assert list(statuses.values()).count(143) == 2 + 2, told
    for name in lives:
        check(folders[name], lives[name], straight)


# What trainers save and resume is tested in one process, in tests/torch; with their scripts, each takes 5 to 10 s.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "awaited"),
    [
        ("Lightning", "names/last.ckpt"),
        ("Accelerate", "runs/*/step-*"),
        ("The Trainer of Hugging Face", "runs/*/step-*"),
    ],
)
def test_the_script_of_a_trainer_that_is_killed_goes_on(
    place: Path, straight: dict[tuple[int, int], Rows], forks: Forks, name: str, awaited: str
) -> None:
    """Without a chance to save, from the snapshot before."""
    lives: Lives = ((1, 9), (1, None))
    folder = prepare(place, f"{name} killed", smaller(blocks()[name]))
    rows = [jobs_of(folder, lives, signal.SIGKILL, awaited)]
    with forks.start(LAUNCH, rows, modules=TRAINERS) as forked:
        told, statuses = forked.wait()

    assert sorted(statuses.values()) == [-9, 0], told
    check(folder, lives, straight)


def run_evaluating(place: Path, forks: Forks, lives: Lives, title: str) -> dict[str, Path]:
    """Run the trainers' scripts, made to evaluate, through all lives, beside each other; return their folders."""
    folders = {}
    for name in EVALUATING:
        script = smaller(blocks()[name])
        for without, evaluating in EVALUATING[name].items():
            assert without in script
            script = script.replace(without, evaluating)
        folders[name] = prepare(place, f"{name} {title}", script, VALIDATION)
    rows = [jobs_of(folder, lives, signal.SIGTERM) for folder in folders.values()]
    with forks.start(LAUNCH, rows, modules=TRAINERS) as forked:
        told, statuses = forked.wait()
    counts = [count for count, _ in lives]
    assert sorted(statuses.values()) == [0] * 3 * counts.pop() + [143] * 3 * sum(counts), told
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lives", "first_batches"),
    [(ONE_STOP, [0, 4]), (FIVE_STOPS, [0, 2, 4, 8, 10, 12])],
    ids=["once", "five times"],
)
def test_trainers_that_are_stopped_within_an_epoch_read_what_an_unbroken_run_reads(
    place: Path, straight: dict[tuple[int, int], Rows], forks: Forks, lives: Lives, first_batches: list[int]
) -> None:
    """On other ranks each time, two batches to a step, evaluating: each batch once, with the same random crops."""
    for folder in run_evaluating(place, forks, lives, f"stopped {len(lives)}").values():
        begins = check(folder, lives, straight)

        assert begins == [divmod(batch, STEPS) for batch in first_batches]
        counts = [
            len(read_by(*(folder / f"notes-{life}-{rank}" for rank in range(ranks))))
            for life, (ranks, _) in enumerate(lives)
        ]
        assert counts == [*np.diff([*first_batches, EPOCHS * STEPS])]
        for life, (ranks, _) in enumerate(lives):
            for rank in range(ranks):
                assert (folder / f"evaluated-{life}-{rank}").exists()


@pytest.mark.slow
def test_trainers_that_get_their_signal_in_an_evaluation_stop_with_the_step_before_or_after_it(
    place: Path, straight: dict[tuple[int, int], Rows], forks: Forks
) -> None:
    for folder in run_evaluating(place, forks, IN_EVALUATION, "evaluating").values():
        begins = check(folder, IN_EVALUATION, straight)
        assert begins[1] in {(0, 6), (0, 8)}
        whole = [len(read_by(*(folder / f"notes-{life}-{rank}" for rank in range(2)))) for life in range(2)]
        assert sum(whole) == EPOCHS * STEPS, "each batch is read once"


def test_the_digest_of_the_page_does_not_depend_on_threads(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    names: dict[str, Any] = {}

    exec(blocks()["The same bits, whatever the threads and ranks"], names)

    printed = capsys.readouterr().out.strip()
    monkeypatch.delitem(sys.modules, "data")
    assert len(printed) == 64
    assert names["digest"](1, 2, decoders=0) == names["digest"](1, 2, decoders=3, policy="staging") == printed
    assert names["digest"](1, 3) != printed


#: Called by each worker: notes its batches, and kills rank 1 once, after its 5th batch and a first snapshot.
NOTING = """
import hashlib, json, os, signal
from pathlib import Path
from penstock.loader.epoch_loop import EpochLoop

def note(folder):
    killed, wait_for_batch, given = Path(folder, "killed"), EpochLoop._wait_for_batch, 0
    life = int(killed.exists())

    def noted(self, begun, epoch, own):
        nonlocal given
        if given >= 5 and self._rank == 1 and not life and list(Path(folder).glob("runs/step-*")):
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step, batch = self.position[1], wait_for_batch(self, begun, epoch, own)
        given += 1
        rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in batch[0]]
        with open(Path(folder, f"notes-{life}-{self._rank}"), "a") as file:
            file.write(json.dumps([epoch, step, rows]) + "\\n")
        return batch

    EpochLoop._wait_for_batch = noted
    return lambda: f"{folder}/{life}-{os.getpid()}.trace"
"""


@pytest.mark.slow
def test_ray_calls_the_loop_again_after_a_worker_was_killed_and_workers_share_again(
    place: Path, straight: dict[tuple[int, int], Rows]
) -> None:
    folder = place / "ray"
    folder.mkdir()
    script = smaller(blocks()["Ray Train"])
    for long, short in {
        "num_workers=8": "num_workers=2",
        "/shared/runs/ray": f"{folder}/runs",
        "/shared/results": f"{folder}/results",
        "load(": "load(share='host', trace=trace_of_life(), ",
        "def train():\n": f"def train():\n    from noting import note\n"
        f"    trace_of_life = note({str(folder)!r})\n",
    }.items():
        assert long in script
        script = script.replace(long, short)
    (folder / "noting.py").write_text(NOTING)
    (folder / "data.py").write_text(
        (place / "data.py").read_text().replace('"photos/train"', repr(str(place / "photos" / "train")))
    )
    (folder / "train.py").write_text(script)

    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        # Ray starts a process for each worker, which on a busy machine takes longer than it waits for by default.
        | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(patient(300))}
        | {"RAY_worker_register_timeout_seconds": f"{patient(300):.0f}"},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (folder / "killed").exists()
    traces = [read_trace(path).spans for path in folder.glob("1-*.trace")]
    from_peers = [spans[(spans["kind"] == Kind.HIT) & (spans["peer"] >= 0)] for spans in traces]
    assert all(spans["samples"].sum() > STEPS for spans in from_peers)
    assert len(from_peers) == 2
    before, after = (read_by(*(folder / f"notes-{life}-{rank}" for rank in range(2))) for life in range(2))
    # The rank that was not killed may have had one batch more.
    assert [rows == straight[place] for place, rows in before.items()].count(False) <= 1
    assert after == {place: rows for place, rows in straight.items() if place >= min(after)}
    assert (0, 0) < min(after) <= max(before)


#: What torchrun starts: a rank, which notes its batches, and how it ended.
TORCHRUN = """
import os, pathlib, runpy, sys
launch, script, notes, number, at = sys.argv[1:]
rank = os.environ["RANK"]
sys.argv = [launch, script, notes + rank, "{}", number if rank == "1" else "0", at, ""]
try:
    runpy.run_path(launch, run_name="__main__")
except SystemExit as ended:
    pathlib.Path(notes + rank + "-ended").write_text(str(ended.code))
    raise
"""


@pytest.mark.slow
def test_three_ranks_under_torchrun_save_one_step_after_a_signal_to_one_and_two_go_on(
    place: Path, straight: dict[tuple[int, int], Rows]
) -> None:
    """With the first rank that ends, torchrun ends the others: one that it meets closing has saved by then."""
    folder = prepare(place, "torchrun", smaller(blocks()["DDP"]))
    (folder / "rank.py").write_text(TORCHRUN)
    lives: Lives = ((3, 5), (2, None))

    def run(life: int) -> tuple[int, str]:
        count, at = lives[life]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(count),
        ]
        signalled = [str(0 if at is None else signal.SIGTERM), str(at)]
        ended = subprocess.run(
            [
                *torchrun,
                "rank.py",
                str(LAUNCH),
                str(folder / "train.py"),
                str(folder / f"notes-{life}-"),
                *signalled,
            ],
            cwd=folder,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=patient(60),
            check=False,
        )
        return ended.returncode, ended.stderr

    status, told = run(0)
    assert status, "a job of which a rank ended by a signal is none that succeeded"
    assert {file.read_text() for file in folder.glob("notes-0-*-ended")} == {"143"}, told
    (saved,) = [listed.step for listed in SnapshotStore(folder / "runs" / "ddp", report=None).list()][-1:]
    status, told = run(1)
    assert status == 0, told
    assert check(folder, lives, straight) == [(0, 0), divmod(saved, STEPS)]


#: Photographs of which no more are read once the training has had five batches, until there is a file.
HELD_BACK = """
import os, pathlib, threading
from penstock.store import ImageFolder

pathlib.Path("process").write_text(str(os.getpid()))

class HeldBack:
    def __init__(self):
        self.photos = photos = ImageFolder("photos/train")
        self.sizes_bytes, self.labels, self.classes = photos.sizes_bytes, photos.labels, photos.classes
        self.describe = photos.describe

    def __len__(self):
        return len(self.photos)

    def read(self, sample):
        self.hold_back()
        return self.photos.read(sample)

    def read_into(self, sample, buffer):
        self.hold_back()
        return self.photos.read_into(sample, buffer)

    def hold_back(self):
        notes = pathlib.Path("notes")
        while notes.exists() and len(notes.read_text().splitlines()) >= 5 and not pathlib.Path("comes").exists():
            threading.Event().wait(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("comes", [True, False], ids=["it comes", "it never comes"])
def test_a_signal_while_lightning_waits_for_a_batch_is_answered(
    place: Path, straight: dict[tuple[int, int], Rows], forks: Forks, comes: bool
) -> None:
    """Once the batch comes, the step is finished and saved. If it never does, `timeout_seconds=` ends the process."""
    options = f"policy='staging', patience_seconds=0.2, timeout_seconds={patient(60 if comes else 2)}"
    folder = prepare(place, f"Lightning waits {comes}", smaller(blocks()["Lightning"]))
    data = (folder / "data.py").read_text().replace('"photos/train"', f"HeldBack(), {options}")
    (folder / "data.py").write_text(HELD_BACK + data)
    notes = folder / "notes"
    waits = re.compile(r"the training waits for the batch of epoch (\d), step (\d+) ")

    arguments = [str(folder / "train.py"), str(notes), "{}", "0", "0", ""]
    with forks.start(LAUNCH, [[[arguments]]], modules=TRAINERS) as training:
        lines = []
        for line in training.out:
            lines.append(line)
            found = waits.search(line)
            if found and int(found[1]) * STEPS + int(found[2]) >= 5:
                break
        else:
            pytest.fail("".join(lines))
        os.kill(int((folder / "process").read_text()), signal.SIGTERM)
        if comes:
            (folder / "comes").touch()
        told, statuses = training.wait()
    (status,) = statuses.values()

    read = read_by(notes)
    assert read == {step: straight[step] for step in read}
    saved = [listed.step for listed in SnapshotStore(folder / "runs" / "lightning", report=None).list()]
    if comes:
        assert (status, len(read)) == (128 + signal.SIGTERM, 2 * saved[-1]), told
        assert len(read) < STEPS * EPOCHS
    else:
        assert (status, saved[-1]) == (1, len(read) // 4 * 2), told
        assert "penstock.errors.WaitTimeout: the training waits for" in told


#: What Slurm does: `srun` starts the tasks and, ahead of the job's end, signals each; it returns the highest status.
SRUN = """
import os, pathlib, signal, subprocess, sys, time
tasks = []
for rank in range(2):
    slurm = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "GLOO_SOCKET_IFNAME": "lo"}
    tasks.append(subprocess.Popen(sys.argv[1:], env=os.environ | slurm))
if not list(pathlib.Path().glob("requeued")):
    while len(list(pathlib.Path().glob("trains-*"))) < 2 and not any(task.poll() for task in tasks):
        time.sleep(0.01)
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
status = max(task.wait() for task in tasks)
sys.exit(status)
"""
SCONTROL = """
import pathlib, sys
print("127.0.0.1") if sys.argv[1] == "show" else pathlib.Path("requeued").write_text(sys.argv[2])
"""
#: Put before the script: it says that it trains, and goes on until its stop is agreed on.
SIGNALLED = """
import os, pathlib, time
from penstock.checkpoint import StopOnSignal
agreed = StopOnSignal.agreed
def wait_for_signal(self, step):
    pathlib.Path("trains-" + os.environ["RANK"]).touch()
    while not pathlib.Path("requeued").exists() and self._agreement.signal is None:
        time.sleep(0.005)
    return agreed(self, step)
StopOnSignal.agreed = wait_for_signal
"""


@pytest.mark.slow
def test_the_job_of_the_page_queues_itself_again_after_slurms_signal(place: Path) -> None:
    folder = place / "slurm"
    folder.mkdir()
    (folder / "photos").symlink_to(place / "photos")
    (folder / "data.py").write_text((place / "data.py").read_text())
    (folder / "train.py").write_text(SIGNALLED + smaller(blocks()["DDP"]))
    (folder / "job.sh").write_text(blocks("bash")["Slurm"].replace("29500", str(free_port())))
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(0o755)
    paths = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run() -> tuple[int, str]:
        variables = os.environ | {"PATH": paths, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
        ended = subprocess.run(
            ["bash", "job.sh"],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=patient(60),
            check=False,
        )
        return ended.returncode, ended.stderr

    status, told = run()
    assert status == 128 + signal.SIGUSR1, told
    assert (folder / "requeued").read_text() == "7"
    (saved,) = [listed.step for listed in SnapshotStore(folder / "runs" / "ddp", report=None).list()]
    assert 1 <= saved <= 3

    status, told = run()
    assert status == 0, told
    assert [listed.step for listed in SnapshotStore(folder / "runs" / "ddp", report=None).list()][
        -1
    ] == EPOCHS * STEPS
