"""Compiling ahead: by one process for all, while something else serves, and with nothing left behind."""

from __future__ import annotations

import argparse
import ast
import errno
import fcntl
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from llvmlite import binding
from PIL import Image
from tests.interrupting import every_place
from tests.patience import wait_until

from penstock import Loader, child, compiling, kernel_cache
from penstock.cache_folders import Folders, remove_unused
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Coder, Kind, Pair
from penstock.checkpoint.codecs.ours import CODECS
from penstock.checkpoint.state.dtypes import DTYPES
from penstock.cli import main as cli_main
from penstock.compiling import Lease, Part, compile_ahead
from penstock.errors import ConfigError
from penstock.kernel_cache import file_of
from penstock.loader.transforms import Resize
from penstock.loader.transforms import compiled as resampling
from penstock.machine_code import MachineCode, Signature, target_machine

ENOUGH_SECONDS = 60.0
#: "Compiles" for as long as the test wants: until it writes to a pipe what shall become of it.
MODULE = """
import os
from pathlib import Path
from penstock.machine_code import MachineCode

HERE = Path(__file__).parent

def compile_part(name):
    with (HERE / "began").open("a") as began:
        began.write(f"{os.getpid()}\\n")
    what = (HERE / "pipe").read_text()
    if what != "well":
        raise ValueError(what)
    return MachineCode("doubled", (HERE / "object").read_bytes())
"""
SIGNATURE = Signature(("int64",), ("int64",))
#: By numba's calling convention: where the result goes, where a failure would, the argument; returns 0 for success.
ASSEMBLY = """
define i32 @doubled(ptr %result, ptr %failure, i64 %number) {
  %twice = shl i64 %number, 1
  store i64 %twice, ptr %result
  ret i32 0
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
    return folder


class Kernels:
    """A module of kernels, for this process and its children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{folder.name}_kernels"
        (folder / f"{self.name}.py").write_text(MODULE)
        os.mkfifo(folder / "pipe")
        (folder / "object").write_bytes(target_machine().emit_object(binding.parse_assembly(ASSEMBLY)))

    def part(self) -> Part:
        """Return a part as each process has one."""
        return Part(self.name, "loops", SIGNATURE, "loops", "NumPy serves")

    def cached_part(self) -> Part:
        """Return a part that was compiled before."""
        part = self.part()
        assert part._file is not None
        part._file.write_bytes(MachineCode("doubled", (self.folder / "object").read_bytes()).to_bytes())
        return part

    def program(self, text: str) -> subprocess.Popen[str]:
        """Start a process with a part, `until(found)`, `has_begun()`, and the text."""
        head = f"""
import os, signal, sys, threading, time
from pathlib import Path
from penstock.compiling import Lease, Part
from penstock.machine_code import Signature
def until(found):
    while not found():
        time.sleep(0.01)
lease = Lease(None)
part = Part({self.name!r}, "loops", Signature(("int64",), ("int64",)), "loops", "NumPy serves")
def has_begun():  # and has said so: one that is killed before it writes leaves an empty file
    began = Path({str(self.folder / "began")!r})
    return began.exists() and began.read_text().endswith("\\n")
"""
        return subprocess.Popen(
            [sys.executable, "-c", head + text],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def writer(self, what: str = "well") -> threading.Thread:
        """Start a thread that has the next process that compiles end so."""
        thread = threading.Thread(target=self.go_on, args=(what,))
        thread.start()
        return thread

    def go_on(self, what: str = "well") -> None:
        """Have the process that compiles end so; returns once it reads that."""
        (self.folder / "pipe").write_text(what)

    @property
    def began(self) -> list[int]:
        """Return the processes that began to compile."""
        with suppress(FileNotFoundError):
            return list(map(int, (self.folder / "began").read_text().split()))
        return []

    def first(self) -> int:
        """Return the first process that begins to compile, once it does."""
        wait_until(lambda: self.began)
        return self.began[0]


@pytest.fixture
def kernels(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    folder = tmp_path / f"fake_{abs(hash(str(tmp_path)))}"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(compiling, "PARTS", [])
    monkeypatch.setattr(compiling, "_LEASES", weakref.WeakSet())  # of earlier tests, some may be open yet
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 3600.0)
    made = Kernels(folder)
    yield made
    sys.modules.pop(made.name, None)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def lease(lines: list[str]) -> Iterator[Lease]:
    lease = Lease(lines.append)
    yield lease
    lease.close()


def test_a_plain_form_serves_until_another_process_has_compiled(kernels: Kernels, lease: Lease) -> None:
    part = kernels.part()

    assert part.ask() is None
    kernels.go_on()

    wait_until(part.ask)
    loop = part.ask()
    assert loop is not None
    assert loop(21) == 42
    assert os.getpid() not in kernels.began
    assert part.ask() is loop


def test_one_process_compiles_for_all_that_ask(kernels: Kernels, lease: Lease) -> None:
    """Ranks of a host begin at once; those whose process waits find the work done."""
    ranks = [kernels.part() for _ in range(3)]
    assert [rank.ask() for rank in ranks] == [None] * 3

    kernels.go_on()

    for rank in ranks:
        wait_until(rank.ask, 100)  # three interpreters start at a low priority, beside whatever else runs
    assert len(kernels.began) == 1


def test_the_next_process_finds_it_compiled_and_loads_it_without_numba(
    kernels: Kernels, lease: Lease
) -> None:
    part = kernels.part()
    part.ask()
    kernels.go_on()
    wait_until(part.ask)

    with kernels.program("print(part.ask()(21), 'numba' in sys.modules)") as training:
        assert training.communicate()[0] == "42 False\n"


def test_threads_that_wait_for_one_part_load_it_once(kernels: Kernels, lease: Lease) -> None:
    part = kernels.cached_part()
    loops: list[object] = []

    with compiling._LOADING:
        waiting = [threading.Thread(target=lambda: loops.append(part.wait())) for _ in range(3)]
        for thread in waiting:
            thread.start()
    for thread in waiting:
        thread.join()

    assert loops == [part.ask()] * 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1] + b"\1",
        *(pytest.param(cut, marks=pytest.mark.slow) for cut in (lambda data: data[:-1], lambda data: b"")),
    ],
)
def test_machine_code_that_is_not_whole_is_compiled_again(
    kernels: Kernels, lease: Lease, damage: Callable[[bytes], bytes]
) -> None:
    """Power was lost, or a disk fails."""
    part = kernels.cached_part()
    assert part._file is not None
    part._file.write_bytes(damage(part._file.read_bytes()))

    assert part.ask() is None
    kernels.go_on()
    wait_until(part.ask)

    assert len(kernels.began) == 1


