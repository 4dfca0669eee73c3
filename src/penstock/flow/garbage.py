"""Python's garbage collector kept away from work that makes many objects and no garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def no_collection(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Have no garbage looked for while a function works, on any thread. A decorator.

    For work of milliseconds whose many objects go by themselves: after every few hundred of them the collector looks at
    the young ones, and then and again at all that the process has, which takes 0.15 s once PyTorch is loaded.
    """

    @functools.wraps(function)
    def without(*arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        if not gc.isenabled():
            return function(*arguments, **named)
        gc.disable()
        try:
            return function(*arguments, **named)
        finally:
            gc.enable()

    return without
