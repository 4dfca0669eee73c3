"""What a run does with a sample: what fetches and decodes it, and how much space it takes meanwhile."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.flow.channel import Reducers
from penstock.flow.cpus import cpu_limit
from penstock.flow.staging import Field, slot_bytes
from penstock.flow.work import Decoder, Fetcher
from penstock.loader.budget import MemoryBudget
from penstock.loader.collating import CollatingDecoder
from penstock.loader.config import HOSTS, JOBS, LoaderConfig
from penstock.loader.crops import CropDecoder, CropFetcher, KeptCrops
from penstock.loader.dataset import DatasetFetcher, MapDataset, SampleDecoder, content_of
from penstock.loader.decode_servers import connect, served_by
from penstock.loader.fetching import Near, SourceFetcher, located
from penstock.loader.front_end import FrontEnd
from penstock.loader.global_draws import keeping_global_states
from penstock.loader.image_mixing import MixingDecoder, mixed_fields
from penstock.loader.images import ImageDecoder, Masks, image_fields, picture_bytes
from penstock.loader.jobs import JobsOfHost, content_of_host
from penstock.loader.jobs_pixels import JobsCropDecoder, JobsPictureDecoder
from penstock.loader.keep import AUTO, DECODED, auto_form, check_keep, crop_form
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.making import MakingDecoder
from penstock.loader.opened import all_extents, not_predictable, pipeline_of, seed_of
from penstock.loader.optional import Defaults
from penstock.loader.pickling import pickled
from penstock.loader.pictures import KeptPictures, PictureDecoder, WholePictures, decoded_form, front_of_crops
from penstock.loader.pixels_on_disk import describe_form
from penstock.loader.probing import from_first, raise_interrupt
from penstock.loader.processes import ProcessPlan
from penstock.loader.ranks_memory import RanksMemory, Sharing
from penstock.loader.rows import KeepingFetcher, RowPickler, row_bytes, warn_unless_same
from penstock.loader.source_samples import stored_of
from penstock.loader.transforms import Pipeline
from penstock.loader.transforms.crops import CropPass
from penstock.loader.transforms.joint import Along, MaskPass, along_with
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.mixing import Mixing
from penstock.loader.transforms.sink import ByteValues
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy import AllExtents, Placement
from penstock.policy.forms import STRAY, CropForm
from penstock.store import MemoryTier, Source, labels_of
from penstock.store.blocks import BlockTier
from penstock.store.calls import Calls
from penstock.store.pairs import masks_of
from penstock.store.write_behind import WriteBehind

# Samples beside the first that show how long those of unequal fields are.
_LENGTHS = 7
# Samples that are made twice, to see whether they are the same.
_TWICE = 2


class Samples(NamedTuple):
    """What is known of the samples before the memory is shared out.

    fields: of a batch. picture_bytes, large_picture_bytes: see `share_memory`; 0 for a data set.
    parts: makes what fetches and decodes them of memory, machine and disks, and where they lie.
    draws_seed, processes, byte_values, form: see `Setup`. beside_bytes: of a sample, about, that are not in its slot.
    served_bytes: of one that a decode server, or a rank of another host, has decoded; 0 without any.
    pixels: of `describe_form`. crop_shape: of what memory keeps; None where that is no crops.
    are_rows: whether what is kept is made by a data set; sizes are guesses then.
    """

    sizes_bytes: NDArray[np.int64]
    fields: tuple[Field, ...]
    parts: Callable[
        [MemoryBudget, Machine, KeptOnDisks, Placement, Sharing | None],
        tuple[Fetcher, Decoder, AllExtents | None],
    ]
    pipeline: Pipeline | None = None
    picture_bytes: int = 0
    large_picture_bytes: int = 0
    draws_seed: int | None = None
    processes: ProcessPlan | None = None
    beside_bytes: int = 0
    byte_values: ByteValues | None = None
    form: CropForm | None = None
    served_bytes: int = 0
    pixels: Mapping[str, object] | None = None
    crop_shape: tuple[int, ...] | None = None
    are_rows: bool = False

    def stored_for(self, undecoded_bytes: int) -> int:
        """Return the bytes of as many samples, as they are stored, as memory of so many bytes has space for."""
        mean_bytes = float(self.sizes_bytes.mean())
        return max(1, int(undecoded_bytes * mean_bytes / max(mean_bytes, self.served_bytes, 1)))

    def slot_bytes(self, plan: AccessPlan, rank: int, steps: int = 1) -> int:
        """Return what a slot for so many steps takes, with what their batches have beside it."""
        in_slot = slot_bytes(self.fields, steps * plan.max_local_batch(rank))
        return in_slot + steps * self.beside_bytes * _usual_batch(plan, rank)

    @property
    def reads_in_place(self) -> bool:
        """Whether bytes are read to their place in the batch."""
        return self.pipeline is not None and self.pipeline.reads_in_place


def samples_of_source(
    source: Source,
    config: LoaderConfig,
    plan: AccessPlan,
    probes: list[int],
    calls: Calls,
    front_end: FrontEnd,
    machine: Machine | None,
    memory_bytes: int,
    *,
    runs: bool,
) -> Samples:
    """See `set_up`. probes: samples to look at. machine: with the ranks and decode threads of the run."""
    whole = _pipeline(source, config, probes, calls, runs=runs)
    pipeline, byte_values = _split(whole, config, front_end, has_masks=masks_of(source) is not None)
    sizes_bytes, labels = source.sizes_bytes, labels_of(source.labels, plan.samples)
    first = _first_picture(source, probes[0], calls) if pipeline.is_visual else None
    masks = _masks(source, pipeline)
    processes = decoding_processes(config, pipeline, int(config.workers)) if config.is_in_processes else None
    mixing = None if config.mix_images is None else _mixing(config, pipeline, labels, masks)
    crops, form = _crops(
        config,
        pipeline,
        plan,
        masks,
        partial(decoded_form, pipeline, sizes_bytes, first),
        partial(auto_form, machine, memory_bytes, sizes_bytes),
    )

    def parts(
        budget: MemoryBudget,
        machine: Machine,
        disks: KeptOnDisks,
        placement: Placement,
        sharing: Sharing | None,
    ) -> tuple[Fetcher, Decoder, AllExtents | None]:
        extents, near = _places(source, machine, plan.ranks, calls)
        count = cpu_limit()[0] if processes is None else processes.count  # that may come to decode
        how = pipeline, labels, source.describe, DecodeMemory(budget.decoding_bytes), masks, count
        if budget.tier_bytes and runs and form is not None:
            made = form, pipeline, crops, budget.tier_bytes, placement, plan.epochs, disks, sharing
            fetcher, decoder = _kept_in_form(*made, (source, dict(disks.tiers), near), how)
        else:
            pixels = None if form is None else (form, describe_form(form, pipeline))
            reads = _reads(source, near, budget, disks, sharing, pixels, runs=runs)
            jobs = reads[-1]
            if config.decode_servers and runs:
                servers = connect(config.decode_servers, pipeline, source, plan.epochs, calls.report)
                fetcher, decoder = served_by(servers, pipeline, reads, how)
            else:
                fetcher, decoder = SourceFetcher(*reads), _jobs_decoder(jobs, form, pipeline, crops, how)
        return fetcher, decoder if mixing is None else MixingDecoder(decoder, mixing), extents

    sizes_of_pictures = sizes_bytes if masks is None else masks.front_bytes
    picture, large_picture = picture_bytes(pipeline, sizes_of_pictures, first)
    fields, is_random = image_fields(pipeline, labels, masks), pipeline.is_random or mixing is not None
    if mixing is not None:
        fields = mixed_fields(fields[0], mixing)
    return Samples(
        sizes_bytes,
        fields,
        parts,
        whole,
        picture,
        large_picture,
        pipeline.seed if is_random else None,
        processes,
        byte_values=byte_values,
        form=form,
        served_bytes=_served_bytes(config, pipeline, masks, form),
        pixels=None if form is None else describe_form(form, pipeline),
        crop_shape=None if form is None or form.is_decoded or crops is None else crops.shape,
    )


def _served_bytes(
    config: LoaderConfig, pipeline: Pipeline, masks: Masks | None, form: CropForm | None
) -> int:
    """Return what a sample takes that a decode server, or a rank of another host, has decoded; 0 without any.

    Raises: ConfigError where they could not make what this pipeline begins with.
    """
    if not config.decode_servers:
        return 0 if form is None or config.share != HOSTS else int(form.space_share * form.crop_bytes)
    if masks is not None:
        raise ConfigError(
            "decode_servers are given, and images have masks, which they do not decode: leave them out"
        )
    if pipeline.front is None:
        raise ConfigError(
            "decode_servers are given, and the transforms do not begin with steps of Penstock that fix the size of a "
            "picture, such as RandomResizedCrop(224): put these first, or leave decode_servers out"
        )
    return math.prod(pipeline.front.shape)


def _kept_in_form(
    form: CropForm,
    pipeline: Pipeline,
    crops: CropPass | None,
    capacity_bytes: int,
    placement: Placement,
    epochs: int,
    disks: KeptOnDisks,
    sharing: Sharing | None,
    reads: tuple[Source, dict[int, Any], Near | None],
    how: tuple[Any, ...],
) -> tuple[SourceFetcher, ImageDecoder]:
    """Return what fetches and decodes where memory, and disks perhaps, keep decoded pictures, or crops.

    reads, how: arguments of a `SourceFetcher`, and of an `ImageDecoder`.
    """
    form = replace(form, disks=len(disks.in_form))
    shared, peers = (None, None) if sharing is None else (sharing.tier, sharing.peers)
    if shared is not None:
        reads[1][form.TIER] = shared
    more = {"peers": peers}
    if form.is_decoded:
        assert not isinstance(shared, BlockTier), "pictures are of any size"
        sizes_bytes = reads[0].sizes_bytes
        pictures = KeptPictures(form, pipeline, capacity_bytes, placement, disks, shared, sizes_bytes)
        return CropFetcher(pictures, *reads, **more), PictureDecoder(pictures, *how)
    assert crops is not None, "they are of that form"
    assert not isinstance(shared, MemoryTier), "crops are of one size"
    crops.prepare()
    kept = KeptCrops(form, crops, capacity_bytes, placement, epochs, disks, shared)
    return CropFetcher(kept, *reads, **more), CropDecoder(kept, crops, *how)


def pixels_bytes(budget: MemoryBudget, sizes_bytes: NDArray[np.int64], form: CropForm | None) -> int:
    """Return what the jobs of a host have for pixels beside samples as stored; 0 where that is not one picture's."""
    left_bytes = budget.jobs_bytes - int(sizes_bytes.sum())
    return left_bytes if form is not None and left_bytes >= form.crop_bytes else 0


