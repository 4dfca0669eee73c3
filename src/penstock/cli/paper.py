"""`penstock paper`: published tables and figures, computed again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from penstock.cli.output import Table, add_command, add_output_options, needing, progress, show
from penstock.errors import ConfigError
from penstock.papers.catalog import PAPERS, Result, Unit, paper_named
from penstock.units import format_rate

_DESCRIPTION = """\
Computes a published table or figure again and prints each number next to the published one, with a sentence on why they
differ. Without NAME it lists what can be repeated.
"""
_EPILOG = """\
example:
  penstock paper bundles-table-1

JSON: name, title, source, why, and results[] of of, computed, published, unit (seconds, share, count, factor, bytes per
second, samples per second) and difference (of shares in shares, else relative to the published number); without NAME
results[] of name, title and source. null is what cannot be computed, or was not published.
"""


_WRITTEN: Mapping[Unit, Callable[[float], str]] = {
    "share": lambda value: f"{_rounded(100 * value):.2f} %",
    "count": lambda value: f"{value:,.0f}",
    "seconds": lambda value: f"{value:,.3f} s",
    "factor": lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}",
    "bytes per second": format_rate,
    "samples per second": lambda value: f"{value:,.0f} /s",
}


def add_paper(commands: Any) -> None:
    names = "".join(f"\n  {paper.name:22}{paper.title}" for paper in PAPERS)
    summary = "repeat a published table or figure, next to its numbers"
    parser = add_command(commands, "paper", _run, summary, _DESCRIPTION, f"names:{names}\n\n{_EPILOG}")
    parser.add_argument("name", nargs="?", metavar="NAME", help="table or figure to repeat")
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    if options.name is None:
        _list(options)
        return
    paper = paper_named(options.name)
    with needing(f"penstock paper {paper.name}", paper.extra), progress(paper.name, None):
        repeated = paper.repeat()
    data = {
        "name": paper.name,
        "title": paper.title,
        "source": paper.source,
        "why": repeated.why,
        "results": [asdict(each) | {"difference": each.difference} for each in repeated.results],
    }
    rows = [_cells(each) for each in repeated.results]
    table = Table(f"{paper.name}: {paper.title}", ["", "published", "computed", "difference"], rows)
    show(options, data, [table], [repeated.why, f"Source: {paper.source}."], repeated.draw)


def _list(options: argparse.Namespace) -> None:
    if options.plot is not None:
        raise ConfigError("--plot draws one table or figure: name it, as in penstock paper bundles-table-1")
    results = [{"name": paper.name, "title": paper.title, "source": paper.source} for paper in PAPERS]
    rows = [[paper.name, paper.title] for paper in PAPERS]
    sources = list(dict.fromkeys(f"{paper.name.split('-')[0]}: {paper.source}." for paper in PAPERS))
    show(options, {"results": results}, [Table("", ["NAME", ""], rows)], sources)


def _cells(result: Result) -> list[str]:
    difference = ""
    if result.difference is not None:
        difference = f"{_rounded(100 * result.difference):+.2f} {'points' if result.unit == 'share' else '%'}"
    return [result.of, _number(result.published, result), _number(result.computed, result), difference]


def _number(value: float | None, result: Result) -> str:
    if value is None:
        return "N/A"
    return _WRITTEN[result.unit](value)


def _rounded(value: float) -> float:
    """Round to what is printed, so that no minus stands before a zero."""
    return round(value, 2) + 0.0
