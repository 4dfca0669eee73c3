"""What a command prints of names that it was given."""

import io
import sys

import pytest

from penstock.cli.output import Table, print_table, progress


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
