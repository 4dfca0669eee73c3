"""What a loader is asked to do, as a value: printed, compared and predicted without a loader."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, Literal, TypedDict, TypeGuard

from penstock.errors import ConfigError, given_beside
from penstock.loader.batch_sampler import as_batch_sampler
from penstock.loader.dataset import MapDataset
from penstock.loader.keep import CROPS, DECODED, STORED, check_keep
from penstock.loader.local_disk import LocalDisk, check_local_disk
from penstock.loader.optional import check_defaults
from penstock.loader.source_samples import SourceSamples, kind_of, stored_of
from penstock.loader.transforms.mixing import MixUp, check_mix
from penstock.loader.transforms.pipeline import Transform, check_draws, check_transforms
from penstock.loader.unequal import Unequal, unequal_fields
from penstock.machine import Machine
from penstock.plan import AccessPlan, CutOrder, Order, Sequential
from penstock.plan.access import MOST_COUNT, check_rank, epochs_of_steps
from penstock.plan.orders import ENDLESS, LARGEST_EPOCH, check_seed, even_from
from penstock.policy.loading import LoadingPolicy
from penstock.ranks.decode_access import address_of
from penstock.simulate.policies import policy_of
from penstock.store import Numeric, Source
from penstock.store.listing import Refresh, check_refresh
from penstock.store.object_store import without_secrets
from penstock.store.patterns import Paths
from penstock.store.remote import check_options
from penstock.store.selection import unselected
from penstock.store.table import is_dataset
from penstock.units import format_count, is_integer, parse_bytes
from penstock.validate import check_count, check_wait, is_number

OnError = Literal["raise", "skip"] | Callable[[Exception, int], Literal["raise", "skip"]]

#: How samples are kept in memory, unless another policy is given.
POLICY = "frequency"
#: The same where ranks read each other's.
SHARED_POLICY = "first-reader"
#: The same where decode servers read most of them, and what they read is in none of this process's tiers.
SERVED_POLICY = "staging"
#: Who shares what is kept: the ranks of a job on a host, those on all hosts, or all jobs on a host.
HOST, HOSTS, JOBS = "host", "hosts", "jobs"
#: Of images, unless another number format is given.
DTYPE = "float32"
#: How a message begins about half of a place.
BOTH_OR_NEITHER = "rank and world_size belong together, give both or neither"
# More than any store rewards: a slip of the hand, and every thread costs a stack.
_MOST_THREADS = 1024


class LoaderArguments(TypedDict, total=False):
    """The arguments of a loader, see `LoaderConfig`."""

    batch_size: int | None
    batch_sampler: Iterable[Sequence[int]] | CutOrder | None
    epochs: int | None
    steps: int | None
    transforms: Sequence[Transform]
    mix_images: Any
    collate_fn: Callable[..., Any] | None
    optional: Mapping[Any, Any] | None
    ragged: Sequence[Any]
    padded: Mapping[Any, Any] | None
    cache: str | None
    shuffle: bool | Order
    seed: int | None
    drop_last: bool
    rank: int | None
    world_size: int | None
    split: str
    dtype: str | None
    layout: str
    memory: str | int | None
    prefetch: int | None
    keep: str
    local_disk: LocalDisk | None
    machine: Machine | str | os.PathLike[str] | None
    policy: str | LoadingPolicy | None
    share: str | None
    decode_servers: Sequence[str]
    readers: int | None
    decoders: int | None
    workers: int | str
    worker_init_fn: Callable[[int], object] | None
    on_error: OnError
    skip: str | os.PathLike[str] | None
    refresh: Refresh
    storage_options: Mapping[str, Any] | None
    patience_seconds: float
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoaderConfig:
    """What is loaded, and how: everything that a loader is given but where it writes (`report=`, `trace=`).

    source: a folder, list file, tar shards or a list of paths (see `penstock.open_source`), or the address of one, such
        as "s3://bucket/train"; a `Source`, a map-style data set, or a mixture of them, see `penstock.loader.mix`. A
        list of paths is kept as a tuple.
    batch_size: samples of a global batch, over all ranks.
    batch_sampler: in place of batch_size and shuffle, an iterable of lists of ids, each a batch of one rank: the first
        one of rank 0, the next of rank 1, and so on. Gone through once for each epoch, after `set_epoch` where it, or
        its `sampler`, has that. Or batches of `penstock.plan`, such as `Batches`.
    epochs: how many times the data are read; fixes how far ahead the plan looks. None: again and again, without end,
        as validation does.
    steps: how many batches the run has, over all epochs; with epochs= too, the run ends with the first of the two.
    transforms: what happens to each sample of a folder or `Source`; a data set does its own. Penstock's, torchvision's,
        albumentations' and callables of yours, see `penstock.loader.transforms`. A source of numbers, such as a .npy
        file, needs none. Kept as a tuple.
    mix_images: `MixUp` or `CutMix` of `penstock.loader.transforms`, or torchvision's; of a list, one is drawn for each
        step. Images have one label each, which becomes a share of each class. Kept as a tuple.
    collate_fn: makes each batch of a data set, called with the list of its samples by the thread that has loaded them;
        it is handed out as it is. Samples that on_error= skips are left out. What it allocates is not in memory=.
    optional: what stands in the place of a field that samples of a data set lack, or have as None, by the field's name:
        {"caption": ""}. "target.boxes" is a field of a field, 1 the second part of a tuple.
    ragged, padded: fields of a data set's samples whose arrays, or lists of numbers, differ in length, by the same
        names; "" is a sample without fields. ragged=["tokens"] puts those of a batch end to end (see
        `penstock.loader.Ragged`); padded={"tokens": 0} pads them to the longest, with a number or as a
        `penstock.loader.Padding` says.
    cache: "rows" keeps samples that a data set has made in memory= and on local disks, as far as they fit, those that
        are wanted most often: it is not asked for them again, nor in later runs where a disk has them and neither data
        nor code have changed since. For data sets that make the same of a number each time.
    shuffle: True for a new uniform permutation per epoch, False for the stored order, or an `Order`.
    seed: of the order and of every random transform. None: one is drawn, by the first rank for all; it is reported at
        the start, and in the loader's state.
    drop_last: leave out an epoch's short last batch.
    rank, world_size: this process among those that share each batch, its data-parallel rank: under tensor or pipeline
        parallelism not its rank in the job. Left out, the process is alone, which a loader refuses where it is one of
        several: world_size=1 says that each of them reads everything.
    split: how ranks share a batch: "balanced" slices, whose sizes differ by one at most, the thesis' "uniform" ones,
        "strided" ... (see `AccessPlan`). "local" gives a rank those samples of a global batch that it was the first to
        read, of which its own memory keeps most: local batches are others then, and no random parts of the global
        one; see `penstock.plan.local`.
    dtype, layout: of the images, "float32", "float16", "bfloat16" or "uint8", "NCHW" or "NHWC". dtype=None:
        "float32", or what a source of numbers suggests.
    memory: bound on batch slots, bytes in passing, pictures being decoded and the memory tier together, as in
        "8 GiB"; what callables of yours get and allocate is not in it, nor, where workers="auto" has processes decode,
        what these take for pictures: as much as threads may. A quarter of what this process may use,
        shared by the ranks of a host, unless given.
    prefetch: how many batches are read ahead of the one that the training has: so many, and none beyond. Unless given,
        as many as memory= allows, usually eight, and up to four times as many where that spares the training waits.
        decoders=0 reads none ahead.
    keep: in which form memory keeps pictures of a folder or `Source` for later epochs: "stored", or "crops", so that
        one is decoded for several epochs at once: where nothing is drawn, as in validation, for all of them; random
        crops for 3, or as many as "5 crops" says; "decoded", whole, for random crops; "auto": what saves most by what
        machine= says of store and decoding. Batches are the same, bit by bit.
    local_disk: a folder on a local disk that keeps samples for later epochs and later runs, those of a data set's own
        code with cache="rows"; or folders and what each may hold: {"/scratch/penstock": "200 GiB"}. Those of machine=
        unless given. Several jobs may share a folder.
    machine: what reads cost here, or its file (see `penstock calibrate`); learned while running unless given.
    policy: which samples of a folder or `Source`, or of one that `SourceSamples` or `TarSamples` are made of, stay in
        memory: "frequency", "staging" (none), or an object of yours, see `penstock.policy.loading.LoadingPolicy`.
        "frequency" unless given; with share="host" or "hosts" "first-reader", or "cover" or "hash-home".
    share: "host" has the ranks of a host read each other's memory, so that together they keep each sample once and read
        the source once for it; "hosts" does so for the ranks of all hosts, which send each other samples over encrypted
        connections. "jobs": separate jobs of this user on a host, over the same data, keep samples together, in the
        memory= of the first of them. With keep="decoded" or "crops" all share pixels, too. Of a folder or `Source`,
        also one that `SourceSamples` or `TarSamples` are made of. None: each rank reads for itself.
    decode_servers: addresses of `penstock decode-server` on other machines, such as ["node7:7447"], which read, decode
        and crop pictures of a folder or `Source` as far as that is faster; batches are the same, bit by bit. Nothing is
        kept here then, unless policy= says so.
    readers: reads in flight at most; unless given, what machine= says to begin with, then as many as raise the rate.
    decoders: threads that decode, or call a data set; unless given, one per core to begin with, then as many as raise
        the rate. The ranks that a launcher started on a host share its cores.
        decoders=0 loads each batch when it is asked for, in the thread that asks, without any other, as DataLoader
        does with num_workers=0: for debuggers, profilers and exact tracebacks.
    workers: how many worker processes call a data set, or decode for a source whose transforms have Python code, for
        code that holds the interpreter's lock. "threads": the threads of decoders= do. "auto": threads, and processes
        where these prove faster in a run that lasts; not beside cache=, keep= or mix_images=, which threads do.
    worker_init_fn: called in each worker process with its number, before its first sample.
    on_error: "raise", "skip", or a function of the error and the sample that returns one of them.
    skip: a list of bad samples, as `penstock check` writes it; what is left is numbered anew, so that batches are
        complete.
    refresh: of a folder or list that was read before, "auto" lists what changed since, "full" everything, "never"
        nothing; see `penstock.open_source`.
    storage_options: of an address, what its driver needs beyond what it finds by itself; see `penstock.open_source`.
    patience_seconds: a wait that lasts longer is reported. timeout_seconds: one that lasts longer raises; the start of
        worker processes does not count, for ten times as long, or ten minutes if that is more. Neither is looked at
        with decoders=0, where the thread that waits is the one that loads.

    Two configurations are equal if all of their values are. A source that is an object is equal to itself alone.

    Raises: ConfigError naming the argument. What depends on the data, such as an order's length, is checked by who
        opens the source.

    >>> from penstock.loader.transforms import Resize, ToTensor
    >>> LoaderConfig("photos/train", batch_size=64, epochs=90, transforms=[Resize((8, 8)), ToTensor()], seed=0)
    LoaderConfig('photos/train', batch_size=64, epochs=90, transforms=(Resize(size=(8, 8), interpolation='bilinear',
    antialias=True), ToTensor()))
    """

    source: str | os.PathLike[str] | Source | MapDataset
    _: KW_ONLY
    batch_size: int | None = None
    batch_sampler: Iterable[Sequence[int]] | CutOrder | None = None
    epochs: int | None = None
    steps: int | None = None
    transforms: Sequence[Transform] = ()
    mix_images: Any = None
    collate_fn: Callable[..., Any] | None = None
    optional: Mapping[Any, Any] | None = None
    ragged: Sequence[Any] = ()
    padded: Mapping[Any, Any] | None = None
    cache: str | None = None
    shuffle: bool | Order = True
    seed: int | None = 0
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    split: str = "balanced"
    dtype: str | None = None
    layout: str = "NCHW"
    memory: str | int | None = None
    prefetch: int | None = None
    keep: str = STORED
    local_disk: LocalDisk | None = None
    machine: Machine | str | os.PathLike[str] | None = None
    policy: str | LoadingPolicy | None = None
    share: str | None = None
    decode_servers: Sequence[str] = ()
    readers: int | None = None
    decoders: int | None = None
    workers: int | str = "auto"
    worker_init_fn: Callable[[int], object] | None = None
    on_error: OnError = "raise"
    skip: str | os.PathLike[str] | None = None
    refresh: Refresh = "auto"
    storage_options: Mapping[str, Any] | None = None
    patience_seconds: float = 60.0
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("source", "local_disk", "machine", "skip"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        if reason := _why_no_source(self.source):
            raise ConfigError(f"source is {reason}")
        if _are_paths(self.source):
            object.__setattr__(self, "source", tuple(map(os.fspath, self.source)))
        self._check_reads()
        self._check_means()
        self._check_waits()
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ConfigError(f"collate_fn is {self.collate_fn!r}; it is a function of a list of samples")
        if self.is_of_data_set:
            self._check_data_set()
        elif self.transforms or not self._may_do_without:
            self.check_not_of_samples()
        if self.collate_fn is not None and self.unequal:
            raise ConfigError(
                "collate_fn makes the batches, so that ragged and padded have no effect: leave them out"
            )
        steps = ()
        if self.transforms or not (self.is_of_data_set or self._may_do_without):
            steps = check_transforms(self.transforms, self.dtype or DTYPE, self.layout)
            if self.decoders != 0 and not self.is_in_processes:
                check_draws(steps)
        object.__setattr__(self, "transforms", steps)
        if self.mix_images is not None:
            self._check_mix()
        for each in fields(self):
            value = getattr(self, each.name)
            if is_number(value) and hasattr(value, "item"):  # NumPy's are no JSON, and print otherwise
                object.__setattr__(self, each.name, value.item())

    def check_not_of_samples(self) -> None:
        """Refuse what is for the samples of a data set. Of a path without transforms its source says whether it is."""
        if self.collate_fn is not None:
            raise ConfigError(
                "collate_fn is given, and the source is no data set, whose samples it would get: bytes are decoded "
                "into their place in the batch, so do what it does to each batch that the loader gives, or give "
                "penstock.loader.SourceSamples(source), a data set of its values, or TarSamples of tar shards"
            )
        if self.optional:
            raise ConfigError(
                "optional is for the samples of a data set; those of a folder or source have the labels it gives them"
            )
        if self.cache is not None:
            raise ConfigError(
                "cache is for the samples of a data set; bytes of a folder or source are kept as policy= says"
            )
        if self.unequal:
            raise ConfigError(
                "ragged and padded are for the samples of a data set; those of a folder or source are all alike"
            )

    def _check_reads(self) -> None:
        """Check what fixes who reads what, as far as it can be without the number of samples."""
        ranks = 1 if self.world_size is None else self.world_size
        check_count("world_size", ranks, most=MOST_COUNT)
        if self.rank is not None:
            if self.world_size is None:
                raise ConfigError(f"{BOTH_OR_NEITHER}: rank is {self.rank!r} and world_size is left out")
            check_rank(self.rank, ranks)
        if self.seed is not None:
            check_seed(self.seed)
        order = self.shuffle
        if self.steps is not None:
            check_count("steps", self.steps, most=MOST_COUNT)
        if self.batch_sampler is not None:
            self._check_batch_sampler()
            return
        if self.batch_size is None:
            raise ConfigError(f"batch_size is missing: give {_REQUIRED['batch_size']}")
        if isinstance(order, bool):
            epochs = 1 if self.epochs is None else self.epochs
            AccessPlan(Sequential(1), self.batch_size, epochs, ranks, self.split, self.drop_last)
            return
        if isinstance(order, type) or not isinstance(order, Order):
            raise ConfigError(
                f"shuffle is {order!r}; it is True, False or an order of penstock.plan; a sampler of torch or a list "
                "of ids becomes one by Explicit.from_sampler(sampler, samples, epochs) or Explicit(ids, samples)"
            )
        plan_over(order, self)

    def _check_batch_sampler(self) -> None:
        for name, usual in (("batch_size", None), ("shuffle", True), ("split", "balanced")):
            if (value := getattr(self, name)) is not usual and value != usual:
                raise ConfigError(
                    f"{name} is {value!r:.80} beside batch_sampler, which says what each batch is: leave {name} out"
                )
        is_endless = self.epochs is None and self.steps is None
        sampler = as_batch_sampler(self.batch_sampler, is_endless=is_endless)
        object.__setattr__(self, "batch_sampler", sampler)
        if isinstance(sampler, CutOrder):
            plan_over(sampler, self)
        else:
            AccessPlan(Sequential(1), 1, self.epochs or 1, self.world_size or 1, drop_last=self.drop_last)

    def _check_means(self) -> None:
        """Check what the samples are loaded with."""
        for name in ("readers", "decoders", "prefetch"):
            count = getattr(self, name)
            if count is not None:
                check_count(name, count, 0 if name == "decoders" else 1, _MOST_THREADS)
        self._check_workers()
        for name in ("readers", "prefetch"):
            if self.decoders == 0 and (count := getattr(self, name)) is not None:
                raise ConfigError(
                    f"{name} is {count} and decoders is 0, which has the training's own thread do everything: "
                    f"leave {name} out, or give decoders=1 or more"
                )
        if self.memory is not None:
            try:
                parse_bytes(self.memory)
            except ConfigError as error:
                raise ConfigError(f"memory: {error}") from error
        if check_keep(self.keep) is not None and self.is_of_data_set:
            raise ConfigError(
                f"keep is {self.keep!r}, for pictures of a folder or source; what a data set's own code makes is kept "
                'with cache="rows"'
            )
        if self.local_disk is not None:
            check_local_disk(self.local_disk)
            if self.is_of_data_set and not self.cache and (reason := self.why_not_stored):
                instead = "leave one of them out"
                if stored_of(self.source) is None:
                    instead = 'cache="rows" keeps what it makes, if that is the same of a number each time'
                raise ConfigError(
                    f"local_disk is given, and {reason} reads by itself, so that no disk keeps its bytes: {instead}"
                )
        if self.machine is not None:
            check_machine(self.machine)
        _ = self.loading_policy
        if self.share is not None:
            self._check_share()
        if self.decode_servers:
            self._check_decode_servers()
        elif self.decode_servers != ():
            object.__setattr__(self, "decode_servers", ())
        if not isinstance(self.skip, str | None):
            raise ConfigError(
                f"skip is {self.skip!r:.80}; it is the path of a list that penstock check writes: to leave out samples "
                "by their numbers, give source.select(...)"
            )
        check_defaults(self.optional)
        if self.cache not in (None, "rows"):
            raise ConfigError(f'cache is {self.cache!r:.80}; it is "rows" or None')
        if self.cache and self.is_in_processes:
            raise ConfigError(
                f'cache is "rows" and workers is {self.workers}, and worker processes keep no samples: leave one out'
            )
        if self.unequal and not isinstance(self.ragged, tuple):
            object.__setattr__(self, "ragged", tuple(self.ragged))
        check_refresh(self.refresh)
        check_options(self.storage_options)
        if self.storage_options is not None and self.paths is None:
            raise ConfigError(
                "storage_options are given, and the source is open already: give them to what opens it"
            )
        if self.refresh != "auto" and self.paths is None:
            raise ConfigError(
                f"refresh is {self.refresh!r}, and the source is open already: give it to what opens the source, "
                "such as penstock.open_source, or give a path here"
            )

    def _check_workers(self) -> None:
        workers, init = self.workers, self.worker_init_fn
        if init is not None and not callable(init):
            raise ConfigError(
                f"worker_init_fn is {init!r}; it is a function of the number of a worker process"
            )
        if workers in ("auto", "threads"):
            if init is not None and workers == "threads":
                raise ConfigError(
                    'worker_init_fn is for worker processes, and workers="threads" starts none: leave it out'
                )
            return
        if not is_integer(workers) or not 1 <= workers <= _MOST_THREADS:
            advice = "; decoders=0 loads in the training's own thread" if workers == 0 else ""
            raise ConfigError(
                f'workers is {workers!r}; it is "auto", "threads" or a number of worker processes, 1 to '
                f"{_MOST_THREADS}{advice}"
            )
        if self.decoders is not None:
            raise ConfigError(
                f"decoders is {self.decoders} beside workers={workers}: decoders counts threads and workers counts "
                "processes, so leave one of them out"
            )
        if not self.is_of_data_set and self.mix_images is not None:
            raise ConfigError(
                f"workers is {workers} beside mix_images, which threads mix: leave one of them out"
            )

    @property
    def is_in_processes(self) -> bool:
        """Whether worker processes call the data set."""
        return is_integer(self.workers)

    def _check_waits(self) -> None:
        if self.on_error not in ("raise", "skip") and not callable(self.on_error):
            raise ConfigError(
                f'on_error is {self.on_error!r}; it is "raise", "skip" or a function that returns one'
            )
        check_wait("patience_seconds", self.patience_seconds)
        if self.timeout_seconds is not None:
            check_wait("timeout_seconds", self.timeout_seconds)

    def _check_mix(self) -> None:
        steps = check_mix(self.mix_images)
        object.__setattr__(self, "mix_images", steps)
        if self.is_of_data_set:
            raise ConfigError(
                "mix_images is given with a data set, whose batches may be of any structure: mix in collate_fn=, or in "
                "the training loop, or give a folder or source of images"
            )
        if self.dtype == "uint8" and any(isinstance(step, MixUp) for step in steps):
            raise ConfigError(
                'dtype is "uint8", which holds no mixture of two images: take a float dtype, or CutMix'
            )

    def _check_data_set(self) -> None:
        kind = kind_of(self.source)
        if self.transforms:
            raise ConfigError(
                f"transforms are given with the data set {kind}, which makes its samples itself: give them to the data "
                "set, or give a folder here"
            )
        reason = self.why_not_stored
        if reason and self.readers is not None:
            raise ConfigError(
                f"readers is {self.readers}, but {reason} reads by itself, on the threads of decoders="
            )
        name = self.loading_policy.name
        # By that one, cache= keeps what the data set has made.
        if reason and self.policy is not None and not (self.cache and name == POLICY):
            raise ConfigError(
                f"policy is {name!r}, but {reason} reads by itself, so that no stored bytes are kept: leave it out"
            )

    def _check_share(self) -> None:
        if self.share not in (HOST, HOSTS, JOBS):
            raise ConfigError(f'share is {self.share!r:.80}; it is "{HOST}", "{HOSTS}", "{JOBS}" or None')
        instead = {
            f"{self.why_not_stored}, whose own code reads": self.is_of_data_set and bool(self.why_not_stored),
            f'keep={self.keep!r}, in place of which keep="{CROPS}" or "{DECODED}" is shared': (
                self.keep not in (STORED, CROPS, DECODED)
            ),
            "local_disk=, which jobs do not share": self.share == JOBS and self.local_disk is not None,
            "decoders=0, by which nothing is read ahead": self.decoders == 0,
            "policy=, which says what a job keeps for itself": self.share == JOBS and self.policy is not None,
        }
        for what, is_given in instead.items():
            if is_given:
                raise ConfigError(
                    f'share is "{self.share}", which does not go with {what}: leave share= out, or that'
                )

    def _check_decode_servers(self) -> None:
        servers = self.decode_servers
        if isinstance(servers, str) or not isinstance(servers, Sequence):
            raise ConfigError(
                f'decode_servers is {servers!r:.80}; it is a list of addresses, such as ["node7:7447"]'
            )
        addresses = tuple(str(address_of(each)) for each in servers)
        if len(set(addresses)) < len(addresses):
            raise ConfigError(f"decode_servers names one twice: {', '.join(addresses)}")
        object.__setattr__(self, "decode_servers", addresses)
        instead = {
            "a data set, whose own code decodes": self.is_of_data_set,
            f"keep={self.keep!r}, which keeps what is decoded here": check_keep(self.keep) is not None,
            f'share="{self.share}"': self.share is not None,
            f"workers={self.workers}, processes that decode": self.is_in_processes,
            "decoders=0, by which nothing is read ahead": self.decoders == 0,
        }
        for what, is_given in instead.items():
            if is_given:
                raise ConfigError(f"decode_servers does not go with {what}: leave one of them out")

    @property
    def loading_policy(self) -> LoadingPolicy:
        """What decides which samples stay in memory. Raises: ConfigError."""
        by_default = (
            SHARED_POLICY if self.share in (HOST, HOSTS) else SERVED_POLICY if self.decode_servers else POLICY
        )
        return policy_of(self.policy or by_default)

    @property
    def shares_form(self) -> bool:
        """Whether several ranks keep pixels for each other."""
        is_shared = self.share in (HOST, HOSTS) and (self.world_size or 1) > 1
        return is_shared and check_keep(self.keep) is not None

    @property
    def unequal(self) -> Unequal:
        """Which fields differ in length, and how they are padded."""
        return unequal_fields(self.ragged, self.padded)

    @property
    def is_of_data_set(self) -> bool:
        """Whether the source is a map-style data set, whose own code reads and decodes."""
        return self.paths is None and not isinstance(self.source, Source) and not self.is_of_table

    @property
    def why_not_stored(self) -> str:
        """Why a data set reads by itself: "a data set ..."; "" where it is of a source that the loader may read."""
        kind = f"the data set {kind_of(self.source)}"
        if isinstance(self.source, SourceSamples):  # a name that nobody wrote who gave a path
            kind = f"the data set of {kind_of(unselected(self.source.source))}"
        if stored_of(self.source) is None and self.is_of_data_set:
            return kind
        instead = {
            f'cache="{self.cache}"': self.cache is not None,
            f"workers={self.workers}": self.is_in_processes,
            "decoders=0": self.decoders == 0,
        }
        return next((f"{kind} with {what}" for what, is_given in instead.items() if is_given), "")

    @property
    def asks_for_stored(self) -> str:
        """The first argument that is given for bytes which the loader reads; "" without any."""
        names = ("share", "policy", "local_disk", "readers")
        return next((f"{name}=" for name in names if getattr(self, name) is not None), "")

    @property
    def is_of_table(self) -> bool:
        """Whether the source is a datasets.Dataset whose samples, as they are stored, get transforms."""
        return bool(self.transforms) and self.paths is None and is_dataset(self.source)

    @property
    def _may_do_without(self) -> bool:
        """Whether the source may say by itself what its samples are. It is looked at when it is opened."""
        may_be_text = hasattr(type(self.source), "is_text")
        return self.paths is not None or isinstance(self.source, Numeric) or may_be_text

    @property
    def paths(self) -> Paths | None:
        """The path, pattern or paths of the source; None where the source is an object."""
        return self.source if isinstance(self.source, str) or _are_paths(self.source) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoaderConfig):
            return NotImplemented
        is_path = self.paths is not None
        return (self.source == other.source if is_path else self.source is other.source) and all(
            _is_same(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)[1:]
        )

    def __hash__(self) -> int:
        return hash((self.batch_size, self.epochs, self.seed, self.rank, self.world_size))

    def __repr__(self) -> str:
        """Return the call that makes an equal one, without what has its default."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        given = [
            f"{each.name}={_shown(each.name, values[each.name])}"
            for each in fields(self)[1:]
            if each.default is MISSING or not _is_same(values[each.name], each.default)
        ]
        return f"LoaderConfig({', '.join([_BRIEF.repr(_shown_source(self.source)), *given])})"


