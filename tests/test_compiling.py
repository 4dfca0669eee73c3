"""Compiling ahead: by one process for all, while something else serves, and with nothing left behind."""

from __future__ import annotations

import os
import runpy
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
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock import compiling
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Coder, Kind, Pair
from penstock.checkpoint.codecs.ours import CODECS
from penstock.checkpoint.dtypes import DTYPES
from penstock.compiling import Lease, Part

ENOUGH_SECONDS = 60.0
#: "Compiles" for as long as the test wants: until it writes to a pipe what shall become of it. Machine code is a file.
MODULE = """
import os
from pathlib import Path

HERE = Path(__file__).parent

def compile_part(name):
    with (HERE / "loaded").open("a") as loaded:
        loaded.write("1\\n")
    code = HERE / f"{name}.code"
    if code.exists():
        return
    with (HERE / "began").open("a") as began:
        began.write(f"{os.getpid()}\\n")
    what = (HERE / "pipe").read_text()
    if what != "well":
        raise ValueError(what)
    code.touch()
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

    def part(self) -> Part:
        """Return a part as each process has one."""
        return Part(self.name, "loops", "loops", "NumPy serves")

    def go_on(self, what: str = "well") -> None:
        """Have the process that compiles end so; returns once it reads that."""
        (self.folder / "pipe").write_text(what)

    @property
    def began(self) -> list[int]:
        """Return the processes that began to compile."""
        with suppress(FileNotFoundError):
            return list(map(int, (self.folder / "began").read_text().split()))
        return []

    @property
    def loaded(self) -> int:
        """Return how many times this process compiled or loaded, its children's compiling aside."""
        return len((self.folder / "loaded").read_text().split()) - len(set(self.began) - {os.getpid()})

    def first(self) -> int:
        """Return the first process that begins to compile, once it does."""
        until(lambda: self.began)
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


def until(found: Callable[[], object]) -> object:
    """Look until there is something."""
    deadline = time.monotonic() + ENOUGH_SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return value


def test_a_plain_form_serves_until_another_process_has_compiled(kernels: Kernels, lease: Lease) -> None:
    part = kernels.part()

    assert part.ask() is None
    kernels.go_on()

    module = until(part.ask)
    assert isinstance(module, ModuleType)
    assert module.__name__ == kernels.name
    assert os.getpid() not in kernels.began
    assert part.ask() is module


def test_one_process_compiles_for_all_that_ask(kernels: Kernels, lease: Lease) -> None:
    """Ranks of a host begin at once; those whose process waits find the work done."""
    ranks = [kernels.part() for _ in range(3)]
    assert [rank.ask() for rank in ranks] == [None] * 3

    kernels.go_on()

    for rank in ranks:
        until(rank.ask)
    assert len(kernels.began) == 1


def test_the_next_process_finds_it_compiled(kernels: Kernels, lease: Lease) -> None:
    part = kernels.part()
    part.ask()
    kernels.go_on()
    until(part.ask)

    assert kernels.part().ask() is not None


