"""Faults of a job's other rank, drawn from a seed: in which steps it is stopped, cut off or slow; when it is killed.

A schedule is data, and its text has what draws it again. What it says is done to a real process: by signals,
or at the link of a network namespace, in which the process is as on another host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.interpreters import Interpreters

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with a rank from one step on until another. kind: of those that a host has."""

    kind: str
    begins: int
    ends: int

    def __str__(self) -> str:
        return f"{self.kind} from step {self.begins} to {self.ends}"


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """Faults one after the other, by steps; and after how many more, once all is well again, the rank is killed."""

    seed: int
    kinds: tuple[str, ...]
    least_steps: int
    faults: tuple[Fault, ...]
    killed: int

    @classmethod
    def drawn(cls, seed: int, kinds: tuple[str, ...], least_steps: int) -> FaultSchedule:
        """Draw each kind once, in any order, for least_steps to twice as many; as many at most lie between them."""
        random, faults, step = Random(seed), [], 0
        for kind in random.sample(kinds, len(kinds)):
            begins = step + random.randint(1, least_steps)
            step = begins + random.randint(least_steps, 2 * least_steps)
            faults.append(Fault(kind, begins, step))
        return cls(seed, kinds, least_steps, tuple(faults), random.randint(1, least_steps))

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults))
        drawn = f"seed {self.seed}, kinds {self.kinds}, least_steps {self.least_steps}"
        return f"{drawn}: {faults}; killed {self.killed} steps after all is well again"


class Process:
    """Another host that is a process of this one."""

    kinds: tuple[str, ...] = ("stopped",)
    process: subprocess.Popen[str] | None = None

    def start(self, interpreters: Interpreters, program: str, *arguments: str) -> subprocess.Popen[str]:
        self.process = interpreters.start(program, *arguments, **PIPES)
        return self.process

    def begin(self, kind: str) -> None:
        assert kind == "stopped"
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def end(self, kind: str) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Leave nothing of it behind."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


class Namespace(Process):
    """Another host that is a network namespace, at the other end of a link that can be cut, or slow.

    A slow link has a token bucket, over which 125 bytes a second come back, so that each answer is late, and none is
    lost: netem, which delays packets, is not in every kernel, and not every kernel has these.
    """

    def __init__(self) -> None:
        self.name = f"penstock-{os.getpid()}"
        self.link, self._far = f"pn{os.getpid()}", f"pf{os.getpid()}"
        ip("netns", "add", self.name)
        try:
            self._lay_link()
        except BaseException:
            self.close()
            raise

    def _lay_link(self) -> None:
        """Put a link between it and this host, and note what can be done to that."""
        ip("link", "add", self.link, "type", "veth", "peer", "name", self._far, "netns", self.name)
        for inside, link, address in (
            ((), self.link, "198.18.77.1/30"),
            (("-n", self.name), self._far, "198.18.77.2/30"),
        ):
            ip(*inside, "address", "add", address, "dev", link)
            ip(*inside, "link", "set", link, "up")
        self.kinds = ("stopped", "cut off")
        try:
            self.begin("slow")
        except subprocess.CalledProcessError:
            return
        self.end("slow")
        self.kinds = (*self.kinds, "slow")

    @staticmethod
    def is_possible() -> bool:
        return os.geteuid() == 0 and shutil.which("tc") is not None

    def start(self, interpreters: Interpreters, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", program, *arguments]
        environment = {"PENSTOCK_INTERFACE": self._far, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, env=os.environ | environment, **PIPES)
        return self.process

    def begin(self, kind: str) -> None:
        if kind == "cut off":
            ip("link", "set", self.link, "down")
        elif kind == "slow":
            self._at_far_end("add", "tbf", "rate", "1kbit", "burst", "1600", "limit", "100000")
        else:
            super().begin(kind)

    def end(self, kind: str) -> None:
        if kind == "cut off":
            ip("link", "set", self.link, "up")
        elif kind == "slow":
            self._at_far_end("delete")
        else:
            super().end(kind)

    def _at_far_end(self, what: str, *words: str) -> None:
        command = ["tc", "-n", self.name, "qdisc", what, "dev", self._far, "root", *words]
        subprocess.run(command, check=True)

    def close(self) -> None:
        try:
            super().close()
        finally:
            ip("netns", "delete", self.name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
