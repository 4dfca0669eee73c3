"""The code of a user's functions is named, and compared by what it does, without a look at what it uses."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each

from penstock.loader.user_code import digest_of_code, name_of_code

SOURCE = """
import functools
import user_package.sub as sub
import other_package

VALUE = VARIABLE

class Unlooked:
    def __getattribute__(self, name): raise AssertionError(name)

lazy = Unlooked()
made = (lambda: (lambda index: VARIABLE))()

def helper(index): return index + HELPER

@functools.lru_cache
def cached(index): return index + CACHED

def decorated(function):
    @functools.wraps(function)
    def call(index): return function(index) + DECORATOR
    return call

@decorated
def make(index, default=VARIABLE):
    lazy, made, VALUE
    parts = [helper(each) + INNER for each in [index]]
    return parts, cached(index), sub.scaled(index), other_package.scaled(index), index in {1, 2}

class Kind:
    def __init__(self): self.value = VALUE
    def __call__(self, index): return helper(index) + CALLED
    def __reduce__(self): raise AssertionError("pickled")

class Inheriting(Kind):
    pass
"""
USED = ("HELPER", "CACHED", "DECORATOR", "INNER", "SUB")
UNUSED = ("VARIABLE", "CALLED", "OTHER")


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the digest of what a name is in SOURCE, whose words are numbers; those given are others than usual."""

    def module(name: str, source: str, words: dict[str, int]) -> dict[str, Any]:
        for word in (*USED, *UNUSED):
            source = source.replace(word, str(words.get(word, 1)))
        made = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(source, vars(made))
        return vars(made)

    def digest(name: str, change: Any = lambda found: found, before: str = "", **words: int) -> str:
        for package in ("user_package", "other_package"):
            word = "SUB" if package == "user_package" else "OTHER"
            source = f"def scaled(index): return index * {word}"
            sub = module(f"{package}.sub", source, words)
            top = types.ModuleType(package)
            top.sub, top.scaled = sys.modules[f"{package}.sub"], sub["scaled"]  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, package, top)
        found = module("user_package.data", before + SOURCE, words)[name]
        return digest_of_code(change(found))

    return digest


@for_each("word", USED)
def test_the_code_of_functions_that_a_function_names_counts(code: Any, word: str) -> None:
    assert code("make", **{word: 7}) != code("make")


@for_each("word", UNUSED)
def test_values_lines_and_other_packages_do_not_count(code: Any, word: str) -> None:
    assert code("make", **{word: 7}) == code("make") == code("make", before="# a comment\n\n")


def test_of_an_object_its_call_counts_and_the_name_of_its_class(code: Any) -> None:
    for name in ("Kind", "Inheriting"):
        own = code(name, lambda kind: kind())
        assert code(name, lambda kind: kind(), VARIABLE=7) == own
        assert (
            len({code(name, lambda kind: kind(), **{word: 7}) for word in ("HELPER", "CALLED")} | {own}) == 3
        )
    assert code("Kind", lambda kind: kind()) != code("Inheriting", lambda kind: kind())
    assert code("Kind", lambda kind: kind().__call__, CALLED=7) != code("Kind", lambda kind: kind().__call__)


class Module(torch.nn.Module):
    def forward(self, index: Any) -> Any:
        return index


class Named:
    def __call__(self, index: Any) -> Any:
        return index


def test_what_has_no_code_of_its_own_counts_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (len, dict, np.negative, np.sqrt, Module(), torch.nn.Identity(), Named)
    assert len(set(map(digest_of_code, functions))) == 7
    assert digest_of_code(functools.partial(functools.partial(max, 1), 2)) == digest_of_code(max)

    before, later = digest_of_code(Module()), lambda module, index: module.forward(index)
    later.__module__ = torch.nn.Module.__module__
    monkeypatch.setattr(torch.nn.Module, "__call__", later)  # as another PyTorch has it
    assert digest_of_code(Module()) == before


def test_the_order_of_a_set_does_not_count() -> None:
    def function(index: int) -> bool:
        return index in {0, 8}

    def digest(*numbers: int) -> str:
        consts = tuple(frozenset(numbers) if type(each) is frozenset else each for each in consts_before)
        function.__code__ = function.__code__.replace(co_consts=consts)
        return digest_of_code(function)

    consts_before = function.__code__.co_consts
    assert digest(0, 8) == digest(8, 0)
    assert digest(0, 8) != digest(0, 9)


def test_an_object_is_named_by_its_class_and_the_place_of_its_own_call() -> None:
    line = Named.__call__.__code__.co_firstlineno
    assert name_of_code(Named()) == f"{__name__}.Named ({__file__}:{line})"
    assert name_of_code(functools.partial(Named(), 1), with_folder=False) == (
        f"{__name__}.Named (test_user_code.py:{line})"
    )
    assert name_of_code(Module()) == f"{__name__}.Module"
    assert name_of_code(len) == "builtins.len"
