"""A drive does what its rules say, page by page: the kernel against the rules written down plainly."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine.ssd import Drive, PageOp, Ssd

TINY = Ssd(
    channels=2,
    chips_per_channel=1,
    blocks_per_chip=8,
    pages_per_block=4,
    page_bytes=512,
    page_read_seconds=1.0,
    page_write_seconds=10.0,
    block_erase_seconds=100.0,
    channel_bytes_per_second=512 / 0.1,
    over_provisioning=0.5,
    gc_threshold=0.2,
)


# -- The same rules, slow and plain ----------------------------------------------------------------------


@dataclass(eq=False)
class SlowBlock:
    number: int
    pages: list[int | None] = field(default_factory=list)  # logical pages in the order written; None: stale
    erases: int = 0
    changed: int = 0  # when its number of valid pages last changed

    def valid(self) -> list[int]:
        return [page for page in self.pages if page is not None]


class SlowChip:
    """One chip: blocks that are free, open or closed, and nothing else."""

    def __init__(self, ssd: Ssd, number: int) -> None:
        first = number * ssd.blocks_per_chip
        self.ssd = ssd
        self.blocks = [SlowBlock(first + index) for index in range(ssd.blocks_per_chip)]
        self.open, *self.free = self.blocks
        self.closed: list[SlowBlock] = []
        self.clock = itertools.count(1)
        self.work = dict.fromkeys(("written", "moved", "summary", "read", "trimmed", "erased"), 0)

    def holds(self, logical: int) -> bool:
        return any(logical in block.pages for block in self.blocks)

    def forget(self, logical: int) -> None:
        for block in self.blocks:
            if logical in block.pages:
                block.pages[block.pages.index(logical)] = None
                block.changed = next(self.clock)

    def program(self, logical: int) -> None:
        self.open.pages.append(logical)
        self.open.changed = next(self.clock)
        if len(self.open.pages) == self.ssd.data_pages_per_block:
            self.work["summary"] += self.ssd.summary_pages
            self.closed.append(self.open)
            self.open = self.free.pop(0)

    def write(self, logical: int) -> None:
        self.forget(logical)
        self.work["written"] += 1
        self.program(logical)
        while len(self.free) < self.ssd.gc_free_blocks:
            self.collect()

    def collect(self) -> None:
        victim = min(self.closed, key=lambda block: (len(block.valid()), block.changed))
        interval = self.ssd.levelling_interval
        if interval is not None and (self.work["erased"] + 1) % interval == 0:
            resting = [block for block in self.closed if block.valid() and block.erases < victim.erases]
            victim = min(resting, key=lambda block: (block.erases, block.number), default=victim)
        self.closed.remove(victim)
        moved, victim.pages = victim.valid(), []
        for logical in moved:
            self.program(logical)
        self.work["moved"] += len(moved)
        self.work["erased"] += 1
        victim.erases += 1
        self.free.append(victim)


class SlowDrive:
    def __init__(self, ssd: Ssd) -> None:
        self.ssd = ssd
        self.chips = [SlowChip(ssd, number) for number in range(ssd.chips)]

    def run(self, op: PageOp, first: int, count: int) -> None:
        for logical in range(first, first + count):
            chip = self.chips[logical % len(self.chips)]
            if op == PageOp.WRITE:
                chip.write(logical)
            elif chip.holds(logical):
                chip.work["read" if op == PageOp.READ else "trimmed"] += 1
                if op == PageOp.TRIM:
                    chip.forget(logical)

    def places(self) -> list[list[int]]:
        found = [[-1, -1] for _ in range(self.ssd.exported_pages)]
        for chip in self.chips:
            for block in chip.blocks:
                for offset, logical in enumerate(block.pages):
                    if logical is not None:
                        found[logical] = [block.number, offset]
        return found


@st.composite
def drives(draw: st.DrawFn) -> Ssd:
    """A drive of a few dozen blocks, now and then with hardly any space to spare."""
    planes = draw(st.integers(1, 2))
    per_plane = draw(st.integers(5, 10))
    kept = draw(st.integers(1, 2)) + (planes == 1)  # free blocks a plane
    reserved = draw(st.integers(kept + 1, per_plane - 1))
    summary = draw(st.integers(0, 2))
    return replace(
        TINY,
        channels=draw(st.integers(1, 2)),
        chips_per_channel=draw(st.integers(1, 2)),
        planes_per_chip=planes,
        blocks_per_chip=planes * per_plane,
        pages_per_block=summary + draw(st.integers(1, 5)),
        summary_pages=summary,
        over_provisioning=reserved / per_plane,
        gc_threshold=(kept - 0.5) / per_plane,
        levelling_interval=draw(st.sampled_from([None, 2, 3])),
    )


@settings(max_examples=60)
@given(st.data())
def test_pages_lie_and_blocks_wear_as_the_plain_rules_say(data: st.DataObject) -> None:
    ssd = data.draw(drives())
    pages = ssd.exported_pages
    # Few pages written often, among runs of any kind: blocks must be collected with something still in them.
    run = st.tuples(
        st.sampled_from([PageOp.WRITE, PageOp.WRITE, PageOp.WRITE, PageOp.TRIM, PageOp.READ]),
        st.integers(0, pages - 1),
        st.sampled_from([1, 1, 1, 2, 5, pages]),
    )
    runs = [
        (op, first, min(count, pages - first)) for op, first, count in data.draw(st.lists(run, max_size=60))
    ]
    drive, slow = Drive(ssd), SlowDrive(ssd)
    for op, first, count in [(PageOp.WRITE, 0, pages), *runs]:
        slow.run(op, first, count)

    drive.write(0, pages)
    if runs:
        drive.run(*np.array(runs).T)

    assert drive.places().tolist() == slow.places()
    assert drive.erases().tolist() == [block.erases for chip in slow.chips for block in chip.blocks]
    assert drive.work().per_chip.tolist() == [list(chip.work.values()) for chip in slow.chips]
    assert drive.block_states() == (
        sum(1 + sum(bool(block.valid()) for block in chip.closed) for chip in slow.chips),
        sum(sum(not block.valid() for block in chip.closed) for chip in slow.chips),
        sum(len(chip.free) for chip in slow.chips),
    )


@settings(max_examples=20)
@given(drives(), st.integers(0, 10**6))
def test_long_random_traffic_is_followed_to_the_page(ssd: Ssd, seed: int) -> None:
    pages = np.random.default_rng(seed).integers(0, ssd.exported_pages, 150)
    drive, slow = Drive(ssd), SlowDrive(ssd)
    for page in pages.tolist():
        slow.run(PageOp.WRITE, page, 1)

    drive.run(np.full(pages.size, PageOp.WRITE), pages, np.ones(pages.size))

    assert drive.places().tolist() == slow.places()
    assert drive.erases().tolist() == [block.erases for chip in slow.chips for block in chip.blocks]


# -- What follows from the rules -------------------------------------------------------------------------


def greedy_write_amplification(pages_per_block: int, blocks: float, logical_pages: float) -> float:
    """Uniform random writes under greedy collection, for very many blocks.

    Each page written makes one page of all blocks stale, so a block with i valid pages loses one with i / U per
    write. In the steady state as many blocks enter each level as leave it: above the lowest level m, of which
    blocks are collected, there are r U / i of them, r being blocks written per page of the host. All blocks and
    all valid pages counted give r and how many wait at level m.
    Source: W. Bux and I. Iliadis, "Performance of greedy garbage collection in flash-based solid-state drives",
    Performance Evaluation 67, 2010; B. Van Houdt, SIGMETRICS 2013, for the limit.
    """
    for lowest in range(1, pages_per_block):
        harmonic = sum(1.0 / i for i in range(lowest + 1, pages_per_block + 1))
        above = pages_per_block - lowest
        rate = (1.0 / lowest - blocks / logical_pages) / (above / lowest - harmonic)
        fallen = 1.0 - rate * above  # m n_m / U: what falls to level m - 1, and is collected there at once
        if 0.0 <= fallen <= rate:
            return rate * pages_per_block
    raise AssertionError("no level fits")


@pytest.mark.parametrize("over_provisioning", [0.1, 0.15, 0.25])
def test_random_writes_are_amplified_as_the_theory_of_greedy_collection_says(
    over_provisioning: float,
) -> None:
    ssd = replace(
        TINY,
        channels=1,
        blocks_per_chip=2_000,
        pages_per_block=64,
        over_provisioning=over_provisioning,
        gc_threshold=0.005,
    )
    drive = Drive(ssd)
    drive.write(0, ssd.exported_pages)
    random = np.random.default_rng(7)

    def overwrite(count: int) -> float:
        pages = random.integers(0, ssd.exported_pages, count)
        amplification = drive.run(np.zeros(count), pages, np.ones(count)).write_amplification
        assert amplification is not None
        return amplification

    overwrite(4 * ssd.exported_pages)
    measured = overwrite(4 * ssd.exported_pages)

    in_use = ssd.blocks_per_chip - ssd.gc_free_blocks
    assert measured == pytest.approx(greedy_write_amplification(64, in_use, ssd.exported_pages), rel=0.01)


def test_files_written_in_a_row_cost_their_pages_and_a_summary_for_each_block() -> None:
    ssd = replace(TINY, channels=4, blocks_per_chip=200, pages_per_block=16, summary_pages=1)
    drive = Drive(ssd)
    drive.warm_up()
    round_of_blocks = ssd.chips * ssd.data_pages_per_block

    for first in range(0, ssd.exported_pages - round_of_blocks, round_of_blocks):
        drive.write(first, round_of_blocks)

    assert drive.work().moved_pages == 0
    assert drive.work().write_amplification == pytest.approx(16 / 15)


def test_what_was_trimmed_is_not_moved() -> None:
    """A snapshot that was deleted without a TRIM goes on being carried from block to block."""
    ssd = replace(
        TINY, channels=1, blocks_per_chip=100, pages_per_block=16, over_provisioning=0.1, gc_threshold=0.03
    )
    half = ssd.exported_pages // 2
    pages = np.random.default_rng(3).integers(0, half, 20 * half)
    kept, given_up = Drive(ssd), Drive(ssd)
    for drive in (kept, given_up):
        drive.write(0, ssd.exported_pages)
    given_up.trim(half, ssd.exported_pages - half)

    moved = [
        drive.run(np.zeros(pages.size), pages, np.ones(pages.size)).moved_pages for drive in (kept, given_up)
    ]

    assert moved[1] < 0.5 * moved[0]


def test_levelling_makes_data_at_rest_share_the_wear() -> None:
    ssd = replace(
        TINY, channels=1, blocks_per_chip=64, pages_per_block=8, over_provisioning=0.25, gc_threshold=0.05
    )
    hot = np.random.default_rng(5).integers(0, ssd.exported_pages // 10, 50_000)
    spreads, means = [], []
    for interval in (None, 8):
        drive = Drive(replace(ssd, levelling_interval=interval))
        drive.write(0, ssd.exported_pages)
        drive.run(np.zeros(hot.size), hot, np.ones(hot.size))
        spreads.append(int(np.ptp(drive.erases())))
        means.append(drive.erases().mean())

    assert drive.erases().min() > 0
    assert spreads[1] < 0.1 * spreads[0]
    assert means[0] < means[1] < 1.5 * means[0]  # moving what rests costs erases itself


def test_the_papers_drive_when_warm_has_the_blocks_of_table_8() -> None:
    ssd = Ssd.paper()
    drive = Drive(ssd)

    drive.warm_up()

    assert drive.block_states() == (111_432, 13_048, 6_592)
    assert drive.work().programmed_pages == 0
    assert not drive.erases().any()


def test_complete_snapshots_of_caffenet_take_8_880_erases() -> None:
    """The paper's 6,448 erases are 27 % fewer than these."""
    drive = Drive(Ssd.paper())
    drive.warm_up()

    work = drive.write(0, 10 * 55_944)

    assert work.erases == 8_880
    assert work.moved_pages == 0


