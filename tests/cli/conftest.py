"""Every document that a command prints as JSON in these tests uses one word for each concept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.words import OTHER_WORDS_OF_JSON

from penstock.cli import output


@pytest.fixture(autouse=True)
def _documents_use_one_word_for_each_concept(monkeypatch: pytest.MonkeyPatch) -> None:
    def dumps(document: Any, **options: Any) -> str:
        assert "results" in document, f"the list of results has another name: {list(document)}"
        assert OTHER_WORDS_OF_JSON.isdisjoint(words := set(_keys(document))), words & OTHER_WORDS_OF_JSON
        return json.dumps(document, **options)

    monkeypatch.setattr(output, "json", SimpleNamespace(dumps=dumps))


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(each)
