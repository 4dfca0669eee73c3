"""`penstock trace blocks` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.for_each import for_each

from penstock.cli.blocks import main_blocks
from penstock.errors import ConfigError
from penstock.recordings.blocks import read_recording

LOGS = Path(__file__).parents[1] / "recordings" / "logs"
READS = (
    "import sys; print('trained'); [open(sys.argv[1]).read() for _ in range(3)]; sys.exit(int(sys.argv[2]))"
)


pytestmark = pytest.mark.usefixtures("fonts")


def job(tmp_path: Path, status: int = 0) -> list[str]:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "1").write_bytes(bytes(5_000))
    return ["--", sys.executable, "-c", READS, str(tmp_path / "data" / "1"), str(status)]


def data_phase(answer: dict[str, Any]) -> dict[str, Any]:
    (phase,) = [each for each in answer["results"] if each["phase"] == "data"]
    return dict(phase)


@pytest.mark.parametrize("by", [pytest.param("strace", marks=pytest.mark.system), "opens"])
def test_a_command_is_recorded_and_summed_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], by: str
) -> None:
    out, data = tmp_path / "run.blocks", tmp_path / "data"

    main_blocks(["--by", by, "--data", str(data), "--out", str(out), "--json", *job(tmp_path)])

    said = capfd.readouterr()
    assert said.err == "trained\n"  # so that standard output is JSON alone
    answer = json.loads(said.out)
    assert (answer["by"], answer["exit_status"], answer["is_complete"]) == (by, 0, True)
    phase = data_phase(answer)
    assert (phase["files"], phase["reads"], phase["blocks"], phase["read_bytes"]) == (1, 6, 2, 15_000)
    assert read_recording(out).meta["command"] == job(tmp_path)[1:]


def test_the_commands_status_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_blocks(["--by", "opens", "--out", str(tmp_path / "out"), *job(tmp_path, status=7)])

    assert ended.value.code == 7
    said = capfd.readouterr().out
    assert said.startswith("trained\n")
    assert "No --data was given" in said
    assert "By opens" in said
    assert said.endswith(f"The recording is in {tmp_path / 'out'}.\n")


def test_a_log_is_imported_drawn_and_read_again_with_another_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "run.blocks", tmp_path / "run.svg"
    log = ["--import", str(LOGS / "paths.strace"), "--format", "strace"]

    main_blocks([*log, "--data", "/tmp/example/data", "--out", str(out), "--plot", str(picture)])
    assert "The recording is in" in capsys.readouterr().out
    assert picture.stat().st_size > 1_000

    main_blocks(["--import", str(out), "--data", "/tmp/example/old", "--json", "--block-bytes", "1000"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["exit_status"], answer["seconds"], answer["out"]) == (None, None, None)
    assert answer["block_bytes"] == 1_000
    assert data_phase(answer)["files"] == 2


def test_the_data_sets_sequence_is_written_for_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ["--import", str(LOGS / "random.fio"), "--format", "fio", "--data", "/tmp/example/data"]

    main_blocks([*log, "--sequence", str(tmp_path / "requests.txt")])

    assert (tmp_path / "requests.txt").read_text().split() == ["1", "2", "3", "4", "5"]
    capsys.readouterr()


@for_each(
    ("arguments", "said"),
    [
        ([], "no command is given"),
        (["--block-bytes", "0", "--", "true"], "--block-bytes is 0"),
        (["--plot", "references.txt", "--", "true"], "which is no picture"),
        (["--sequence", "nowhere/requests.txt", "--", "true"], "there is no folder nowhere"),
        (["--format", "fio", "--", "true"], "says what --import reads"),
        (["--import", str(LOGS / "random.fio")], "say with --format what it is"),
        (["--import", str(LOGS / "random.fio"), "--format", "fio", "--", "true"], "leave out the command"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main_blocks(arguments)


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_blocks(["--help"])

    assert (
        "penstock trace blocks --data photos --checkpoints saves -- python train.py"
        in capsys.readouterr().out
    )


def test_options_behind_the_dashes_are_the_commands_own(tmp_path: Path) -> None:
    program = "import sys; from penstock.cli.blocks import main_blocks; main_blocks(sys.argv[1:])"
    command = ["--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--json", "--", "--out"]

    done = subprocess.run(
        [sys.executable, "-c", program, "--by", "opens", "--out", str(tmp_path / "out"), *command],
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("['--json', '--', '--out']\n")


def test_an_earlier_recording_is_replaced_only_by_force(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.blocks"
    out.write_text("of days")

    with pytest.raises(ConfigError, match=r"run\.blocks is there already: .* --overwrite"):
        main_blocks(["--by", "opens", "--out", str(out), *job(tmp_path)])
    assert out.read_text() == "of days"

    main_blocks(["--by", "opens", "--out", str(out), "--overwrite", *job(tmp_path)])
    assert read_recording(out).is_complete


def test_an_empty_string_of_a_recording_is_refused(tmp_path: Path) -> None:
    out, string = tmp_path / "run.blocks", tmp_path / "string.txt"
    main_blocks(["--by", "opens", "--data", str(tmp_path / "data"), "--out", str(out), *job(tmp_path)])

    with pytest.raises(ConfigError, match="would be empty: nothing of the data set was referenced"):
        main_blocks(["--import", str(out), "--data", str(tmp_path / "other"), "--sequence", str(string)])
    assert not string.exists()