def _places(
    source: Source, machine: Machine, ranks: int, calls: Calls
) -> tuple[AllExtents | None, Near | None]:
    """Return where the samples of a source lie, and what reads those together that lie near each other."""
    extents = all_extents(source, calls)
    return extents, None if extents is None else _near(extents, machine, ranks, source.sizes_bytes)


#: A form in which jobs keep samples besides, and what `describe_form` says of it.
_Pixels = tuple[CropForm, Mapping[str, object]]
#: Arguments of a `SourceFetcher`.
_Reads = tuple[
    Source,
    dict[int, MemoryTier | BlockTier | WriteBehind],
    Near | None,
    Mapping[int, NDArray[np.bool_]],
    RanksMemory | None,
    JobsOfHost | None,
]


def _reads(
    source: Source,
    near: Near | None,
    budget: MemoryBudget,
    disks: KeptOnDisks,
    sharing: Sharing | None,
    pixels: _Pixels | None = None,
    *,
    runs: bool,
) -> _Reads:
    """Return what reads samples that are kept as they are stored: in memory, on disks, by other ranks and jobs."""
    tiers: dict[int, MemoryTier | BlockTier | WriteBehind] = dict(disks.tiers)
    if sharing is not None and sharing.tier is not None:
        tiers[1] = sharing.tier
    elif budget.tier_bytes and runs:
        tiers[1] = MemoryTier(budget.tier_bytes)
    peers = None if sharing is None else sharing.peers
    jobs = _jobs_of_host(source, budget, pixels) if budget.jobs_bytes else None
    near = near if jobs is None else None  # a sample is taken, or read, by itself
    return source, tiers, near, disks.copied, peers, jobs


