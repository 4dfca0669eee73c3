"""Trainings that are interrupted, killed, forked and asked, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interpreters import Interpreters
from tests.patience import patient, wait_until

from penstock.trace import read_trace

END_SECONDS = patient(30)  # for a process that should end at once

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from penstock.loader import Loader

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def rest():
    while True:  # a signal that comes just before a sleep begins does not end it
        time.sleep(0.05)

def in_worker():
    return threading.current_thread().name.startswith(("penstock-read", "penstock-decode"))

class Numbers:
    def __len__(self):
        return 24
    def __getitem__(self, k):
        return np.full(1000, k)

def check(loader, epoch):
    seen = [number for batch in loader for number in batch[:, 0].tolist()]
    expected = loader.plan.order.at(epoch, np.arange(24)).tolist()
    assert seen == expected, (epoch, seen, expected)

options = dict(batch_size=4, epochs=10**4, memory="128 KB", report=None)
"""


class Training:
    """A Python script that runs as a process of its own, in a session of its own."""

    def __init__(
        self, interpreters: Interpreters, script: str, folder: Path, *arguments: str, cold: bool = False
    ) -> None:
        self.interpreters = interpreters
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self._errors = folder / "stderr"
        with self._errors.open("w") as errors:
            options: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": errors,
                "text": True,
                "env": {**os.environ, "TMPDIR": str(self.temporary)},
            }
            self.process: subprocess.Popen[str] = (
                subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **options)
                if cold
                else interpreters.start(PRELUDE + script, *arguments, **options)
            )
        self.pid = self.process.pid

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def until(self, line: str | re.Pattern[str]) -> str:
        """Read what the script says until it says this, and return it."""
        wanted = re.compile(re.escape(line)) if isinstance(line, str) else line
        assert self.process.stdout is not None
        for said in self.process.stdout:
            if wanted.fullmatch(said.rstrip("\n")):
                return said.rstrip("\n")
        pytest.fail(f"it never said {line!r}:\n{self.stderr}")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Wait until the process has ended and return its exit status, having checked that nothing of it is left."""
        try:
            self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.communicate()
            pytest.fail(f"it did not end:\n{self.stderr}")
        assert f"penstock-waits-{self.pid}-" not in Path("/proc/net/unix").read_text()
        assert not list(self.temporary.iterdir())
        wait_until(lambda: not processes_of_session(self.pid))  # what ends with it may be about to
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def processes_of_session(session: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(process.name))
    return found


@pytest.fixture
def train(tmp_path: Path, interpreters: Interpreters) -> Iterator[Callable[..., Training]]:
    trainings: list[Training] = []

    def start(script: str, *arguments: str, cold: bool = False) -> Training:
        trainings.append(Training(interpreters, script, tmp_path, *arguments, cold=cold))
        return trainings[-1]

    yield start
    for training in trainings:
        training.kill()


def assert_was_interrupted_quietly(training: Training, warned: bool = False) -> None:
    """One traceback, of the main thread's KeyboardInterrupt; and perhaps our warning of a store that hangs."""
    errors = training.stderr
    assert training.process.returncode == -signal.SIGINT, errors
    # Two where it comes just as the main thread has found a queue empty.
    assert errors.count("Traceback") - errors.count("_queue.Empty\n\nDuring handling") == 1, errors
    assert errors.rstrip().splitlines()[-1] == "KeyboardInterrupt", errors
    assert "Exception ignored" not in errors
    assert "Exception in thread" not in errors
    assert ("Warning" in errors) == warned, errors


# Ctrl-C

STUCK = """
from penstock.flow import engine
engine._JOIN_SECONDS = 0.5
options["shuffle"] = False

def tell_joins(word):
    join = threading.Thread.join
    def telling_join(thread, timeout=None):
        say(word)
        join(thread, timeout)
    threading.Thread.join = telling_join

a_worker_hangs = threading.Event()

def tell_waits(line):
    if "the training waits" in line:  # on a busy machine for an earlier sample, before the store hangs
        a_worker_hangs.wait()
        say("now")

class Stuck(Numbers):
    def __getitem__(self, k):
        if in_worker() and k == 7:
            a_worker_hangs.set()
            say("stuck")
            threading.Event().wait()
        return super().__getitem__(k)
"""

