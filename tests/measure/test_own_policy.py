"""A policy of one's own is a small class outside of the package, called by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.measure.own_policy import find_policy
from penstock.measure.policies import run_policies
from penstock.simulate.scenario import scenario_named

OWN = """
from penstock.policy.loading import Loading

class Nothing:
    name = "nothing"

    def prepare(self, job):
        return Loading()

class Nameless:
    def prepare(self, job):
        return Loading()

class Picky:
    name = "picky"

    def __init__(self, taste):
        pass

number = 3
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loading_policy.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_loading_policy.py").write_text("class Nothing(:")
    monkeypatch.syspath_prepend(tmp_path)  # taken off again after the test


def test_one_of_ours_and_one_of_ones_own_are_found() -> None:
    assert find_policy("frequency").name == "frequency"
    assert find_policy("my_loading_policy:Nothing").name == "nothing"


@for_each(
    ("name", "said"),
    [
        ("frequence", "Known are lower-bound, naive"),
        ("no_such_module:Nothing", "No module named"),
        (":Nothing", "module:Class"),
        ("./my_loading_policy.py:Nothing", "module:Class"),
        ("broken_loading_policy:Nothing", "broken_loading_policy raised SyntaxError: "),
        ("my_loading_policy:Missing", "has no class Missing"),
        ("my_loading_policy:number", "has no class number"),
        ("my_loading_policy:Nameless", "lacks a name"),
        ("my_loading_policy:Picky", "made without arguments"),
    ],
)
def test_a_policy_that_is_none_is_told_why(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_policy(name)


@pytest.mark.parametrize(
    ("body", "said"),
    [("return 1 / 0", "ZeroDivisionError: "), ("return Loading(3)", "ConfigError: fills of a Loading")],
)
def test_a_policy_of_ones_own_that_raises_is_told_by_file_and_line(
    body: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("raising_loading_policy.py").write_text(
        "from penstock.policy.loading import Loading\n"
        f"class Raising:\n    name = 'raising'\n    def prepare(self, job):\n        {body}\n"
    )
    monkeypatch.delitem(sys.modules, "raising_loading_policy", raising=False)
    policy = find_policy("raising_loading_policy:Raising")

    with pytest.raises(ConfigError, match=rf"'raising': .*raising_loading_policy\.py, line 5: {said}"):
        run_policies(scenario_named("scenario1"), [policy])