def _shown_source(source: Any) -> Any:
    if isinstance(source, str):
        return without_secrets(source)
    if isinstance(source, tuple):
        return tuple(without_secrets(each) if isinstance(each, str) else each for each in source)
    return source


def _shown(name: str, value: Any) -> str:
    """Return a value as it may be shown: options may be secret."""
    if name == "storage_options" and isinstance(value, Mapping):
        return f"{{{', '.join(f'{each!r}: ...' for each in value)}}}"
    return _BRIEF.repr(value)


#: A source may be a list of a million samples, an order a table.
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 200
_BRIEF.maxtuple = 32


def plan_over(order: Order, config: LoaderConfig) -> AccessPlan:
    """Return the plan of a configuration over an order. Raises: ConfigError."""
    batch_size, drop_last, ranks = config.batch_size, config.drop_last, config.world_size or 1
    if config.epochs is None and config.steps is None:
        _check_endless(order)

    def plan_of(epochs: int, last_steps: int | None = None) -> AccessPlan:
        if isinstance(order, CutOrder) and batch_size is None:
            return AccessPlan.of_batches(order, epochs, ranks, drop_last, last_steps)
        assert batch_size is not None, "the configuration was checked"
        return AccessPlan(order, batch_size, epochs, ranks, config.split, drop_last, last_steps)

    if config.epochs is not None or config.steps is None:
        plan = plan_of(ENDLESS if config.epochs is None else config.epochs)
        if config.steps is None or _count_steps(plan) <= config.steps:
            return plan
    return plan_of(*epochs_of_steps(order, batch_size or 1, config.steps, drop_last, ranks))