def _jobs_of_host(source: Source, budget: MemoryBudget, in_form: _Pixels | None) -> JobsOfHost:
    """Return what the jobs of a host keep: samples as stored, and as many crops or pictures as find space then."""
    form, described = in_form or (None, {})
    pixels, for_pixels_bytes = None, pixels_bytes(budget, source.sizes_bytes, form)
    if form is not None and for_pixels_bytes:
        each_bytes = int(STRAY * form.crop_bytes) if form.is_decoded else form.crop_bytes
        pixels = JobsOfHost(content_of_host(source, described, each_bytes), for_pixels_bytes)
    try:
        return JobsOfHost(content_of_host(source), budget.jobs_bytes - for_pixels_bytes, pixels)
    except BaseException:
        if pixels is not None:
            pixels.close()
        raise


def _jobs_decoder(
    jobs: JobsOfHost | None,
    form: CropForm | None,
    pipeline: Pipeline,
    crops: CropPass | None,
    how: tuple[Any, ...],
) -> ImageDecoder:
    """Return what decodes, with what other jobs of the host have decoded where they share that."""
    if jobs is None or jobs.pixels is None or form is None:
        return ImageDecoder(*how)
    if form.is_decoded:
        return JobsPictureDecoder(jobs.pixels, WholePictures(pipeline), *how)
    assert crops is not None, "they are of that form"
    crops.prepare()
    return JobsCropDecoder(jobs.pixels, crops, *how)


