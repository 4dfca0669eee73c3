"""An SSD as a small model with memory: where each page lies, what garbage collection moves, how blocks wear."""

from penstock.machine.ssd.drive import Drive, PageOp, Work
from penstock.machine.ssd.ssd import HostLink, Ssd
from penstock.machine.ssd.wear import Lifetime, Wear, lifetime

__all__ = ["Drive", "HostLink", "Lifetime", "PageOp", "Ssd", "Wear", "Work", "lifetime"]
