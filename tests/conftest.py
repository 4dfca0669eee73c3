"""What every test is held to: it leaves nothing behind, and it is not skipped without a listed reason."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.forking import Forks
    from tests.interpreters import Interpreters

# For the processes that tests start: threads that they do not use take NumPy as long to start as it takes itself.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# OpenMP reads it as PyTorch is imported. Otherwise a thread spins while it waits for another one, which itself waits
# for a processor where more processes compute than there are: small trainings took several times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts jobs in the background with Ctrl-C ignored, and all that they start inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:  # where pytest was not started as `python -m pytest`
    sys.path.insert(0, ROOT)

from tests.parallel import pytest_addoption, pytest_runtestloop  # noqa: E402, F401
from tests.patience import patient  # noqa: E402

# Collecting makes a million objects that stay: to look through them as they grow in number takes a sixth of its time.
gc.disable()

# pytest-timeout takes it from here: a limit in pyproject.toml would be the same on every machine.
os.environ.setdefault("PYTEST_TIMEOUT", f"{patient(600):.0f}")

# No test fails because the machine is busy: neither by what an example takes, nor by what drawing one does.
settings.register_profile(
    "patient", parent=settings(), deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
# make test ARGS="--hypothesis-profile=thorough": where a test does not say how many examples it takes.
settings.register_profile("thorough", parent=settings.get_profile("patient"), max_examples=1000)
settings.load_profile("patient")

# Else it reads all imported files of ours for numbers and words to try: 7 s of processor time in a new clone.
providers._get_local_constants = Constants

#: A run takes one of so many examples that a property says, 8 at least, other ones each time; a thorough one and slow
#: tests take all.
EXAMPLES_SHARE = 8

SKIPS_FILE = Path(__file__).with_name("skips.txt")
SHARED_MEMORY = Path("/dev/shm")
GRACE_SECONDS = patient(10.0)

#: Where tests have several processes, the one for all of them.
FORKS_OF_ALL = pytest.StashKey["Forks"]()

FORK_SERVER = "penstock.forkserver:_serve"
# Threads and processes of the tools, which outlive a test by design.
ALLOWED_THREADS = ("pytest_timeout",)
ALLOWED_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", FORK_SERVER)


def pytest_collection_finish() -> None:
    gc.enable()


# -- Properties ----------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hypothesis-profile", None) == "thorough":
        return
    seen = set[Any]()
    for item in items:
        function = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        machine = getattr(item, "cls", None)
        for owner, name in ((function, "_hypothesis_internal_use_settings"), (machine, "settings")):
            said = getattr(owner, name, None)
            if isinstance(said, settings) and owner not in seen and item.get_closest_marker("slow") is None:
                seen.add(owner)
                fewer = max(min(8, said.max_examples), said.max_examples // EXAMPLES_SHARE)
                setattr(owner, name, settings(said, max_examples=fewer))


# -- Pictures ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fonts() -> None:
    """Draw all kinds of text once: Matplotlib keeps the files of its fonts open for as long as the process lives."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "plain, $10^{-2}$")
    figure.text(0, 0, "bold", weight="bold")
    figure.savefig(io.BytesIO())


# -- An object store -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fsspec_threads() -> None:
    """Start the two threads that fsspec keeps for its asynchronous drivers for as long as the process lives."""
    import fsspec.asyn

    executor = ThreadPoolExecutor(1)
    executor.submit(int).result()
    fsspec.asyn.get_loop().set_default_executor(executor)


@pytest.fixture(scope="session")
def obstore_threads() -> None:
    """Start the threads that obstore keeps for as long as the process lives."""
    import obstore
    from obstore.store import MemoryStore

    obstore.put(MemoryStore(), "a", b"")


@pytest.fixture(scope="session")
def s3_options(fsspec_threads: None) -> Iterator[dict[str, str]]:
    """Serve S3 with one bucket, "bucket", in a thread, and return the options of s3fs that lead to it."""
    import s3fs
    from botocore.loaders import JSONFileLoader  # type: ignore[import-untyped, unused-ignore]
    from moto.server import ThreadedMotoServer

    # Each client reads AWS's description of its services anew, which takes longer than what a test asks of it.
    read = JSONFileLoader.load_file
    read_once = functools.cache(lambda path: read(JSONFileLoader(), path))
    JSONFileLoader.load_file = lambda self, path: read_once(path)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "me", "secret": "mine"}
    s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
    yield options
    server.stop()
    JSONFileLoader.load_file = read


@pytest.fixture(scope="session")
def signed_s3_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Serve S3 with one bucket, "bucket", by a program that looks at signatures; return s3fs's options for it."""
    folder = tmp_path_factory.mktemp("nanio")
    (folder / "bucket").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(folder), "--host", "127.0.0.1"]
    environment = os.environ | {"NANIO_ACCESS_KEY": "signing-key", "NANIO_SECRET_KEY": "signing-secret"}
    with subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error", "--no-access-log"], env=environment
    ) as process:
        try:
            deadline = time.monotonic() + patient(60)
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None, "it ended"
                    assert time.monotonic() < deadline, "it does not begin to listen"
                    time.sleep(0.05)
            endpoint = f"http://127.0.0.1:{port}"
            yield {"endpoint_url": endpoint, "key": "signing-key", "secret": "signing-secret"}
        finally:
            process.terminate()


