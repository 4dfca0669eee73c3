"""What a command prints of names that it was given."""

import io
import sys

import pytest

from penstock.cli.output import Table, long_work, print_table, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_name_that_no_terminal_should_see_reaches_no_table_raw(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table("job\x1b[2J", ["a"], [["b\x1b[2J"]]))

    out = capsys.readouterr().out
    assert r"job\x1b[2J" in out
    assert r"b\x1b[2J" in out
    assert "\x1b[2J" not in out


def test_a_name_that_looks_like_markup_is_shown_as_it_is_beside_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")  # a dumb one gets no bar

    with progress("predicting [/job]\x1b[2J", 2) as done:
        done(1)

    assert r"predicting [/job]\x1b[2J" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()


def test_long_work_is_told_with_its_rate_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was done before an earlier kill counts for nothing in the rate."""
    clock = {"now": 100.0}
    monkeypatch.setattr("time.monotonic", lambda: clock["now"])

    with long_work("checking photos", 2000, "samples") as done:
        for seconds, count in ((107.0, 1000), (111.0, 1040), (117.0, 1100), (122.0, 1150), (127.0, 1200)):
            clock["now"] = seconds
            done(count)

    assert capsys.readouterr().err.splitlines() == [
        "checking photos: 1,100 of 2,000 samples, 10/s, 90 s left",
        "checking photos: 1,200 of 2,000 samples, 10/s, 80 s left",
    ]


def test_long_work_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")

    with long_work("packing [/job]", 200, "samples") as done:
        done(0)
        done(100)

    assert "packing [/job]" in terminal.getvalue()
    assert "100 of 200 samples" in terminal.getvalue()