#: What the script does, and whether its store hangs for ever. It says "now" when the moment has come.
MOMENTS = {
    "while it is made": (
        """
class Slow(Numbers):
    def __getitem__(self, k):
        say("now")
        rest()
Loader(Slow(), **options)
""",
        True,
    ),
    "in the first wait": (
        STUCK
        + """
with Loader(Stuck(), **{**options, "patience_seconds": 0.1, "report": tell_waits}) as loader:
    for batch in loader:
        pass
""",
        True,
    ),
    "in a step": (
        """
with Loader(Numbers(), **options) as loader:
    for step, batch in enumerate(loader):
        if step == 3:
            say("now")
            rest()
""",
        False,
    ),
    "in a step without with": (
        """
for step, batch in enumerate(Loader(Numbers(), **options)):
    if step == 3:
        say("now")
        rest()
""",
        False,
    ),
    "at the end of an epoch": (
        """
reported = []
def report(line):
    if not reported:  # later lines, as that a thread is slow to end, are no matter here
        reported.append(line)
        say("now")
        rest()
with Loader(Numbers(), **{**options, "report": report}) as loader:
    for batch in loader:
        pass
""",
        False,
    ),
    "between epochs": (
        """
with Loader(Numbers(), **options) as loader:
    for batch in loader:
        pass
    say("now")
    rest()
""",
        False,
    ),
    "in close, of a store that hangs": (
        STUCK
        + """
engine._JOIN_SECONDS = 1000
loader = Loader(Stuck(), **options)
loader.start()
a_worker_hangs.wait()
tell_joins("now")
loader.close()
""",
        False,
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_a_training(train: Callable[..., Training], moment: str) -> None:
    script, warned = MOMENTS[moment]
    training = train(script)
    training.until("now")

    training.interrupt()
    training.end()

    assert_was_interrupted_quietly(training, warned)


def test_ctrl_c_while_modules_are_imported_ends_the_process(train: Callable[..., Training]) -> None:
    """What NumPy, numba and torch make of it is theirs; ours is that there is no thread yet that would go on."""
    training = train(
        "import signal\nprint('now', flush=True)\nimport penstock.torch, penstock.loader.transforms.pipeline\n"
        "print('there', flush=True)\nsignal.pause()",
        cold=True,
    )
    training.until("now")

    training.interrupt()

    assert training.end() != 0


BUSY = """
class Talking(Numbers):
    def __getitem__(self, k):
        say("*")
        return super().__getitem__(k)
with Loader(Talking(), **options) as loader:
    while True:
        for batch in loader:
            say("*")
"""


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(k, marks=pytest.mark.slow) for k in range(4, 60))]
)
def test_ctrl_c_at_any_moment_ends_a_busy_training(train: Callable[..., Training], number: int) -> None:
    """The moment is told by how much the training's threads have done."""
    training = train(BUSY)
    for _ in range(random.Random(number).randint(1, 300)):
        training.until("*")

    training.interrupt()
    training.end()

    assert_was_interrupted_quietly(training)


NOTEBOOK = """
import random
signal.signal(signal.SIGALRM, signal.default_int_handler)
chance = random.Random(int(sys.argv[1]))

def interrupted(loader):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))
            while True:
                for batch in loader:
                    assert (batch == batch[:, :1]).all()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass

loader = Loader(Numbers(), **{**options, "epochs": 500 * int(sys.argv[2]), "timeout_seconds": 20})
for _ in range(int(sys.argv[2])):
    interrupted(loader)
    epoch, step = loader.position
    check(loader, epoch + (step > 0))
loader.close()
assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]

with Loader(Numbers(), **options) as another:
    check(another, 0)
say("all is well")
"""


@pytest.mark.parametrize(("seed", "times"), [(0, 40), pytest.param(1, 5000, marks=pytest.mark.slow)])
def test_after_a_ctrl_c_that_is_caught_the_same_loader_and_a_new_one_work(
    train: Callable[..., Training], seed: int, times: int
) -> None:
    """As in a notebook, where the loop's cell is stopped and run again; the signals come when they come."""
    training = train(NOTEBOOK, str(seed), str(times))
    training.until("all is well")

    assert training.end() == 0
    assert training.stderr == ""