# -- Processes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def forks(pytestconfig: pytest.Config) -> Iterator[Forks]:
    """Return what forks processes that have everything imported."""
    from tests.forking import Forks

    if (of_all := pytestconfig.stash.get(FORKS_OF_ALL, None)) is not None:
        yield of_all
        return
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Interpreters]:
    """Return what starts programs that have Penstock imported."""
    from tests.interpreters import Interpreters

    interpreters = Interpreters()
    yield interpreters
    interpreters.close()


# -- Nothing is left behind ----------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_looked_through_again() -> None:
    """Take what is imported by now from the garbage collector: it looked through all of it for each file it closed."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, a shared-memory file or an open file.

    What a fixture of a wider scope started before the test does not count.
    """
    threads = set(threading.enumerate())
    children = _child_processes()
    segments = _shared_memory_files()
    files = _open_files()
    yield
    left = _wait_until_empty(
        lambda: _new_threads(threads) + _new_children(children) + _new_segments(segments) + _new_files(files)
    )
    if left:
        _end_processes(set(_child_processes()) - set(children))
        pytest.fail("the test left behind:\n" + "\n".join(left), pytrace=False)


def _wait_until_empty(look: Callable[[], list[str]]) -> list[str]:
    """Look again until nothing is left or the grace is over: what is on its way out may finish."""
    deadline = time.monotonic() + GRACE_SECONDS
    pause_seconds = 0.001
    while left := look():
        if time.monotonic() > deadline:
            return left
        gc.collect()
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.1)
    return []


def _new_threads(before: set[threading.Thread]) -> list[str]:
    frames = sys._current_frames()
    return [
        f"thread {thread.name!r}, at\n{''.join(traceback.format_stack(frames[thread.ident], limit=-4))}"
        for thread in set(threading.enumerate()) - before
        if not thread.name.startswith(ALLOWED_THREADS)
        and not isinstance(thread, threading._DummyThread)  # a native pool's thread that once called Python
        and thread.ident in frames
    ]


def _child_processes() -> dict[int, str]:
    """Return the living children of this process, and those of a server of it: process id and command line."""
    multiprocessing.active_children()  # reaps those that ended
    children = _children_of("self")
    for server in [pid for pid, command in children.items() if FORK_SERVER in command]:
        children |= dict.fromkeys(_children_of(server), "forked by a server")
    return children


def _children_of(process: int | str) -> dict[int, str]:
    children = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in map(int, _read(f"/proc/{process}/task/{task}/children").split()):
                    state = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0]
                    if state != b"Z":  # Z: it ended, and only its exit status is not collected yet
                        children[pid] = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()
    return children


def _read(file: str) -> bytes:
    with open(file, "rb", buffering=0) as opened:
        return opened.read()


def _new_children(before: dict[int, str]) -> list[str]:
    return [
        f"process {pid}: {command[:200]}"
        for pid, command in _child_processes().items()
        if pid not in before and not any(name in command for name in ALLOWED_PROCESSES)
    ]


def _end_processes(processes: set[int]) -> None:
    for pid, command in _child_processes().items():
        if pid in processes and not any(name in command for name in ALLOWED_PROCESSES):
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # it is a server's
                os.waitpid(pid, 0)


def _shared_memory_files() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _new_segments(before: set[str]) -> list[str]:
    return [
        f"shared memory {SHARED_MEMORY / name}"
        for name in sorted(_shared_memory_files() - before)
        if not name.startswith("tmp")  # a temporary file of some other program, not a segment
        and not (SHARED_MEMORY / name).is_dir()  # nor is a folder
        and not _is_held_by_another_process(SHARED_MEMORY / name)
    ]


def _is_held_by_another_process(path: Path) -> bool:
    """Say whether a process that is neither this one nor its child has the file open or mapped."""
    ours = {os.getpid(), *_child_processes()}
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in ours:
            continue
        try:
            held = str(path) in (process / "maps").read_text()
            held = held or any(os.readlink(file) == str(path) for file in (process / "fd").iterdir())
        except OSError:  # it ended, or belongs to somebody else
            continue
        if held:
            return True
    return False


