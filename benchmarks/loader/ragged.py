"""Batches of arrays of unequal length: Penstock's padded= and ragged= beside DataLoader with the usual collate.

    python benchmarks/loader/ragged.py [--quick] [--rounds N] [--data short|long ...]

A data set in memory whose samples are arrays of 2 to 20 ("short") or 2 to 2,000 tokens ("long"), int64, and a label;
batches of 64, shuffled. DataLoader pads with torch.nn.utils.rnn.pad_sequence, and for ragged concatenates and sums the
lengths up, with 0, 1 and 2 persistent workers. Both sides give the same batches, which is checked first. Each turn
times one epoch, after one that is not timed, so that a loader which reads ahead is as far ahead at its end as at its
begin; sides take turns, in another order each round. Penstock has ten seconds before, and longer where it tries who
makes the batches, to find out what is fastest; a line says what it chose. "__getitem__" calls the data set for each
sample and does nothing else, which all sides pay: no loader is faster. "bare" is the least that there is to do: one
loop over the samples of a batch and one copy of their bytes into place; "memcpy" copies as many bytes as batches have,
padding included, into memory that is used again, and calls nothing for a sample.
Printed: samples per second (median, least, most over rounds), and the ratio of each to the best DataLoader, round by
round; and of the process, without its workers, processor time a sample and pages that the kernel supplied for a batch
(medians).
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from promise import settle
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import penstock.torch as pt

BATCH = 64
LONGEST = {"short": 20, "long": 2000}


class Texts:
    """Arrays of tokens, with a label."""

    def __init__(self, samples: int, longest: int) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(2, longest + 1, samples)
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        self.tokens = rng.integers(1, 50_000, int(self.ends[-1]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.tokens[self.begins[index] : self.ends[index]], index


def padded(samples: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [torch.from_numpy(text) for text, _ in samples]
    return pad_sequence(texts, batch_first=True), torch.tensor([label for _, label in samples])


def ragged(samples: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    texts = [torch.from_numpy(text) for text, _ in samples]
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)
    return torch.cat(texts), offsets, torch.tensor([label for _, label in samples])


def penstock_side(data: Texts, how: str) -> pt.Loader:
    fields: dict[str, Any] = {"padded": {0: 0}} if how == "padded" else {"ragged": [0]}
    return pt.Loader(data, batch_size=BATCH, epochs=None, report=report_choice, **fields)


def report_choice(line: str) -> None:
    """Print who makes the batches from here on."""
    if "makes batches" in line:
        print(f"  {line}", flush=True)


def samples_alone(data: Texts) -> Iterable[int]:
    order = np.random.default_rng(0).permutation(len(data))
    for first in range(0, len(data), BATCH):
        yield len([data[index] for index in order[first : first + BATCH].tolist()])


def bare(data: Texts) -> Iterable[int]:
    order = np.random.default_rng(0).permutation(len(data))
    for first in range(0, len(data), BATCH):
        texts = [data[index][0] for index in order[first : first + BATCH].tolist()]
        out = np.empty(sum(map(len, texts)), np.int64)
        np.concatenate(texts, out=out)
        yield len(texts)


def memcpy(data: Texts, how: str) -> Iterable[int]:
    order = np.random.default_rng(0).permutation(len(data))
    lengths = (data.ends - data.begins)[order]
    sizes = [
        int(part.max() * part.size if how == "padded" else part.sum())
        for part in (lengths[first : first + BATCH] for first in range(0, len(data), BATCH))
    ]
    out, first = np.empty(max(sizes), np.int64), 0
    for size in sizes:
        first = (first + size) % max(1, data.tokens.size - max(sizes))
        out[:size] = data.tokens[first : first + size]
        yield size


def check(data: Texts) -> None:
    """Stop unless both sides make the same batches."""
    few: Any = torch.utils.data.Subset(data, range(200))  # type: ignore[arg-type]
    for how, collate in (("padded", padded), ("ragged", ragged)):
        fields: dict[str, Any] = {"padded": {0: 0}} if how == "padded" else {"ragged": [0]}
        with pt.Loader(few, batch_size=BATCH, epochs=1, shuffle=False, report=None, **fields) as ours:
            theirs: Any = DataLoader(few, batch_size=BATCH, collate_fn=collate)
            for mine, (*texts, labels) in zip(ours, theirs, strict=True):
                found = [mine[0]] if how == "padded" else [mine[0].values, mine[0].offsets]
                assert all(map(torch.equal, found, texts)), f"{how}: other batches"
                assert torch.equal(mine[1], labels), f"{how}: other labels"


def sides(data: Texts, how: str, warm_up_seconds: float) -> dict[str, Callable[[], Iterable[Any]]]:
    collate = padded if how == "padded" else ragged
    found: dict[str, Callable[[], Iterable[Any]]] = {}
    for workers in (0, 1, 2):
        theirs: Any = DataLoader(
            data,  # type: ignore[arg-type]
            BATCH,
            shuffle=True,
            num_workers=workers,
            collate_fn=collate,
            persistent_workers=workers > 0,
        )
        found[f"DataLoader, {workers} workers"] = lambda theirs=theirs: theirs  # type: ignore[misc]
    ours = penstock_side(data, how)
    settle(ours, warm_up_seconds)
    found["Penstock"] = lambda: ours
    found["__getitem__"] = lambda: samples_alone(data)
    found["bare"] = lambda: bare(data)
    found["memcpy"] = lambda: memcpy(data, how)
    return found


def rate(side: Callable[[], Iterable[Any]], samples: int) -> tuple[float, float, float]:
    """Return samples per second, microseconds of a processor for each, and new pages for each batch."""
    for _ in side():
        pass
    begin, worked, before = time.perf_counter(), time.process_time(), new_pages()
    for _ in side():
        pass
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - worked
    return samples / seconds, 1e6 * cpu_seconds / samples, (new_pages() - before) * BATCH / samples


def new_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def compare(name: str, samples: int, rounds: int, warm_up_seconds: float) -> None:
    data = Texts(samples, LONGEST[name])
    check(data)
    for how in ("padded", "ragged"):
        contenders = sides(data, how, warm_up_seconds)
        measured: dict[str, list[tuple[float, float, float]]] = {each: [] for each in contenders}
        for number in range(rounds):
            for each in random.Random(number).sample(list(contenders), len(contenders)):
                measured[each].append(rate(contenders[each], samples))
        rates = {each: [first for first, *_ in found] for each, found in measured.items()}
        best = [max(each) for each in zip(*(rates[each] for each in rates if each[0] == "D"), strict=True)]
        print(f"\n{name}, {how}: {samples:,} samples, batches of {BATCH}")
        for each, found in rates.items():
            ratios = [one / other for one, other in zip(found, best, strict=True)]
            print(
                f"  {each:24s} {statistics.median(found):>10,.0f} samples/s ({min(found):,.0f} to {max(found):,.0f}), "
                f"{statistics.median(ratios):.2f} x the best DataLoader ({min(ratios):.2f} to {max(ratios):.2f}); "
                f"{statistics.median(one[1] for one in measured[each]):.1f} us, "
                f"{statistics.median(one[2] for one in measured[each]):.0f} pages"
            )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", nargs="+", choices=LONGEST, default=list(LONGEST))
    arguments = parser.parse_args(words)
    print(f"{platform.node()}, {os.cpu_count()} processors, PyTorch {torch.__version__}")
    for name in arguments.data:
        samples = 256 if arguments.quick else {"short": 100_000, "long": 20_000}[name]
        rounds, warm_up_seconds = (1, 0.0) if arguments.quick else (arguments.rounds, 10.0)
        compare(name, samples, rounds, warm_up_seconds)


if __name__ == "__main__":
    main()
