"""Which data-parallel rank a process is, by its place in a mesh of ranks.

Under tensor, pipeline or context parallelism several processes work on the same samples: they have one data-parallel
rank, which is not the process's rank in the job.

    job of 4, mesh ("dp", "tp") of 2 x 2:    process 0  1  2  3    data-parallel rank 0  0  1  1,  of 2
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from penstock.errors import ConfigError

#: Dimensions over which the samples are split: as PyTorch and Accelerate name them, and as Lightning does.
DATA_DIMENSIONS = ("dp", "dp_replicate", "dp_shard", "data_parallel")
#: Dimensions along which all processes work on the same samples.
_OTHER_DIMENSIONS = ("tp", "pp", "cp", "sp", "ep", "tensor_parallel", "pipeline_parallel")


def place_in_mesh(mesh: Any, batch_size: int) -> tuple[int, int]:
    """Return the data-parallel rank of this process, and how many such ranks there are.

    mesh: a `torch.distributed.DeviceMesh`, or a `jax.sharding.Sharding`: then a rank is who has the same rows of a
        batch of `batch_size` rows. One mesh of one dimension is taken as it is, unless its name says that samples
        are not split over it (tp, pp ...). Of several, those named dp (data_parallel), or dp_replicate and dp_shard,
        count, the last one fastest; for other names give the part: `mesh["shards"]`.
    Raises: ConfigError if it is no mesh, has no such dimension or several that could be meant, or does not hold this
        process.
    """
    if hasattr(mesh, "addressable_devices_indices_map"):
        return _place_in_sharding(mesh, batch_size)
    if not all(hasattr(mesh, name) for name in ("mesh_dim_names", "shape", "get_coordinate")):
        raise ConfigError(
            f"mesh is {mesh!r:.80}; it is a torch.distributed.DeviceMesh: give it, or rank= and world_size="
        )
    sizes = tuple(mesh.shape)
    names = tuple(mesh.mesh_dim_names or ("",) * len(sizes))
    chosen = _data_dimensions(names)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            f"mesh {_shown(names, sizes)} does not hold this process: give one that does, or rank= and world_size="
        )
    rank, ranks = 0, 1
    for dimension in chosen:
        rank, ranks = rank * sizes[dimension] + coordinate[dimension], ranks * sizes[dimension]
    return int(rank), int(ranks)


def _place_in_sharding(sharding: Any, batch_size: int) -> tuple[int, int]:
    """Return which of the equal parts of a batch the devices of this process hold, and how many parts there are."""
    try:
        places = sharding.addressable_devices_indices_map((batch_size,)).values()
    except ValueError as error:
        raise ConfigError(
            f"sharding {sharding} does not lay out the {batch_size} rows of a batch: {error}"
        ) from error
    parts = sorted({rows.indices(batch_size)[:2] for (rows,) in places})
    if not parts:
        raise ConfigError(f"sharding {sharding} has no device of this process: give one that does")
    begin, end = parts[0][0], parts[-1][1]
    share = end - begin
    are_joined = all(part[1] == after[0] for part, after in pairwise(parts))
    if not are_joined or batch_size % share or begin % share:
        raise ConfigError(
            f"the devices of this process hold rows {', '.join(f'{first} to {last - 1}' for first, last in parts)} of "
            f"a batch of {batch_size} by {sharding}: give one by which each process holds one of several equal parts"
        )
    return begin // share, batch_size // share


def _data_dimensions(names: tuple[str, ...]) -> list[int]:
    """Return the dimensions over which samples are split. Raises: ConfigError."""
    shown = _shown(names)
    if len(names) == 1:
        if names[0] in _OTHER_DIMENSIONS:
            raise ConfigError(
                f"mesh has the dimension {shown} alone, along which all processes read the same samples: give the "
                "data-parallel one, or rank=0, world_size=1 for processes that all read everything"
            )
        return [0]
    chosen = [number for number, name in enumerate(names) if name in DATA_DIMENSIONS]
    if not chosen:
        raise ConfigError(
            f"mesh has the dimensions {shown}, and none is named {' or '.join(DATA_DIMENSIONS)}: give the "
            'data-parallel part, such as mesh["shards"], or rank=0, world_size=1 for processes that all read everything'
        )
    found = {names[number] for number in chosen}
    if len(found) > 1 and found != {"dp_replicate", "dp_shard"}:
        raise ConfigError(
            f"mesh has the dimensions {shown}, of which {_shown(tuple(sorted(found)))} could all be the data-parallel "
            'one: give the part that is meant, such as mesh["dp"]'
        )
    return chosen


def _shown(names: tuple[str, ...], sizes: tuple[int, ...] = ()) -> str:
    shown = ", ".join(repr(name) if name else "without a name" for name in names)
    return f"{shown} of {' x '.join(map(str, sizes))}" if sizes else shown
