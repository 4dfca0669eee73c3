"""Machine code of loops: kept in files, loaded by llvmlite alone, called with NumPy arrays.

numba compiles a loop (`penstock.kernel.machine_code`). A process that only runs it does not import numba, which takes
half a second, but llvmlite, which takes 0.06 s. The file:

    SHA-256 of what follows (32 bytes) | name of the function in the object | newline | object (ELF)

The function takes addresses, lengths and numbers, allocates nothing, and calls nothing but the C library.

Decided in docs/decisions/0016-compiling-beside-the-training.md.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DIGEST_BYTES = 32
#: How a number is packed for a call, and its type in LLVM. Each takes eight bytes.
_PACKED = {
    "int64": ("q", "i64"),
    "uint64": ("Q", "i64"),
    "float64": ("d", "double"),
    "boolean": ("?7x", "i8"),
}
#: Where an array's fields begin in its object: address, rank, shape, strides, base, dtype, flags. `_check_layout` has
#: seen that they do. Which of these words are the address of the items, the rank, and the address of the shape, the
#: address of the dtype's object, and the flags, of which the first says that an array is contiguous.
ARRAY, DATA, DIMENSIONS, SHAPE, DESCRIPTION, FLAGS = object.__basicsize__, 0, 1, 2, 5, 6
IS_C_CONTIGUOUS = 1
#: What a call returns where an array is not C-contiguous. numba's own are below 3 or from 1,000 on.
_BAD_ARRAY = 100


@dataclass(frozen=True)
class Signature:
    """What a loop takes and returns.

    arguments: each a number ("int64", "uint64", "float64", "boolean"), a C-contiguous array ("uint8[:]",
        "float32[:, :]"), or a tuple of these.
    results: of 64 bits each; none: the loop returns None; one: the number; more: a tuple.
    """

    arguments: tuple[str | tuple[str, ...], ...]
    results: tuple[str, ...] = ()

    @staticmethod
    def array_of(kind: str) -> tuple[str, int]:
        """Return an array's dtype and how many dimensions it has: 0 for a number."""
        return kind.partition("[")[0], kind.count(":")

    def packed(self) -> str:
        """Return the format of the words that a call takes, for `struct`: of an array the address of the object."""
        words = ""
        for kind in self.arguments:
            for each in kind if isinstance(kind, tuple) else (kind,):
                words += "Q" if self.array_of(each)[1] else _PACKED[each][0]
        return words

    def called_by(self, function: str) -> str:
        """Return the assembly of a function `call(results, words)` that calls one by numba's calling convention.

        This is: where results go, where an exception would, the arguments; 0 is success. Of an array: two owners, which
        are none here, its items, their bytes, its address, shape and strides.
        """
        lines: list[str] = []
        arguments = ["ptr %results", "ptr %failure"]

        def value(text: str) -> str:
            lines.append(f"%v{len(lines)} = {text}")
            return f"%v{len(lines) - 1}"

        def loaded(kind: str, address: str, offset: int) -> str:
            at = value(f"getelementptr i8, ptr {address}, i64 {offset}")
            return value(f"load {kind}, ptr {at}")

        is_well, words = "true", 0
        for kind in self.arguments:
            for each in kind if isinstance(kind, tuple) else (kind,):
                item, dimensions = self.array_of(each)
                word = loaded("ptr" if dimensions else _PACKED[each][1], "%words", 8 * words)
                words += 1
                if not dimensions:
                    arguments.append(f"{_PACKED[each][1]} {word}")
                    continue
                # numpy/ndarraytypes.h: PyArrayObject_fields.
                data, shape_at = loaded("ptr", word, ARRAY), loaded("ptr", word, ARRAY + 8 * SHAPE)
                flag = value(f"and i32 {loaded('i32', word, ARRAY + 8 * FLAGS)}, {IS_C_CONTIGUOUS}")
                is_well = value(f"and i1 {is_well}, {value(f'icmp ne i32 {flag}, 0')}")
                shape = [loaded("i64", shape_at, 8 * axis) for axis in range(dimensions)]
                strides = [str(np.dtype(item).itemsize)]
                for length in reversed(shape[1:]):
                    strides.insert(0, value(f"mul i64 {strides[0]}, {length}"))
                size = shape[0]
                for length in shape[1:]:
                    size = value(f"mul i64 {size}, {length}")
                numbers = [size, str(np.dtype(item).itemsize)]
                arguments += ["ptr null", "ptr null", *(f"i64 {number}" for number in numbers), f"ptr {data}"]
                arguments += [f"i64 {number}" for number in (*shape, *strides)]
        kinds = ", ".join(argument.split()[0] for argument in arguments)
        body = "".join(f"  {line}\n" for line in lines)
        return f"""
declare i32 @"{function}"({kinds})
declare void @llvm.trap()
define i32 @call(ptr %results, ptr %words) {{
  %failure = alloca ptr
{body}  br i1 {is_well}, label %well, label %bad
bad:
  ret i32 {_BAD_ARRAY}
well:
  %status = call i32 @"{function}"({", ".join(arguments)})
  ret i32 %status
}}
; numba's code calls it to free an array. No loop allocates one.
define void @NRT_MemInfo_call_dtor(ptr %array) {{
  call void @llvm.trap()
  unreachable
}}
"""