def _split(
    pipeline: Pipeline, config: LoaderConfig, front_end: FrontEnd, *, has_masks: bool
) -> tuple[Pipeline, ByteValues | None]:
    """Return what is done to images here, and what a device makes of their bytes, where it does.

    Raises: ConfigError where it is asked to and cannot.
    """
    device = front_end.device
    if device is None or device.finishes is False:
        return pipeline, None
    found = None if has_masks or config.mix_images is not None else pipeline.split()
    if found is not None:
        return found
    if device.finishes:
        raise ConfigError(
            "normalize_on_device is True, and images are no bytes before the last steps: it takes Penstock's own "
            "transforms with a float dtype, without callables, masks or mix_images; leave it out"
        )
    return pipeline, None


def decoding_processes(config: LoaderConfig, pipeline: Pipeline, count: int) -> ProcessPlan:
    """Return what worker processes are started with that decode what this process reads.

    Raises: ConfigError where no step is Python code, or one cannot be pickled.
    """
    if not pipeline.calls_python:
        raise ConfigError(
            f"workers is {count}, and no step of transforms is Python code, which processes are for: leave "
            "workers out, as Penstock's own steps run in threads without the interpreter's lock"
        )
    pickled(config.transforms, "transforms", {})
    return process_plan(None, config, {}, count)