COUNTED = """
import select, torch, types
from functools import partial
from queue import SimpleQueue
from penstock.torch import Loader

torch.backends.cuda.is_built = lambda: True  # as PyTorch's standard wheel is
if sys.argv[1] == "CUDA in use":
    torch.cuda.is_initialized = lambda: True
    torch.Event = lambda *_, **__: types.SimpleNamespace(
        record=partial(SimpleQueue().put, None), query=partial(bool, True)
    )

arrived, wakeup = os.pipe()
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)  # C writes there, whatever becomes of the handler
signal.signal(signal.SIGTERM, lambda *_: sys.exit())

def has_arrived():
    return bool(select.select([arrived], [], [], 0)[0])

def is_raised(loader):
    try:
        say("ready")
        while not has_arrived():
            for batch in loader:
                pass
        return False
    except (KeyboardInterrupt, SystemExit):
        while not has_arrived():
            pass
        return True
    finally:
        os.read(arrived, 1)

lost = 0
with Loader(Numbers(), **{**options, "epochs": 10**6, "decoders": 2}) as loader:
    check(loader, 0)
    for _ in range(int(sys.argv[2])):
        lost += not is_raised(loader)
say("lost", lost)
"""


@pytest.mark.slow  # PyTorch is imported anew
@pytest.mark.parametrize("device", ["CUDA not in use", "CUDA in use"])
def test_no_signal_is_lost_in_a_tight_loop_over_tensors(train: Callable[..., Training], device: str) -> None:
    """What a handler raises in the callback of a weak reference is printed and dropped, if that has a Python frame."""
    times = 50
    training = train(COUNTED, device, str(2 * times))
    for signum in [signal.SIGINT, signal.SIGTERM] * times:
        training.until("ready")
        training.process.send_signal(signum)

    training.until("lost 0")
    assert training.end() == 0
    assert training.stderr == ""


def test_a_second_ctrl_c_ends_a_close_that_waits_for_a_store_that_hangs(
    train: Callable[..., Training],
) -> None:
    script = (
        STUCK
        + """
engine._JOIN_SECONDS = 1000
try:
    with Loader(Stuck(), **{**options, "patience_seconds": 0.1, "report": tell_waits}) as loader:
        tell_joins("closing")
        for batch in loader:
            pass
finally:
    say("closed")
"""
    )
    training = train(script)
    training.until("now")
    training.interrupt()
    training.until("closing")
    training.interrupt()
    training.until("closed")
    training.end()

    assert training.process.returncode == -signal.SIGINT
    assert "Exception ignored" not in training.stderr


# Killed

KILLED = """
def run(epochs):
    with Loader(Numbers(), **{**options, "epochs": epochs}, trace=sys.argv[1]) as loader:
        for epoch in range(epochs):
            check(loader, epoch)
            say("epoch", epoch)

for _ in range(4):
    child = os.fork()  # of a process without threads: as good as a new one, and faster
    if child == 0:
        run(10**4)
    say(child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
run(3)
say("all is well")
"""


