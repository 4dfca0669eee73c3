"""Compiling a loop with numba: without the interpreter's lock, kept on disk where a folder is writable.

Imported by modules of kernels only, which are themselves imported when first needed: it loads numba.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from llvmlite import ir
from numba import njit, types
from numba._dynfunc import make_function
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.cgutils import alloca_once, get_or_insert_function, memset
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.typed_passes import NativeLowering
from numba.extending import intrinsic
from numba.np import arrayobj

from penstock.errors import ConfigError
from penstock.kernel_cache import lasting_folder_of
from penstock.machine_code import MachineCode, Signature

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function at its first call; later processes load what was compiled, those of other checkouts, too."""
    compiled: Any = njit(nogil=True)(function)
    cache: Any = _Kept
    with suppress(RuntimeError, OSError):  # no folder can be written, or there are no sources, as in a zip
        compiled._cache = cache(function)
    result: Callable[P, R] = compiled
    return result


class _Folder(_CacheLocator):
    """Where numba keeps a kernel: with those that are compiled ahead, not next to the source, which a clone lacks."""

    def __init__(self, path: Path, source: Path, line: int) -> None:
        self._path, self._source, self._line = path, source, line
        self._py_file = str(source)  # numba names it where it warns

    @classmethod
    def from_function(cls, function: Any, file: str) -> _Folder | None:
        """Return the folder of a function; None where none can be written, or the function has no file."""
        source = Path(file)
        path = _kept_folder(function.__module__) if source.exists() else None
        return cls(path, source, function.__code__.co_firstlineno) if path else None

    def get_cache_path(self) -> str:
        return str(self._path)

    def get_source_stamp(self) -> bytes:
        return _digest(self._source)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _KeptResults(CompileResultCacheImpl):
    _locator_classes: list[type[object]] = [_Folder]  # noqa: RUF012, as numba has it


class _Kept(FunctionCache):
    _impl_class = _KeptResults

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(OSError):  # a disk that fails: it is compiled anew
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a disk or a quota that is full: the next process compiles it anew
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


@functools.cache
def _kept_folder(module: str) -> Path | None:
    return lasting_folder_of(module)


@functools.cache
def _digest(source: Path) -> bytes:
    return hashlib.sha256(source.read_bytes()).digest()


class _Linked(JITCodeLibrary):
    """A function of an entry: linked with all that it calls, and optimised with the entry alone.

    numba optimises each function together with all that it calls, and makes machine code of that: of 90 functions that
    call each other, 90 times.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def _object_code(library: Any) -> bytes:
    """Return the machine code of an entry, a `_Linked`, and of all that it calls."""
    whole: Any = super(_Linked, library)
    with global_compiler_lock:
        library._ensure_finalized()
        whole._optimize_final_module()
        library._final_module.verify()
        code: bytes = library.codegen._tm.emit_object(library._final_module)
    return code


@register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[no-untyped-call]
class _Linking(NativeLowering):
    _name = "penstock_linking"

    def run_pass(self, state: Any) -> bool:
        library: Any = _Linked
        lowering: Any = super()
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        lowering.run_pass(state)
        # numba knows a compiled function by what Python calls: as of all entries, it has no address.
        lowered = state["cr"]
        module, name = lowered.fndesc.lookup_module(), lowered.fndesc.qualname
        called = make_function(module, name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(called, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=called)
        return True


class _Compiler(CompilerBase):
    def define_pipelines(self) -> list[Any]:
        builder: Any = DefaultPassBuilder
        passes = builder.define_nopython_pipeline(self.state)
        passes.passes = [(_Linking if each is NativeLowering else each, name) for each, name in passes.passes]
        passes.finalize()
        return [passes]


#: Of functions that are called as machine code only.
_ENTRY = {
    "nogil": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "forceinline": True,
    "pipeline_class": _Compiler,
}


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel that is called as machine code only (`machine_code`), which the caller keeps."""
    options: Any = _ENTRY
    compiled: Callable[P, R] = njit(**options)(function)
    return compiled


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a small function into each kernel that calls it, where a call with many arrays would cost more."""
    compiled: Callable[P, R] = njit(nogil=True, inline="always")(function)
    return compiled


def compiled_copy(module: ModuleType, others: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a module's names, its functions ready to be compiled: each calls the others as kernels.

    others: such a copy of a module that this one imports functions from.
    The functions stay plain Python for whoever imports the module. Compiled, none of them may make an array: they count
    no references, which took three quarters of the time of functions that hand several arrays to each other. Nor is a
    division by 0 an error.
    """
    names = dict(vars(module))
    options: Any = _ENTRY | {"_nrt": False, "error_model": "numpy"}
    for name, function in vars(module).items():
        if not isinstance(function, FunctionType):
            continue
        if function.__module__ == module.__name__:
            names[name] = compiled = njit(**options)(FunctionType(function.__code__, names, name))
            compiled.get_call_template = partial(_call_template, compiled)
        else:
            names[name] = (others or {}).get(name, function)
    return names