@dataclass(frozen=True)
class MachineCode:
    """A function in an object file (ELF), for processors such as this machine's."""

    symbol: str
    object_code: bytes

    def to_bytes(self) -> bytes:
        """Return what `from_bytes` takes."""
        content = self.symbol.encode() + b"\n" + self.object_code
        return hashlib.sha256(content).digest() + content

    @staticmethod
    def from_bytes(data: bytes) -> MachineCode | None:
        """Return it if the bytes are all there and unchanged, else None."""
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        symbol, _, object_code = content.partition(b"\n")
        return MachineCode(symbol.decode(), object_code)


class Loop:
    """A compiled loop, called like the Python function that it was made from.

    A call holds no interpreter's lock, but for `bound_and_short`.
    """

    def __init__(self, code: MachineCode, signature: Signature) -> None:
        """Load machine code.

        Raises: RuntimeError where the object does not have the function.
        """
        from llvmlite import binding

        _check_layout()
        self._signature = signature
        #: Of each argument: None for a number, dtype and rank of an array, a list for a tuple.
        self._kinds = [_kind_of(kind) for kind in signature.arguments]
        engine = binding.create_mcjit_compiler(
            binding.parse_assembly(signature.called_by(code.symbol)), target_machine()
        )
        engine.add_object_file(binding.ObjectFileRef.from_data(code.object_code))
        engine.finalize_object()
        if not engine.get_function_address(code.symbol):
            raise RuntimeError(f"the machine code has no function {code.symbol}")
        self._engine = engine  # the code is unmapped with it
        kind = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p
        self._call = ctypes.CFUNCTYPE(*kind)(engine.get_function_address("call"))
        self._keeping_call = ctypes.PYFUNCTYPE(*kind)(engine.get_function_address("call"))
        self._pack = struct.Struct(signature.packed()).pack
        self._results = ctypes.c_int64 * max(len(signature.results), 1)
        self._unpack = struct.Struct("".join(_PACKED[kind][0] for kind in signature.results)).unpack_from

    def __call__(self, *values: Any) -> Any:
        """Run it.

        Raises: TypeError for arrays of another dtype, rank or layout; ValueError for another number of arguments.
        """
        return self._run(self._pack(*_words(values, self._kinds)), self._call)

    def bound(self, *values: Any) -> Callable[..., Any]:
        """Return a function of the arguments that follow these: what does not change is looked at once.

        Raises: as a call.
        """
        return self._bound(values, self._call)

    def bound_and_short(self, *values: Any) -> Callable[..., Any]:
        """As `bound`, but calls keep the interpreter's lock: to have it back takes longer than some microseconds."""
        return self._bound(values, self._keeping_call)

    def _bound(self, values: tuple[Any, ...], native: Callable[..., int]) -> Callable[..., Any]:
        words, kinds = _words(values, self._kinds[: len(values)]), self._kinds[len(values) :]
        first, others = (
            self._signature.arguments[part] for part in (slice(len(values)), slice(len(values), None))
        )
        kept = struct.Struct(Signature(first).packed()).pack(*words)
        pack = struct.Struct(Signature(others).packed()).pack
        run = self._run
        if not any(kinds):

            def call(*numbers: Any, _keeps: Any = values) -> Any:
                return run(kept + pack(*numbers), native)

        else:

            def call(*arrays: Any, _keeps: Any = values) -> Any:
                return run(kept + pack(*_words(arrays, kinds)), native)

        return call

    def _run(self, words: bytes, native: Callable[..., int]) -> Any:
        results = self._results()
        if status := native(results, words):
            if status == _BAD_ARRAY:
                raise TypeError(f"expected C-contiguous arrays: {self._signature.arguments}")
            raise RuntimeError(f"a loop ended with status {status}: this is a bug in Penstock")
        found: tuple[Any, ...] = self._unpack(results)
        return found if len(found) > 1 else found[0] if found else None


