"""What a simulated job takes for granted, each as a named value.

`PHYSICAL` is what a careful engineer would assume, and the default; `THESIS` is what the published numbers
(R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020, section 5.2) were computed with.
Each field says what the published value gets wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_type_hints

from penstock.errors import ConfigError

#: The value of `Assumptions.time` by which the loaders' own schedulers run.
TOGETHER = "together"
#: What they do, so that nothing else can be assumed.
_OF_LOADERS = {
    "clients": "reading-now",
    "bandwidth": "shared",
    "curves": "interpolated",
    "remote": "fastest",
    "freed": "on-use",
    "counted": "always",
    "initial_stall": "longest",
    "staging_begins": "after-loading",
    "filling": "as-read",
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The modelling assumptions of a simulated run; the first of each pair is physical.

    time: how the ranks of a job share time. ``together``: the schedulers of all ranks run at once, as those of the
        loaders do (`penstock.simulate.scheduled`); how reads share a place, what is staged and when buffers are freed
        follows from what they do, so that the assumptions about these are the physical ones. ``rank-by-rank``: each
        rank goes through its whole local batch before the next one begins; the first ranks see little of the others,
        as if they had the shared store to themselves.
    clients: how many ranks share the store at a read (gamma). ``reading-now``: those with a read under way. With
        rank-by-rank one of the others. ``ahead``: oneself and every other rank whose list of read times has an entry
        at or after now, however far ahead; a read of next hour slows one of today. ``all``: N, always.
    bandwidth: what several reads of one place get. ``shared``: the place's bandwidth is divided among them.
        ``per-thread``: each gets all of it; two threads read twice what the device can.
    curves: a throughput between two measured thread counts. ``interpolated``: on the line between them. ``exact``: it
        is an error; the thread count has to be a key.
    remote: which of several ranks that hold a sample sends it. ``fastest``: the one whose tier reads fastest.
        ``last``: the one with the highest rank, whatever it reads from.
    remote_staging: which policies fetch ahead from other ranks. ``all``: every policy whose caches others may read.
        ``some``: DeepIO, LBANN and locality-aware; HDMLP asks other ranks only when the sample is already late.
    freed: when a consumed sample leaves the staging buffer. ``on-use``: at once. ``next-step``: when the first sample
        of the next step is asked for; a whole local batch is held longer than anybody needs it.
    counted: how the staging buffer's fill is counted. ``always``: bytes in, bytes out. ``first-time``: bytes go in the
        first time that a sample is staged and come off each time it leaves, so the buffer seems bottomless from the
        second epoch on.
    initial_stall: of ranks that load before training. ``longest``: training begins when the last of them is done.
        ``last-rank``: when the highest rank that loads is done; the others may still be loading.
    staging_begins: when staging threads begin under a policy that loads before training. ``after-loading``: then.
        ``at-zero``: at time zero, with the samples that are still being loaded available already.
    filling: what bringing a sample into a tier costs. ``as-read``: its fetch, and the tier's write. ``preprocessed``:
        its fetch at N clients, then preprocessing (beta), though tiers keep samples as they are stored.
    pieces: how HDMLP's list of samples by frequency is sorted by first use. ``tiers``: what each tier will keep.
        ``from-staging``: pieces as large as the staging buffer, the first tier, ...: each a class too early, so that
        tiers do not keep what their frequency says.
    unread: samples that a rank never reads but has room for. ``left``: it does not keep them. ``kept``: it reads and
        keeps them; that costs bandwidth and serves nobody but other ranks by luck.
    locality: what locality-aware loading does. ``reordered``: ranks exchange samples of a batch for those they hold,
        and tiers are filled fastest first. ``as-published``: the exchange never takes effect, and all goes to the
        second tier.
    late_copies: which samples parallel data staging copies from other ranks. ``any``: those that follow its own part
        until its tier is full. ``lower``: those before its own part alone; rank 0 copies none.
    """

    time: Literal["together", "rank-by-rank"] = "together"
    clients: Literal["reading-now", "ahead", "all"] = "reading-now"
    bandwidth: Literal["shared", "per-thread"] = "shared"
    curves: Literal["interpolated", "exact"] = "interpolated"
    remote: Literal["fastest", "last"] = "fastest"
    remote_staging: Literal["all", "some"] = "all"
    freed: Literal["on-use", "next-step"] = "on-use"
    counted: Literal["always", "first-time"] = "always"
    initial_stall: Literal["longest", "last-rank"] = "longest"
    staging_begins: Literal["after-loading", "at-zero"] = "after-loading"
    filling: Literal["as-read", "preprocessed"] = "as-read"
    pieces: Literal["tiers", "from-staging"] = "tiers"
    unread: Literal["left", "kept"] = "left"
    locality: Literal["reordered", "as-published"] = "reordered"
    late_copies: Literal["any", "lower"] = "any"

    def __post_init__(self) -> None:
        for name, known in _known_values().items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"assumptions.{name} is {value!r}; it is one of {', '.join(map(repr, known))}"
                )
        if self.time == TOGETHER:
            for name, value in _OF_LOADERS.items():
                if getattr(self, name) != value:
                    raise ConfigError(
                        f"assumptions.{name} is {getattr(self, name)!r}, and loaders that run together do as "
                        f"{value!r} says: it needs time = 'rank-by-rank', as in the preset thesis"
                    )
        elif self.clients == "reading-now":
            raise ConfigError(
                "assumptions.clients is 'reading-now', but ranks that go through a step one after the other never "
                "read at once: use 'all' or 'ahead', or time = 'together'"
            )


@cache
def _known_values() -> dict[str, tuple[str, ...]]:
    """Return the values that each field may have: looking them up takes a millisecond."""
    return {name: get_args(hint) for name, hint in get_type_hints(Assumptions).items()}


PHYSICAL = Assumptions()
THESIS = Assumptions(
    time="rank-by-rank",
    clients="ahead",
    bandwidth="per-thread",
    curves="exact",
    remote="last",
    remote_staging="some",
    freed="next-step",
    counted="first-time",
    initial_stall="last-rank",
    staging_begins="at-zero",
    filling="preprocessed",
    pieces="from-staging",
    unread="kept",
    locality="as-published",
    late_copies="lower",
)
PRESETS = {"physical": PHYSICAL, "thesis": THESIS}