def _call_template(function: Any, arguments: Any, named: Any) -> Any:
    """Return what a call of a function is compiled to: to one form for all signed integers.

    numba compiles a function for each of the constants that it is called with, and for each size of integers.
    """
    known: Any = types
    kinds = [known.unliteral(kind) for kind in arguments]
    wide = [known.int64 if isinstance(kind, known.Integer) and kind.signed else kind for kind in kinds]
    return type(function).get_call_template(function, tuple(wide), named)


@contextmanager
def indexed_from_zero() -> Iterator[None]:
    """Compile loops that use no negative indices: to look whether one is takes as long as the rest of an access."""

    def fixed(context: Any, builder: Any, kind: Any, index: Any, size: Any) -> Any:
        return context.cast(builder, index, kind, types.intp)

    with global_compiler_lock:
        arrays: Any = arrayobj
        before, arrays.fix_integer_index = arrays.fix_integer_index, fixed
        try:
            yield
        finally:
            arrays.fix_integer_index = before


def machine_code(function: Callable[..., Any], signature: Signature) -> MachineCode:
    """Compile a kernel as a function that is called without numba. function: made by `entry`.

    Raises: ConfigError where numba is switched off; TypeError naming what the kernel calls that a process without numba
        does not have, as what allocates an array does, and where numba's calling convention is another.
    """
    if not isinstance(function, Dispatcher):
        raise ConfigError("numba is switched off: unset NUMBA_DISABLE_JIT")
    known: Any = types

    def numba_type(kind: str | tuple[str, ...]) -> Any:
        if isinstance(kind, tuple):
            return known.Tuple([numba_type(each) for each in kind])
        item, dimensions = Signature.array_of(kind)
        return known.Array(getattr(known, item), dimensions, "C") if dimensions else getattr(known, kind)

    arguments = tuple(map(numba_type, signature.arguments))
    function.compile(arguments)
    compiled: Any = function.overloads[arguments]
    code = _object_code(compiled.library)
    name, module = compiled.fndesc.llvm_func_name, compiled.library._final_module
    needed = {each.name for each in module.functions if each.is_declaration}
    if missing := sorted(name for name in needed - _OF_THE_C_LIBRARY if not name.startswith("llvm.")):
        raise TypeError(f"{function.py_func.__name__} needs {', '.join(missing)}, which only numba has")
    (declared,) = (line for line in signature.called_by(name).splitlines() if line.startswith("declare i32"))
    expected = declared.partition("(")[2]
    if (found := str(module.get_function(name).global_value_type)) != f"i32 ({expected}":
        raise TypeError(f"this release of numba has {found} where Penstock expects i32 ({expected}")
    return MachineCode(name, code)


#: What a loop may call; `penstock.machine_code` has the last one.
_OF_THE_C_LIBRARY = frozenset(
    ["memset", "memcpy", "memmove", "log2", "sqrt", "exp", "open", "preadv", "close", "NRT_MemInfo_call_dtor"]
)