def test_threads_that_wait_for_one_part_load_it_once(kernels: Kernels, lease: Lease) -> None:
    earlier = kernels.part()
    earlier.ask()
    kernels.go_on()
    until(earlier.ask)
    part = kernels.part()

    with compiling._IMPORTING:
        waiting = [threading.Thread(target=part.wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
    for thread in waiting:
        thread.join()

    assert kernels.loaded == 1 + 1, "once for the earlier part, once for all of the threads of this one"


def test_what_takes_long_is_said_once(
    kernels: Kernels, lease: Lease, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    part = kernels.part()
    for _ in range(3):
        part.ask()

    assert lines == ["compiling loops, once on this machine: NumPy serves until then"]
    kernels.go_on()
    until(part.ask)


def test_without_a_lease_the_caller_waits_and_is_told(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.0)
    writer = subprocess.Popen(
        [sys.executable, "-c", f"open({str(kernels.folder / 'pipe')!r}, 'w').write('well')"]
    )

    assert kernels.part().ask() is not None

    assert writer.wait() == 0
    assert kernels.began == [os.getpid()]
    assert capfd.readouterr().err == "penstock: compiling loops, once on this machine: waiting for it\n"


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
    until(lambda: len(kernels.began) == 2)
    kernels.go_on()
    until(part.ask)
    again.close()


def test_a_process_that_fails_leaves_the_work_to_this_one(
    kernels: Kernels, lease: Lease, lines: list[str]
) -> None:
    part = kernels.part()
    part.ask()
    kernels.go_on("no such type")
    (kernels.folder / "loops.code").touch()

    until(part.ask)

    assert lines == [
        "the process that compiled loops failed (ValueError: no such type): this process compiles it"
    ]


def test_a_process_that_is_killed_leaves_the_plain_form(
    kernels: Kernels, lease: Lease, lines: list[str]
) -> None:
    """Memory has run out, or a job is being ended: this is not when a training should compile."""
    part = kernels.part()
    part.ask()
    child = kernels.first()

    os.kill(child, signal.SIGKILL)
    until(lambda: part.ask() is None and bool(lines))

    assert lines == ["the process that compiled loops was killed: NumPy serves from here on"]
    assert part.ask() is None
    assert kernels.began == [child]


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "pass"])
def test_the_process_ends_with_the_training(kernels: Kernels, end: str) -> None:
    program = f"""
import os, signal
from penstock.compiling import Lease, Part
lease = Lease(None)
part = Part({kernels.name!r}, "loops", "loops", "NumPy serves")
part.ask()
print(part._process.pid, flush=True)
input()
{end}
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        child = Path("/proc") / training.stdout.readline().strip()
        until(lambda: kernels.began)
        training.stdin.write("\n")
        training.stdin.close()

        until(lambda: not child.exists())


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
    until(part.ask)


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
        folder = compiling._writable_folder("version")

        assert folder == temporary / f"penstock-{os.geteuid()}" / "kernels" / "version"
        assert compiling._writable_folder("version") == folder

    def test_a_process_that_put_its_rights_aside_has_the_folder_of_whom_it_acts_for(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Folders are the effective user's; by the real one it would be a stranger's, and one made anew each time."""
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)

        assert compiling._writable_folder("version") == compiling._writable_folder("version")
        assert sorted(path.name for path in temporary.iterdir()) == ["file", f"penstock-{os.geteuid()}"]

    def test_what_an_image_brings_along_is_copied_where_it_cannot_be_written(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (baked := cache / "kernels" / "version").mkdir(parents=True)
        (baked / "loops").write_text("machine code")
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        touch = os.utime

        def refuse(path: Path, **options: Any) -> None:
            if path == baked:
                raise PermissionError
            touch(path, **options)

        monkeypatch.setattr(os, "utime", refuse)

        folder = compiling._writable_folder("version")

        assert folder is not None
        assert folder.is_relative_to(tmp_path / "tmp")
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("loops", "machine code")]

    def test_where_even_that_is_a_strangers_the_folder_goes_with_the_process(self, tmp_path: Path) -> None:
        (tmp_path / f"penstock-{os.geteuid() + 1}").mkdir()
        (tmp_path / "file").touch()
        os.chown(tmp_path / f"penstock-{os.geteuid() + 1}", os.geteuid() or 1234, -1)
        script = f"""
import os
os.geteuid = lambda: {os.geteuid() + 1}
from penstock.compiling import _writable_folder
folder = _writable_folder("version")
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


def test_the_benchmark_of_what_is_first_goes_on_running(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = Path(__file__).parents[1] / "benchmarks" / "first_use.py"

    runpy.run_path(str(benchmark))["main"](["--quick"])

    assert [line.partition(", cold: ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "penstock.Loader, first batch",
        "penstock.torch.Loader, first batch",
        "SnapshotStore, first save of 1 MB",
    ]