def _open_files() -> dict[str, str]:
    """Return the open file descriptors of this process and what they stand for, but for those to its servers."""
    files = {}
    forkserver = sys.modules.get("penstock.forkserver")
    servers = forkserver._servers if forkserver is not None else []
    kept = {str(server._requests.fileno()) for server in servers}
    for descriptor in set(os.listdir("/proc/self/fd")) - kept:
        try:
            files[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return files


def _new_files(before: dict[str, str]) -> list[str]:
    return [
        f"open file {descriptor}: {target}"
        for descriptor, target in _open_files().items()
        if before.get(descriptor) != target and not target.startswith("/dev/")
    ]


# -- Test files ----------------------------------------------------------------------------------------


def _rewrite_assertions_once(config: pytest.Config) -> None:
    """Have files that changed ready before the processes of the run start, each of which would make all ready."""
    if sys.dont_write_bytecode:
        return
    caches = {
        file: rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        for file in Path(__file__).parent.rglob("test_*.py")
    }
    changed = [
        (file, cache)
        for file, cache in caches.items()
        if not cache.exists() or cache.stat().st_mtime < file.stat().st_mtime
    ]
    processes = min(len(changed), len(os.sched_getaffinity(0)))
    children = []
    for number in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        try:
            for file, cache in changed[number::processes]:
                cache.parent.mkdir(exist_ok=True)
                source, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, cache)
        finally:
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)  # a file that cannot be made ready is an error of those processes


# -- Kernels -------------------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile ahead, once after each change of a kernel (a minute): tests expect encoded snapshots."""
    if session.config.option.processes:
        from tests.forking import Forks

        session.config.stash[FORKS_OF_ALL] = Forks()  # it imports while tests are collected
        os.environ["OMP_NUM_THREADS"] = "1"
        _rewrite_assertions_once(session.config)

    from penstock.checkpoint.codecs import ours  # noqa: F401
    from penstock.compiling import PARTS, compile_ahead
    from penstock.flow import engine  # noqa: F401
    from penstock.flow.cpus import most_compilers
    from penstock.loader import prediction  # noqa: F401
    from penstock.loader.transforms import compiled  # noqa: F401
    from penstock.store import files  # noqa: F401

    compile_ahead(PARTS, most_compilers(), lambda part: None)


# -- Catalogs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _no_catalog_is_kept() -> Iterator[None]:
    """Leave the user's catalogs alone: a test that wants one gives it a folder."""
    from penstock.cache_folders import Folders
    from penstock.store import catalogs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogs, "_folders", lambda: Folders((), None, ""))
        yield


# -- Threads -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _loaders_have_few_readers() -> None:
    from tests.few_readers import start_few_readers

    start_few_readers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (forks := session.config.stash.get(FORKS_OF_ALL, None)) is not None:
        forks.close()


# -- A skip needs a reason on the list -----------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PENSTOCK_FAIL_ON_SKIP") == "1":
        config.pluginmanager.register(_SkipGuard(), "penstock-skip-guard")


class _SkipGuard:
    """Fail the run when a test is skipped that tests/skips.txt does not list."""

    def __init__(self) -> None:
        self._allowed = _read_skips(SKIPS_FILE.read_text("utf-8"))
        self._unlisted: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if not any(fnmatchcase(report.nodeid, pattern) for pattern in self._allowed):
            self._unlisted.append(report.nodeid)
            report.outcome = "failed"  # so that a second run of what failed is of it, too

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unlisted:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unlisted:
            terminalreporter.section("skipped, but not listed in tests/skips.txt: the run fails", red=True)
        for node_id in self._unlisted:
            terminalreporter.write_line(node_id)


def _read_skips(text: str) -> list[str]:
    """Return the patterns of the list; brackets in a node id stand for themselves."""
    patterns = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        node_id, separator, reason = line.partition(": ")
        if not separator or not reason.strip():
            raise pytest.UsageError(f"{SKIPS_FILE.name}: {line!r} gives no reason; write 'node id: reason'")
        patterns.append(node_id.strip().replace("[", "[[]"))
    return patterns


# -- Data ----------------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes JPEG files `root/class/0000.jpg ...` and returns the root.

    image_folder(images=12, classes=("cat", "dog"), width=64, height=48, quality=90, name="images"):
    images: how many files, dealt to the classes in turn. Their pixels follow from their number alone.
    """

    def write(
        images: int = 12,
        classes: tuple[str, ...] = ("cat", "dog"),
        width: int = 64,
        height: int = 48,
        quality: int = 90,
        name: str = "images",
    ) -> Path:
        root = tmp_path / name
        for number in range(images):
            file = root / classes[number % len(classes)] / f"{number:04d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_picture(number, width, height, quality))
        return root

    return write


@functools.cache
def _picture(number: int, width: int, height: int, quality: int) -> bytes:
    """Return a JPEG file; hundreds of tests begin with the same few."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(_pixels(number, width, height)).save(file, "JPEG", quality=quality)
    return file.getvalue()


def _pixels(number: int, width: int, height: int) -> NDArray[np.uint8]:
    """Return uint8[height, width, 3], a smooth picture with a little noise, as photographs have."""
    generator = np.random.default_rng(number)
    phase = generator.uniform(0, 2 * np.pi, 3)
    rows, columns = np.arange(height)[:, None, None], np.arange(width)[None, :, None]
    waves = np.sin(rows / 7 + columns / 11 + phase)
    noise = generator.normal(0, 6, (height, width, 3))
    return np.clip(127 + 90 * waves + noise, 0, 255).astype(np.uint8)