def _crops(
    config: LoaderConfig,
    pipeline: Pipeline,
    plan: AccessPlan,
    masks: Masks | None,
    decoded: Callable[[], CropForm],
    auto: Callable[..., CropForm | None],
) -> tuple[CropPass | None, CropForm | None]:
    """Return what makes crops that memory keeps, and their form, where keep= asks for some. Raises: ConfigError.

    decoded, auto: `decoded_form` and `auto_form`, for this run.
    """
    if check_keep(config.keep) is None:
        return None, None
    if config.keep == AUTO:
        if masks is not None or config.is_in_processes or pipeline.front is None:
            return None, None
        crops = CropPass(pipeline)
        picture_bytes = 0 if front_of_crops(pipeline) is None else decoded().crop_bytes
        how = {"is_random": crops.is_random, "picture_bytes": picture_bytes}
        return crops, auto(crops.shape, plan.epochs, **how)
    if masks is not None or config.is_in_processes:
        why = (
            f"workers is {config.workers}, and processes keep"
            if masks is None
            else "images have masks, which have"
        )
        raise ConfigError(f"keep is {config.keep!r}, and {why} no crops: leave one of them out")
    if config.keep == DECODED:
        return None, decoded()
    crops = CropPass(pipeline)
    form = crop_form(config.keep, crops.shape, plan.ranks, is_random=crops.is_random)
    if config.share == JOBS and form.epochs:
        raise ConfigError(
            f'keep is {config.keep!r} and share "{JOBS}", and random crops are of one job\'s seed: give '
            f'keep="{DECODED}"'
        )
    return crops, form


def _masks(source: Source, pipeline: Pipeline) -> Masks | None:
    """Return what writes the masks of a source that has some. Raises: ConfigError as `MaskPass` and `masks_of`."""
    found = masks_of(source)
    if found is None:
        return None
    return Masks(found.image_bytes, MaskPass(pipeline, found.dtype, found.fill), found.describe)


def _mixing(
    config: LoaderConfig,
    pipeline: Pipeline,
    labels: NDArray[Any] | dict[str, NDArray[Any]],
    masks: Masks | None,
) -> Mixing:
    """Return what mixes batches. Raises: ConfigError for samples that are no images with one label each."""
    if masks is not None or isinstance(labels, dict) or labels.ndim != 1 or labels.dtype != np.int64:
        raise ConfigError(
            "mix_images is given, and samples do not have one label each, which is mixed with images: leave it out"
        )
    if not pipeline.is_visual or len(pipeline.output_shape) != 3:
        raise ConfigError(
            f"mix_images is given, and samples are {list(pipeline.output_shape)}, no images: leave it out"
        )
    return Mixing(config.mix_images, seed_of(config), pipeline.layout)


def _pipeline(
    source: Source, config: LoaderConfig, probes: list[int], calls: Calls, *, runs: bool
) -> Pipeline:
    """Return what is done to the samples of a source. calls: what one is read with, where it says their shape."""
    pipeline = pipeline_of(config, source, runs=runs)
    if not pipeline.needs_probe:
        return pipeline
    drawn = set[str]()

    def probe(sample: int) -> None:
        try:
            name = source.describe(sample)
            picture, mask = calls.one(name, lambda: _read_parts(source, sample))
            beside = _beside(source, pipeline, sample, mask)
            drawn.update(keeping_global_states(lambda: pipeline.probe(picture, name, beside)))
        except Exception as error:
            if (placed := located(error, sample, source.describe)) is error:
                raise
            raise placed from error

    from_first(probes, probe, on_error_raise=config.on_error == "raise")
    if drawn and not config.is_in_processes and config.decoders != 0:
        _warn_of_global_draws("transforms draw", "the callable that does", drawn)
    return pipeline


def _read_parts(source: Source, sample: int) -> tuple[bytes, bytes]:
    """Return the bytes of a sample's picture, and those of its mask; none where it has no mask."""
    masks, data = masks_of(source), source.read(sample)
    end = len(data) if masks is None else int(masks.image_bytes[sample])
    return data[:end], data[end:]


def _beside(source: Source, pipeline: Pipeline, sample: int, mask: bytes) -> Along | None:
    """Return a mask for those steps of a pipeline that take masks; None where there is no mask, or no such step."""
    if (masks := masks_of(source)) is None:
        return None
    try:
        return along_with(pipeline, mask)
    except DataError as error:
        raise located(error, sample, masks.describe) from error


def _first_picture(source: Source, sample: int, calls: Calls) -> bytes | None:
    try:
        return calls.one(source.describe(sample), lambda: _read_parts(source, sample))[0]
    except WaitTimeout:
        raise
    except Exception as error:  # who reads it for a batch says what is wrong
        raise_interrupt(error)
        return None


