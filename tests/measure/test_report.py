"""The page of a run: whole in itself, bounded, with a table for every picture, and safe from the names in a trace."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measure.test_explain import FAULTS, beside
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.measure.report import binned, report_of
from penstock.recordings.devices import DeviceRecord
from penstock.trace import NO_PLACE, SOURCE, SPAN, Kind, Trace

_VOID = {"meta", "rect", "path"}


class Page(HTMLParser):
    """The tags of a page, which must all be closed, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def a_trace() -> Trace:
    rows = [*FAULTS["three of sixty reads take two seconds"][1], beside(Kind.SAVE, 1.0, 2.0)]
    name = 'a"b<script>alert(1)</script>\n\x1b[2J\udcff.jpg'
    return Trace(spans_of(rows), {"source": "<img src=x>"}, names={10: name})


def test_a_page_needs_nothing_else_and_no_name_becomes_markup() -> None:
    text = report_of(a_trace()).html()

    page = Page(text)

    assert text.startswith("<!doctype html>")
    assert "6 s of it to: a few slow reads" in text
    assert {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object"} == set()
    assert [
        attributes for _, attributes in page.tags if {"src", "onload", "onclick"} & attributes.keys()
    ] == []
    assert {attributes["href"] for tag, attributes in page.tags if tag == "a"} == {"#content"}
    assert re.search(r"url\(|@import", text) is None
    assert r"a&quot;b&lt;script&gt;alert(1)&lt;/script&gt;\n\x1b[2J\udcff.jpg" in text
    text.encode()  # the byte that is no UTF-8 is escaped


def test_every_picture_has_a_name_and_a_table() -> None:
    report = report_of(a_trace())

    titles = [each.title for each in report.sections]
    assert titles[:4] == [
        "What was waited for",
        "The worst moments",
        "Throughput and stall over time",
        "Bytes read, by place",
    ]
    assert {"Saves and drains", "Which samples were read when"} <= set(titles)
    assert [title.split(":")[0] for title in titles if title.startswith("The step")] == [
        "The step with the median wait",
        "The step with the longest wait",
    ]
    for each in report.sections:
        assert each.rows, each.title
        assert {len(row) for row in each.rows} == {len(each.columns)}, each.title
    page = Page(report.html())
    pictures = [
        attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"
    ]
    assert all(attributes["aria-label"] for attributes in pictures)
    assert len([tag for tag, _ in page.tags if tag == "table"]) == len(report.sections)


def test_a_page_stays_small_however_long_the_run() -> None:
    steps = 20_000
    spans = np.zeros(4 * steps, SPAN)
    number = np.arange(steps)
    for place, kind in enumerate((Kind.READ, Kind.DECODE, Kind.WAIT, Kind.STEP)):
        own = spans[place::4]
        own["kind"], own["step"], own["samples"], own["bytes"] = kind, number, 1, 1000
        own["sample"], own["place"] = (number, SOURCE) if kind == Kind.READ else (-1, NO_PLACE)
        own["start"] = number + (0.5 if kind == Kind.STEP else 0.0)
        own["end"] = own["start"] + 0.5

    assert len(report_of(Trace(spans)).html()) < 1 << 20


def test_the_wait_and_the_step_are_shown_of_a_step_with_more_spans_than_fit() -> None:
    reads = [(0.0, 0.001 * end, end, 0, 0, 1, Kind.READ, SOURCE, 0, 0) for end in range(1, 601)]
    last = [
        (0.5, 0.6, -1, 0, 0, 1, Kind.WAIT, NO_PLACE, 0, 0),
        (0.6, 0.9, -1, 0, 0, 1, Kind.STEP, NO_PLACE, 0, 0),
    ]

    shown = [
        each for each in report_of(Trace(spans_of([*reads, *last]))).sections if "The step" in each.title
    ]

    assert [[row[0] for row in each.rows][-2:] for each in shown] == [["wait", "step"]] * 2
    assert {len(each.rows) for each in shown} == {400}


def test_many_epochs_are_labelled_as_epochs() -> None:
    rows = []
    for epoch in range(7, 157):
        rows += [
            (float(epoch), epoch + 0.5, 0, 0, epoch, 1, kind, place, 0, 0)
            for kind, place in ((Kind.READ, SOURCE), (Kind.WAIT, NO_PLACE))
        ]

    (found,) = (
        each for each in report_of(Trace(spans_of(rows))).sections if each.title.startswith("Where samples")
    )

    labels = re.findall(r'text-anchor="middle">([^<]*)<', found.picture)
    assert labels == ["epoch 50", "epoch 100", "epoch 150"]


def test_a_run_in_which_nobody_waited_has_no_page() -> None:
    with pytest.raises(ConfigError, match="nobody asked"):
        report_of(Trace(np.empty(0, SPAN)))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 9)), max_size=12),
    st.integers(1, 9),
)
def test_amounts_are_spread_over_the_times_that_spans_last(
    calls: list[tuple[int, int, int]], bins: int
) -> None:
    spans = spans_of((begin, begin + lasts, 0, 0, 0, 0, Kind.READ, SOURCE, 0, 0) for begin, lasts, _ in calls)
    amounts = np.array([float(amount) for _, _, amount in calls])
    edges = np.linspace(0.0, 60.0, bins + 1)

    found = binned(spans, amounts, edges)

    expected = np.zeros(bins)
    for begin, lasts, amount in calls:
        for place in range(bins):
            low, high = edges[place], edges[place + 1]
            if lasts:
                expected[place] += amount * max(0.0, min(begin + lasts, high) - max(begin, low)) / lasts
            elif low <= begin < high:
                expected[place] += amount
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_asks_nobody_for_anything_and_axe_finds_no_fault(scheme: str, tmp_path: Path) -> None:
    """With Debian's chromium-headless-shell or chromium, and PyPI's `axe-playwright-python`, with Playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    browser_path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no chromium here")
    page_file = tmp_path / "report.html"
    page_file.write_text(report_of(a_trace()).html())
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: asked.append(str(error)))

        page.goto(page_file.as_uri())
        found = axe.Axe().run(page)
        browser.close()

    assert asked == [page_file.as_uri()]
    assert [each["id"] for each in found.response["violations"]] == []
    assert len(found.response["passes"]) > 10


def test_counters_that_are_not_read_for_every_row_are_drawn_over_the_time_between() -> None:
    second = 10**9
    columns = (
        "nanoseconds",
        "disk:sda:read_bytes",
        "tree:nanoseconds",
        "tree:asked_bytes",
        "tree:resident_bytes",
    )
    rows = [[k * second, 8 * k, k // 2 * 2 * second, k // 2 * 10, 7 * k] for k in range(5)]

    found = report_of(None, DeviceRecord(columns, np.array(rows), {"command": ["train"]}, 0)).sections

    assert [(each.title, each.rows) for each in found] == [
        ("Block devices", [(f"{k:.2f} s", "8 B/s") for k in range(4)]),
        ("Bytes of the command's processes", [(f"{k:.2f} s", "5 B/s") for k in (0, 2)]),
    ]
