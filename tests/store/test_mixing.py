"""Several sources as one: labels that are joined, where samples lie, parts of mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contracts.test_source_contract import write_tar

from penstock.errors import ConfigError
from penstock.store import (
    Arrays,
    FlatFolder,
    ImageFolder,
    MixedSource,
    TarShards,
    Tokens,
    extents_of,
    read_group,
)


def folder(root: Path, **of_class: int) -> ImageFolder:
    for name, count in of_class.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.jpg").write_bytes(f"{root.name} {name} {number}".encode())
    return ImageFolder(root)


def test_classes_are_those_of_all_sources_each_once_and_labels_are_numbered_anew(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", cat=2, dog=1), folder(tmp_path / "other", bird=1, cat=1)
    mixed = MixedSource([one, other], [1, 1], "stop")

    assert mixed.classes == ("cat", "dog", "bird")
    assert np.asarray(mixed.labels).tolist() == [0, 0, 1, 2, 0]
    assert mixed.sizes_bytes.tolist() == [*one.sizes_bytes, *other.sizes_bytes]
    assert mixed.describe(3) == str(tmp_path / "other" / "bird" / "0.jpg") == mixed.path_of(3)


def test_labels_of_another_kind_are_refused_with_the_source(tmp_path: Path) -> None:
    classes = folder(tmp_path / "classes", cat=2)
    np.save(tmp_path / "rows.npy", np.zeros((3, 4), np.float32))
    files = tmp_path / "files"
    files.mkdir()
    (files / "a.png").write_bytes(b"a")
    plain, flat = Arrays(tmp_path / "rows.npy"), FlatFolder(files)
    with pytest.raises(
        ConfigError, match=r"source 1 .*FlatFolder.* has labels of int64\[\], and source 0 has "
    ):
        MixedSource([classes, flat], [1, 1], "stop")

    scalar = Arrays(tmp_path / "rows.npy", labels={"weight": np.zeros(3, np.float32)})
    wide = Arrays(tmp_path / "rows.npy", labels={"weight": np.zeros((3, 2), np.float32)})
    with pytest.raises(
        ConfigError, match=r"has labels 'weight': float32\[2\], and source 0 has labels 'weig"
    ):
        MixedSource([scalar, wide], [1, 1], "stop")
    with pytest.raises(ConfigError, match=r"and source 0 has no labels: give all of them labels"):
        MixedSource([plain, scalar], [1, 1], "stop")
    both: Any = MixedSource([scalar, scalar], [1, 1], "stop")
    assert both.labels["weight"].shape == (6,)


def test_numbers_of_another_shape_are_refused_with_the_source(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16))
    short, long = (Tokens(tmp_path / "tokens.npy", length=length) for length in (8, 16))
    with pytest.raises(
        ConfigError, match=r"source 1 .* has samples of uint16\[17\], and source 0 .* uint16\[9\]"
    ):
        MixedSource([short, long], [1, 1], "stop")
    assert MixedSource([short, short], [1, 1], "stop").numbers == short.numbers


def test_samples_of_shards_lie_where_their_sources_say_in_units_of_their_own(tmp_path: Path) -> None:
    members = [
        {f"{shard}{number}.jpg": bytes([shard, number] * 7) for number in range(4)} for shard in range(3)
    ]
    shards = [write_tar(tmp_path / f"{number}.tar", each) for number, each in enumerate(members)]
    sources = [TarShards([shards[0], shards[1]]), TarShards([shards[2]])]
    mixed = MixedSource(sources, [1, 1], "stop")
    ids = np.array([11, 0, 5, 9])

    found = extents_of(mixed, ids)
    assert found is not None
    extents, failed = found
    assert failed == []
    assert len(set(extents.units.tolist())) == 3
    for index, sample in enumerate(ids.tolist()):
        place = bytearray(mixed.sizes_bytes[sample])
        begin = int(extents.offsets[index])
        mixed.read_ranges(
            int(extents.units[index]), np.array([[begin, begin + len(place)]]), [memoryview(place)]
        )
        assert bytes(place) == mixed.read(sample) == bytes([sample // 4, sample % 4] * 7)
    into = np.empty(14 * 4, np.uint8)
    asked: list[int] = []
    assert read_group(mixed, ids, into, np.arange(0, 57, 14), asked.append) == []
    assert into.tobytes() == b"".join(map(mixed.read, ids.tolist()))
    for source in sources:
        source.close()


def test_parts_of_a_mixture_are_mixtures_of_parts(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", cat=20), folder(tmp_path / "other", cat=10)
    mixed = MixedSource([one, other], [3, 1], "repeat")

    train, val = mixed.split([0.8, 0.2], seed=1)
    assert [len(source) for source in (*train.sources, *val.sources)] == [16, 8, 4, 2]
    named = sorted(part.describe(sample) for part in (train, val) for sample in range(len(part)))
    assert named == sorted(map(mixed.describe, range(30)))
    assert train.weights == mixed.weights

    selected = mixed.select([0, 5, 20, 29])
    assert [len(source) for source in selected.sources] == [2, 2]
    assert selected.describe(3) == mixed.describe(29)
    with pytest.raises(ConfigError, match="ids of a mixture have to ascend"):
        mixed.select([5, 0, 20])
    with pytest.raises(ConfigError, match=r"nothing is selected of .*other"):
        mixed.select([5])
