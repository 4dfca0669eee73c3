"""What a trace of a watched loader says of its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.ranks.transport_of_job import rank_of_this_process
from penstock.trace.trace import JSON


def about(loader: object, batch: object) -> dict[str, JSON]:
    """Return what a trace of a watched loader says of its batches, as far as it can be seen from outside."""
    found: dict[str, JSON] = {"watched": type(loader).__qualname__, "rank": 0}
    first = next(_arrays(batch), None)
    size = getattr(loader, "batch_size", None)
    if first is not None:
        shape = [int(length) for length in first.shape]
        found |= {"shape": list(shape), "dtype": str(first.dtype).removeprefix("torch.")}
        size = size if isinstance(size, int) or not shape else shape[0]
    found["batch_size"] = size if isinstance(size, int) else None
    found["drop_last"] = getattr(loader, "drop_last", False) is True
    # A sampler that shares an epoch between ranks, as DistributedSampler does.
    sampler = getattr(loader, "sampler", None)
    rank, ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if isinstance(rank, int) and isinstance(ranks, int):
        found |= {"rank": rank, "ranks": ranks}
    else:
        found["rank"] = rank_of_this_process()
    return found


def _arrays(batch: object) -> Iterator[Any]:
    if isinstance(getattr(batch, "shape", None), tuple) and hasattr(batch, "dtype"):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _arrays(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _arrays(part)
