"""The scenario's text: the thesis' four, the way there and back, and every wrong field by its path."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import FullShuffle, Shares, Uniform
from penstock.plan.splits import imbalanced
from penstock.simulate.scenario import Scenario, scenario_named, scenario_names, scenario_text
from penstock.simulate.sizes import SizeDistribution

MACHINE = """
ranks = 4
[source]
clients = { 1 = "66 MB/s", 2 = "86 MB/s" }
[[storage]]
name = "staging"
capacity = "1 GB"
threads = 2
read = "9 GB/s"
"""

TEXT = """
name = "images"

[data]
samples = 10_000
distribution = "normal"
loc = "27 kB"
scale = "10 kB"
min = "1 kB"
max = "1 MB"

[training]
batch_size = 100
epochs = 10
seed = 3
split = "uniform"
drop_last = false

[machine]
ranks = 4
[machine.source]
clients = { 1 = "66 MB/s", 2 = "86 MB/s" }
[[machine.storage]]
name = "staging"
capacity = "1 GB"
threads = 2
read = "9 GB/s"
"""


def test_a_scenario_is_read_with_its_units() -> None:
    scenario = Scenario.from_toml(TEXT)

    assert scenario.name == "images"
    assert scenario.machine == Machine.from_toml(MACHINE)
    assert scenario.data == SizeDistribution("normal", 10_000, {"loc": 27e3, "scale": 10e3}, 10**3, 10**6)
    assert (scenario.batch_size, scenario.epochs, scenario.seed) == (100, 10, 3)
    assert (scenario.split, scenario.drop_last) == ("uniform", False)


def test_what_is_left_out_is_balanced_and_drops_the_last_batch() -> None:
    lines = ("seed = 3", 'split = "uniform"', "drop_last = false")
    text = TEXT
    for line in (*lines, 'name = "images"', 'min = "1 kB"', 'max = "1 MB"'):
        text = text.replace(line, "", 1)

    scenario = Scenario.from_toml(text, name="file")

    assert scenario.name == "file"
    assert (scenario.seed, scenario.split, scenario.drop_last) == (0, "balanced", False)
    assert scenario.data == SizeDistribution("normal", 10_000, {"loc": 27e3, "scale": 10e3}, 1, None)


def test_the_plan_is_a_full_shuffle_over_the_machines_ranks() -> None:
    scenario = Scenario.from_toml(TEXT)

    plan = scenario.plan(seed_offset=2)

    assert plan.order == FullShuffle(10_000, seed=5)
    assert (plan.batch_size, plan.epochs, plan.ranks, plan.drop_last) == (100, 10, 4, False)
    assert plan.split == Uniform()


def test_another_seed_draws_other_sizes() -> None:
    scenario = Scenario.from_toml(TEXT)

    np.testing.assert_array_equal(scenario.sizes_bytes(1), replace(scenario, seed=4).sizes_bytes())
    assert not np.array_equal(scenario.sizes_bytes(), scenario.sizes_bytes(1))


def test_ranks_can_be_imbalanced_or_have_given_shares() -> None:
    named = Scenario.from_toml(TEXT.replace('"uniform"', '"imbalanced"'))
    shares = Scenario.from_toml(TEXT.replace('"uniform"', "[4, 3, 2, 1]"))

    assert named.plan().split == imbalanced(4)
    assert shares.split == (4, 3, 2, 1)
    assert shares.plan().split == Shares((4, 3, 2, 1))


def test_strong_scaling_changes_the_ranks_alone() -> None:
    scenario = Scenario.from_toml(TEXT)

    assert scenario.with_ranks(64).ranks == 64
    assert scenario.with_ranks(64).with_ranks(4) == scenario


def test_the_machine_may_be_a_file_of_its_own() -> None:
    inside = TEXT[TEXT.index("[machine]") :]
    text = TEXT.replace(inside, "").replace('name = "images"', 'name = "images"\nmachine = "m.toml"')

    files = {"m.toml": MACHINE, "bad.toml": MACHINE.replace('"66 MB/s"', '"-66 MB/s"')}
    assert Scenario.from_toml(text, machine_text=files.__getitem__) == Scenario.from_toml(TEXT)
    with pytest.raises(
        ConfigError, match=re.escape("machine: bad.toml: source.clients: at 1 users, '-66 MB/s'")
    ):
        Scenario.from_toml(text.replace("m.toml", "bad.toml"), machine_text=files.__getitem__)
    with pytest.raises(ConfigError, match=r"machine: 'm\.toml' is a file, and a simulation opens none"):
        Scenario.from_toml(text)


FOLDER = re.sub(r"\[data\].*?\n\n", '[data]\nfolder = "/data/cats"\n\n', TEXT, flags=re.DOTALL)


def test_the_sizes_of_a_folder_are_asked_for_by_its_path() -> None:
    asked: list[str] = []

    def sizes_of(path: str) -> Any:
        asked.append(path)
        return np.arange(1, 201)

    scenario = Scenario.from_toml(FOLDER, sizes_of=sizes_of)

    assert asked == ["/data/cats"]
    assert scenario.samples == 200
    np.testing.assert_array_equal(scenario.sizes_bytes(), np.arange(1, 201))
    assert Scenario.from_toml(scenario.to_toml(), sizes_of=sizes_of) == scenario


def test_a_folder_that_nobody_opens_is_an_error_that_says_how_to() -> None:
    with pytest.raises(ConfigError, match=re.escape("data.folder: '/data/cats' is a folder")):
        Scenario.from_toml(FOLDER)


def test_a_folder_beside_a_distribution_is_refused() -> None:
    text = FOLDER.replace('folder = "/data/cats"', 'folder = "/data/cats"\nsamples = 7')

    with pytest.raises(ConfigError, match=re.escape("data.samples is given with data.folder")):
        Scenario.from_toml(text, sizes_of=lambda _: np.arange(1, 201))


# -- The four scenarios of the thesis --------------------------------------------------------------------


@for_each(
    ("name", "samples", "megabytes", "spread", "epochs"),
    [
        ("scenario1", 10_000, 0.027, 0.01, 10),
        ("scenario2", 150_000, 1.0, 0.1, 10),
        ("scenario3", 300_000, 2.0, 0.2, 5),
        ("scenario4", 400_000, 3.0, 0.2, 5),
    ],
)
def test_the_scenarios_are_those_of_section_5_2(
    name: str, samples: int, megabytes: float, spread: float, epochs: int
) -> None:
    scenario = scenario_named(name)

    machine = scenario.machine
    assert scenario.name == name
    assert scenario.data == SizeDistribution(
        "normal", samples, {"loc": megabytes * 1e6, "scale": spread * 1e6}
    )
    assert (scenario.batch_size, scenario.epochs, scenario.drop_last) == (100, epochs, True)
    assert machine.ranks == 4
    assert machine.compute == Rate(100e6)
    assert machine.preprocess_bytes_per_second == 200e6
    assert machine.network_bytes_per_second == 10e9
    assert machine.source_network_bytes_per_second == 2e9
    assert machine.source.read is None
    assert machine.source.clients is not None
    rates = [machine.source.clients.at(clients) / 1e6 for clients in (1, 2, 3, 4, 8, 16, 32, 64, 128)]
    assert rates == [66, 86, 129, 146, 326, 324, 324, 324, 324]
    assert [storage.capacity_bytes / 1e6 for storage in machine.storage] == [1024, 50 * 1024, 100 * 1024]
    assert [storage.threads for storage in machine.storage] == [2, 2, 2]
    at_two = [storage.read.at(2) / 1e6 for storage in machine.storage]
    assert at_two == [21_164, 21_164, 86]


def test_the_scenarios_names_are_listed() -> None:
    assert scenario_names() == ["scenario1", "scenario2", "scenario3", "scenario4"]
    with pytest.raises(
        ConfigError, match=r"Did you mean scenario1\? The known ones are scenario1, scenario2"
    ):
        scenario_named("scenaro1")
    with pytest.raises(ConfigError, match=r"'\.\./escape' is no built-in scenario"):
        scenario_text("../escape")


# -- There and back --------------------------------------------------------------------------------------


sizes = st.integers(0, 10**9)
bounds = st.tuples(sizes, st.none() | sizes).map(
    lambda pair: pair if pair[1] is None or pair[0] <= pair[1] else (pair[1], pair[0])
)
distributions = st.one_of(
    st.builds(lambda loc: ("constant", {"loc": loc}), sizes),
    st.builds(
        lambda name, loc, scale: (name, {"loc": loc, "scale": scale}),
        st.sampled_from(["normal", "uniform"]),
        st.floats(-1e9, 1e9),
        st.floats(1e-3, 1e9),
    ),
    st.builds(
        lambda s, scale: ("lognorm", {"s": s, "scale": scale}),
        st.floats(min_value=0.1, max_value=3),
        st.integers(1, 10**9),
    ),
)
data_sets = st.builds(
    lambda samples, law, bound: SizeDistribution(law[0], samples, law[1], *bound),
    st.integers(1, 4 * 10**9),
    distributions,
    bounds,
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    ranks = draw(st.integers(1, 6))
    data = draw(data_sets)
    shares = st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks).map(tuple)
    machine = Machine(SharedStore(Curve.flat(draw(st.floats(1.0, 1e9)))), (STAGING,), ranks)
    return Scenario(
        name=draw(st.text(st.characters(codec="utf-8"))),
        machine=machine,
        data=data,
        batch_size=draw(st.integers(1, data.samples)),
        epochs=draw(st.integers(1, 100)),
        seed=draw(st.integers(0, 2**63)),
        split=draw(st.sampled_from(["uniform", "strided", "replicated", "imbalanced"]) | shares),
        drop_last=draw(st.booleans()),
    )


STAGING = StorageClass("staging", 10**9, 2, Curve.flat(1e9))


@given(scenarios())
def test_a_scenario_written_down_is_read_back_equal(scenario: Scenario) -> None:
    assert Scenario.from_toml(scenario.to_toml()) == scenario


def test_the_largest_seed_is_read_back() -> None:
    scenario = replace(Scenario.from_toml(scenario_text("scenario1")), seed=2**64 - 1)

    assert Scenario.from_toml(scenario.to_toml()) == scenario


# -- What is wrong, by its path --------------------------------------------------------------------------


@for_each(
    ("right", "wrong", "message"),
    [
        ("samples = 10_000", "samples = 0", "data.samples: 0 is below 1"),
        ("samples = 10_000", "samples = 1.5", "data.samples: 1.5 is not an integer"),
        ("samples = 10_000", "", "data.samples is missing"),
        ("samples = 10_000", "sampels = 10", "data.sampels is not a field; did you mean samples?"),
        (
            'distribution = "normal"',
            'distribution = "norml"',
            "data: distribution 'norml' is not known; did you mean",
        ),
        ('distribution = "normal"', "distribution = 5", "data.distribution: 5 is not text"),
        ('distribution = "normal"', "", "data.distribution is missing"),
        ('loc = "27 kB"', "loc = 27", "data.loc: 27 has no unit"),
        ('loc = "27 kB"', 'loc = "27 kb"', "data.loc: '27 kb': 'kb' is not one of"),
        ('loc = "27 kB"', 'loc = "nan kB"', "data.loc: 'nan kB'"),
        ('loc = "27 kB"', "", "data: loc is missing"),
        ('scale = "10 kB"', 'scale = "-1 kB"', "data: scale is -1000.0; it must be zero or more"),
        (
            'scale = "10 kB"',
            'scale = "10 kB"\nshape = 2',
            "data: shape is no parameter of the distribution normal",
        ),
        ('scale = "10 kB"', 'scale = "10 kB"\nshape = nan', "data.shape: nan is not finite"),
        ('scale = "10 kB"', 'scale = "10 kB"\nshape = "2"', "data.shape: '2' is not a number"),
        ('min = "1 kB"', 'min = "-1 kB"', "data.min: '-1 kB'"),
        ('min = "1 kB"', 'min = "2 MB"', "data: max_bytes is 1000000, below min_bytes"),
        ("batch_size = 100", "batch_size = 0", "training.batch_size: 0 is below 1"),
        ("batch_size = 100", "", "training.batch_size is missing"),
        ("epochs = 10", "epochs = 0", "training.epochs: 0 is below 1"),
        ("epochs = 10", "epoch = 10", "training.epoch is not a field; did you mean epochs?"),
        ("seed = 3", "seed = -3", "training: seed is -3"),
        ("seed = 3", "seed = 3.0", "training.seed: 3.0 is not an integer"),
        (
            'split = "uniform"',
            'split = "unform"',
            "training: split is 'unform'; it is one of 'balanced', 'uniform'",
        ),
        ('split = "uniform"', "split = [1, 2]", "training: split has 2 shares for 4 ranks"),
        ('split = "uniform"', "split = [1, 2, -3, 4]", "training: split shares are (1, 2, -3, 4)"),
        ('split = "uniform"', "split = [1, 2, 3.5, 4]", "training.split: 3.5 is not an integer"),
        ("drop_last = false", "drop_last = 1", "training.drop_last: 1 is neither true nor false"),
        ("[training]", "[assumptions]\npreset = 'thesis'\n[training]", "penstock paper thesis-table-5-1"),
        ("[training]", "[trainings]", "trainings is not a field; did you mean training?"),
        ("ranks = 4", "ranks = 0", "machine.ranks: 0 is below 1"),
        ("ranks = 4", "ranks = 4\nnetwork = -5", "machine.network: -5 has no unit"),
        ("ranks = 4", 'ranks = 4\nnetwork = "-5 MB/s"', "machine.network: '-5 MB/s' cannot be"),
        ('{ 1 = "66 MB/s", 2 = "86 MB/s" }', "{}", "machine.source.clients: the curve has no points"),
        ("[machine.source]", "[machine.sauce]", "machine.sauce is not a field; did you mean source?"),
        ('capacity = "1 GB"', 'capacity = "1"', "machine.storage[0].capacity: '1' has no unit"),
        ('name = "staging"', 'name = ""', "machine.storage[0]: name is empty"),
        ("[training]", "[training", "the scenario is not valid TOML"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(right: str, wrong: str, message: str) -> None:
    assert right in TEXT

    with pytest.raises(ConfigError) as caught:
        Scenario.from_toml(TEXT.replace(right, wrong, 1))

    assert message in str(caught.value)


def test_a_batch_larger_than_the_data_set_leaves_nothing_if_the_last_one_is_dropped() -> None:
    text = TEXT.replace("batch_size = 100", "batch_size = 10_001")

    assert Scenario.from_toml(text).plan().steps(0) == 1
    with pytest.raises(ConfigError, match="training: batch_size is 10,001, but there are 10,000 samples"):
        Scenario.from_toml(text.replace("drop_last = false", "drop_last = true"))
