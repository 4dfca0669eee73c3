"""Files of local disks mapped into memory, and what keeps one that is cut off meanwhile from ending the process.

Whoever touches a page of a mapping whose file has become shorter, or whose disk fails, gets SIGBUS, which ends the
process. While mappings exist, a handler of machine code answers that signal: it looks up the address in a table, puts a
page of zeros there, and marks the mapping as damaged:

    thread   copy ... fault ─┐                 ┌─> copy ... `is_intact`? no: read the samples again from the file
    handler                  └─ mark, map zeros ┘   (an address that is none of ours: the handler that was there before)

So samples of a mapping may be used if it `is_intact` after they were copied, and not otherwise.

Decided in docs/decisions/0026-mapped-files.md.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.machine_code import target_machine

#: Of one process, over all data sets. The handler looks through all of them.
_MOST_MAPPINGS = 1024
#: statfs(2): types of file systems whose files no other host can cut off, and which answer from memory or a disk.
_LOCAL_TYPES = frozenset(
    (0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E, 0x858458F6)
    # ext2 to ext4, XFS, Btrfs, tmpfs, overlay, F2FS, ZFS, bcachefs, ramfs
)
#: <asm/signal.h>, <sys/mman.h>: the same on x86-64 and ARM64.
_SA_SIGINFO, _SA_ONSTACK = 0x4, 0x08000000
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

# The C library, and the same called with the interpreter's lock held: these calls take less than having it back would.
_c = ctypes.PyDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_c.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


class _SigAction(ctypes.Structure):
    """`struct sigaction` of glibc and musl on machines of 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


#: The handler. siginfo_t: si_code at 8, above 0 where the kernel reports a fault; si_addr at 16.
_HANDLER = f"""
@ranges = global [{3 * _MOST_MAPPINGS} x i64] zeroinitializer, align 8
@before = global [{ctypes.sizeof(_SigAction)} x i8] zeroinitializer, align 8
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @raise(i32)

define void @answer(i32 %number, ptr %info, ptr %context) {{
  %code_at = getelementptr i8, ptr %info, i64 8
  %code = load i32, ptr %code_at
  %is_fault = icmp sgt i32 %code, 0
  %address_at = getelementptr i8, ptr %info, i64 16
  %address = load i64, ptr %address_at
  br i1 %is_fault, label %look, label %foreign
look:
  %k = phi i64 [ 0, %0 ], [ %following, %next ]
  %begin_at = getelementptr i64, ptr @ranges, i64 %k
  %end_at = getelementptr i64, ptr %begin_at, i64 1
  %begin = load atomic i64, ptr %begin_at acquire, align 8
  %end = load atomic i64, ptr %end_at acquire, align 8
  %is_behind = icmp uge i64 %address, %begin
  %is_before = icmp ult i64 %address, %end
  %is_inside = and i1 %is_behind, %is_before
  br i1 %is_inside, label %ours, label %next
next:
  %following = add i64 %k, 3
  %is_last = icmp eq i64 %following, {3 * _MOST_MAPPINGS}
  br i1 %is_last, label %foreign, label %look
ours:
  %mark = getelementptr i64, ptr %begin_at, i64 2
  store atomic i64 1, ptr %mark seq_cst, align 8
  %page = and i64 %address, -{mmap.PAGESIZE}
  %page_at = inttoptr i64 %page to ptr
  %got = call ptr @mmap(ptr %page_at, i64 {mmap.PAGESIZE}, i32 {mmap.PROT_READ}, i32 {
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
}, i32 -1, i64 0)
  %is_there = icmp eq ptr %got, %page_at
  br i1 %is_there, label %done, label %foreign
foreign:
  %handler = load ptr, ptr @before
  %is_call = icmp ugt ptr %handler, inttoptr (i64 1 to ptr)
  br i1 %is_call, label %call, label %default
call:
  %flags_at = getelementptr i8, ptr @before, i64 {_SigAction.flags.offset}
  %flags = load i32, ptr %flags_at
  %wanted = and i32 %flags, {_SA_SIGINFO}
  %takes_info = icmp ne i32 %wanted, 0
  br i1 %takes_info, label %call_3, label %call_1
call_3:
  call void %handler(i32 %number, ptr %info, ptr %context)
  br label %done
call_1:
  call void %handler(i32 %number)
  br label %done
default:
  %_ = call i32 @sigaction(i32 %number, ptr @before, ptr null)
  br i1 %is_fault, label %done, label %again
again:
  %__ = call i32 @raise(i32 %number)
  br label %done
done:
  ret void
}}
"""


