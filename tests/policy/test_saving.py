"""The life of a save: compared with a program that does one thing after another, and under events in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from penstock.policy.draining import Speeds
from penstock.policy.saving import (
    Abort,
    Begin,
    Commit,
    Discard,
    Distrust,
    Fault,
    Finish,
    GiveUpTier,
    Hold,
    Instruction,
    Instructions,
    Place,
    Prune,
    Raise,
    Save,
    SaveTerms,
    Stage,
    Suspect,
    Verify,
    WriteHere,
    WritePart,
)

#: At which encoding first makes a snapshot durable sooner, and at which it does not.
FAST_ENCODER, SLOW_ENCODER = Speeds(1.0, 9.0, 0.5), Speeds(9.0, 1.0, 0.5)

terms_of_any_save = st.builds(
    SaveTerms,
    tiers=st.sampled_from([(0,), (1,), (0, 1), (0, 1, 2)]),
    ranks=st.integers(1, 4),
    can_repeat=st.booleans(),
    is_drain=st.booleans(),
    holds=st.sampled_from([(False, False), (True, False), (True, True)]),
)


# -- A program that does one thing after another ---------------------------------------------------------------


class Failed(Exception):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault


class World:
    """What happens to whoever asks next; everything works once that is used up."""

    def __init__(self, terms: SaveTerms, placed: int, is_delta: bool, refers: bool, faults: Any) -> None:
        self.terms, self.placed, self.wants_delta, self.refers = terms, placed, is_delta, refers
        self._faults: Iterator[Fault | None] = iter(faults)
        self.log: list[Instruction] = []

    def do(self, instruction: Instruction) -> None:
        self.log.append(instruction)
        if fault := next(self._faults, None):
            raise Failed(fault)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, World]:
    """Return the same world twice."""
    terms = draw(terms_of_any_save)
    faults = draw(st.lists(st.one_of(st.none(), st.none(), st.sampled_from(Fault)), max_size=12))
    those = terms, draw(st.sampled_from(terms.tiers)), draw(st.booleans()), draw(st.booleans()), faults
    return World(*those), World(*those)


def save_obviously(world: World) -> None:
    """Save as a program would that has to know only where it is."""
    terms, log = world.terms, world.log
    last = terms.tiers[-1]
    tier = last
    if len(terms.tiers) > 1:
        try:
            world.do(Place())
        except Failed:
            log.append(Raise())
            return
        tier = world.placed
    is_encoded, is_baseline = tier == last, False
    while True:
        done = 0
        is_delta = world.wants_delta and not is_baseline
        try:
            world.do(Begin(tier, is_encoded, is_baseline))
            done = 1
            world.do(WritePart())
            world.do(Commit(is_delta and world.refers))
            done = 2
            world.do(Verify())
            done = 3
            if terms.holds[is_delta and world.refers]:
                log.append(Hold())
            world.do(Prune(tier))
            log.append(Finish(tier != last))
            return
        except Failed as failed:
            fault = failed.fault
        is_again = terms.ranks == 1 and terms.can_repeat
        if done == 1:
            log.append(Abort())
        if done == 2 and fault in (Fault.DAMAGED, Fault.REFUSED):
            log.append(Distrust(Suspect.NEW))
        if fault is Fault.REFUSED and tier != last:
            log.append(GiveUpTier(tier))
            if done == 0 or (done == 1 and is_again):
                tier = terms.tiers[terms.tiers.index(tier) + 1]
                is_encoded, is_baseline = True, False
                continue
        elif fault is Fault.DAMAGED and done == 1 and is_delta:
            log.append(Distrust(Suspect.REFERENCE))
            if is_again:
                is_encoded, is_baseline = True, True
                continue
        elif fault is Fault.DAMAGED and done >= 2 and terms.is_drain:
            log.append(Discard())
        elif fault is Fault.STATE and terms.is_drain and done == 1:
            log.append(Distrust(Suspect.STATE))
        elif fault is Fault.PROCESS and done == 1 and is_again:
            log.append(WriteHere())
            is_encoded, is_baseline = True, False
            continue
        log.append(Raise())
        return


def answer(save: Save, instruction: Instruction, world: World) -> Instructions:
    """Return what a save says to the outcome of an instruction."""
    match instruction:
        case Place():
            return save.placed(world.placed)
        case Begin(is_baseline=is_baseline):
            return save.begun(is_delta=world.wants_delta and not is_baseline)
        case WritePart():
            *most, last = range(world.terms.ranks)
            assert all(save.part_durable(rank, refers=False) == () for rank in most)
            return save.part_durable(last, refers=world.refers)
        case Commit():
            return save.committed()
        case Verify():
            return save.verified()
        case Prune():
            assert save.staged() == ()
            return save.pruned()
    raise AssertionError(f"{instruction} has no outcome")


def save_as_instructed(world: World) -> None:
    save = Save(world.terms)
    instructions = save.offered()
    while True:
        *before, last = instructions
        world.log += before
        if isinstance(last, (Finish, Raise)):
            world.log.append(last)
            return
        try:
            world.do(last)
            instructions = answer(save, last, world)
        except Failed as failed:
            instructions = save.failed(failed.fault)


@settings(max_examples=1000, deadline=None)
@given(worlds())
def test_a_save_does_what_a_program_does_that_takes_one_step_after_another(both: tuple[World, World]) -> None:
    obvious, told = both

    save_obviously(obvious)
    save_as_instructed(told)

    assert told.log == obvious.log


# -- Events in any order -----------------------------------------------------------------------------------------


class SavesOnRanks(RuleBasedStateMachine):
    """Files as they would lie there, if every instruction were obeyed; one save after the other."""

    save: Save
    #: Parts of the draft; None: there is no draft.
    draft: set[int] | None
    #: Tiers that refused.
    refused: set[int]

    def __init__(self) -> None:
        super().__init__()
        self.expected: Any = Raise()

    def obey(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self.expected = instruction
            match instruction:
                case Begin(tier=tier):
                    assert self.draft is None, "one draft at a time"
                    assert self.commits == 0, "what is committed is not written once more"
                    assert tier not in self.refused, "a tier that refused is asked no more"
                case Commit(is_delta=is_delta):
                    assert self.draft == set(range(self.terms.ranks)), "all parts are durable"
                    assert is_delta <= self.is_delta
                case Hold() | Prune():
                    assert self.was_read_back, "old snapshots go once the new one was read back"
                case Abort():
                    assert self.commits == 0
                    self.draft = None
                case GiveUpTier(tier=tier):
                    self.refused.add(tier)
                case Discard():
                    assert self.commits == 1
                case Finish():
                    assert (self.commits, self.was_pruned, self.is_staged) == (1, True, True)
                case Raise():
                    assert self.draft is None, "what fails leaves no draft"
        assert self.is_over == (self.save.stage in (Stage.SAVED, Stage.FAILED))

    @property
    def is_over(self) -> bool:
        return isinstance(self.expected, (Finish, Raise))

    @precondition(lambda self: self.is_over)
    @rule(terms=terms_of_any_save)
    def offer(self, terms: SaveTerms) -> None:
        self.terms, self.save = terms, Save(terms)
        self.draft = None
        self.commits = 0
        self.refused = set()
        self.is_staged = self.was_read_back = self.was_pruned = False
        self.obey(self.save.offered())

    def is_at(self, kind: type[Any]) -> bool:
        return isinstance(self.expected, kind)

    @precondition(lambda self: self.is_at(Place))
    @rule(data=st.data(), speeds=st.sampled_from([None, FAST_ENCODER, SLOW_ENCODER]))
    def place(self, data: st.DataObject, speeds: Speeds | None) -> None:
        tier = data.draw(st.sampled_from(self.terms.tiers))
        self.obey(self.save.placed(tier, speeds))
        is_encoded = tier == self.terms.tiers[-1] or speeds is FAST_ENCODER
        assert self.expected == Begin(tier, is_encoded)

    @precondition(lambda self: self.is_at(Begin))
    @rule(wants_delta=st.booleans())
    def begin(self, wants_delta: bool) -> None:
        self.is_delta = wants_delta and not self.expected.is_baseline
        self.draft = set()
        self.obey(self.save.begun(is_delta=self.is_delta))

    @precondition(lambda self: self.is_at(WritePart))
    @rule(data=st.data(), refers=st.booleans())
    def write_part(self, data: st.DataObject, refers: bool) -> None:
        assert self.draft is not None, "it was begun"
        rank = data.draw(st.sampled_from(sorted(set(range(self.terms.ranks)) - self.draft)))
        self.draft.add(rank)
        self.obey(self.save.part_durable(rank, refers=refers))

    @precondition(lambda self: self.is_at(Commit))
    @rule()
    def commit(self) -> None:
        self.draft, self.commits = None, self.commits + 1
        self.obey(self.save.committed())
        assert self.save.is_committed

    @precondition(lambda self: self.is_at(Verify))
    @rule()
    def read_back(self) -> None:
        self.was_read_back = True
        self.obey(self.save.verified())

    @precondition(lambda self: self.is_at(Prune) and not self.was_pruned)
    @rule()
    def prune(self) -> None:
        self.was_pruned = True
        self.obey(self.save.pruned())
        assert self.is_over == self.is_staged

    @precondition(lambda self: not self.is_over and not self.is_staged)
    @rule()
    def stage(self) -> None:
        self.is_staged = True
        self.obey(self.save.staged())
        assert self.is_over == self.was_pruned

    @precondition(lambda self: not self.is_over)
    @rule(fault=st.sampled_from(Fault))
    def fail(self, fault: Fault) -> None:
        self.obey(self.save.failed(fault))
        assert isinstance(self.expected, (Begin, Raise)), "it begins again, or it is over"


TestSavesOnRanks = SavesOnRanks.TestCase
TestSavesOnRanks.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("is_staged_first", [True, False])
def test_a_save_is_over_once_it_is_durable_and_the_state_is_copied(is_staged_first: bool) -> None:
    """A small state may be durable before the thread that copied it goes on."""
    save = Save(SaveTerms((0, 1)))
    save.offered()
    save.placed(0)
    save.begun(is_delta=False)
    save.part_durable(0, refers=False)
    save.committed()
    save.verified()
    events = [save.staged, save.pruned] if is_staged_first else [save.pruned, save.staged]

    assert [event() for event in events] == [(), (Finish(is_to_drain=True),)]


# -- What does not come in its turn ------------------------------------------------------------------------------


def test_an_event_that_nobody_waits_for_is_a_fault_of_ours() -> None:
    save = Save(SaveTerms())
    with pytest.raises(AssertionError, match="waits for offered was notified of committed"):
        save.committed()
    save.offered()
    save.begun(is_delta=False)
    save.failed(Fault.RANK)
    with pytest.raises(AssertionError, match="REFUSED after"):
        save.failed(Fault.REFUSED)


@pytest.mark.parametrize("fault", [Fault.RANK, Fault.NEWER, Fault.OTHER])
def test_a_late_rank_or_a_newer_format_is_raised_on_all_ranks_and_leaves_no_draft(fault: Fault) -> None:
    save = Save(SaveTerms((0, 1), ranks=3, can_repeat=True))
    save.offered()
    save.placed(0)
    save.begun(is_delta=True)
    save.part_durable(2, refers=True)

    assert save.failed(fault) == (Abort(), Raise())