def test_a_killed_training_can_be_run_again_at_once_time_and_again(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    training = train(KILLED, str(trace))
    for _ in range(4):
        killed = int(training.until(re.compile(r"\d+")))
        training.until("epoch 2")
        os.kill(killed, signal.SIGKILL)
        process = Path(f"/proc/{killed}")
        wait_until(lambda process=process: not process.exists())  # type: ignore[misc]
        assert f"penstock-waits-{killed}-" not in Path("/proc/net/unix").read_text()

    training.until("all is well")
    assert training.end() == 0
    assert training.stderr == ""
    assert read_trace(trace).is_complete
    assert [epoch.samples for epoch in read_trace(trace).epochs()] == [24, 24, 24]


def test_the_trace_of_a_killed_training_shows_what_came_before(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    script = """
with Loader(Numbers(), **{**options, "report": lambda line: None}, trace=sys.argv[1]) as loader:
    for epoch in range(10**4):
        check(loader, epoch)
        say(epoch)
"""
    training = train(script, str(trace))
    training.until("5")
    training.process.kill()

    assert training.end() == -signal.SIGKILL
    found = read_trace(trace)
    assert not found.is_complete
    assert [epoch.samples for epoch in found.epochs()][:5] == [24] * 5


# Forked

FORKED = """
import multiprocessing, warnings
from penstock.errors import ClosedError
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads

def use(loader):
    try:
        for batch in loader:
            pass
    except ClosedError as error:
        say("child:", error)
        sys.exit(3)

loader = Loader(Numbers(), **{**options, "epochs": 3}, trace=sys.argv[1])
passes = iter(loader)
batch = next(passes)
before = batch.copy()

child = multiprocessing.get_context("fork").Process(target=use, args=(loader,))
child.start()
child.join()
assert child.exitcode == 3

child = os.fork()
if child == 0:  # a child that runs the interpreter's whole end
    del batch, passes
    use(loader)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3

assert (batch == before).all()
assert sum(1 for _ in passes) == 5
check(loader, 1)
check(loader, 2)
loader.close()
say("all is well")
"""


def test_a_fork_after_the_start_gets_a_clear_error_and_the_parent_goes_on(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    training = train(FORKED, str(trace))
    assert training.process.stdout is not None
    complaints = [next(training.process.stdout), next(training.process.stdout)]
    training.until("all is well")

    assert training.end() == 0
    assert training.stderr == ""
    assert all("its threads do not exist in the forked process" in complaint for complaint in complaints)
    assert all("after the fork" in complaint for complaint in complaints)
    assert read_trace(trace).is_complete
    assert [epoch.samples for epoch in read_trace(trace).epochs()] == [24, 24, 24]


# Asked

FIFO = """
from penstock.flow.waits import report_waits_on
from penstock.loader.transforms import Resize, ToTensor
from penstock.store import ImageFolder

report_waits_on(signal.SIGUSR1)
source = ImageFolder(sys.argv[1])
stuck = source.path_of(5)
os.unlink(stuck)
os.mkfifo(stuck)
say(stuck)
settings = {"epochs": 1, "memory": "4 MB", "shuffle": False, "on_error": "skip"}
loader = Loader(source, transforms=[Resize((8, 8)), ToTensor()], **{**options, **settings})
print(sum(len(labels) for _, labels in loader), flush=True)
"""


def penstock(
    interpreters: Interpreters, *arguments: str, user: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = "import sys\nfrom penstock.cli.main import main\n"
    if user is not None:
        command += f"from tests.privileges import become\nbecome({user})\n"
    return interpreters.run(command + "sys.exit(main())", *arguments)


@pytest.fixture
def stuck(train: Callable[..., Training], image_folder: Callable[..., Path]) -> tuple[Training, Path]:
    """A training that reads from a pipe into which nobody writes, and the pipe."""
    training = train(FIFO, str(image_folder(images=12)))
    assert training.process.stdout is not None
    return training, Path(training.process.stdout.readline().rstrip("\n"))


def wait_until_it_waits(training: Training) -> str:
    """Ask until the training waits for the batch of the stuck sample, the second, and for nothing else."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        answer = penstock(training.interpreters, "ps", str(training.pid))
        if (
            "waits for the batch of epoch 0, step 1" in answer.stdout
            and len(re.findall("(?:reads|loads) sample 5,", answer.stdout)) == 1
            and len(re.findall("(?:reads|loads) sample", answer.stdout)) == 1
        ):
            return answer.stdout
    pytest.fail(f"it never waited: {answer}\n{training.stderr}")


def go_on_without(training: Training, pipe: Path) -> None:
    """Let the stuck read end: the pipe is no picture, and skipped."""
    pipe.open("wb").close()
    training.until("11")
    assert training.end() == 0


def test_penstock_ps_tells_what_a_stuck_training_waits_for(stuck: tuple[Training, Path]) -> None:
    training, pipe = stuck

    answer = wait_until_it_waits(training)

    assert f"process {training.pid}" in answer
    assert "the training waits for the batch of epoch 0, step 1" in answer
    assert f"s sample 5, {pipe}, since" in answer
    go_on_without(training, pipe)


def test_a_signal_prints_the_same_while_the_training_waits(stuck: tuple[Training, Path]) -> None:
    training, pipe = stuck
    wait_until_it_waits(training)

    training.process.send_signal(signal.SIGUSR1)
    line = f"s sample 5, {pipe}, since"
    wait_until(lambda: line in training.stderr or training.process.poll() is not None)
    assert line in training.stderr

    assert "the training waits for the batch of epoch 0, step 1" in training.stderr
    go_on_without(training, pipe)


def test_signals_that_come_while_the_training_prints_do_it_no_harm(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    script = """
from penstock.flow.waits import report_waits_on
report_waits_on()
with Loader(Numbers(), **options) as loader:
    say("now")
    while not os.path.exists(sys.argv[1]):
        for batch in loader:
            for _ in range(20):
                print("a line of the user's own", file=sys.stderr)
say("all is well")
"""
    training = train(script, str(tmp_path / "stop"))
    training.until("now")
    for _ in range(300):
        training.process.send_signal(signal.SIGUSR1)
        training.process.poll()
    (tmp_path / "stop").touch()
    training.until("all is well")

    assert training.end() == 0
    assert "Traceback" not in training.stderr
    assert f"penstock: process {training.pid}" in training.stderr


def test_ctrl_c_ends_a_training_whose_store_hangs_in_the_kernel(stuck: tuple[Training, Path]) -> None:
    training, pipe = stuck
    wait_until_it_waits(training)

    training.interrupt()
    training.end()

    assert training.process.returncode == -signal.SIGINT
    assert "RuntimeWarning: closed while threads hang" in training.stderr
    assert str(pipe) in training.stderr
    assert "Exception ignored" not in training.stderr


HUNG_BEFORE_ITS_FIRST_BATCH = """
from penstock import open_source
root, what = sys.argv[1:]
if what.startswith("listing"):
    scandir = os.scandir
    def hanging(path):  # as on a mount whose server has gone; in its thread no signal ends it
        if path.endswith("dog"):
            say("it hangs")
            threading.Event().wait()
        return scandir(path)
    os.scandir = hanging
    stuck = os.path.join(root, "dog")
else:
    from penstock.store import ImageFolder
    source = ImageFolder(root)
    stuck = source.path_of(0)
    os.unlink(stuck)
    os.mkfifo(stuck)
say(stuck)
if what == "listing alone":
    open_source(root)
options.update(shuffle=False, memory="4 MB", patience_seconds=0.1, report=say)
if what.endswith("time-out"):
    options["timeout_seconds"] = 1.0
from penstock.loader.transforms import ToTensor
Loader(root if what.startswith("listing") else source, transforms=[ToTensor()], **options)
"""


@pytest.mark.parametrize(
    "what", [pytest.param("listing", marks=pytest.mark.slow), "listing alone", "first sample"]
)
def test_one_ctrl_c_ends_a_loader_that_its_store_keeps_from_being_made(
    train: Callable[..., Training], image_folder: Callable[..., Path], what: str
) -> None:
    training = train(HUNG_BEFORE_ITS_FIRST_BATCH, str(image_folder(images=12)), what)
    assert training.process.stdout is not None
    stuck = training.process.stdout.readline().rstrip("\n")
    if what == "listing alone":
        training.until("it hangs")
    else:
        said = re.compile(rf"the loader has been starting for .* waits for {re.escape(stuck)}, asked for .*")
        line = training.until(said)
        answer = ""
        while line.partition(" for ")[0] not in answer:
            assert training.process.poll() is None, training.stderr
            answer = penstock(training.interpreters, "ps", str(training.pid)).stdout
        assert stuck in answer

    training.interrupt()
    training.end()

    assert_was_interrupted_quietly(training, warned=True)
    assert stuck in training.stderr


@pytest.mark.parametrize("what", ["listing, time-out", "first sample, time-out"])
def test_a_loader_that_its_store_keeps_from_being_made_times_out(
    train: Callable[..., Training], image_folder: Callable[..., Path], what: str
) -> None:
    training = train(HUNG_BEFORE_ITS_FIRST_BATCH, str(image_folder(images=12)), what)

    assert training.end() == 1
    assert re.search(
        r"WaitTimeout: the loader has been starting for .* s and waits for /.*asked for", training.stderr
    )
    assert "Exception ignored" not in training.stderr


@pytest.mark.parametrize("pid", ["1", str(2**22 + 1), "0", "-5"])
def test_penstock_ps_says_so_where_no_loader_runs(interpreters: Interpreters, pid: str) -> None:
    answer = penstock(interpreters, "ps", "--", pid)

    assert answer.returncode == 1
    assert answer.stdout == ""
    assert f"no loader runs in process {pid}" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_penstock_ps_tells_another_user_only_whose_process_it_is(stuck: tuple[Training, Path]) -> None:
    training, _ = stuck
    wait_until_it_waits(training)

    answer = penstock(training.interpreters, "ps", str(training.pid), user=65534)

    assert answer.returncode == 1
    assert answer.stdout == ""
    assert f"process {training.pid} is of user 0" in answer.stderr


def test_nobody_can_take_the_name_that_a_training_answers_by(train: Callable[..., Training]) -> None:
    """Nor does it matter that containers which share a network number their processes apart."""
    training = train(
        "sys.stdin.readline()\nwith Loader(Numbers(), **options) as loader:\n    loader.start()\n    say('now')\n"
        "    sys.stdin.readline()\n"
    )
    names = [f"\0penstock-waits-{training.pid}{more}" for more in ("", "-0", f"-{'0' * 16}")]
    with contextlib.ExitStack() as squatters:
        for name in names:
            squatter = squatters.enter_context(socket.socket(socket.AF_UNIX))
            squatter.bind(name)
            squatter.listen(0)
            # Its queue is full, so that whoever asks here waits.
            squatters.enter_context(socket.socket(socket.AF_UNIX)).connect(name)
        training.tell("go")
        training.until("now")

        answer = penstock(training.interpreters, "ps", str(training.pid))

    assert answer.stdout.startswith(f"penstock: process {training.pid}\n")
    training.tell("end")
    assert training.end() == 0
    assert training.stderr == ""


def test_a_signal_whose_report_nobody_reads_does_not_end_the_training(train: Callable[..., Training]) -> None:
    script = """
from penstock.flow.waits import report_waits_on
report_waits_on()
kept, (reading, writing) = os.dup(2), os.pipe()
os.close(reading)
with Loader(Numbers(), **options) as loader:
    for broken in (writing, None):
        os.close(2) if broken is None else os.dup2(broken, 2)
        os.kill(os.getpid(), signal.SIGUSR1)
        check(loader, loader.position[0])
os.dup2(kept, 2)
say("all is well")
"""
    training = train(script)
    training.until("all is well")

    assert training.end() == 0
    assert training.stderr == ""


# Ends of their own


@pytest.mark.parametrize(
    ("place", "last"), [("break", ""), ("pass", "sys.exit(0)"), ("break", "os._exit(0)")]
)
def test_a_process_ends_without_a_word_though_nobody_closed_its_loader(
    train: Callable[..., Training], place: str, last: str
) -> None:
    training = train(f"loader = Loader(Numbers(), **options)\nfor batch in loader:\n    {place}\n{last}\n")

    assert training.end() == 0
    assert training.stderr == ""


def test_an_exception_in_a_loop_without_with_ends_the_process_with_that_alone(
    train: Callable[..., Training],
) -> None:
    training = train("for batch in Loader(Numbers(), **options):\n    loss = 1 / 0\n")

    assert training.end() == 1
    assert training.stderr.count("Traceback") == 1
    assert training.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_loader_kept_in_a_global_and_a_batch_in_a_module_do_not_hold_the_process_up(
    train: Callable[..., Training],
) -> None:
    training = train("sys.kept = iter(Loader(Numbers(), **options))\nsys.batch = next(sys.kept)\n")

    assert training.end() == 0
    assert training.stderr == ""
