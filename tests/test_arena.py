"""Memory of slots and tiers, in one process and in two."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.arena import Arena
from penstock.errors import ClosedError, ConfigError
from penstock.flow.staging import Field, StagingBuffer

#: Attaches a descriptor, checks its content, writes into it, and reads a line before it ends.
CHILD = """
import socket, sys
from penstock.arena import Arena
descriptor = int(sys.argv[1])
if len(sys.argv) > 2:
    with socket.socket(fileno=descriptor) as end:
        _, (descriptor,), _, _ = socket.recv_fds(end, 1, 1)
with Arena.attach(descriptor) as arena:
    print(arena.nbytes, bytes(arena.array[:5]).decode(), flush=True)
    arena.array[-4:] = list(b"back")
    print("wrote", flush=True)
    sys.stdin.readline()
"""


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def child(descriptor: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(descriptor), *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with Arena(100_000, is_shared=request.param) as made:
        yield made


def test_it_is_zeros_that_can_be_written(arena: Arena) -> None:
    assert arena.array.dtype == np.uint8
    assert arena.array.shape == (arena.nbytes,) == (100_000,)
    assert not arena.array.any()

    arena.array[99_999] = 7

    assert arena.array.sum() == 7


def test_a_view_outlives_it_and_use_after_close_is_an_error(arena: Arena) -> None:
    view = arena.array[10:20]
    view[:] = 3

    arena.close()
    arena.close()

    assert view.tolist() == [3] * 10
    with pytest.raises(ClosedError):
        _ = arena.array
    with pytest.raises(ClosedError):
        _ = arena.nbytes


@pytest.mark.parametrize("is_shared", [False, True])
def test_sizes_that_cannot_be_are_refused(is_shared: bool) -> None:
    before = open_descriptors()

    for nbytes in (0, -1):
        with pytest.raises(ConfigError, match=f"nbytes is {nbytes}"):
            Arena(nbytes, is_shared=is_shared)
    for nbytes in (2**62, 2**70):
        with pytest.raises(ConfigError, match="more than can be mapped"):
            Arena(nbytes, is_shared=is_shared)

    assert open_descriptors() == before


def test_only_a_shared_one_has_a_descriptor_and_until_it_is_closed() -> None:
    before = open_descriptors()
    with Arena(10) as private, pytest.raises(ConfigError, match="is_shared=True"):
        _ = private.descriptor
    shared = Arena(10, is_shared=True)
    assert (private.is_shared, shared.is_shared) == (False, True)
    assert not os.get_inheritable(shared.descriptor)

    shared.close()

    with pytest.raises(ClosedError):
        _ = shared.descriptor
    gc.collect()
    assert open_descriptors() == before


def test_one_that_nobody_closed_leaves_no_descriptor() -> None:
    before = open_descriptors()
    forgotten = Arena(10, is_shared=True)

    del forgotten
    gc.collect()

    assert open_descriptors() == before


@pytest.mark.parametrize("is_sent", [False, True], ids=["inherited", "sent"])
def test_another_process_sees_what_was_written_and_writes(is_sent: bool) -> None:
    with Arena(50_000, is_shared=True) as arena, contextlib.ExitStack() as stack:
        arena.array[:5] = list(b"hello")
        descriptor, words = arena.descriptor, list[str]()
        if is_sent:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            socket.send_fds(ours, [b"."], [arena.descriptor])
            descriptor, words = theirs.fileno(), ["sent"]

        with child(descriptor, *words) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "50000 hello\n"
            assert process.stdout.readline() == "wrote\n"
            assert bytes(arena.array[-4:]) == b"back"
            process.kill()

        assert process.returncode == -signal.SIGKILL
        assert bytes(arena.array[-4:]) == b"back"


#: Attaches the descriptors of two slots, fills the second with what is in the first, backwards.
WORKER = """
import sys
import numpy as np
from penstock.arena import Arena
from penstock.flow.staging import Field, slot_arrays, slot_begin
fields = (Field("images", (3, 5), np.dtype("f4")), Field("labels", (), np.dtype("i8")))
arena = Arena.attach(int(sys.argv[1]))
first, second = (
    slot_arrays(arena.mapping, fields, 4, 4, slot_begin(fields, 4, slot)) for slot in map(int, sys.argv[2:])
)
for ours, theirs in zip(first, second):
    theirs[:] = ours[::-1]