def test_what_cannot_be_loaded_leaves_the_plain_form(
    kernels: Kernels, lease: Lease, lines: list[str]
) -> None:
    part = kernels.part()
    assert part._file is not None
    part._file.write_bytes(MachineCode("halved", (kernels.folder / "object").read_bytes()).to_bytes())

    assert part.ask() is None

    assert len(lines) == 1
    assert lines[0].startswith("loops cannot be compiled: NumPy serves from here on: ")


def test_compiling_that_takes_long_is_reported_once_on_a_host(
    kernels: Kernels, lease: Lease, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    part, other_rank = kernels.part(), kernels.part()

    assert part.ask() is None
    wait_until(lambda: lines)  # without another call of `ask`: a store that saves once makes none
    assert other_rank.ask() is None
    kernels.go_on()
    wait_until(part.ask)
    wait_until(other_rank.ask)

    assert lines == [
        "compiling loops, once on this machine: NumPy serves until then; what else this run needs follows, and "
        "`penstock compile` compiles all of it ahead"
    ]


def test_kernels_that_are_compiled_at_the_same_time_or_later_are_reported_in_one_line(
    kernels: Kernels, lease: Lease, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    first, other, later = (
        Part(kernels.name, what, SIGNATURE, what, f"plain {what} serve")
        for what in ("loops", "sums", "counts")
    )

    assert first.ask() is None
    assert other.ask() is None
    wait_until(lambda: lines)
    kernels.go_on()
    wait_until(lambda: first.ask() or other.ask())  # whichever had the lock
    kernels.go_on()
    wait_until(lambda: first.ask() and other.ask())
    assert later.ask() is None
    kernels.go_on()
    wait_until(later.ask)

    (line,) = lines
    assert line.startswith(
        "compiling loops, sums, once on this machine: slower code does it until then; what else"
    )


def test_the_line_is_for_the_first_who_wants_lines(
    kernels: Kernels, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader of a validation is made with report=None, before that of the training."""
    monkeypatch.setattr(compiling, "_is_told", False)
    part, silent = kernels.part(), Lease(None)
    part._report_compiling()

    training = Lease(lines.append)
    for _ in range(2):
        part._report_compiling()

    assert len(lines) == 1
    for lease in (silent, training):
        lease.close()


def test_kernels_of_several_folders_are_compiled_ahead_side_by_side_and_those_of_one_by_one_process(
    kernels: Kernels, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one folder call the same functions, which two processes would compile twice."""
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    others = Kernels(tmp_path / "elsewhere")
    parts = [Part(kernels.name, name, SIGNATURE, name, "") for name in ("loops", "more loops")]
    apart = others.part()
    vars(apart)["folders"] = Folders((others.folder,), others.folder, "")
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    done: list[Part] = []

    ahead = threading.Thread(
        target=compile_ahead, args=([*parts, apart], 2, done.append, lines.append), daemon=True
    )
    ahead.start()
    wait_until(lambda: kernels.began and others.began and lines)  # each waits until both have begun
    kernels.go_on()
    others.go_on("no such type")
    wait_until(lambda: len(kernels.began) == 2)
    kernels.go_on()
    wait_until(lambda: len(others.began) == 2)  # another process, which would say what is wrong
    others.go_on()
    ahead.join()

    assert lines == ["compiling 3 loops in 2 processes"]
    assert set(done) == {*parts, apart}
    assert len(kernels.began) == 2
    assert len(set(kernels.began)) == 1
    assert len(set(others.began)) == 2
    assert [part.wait()(21) for part in done] == [42, 42, 42]


def test_compiling_ahead_names_what_another_process_compiles(
    kernels: Kernels, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    part, done = kernels.part(), list[Part]()
    assert part._file is not None
    ahead = threading.Thread(target=compile_ahead, args=([part], 2, done.append, lines.append), daemon=True)

    with (part._file.parent / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ahead.start()
        wait_until(lambda: lines)
        assert not kernels.began
    kernels.first()
    wait_until(lambda: len(lines) == 2)
    kernels.go_on()
    ahead.join()

    assert lines == ["another process compiles loops: waiting for it", "compiling 1 loop in 1 process"]
    assert done == [part]


def test_without_a_lease_the_caller_waits_and_is_told(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "_PATIENCE_WITH_OTHERS_SECONDS", 3600.0)
    part = kernels.part()
    asking = threading.Thread(target=part.ask)
    asking.start()
    wait_until(lambda: part._is_reported)
    kernels.go_on()
    asking.join()

    assert part.ask() is not None
    assert os.getpid() not in kernels.began
    assert capfd.readouterr().err == "penstock: compiling loops, once on this machine: waiting for it\n"


def test_loops_that_are_loaded_while_the_process_ends_leave_no_traceback() -> None:
    """As by threads at their first batch: llvmlite's own function of `atexit` is registered too late then."""
    program = """
import atexit
import penstock.flow.engine, penstock.loader.draws, penstock.loader.gather, penstock.store, penstock.torch
from penstock.compiling import PARTS

kept = []

@atexit.register
def late():
    kept.extend(part.wait() for part in PARTS if part.is_cached)
    print(len(kept) > 1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_with_the_last_lease_the_process_ends_and_lets_others_compile(kernels: Kernels, lease: Lease) -> None:
    other = Lease(None)
    part = kernels.part()
    part.ask()
    child = kernels.first()

    other.close()
    assert Path(f"/proc/{child}").exists()
    lease.close()
    assert not Path(f"/proc/{child}").exists()

    again = Lease(None)
    assert part.ask() is None
    wait_until(lambda: len(kernels.began) == 2)
    kernels.go_on()
    wait_until(part.ask)
    again.close()


def test_a_lease_that_is_collected_ends_the_process_and_its_finaliser_waits_for_nothing(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[threading.Thread] = []
    wait = subprocess.Popen.wait

    def noted(process: Any, timeout: float | None = None) -> int:
        waiting.append(threading.current_thread())
        return wait(process, timeout)

    lease = Lease(None)
    kernels.part().ask()
    child = kernels.first()
    monkeypatch.setattr(subprocess.Popen, "wait", noted)

    del lease

    wait_until(lambda: not Path(f"/proc/{child}").exists())
    assert threading.main_thread() not in waiting


def test_no_process_starts_where_the_last_lease_closes_meanwhile(
    kernels: Kernels, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    popen = subprocess.Popen

    def note(*words: Any, **options: Any) -> Any:
        started.append(words)
        return popen(*words, **options)

    def close_before(folder: Path, name: str, signature: Signature) -> Path:
        lease.close()
        return file_of(folder, name, signature)

    monkeypatch.setattr(subprocess, "Popen", note)
    monkeypatch.setattr(compiling, "file_of", close_before)
    part = kernels.part()

    assert part.ask() is None
    part.stop()

    assert started == []


def test_at_the_limit_of_threads_the_plain_form_serves_and_closing_and_waiting_work(
    kernels: Kernels, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = subprocess.Popen(
        [sys.executable, "-c", f"open({str(kernels.folder / 'pipe')!r}, 'w').write('well')"]
    )
    monkeypatch.setattr(threading.Thread, "start", refuse)
    part = kernels.part()

    assert part.ask() is None
    lease.close()
    assert part.wait() is not None
    assert writer.wait() == 0


def test_an_interrupt_after_any_call_leaves_no_lock_held_and_no_process(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises KeyboardInterrupt there: each run raises it one call later than the run before."""
    monkeypatch.setattr(child, "_PROGRAM", "import time; time.sleep(3600)")
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*words: Any, **options: Any) -> Any:
        children.append(popen(*words, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    places = 0
    for places, interrupter in enumerate(every_place(_is_traced)):  # noqa: B007
        compiling.PARTS.clear()
        part = kernels.part()
        lease = None
        try:
            with interrupter:
                lease = Lease(None)
                part.ask()
                part.ask()
                lease.close()
        except KeyboardInterrupt:
            pass
        if lease is not None:
            lease.close()
        del lease

        assert _is_free(compiling._LEASES_LOCK), interrupter.where
        wait_until(lambda: all(child.returncode is not None for child in children))

    assert places > 20


def _is_traced(code: CodeType) -> bool:
    """Of `compiling`, and of a join of threads, where it waits."""
    return code.co_filename == compiling.__file__ or code.co_name in ("join", "_wait_for_tstate_lock")


def _is_free(lock: Any) -> bool:
    """Return whether another thread gets a reentrant lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=ENOUGH_SECONDS))
        if got[0]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return got[0]


def test_a_process_that_fails_leaves_the_work_to_this_one(
    kernels: Kernels, lease: Lease, lines: list[str]
) -> None:
    part = kernels.part()
    part.ask()
    kernels.go_on("no such type")
    wait_until(lambda: lines)
    writer = kernels.writer()

    wait_until(part.ask)

    writer.join()
    assert lines == [
        f"the process that compiled loops failed (ValueError: no such type; kept in {part.folders.kept}): "
        "this process compiles it",
        "compiling loops in this process: waiting for it",
    ]


def test_a_process_that_is_killed_leaves_the_plain_form(
    kernels: Kernels, lease: Lease, lines: list[str]
) -> None:
    """Memory has run out, or a job is being ended: this is not when a training should compile."""
    part = kernels.part()
    part.ask()
    child = kernels.first()

    os.kill(child, signal.SIGKILL)
    wait_until(lambda: part.ask() is None and bool(lines))

    assert lines == ["the process that compiled loops was killed: NumPy serves from here on"]
    assert part.ask() is None
    assert kernels.began == [child]


def test_the_process_ends_with_the_training(kernels: Kernels) -> None:
    with kernels.program("part.ask()\ninput()") as training:
        assert training.stdin is not None
        child = Path(f"/proc/{kernels.first()}")
        training.stdin.write("\n")
        training.stdin.close()

        wait_until(lambda: not child.exists())


def test_a_frozen_program_compiles_in_its_own_process(
    kernels: Kernels, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its executable is no Python interpreter, but the training once more."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    writer = kernels.writer()

    assert kernels.part().ask() is not None

    writer.join()
    assert kernels.began == [os.getpid()]


def test_where_no_folder_can_be_written_the_process_compiles_for_itself(
    kernels: Kernels, lease: Lease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiling, "folders_of", lambda module: Folders((), None, ""))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    writer = kernels.writer()

    loop = kernels.part().ask()

    writer.join()
    assert loop is not None
    assert loop(21) == 42
    assert kernels.began == [os.getpid()]
    assert list((tmp_path / "here").iterdir()) == []


def test_no_sample_is_skipped_because_kernels_cannot_be_compiled(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `on_error="skip"`, which is about samples: NumPy resamples them all."""
    (tmp_path / "broken_kernels.py").write_text(
        "def compile_part(name): raise MemoryError('too little of it')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    # A line goes to one lease: an earlier test may have left one open.
    monkeypatch.setattr(compiling, "_LEASES", weakref.WeakSet())
    monkeypatch.setattr(sys, "frozen", True, raising=False)  # at once, without a child that fails first
    broken = Part(
        "broken_kernels", "float32", resampling.SIGNATURES["float32"], "pictures", "NumPy resamples them"
    )
    monkeypatch.setitem(resampling.KERNELS, "float32", broken)
    for number in range(6):
        file = tmp_path / "images" / "a" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (number, 0, 0)).save(file)
    lines: list[str] = []

    with Loader(
        tmp_path / "images",
        batch_size=6,
        epochs=1,
        transforms=[Resize((5, 5))],
        on_error="skip",
        report=lines.append,
    ) as loader:
        (images, _) = next(iter(loader))
        skipped = loader.skipped
        line = "pictures cannot be compiled: NumPy resamples them from here on: too little of it"
    compiling.PARTS.remove(broken)

    assert sorted(np.asarray(images)[:, 0, 0, 0]) == list(range(6))
    assert not skipped
    assert line in lines


def test_a_cache_that_takes_no_more_files_is_reported_as_such(
    kernels: Kernels, lease: Lease, lines: list[str]
) -> None:
    part = kernels.part()
    assert part.folders.kept is not None
    (part.folders.kept / "lock").mkdir()
    part.ask()
    wait_until(lambda: lines)
    writer = kernels.writer()

    wait_until(part.ask)

    writer.join()
    assert lines[0].startswith("the process that compiled loops failed (IsADirectoryError: ")


def test_a_command_that_writes_what_stays_waits_for_the_compiler(kernels: Kernels, lease: Lease) -> None:
    writer = kernels.writer()

    with compiling.without_plain_forms():
        assert kernels.part().ask() is not None

    writer.join()


def test_an_interrupt_while_a_child_compiles_ends_both(kernels: Kernels) -> None:
    """Shells and job managers look at the signal that a process died of."""
    with kernels.program("part.ask()\nuntil(has_begun)\nos.kill(os.getpid(), signal.SIGINT)") as training:
        said = training.communicate()[1]

    assert training.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1
    wait_until(lambda: not Path(f"/proc/{kernels.first()}").exists())


class TestForks:
    """As of `multiprocessing` and DataLoader workers: in the child, nobody would release what a thread holds."""

    def test_a_process_that_forks_waits_for_a_thread_that_compiles(self, kernels: Kernels) -> None:
        program = """
def fork():
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        signal.alarm(100)
        os._exit(0 if part.wait()(21) == 42 else 1)
sys.frozen = True
threading.Thread(target=part.ask).start()
until(has_begun)
os.register_at_fork(before=lambda: print("forks", flush=True))
forks = threading.Thread(target=fork)
forks.start()
forks.join()
"""
        with kernels.program(program) as training:
            assert training.stdout is not None
            assert training.stdout.readline() == "forks\n"
            kernels.go_on()
            assert training.stdout.read() == "0\n"

    def test_a_process_that_was_forked_while_compiling_hung_does_not_hang(
        self, kernels: Kernels, lease: Lease, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiling, "_LOAD_SECONDS", 0.01)
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        part = kernels.part()
        compiles = threading.Thread(target=part.ask)
        compiles.start()
        kernels.first()

        forked = os.fork()
        if not forked:
            with suppress(ConfigError):
                part.wait()
                os._exit(1)
            os._exit(0 if part.ask() is None else 2)
        assert os.waitpid(forked, 0)[1] == 0

        kernels.go_on()
        compiles.join()
        assert part.ask() is not None

    def test_an_interrupt_while_a_fork_waits_ends_the_wait_and_is_raised_after_it(
        self, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python prints what a hook of `os.fork` raises, and drops it."""

        class Interrupted:
            def acquire(self, timeout: float) -> bool:
                raise KeyboardInterrupt

            def _is_owned(self) -> bool:
                return False

        part = kernels.part()
        monkeypatch.setattr(compiling, "_LOADING", Interrupted())
        forked = -1

        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            forked = os.fork()
            if not forked:
                os._exit(0 if part._is_lost else 1)
            time.sleep(ENOUGH_SECONDS)

        assert os.waitpid(forked, 0)[1] == 0


def test_a_forked_process_leaves_it_alone(kernels: Kernels, lease: Lease) -> None:
    part = kernels.part()
    part.ask()
    child = kernels.first()

    forked = os.fork()
    if not forked:
        lease.close()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0

    assert Path(f"/proc/{child}").exists()
    kernels.go_on()
    wait_until(part.ask)


class TestBlocksBeforeTheCodecIsCompiled:
    """Blocks are stored without a kernel, so that the first save need not wait."""

    @pytest.fixture
    def coder(self, monkeypatch: pytest.MonkeyPatch) -> Coder:
        monkeypatch.setattr(Part, "ask", lambda part: None)
        return CODECS[0].coder(lambda: iter(()))

    @pytest.mark.parametrize("reference", [None, b"\1" * 4000, b"\0" * 4000])
    def test_they_are_stored_whatever_the_reference(self, coder: Coder, reference: bytes | None) -> None:
        values = np.zeros(4000, np.uint8)
        before = None if reference is None else np.frombuffer(reference, np.uint8)
        out = np.empty(4000 + SLACK_BYTES, np.uint8)

        assert coder.encode(Pair(values, DTYPES["float32"], before), out) == (Kind.STORED, 4000)


class TestCache:
    """Where machine code is kept: in one folder, whoever asks, and never in a stranger's."""

    @pytest.fixture
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return the system's temporary folder of a user whose own cannot be written."""
        (tmp_path / "file").touch()
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return tmp_path

    def test_without_a_folder_of_ones_own_there_is_one_below_the_temporary_one(self, temporary: Path) -> None:
        folder = kernel_cache._folders("version").kept

        assert folder == temporary / f"penstock-{os.geteuid()}" / "kernels" / "version"
        assert kernel_cache._folders("version").kept == folder

    def test_a_process_that_put_its_rights_aside_has_the_folder_of_whom_it_acts_for(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Folders are the effective user's; by the real one it would be a stranger's, and one made anew each time."""
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)

        assert kernel_cache._folders("version").kept == kernel_cache._folders("version").kept
        assert sorted(path.name for path in temporary.iterdir()) == ["file", f"penstock-{os.geteuid()}"]

    def test_what_an_image_brings_along_is_used_where_it_cannot_be_written(
        self, kernels: Kernels, lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An earlier start may have left a folder below the temporary one, with nothing or little in it."""
        baked = kernels.cached_part()
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        touch = os.utime

        def refuse(path: Path, **options: Any) -> None:
            if path == baked.folders.kept:
                raise PermissionError(errno.EROFS, "Read-only file system")
            touch(path, **options)

        monkeypatch.setattr(os, "utime", refuse)

        part = kernels.part()

        assert part.folders.kept is not None
        assert part.folders.kept.is_relative_to(tmp_path / "tmp")
        assert part.ask() is not None
        assert kernels.began == []

    @pytest.mark.parametrize("is_full", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_a_setting_that_cannot_be_followed_is_said_and_the_command_refuses_it(
        self,
        kernels: Kernels,
        lease: Lease,
        lines: list[str],
        cache: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        is_full: bool,
    ) -> None:
        if is_full:
            sizes = os.statvfs_result((4096, 4096, 9, 2, 2, 9, 9, 9, 0, 255))
            status = os.statvfs
            monkeypatch.setattr(
                os, "statvfs", lambda path: sizes if path.is_relative_to(cache) else status(path)
            )
        else:
            cache.write_text("a file")
        problem = "is full" if is_full else "cannot be written: (File exists|Not a directory)"
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
        part = kernels.part()

        part.ask()
        compiles = part._thread
        assert compiles is not None
        kernels.go_on()
        compiles.join()

        assert part.ask() is not None
        note = f"PENSTOCK_CACHE is '{cache}', which {problem}"
        assert re.search(rf"until then \({note}: kept in {tmp_path}/penstock-", lines[0])
        # The other parts are there, so that the command compiles, and waits for, none.
        never_compiled = Part(kernels.name, "others", SIGNATURE, "loops", "NumPy serves")
        monkeypatch.setattr(never_compiled, "wait", lambda: None)
        monkeypatch.setitem(resampling.KERNELS, "float32", never_compiled)
        with pytest.raises(ConfigError, match=note):
            cli_main._compile(argparse.Namespace(json=False))

    def test_a_cache_serves_where_no_temporary_folder_can_be_written(
        self, kernels: Kernels, lease: Lease, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a container whose root is read-only."""
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/1"])
        part = kernels.part()

        assert part.ask() is None
        kernels.go_on()

        wait_until(part.ask)
        assert kernels.began != [os.getpid()]

    def test_what_another_rank_removes_meanwhile_is_no_failure(self, tmp_path: Path) -> None:
        (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
        (tmp_path / "old").mkdir()
        os.utime(tmp_path / "old", (0, 0))

        remove_unused(tmp_path, days=30)
        remove_unused(tmp_path / "gone", days=30)

        assert not (tmp_path / "old").exists()

    @pytest.mark.parametrize(
        ("home", "place"), [("~/.cache", "tmp/penstock-USER"), ("{}/home/.cache", "home/.cache/penstock")]
    )
    def test_without_a_setting_it_is_at_home_and_without_a_home_below_the_temporary_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, place: str
    ) -> None:
        for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PENSTOCK_CACHE", "")  # not the folder where the program was started
        monkeypatch.setattr(os.path, "expanduser", lambda path: home.format(tmp_path))
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.chdir(tmp_path)

        folder = kernel_cache._folders("version").kept

        assert folder == tmp_path / place.replace("USER", str(os.geteuid())) / "kernels" / "version"
        assert not (tmp_path / "~").exists()

    def test_where_even_that_is_a_strangers_the_folder_goes_with_the_process(self, tmp_path: Path) -> None:
        (tmp_path / f"penstock-{os.geteuid() + 1}").mkdir()
        (tmp_path / "file").touch()
        os.chown(tmp_path / f"penstock-{os.geteuid() + 1}", os.geteuid() or 1234, -1)
        script = f"""
import os
os.geteuid = lambda: {os.geteuid() + 1}
from penstock.kernel_cache import _folders, lasting_folder_of
folder = _folders("version").kept
assert lasting_folder_of("penstock.plan._kernels") is None
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(folder, folder.is_dir())
"""
        environment = os.environ | {"TMPDIR": str(tmp_path), "PENSTOCK_CACHE": str(tmp_path / "file")}

        said = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ENOUGH_SECONDS,
            check=True,
        )

        folder, was_there = said.stdout.split()
        assert Path(folder).parent == tmp_path
        assert was_there == "True"
        assert not Path(folder).exists()


#: What kernels have compiled in that others decide: the block of disks, turbojpeg's number of a kind of pixels, and the
#: block of a snapshot's format.
NEVER_CHANGED = {
    "penstock.store.direct.BLOCK_BYTES": 4096,
    "penstock.loader.transforms.turbojpeg.RGB": 0,
    "penstock.checkpoint.state.tensors.BLOCK_VALUES": 131_072,
}


def test_a_kernel_is_compiled_again_when_what_it_imports_changes() -> None:
    """Signatures need not be known: the file of machine code is named by them."""
    package = Path(kernel_cache.__file__).parent
    for folder in {file.parent for file in package.rglob("*kernels.py")}:
        known = {path.resolve() for path in kernel_cache._compiled_from(folder)}
        for file in folder.glob("*kernel*.py"):
            for module, name in _imported_of_penstock(file):
                value = getattr(importlib.import_module(module), name, None)
                origins = {_file_of_module(package, module), _file_of_module(package, f"{module}.{name}")}
                assert (
                    origins & known
                    or all(
                        isinstance(each, Signature)
                        for each in (value.values() if isinstance(value, dict) else [value])
                    )
                    or NEVER_CHANGED.get(f"{module}.{name}") == value
                ), f"{file} imports {name} of {module}, of which the cache of kernels does not know"


def _imported_of_penstock(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        assert not isinstance(node, ast.Import) or not any("penstock" in each.name for each in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            yield from ((str(node.module), each.name) for each in node.names)


def _file_of_module(package: Path, name: str) -> Path:
    return package.joinpath(*name.split(".")[1:]).with_suffix(".py").resolve()
