"""What separate jobs of a host keep for each other: they find the same memory by what their data are."""

from __future__ import annotations

from contextlib import ExitStack

from penstock.arena import Arena
from penstock.loader.local_disk import fingerprint_of
from penstock.ranks.rendezvous import Rendezvous
from penstock.store import Source
from penstock.store.job_memory import JobMemory, new_arenas


class JobsOfHost:
    """This process's part of the memory that the jobs of a host have for one data set.

    memory: where samples are read. is_first: whether no other job had any.
    capacity_bytes: of the memory, if this process is the first; else that is what the first one said.
    Raises: ConfigError where there can be no socket or no such memory, or nobody answers.
    """

    def __init__(self, source: Source, capacity_bytes: int) -> None:
        with ExitStack() as closing:
            made: list[Arena] = []

            def make() -> list[int]:
                made.extend(new_arenas(capacity_bytes, source.sizes_bytes))
                for each in made:
                    closing.callback(each.close)
                return [each.descriptor for each in made]

            self._meeting = Rendezvous(fingerprint_of(source).hex(), make)
            closing.callback(self._meeting.close)
            self.is_first = self._meeting.is_first
            if not self.is_first:
                for descriptor in self._meeting.descriptors:
                    made.append(Arena.attach(descriptor))
                    closing.callback(made[-1].close)
            table, memory = made
            self.memory = JobMemory(table, memory, source.sizes_bytes)
            self._closing = closing.pop_all()

    def close(self) -> None:
        """Leave: the others keep what is there. Twice is harmless."""
        self._closing.close()
        self.memory.close()
