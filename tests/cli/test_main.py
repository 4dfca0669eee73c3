"""The command line as a user types it."""

import gzip
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interpreters import Interpreters
from tests.spans import spans_of

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.flow import waits
from penstock.machine import Machine
from penstock.trace import NO_PLACE, SOURCE, Kind, Spans, Summary, TraceWriter, epoch_metrics

SPANS = spans_of(
    [
        (0.0, 1.0, 3, 100, 0, 0, Kind.READ, SOURCE, 2, 0),
        (1.0, 1.5, 3, 0, 0, 0, Kind.DECODE, NO_PLACE, 3, 0),
        (0.0, 1.5, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0),
        (1.5, 3.0, -1, 0, 0, 0, Kind.STEP, NO_PLACE, 0, 0),
    ]
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path / "run.trace", {}) as writer:
        writer.append(SPANS)
    return tmp_path / "run.trace"


def test_calibrate_writes_a_machine_and_tells_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(20):
        (data / f"{number}.bin").write_bytes(bytes(1000))
    command = ["calibrate", str(data), "--seconds", "0.5", "--out", str(tmp_path / "machine.toml")]

    assert main(command) == 1
    assert "--extensions .bin to penstock calibrate" in capsys.readouterr().err
    for endings in ("", ".bin,"):
        assert main([*command, "--extensions", endings]) == 1
        assert f"--extensions is {endings!r}; it has endings" in capsys.readouterr().err
    assert main(["calibrate", "--from", "run.trace", "--extensions", ".bin"]) == 1
    assert "leave it out" in capsys.readouterr().err
    status = main([*command, "--extensions", ".dat, .bin"])

    out = capsys.readouterr().out
    assert status == 0
    assert "1 reader:" in out
    assert "CAUTION: all of this was read within" in out
    assert str(tmp_path / "machine.toml") in out
    machine = Machine.from_toml((tmp_path / "machine.toml").read_text())
    assert machine.source.read is not None
    assert machine.source.read.at(1) > 0


def test_trace_sums_a_recorded_run_up(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(trace)]) == 0

    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 0: storage limits it: waited 50.0 % of 3 s")


def test_trace_lists_the_last_numbers_that_were_found_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(3.0, 3.0, -1, 0, k // 3, -1, Kind.THREADS, SOURCE, 0, 0, 17 + k) for k in range(10)]
    slots = (3.0, 3.0, -1, 0, 2, -1, Kind.THREADS, NO_PLACE, 0, 0, 5)
    meta: dict[str, Any] = {"limits": {"readers": 16, "slots": 4}}
    for others in ([], [(3.0, 4.0, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 1)]):
        with TraceWriter(tmp_path / "run.trace", meta) as writer:
            writer.append(np.concatenate([SPANS, spans_of([*rows, slots, *others])]))
        assert main(["trace", str(tmp_path / "run.trace")]) == 0

        found = [line for line in capsys.readouterr().out.splitlines() if "found best" in line]
        later = ", ".join(f"{17 + k} in epoch {k // 3}" for k in range(2, 10))
        readers, slots_first = ("", "") if others else ("16 at first, ", "4 at first, ")
        assert found == [
            f"rank 0 found best, of threads that read: {readers}..., {later}",
            f"rank 0 found best, of batches in memory: {slots_first}5 in epoch 2",
        ]


def test_a_trace_is_json_too(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(trace), "--json"]) == 0

    values = json.loads(capsys.readouterr().out)
    (epoch,) = values["results"]
    assert (values["is_complete"], epoch["epoch"], epoch["seconds"]) == (True, 0, 3.0)
    assert epoch["stall_seconds"] == sum(epoch["stall_by_cause"].values()) == 1.5
    assert {stage["stage"] for stage in epoch["stages"]} >= {"wait", "step"}