# -- Time ------------------------------------------------------------------------------------------------


def seconds_of(ssd: Ssd, *runs: tuple[PageOp, int, int]) -> float:
    drive = Drive(ssd)
    drive.write(0, ssd.exported_pages)
    return drive.run(*np.array(runs).T).seconds(ssd)


@for_each(
    ("changes", "pages", "seconds"),
    [
        ({}, 1, 1.1),  # the cells and the bus
        ({}, 2, 1.1),  # two chips, each behind its channel
        ({}, 3, 2.2),
        ({"host_link": "shared"}, 2, 1.1),  # the buses are idle for most of it
        ({"host_link": "shared", "channel_bytes_per_second": 512.0}, 2, 2.0),  # they wait for each other
        ({"channels": 1, "chips_per_channel": 2}, 2, 1.1),
        ({"channels": 1, "chips_per_channel": 2, "channel_bytes_per_second": 512.0}, 4, 4.0),
        ({"spare_bytes": 512}, 1, 1.2),
        ({"channel_bytes_per_second": float("inf")}, 1, 1.0),
    ],
)
def test_reading_takes_as_long_as_the_busiest_chip_or_bus(
    changes: dict[str, Any], pages: int, seconds: float
) -> None:
    assert seconds_of(replace(TINY, **changes), (PageOp.READ, 0, pages)) == pytest.approx(seconds)