def _count_steps(plan: AccessPlan) -> int:
    if plan.is_cut_by_order:
        return sum(plan.steps(epoch) for epoch in range(plan.epochs))
    return sum(count * plan.steps(first) for first, count in plan.epochs_by_length().values())


def _check_endless(order: Order) -> None:
    even = even_from(order)
    if even == LARGEST_EPOCH and isinstance(order, CutOrder):
        return  # whose epochs are cut as they come
    if even == LARGEST_EPOCH:
        raise ConfigError(
            f"epochs is None, for a run without end, and only the code of {type(order).__name__} knows how long each "
            "epoch is: give epochs= or steps="
        )
    try:
        order.length(LARGEST_EPOCH)
    except ConfigError as error:
        count = format_count(even + 1, "epoch")
        raise ConfigError(
            f"epochs is None, for a run without end, and the order lists {count}: give epochs={even + 1}"
        ) from error


def _is_same(one: Any, other: Any) -> bool:
    """Compare two values of a field; whatever has no yes or no for an answer, as an array, is equal to itself alone."""
    try:
        is_same = one is other or one == other
    except ValueError:  # defaults of fields, which are arrays
        return False
    return isinstance(is_same, bool) and is_same


#: What to do with a data set that can only be iterated.
ITERABLE_WAY_OUT = (
    "if it reads files that Penstock reads (tar shards, Parquet, TFRecord, JSON lines: see penstock.open_source), give "
    "the files; else give it __len__ and __getitem__, or write its samples to such files once"
)
_SOURCES = "a folder, a list file, tar shards, a Source or a data set with a length and samples by number"
#: Of a `Source`.
_MEMBERS = ("sizes_bytes", "labels", "classes", "__len__", "read", "read_into", "describe")