def test_trace_shows_stages_and_the_slowest_by_name_and_writes_what_perfetto_reads(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TraceWriter(trace, {}) as writer:
        writer.append(SPANS)
        writer.name({3: "cat/0003.jpg"})

    assert main(["trace", str(trace), "--stages", "--slowest", "1", "--export", "perfetto"]) == 0

    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert [
        "0", "read", "from", "the", "source", "1", "1", "100", "B", "1", "s", "1", "s", "1", "s", "1", "s",
    ] in rows  # fmt: skip
    assert ["decode", "500", "ms", "1", "s", "0", "0", "1", "cat/0003.jpg"] in rows
    exported = trace.with_name("run.json.gz")
    assert f"The export: {exported}" in out
    assert len(json.loads(gzip.decompress(exported.read_bytes()))["traceEvents"]) > SPANS.size


@pytest.mark.usefixtures("fonts")
def test_of_a_run_too_long_for_its_file_trace_says_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = epoch_metrics(SPANS)
    with TraceWriter(tmp_path / "long.trace", {}, most_bytes=1) as writer:
        writer.append(SPANS)
        writer.turn(Summary(4, (replace(whole[0], epochs=8),), SPANS[:1]), SPANS[:0])
        later = SPANS.copy()
        later["epoch"] = 8
        writer.append(later)
        writer.turn(Summary(8), SPANS[:0])

    assert main(["trace", str(tmp_path / "long.trace"), "--plot", str(tmp_path / "long.png")]) == 0

    first, second, third, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("epochs 0 to 7: storage limits it: waited 50.0 % of 3 s")
    assert second.startswith("epoch 8: storage limits it: waited 50.0 % of 3 s")
    assert third == "the file has the last 4 of 8 spans; the sums are of all"


def test_a_trace_of_a_data_set_names_that_as_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TraceWriter(tmp_path / "run.trace", {"reads": "data set"}) as writer:
        writer.append(SPANS)

    assert main(["trace", str(tmp_path / "run.trace")]) == 0

    assert capsys.readouterr().out.startswith("epoch 0: the data set limits it: waited 50.0 % of 3 s")


def test_a_cut_off_trace_counts_what_came_before_and_says_so(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_bytes(trace.read_bytes()[:-3])

    assert main(["trace", str(trace)]) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 0, as far as it was recorded: storage limits it")
    assert "not complete" in second


def test_an_epoch_that_a_cut_off_trace_does_not_come_to_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reads are written as they are made, and its first wait only when that has ended."""
    ahead = SPANS[:2].copy()
    ahead["epoch"] = 1
    with TraceWriter(tmp_path / "cut.trace", {}) as writer:
        writer.append(SPANS)
        writer.append(ahead)
    (tmp_path / "cut.trace").write_bytes((tmp_path / "cut.trace").read_bytes()[:-3])

    assert main(["trace", str(tmp_path / "cut.trace")]) == 0

    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 0: storage limits it")
    assert second == "epoch 1: the trace breaks off before a batch is consumed"


@pytest.mark.parametrize(
    ("spans", "said"),
    [(SPANS[:0], "no batch was consumed yet\n"), (SPANS[:2], "epoch 0: no batch was consumed\n")],
)
def test_a_trace_of_a_run_that_only_read_ahead_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spans: Spans, said: str
) -> None:
    with TraceWriter(tmp_path / "early.trace", {}) as writer:
        writer.append(spans)

    assert main(["trace", str(tmp_path / "early.trace")]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "/nowhere/to/be/found"], "/nowhere/to/be/found"),
        (["calibrate", "{tmp}", "--seconds", "-1"], "--seconds is -1.0; it must be finite and above zero"),
        (["calibrate", "{tmp}", "--out", "{tmp}/none/m.toml"], "there is no folder {tmp}/none"),
        (
            ["trace", "{trace}", "--plot", "{tmp}/picture.xyz"],
            "picture.xyz ends in '.xyz', which is no picture",
        ),
        (["trace", "{empty}", "--plot", "{tmp}/picture.png"], "no batch was consumed yet"),
        (["trace", "/nowhere/to/be/found"], "/nowhere/to/be/found"),
        (["trace", "{trace}", "--slowest", "0"], "--slowest is 0; ask for at least one"),
        (["trace", "{trace}", "--export", "perfetto", "--out", "{tmp}/none/run.json"], "none"),
        (["trace", "{trace}", "--out", "{tmp}/run.json"], "give --export, too"),
        (["demo", "--epochs", "0"], "--epochs is 0"),
        (["demo", "--data", "/nowhere/to/be/found", "--out", "{tmp}"], "/nowhere/to/be/found"),
        (["ps", str(os.getpid())], "no loader runs in process"),
        (["ps", str(2**22 + 1)], f"no loader runs in process {2**22 + 1}: there is no such process here"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_status(
    arguments: list[str], message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TraceWriter(tmp_path / "empty.trace", {}) as writer:
        writer.append(SPANS[:2])
    places = {"{tmp}": tmp_path, "{trace}": trace, "{empty}": tmp_path / "empty.trace"}

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, str(place))
        return text

    status = main([placed(argument) for argument in arguments])

    (line,) = capsys.readouterr().err.splitlines()
    assert status == 1
    assert line.startswith("penstock: ")
    assert placed(message) in line


def test_what_a_locale_has_no_letter_for_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights ü.bin").write_bytes(bytes(1000))
    monkeypatch.chdir(tmp_path)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))

    assert main(["snapshots", "seal", "weights ü.bin"]) == 0

    assert written.getvalue().startswith(rb"weights \xfc.bin is sealed by ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "loading", "/nowhere.toml"],
        ["simulate", "layout", "/nowhere.toml"],
        ["simulate", "caches", "--samples", "0"],
        ["simulate", "bundles", "--epochs", "0"],
        ["simulate", "wear", "--sizes", "/nowhere.json"],
        ["plan", "/nowhere.toml"],
        ["trace", "/nowhere.trace"],
        ["trace", "blocks", "--import", "/nowhere.blocks"],
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_else_is_done(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is asked for is wrong too, but that would be found later: a run of minutes has not begun."""
    assert main([*arguments, "--plot", str(tmp_path / "picture.doc")]) == 1
    assert f"--plot {tmp_path}/picture.doc ends in '.doc', which is no picture" in capsys.readouterr().err


def test_the_version_is_the_one_that_is_installed(
    interpreters: Interpreters, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])

    shown = f"penstock {importlib.metadata.version('penstock')}\n"
    assert capsys.readouterr().out == shown
    module = "import runpy; runpy.run_module('penstock', run_name='__main__')"
    assert interpreters.run(module, "--version").stdout == shown


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter").write_text("dear diary")

    assert main(["trace", str(tmp_path / "letter")]) == 1
    assert str(tmp_path / "letter") in capsys.readouterr().err


def test_who_reads_the_output_may_stop_early(interpreters: Interpreters) -> None:
    command = "import sys; from penstock.cli.main import main; sys.exit(main())"
    arguments = ["simulate", "caches", "--samples", "1000", "--evictions", "lru"]
    with interpreters.start(
        command, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()

        assert running.stderr.read() == ""
        assert running.wait() == 1


def test_too_little_memory_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocate(_options: object) -> None:
        raise MemoryError("Unable to allocate 7.28 TiB")

    monkeypatch.setattr("penstock.cli.caches._run", allocate)

    assert main(["simulate", "caches"]) == 1
    assert capsys.readouterr().err.startswith(
        "penstock: not enough memory: Unable to allocate 7.28 TiB; ask for"
    )


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_ps_follows_a_training_until_it_ends(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["penstock: process 7\nepoch 0", "penstock: process 7\nepoch 1"]

    def ask(pid: int) -> str:
        if not answers:
            raise ConfigError(f"no loader runs in process {pid}")
        return answers.pop(0)

    monkeypatch.setattr(waits, "ask_waits", ask)

    assert main(["ps", "7", "--follow", "--period", "1us", *words]) == 0

    out = capsys.readouterr().out
    if words:
        assert [json.loads(line)["results"][1] for line in out.splitlines()[:2]] == ["epoch 0", "epoch 1"]
    else:
        assert out.splitlines() == [
            *("penstock: process 7", "epoch 0", "penstock: process 7", "epoch 1"),
            "process 7 runs no loader any more",
        ]
    assert main(["ps", "7", "--follow"]) == 1