def _near(extents: AllExtents, machine: Machine, ranks: int, sizes_bytes: NDArray[np.int64]) -> Near:
    """Return what says which samples are read together: where they lie, and what a read costs."""
    mean_bytes = max(float(sizes_bytes.mean()), 1.0)
    return Near(extents, machine.source_price(ranks, mean_bytes), machine.sequential_rate(ranks))


def samples_of_data_set(
    dataset: MapDataset,
    config: LoaderConfig,
    plan: AccessPlan,
    probes: list[int],
    calls: Calls,
    front_end: FrontEnd,
    stored: Source | None,
    *,
    runs: bool,
) -> Samples:
    """See `set_up`. probes: samples to look at. stored: what is read for the data set, see `MakingDecoder`; or None."""
    if stored is None and not runs:
        raise not_predictable(dataset)
    defaults, unequal = Defaults(config.optional or {}), config.unequal
    # Before the data set is asked for a sample: many open what cannot be pickled then.
    processes = None
    if config.is_in_processes:
        processes = process_plan(dataset, config, front_end.reducers, int(config.workers))
    fetcher = DatasetFetcher(dataset, seed_of(config), defaults)
    decoder: CollatingDecoder | SampleDecoder
    beside_bytes, draws = 0, fetcher.draws
    are_shared = processes is None and config.decoders != 0
    if config.collate_fn is not None:
        if are_shared:
            with suppress(WaitTimeout):  # its batch waits for it, too, and says so
                _more_of(fetcher, probes[:1], calls)
        decoder = CollatingDecoder(
            config.collate_fn,
            leaves_out=config.on_error != "raise",
            seed=seed_of(config),
            on_global_draws=None if fetcher.global_draws or not are_shared else _warn_of_collate_draws,
        )
        draws = draws or decoder.draws
    else:
        example = fetcher.example(probes, calls, on_error_raise=config.on_error == "raise")
        _warn_unless_made_again(fetcher, *example, calls)
        more = _more_of(fetcher, [each for each in probes if each != example[0]], calls) if unequal else []
        decoder = SampleDecoder(
            example,
            fetcher.describe,
            front_end.as_array,
            front_end.copy_leaves,
            unequal,
            more,
            fetcher.made_by,
        )
        beside_bytes = decoder.beside_bytes
        if defaults:
            _check_defaults(defaults, example[1], decoder)
    if fetcher.global_draws and are_shared:
        _warn_of_global_draws(f"{fetcher.place}.__getitem__ draws", "__getitem__", fetcher.global_draws)
    pickler = RowPickler(front_end.reducers)
    row = _row_bytes(fetcher, probes, calls, pickler) if config.cache else 0

    def parts(
        budget: MemoryBudget,
        machine: Machine,
        disks: KeptOnDisks,
        placement: Placement,
        sharing: Sharing | None,
    ) -> tuple[Fetcher, Decoder, AllExtents | None]:
        if stored is not None:
            extents, near = _places(stored, machine, plan.ranks, calls)
            reads = _reads(stored, near, budget, disks, sharing, runs=runs)
            return SourceFetcher(*reads), MakingDecoder(fetcher, decoder), extents
        if not row or not (budget.tier_bytes or disks.tiers):
            return fetcher, decoder, None
        memory = MemoryTier(budget.tier_bytes) if budget.tier_bytes else None
        return KeepingFetcher(fetcher, memory, disks, pickler), decoder, None

    return Samples(
        np.full(plan.samples, row, np.int64) if stored is None else stored.sizes_bytes,
        decoder.fields,
        parts,
        are_rows=stored is None,
        draws_seed=seed_of(config) if draws else None,
        processes=processes,
        beside_bytes=beside_bytes,
    )


