"""What a loader reports when it starts: data, order, steps, threads and memory, in two lines."""

from __future__ import annotations

import numpy as np

from penstock.loader.batch_sampler import DrawnBatches, uneven_line
from penstock.loader.config import POLICY
from penstock.loader.decode_servers import ServedFetcher
from penstock.loader.documents import PackedDocuments
from penstock.loader.setup import Setup
from penstock.plan import AccessPlan, Batches, Mixture, Order, TokenBudget
from penstock.plan.splits import Local
from penstock.policy.forms import CropForm
from penstock.policy.loading import Staging
from penstock.store import DecodedFiles, Selection
from penstock.store.selection import unselected
from penstock.units import format_bytes, format_count

#: Samples of an epoch that are looked at for what decoding them costs, and what is worth a line.
_LOOKED_AT, _LEAST_TIMES = 1 << 17, 2
#: Sources of a mixture that are named.
_SOURCES_SHOWN = 12
_LOCAL = (
    'split="local" gives a rank the samples of each batch that it read first in the run: global batches stay as they '
    "are, and local ones are no random parts of them, which the statistics of BatchNorm, unless synchronised, and "
    "losses within a batch depend on"
)


def start_lines(setup: Setup, uncompared: str = "", others: str = "") -> list[str]:
    """Return what a rank is about to do, a line for the job and a line for the rank; one more for what looks wrong.

    The numbers of the second line are those of this rank alone.
    uncompared: why the ranks were not compared. others: what shows that there are some, though the plan is of one.
    """
    plan = setup.plan
    ranks = f"; ranks are not compared, {uncompared}" if uncompared else ""
    if others:
        ranks = f"; {others}, and this process reads everything, as world_size=1 says"
    lines = [f"{_data(setup)} in the order {_order(plan.order)}{_draws(setup)}: {_steps(plan)}{ranks}"]
    lines.append(f"{_threads(setup)}; {_memory(setup)}")
    done = "" if setup.pipeline is None else setup.pipeline.summary()
    more = (_decoding(setup), uneven_line(plan.order), _padding(plan), _mixture(plan), _packed(setup), done)
    lines += [line for line in more if line]
    if isinstance(plan.split, Local) and plan.ranks > 1:
        lines.append(_LOCAL)
    if setup.pipeline is not None and setup.pipeline.has_byte_values:
        lines.append(
            f"images are {setup.pipeline.dtype} from 0 to 255, because ToTensor is not among the transforms: "
            'put it in for 0 to 1, or take dtype="uint8" for less memory'
        )
    return lines


