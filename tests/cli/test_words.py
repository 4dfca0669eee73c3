"""One word per concept, over all commands: the options that they take and the examples that they show."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest
from tests.cli.words import OTHER_WORDS, OTHER_WORDS_OF_JSON
from tests.for_each import for_each

from penstock.bench.checks import MODELS
from penstock.cli.blocks import blocks_parser
from penstock.cli.main import _parser, main
from penstock.recordings.references import FORMATS
from penstock.simulate.caches import EVICTIONS
from penstock.simulate.policies import POLICY_NAMES
from penstock.simulate.snapshots import METHODS, OWN_METHOD, recorded_sizes
from penstock.simulate.wear import WARM_UPS


def commands(
    parser: argparse.ArgumentParser, name: str = "penstock"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command that does something, with its parser."""
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not kinds:
        yield name, parser
    for kind in kinds:
        for word, child in kind.choices.items():
            yield from commands(child, f"{name} {word}")


COMMANDS = dict(commands(_parser()))
#: Its command to record follows `--`, and the logs of a run are many files: the shell writes them with spaces.
BLOCKS = "penstock trace blocks"
#: Every list of names that an option takes.
NAMES = {
    ("penstock plan", "--policies"): POLICY_NAMES,
    ("penstock simulate loading", "--policies"): POLICY_NAMES,
    ("penstock simulate caches", "--evictions"): EVICTIONS,
    ("penstock simulate caches", "--format"): FORMATS,
    ("penstock simulate wear", "--models"): [model.name for model in recorded_sizes()],
    ("penstock simulate wear", "--warm-up"): WARM_UPS,
    ("penstock bench train", "--model"): MODELS,
    ("penstock bench checkpoint", "--model"): MODELS,
    ("penstock bench checkpoint", "--peers"): ["torch", "dcp"],
    ("penstock bench input", "--peers"): ["torch", "tensorflow"],
    ("penstock bench input", "--work"): ["read", "decode", "both"],
    ("penstock bench train", "--prefetch"): ["0", "auto"],
    ("penstock simulate caches", "--order"): ["full", "torch", "sequential", "bundle"],
    ("penstock simulate wear", "--encodings"): [method.name for method in (*METHODS, OWN_METHOD)],
}


@for_each("name", [*COMMANDS, BLOCKS])
def test_each_concept_has_one_word(name: str) -> None:
    for action in (blocks_parser() if name == BLOCKS else COMMANDS[name])._actions:
        for option in action.option_strings:
            is_count = option == "--step" and action.type is int
            assert is_count or option not in OTHER_WORDS, f"{name} {option}: {OTHER_WORDS[option]}"
        assert action.nargs not in ("+", "*") or name == BLOCKS, (
            f"{name} {action.dest}: several values have commas between them"
        )


@for_each("name", COMMANDS)
def test_help_shows_an_example_that_can_be_typed(name: str) -> None:
    examples = re.findall(
        rf"^.*?({re.escape(name)}\b.*?)(?: && .*)?(?: +#.*)?$", COMMANDS[name].epilog or "", re.MULTILINE
    )

    assert examples
    for example in examples:
        _parser().parse_args(shlex.split(example)[1:])


#: They run until they are stopped.
WITHOUT_RESULTS = ("penstock decode-server", "penstock graph worker")


@for_each("name", [name for name in (*COMMANDS, BLOCKS) if name not in WITHOUT_RESULTS])
def test_help_says_that_json_lists_results(name: str) -> None:
    parser = blocks_parser() if name == BLOCKS else COMMANDS[name]
    text = parser.epilog or ""

    assert "--json" in parser.format_help()
    assert "results[]" in text
    assert OTHER_WORDS_OF_JSON.isdisjoint(re.findall(r"\w+", text.partition("JSON")[2]))
    assert not re.search(r"\b(runs|rows|points|curves|panels|options|methods|schemes)(\[\]|\{\})", text)


#: What else such a command has to be given before it looks at the name.
BESIDES = {
    ("penstock plan", "--policies"): "scenario1",
    ("penstock simulate loading", "--policies"): "scenario1",
    ("penstock simulate caches", "--format"): "--recording a.csv",
    ("penstock bench input", "--peers"): ".",
    ("penstock bench input", "--work"): ".",
    ("penstock bench train", "--model"): ".",
    ("penstock bench train", "--prefetch"): ".",
    ("penstock bench checkpoint", "--peers"): "--to . --fast .",
    ("penstock bench checkpoint", "--model"): "--to . --fast .",
}


@for_each(("name", "option"), NAMES)
def test_help_and_the_error_for_another_list_every_name_that_an_option_takes(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (action,) = [each for each in COMMANDS[name]._actions if option in each.option_strings]

    assert main([*name.split()[1:], *BESIDES.get((name, option), "").split(), option, "another"]) == 1

    for text in (action.help or "", capsys.readouterr().err):
        assert set(NAMES[name, option]) <= set(re.split(r"[^\w+-]+", text)), text


@for_each("name", [*COMMANDS, BLOCKS])
def test_the_help_of_an_option_begins_with_what_it_is(name: str) -> None:
    """A noun or a verb, as "rate of the store"; never "of the store", where nobody knows of what."""
    for action in (blocks_parser() if name == BLOCKS else COMMANDS[name])._actions:
        begins = re.match(r"(of|that|at|as|or|what|which|its|with)\b|\(", action.help or "")
        assert not begins, f"{name} {action.dest}: {action.help}"