def _warn_of_global_draws(who: str, whom: str, libraries: set[str]) -> None:
    """who: draws. whom: it is that may have a parameter."""
    warnings.warn(
        f"{who} from the global random generator of {' and '.join(sorted(libraries))}, which all threads share: "
        f"what a sample gets depends on their timing, and no seed repeats it. Give {whom} a parameter rng, a NumPy "
        "generator of its own, or take worker processes, whose global generators are seeded for each sample: workers=1 "
        'or more, or workers="processes" of a DataLoader',
        RuntimeWarning,
        stacklevel=2,
    )


def _warn_unless_made_again(fetcher: DatasetFetcher, sample: int, value: Any, calls: Calls) -> None:
    """Warn where a second call of a function that makes samples makes another one, whatever it is that changes.

    value: what the first one returned.
    """
    by = fetcher.made_by(sample)
    if not by or stored_of(fetcher.dataset) is not None or fetcher.global_draws:
        return
    before = content_of(value)
    if any(content_of(again) != before for again in _more_of(fetcher, [sample], calls)):
        warnings.warn(
            f"{by} made other arrays when it was called twice for {fetcher.describe(sample)}, so that no seed repeats "
            "a run: it changes in place what the data set keeps (have it change a copy), or it or the data set draws "
            "from a generator of its own (have it take a parameter rng)",
            RuntimeWarning,
            stacklevel=2,
        )


def _warn_of_collate_draws(libraries: set[str]) -> None:
    """Warn, from the thread that has made a batch."""
    _warn_of_global_draws(
        "what makes batches (collate_fn, or __getitems__) draws", "collate_fn of a Loader", libraries
    )


def process_plan(
    dataset: MapDataset | None,
    config: LoaderConfig,
    reducers: Reducers,
    count: int,
    most_bytes: float = math.inf,
) -> ProcessPlan:
    """Return what worker processes are started with. dataset: None where they decode what this process reads.

    Raises: ConfigError where the data set cannot be pickled, or not into so many bytes.
    """
    copy = pickled(dataset, "dataset", reducers, most_bytes=most_bytes)
    return ProcessPlan(
        count, seed_of(config), copy, dataset, config.worker_init_fn, reducers, config.collate_fn
    )


def _row_bytes(fetcher: DatasetFetcher, probes: Sequence[int], calls: Calls, pickler: RowPickler) -> int:
    """Return what a sample takes that is kept, by some of them. Raises: ConfigError where none can be kept."""
    if fetcher.asks:
        raise ConfigError(
            f'cache="rows" keeps samples for all epochs, and __getitem__ of {fetcher.place} asks for '
            f"{' and '.join(sorted(fetcher.asks))}, so that they change: leave cache out"
        )
    samples = _more_of(fetcher, probes, calls)
    if not samples:
        raise DataError(
            f"none of the first samples of {fetcher.place} could be had, to see how large they are"
        )
    for sample, again in zip(samples[:_TWICE], _more_of(fetcher, probes[:_TWICE], calls), strict=False):
        warn_unless_same(sample, again, f"a sample of {fetcher.place}")
    return row_bytes(samples, pickler, fetcher.place)


def _more_of(fetcher: DatasetFetcher, samples: Sequence[int], calls: Calls) -> list[Any]:
    """Return some samples, less those that cannot be had: whose batch asks for them says why."""
    found = []
    for sample in samples[:_LENGTHS]:
        try:
            found.append(fetcher.example([sample], calls, on_error_raise=True)[1])
        except WaitTimeout:
            raise
        except Exception as error:
            raise_interrupt(error)
    return found


def _usual_batch(plan: AccessPlan, rank: int) -> int:
    """Return how many samples a rank's batch has: at most, or on average where an order fills batches by size."""
    if not plan.is_cut_by_order:
        return plan.max_local_batch(rank)
    return -(-plan.length(0) // (plan.steps(0) * plan.ranks))


def _check_defaults(defaults: Defaults, example: Any, decoder: SampleDecoder) -> None:
    """Raise ConfigError for a default that is not like the field of a sample that has it."""
    try:
        decoder.check(defaults.fill(example, always=True), "with optional=, a sample without its fields")
    except DataError as error:
        raise ConfigError(f"{error}; give defaults of the same type and shape") from error