_Kind = tuple[np.dtype[Any], int] | None


def _kind_of(kind: str | tuple[str, ...]) -> _Kind | list[_Kind]:
    if isinstance(kind, tuple):
        return [_kind_of_one(each) for each in kind]
    return _kind_of_one(kind)


def _kind_of_one(kind: str) -> _Kind:
    item, dimensions = Signature.array_of(kind)
    return (np.dtype(item), dimensions) if dimensions else None


def _words(values: Sequence[Any], kinds: Sequence[_Kind | list[_Kind]]) -> list[Any]:
    words: list[Any] = []
    for value, kind in zip(values, kinds, strict=True):
        if kind is None:
            words.append(value)
        elif isinstance(kind, list):
            words += _words(value, kind)
        else:
            # The rank first: a call reads as many numbers of the shape.
            if not isinstance(value, np.ndarray) or (value.dtype, value.ndim) != kind:
                raise TypeError(f"expected an array of dtype and rank {kind}, not {value!r}")
            words.append(id(value))
    return words


def items_of(objects: tuple[Any, ...]) -> int:
    """Return where a tuple has the addresses of its items, one behind the other."""
    return id(objects) + tuple.__basicsize__


@functools.cache
def _check_layout() -> None:
    """Raise RuntimeError where an array's object is laid out otherwise."""
    array = np.zeros((2, 3), np.int16)[:, :2]
    whole = array.copy()
    at = id(array) + ARRAY
    found = (
        ctypes.c_uint64.from_address(at).value,
        ctypes.c_int32.from_address(at + 8).value,
        ctypes.c_int64.from_address(ctypes.c_uint64.from_address(at + 16).value).value,
        ctypes.c_uint64.from_address(at + 8 * DESCRIPTION).value,
        ctypes.c_int32.from_address(at + 8 * FLAGS).value & IS_C_CONTIGUOUS,
        ctypes.c_int32.from_address(id(whole) + ARRAY + 8 * FLAGS).value & IS_C_CONTIGUOUS,
        ctypes.c_uint64.from_address(items_of((array, whole)) + 8).value,
    )
    if found != (array.ctypes.data, 2, 2, id(array.dtype), 0, IS_C_CONTIGUOUS, id(whole)):
        raise RuntimeError(f"NumPy {np.__version__} lays out its arrays in a way that Penstock does not know")


def target_machine() -> Any:
    """Return what compiles for this processor. An engine that is made with it owns it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True)
