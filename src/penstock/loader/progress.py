"""How far a run is, in a line."""

from __future__ import annotations

from collections import Counter

from penstock.flow.collector import Collector
from penstock.plan import AccessPlan
from penstock.plan.growing import Growing
from penstock.trace import EpochMetrics, Kind, stall_share
from penstock.trace.stages import describe_place
from penstock.units import format_seconds


def progress_lines(collector: Collector, plan: AccessPlan) -> list[str]:
    """Return in a line how far a run is: rate, waiting and its main cause, hits, time left; none before the first sums.

    The sums are those of the epoch, or of the one before where it has none yet; nothing is waited for, as whoever asks
    may want to know why nothing moves.
    """
    epoch, step = collector.consumed
    summed = filter(None, map(collector.epoch_by_now, (epoch, epoch - 1)))
    metrics = next((each for each in summed if each.steps and _ended_steps(each)), None)
    if metrics is None:
        return []
    # The step under way was waited for, and has not ended.
    stall_seconds = metrics.stall_seconds / metrics.steps
    own_seconds = metrics.own_seconds / _ended_steps(metrics)
    seconds = stall_seconds + own_seconds
    steps, epochs = plan.steps(epoch), "" if plan.is_endless else f" of {plan.epochs}"
    of_steps = "" if isinstance(plan.order, Growing) else f" of {steps}"
    rate = metrics.samples / metrics.steps / (seconds or 1.0)
    line = f"epoch {epoch}{epochs}, step {step + 1}{of_steps}: {rate:,.1f} samples/s"
    line += f", waited {100 * stall_share(stall_seconds, own_seconds):.1f} % of the time"
    if metrics.stall_seconds:
        line += f", most for {max(metrics.stall_by_cause, key=metrics.stall_by_cause.__getitem__)}"
    taken = Counter(metrics.reads_by_place) + Counter(metrics.hits_by_place)
    if total := taken.total():
        shares = (f"{describe_place(place)} {100 * taken[place] / total:.0f} %" for place in sorted(taken))
        line += f"; samples from {', '.join(shares)}"
    if not plan.is_endless:
        left = steps - step - 1 + sum(map(plan.steps, range(epoch + 1, plan.epochs)))
        line += f"; {format_seconds(left * seconds)} left at this rate"
    return [line]


def _ended_steps(metrics: EpochMetrics) -> int:
    return sum(durations.calls for stage, durations in metrics.stages.items() if stage.kind == Kind.STEP)
