"""Scenarios as files of a user, beside machines and folders of samples."""

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError, DataError
from penstock.measure.scenarios import open_scenario
from penstock.simulate.scenario import scenario_named, scenario_text

MACHINE = """
[source]
read = "66 MB/s"
[[storage]]
name = "staging"
capacity = "1 GB"
threads = 2
read = "9 GB/s"
"""
TEXT = """
machine = "machine.toml"
[data]
folder = "images"
[training]
batch_size = 2
epochs = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "cats.toml").write_text(TEXT)
    (tmp_path / "images").mkdir()
    for number in range(5):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(bytes(100 + number))
    return tmp_path


def test_paths_in_a_file_are_relative_to_it(folder: Path) -> None:
    scenario = open_scenario(folder / "cats.toml")

    assert scenario.name == "cats"
    assert scenario.machine.source.read is not None
    np.testing.assert_array_equal(scenario.sizes_bytes(), [100, 101, 102, 103, 104])


def test_a_name_is_one_that_comes_with_the_package(folder: Path) -> None:
    (folder / "own.toml").write_text(scenario_text("scenario1"))

    assert (
        open_scenario("scenario1") == scenario_named("scenario1") == open_scenario(str(folder / "own.toml"))
    )
    with pytest.raises(
        ConfigError, match=r"'scenario9' is no built-in scenario.*The known ones are scenario1"
    ):
        open_scenario("scenario9")


def test_what_is_wrong_is_told_with_the_file(folder: Path) -> None:
    (folder / "cats.toml").write_text(TEXT.replace("epochs = 3", "epochs = 0"))

    with pytest.raises(ConfigError, match=r"cats\.toml: training\.epochs: 0 is below 1"):
        open_scenario(folder / "cats.toml")


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"dogs\.toml cannot be read: No such file"):
        open_scenario(folder / "dogs.toml")
    (folder / "machine.toml").unlink()
    with pytest.raises(DataError, match=r"machine\.toml cannot be read: No such file"):
        open_scenario(folder / "cats.toml")
    (folder / "cats.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cats\.toml is not text in UTF-8"):
        open_scenario(folder / "cats.toml")


def test_a_file_of_another_ending_is_answered_with_the_ending_it_should_have(folder: Path) -> None:
    (folder / "cats.txt").write_text(TEXT)

    with pytest.raises(ConfigError, match=r"cats\.txt does not end in \.toml"):
        open_scenario(folder / "cats.txt")