def _decoding(setup: Setup) -> str:
    """Say what this order costs where samples are decoded together, if most of what is decoded is thrown away."""
    source, plan = unselected(setup.source), setup.plan
    units = source.decoded_units if isinstance(source, DecodedFiles) else None
    if units is None or not isinstance(source, DecodedFiles):
        return ""
    local_batch = plan.max_local_batch(setup.rank)
    ids = plan.stream(setup.rank, 0, 0, min(plan.order.length(0) // plan.ranks, _LOOKED_AT))
    if isinstance(setup.source, Selection):
        ids = setup.source.ids[ids]
    groups = [ids[first : first + local_batch] for first in range(0, ids.size, local_batch)]
    times = source.decoded_bytes_of(groups) / max(1, int(source.sizes_bytes[ids].sum()))
    if times < _LEAST_TIMES:
        return ""
    decoded_bytes = int(units.sizes_bytes.sum())
    # Half of them: reading continues with the next bundle before all of this one is used.
    ratio = units.capacity_bytes / 2 / decoded_bytes
    capacity = format_bytes(units.capacity_bytes)
    has_disk = any(storage.backend != "memory" for storage in setup.machine.storage)
    when, disk = (
        (" of the first epoch", "") if has_disk else ("", "; local_disk= keeps them for later epochs")
    )
    return (
        f"{source.units_are} are decoded {times:,.1f} times over in this order{when}, as {capacity} hold "
        f"{100 * min(1, 2 * ratio):.2g} % of them: shuffle=penstock.BundleShuffle({plan.samples}, seed={setup.seed}, "
        f"bundle_ratio={min(1, ratio):.2g}) needs each about once, as does {type(source).__name__}(..., "
        f'memory="{format_bytes(decoded_bytes)}"); `penstock pack` writes samples anew that are read one by one{disk}'
    )


def _data(setup: Setup) -> str:
    total_bytes = int(setup.sizes_bytes.sum())
    size = f" ({format_bytes(total_bytes)})" if total_bytes else ""
    return f"reads {format_count(setup.plan.samples, 'sample')}{size} of {setup.data.place}"


def _order(order: Order) -> str:
    if isinstance(order, Batches) and isinstance(order.batches, DrawnBatches):
        return f"of {type(order.batches.sampler).__name__}"
    seed = getattr(order, "seed", None)
    return type(order).__name__ + ("" if seed is None else f"(seed={seed})")


def _draws(setup: Setup) -> str:
    """Name the seed of random transforms where the order does not name it."""
    seed = setup.draws_seed
    if seed is None or seed == getattr(setup.plan.order, "seed", None):
        return ""
    return f", {'samples' if setup.pipeline is None else 'transforms'} drawn with seed={seed}"


def _padding(plan: AccessPlan) -> str:
    """Say how much of batches of so many tokens is padding."""
    if not isinstance(plan.order, TokenBudget):
        return ""
    order, share = plan.order, plan.order.padding(0).share
    if order.tokens is None:
        return f"batches of {order.largest:,} samples of like length, {100 * share:.2g} % of them padding"
    if not order.padded:
        return f"batches of at most {order.tokens:,} tokens; padded, {100 * share:.2g} % of them would be padding"
    advice = "" if order.is_sorted else ": pool=65_536 puts samples of like length together"
    return f"batches of at most {order.tokens:,} tokens, {100 * share:.2g} % of them padding{advice}"


def _mixture(plan: AccessPlan) -> str:
    """Say how often an epoch reads each source of a mixture."""
    order = plan.order
    if not isinstance(order, Mixture):
        return ""
    given = order.given(0)
    parts = [
        f"{count:,} of source {number} ({count / size:.3g} times its {size:,})"
        for number, (count, size) in enumerate(zip(given, order.sizes, strict=True))
    ][:_SOURCES_SHOWN]
    if len(given) > _SOURCES_SHOWN:
        parts.append(f"{sum(given[_SOURCES_SHOWN:]):,} of {len(given) - _SOURCES_SHOWN} more")
    which = "an epoch" if order.even_from == 0 else "the first epoch"
    return f"{which} of the mixture reads {', '.join(parts)}"


def _packed(setup: Setup) -> str:
    """Say how well documents fill their rows."""
    return f"packs {setup.source.packing}" if isinstance(setup.source, PackedDocuments) else ""


def _steps(plan: AccessPlan) -> str:
    if plan.is_cut_by_order:
        return _cut_steps(plan)
    steps, length = plan.steps(0), plan.length(0)
    whole = plan.epochs - (plan.last_steps is not None)
    same = plan.length(max(whole, 1) - 1) == length
    count = "epochs without end" if plan.is_endless else format_count(max(whole, 1), "epoch")
    epochs = f"{count} of {format_count(steps, 'step')}"
    if plan.last_steps is not None and whole:
        epochs += f" and {format_count(plan.last_steps, 'step')} of one more"
    rest = plan.order.length(0) % plan.batch_size if whole else 0
    if rest and plan.drop_last:
        end = f", the last {rest} of an epoch dropped"
    elif rest and steps > 1:
        end = f", {rest} in the last of an epoch"
    else:
        end = ""
    return f"{epochs if same else epochs + ' and more or fewer'}, {_batch(plan)}{end}"


def _cut_steps(plan: AccessPlan) -> str:
    """The same of an order that cuts its epochs itself, whose first epoch stands for all."""
    count = "epochs without end" if plan.is_endless else format_count(plan.epochs, "epoch")
    sizes = [plan.local_batch_sizes(rank, 0) for rank in range(plan.ranks)]
    least, most = min(int(each.min()) for each in sizes), max(int(each.max()) for each in sizes)
    share = format_count(most, "sample") if least == most else f"{least} to {most} samples"
    of_first = "of" if plan.epochs == 1 else "the first of"
    on_each = "" if plan.ranks == 1 else f" on each of {plan.ranks} ranks"
    return f"{count}, {of_first} {format_count(plan.steps(0), 'step')}, {share} a step{on_each}"


def _batch(plan: AccessPlan) -> str:
    batch = plan.batch_length(0, 0)
    if plan.ranks == 1:
        return f"{format_count(batch, 'sample')} a step"
    sizes = [plan.local_batch_size(rank, 0, 0) for rank in range(plan.ranks)]
    least, most = min(sizes), max(sizes)
    share = f"{most}" if least == most else f"{least} to {most}"
    return f"{format_count(batch, 'sample')} a step, {share} on each of {format_count(plan.ranks, 'rank')}"


def _threads(setup: Setup) -> str:
    limits, because = setup.limits, setup.decoders_because
    if setup.works_in_own_thread:
        return f"loads in the training's own thread, {because}"
    if setup.processes is not None and setup.is_of_data_set:
        return f"starts {format_count(setup.processes.count, 'worker process')} to call {setup.data.place}, {because}"
    if setup.is_of_data_set:
        return f"starts with {format_count(limits.decoders, 'thread')} to call {setup.data.place}, {because}"
    decoding = f"{format_count(limits.decoders, 'decode thread')}, {because}"
    if setup.processes is not None:
        decoding = f"{format_count(setup.processes.count, 'worker process')} that decode, {because}"
    readers_because = f", {setup.readers_because}" if setup.readers_because else ""
    machine = f"; machine {setup.machine_file!r}" if setup.machine_file else ""
    if isinstance(setup.fetcher, ServedFetcher):
        decoding += f", {format_count(len(setup.fetcher.addresses), 'decode server')} beside"
    if not limits.all_readers:
        return f"starts with {decoding}{machine}"
    return f"starts with {decoding}, and {format_count(limits.readers, 'reading thread')}{readers_because}{machine}"


def _memory(setup: Setup) -> str:
    budget, total_bytes = setup.budget, int(setup.sizes_bytes.sum())
    kept_bytes = setup.kept_bytes
    policy = f"policy {setup.policy.name}"
    parts = [f"{format_count(budget.slots, 'batch slot')} of {format_bytes(budget.slot_bytes)}"]
    if not setup.is_of_data_set:
        parts.append(f"{format_bytes(budget.undecoded_bytes)} for files being read")
        if budget.decoding_bytes:
            parts.append(f"{format_bytes(budget.decoding_bytes)} for pictures being decoded")
        if budget.queued_bytes:
            parts.append(f"{format_bytes(budget.queued_bytes)} for samples that wait to be written to disk")
    if kept_bytes:
        kept = setup.placement.samples_in(1)
        is_all = kept.size == setup.plan.samples
        share = "all" if is_all else f"{_percent(setup.sizes_bytes[kept].sum() / total_bytes)} of the"
        those = "" if is_all or setup.policy.name != POLICY else ", those used most,"
        parts.append(
            f"{format_bytes(kept_bytes)} to keep {share} samples{those} {_form(setup.form)}for later epochs ({policy})"
        )
    elif budget.jobs_bytes:
        also = f", as stored and {_form(form).strip()}," if (form := setup.jobs_form) is not None else ""
        parts.append(
            f"{format_bytes(budget.jobs_bytes)} at most for samples{also} that it and other jobs of this host keep "
            "together"
        )
    elif total_bytes and not budget.tier_bytes and not isinstance(setup.policy, Staging):
        parts.append(f"none to keep samples for later epochs ({policy})")
    elif total_bytes:
        parts[-1] += f"; {policy}"
    taken_bytes = budget.slots * budget.slot_bytes + budget.undecoded_bytes + budget.decoding_bytes
    taken_bytes += kept_bytes + budget.jobs_bytes + budget.queued_bytes
    if setup.is_of_data_set:
        taken_bytes = budget.slots * budget.slot_bytes
    ahead = " or more are read ahead" if setup.limits.most_slots > budget.slots else ""
    limit = f" ({format_bytes(budget.limit_bytes)} while batches are kept{ahead})"
    more = limit if taken_bytes + budget.slot_bytes <= budget.limit_bytes else ""
    return f"takes at most {format_bytes(taken_bytes)} of memory{more}: {', '.join(parts)}{_disks(setup)}"


def _percent(share: float) -> str:
    return f"{100 * share:.{2 if share < 0.995 else 3}g} %"


def _form(form: CropForm | None) -> str:
    """Return in which form samples are kept, if not as they are stored."""
    if form is None:
        return ""
    if form.is_decoded:
        return "as decoded pictures "
    return f"as crops of {format_count(form.epochs, 'epoch')} each " if form.epochs else "as one crop each "


def _disks(setup: Setup) -> str:
    """Return what local disks keep."""
    parts, total_bytes = "", int(setup.sizes_bytes.sum())
    for number, storage in enumerate(setup.machine.storage):
        if storage.backend == "memory":
            continue
        kept, copied = setup.placement.samples_in(number), np.flatnonzero(setup.copied.get(number, ()))
        share = _percent(setup.sizes_bytes[kept].sum() / total_bytes) if total_bytes else "none"
        form = setup.form if setup.form is not None and setup.form.is_in(number) else None
        own_bytes, copied_bytes = (
            int(setup.sizes_bytes[each].sum()) if form is None else form.bytes_for(each.size)
            for each in (kept, copied)
        )
        those = []
        if kept.size or not copied.size:
            those.append(f"{share} of the samples, {format_bytes(own_bytes)},")
        if copied.size:
            copies = f"copies of {format_count(copied.size, 'sample')} that memory keeps"
            those.append(f"{copies}, {format_bytes(copied_bytes)},")
        left = setup.held.get(number)
        there = (
            f", {format_count(left.size, 'sample')} there already" if left is not None and left.size else ""
        )
        where = "on local disk" if storage.backend == "filesystem" else f"by {storage.backend}"
        parts += f"; keeps {' and '.join(those)} {_form(form)}{where} {storage.path!r}{there}"
    return parts
