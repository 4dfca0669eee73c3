"""Many cases in one test.

A test of its own costs 5 ms, even if it does nothing: each process of the tests collects it, and one sets it up, looks
what it left and reports it in three messages. Most cases take less.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(
    names: str | Sequence[str], values: Iterable[Any], *, ids: Sequence[str] | None = None
) -> Callable[[Test], Test]:
    """Run a test with each of the values, as `pytest.mark.parametrize` makes tests of their own of them.

    What is raised has a note with the case. A case that takes a `tmp_path` has a folder of its own in it; other
    fixtures are shared.
    """
    is_bare = isinstance(names, str) and "," not in names
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = []
    for number, value in enumerate(values):
        name = ids[number] if ids else None
        if not isinstance(value, type(pytest.param())):
            value = pytest.param(*([value] if is_bare else value), id=name)
        assert not value.marks, f"{value}: a case has no marks of its own, make it a test"
        cases.append((value.id, dict(zip(names, value.values, strict=True))))
    assert cases, "no cases: the test would pass without having run"

    def of_all(test: Test) -> Test:
        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in names]

        @functools.wraps(test)
        def run(*arguments: Any, tmp_path: Path | None = None, **fixtures: Any) -> None:
            for number, (name, case) in enumerate(cases):
                if tmp_path is not None:
                    fixtures["tmp_path"] = tmp_path / str(number)
                    fixtures["tmp_path"].mkdir()
                try:
                    test(*arguments, **case, **fixtures)
                except pytest.skip.Exception as skipped:
                    raise AssertionError("it would skip all cases: a test of its own may be") from skipped
                except BaseException as error:
                    error.add_note(f"case {number}: {case if name is None else name}")
                    raise

        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return of_all