def c_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return how a loop calls a function of the C library whose number of arguments is fixed.

    result, arguments: numba's types; an address is an `intp`.
    """
    known: Any = types
    function: Callable[..., Any] = known.ExternalFunction(name, result(*arguments))
    return function


def function_at(*bits: int) -> Callable[..., int]:
    """Return how a loop calls a function of C by its address: `call(address, (number, ...))`, which returns an int.

    bits: of each argument, 64 or, for an int, 32.
    """
    known: Any = types

    def call(typing: Any, address: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = [
                context.cast(
                    builder, builder.extract_value(arguments[1], place), kind, getattr(known, f"int{size}")
                )
                for place, (kind, size) in enumerate(zip(numbers, bits, strict=True))
            ]
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(size) for size in bits])
            return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), words)

        return known.int32(known.int64, numbers), generate

    function: Callable[..., int] = intrinsic(call)
    return function


def _open_file(typing: Any, path: Any, flags: Any) -> Any:
    known: Any = types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, text = ir.IntType(32), ir.IntType(8).as_pointer()
        # Variable arguments: some processors pass them otherwise than those of a prototype.
        kind = ir.FunctionType(number, [text, number], var_arg=True)
        function: Any = get_or_insert_function(builder.module, kind, "open")  # type: ignore[no-untyped-call]
        return builder.call(function, [builder.inttoptr(arguments[0], text), arguments[1]])

    return known.int32(known.intp, known.int32), generate


#: The C library's `open(path, flags)`; path: address of bytes closed by a NUL.
open_file: Callable[..., int] = intrinsic(_open_file)


def _bare_array(context: Any, builder: Any, kind: Any, address: Any, shape: list[Any]) -> Any:
    """Return a C-contiguous array whose memory somebody else owns."""
    array = context.make_array(kind)(context, builder)
    item = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
    strides = [item]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.bitcast(address, context.get_data_type(kind.dtype).as_pointer())
    context.populate_array(
        array, data=data, shape=shape, strides=strides, itemsize=item, meminfo=None, parent=None
    )
    return array._getvalue()


def _array_at(typing: Any, address: Any, shape: Any, dtype: Any) -> Any:
    known: Any = types
    kind = known.Array(dtype.dtype, len(shape), "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lengths = [builder.extract_value(arguments[1], i) for i in range(len(shape))]
        place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return _bare_array(context, builder, kind, place, lengths)

    return kind(address, shape, dtype), generate


def _stack_zeros(typing: Any, dtype: Any, length: Any) -> Any:
    known: Any = types
    kind = known.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        space = ir.Constant(ir.IntType(64), length.literal_value)
        place: Any = alloca_once(builder, context.get_data_type(dtype.dtype), size=space)  # type: ignore[no-untyped-call]
        nbytes = ir.Constant(ir.IntType(64), length.literal_value * dtype.dtype.bitwidth // 8)
        memset(builder, place, nbytes, 0)  # type: ignore[no-untyped-call]
        return _bare_array(context, builder, kind, place, [space])

    return kind(dtype, length), generate


#: Return a C-contiguous array of a shape and dtype at an address.
array_at: Callable[..., Any] = intrinsic(_array_at)
#: Return zeros of a dtype and a constant length. The array ends with the kernel that calls this, which must not return
#: it: it is on the stack, where numba's own arrays need numba.
stack_zeros: Callable[..., Any] = intrinsic(prefer_literal=True)(_stack_zeros)


#: A line of the caches of today's processors, which load and store memory by the line.
LINE_BYTES = 64
_BYTES_AT, _LINE = ir.IntType(8).as_pointer(), ir.VectorType(ir.IntType(64), LINE_BYTES // 8)


def _load_ahead(typing: Any, address: Any) -> Any:
    known: Any = types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES_AT, number, number, number])
        function: Any = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        # To read it; into all levels; data.
        builder.call(
            function, [builder.inttoptr(arguments[0], _BYTES_AT), *(number(value) for value in (0, 3, 1))]
        )
        return context.get_dummy_value()

    return known.void(known.intp), generate


def _copy_line_past_caches(typing: Any, target: Any, source: Any) -> Any:
    known: Any = types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        into, out_of = (builder.inttoptr(each, _LINE.as_pointer()) for each in arguments)
        store = builder.store(builder.load(out_of, align=1), into, align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return known.void(known.intp, known.intp), generate


def _fence(typing: Any) -> Any:
    known: Any = types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return known.void(), generate


#: Begin to load the line of an address into the caches. It may be any address: none faults.
load_ahead: Callable[..., None] = intrinsic(_load_ahead)
#: Copy LINE_BYTES from any address to a multiple of LINE_BYTES, which the caches do not get: `(target, source)`. Other
#: threads may see it only after a `fence`.
copy_line_past_caches: Callable[..., None] = intrinsic(_copy_line_past_caches)
#: Have all that was stored before seen before what is stored after.
fence: Callable[..., None] = intrinsic(_fence)


def _import_without_scipy() -> None:
    """Import the module of numba that imports scipy.linalg only to learn whether there is BLAS.

    0.25 of the 1.0 s that it takes to import numba and load a kernel. numba looks again when BLAS is used.
    """
    if "numba.np.arraymath" in sys.modules or importlib.util.find_spec("scipy") is None:
        return
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas, linalg.ensure_blas = linalg.ensure_blas, lambda: None
    try:
        arraymath: Any = importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas
    arraymath.ensure_blas = ensure_blas


_import_without_scipy()
