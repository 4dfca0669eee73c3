"""The loader for users of JAX: batches as arrays on devices."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack, cast, final

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from penstock import loader
from penstock.errors import ConfigError, DataError
from penstock.loader.config import LoaderArguments, LoaderConfig
from penstock.loader.dataset import MapDataset, numpy_leaf
from penstock.loader.front_end import FrontEnd, with_images
from penstock.loader.structure import is_dataclass_value, with_fields
from penstock.ranks import Ranks
from penstock.report import print_report
from penstock.store import Source

#: What JAX has computed with is released in less time than this.
_RELEASED_SECONDS = 5.0


class JaxArguments(LoaderArguments, total=False):
    """The arguments of a loader, as users of JAX may give them."""

    dtype: DTypeLike | None  # type: ignore[misc]


@final
class Loader(loader.Loader):
    """Batches as `jax.Array`s.

    Takes a `penstock.LoaderConfig` or its arguments; dtype may be one of jax.numpy.

    A folder gives tuples of images, [batch, channels, height, width] (or channels last) and labels, [batch]. A source
    whose labels have names gives dicts. A data set gives the structure of its samples. What is no number, such as text,
    stays as it is.

    sharding: where the arrays lie, by their first dimension: `NamedSharding(mesh, PartitionSpec("data"))`. Of several
        processes it says which rows of a global batch this one reads, and batches are global arrays. Left out, a batch
        lies on the default device.

    Copies to devices are begun, not waited for. On a CPU an array may lie over the staging buffer without a copy; the
    memory is filled again when no array refers to it any more. Donating a batch to a compiled function is safe: memory
    of the loader is not written there.

    Where jax_enable_x64 is off, JAX makes int32 of int64, as labels and tokens are, and float32 of float64.
    """

    def __init__(
        self,
        source: LoaderConfig | str | os.PathLike[str] | Source | MapDataset,
        *,
        sharding: jax.sharding.Sharding | None = None,
        ranks: Callable[[], Ranks] | None = None,
        state: Mapping[str, Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
        report: Callable[[str], None] | None = print_report,
        **arguments: Unpack[JaxArguments],
    ) -> None:
        """Open the source and make ready to prefetch, as `penstock.Loader`.

        Raises: as it does; ConfigError if a batch, or an epoch's short last one, cannot be laid out by `sharding`.
        """
        if not isinstance(dtype := arguments.get("dtype"), str | None):
            arguments["dtype"] = np.dtype(dtype).name
        handed = _Handed()
        super().__init__(
            source,
            front_end=FrontEnd(
                partial(_present, sharding, handed), _as_array, is_computing=handed.is_any_read
            ),
            mesh=sharding,
            ranks=ranks,
            state=state,
            trace=trace,
            report=report,
            **cast(LoaderArguments, arguments),
        )
        if sharding is not None and self.config.unequal:
            self.close()
            raise ConfigError(
                "ragged and padded batches have other shapes on each process and in each step, which sharding= cannot "
                "divide: leave sharding out, or pad all samples to one length in the data set"
            )
        rows = self.plan.length(0) - self.plan.first_position(0, self.plan.steps_alike(0))
        try:
            if sharding is not None:
                sharding.shard_shape((rows,))
        except ValueError as error:
            self.close()
            raise ConfigError(
                f"an epoch's last batch has {rows} samples, which {sharding} does not divide evenly: give "
                "drop_last=True, or another batch_size="
            ) from error


class _Handed:
    """Arrays of NumPy that JAX was given, as long as it refers to them: it computes later than it is asked to.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pairs: list[tuple[weakref.ref[NDArray[Any]], weakref.ref[Any]]] = []
        #: Which arrays were read when that was last asked, by `id` of their references; and since when, or since when
        #: JAX was last seen to compute.
        self._read, self._since = set[int](), 0.0

    def add(self, array: NDArray[Any], made: jax.Array) -> None:
        """Take note of what JAX made of an array."""
        self._pairs = [pair for pair in self._pairs if pair[0]() is not None]
        # What refers to a view, refers to the array that it is of.
        owner = array.base if isinstance(array.base, np.ndarray) else array
        self._pairs.append((weakref.ref(owner), weakref.ref(made)))

    def is_any_read(self) -> bool:
        """Return whether JAX still computes with an array of which nobody has what was made of it.

        What else shares its memory, such as `batch["x"].addressable_data(0)`, looks the same, but does not go by
        itself: False once none of them was released for some seconds in which JAX computed nothing.
        """
        # JAX releases arrays here: threads that compute without the interpreter's lock leave that to others.
        gc.collect(0)
        read = {id(array) for array, made in self._pairs if array() is not None and made() is None}
        now = self._clock()
        is_late = now - self._since >= _RELEASED_SECONDS
        if read != self._read or (is_late and _is_computing()):
            self._read, self._since, is_late = read, now, False
        return bool(read) and not is_late


def _is_computing() -> bool:
    live: Callable[[], list[Any]] = jax.live_arrays
    return not all(array.is_deleted() or array.is_ready() for array in live())


def _present(sharding: jax.sharding.Sharding | None, handed: _Handed, batch: Any, dtype: str | None) -> Any:
    if dtype == "bfloat16":
        batch = with_images(batch, lambda images: images.view(jax.numpy.bfloat16))
    leaves, structure = jax.tree.flatten(batch)
    if any(map(is_dataclass_value, leaves)):  # which JAX does not know
        each = partial(_present, sharding, handed, dtype=None)
        leaves = [with_fields(leaf, each) if is_dataclass_value(leaf) else leaf for leaf in leaves]
    which = [index for index, leaf in enumerate(leaves) if _is_for_devices(leaf)]
    for index, array in zip(which, _on_devices([leaves[index] for index in which], sharding), strict=True):
        handed.add(leaves[index], array)
        leaves[index] = array
    return jax.tree.unflatten(structure, leaves)


def _is_for_devices(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray) or not (
        leaf.dtype.kind in "biufc" or leaf.dtype == jax.numpy.bfloat16
    ):
        return False
    narrow = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype.kind in "iu" and narrow != leaf.dtype and leaf.size:
        limits = np.iinfo(narrow)
        if leaf.min() < limits.min or leaf.max() > limits.max:
            raise DataError(
                f"a batch has numbers from {leaf.min()} to {leaf.max()}, and JAX makes {narrow} of {leaf.dtype}, up to "
                f'{limits.max}: call jax.config.update("jax_enable_x64", True) first'
            )
    return True


def _on_devices(arrays: list[NDArray[Any]], sharding: jax.sharding.Sharding | None) -> list[Any]:
    if sharding is None or sharding.is_fully_addressable:
        placed: list[Any] = jax.device_put(arrays, sharding)
        return placed
    make: Callable[..., Any] = jax.make_array_from_process_local_data
    return [make(sharding, array) for array in arrays]


def _as_array(leaf: Any) -> NDArray[Any] | None:
    return numpy_leaf(np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf)
