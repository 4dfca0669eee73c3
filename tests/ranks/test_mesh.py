"""Which data-parallel rank a process is, by its place in a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.ranks import place_in_mesh


@dataclass
class Mesh:
    """What a DeviceMesh tells of itself in one process."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    coordinate: list[int] | None

    def get_coordinate(self) -> list[int] | None:
        return self.coordinate


def places(shape: tuple[int, ...], names: tuple[str, ...] | None) -> list[tuple[int, int]]:
    """Return what each process of a mesh is told, in the order of their ranks in the job."""
    coordinates = product(*(range(size) for size in shape))
    return [place_in_mesh(Mesh(shape, names, list(each)), 8) for each in coordinates]


@pytest.mark.parametrize("names", [None, ("dp",), ("shards",)])
def test_a_mesh_of_one_dimension_is_taken_as_it_is(names: tuple[str, ...] | None) -> None:
    assert places((3,), names) == [(0, 3), (1, 3), (2, 3)]


@for_each(
    ("shape", "names", "expected"),
    [
        ((2, 2), ("dp", "tp"), [0, 0, 1, 1]),
        ((2, 2), ("pp", "dp"), [0, 1, 0, 1]),
        ((2, 2), ("data_parallel", "tensor_parallel"), [0, 0, 1, 1]),
        ((2, 2), ("dp_replicate", "dp_shard"), [0, 1, 2, 3]),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), [0, 0, 1, 1, 2, 2, 3, 3]),
        ((2, 3, 1), ("pp", "dp_shard", "cp"), [0, 1, 2, 0, 1, 2]),
    ],
)
def test_processes_along_other_dimensions_have_one_data_parallel_rank(
    shape: tuple[int, ...], names: tuple[str, ...], expected: list[int]
) -> None:
    found = places(shape, names)

    assert [rank for rank, _ in found] == expected
    size = math.prod(size for size, name in zip(shape, names, strict=True) if name[0] == "d")
    assert {ranks for _, ranks in found} == {size}


@for_each(
    ("mesh", "message"),
    [
        (4, "mesh is 4; it is a torch.distributed.DeviceMesh"),
        (Mesh((4,), ("tp",), [0]), "'tp' alone.*read the same samples.*rank=0, world_size=1"),
        (Mesh((2, 2), ("outer", "inner"), [0, 0]), r"'outer', 'inner', and none is named dp or.*mesh\[\"shards\"\]"),
        (Mesh((2, 2), None, [0, 0]), "without a name, without a name, and none is named dp"),
        (Mesh((2, 2), ("dp", "dp_shard"), [0, 0]), "'dp', 'dp_shard' could all be the data-parallel one"),
        (Mesh((2, 2), ("dp", "tp"), None), "'dp', 'tp' of 2 x 2 does not hold this process"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_say_it_is_refused(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_in_mesh(mesh, 8)
