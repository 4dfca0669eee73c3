"""Compiling a loop."""

import errno
import os
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import pytest
from numba import types
from numba.core import codegen
from numba.core.caching import IndexDataCacheFile
from numpy.typing import NDArray

from penstock import kernel as kernel_module
from penstock.errors import ConfigError
from penstock.machine_code import Loop, MachineCode, Signature


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_kernel_is_compiled_once_for_all_checkouts_or_anew_where_no_folder_can_keep_it(
    is_writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkout has the same sources in another folder."""
    kept = tmp_path if is_writable else None
    monkeypatch.setattr(kernel_module, "_kept_folder", lambda module: kept)
    found = []
    for checkout, change in (("one", ""), ("another", ""), ("changed", "2 * ")):
        source = tmp_path / checkout / "kernels_of_a_test.py"
        source.parent.mkdir()
        source.write_text(
            f"from penstock.kernel import kernel\n\n\n@kernel\ndef after(value):\n    return {change}value + 1\n"
        )
        after = runpy.run_path(str(source))["after"]
        found.append((after(3), sum(after.stats.cache_hits.values())))

    assert found == [(4, 0), (4, int(is_writable)), (7, 0)]


@pytest.mark.parametrize("fails", ["load", "save"])
def test_a_disk_that_is_full_or_fails_leaves_a_kernel_compiled(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(kernel_module, "_kept_folder", lambda module: tmp_path)
    monkeypatch.setattr(IndexDataCacheFile, fails, refuse)

    @kernel_module.kernel
    def after(value: int) -> int:
        return value + 1

    assert after(3) == 4


def test_a_kernel_is_compiled_where_the_sources_are_no_files(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "all.zip", "w") as packed:
        sources = Path(kernel_module.__file__).parent
        for file in sources.rglob("*.py"):
            packed.write(file, Path("penstock", file.relative_to(sources)))
        packed.writestr(
            "kernels_of_a_test.py",
            "from penstock.kernel import kernel\n\n\n@kernel\ndef after(value):\n    return value + 1\n",
        )
    program = "import penstock, kernels_of_a_test as test; print(penstock.__file__, test.after(3))"

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "all.zip")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert ended.stdout.split() == [str(tmp_path / "all.zip" / "penstock" / "__init__.py"), "4"]


def test_a_function_is_compiled_into_the_kernel_that_calls_it() -> None:
    @kernel_module.inlined
    def doubled(value: int) -> int:
        return 2 * value

    @kernel_module.kernel
    def summed(values: NDArray[np.int64]) -> int:
        total = 0
        for value in values:
            total += doubled(value)
        return total

    assert summed(np.arange(4)) == 12


@pytest.mark.slow  # imports SciPy in the end
def test_a_kernel_needs_no_scipy_and_other_compiled_functions_find_it() -> None:
    """Where SciPy is installed, numba imports scipy.linalg for a kernel that has nothing to do with it: 0.25 s."""
    program = """
import sys
import numpy as np
from numba import njit
from penstock.kernel import kernel
assert kernel(lambda value: value + 1)(1) == 2
print(any(name.startswith("scipy.linalg") for name in sys.modules))
print(njit(lambda values: np.dot(values, values))(2 * np.eye(2)).tolist())
"""

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines() == ["False", "[[4.0, 0.0], [0.0, 4.0]]"]


@kernel_module.entry
def _scaled(values: Any, place: Any, is_doubled: bool, out: Any) -> tuple[int, float]:
    row, factor = place
    total = 0
    for column in range(values.shape[1]):
        out[column] = values[row, column] * (2 * factor if is_doubled else factor)
        total += values[row, column]
    return total, factor


SCALED = Signature(
    ("int32[:, :]", ("int64", "float64"), "boolean", "float64[:]"), results=("int64", "float64")
)


@pytest.fixture(scope="module")
def scaled() -> Loop:
    code = MachineCode.from_bytes(kernel_module.machine_code(_scaled, SCALED).to_bytes())
    assert code is not None
    return Loop(code, SCALED)


class TestMachineCode:
    @pytest.mark.parametrize("is_doubled", [False, True])
    @pytest.mark.parametrize("bound", [0, 1, 3, 4])
    @pytest.mark.parametrize("how", ["bound", "bound_and_short"])
    def test_it_takes_arrays_tuples_and_numbers_and_returns_numbers(
        self, scaled: Loop, is_doubled: bool, bound: int, how: str
    ) -> None:
        """All at once, or some of them beforehand."""
        values = np.arange(12, dtype=np.int32).reshape(3, 4)
        values.flags.writeable = False
        out = np.zeros(4)

        arguments = (values, (np.int64(2), 0.5), np.bool_(is_doubled), out)
        loop = getattr(scaled, how)(*arguments[:bound]) if bound else scaled

        assert loop(*arguments[bound:]) == (8 + 9 + 10 + 11, 0.5)

        assert out.tolist() == (values[2] * (1.0 if is_doubled else 0.5)).tolist()

    @pytest.mark.parametrize(
        "values",
        [np.zeros((3, 4)), np.zeros(3, np.int32), np.array(3, np.int32), np.zeros((4, 3), np.int32).T],
        ids=str,
    )
    def test_another_kind_of_array_is_refused(self, scaled: Loop, values: NDArray[Any]) -> None:
        with pytest.raises(TypeError, match="expected"):
            scaled(values, (0, 1.0), False, np.zeros(4))

    def test_too_few_arguments_are_refused(self, scaled: Loop) -> None:
        with pytest.raises(ValueError, match="argument"):
            scaled(np.zeros((3, 4), np.int32), (0, 1.0))

    def test_what_needs_numba_when_it_runs_is_refused(self) -> None:
        @kernel_module.entry
        def allocates(size: int) -> int:
            return int(np.zeros(size).sum())

        with pytest.raises(TypeError, match="allocates needs NRT_"):
            kernel_module.machine_code(allocates, Signature(("int64",), ("int64",)))

    def test_what_fails_is_an_error(self) -> None:
        @kernel_module.entry
        def fails(size: int) -> int:
            return 1 // size

        loop = Loop(
            kernel_module.machine_code(fails, signature := Signature(("int64",), ("int64",))), signature
        )

        assert loop(1) == 1
        with pytest.raises(RuntimeError, match="status"):
            loop(0)


class _Arrays(NamedTuple):
    left: Any
    right: Any


def _is_pair(arrays: _Arrays, index: int) -> bool:
    left, right = arrays
    is_pair: bool = left[index] == 0 or right[index] == left[index]
    return is_pair


def test_the_compiled_copy_of_a_module_counts_no_references() -> None:
    """A function that takes arrays out of a tuple and has branches would: most of the time of virtual time was that."""
    is_pair: Any = kernel_module.compiled_copy(sys.modules[__name__])["_is_pair"]

    known: Any = types
    array = known.Array(known.int64, 1, "C")
    is_pair.compile((known.NamedTuple([array, array], _Arrays), known.int64))

    (assembly,) = is_pair.inspect_llvm().values()
    assert "_is_pair" in assembly
    assert "NRT_" not in assembly


def _of(values: Any, factor: int) -> int:
    product: int = factor * values[0]
    return product


def _sum(values: Any) -> int:
    return _of(values, 2) + _of(values, -3) + _of(values, values[1])


def test_the_compiled_copy_of_a_module_has_one_form_of_a_function_for_all_integers() -> None:
    """numba compiles one for each constant that it is called with, which was a third of all that was compiled."""
    copy = kernel_module.compiled_copy(sys.modules[__name__])
    known: Any = types

    copy["_sum"].compile((known.Array(known.int32, 1, "C"),))

    assert len(copy["_of"].overloads) == 1


def test_what_an_entry_calls_is_optimised_with_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba optimises each function with all that it calls: of 90 functions that call each other, 90 times."""

    @kernel_module.entry
    def called(values: Any) -> Any:
        return values[0] * values[1]

    @kernel_module.entry
    def calling(values: Any) -> Any:
        return called(values) + called(values)

    optimised: list[str] = []
    library: Any = codegen.CPUCodeLibrary
    optimise = library._optimize_final_module

    def note(each: Any) -> None:
        optimised.append(each.name)
        optimise(each)

    monkeypatch.setattr(library, "_optimize_final_module", note)
    signature = Signature(("int64[:]",), ("int64",))

    loop = Loop(kernel_module.machine_code(calling, signature), signature)

    assert loop(np.array([3, 7])) == 42
    assert [name.rpartition(".")[2] for name in optimised if "<locals>" in name] == ["calling"]


@pytest.mark.parametrize("starts_at_zero", [False, True])
def test_no_index_is_counted_from_the_end_where_a_loop_says_so(starts_at_zero: bool) -> None:
    @kernel_module.entry
    def value_at(values: Any, index: int) -> Any:
        return values[index]

    signature = Signature(("int64[:]", "int64"), ("int64",))
    with kernel_module.indexed_from_zero() if starts_at_zero else nullcontext():
        loop = Loop(kernel_module.machine_code(value_at, signature), signature)

    array = np.arange(10)
    assert loop(array[5:], 2) == 7
    # Where it starts at zero, the item before the first one: there is one in this test.
    assert loop(array[5:], -1) == (4 if starts_at_zero else 9)


def test_a_kernel_where_numba_is_switched_off_is_refused_so_that_the_plain_form_serves() -> None:
    """Its loops use what only machine code has, and would be no faster than the plain form."""
    with pytest.raises(ConfigError, match="unset NUMBA_DISABLE_JIT"):
        kernel_module.machine_code(abs, Signature(()))