def _why_no_source(source: Any) -> str | None:
    kind = type(source)
    if isinstance(source, str):
        return None
    if isinstance(source, type):
        return f"the class {source.__name__}: make an instance of it"
    if isinstance(source, Source):
        return None
    if hasattr(source, "dataset") and hasattr(source, "batch_size"):
        return (
            f"of type {kind.__name__}, itself a loader: give the data set that it was made from, its .dataset"
        )
    if any(base.__name__ == "IterableDataset" for base in kind.__mro__):
        return (
            f"of type {kind.__name__}, which can only be iterated, and a plan needs a length and samples by number: "
            f"{ITERABLE_WAY_OUT}"
        )
    if isinstance(source, Mapping):
        return f"of type {kind.__name__}, of data sets or columns: give one data set"
    if _are_paths(source):
        return None
    if isinstance(source, bytes):
        return f"{source!r}; a path is text: give os.fsdecode(...) of it"
    if isinstance(source, bytearray) or not all(hasattr(kind, name) for name in ("__len__", "__getitem__")):
        lacking = [name for name in _MEMBERS if not hasattr(source, name)]
        if lacking and (hasattr(source, "sizes_bytes") or hasattr(source, "read_into")):
            return (
                f"of type {kind.__name__}, which has no {' and no '.join(lacking)}: give it those of Source"
            )
        return f"{source!r}; it must be {_SOURCES}"
    return None


