"""Which files of a snapshot each host has, and that they outlive a host."""

from __future__ import annotations

from collections.abc import Sequence

from tests.for_each import for_each

from penstock.policy.host_copies import HeldSnapshot, plan_copies, plan_gathering, restorable_chain

Held = dict[int, set[int]]


def copied(hosts: Sequence[int], parts: Sequence[int | None]) -> Held:
    """Return what each host has once all was copied as planned."""
    held: Held = {host: set() for host in hosts}
    copies = plan_copies(hosts, parts, held)
    for rank, numbers in enumerate(copies.own):
        held[hosts[rank]].update(numbers)
    for pull in copies.pulls:
        assert pull.file in held[hosts[pull.source]], "a rank gives what its own host has"
        held[hosts[pull.to]].add(pull.file)
    return held


@for_each("hosts", [[0], [0, 0, 0], [0, 1], [0, 0, 2, 2], [0, 1, 0, 1, 4], [0, 1, 2, 3], [0, 1, 1, 1]])
def test_after_any_host_is_lost_the_others_have_all_and_a_new_one_is_given_it(hosts: list[int]) -> None:
    """As many parts as ranks, then as saved by more ranks, then by fewer."""
    for count in (len(hosts), 2 * len(hosts) + 1, 1):
        parts = [*range(count), None]
        held = copied(hosts, parts)

        # Each host: its own ranks' parts, those of one other host, and the manifest; nothing is copied twice.
        assert all(count in numbers for numbers in held.values())
        assert plan_copies(hosts, parts, held).pulls == []
        for lost in set(hosts) if len(set(hosts)) > 1 else ():
            after = {**held, lost: set()}
            for pull in plan_gathering(hosts, count + 1, after):
                assert pull.file in held[hosts[pull.source]]
                assert hosts[pull.source] != lost
                after[hosts[pull.to]].add(pull.file)
            assert all(numbers == set(range(count + 1)) for numbers in after.values())


def test_what_is_restored_is_the_last_snapshot_of_which_nothing_is_missing() -> None:
    def held(step: int, reference: str, there: str) -> HeldSnapshot:
        return HeldSnapshot(step, f"uid {step}", float(step), reference, {"a": 1, "b": 1}, list(there))

    hosts = [held(1, "", "a"), held(1, "", "b"), held(2, "uid 1", "ab"), held(3, "uid 2", "a")]

    assert [each.step for each in restorable_chain(hosts, None)] == [1, 2]
    assert [each.step for each in restorable_chain(hosts, 1)] == [1]
    assert restorable_chain(hosts, 3) == []
    assert restorable_chain([held(5, "uid 4", "ab")], None) == [], "what it is a difference to is missing"
