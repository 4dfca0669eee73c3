"""A plan of reads, run for a training loop: the loader, its memory and its transforms."""

from penstock.loader.base import BaseLoader, SkippedSample
from penstock.loader.budget import MemoryBudget
from penstock.loader.loader import Loader
from penstock.report import print_report

__all__ = ["BaseLoader", "Loader", "MemoryBudget", "SkippedSample", "print_report"]