"""


FIELDS = (Field("images", (3, 5), np.dtype("f4")), Field("labels", (), np.dtype("i8")))


def test_another_process_reads_a_slot_and_fills_one() -> None:
    staging = StagingBuffer(FIELDS, 4, 10_000, is_shared=True)
    slots = [staging.grow(), staging.grow()]
    images, labels = staging.arrays(slots[0])
    images[:] = np.arange(60).reshape(4, 3, 5)
    labels[:] = [7, 8, 9, 10]
    assert staging.arena is not None

    subprocess.run(
        [sys.executable, "-c", WORKER, str(staging.arena.descriptor), *map(str, slots)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=[staging.arena.descriptor],
        check=True,
    )

    found, last = staging.lend(slots[1], 3, lambda reference: None)
    assert np.array_equal(found, np.arange(60).reshape(4, 3, 5)[:0:-1])
    assert last.tolist() == [10, 9, 8]


def test_any_number_of_shared_slots_has_one_descriptor_and_views_of_an_arena_keep_none() -> None:
    before = open_descriptors()
    staging = StagingBuffer(FIELDS, 4, 1 << 20, is_shared=True)
    while staging.can_grow:
        staging.grow()
    assert len(staging) == (1 << 20) // staging.slot_bytes > 1000

    assert len(open_descriptors() - before) == 1

    (lent, _) = staging.lend(0, 4, lambda reference: None)
    staging.close()

    assert open_descriptors() == before
    assert lent.shape == (4, 3, 5)


def resident_bytes(arena: Arena) -> int:
    """Return what the kernel has given to an arena's file."""
    return os.fstat(arena.descriptor).st_blocks * 512


def test_a_slot_that_is_used_no_more_and_all_that_nobody_refers_to_at_the_end_give_their_pages_back() -> None:
    rows = Field("rows", (1 << 16,), np.dtype(np.uint8))
    beside = Beside()
    staging = StagingBuffer((rows,), 4, 1 << 20, is_shared=True, beside=beside)
    for slot in (staging.grow(), staging.grow(), staging.grow()):
        staging.arrays(slot)[0][:] = 5
    assert staging.arena is not None
    with Arena.attach(os.dup(staging.arena.descriptor)) as arena:
        assert resident_bytes(arena) == 3 << 18
        beside.held_bytes = 1 << 20

        assert staging.retire(1, least=1)

        assert resident_bytes(arena) == 2 << 18
        (lent,) = staging.lend(2, 4, lambda reference: None)

        staging.close()

        assert resident_bytes(arena) == 1 << 18
        assert (lent == 5).all()


class Beside:
    """What batches have beside their slots."""

    held_bytes = 0

    def drop(self, slot: int) -> None:
        """Keep it."""

    def close(self) -> None:
        """Nothing is kept to use again."""


def test_nobody_can_shorten_one_that_others_map() -> None:
    """Whoever touches what was cut off is killed by a signal."""
    with Arena(10_000, is_shared=True) as arena:
        for nbytes in (1, 20_000):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.descriptor, nbytes)


def test_a_descriptor_of_something_else_is_refused_and_closed() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)

    for descriptor in (read_end, loose):
        with pytest.raises(ConfigError, match=f"descriptor {descriptor} is not that of a shared arena"):
            Arena.attach(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    with pytest.raises(ConfigError, match="is not that of a shared arena"):
        Arena.attach(read_end)


def test_where_no_more_files_may_be_open_is_said() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, open_descriptors()))
    held = [os.dup(0) for _ in range(highest + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ConfigError, match="Too many open files"):
            Arena(10, is_shared=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_a_forked_process_shares_only_a_shared_one() -> None:
    with Arena(10) as private, Arena(10, is_shared=True) as shared:
        if (pid := os.fork()) == 0:
            private.array[0] = shared.array[0] = 1
            os._exit(0)
        os.waitpid(pid, 0)

        assert (private.array[0], shared.array[0]) == (0, 1)