def _are_paths(source: object) -> TypeGuard[Sequence[str | os.PathLike[str]]]:
    return isinstance(source, (list, tuple)) and all(isinstance(each, (str, os.PathLike)) for each in source)


def check_machine(machine: object) -> None:
    """Raise ConfigError unless it is a machine, or may be the path of its file."""
    if not isinstance(machine, Machine | str | os.PathLike):
        raise ConfigError(f"machine is {machine!r}; give a Machine, or the path of its file")


#: What becomes of the arguments of PyTorch's DataLoader.
_ADVICE = {
    "num_workers": "threads are counted by this machine, decoders=0 starts none, and workers= is the number of worker "
    "processes; penstock.torch.DataLoader takes PyTorch's arguments",
    "pin_memory": "penstock.torch.Loader has it, and device=",
    "device": "penstock.torch.Loader has it; JAX puts batches on its devices by penstock.jax, or jax.device_put",
    "prefetch_factor": "prefetch= says how many batches are read ahead, and memory= how much that may take",
    "persistent_workers": "threads and processes live as long as the loader",
    "sampler": "give an order as shuffle=, such as penstock.plan.Explicit.from_sampler(sampler, ...)",
    "generator": "give seed=, or its order as shuffle=penstock.plan.TorchShuffle(len(dataset), generator.get_state())",
    "timeout": "timeout_seconds=",
    "multiprocessing_context": "the training is never forked for worker processes",
}


_REQUIRED = {
    "batch_size": "the samples of one step over all ranks, such as batch_size=64",
    "epochs": "how many the training reads, as a loader plans all of them, such as epochs=90, or None for no end; or "
    "steps=, the batches of the run",
}


def config_of(
    source: LoaderConfig | str | os.PathLike[str] | Source | MapDataset, arguments: Mapping[str, Any]
) -> LoaderConfig:
    """Return the configuration that a loader was given, as one value or argument by argument.

    Raises: ConfigError for an argument beside a configuration, one that there is not, or one that is missing; what
        `LoaderConfig` raises.
    """
    if isinstance(source, LoaderConfig):
        if arguments:
            raise given_beside(source, arguments)
        return source
    for name in arguments.keys() - LoaderArguments.__annotations__.keys():
        advice = _ADVICE.get(name, "see penstock.LoaderConfig for the arguments there are")
        raise ConfigError(f"{name} is no argument of a loader: {advice}")
    for name, what in _REQUIRED.items():
        instead = {"epochs": "steps", "batch_size": "batch_sampler"}[name]
        if name not in arguments and instead not in arguments:
            raise ConfigError(f"{name} is missing: give {what}")
    return LoaderConfig(source, **arguments)