@pytest.mark.parametrize(("copy_back", "move"), [(True, 11.0), (False, 11.2)])
def test_collecting_takes_its_moves_and_its_erase(copy_back: bool, move: float) -> None:
    """Three blocks of data fill six places; the fourth to be filled makes the first be collected."""
    ssd = replace(
        TINY, channels=1, blocks_per_chip=6, over_provisioning=0.5, gc_threshold=0.2, copy_back=copy_back
    )
    drive = Drive(ssd)
    drive.write(0, 12)

    work = drive.run([PageOp.WRITE] * 4, [0, 1, 4, 5], [1] * 4)

    assert (work.written_pages, work.moved_pages, work.erases) == (4, 2, 1)
    assert work.seconds(ssd) == pytest.approx(4 * 10.1 + 2 * move + 100.0)


# -- What cannot be asked --------------------------------------------------------------------------------


@for_each(
    ("ops", "firsts", "counts", "message"),
    [
        ([0, 0], [0, 32], [1, 1], "run 1: 1 pages from page 32 are not within the drive's 32 pages"),
        ([0], [-1], [1], "run 0: 1 pages from page -1"),
        ([0], [0], [-1], "run 0: -1 pages from page 0"),
        ([0], [1], [2**63 - 1], "run 0: 9,223,372,036,854,775,807 pages from page 1"),
        ([3], [0], [1], "run 0: operation 3 is none of WRITE, TRIM, READ"),
        ([-1], [0], [1], "run 0: operation -1 is none of WRITE, TRIM, READ"),
        ([0, 300], [0, 0], [1, 1], "run 1: operation 300 is none of"),
        ([0.5], [1.7], [2.2], r"run 0: firsts holds 1\.7; pages and operations are integers"),
        ([0.5], [1], [2], r"run 0: ops holds 0\.5"),
        ([0], [0], [float("nan")], "run 0: counts holds nan"),
        ([0, 0], [0, 1e30], [1, 1], r"run 1: firsts holds 1e\+30"),
        ([0], [2**70], [1], "run 0: firsts holds 1180591620717411303424"),
        ([0], [0], [True], "run 0: counts holds True"),
        (["write"], [0], [1], "run 0: ops holds 'write'"),
        ([0], [2**63 + 1], [1], "run 0: 1 pages from page -"),
        ([0, 0], [0], [1], r"shapes \(2,\), \(1,\) and \(1,\)"),
    ],
)
def test_what_does_not_fit_the_drive_is_refused_before_anything_is_done(
    ops: list[int], firsts: list[int], counts: list[int], message: str
) -> None:
    drive = Drive(TINY)

    with pytest.raises(ConfigError, match=message):
        drive.run(ops, firsts, counts)

    assert drive.work().written_pages == 0


def test_no_runs_are_no_work() -> None:
    assert Drive(TINY).run([], [], []).written_pages == 0


def test_a_copy_goes_its_own_way() -> None:
    drive = Drive(TINY)
    drive.write(0, 10)
    before = drive.places()

    copied = drive.copy()
    copied.write(0, 10)

    assert drive.places().tolist() == before.tolist()
    assert drive.work().written_pages == 10
    assert copied.work().written_pages == 20


def test_a_drive_takes_on_the_state_of_another_of_its_make_alone() -> None:
    drive, other = Drive(TINY), Drive(TINY)
    drive.write(0, 10)

    other.become(drive)
    drive.write(0, 10)

    assert other.work().written_pages == 10
    other.write(0, 10)
    assert other.places().tolist() == drive.places().tolist()
    with pytest.raises(ConfigError, match="of the same make"):
        other.become(Drive(replace(TINY, channels=1)))


def test_pages_that_were_never_written_cost_nothing_to_read_or_give_up() -> None:
    drive = Drive(TINY)

    work = drive.run([PageOp.READ, PageOp.TRIM], [0, 0], [5, 5])

    assert not work.per_chip.any()
    assert work.write_amplification is None
    assert work.seconds(TINY) == 0.0
