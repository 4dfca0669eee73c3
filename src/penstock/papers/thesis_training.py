"""Figures 5.1 to 5.3 and 5.9 to 5.14, Tables 5.7 and 5.8 of the thesis: its machine, and its jobs on a supercomputer.

The curves are measured on this machine. The jobs are predicted, by what `penstock simulate loading` runs, for the store
and the memory that section 5.2.1 and listing 4.1 describe: their nodes are not here. Source: R. Böhringer, "Clairvoyant
Prefetching for Machine Learning I/O", ETH Zürich 2020: "the thesis".
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.flow.cpus import available_cpus
from penstock.loader.prediction import prepare_clock
from penstock.machine import Machine
from penstock.machine.places import Rate
from penstock.measure.file_rates import MeasuredCurve, measure_files
from penstock.measure.memory_rates import measure_memory
from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.measure.policies import PolicyRuns, run_policies
from penstock.papers.catalog import Repeated, Result
from penstock.simulate.policies import policy_named
from penstock.simulate.scenario import Scenario, scenario_named
from penstock.simulate.sizes import SizeDistribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Bytes/s by threads or nodes: sections 5.2.1 and listing 4.1, from Figures 5.1 to 5.3.
MEMORY = {1: 16_550e6, 2: 21_164e6, 3: 21_186e6, 4: 21_415e6}
DISK = {1: 66e6, 2: 86e6, 3: 129e6, 4: 146e6}
STORE = {1: 66e6, 2: 86e6, 3: 129e6, 4: 146e6, 8: 326e6}
#: Table 5.7: times as fast as one node, of ImageFolder and of HDMLP.
TABLE_5_7 = {
    2: (1.973, 1.998),
    4: (3.827, 4.008),
    8: (7.301, 7.960),
    16: (13.401, 15.9),
    32: (23.872, 30.952),
    64: (38.946, 56.271),
}
#: Table 5.8: times as fast as ImageFolder, and as HDMLP on one node.
TABLE_5_8 = {
    1: (2.433, 1.0),
    2: (2.408, 2.005),
    4: (4.057, 7.192),
    8: (2.147, 7.640),
    16: (2.298, 17.987),
    32: (2.433, 40.146),
    64: (2.476, 85.591),
}
#: How many times as long DataLoader without workers and with four stalls, at most: Figures 5.11 and 5.13.
STALLS = {"5.11": (1_132, 36), "5.13": (2_924, 44)}
#: DataLoader without workers; with workers, which read ahead; HDMLP.
POLICIES = ("naive", "staging", "frequency")
_LABELS = {"naive": "ImageFolder", "staging": "multi-threaded", "frequency": "HDMLP"}
_COLOURS = {"naive": Colour.FAINT, "staging": Colour.ORANGE, "frequency": Colour.BLUE}
_KB, _MB, _GB = 10**3, 10**6, 10**9
#: Every so many samples of ImageNet stand for all of them: the shape of the curves does not change with their number.
_THINNED = 10
#: Images/s of a P100, by network: assumed, as the thesis does not say.
_IMAGES_PER_SECOND = {"ResNet-50": 220.0, "SqueezeNet": 1_000.0}
_IMAGE_BYTES = 108 * _KB
_SECONDS = 20.0
_JOBS_WHY = (
    "Its nodes are not here: these are predictions for the store that section 5.2.1 describes, which serves one node "
    "at 66 MB/s and all at 324;"
)


def figure_5_1() -> Repeated:
    """Return what memory delivers by threads."""
    _, curves = measure_memory(available_cpus(), _SECONDS, time.perf_counter, 10)
    why = "Another machine, and STREAM's kernel as NumPy has it; numbers of the thesis are those its simulation takes."
    return _measured(curves[0], MEMORY, why)


def figure_5_2() -> Repeated:
    """Return what a disk delivers in random reads of 4 KiB past the page cache, by threads."""
    folder = tempfile.gettempdir()
    rates = measure_files(
        folder, 4096, 2 * _SECONDS, time.perf_counter, lambda _: None, threads=(1, 2, 4, 8, 12)
    )
    curve = rates.curve(is_write=False, is_random=True, largest=False)
    why = " ".join(
        [
            "Another disk, that of temporary files (TMPDIR); numbers of the thesis are those its simulation takes.",
            *rates.remarks,
        ]
    )
    return _measured(curve, DISK, why)


def figure_5_3() -> Repeated:
    """Return what the shared store of the predictions delivers by nodes."""
    curve = _machine(1, None).source.clients
    assert curve is not None, "scenario 1 has one"
    counts = (1, 2, 4, 8, 16, 32)
    rates = [curve.at(count) for count in counts]
    results = [
        Result(f"{count} nodes", rate, STORE.get(count), "bytes per second")
        for count, rate in zip(counts, rates, strict=True)
    ]
    why = (
        "One machine has no nodes to read with: this is the curve that the predictions take. Under mpirun, penstock "
        "calibrate --thorough --shared FOLDER measures it."
    )
    series = [Series("the store of 5.2.1", counts, [rate / _MB for rate in rates], Colour.BLUE, marker="o")]
    return Repeated(results, why, lambda: draw_panels([Panel("", series)], x_label="nodes", y_label="MB/s"))


def table_5_7() -> Repeated:
    """Return how many times as fast so many nodes load 245 images as one."""
    job = _job("hymenoptera", 245, 27 * _MB // 245, 100, 64, None)
    runs = _runs(job, (1, *TABLE_5_7), ("naive", "frequency"))
    results = []
    for ranks, published in TABLE_5_7.items():
        for policy, said in zip(("naive", "frequency"), published, strict=True):
            factor = _seconds(runs, policy, 1) / _seconds(runs, policy, ranks)
            results.append(Result(f"{ranks} nodes, {_LABELS[policy]}, speedup", factor, said, "factor"))
    results += _load_times(runs)
    why = (
        f"{_JOBS_WHY} 27 MB stay in the caches of a real one, so that ImageFolder, which reads them 100 times, speeds "
        "up there beyond the 8 nodes that saturate it."
    )
    return Repeated(results, why, lambda: _draw_seconds(runs, "load time (s)"))


def table_5_8() -> Repeated:
    """Return how many times as fast HDMLP loads 300,000 images as ImageFolder, and as one node."""
    job = _job("ImageNet, 300,000 images", 300_000 // _THINNED, 110 * _KB, 1, 64, None)
    runs = _runs(job, tuple(TABLE_5_8), ("naive", "frequency"))
    one = _seconds(runs, "frequency", 1)
    results = []
    for ranks, (over_naive, over_one) in TABLE_5_8.items():
        own = _seconds(runs, "frequency", ranks)
        speedup = _seconds(runs, "naive", ranks) / own
        results.append(Result(f"{ranks} nodes, HDMLP over ImageFolder", speedup, over_naive, "factor"))
        results.append(Result(f"{ranks} nodes, HDMLP, speedup", one / own, over_one, "factor"))
    results += _load_times(runs)
    why = (
        f"{_JOBS_WHY} every {_THINNED}th image stands for all; in one epoch nothing is read twice, so that all "
        "is bounded by the store, which on Piz Daint grew with the nodes beyond what IOR measured in 4 KB."
    )
    return Repeated(results, why, lambda: _draw_seconds(runs, "load time (s)"))


def figure_5_11() -> Repeated:
    """Return stalls of ResNet-50 on a tenth of ImageNet."""
    return _stalls("ResNet-50", 100_000, (1, 2, 4, 8, 16), STALLS["5.11"])


def figure_5_12() -> Repeated:
    """Return stalls of SqueezeNet on a tenth of ImageNet."""
    return _stalls("SqueezeNet", 100_000, (1, 2, 4, 8, 16), None)


def figure_5_13() -> Repeated:
    """Return stalls of ResNet-50 on ImageNet."""
    return _stalls("ResNet-50", 1_281_167, (8, 16, 32), STALLS["5.13"])


def figure_5_14() -> Repeated:
    """Return the longest stall of an iteration on 256 nodes, over ten epochs of ImageNet."""
    ranks = 256
    job = _training("ResNet-50", 1_281_167, ranks, epochs=10)
    (run,) = _runs(job, (ranks,), ("frequency",))
    assert run.result is not None, "frequency runs every job"
    stalls = run.result.step_stall_seconds.max(axis=1)
    steps = len(stalls) // job.epochs
    of_epochs = [float(stalls[begin : begin + steps].max()) for begin in range(0, steps * job.epochs, steps)]
    results = [
        Result(f"epoch {epoch + 1}, longest stall of an iteration", seconds, None, "seconds")
        for epoch, seconds in enumerate(of_epochs)
    ]
    quiet = float((stalls < 1e-3).mean())
    results.append(Result("iterations without a stall of a millisecond", quiet, None, "share"))
    why = (
        f"{_JOBS_WHY} the figure prints no numbers. Every {_THINNED}th sample stands for all, at {_THINNED} times its "
        "size, in as many fewer steps: what an iteration waits is as many times as long."
    )
    series = [Series("HDMLP", np.arange(len(stalls)), stalls, Colour.BLUE, width=0.8)]
    panel = Panel(f"{ranks} nodes", series)
    return Repeated(
        results,
        why,
        lambda: draw_panels([panel], x_label="iteration", y_label="longest stall (s)", size=(7.2, 4.0)),
    )


def _machine(ranks: int, compute: float | None) -> Machine:
    """Return the machine of section 5.2.1. compute: bytes/s of a node; None: as fast as memory."""
    machine = scenario_named("scenario1").machine
    staging, memory, _ = machine.storage
    return replace(
        machine,
        ranks=ranks,
        storage=(replace(staging, capacity_bytes=4_096 * _MB), replace(memory, capacity_bytes=20_480 * _MB)),
        compute=Rate(compute if compute is not None else MEMORY[2]),
    )


def _job(name: str, samples: int, size: int, epochs: int, batch: int, compute: float | None) -> Scenario:
    sizes = SizeDistribution("constant", samples, (("loc", size),))
    return Scenario(name, _machine(1, compute), sizes, batch, epochs)


def _training(network: str, samples: int, ranks: int, epochs: int = 3) -> Scenario:
    """Return a training with 128 samples a node in a step, thinned out: fewer and larger samples, the same bytes."""
    rate = _IMAGES_PER_SECOND[network] * _IMAGE_BYTES
    job = _job(
        network, samples // _THINNED, _THINNED * _IMAGE_BYTES, epochs, max(1, 128 // _THINNED) * ranks, rate
    )
    return job.with_ranks(ranks)


def _runs(job: Scenario, ranks: Sequence[int], policies: Sequence[str]) -> list[PolicyRuns]:
    prepare_clock(len(policies) * job.samples * job.epochs * len(ranks))
    return run_policies(job, [policy_named(name) for name in policies], ranks=ranks)


def _seconds(runs: Sequence[PolicyRuns], policy: str, ranks: int) -> float:
    (seconds,) = (each.mean_seconds for each in runs if (each.policy, each.ranks) == (policy, ranks))
    assert seconds is not None, f"{policy} runs every job"
    return seconds


def _load_times(runs: Sequence[PolicyRuns]) -> list[Result]:
    return [
        Result(f"{each.ranks} nodes, {_LABELS[each.policy]}, load time", each.mean_seconds, None, "seconds")
        for each in runs
    ]


def _stalls(network: str, samples: int, ranks: Sequence[int], published: tuple[int, int] | None) -> Repeated:
    runs = [each for count in ranks for each in _runs(_training(network, samples, count), (count,), POLICIES)]
    stalls: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    results = []
    for each in runs:
        assert each.result is not None, f"{each.policy} runs every job"
        stall = float(np.median(each.result.stall_seconds))
        stalls[each.policy].append(stall)
        of = f"{each.ranks} nodes, {_LABELS[each.policy]}, median stall"
        results.append(Result(of, stall, None, "seconds"))
    for policy, said in zip(POLICIES, published or (None, None), strict=False):
        pairs = zip(stalls[policy], stalls["frequency"], strict=True)
        factor = max(other / own for other, own in pairs if own > 0)
        results.append(Result(f"{_LABELS[policy]} over HDMLP, at most", factor, said, "factor"))
    why = (
        f"{_JOBS_WHY} the speed of the network is assumed, and ImageFolder's worker processes decode as fast as "
        "HDMLP's threads here, which they may not have done there."
    )
    series = [
        Series(_LABELS[policy], list(ranks), values, _COLOURS[policy], marker="o")
        for policy, values in stalls.items()
    ]

    def draw() -> Figure:
        figure = draw_panels([Panel(network, series)], x_label="nodes", y_label="median stall (s)")
        figure.axes[0].set_yscale("symlog", linthresh=0.1)
        return figure

    return Repeated(results, why, draw)


def _measured(curve: MeasuredCurve, published: Mapping[int, float], why: str) -> Repeated:
    found = {count: spread.median for count, spread in curve.points}
    results = [
        Result(f"{count} threads", found.get(count), published.get(count), "bytes per second")
        for count in sorted({*found, *published})
    ]
    series = [
        Series(name, list(rates), [rate / _MB for rate in rates.values()], colour, marker="o")
        for name, rates, colour in (("here", found, Colour.BLUE), ("the thesis", published, Colour.INK))
    ]
    return Repeated(results, why, lambda: draw_panels([Panel("", series)], x_label="threads", y_label="MB/s"))


def _draw_seconds(runs: Sequence[PolicyRuns], y_label: str) -> Figure:
    series = []
    for policy in dict.fromkeys(each.policy for each in runs):
        own = [each for each in runs if each.policy == policy]
        counts, times = [each.ranks for each in own], [each.mean_seconds or 0.0 for each in own]
        series.append(Series(_LABELS[policy], counts, times, _COLOURS[policy], marker="o"))
    figure = draw_panels([Panel("", series)], x_label="nodes", y_label=y_label)
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].set_yscale("log")
    return figure