class _Handler(NamedTuple):
    """The handler in this process's memory.

    address: of its code. before: what was there when it was installed. ranges: int64[mappings, 3], begin, end, and
        whether a page of it was replaced; 0 and 0 for one that is not used. engine: has the code.
    """

    address: int
    before: _SigAction
    ranges: NDArray[np.int64]
    engine: Any


@functools.cache
def _handler() -> _Handler:
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(_HANDLER), target_machine())
    engine.finalize_object()
    table: Any = (ctypes.c_int64 * (3 * _MOST_MAPPINGS)).from_address(
        engine.get_global_value_address("ranges")
    )
    ranges = np.frombuffer(table, np.int64).reshape(-1, 3)
    before = _SigAction.from_address(engine.get_global_value_address("before"))
    return _Handler(engine.get_function_address("answer"), before, ranges, engine)


#: Guards which entries of the table are taken, and installing the handler. Reentrant: a collected data set unmaps.
_lock = threading.RLock()
_taken: set[int] = set()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def is_guarded() -> bool:
    """Return whether our handler would answer this thread.

    Somebody may have installed another one since; and where a thread blocks the signal, a fault ends the process.
    """
    blocked = (ctypes.c_uint64 * 16)()  # `sigset_t`: a bit for each signal, from number 1 on
    _c.pthread_sigmask(signal.SIG_BLOCK, None, blocked)
    return not blocked[0] >> (signal.SIGBUS - 1) & 1 and _is_installed()


def _is_installed() -> bool:
    now = _SigAction()
    _c.sigaction(signal.SIGBUS, None, ctypes.byref(now))
    return bool(now.handler == _handler().address)


class Mapping:
    """A file mapped read-only; made by `map_file`. address: of the first of its bytes."""

    def __init__(self, address: int, nbytes: int, entry: int) -> None:
        self.address, self.nbytes, self._entry = address, nbytes, entry

    @property
    def is_intact(self) -> bool:
        """Whether all that was read from it so far was there."""
        return not _handler().ranges[self._entry, 2]

    def close(self) -> None:
        """Unmap it. Nobody may be reading from it."""
        with _lock:
            if not self.nbytes:
                return
            _handler().ranges[self._entry] = 0
            _c.munmap(self.address, self.nbytes)
            _taken.remove(self._entry)
            self.address = self.nbytes = 0
            if not _taken and _is_installed():
                _c.sigaction(signal.SIGBUS, ctypes.byref(_handler().before), None)


def map_file(descriptor: int, nbytes: int) -> Mapping | None:
    """Map a file that is open; None where it has to be read otherwise.

    That is a file of another kind of file system than local ones; without space for it in the address space; one more
    than 1,024; and any while somebody else's handler of SIGBUS is in the place of ours.
    """
    if nbytes == 0 or _type_of(descriptor) not in _LOCAL_TYPES:
        return None
    with _lock:
        entry = next((number for number in range(_MOST_MAPPINGS) if number not in _taken), None)
        if entry is None:
            return None
        _taken.add(entry)
        address = _c.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED or not (_is_installed() or (_taken == {entry} and _install())):
            if address != _FAILED:
                _c.munmap(address, nbytes)
            _taken.remove(entry)
            return None
        _handler().ranges[entry] = address, address + nbytes, 0
    # Of samples in random order, what the kernel would read ahead is not what comes next.
    _c.madvise(address, nbytes, mmap.MADV_RANDOM)
    return Mapping(address, nbytes, entry)


def _install() -> bool:
    handler = _handler()
    _c.sigaction(signal.SIGBUS, None, ctypes.byref(handler.before))
    ours = _SigAction(handler=handler.address, flags=_SA_SIGINFO | _SA_ONSTACK)
    return bool(_c.sigaction(signal.SIGBUS, ctypes.byref(ours), None) == 0)


def _type_of(descriptor: int) -> int:
    """Return the type of a file's file system; 0 where it is not known."""
    about = (ctypes.c_long * 32)()  # `struct statfs` takes 15 of them
    return about[0] & 0xFFFFFFFF if _c.fstatfs(descriptor, about) == 0 else 0
