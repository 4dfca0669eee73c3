"""Which samples tar shards have, where they lie, and every way a shard can be wrong."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each
from tests.patience import patient
from tests.store.reads import contents
from tests.store.tar_files import npy, write

from penstock import Loader, open_source
from penstock.cache_folders import Folders
from penstock.errors import ConfigError, DataError
from penstock.loader import TarSamples
from penstock.loader.transforms import DecodeRaw
from penstock.plan import Sequential
from penstock.store import TarShards, catalogs, listing, open_files, packed, packed_listing, read_group
from penstock.store.calls import Calls
from penstock.store.tar import read_members


def names(source: TarShards) -> list[str]:
    return [source.describe(sample).rpartition(": ")[2] for sample in range(len(source))]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def calls(lines: list[str]) -> Calls:
    return Calls(report=lines.append)


# -- Which samples there are ---------------------------------------------------------------------------


def test_members_with_one_key_are_a_sample_and_shards_follow_each_other(tmp_path: Path) -> None:
    write(
        tmp_path / "a-1.tar", {"x.jpg": b"1", "x.cls": b"2", "x.json": b"{}", "y.cls": b"0\n", "y.PNG": b"22"}
    )
    write(tmp_path / "a-0.tar", {"deep/x.jpeg": b"333", "deep/x.cls": b"1", "x.cls": b"1", "x.webp": b"4444"})

    source = TarShards(tmp_path / "a-{0..1}.tar")

    assert contents(source) == [b"333", b"4444", b"1", b"22"]
    assert names(source) == ["deep/x.jpeg", "x.webp", "x.jpg", "y.PNG"]
    assert source.labels.tolist() == [1, 1, 2, 0]  # type: ignore[union-attr]
    assert source.classes == ("0", "1", "2")
    assert source.sizes_bytes.tolist() == [3, 4, 1, 2]
    assert repr(source) == f"TarShards('{tmp_path}/a-{{0..1}}.tar'): 4 samples, 2 shards, 3 classes"


def test_a_path_a_pattern_a_folder_and_a_list_are_opened_by_what_they_are(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "shards" / f"{number}.tar", {f"{number}.jpg": b"%d" % number})
    folder = tmp_path / "shards"
    (folder / "index.json").write_text("{}")

    for path, expected in (
        (folder, b"012"),
        (f"{folder}/*.tar", b"012"),
        (f"{folder}/{{2..1}}.tar", b"21"),
        ([folder / "1.tar", f"{folder}/0.tar"], b"10"),
        (folder / "2.tar", b"2"),
    ):
        source = open_source(path)  # type: ignore[arg-type]
        assert isinstance(source, TarShards)
        assert b"".join(contents(source)) == expected


def test_keys_end_at_the_first_dot_and_hidden_members_are_left_out(
    tmp_path: Path, calls: Calls, lines: list[str]
) -> None:
    shard = write(
        tmp_path / "a.tar",
        {
            "a.b/c.seg.png": b"s",
            "a.b/c.jpg": b"c",
            "._c.jpg": b"",
            "README": b"",
            "only.txt": b"",
            "./d.jpg": b"d",
        },
    )

    assert names(TarShards(shard, calls=calls)) == ["a.b/c.jpg", "./d.jpg"]
    assert lines == [f"{shard}: 1 key without a sample left out, the first {shard}: only"]
    assert names(TarShards(shard, member="seg.png", calls=calls)) == ["a.b/c.seg.png"]
    assert names(TarShards(shard, member=".TXT", calls=calls)) == ["only.txt"]


def test_the_first_ending_that_a_key_has_is_taken(tmp_path: Path) -> None:
    shard = write(
        tmp_path / "a.tar", {"a.jpg": b"aj", "a.png": b"ap", "b.png": b"bp", "c.png": b"cp", "c.jpg": b"cj"}
    )

    assert contents(TarShards(shard, member="jpg;png")) == [b"aj", b"bp", b"cj"]
    assert contents(TarShards(shard, member="png;jpg")) == [b"ap", b"bp", b"cp"]
    with pytest.raises(DataError, match=r'a has two pictures, \.jpg and \.png: say which .*member="jpg"'):
        TarShards(shard)


def test_labels_are_integers_names_or_fields_of_json(tmp_path: Path) -> None:
    def row(label: object, place: str) -> bytes:
        return json.dumps({"class": label, "where": {"place": place}, "boxes": [{"name": place}]}).encode()

    shard = write(
        tmp_path / "a.tar",
        {
            "a.jpg": b"1",
            "a.json": row(3, "sea"),
            "a.txt": "Öl\n".encode(),
            "b.json": row(1, "air"),
            "b.jpg": b"2",
            "b.txt": b"air",
        },
    )

    def labels(label: str | None) -> tuple[Any, ...]:
        source = TarShards(shard, label=label)
        return source.labels.tolist(), source.classes  # type: ignore[union-attr]

    assert labels("json:class") == ([3, 1], ("0", "1", "2", "3"))
    assert labels("json:where.place") == ([1, 0], ("air", "sea"))
    assert labels("json:boxes.0.name") == ([1, 0], ("air", "sea"))
    assert labels("txt") == ([1, 0], ("air", "Öl"))
    assert labels("cls") == labels(None) == ([-1, -1], ())


# -- All kinds of headers ------------------------------------------------------------------------------

member_names = st.text(st.sampled_from("ab/é. "), min_size=1, max_size=140).filter(
    lambda name: not name.startswith("/") and not name.endswith("/") and "//" not in name
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(
    st.lists(st.tuples(member_names, st.binary(max_size=1500)), max_size=12),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.booleans(),
)
def test_members_lie_where_pythons_tarfile_finds_them(
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[str, bytes]],
    form: int,
    has_float_times: bool,
) -> None:
    shard = tmp_path_factory.mktemp("tars") / "a.tar"
    with tarfile.open(shard, "w", format=form) as tar:
        for number, (name, content) in enumerate(members):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1e9 + (0.5 if has_float_times else 0)
            member.uid = 2**40 if number % 3 == 2 and form != tarfile.USTAR_FORMAT else 0
            try:
                tar.addfile(member, io.BytesIO(content))
            except ValueError:  # ustar has no space for the name
                continue
            link = tarfile.TarInfo(f"link{number}")
            link.type, link.linkname = tarfile.LNKTYPE, "a"
            tar.addfile(link)
    with tarfile.open(shard) as tar:
        expected = [(os.fsencode(each.name), each.offset_data, each.size) for each in tar if each.isreg()]
    with shard.open("rb") as file:
        found = read_members(str(shard), partial(os.pread, file.fileno()), shard.stat().st_size)

    assert list(zip(found.names, found.offsets, found.sizes, strict=True)) == expected
    assert found.has_end
    assert found.links == len(expected)


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["v7", "ustar", "oldgnu", "gnu", "posix"])
def test_what_the_program_tar_writes_is_read(tmp_path: Path, form: str) -> None:
    names = [
        "a.jpg",
        "é.jpg" if form != "v7" else "e.jpg",
        *(["d" * 90 + "/" + "f" * 70 + ".jpg"] * (form != "v7")),
    ]
    for name in names:
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    subprocess.run(
        ["tar", f"--format={form}", "-C", str(tmp_path / "in"), "-cf", str(tmp_path / "a.tar"), *names],
        check=True,
    )

    assert contents(TarShards(tmp_path / "a.tar")) == [name.encode() for name in names]


def test_a_size_that_a_pax_header_says_is_taken(tmp_path: Path) -> None:
    member = tarfile.TarInfo("a.jpg")
    member.size, member.pax_headers = 7, {"size": "7", "comment": "not path=x"}
    data = member.tobuf(tarfile.PAX_FORMAT)
    (tmp_path / "a.tar").write_bytes(data + b"content".ljust(512, b"\0") + bytes(1024))

    assert contents(TarShards(tmp_path / "a.tar")) == [b"content"]


def test_names_are_never_taken_for_paths(tmp_path: Path) -> None:
    shard = write(tmp_path / "in" / "a.tar", {"../x.jpg": b"outside", "/etc/passwd.jpg": b"root"})
    (tmp_path / "x.jpg").write_bytes(b"another")

    assert contents(TarShards(shard)) == [b"outside", b"root"]


# -- What a shard may have become, or always was -------------------------------------------------------


def refused(shard: Path, message: str, **options: Any) -> None:
    with pytest.raises(DataError) as caught:
        TarShards(shard, **options)
    assert str(caught.value).startswith(str(shard))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("compress", "command"),
    [(gzip.compress, "gunzip -k"), (bz2.compress, "bunzip2 -k"), (lzma.compress, "unxz -k")],
)
def test_a_compressed_tar_is_refused_with_what_unpacks_it(
    tmp_path: Path, compress: Callable[[bytes], bytes], command: str
) -> None:
    plain = write(tmp_path / "plain" / "a.tar", {"a.jpg": b"1"})
    shard = tmp_path / "b.tar.gz"
    shard.write_bytes(compress(plain.read_bytes()))

    refused(shard, f"by `{command} b.tar.gz`")
    with pytest.raises(DataError, match="is compressed"):
        open_source(tmp_path / "b.tar.gz")


@for_each(
    ("content", "message"),
    [
        (b"", "is empty (0 bytes)"),
        (b"garbage" * 300, "is no tar file"),
        (b"x", "is no tar file"),
        (bytes(10240), "has no members"),
    ],
)
def test_what_is_no_tar_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(content)

    refused(tmp_path / "a.tar", message)


def test_a_tar_that_is_cut_off_anywhere_is_named_or_its_missing_end_is_reported(
    tmp_path: Path, calls: Calls, lines: list[str]
) -> None:
    shard = write(tmp_path / "a.tar", {"a.jpg": b"1" * 600, "b.jpg": b"2" * 100})
    data = shard.read_bytes()
    for size in (*range(550, 1112, 37), 1111, *range(1537, 2147, 37), 2147):
        shard.write_bytes(data[:size])
        refused(shard, "is cut off", calls=calls)
    shard.write_bytes(data[:2560])

    assert contents(TarShards(shard, calls=calls)) == [b"1" * 600, b"2" * 100]
    assert lines == [
        f"{shard}: 1 shard without the mark at the end of a tar, which may be cut off; the first {shard}"
    ]


def test_a_damaged_header_is_named_by_its_place(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tar", {"a.jpg": b"1" * 600, "b.jpg": b"2"})
    data = bytearray(shard.read_bytes())
    for place in (1536, 1536 + 124, 1536 + 156):
        damaged = data.copy()
        damaged[place] ^= 0x55
        shard.write_bytes(damaged)
        refused(shard, "is damaged: at byte 1,536")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_no_damage_is_more_than_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shard = tmp_path_factory.mktemp("tars") / "a.tar"
    write(
        shard,
        {"a" * 120 + ".jpg": b"1", "é.jpg": b"2" * 600, "c.cls": b"1"},
        data.draw(st.sampled_from([1, 2])),
    )
    content = bytearray(shard.read_bytes()[:6000])
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, 4000))] = data.draw(
            st.sampled_from([0, 1, 0x2D, 0x37, 0x78, 0x80, 0xFF])
        )
    shard.write_bytes(content)

    with shard.open("rb") as file:
        try:
            found = read_members(str(shard), partial(os.pread, file.fileno()), len(content))
        except DataError:
            return
    assert all(
        0 <= begin <= begin + size <= len(content)
        for begin, size in zip(found.offsets, found.sizes, strict=True)
    )


def test_a_member_that_is_there_twice_is_named(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")])
    refused(shard, "a.jpg is there twice, at bytes 512 and 2,560")
    shard = write(tmp_path / "b.tar", [("a.jpg", b"1"), ("a.cls", b"2"), ("a.cls", b"3")])
    refused(shard, "a.cls is there twice")


def test_a_tar_of_tars_or_without_pictures_is_answered_with_what_is_there(tmp_path: Path) -> None:
    refused(
        write(tmp_path / "a.tar", {"x.tar": b"1", "y.tar": b"2"}),
        "2 end in '.tar': these are archives themselves",
    )
    refused(
        write(tmp_path / "b.tar", {"x.npy": b"1", "y.npy": b"2", "y.cls": b""}),
        "2 end in '.npy': give member=\"npy\"",
    )


def test_links_are_left_out_and_reported(tmp_path: Path, calls: Calls, lines: list[str]) -> None:
    shard = write(tmp_path / "a.tar", {"a.jpg": b"1"})
    with tarfile.open(shard, "a") as tar:
        for kind, name in (
            (tarfile.LNKTYPE, "b.jpg"),
            (tarfile.SYMTYPE, "c.jpg"),
            (tarfile.DIRTYPE, "d.jpg"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)

    assert contents(TarShards(shard, calls=calls)) == [b"1"]
    assert lines == [
        f"{shard}: 2 links left out, as tar may write for a file that it has twice; the first in {shard}"
    ]


@for_each(
    ("members", "options", "message"),
    [
        ({"a.jpg": b"1", "a.cls": b"1", "b.jpg": b"2"}, {}, "b has no label, .cls"),
        ({"a.jpg": b"1"}, {"label": "txt"}, "a has no label, .txt"),
        ({"a.jpg": b"1", "a.cls": b""}, {}, "a.jpg has an empty label"),
        ({"a.jpg": b"1", "a.cls": b"-2"}, {}, "a.jpg has label -2; a number must be in"),
        ({"a.jpg": b"1", "a.cls": b"\xff"}, {}, "a.cls is no text in UTF-8"),
        ({"a.jpg": b"1", "a.cls": bytes(2 << 20)}, {}, "a.cls has 2,097,152 bytes"),
        (
            {"a.jpg": b"1", "a.json": b"{"},
            {"label": "json:x"},
            "is no JSON with a field 'x' (JSONDecodeError)",
        ),
        (
            {"a.jpg": b"1", "a.json": b'{"y": 1}'},
            {"label": "json:x"},
            "is no JSON with a field 'x' (KeyError)",
        ),
        (
            {"a.jpg": b"1", "a.json": b'{"x": null}'},
            {"label": "json:x"},
            "a.json has x = None; a label is a number, a name or, in JSON, a list",
        ),
        (
            {"a.jpg": b"1", "a.json": b'{"x": [1, 2]}', "b.jpg": b"1", "b.json": b'{"x": [3]}'},
            {"label": ["json:x"]},
            "b.jpg: x is [3], of another length than the first, [1, 2]",
        ),
        ({"a.jpg": b"1", "a.json": b"[" * 100_000}, {"label": "json:x"}, "(RecursionError)"),
        (
            {"a.jpg": b"1", "a.npy": b"12"},
            {"label": "npy"},
            "a.npy is no array of numbers as numpy.save writes it",
        ),
        ({"a.jpg": b"1", "a.npy": npy(np.array("x"))}, {"label": "npy"}, "a.npy is no array of numbers"),
        (
            {"a.jpg": b"1", "a.npy": npy(np.zeros(2)), "b.jpg": b"1", "b.npy": npy(np.zeros(3))},
            {"label": "npy"},
            "b has a label of float64[3], and the first key float64[2]: write arrays of one type and shape",
        ),
        (
            {"a.jpg": b"1", "a.npy": npy(np.array(3)), "b.jpg": b"1", "b.npy": npy(np.arange(3))},
            {"label": "npy"},
            "b has a label of int64[3], and the first key int64[]: write arrays of one type and shape",
        ),
    ],
)
def test_labels_that_cannot_be_taken_are_named(
    tmp_path: Path, members: dict[str, bytes], options: dict[str, Any], message: str
) -> None:
    refused(write(tmp_path / "a.tar", members), message, **options)


def test_numbers_and_lists_of_json_are_labels_of_any_type(store: Store) -> None:
    """Also after one of the shards has changed, and another type is what holds the labels of all."""

    def write_labels(number: int, weight: bytes) -> None:
        label = b'{"weight": %s, "box": [%d, 2], "kind": "%s"}' % (weight, number, b"ab"[number:][:1])
        write(store.data / f"{number}.tar", {f"{number}.jpg": b"1", f"{number}.json": label})

    def found() -> tuple[Any, ...]:
        source = TarShards(store.data / "{0..1}.tar", label=["json:weight", "json:box", "json:kind"])
        labels: Any = source.labels
        assert source.label_classes["kind"] == ("a", "b")
        assert labels["box"].tolist() == [[0, 2], [1, 2]]
        one: Any = TarShards(store.data / "{0..1}.tar", label="json:weight").labels
        return labels["weight"].dtype.name, labels["weight"].tolist(), one.dtype.name, one.tolist()

    write_labels(0, b"3")
    write_labels(1, b"4")
    assert found() == ("int64", [3, 4], "int64", [3, 4])
    write_labels(1, b"0.5")
    assert found() == ("float32", [3, 0.5], "float32", [3, 0.5])
    write_labels(0, b"16777217")  # no float32
    assert found() == ("float64", [16777217, 0.5], "float64", [16777217, 0.5])
    write_labels(0, b"1")
    assert found() == ("float32", [1, 0.5], "float32", [1, 0.5])


def test_arrays_are_labels_of_their_type_and_single_integers_are_classes(store: Store) -> None:
    def write_labels(number: int, label: np.ndarray) -> None:
        content = {f"{key}.jpg": b"1" for key in "ab"} | {f"{key}.npy": npy(label) for key in "ab"}
        write(store.data / f"{number}.tar", content)

    for number in range(2):
        write_labels(number, np.array([number, 0.5], np.float16))
    for _ in range(2):  # indexed now, then from the catalog
        source: Any = TarShards(store.data / "{0..1}.tar", label="npy")
        assert (source.labels.dtype, source.labels.tolist()[1:3]) == (np.float16, [[0, 0.5], [1, 0.5]])
        write_labels(0, np.array([0, 0.5], np.float16))
    write_labels(1, np.zeros(3, np.float16))
    with pytest.raises(DataError, match=r"1\.tar has labels of float16\[3\], unlike .*0\.tar, float16\[2\]"):
        TarShards(store.data / "{0..1}.tar", label="npy")
    for number in range(2):
        write_labels(number, np.array(number + 1))
    source = TarShards(store.data / "{0..1}.tar", label="npy")
    assert (source.labels.tolist(), source.classes) == ([1, 1, 2, 2], ("0", "1", "2"))
    for arrays, integers in ((0, 1), (1, 0)):
        write_labels(arrays, np.arange(3))
        write_labels(integers, np.array(3))
        message = rf"{arrays}\.tar: a\.jpg has an array of numbers as its label, and .*{integers}\.tar: a\.jpg has none"
        with pytest.raises(DataError, match=message):
            TarShards(store.data / "{0..1}.tar", label="npy")


def test_shards_of_different_content_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"a.jpg": b"1", "a.cls": b"1"})
    write(tmp_path / "b.tar", {"b.jpg": b"1"})

    with pytest.raises(
        DataError, match=rf"{tmp_path}/b\.tar has no labels \(\.cls\), unlike {tmp_path}/a\.tar"
    ):
        TarShards(tmp_path / "*.tar")
    assert TarShards(tmp_path / "*.tar", label=None).labels.tolist() == [-1, -1]  # type: ignore[union-attr]


@pytest.mark.parametrize("files", [("0.tar", "0.tar"), ("0.tar", "1.tar")])
def test_integers_beside_names_are_an_error(tmp_path: Path, files: tuple[str, str]) -> None:
    members = [{"a.jpg": b"1", "a.cls": b"2"}, {"b.jpg": b"2", "b.cls": b"cat"}]
    found: dict[str, dict[str, bytes]] = {}
    for file, each in zip(files, members, strict=True):
        found.setdefault(file, {}).update(each)
    for file, content in found.items():
        write(tmp_path / file, content)

    with pytest.raises(DataError, match=rf"{files[0]}: a.jpg has 2, and .*{files[1]}: b.jpg has 'cat'"):
        TarShards(tmp_path / "*.tar")


def test_names_of_digits_that_are_known_take_other_names_beside_them(store: Store) -> None:
    """A catalog does not say whether digits were names; a field of JSON does."""
    (store.data / "2.tar").unlink()
    for number, label in enumerate(("0", "1")):
        write(
            store.data / f"{number}.tar",
            {f"{number}.jpg": b"1", f"{number}.json": b'{"x": "%s"}' % label.encode()},
        )
    assert TarShards(store.data / "*.tar", label="json:x").classes == ("0", "1")
    write(store.data / "2.tar", {"2.jpg": b"1", "2.json": b'{"x": "cat"}'})

    assert TarShards(store.data / "*.tar", label="json:x").classes == ("0", "1", "cat")


@for_each("member", ["", ".", "jpg;", "; ;"])
def test_another_member_is_refused(member: str) -> None:
    with pytest.raises(ConfigError, match=r"member is .*; it is the ending of a member"):
        TarShards("a.tar", member=member)


def test_a_label_is_given_with_a_dot_or_without(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [("0.jpg", b"x"), ("0.cls", b"3")])

    assert TarShards(tmp_path / "a.tar", label=".cls").labels.tolist() == [3]  # type: ignore[union-attr]


@for_each("label", ["", ".", "json:", "cls:x", ":x", 3, [], ["cls"], ["json:x", 3]])
def test_another_label_is_refused(label: Any) -> None:
    with pytest.raises(ConfigError, match=r"label is .*; it is the ending of a member"):
        TarShards("a.tar", label=label)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", {"a.jpg": b"1"})

    with pytest.raises(DataError, match=rf"{tmp_path}/1\.tar cannot be opened: No such file"):
        open_source(tmp_path / "{0..2}.tar")
    with pytest.raises(DataError, match="is a folder without tar shards"):
        TarShards(tmp_path.parent)


def test_a_list_of_pictures_is_answered_with_how_to_give_them(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"0\.jpg is no tar or TFRecord: give a folder, or a list file with one path a line"
    ):
        open_source([tmp_path / "0.jpg", tmp_path / "1.jpg"])


def test_a_label_of_minus_one_stands_for_none(tmp_path: Path) -> None:
    """As splits for a test have it; also where one shard has no other, and was indexed before."""
    write(tmp_path / "0.tar", {"a.jpg": b"1", "a.cls": b"-1"})
    assert TarShards(tmp_path / "*.tar").classes == ()
    write(tmp_path / "1.tar", {"b.jpg": b"2", "b.cls": b"3", "c.jpg": b"3", "c.cls": b"-1"})

    source = TarShards(tmp_path / "*.tar")

    assert isinstance(source.labels, np.ndarray)
    assert source.labels.tolist() == [-1, 3, -1]
    assert source.classes == ("0", "1", "2", "3")


def test_an_empty_member_is_an_error_of_its_sample_alone(tmp_path: Path) -> None:
    source = TarShards(write(tmp_path / "a.tar", {"a.jpg": b"1", "b.jpg": b"", "c.jpg": b"3"}))
    into = np.zeros(2, np.uint8)

    ((index, error),) = read_group(source, np.arange(3), into, np.array([0, 1, 1, 2]))

    assert (index, type(error), into.tobytes()) == (1, DataError, b"13")
    assert str(error).startswith(f"{tmp_path}/a.tar: b.jpg is empty (0 bytes)")


# -- Indexed once --------------------------------------------------------------------------------------


class Store:
    """Shards, whose catalogs are in another folder, and which of them were indexed since it was last cleared."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, kept = folder / "data", folder / "kept"
        kept.mkdir()
        self.indexed: list[str] = []
        opened = packed_listing.opened

        def counted(path: str) -> Any:
            self.indexed.append(os.path.basename(path))
            return opened(path)

        monkeypatch.setattr(packed_listing, "opened", counted)
        monkeypatch.setattr(catalogs, "_folders", lambda: Folders((kept,), kept, ""))
        monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
        monkeypatch.setattr(listing, "_RACY_NS", -(10**18))
        for number in range(3):
            self.write(number, f"{number}")

    def write(self, number: int, content: str) -> Path:
        new = write(
            self.data / "new", {f"{content}.jpg": content.encode(), f"{content}.cls": b"c" + content.encode()}
        )
        return new.rename(self.data / f"{number}.tar")

    def open(self, opener: Callable[..., Any] = open_source, **options: Any) -> tuple[list[bytes], list[str]]:
        self.indexed.clear()
        source = opener(self.data / "*.tar", **options)
        return contents(source), [source.classes[label] for label in source.labels]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(tmp_path, monkeypatch)


@pytest.mark.parametrize("opener", [open_source, TarShards])
def test_shards_that_did_not_change_are_not_indexed_again(store: Store, opener: Callable[..., Any]) -> None:
    first = store.open(opener)
    assert sorted(store.indexed) == ["0.tar", "1.tar", "2.tar"]
    assert first == ([b"0", b"1", b"2"], ["c0", "c1", "c2"])

    for refresh in ("auto", "never"):
        assert store.open(opener, refresh=refresh) == first
        assert store.indexed == []
    assert store.open(opener, refresh="full") == first
    assert len(store.indexed) == 3


def test_shards_that_changed_a_moment_ago_are_indexed_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file system ticks some hundred times a second: a second change may leave the time as it is."""
    monkeypatch.setattr(listing, "_RACY_NS", 10**18)
    for _ in range(2):
        store.open()
        assert sorted(store.indexed) == ["0.tar", "1.tar", "2.tar"]


def test_only_what_changed_is_indexed_and_new_shards_of_a_pattern_are_found(store: Store) -> None:
    store.open()
    store.write(1, "11")
    store.write(3, "3")

    assert store.open() == ([b"0", b"11", b"2", b"3"], ["c0", "c11", "c2", "c3"])
    assert sorted(store.indexed) == ["1.tar", "3.tar"]
    (store.data / "0.tar").unlink()
    assert store.open() == ([b"11", b"2", b"3"], ["c11", "c2", "c3"])
    assert store.indexed == []


def test_an_unchanged_shard_whose_labels_are_minus_one_stays_among_others(store: Store) -> None:
    for number, label in enumerate((b"-1", b"3", b"-1")):
        write(store.data / f"{number}.tar", {f"{number}.jpg": b"1", f"{number}.cls": label})
    TarShards(store.data / "*.tar")
    store.indexed.clear()
    write(store.data / "1.tar", {"1.jpg": b"1", "1.cls": b"2"}).touch()

    source = TarShards(store.data / "*.tar")

    assert store.indexed == ["1.tar"]
    assert isinstance(source.labels, np.ndarray)
    assert source.labels.tolist() == [-1, 2, -1]


def test_other_members_and_labels_have_catalogs_of_their_own(store: Store) -> None:
    first = store.open()

    assert store.open(TarShards, member="cls", label="jpg") == ([b"c0", b"c1", b"c2"], ["0", "1", "2"])
    assert len(store.indexed) == 3
    assert store.open() == first
    assert store.indexed == []


def test_fields_that_nobody_named_are_those_of_the_first_shard_as_it_is_now(store: Store) -> None:
    texts = {"jpg": "text", "cls": "text"}
    assert TarSamples(store.data / "*.tar", decode=texts)[2] == {"jpg": "2", "cls": "c2"}
    store.indexed.clear()

    # Nothing changed; then another shard did; then the first one, which has other members now.
    TarSamples(store.data / "*.tar")
    assert store.indexed == []
    store.write(1, "11")
    assert TarSamples(store.data / "*.tar", decode=texts)[1] == {"jpg": "11", "cls": "c11"}
    assert store.indexed == ["1.tar"]
    write(store.data / "new", {"0.txt": b"t", "0.cls": b"5"}).rename(store.data / "0.tar")

    samples = TarSamples(store.data / "*.tar", decode={"cls": "text"})

    assert [samples[number] for number in range(3)] == [
        {"txt": "t", "cls": "5"},
        {"cls": "c11"},
        {"cls": "c2"},
    ]


def test_the_catalog_of_a_pattern_is_found_by_it(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.cli.main import main

    store.open()

    main(["cache", "list", f"{store.data}/*.tar"])

    assert "TarShards" in capsys.readouterr().out


# -- While it is read ----------------------------------------------------------------------------------


def test_a_shard_that_is_written_again_is_not_read_by_its_old_index(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tar", {"a.jpg": b"1", "b.jpg": b"2"})
    source = TarShards(shard)
    assert source.read(0) == b"1"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.seek(512)
        file.write(b"x")
    os.utime(shard, ns=(1, 1))
    assert shard.stat().st_size == size

    for _ in range(2):
        with pytest.raises(
            DataError, match="was written again since its samples were listed: open the data set again"
        ):
            source.read(0)


def test_a_shard_that_is_replaced_is_read_as_it_was_while_it_is_open(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tar", {"a.jpg": b"1"})
    source = TarShards(shard)
    assert source.read(0) == b"1"

    write(tmp_path / "new", {"a.jpg": b"2" * 20_000}).rename(shard)

    assert source.read(0) == b"1"
    with pytest.raises(DataError, match="has grown from"):
        TarShards(shard, catalog=source.catalog).read(0)


def test_a_class_of_ones_own_takes_its_catalog_and_that_of_the_class_it_is_made_from(tmp_path: Path) -> None:
    class Mine(TarShards):
        pass

    shard = write(tmp_path / "a.tar", {"a.jpg": b"1"})

    for opener in (Mine, TarShards):
        assert Mine(shard, catalog=opener(shard).catalog).read(0) == b"1"


def test_few_descriptors_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "_MOST_OPEN", 5)
    for number in range(40):
        write(tmp_path / f"{number:02}.tar", {"a.jpg": b"%02d" % number})
    before = len(os.listdir("/proc/self/fd"))
    source = TarShards(tmp_path)
    into = np.zeros(80, np.uint8)

    assert read_group(source, np.arange(40), into, np.arange(0, 81, 2)) == []

    assert into.tobytes() == b"".join(b"%02d" % number for number in range(40))
    assert len(os.listdir("/proc/self/fd")) - before <= 16
    assert [source.read(number) for number in range(40)] == [b"%02d" % number for number in range(40)]
    assert len(os.listdir("/proc/self/fd")) - before <= 5
    del source
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("form", ["mapped", "read", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_loader_reads_shards_in_merged_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "plain":
        monkeypatch.setattr(type(packed.READ_PIECES), "ask", lambda part: None)
    if form == "read":
        monkeypatch.setattr(open_files, "map_file", lambda descriptor, nbytes: None)
    for shard in range(4):
        members = [(f"{n:03}.jpg", bytes([shard, n] * 8)) for n in range(50)]
        write(tmp_path / f"{shard}.tar", members + [(f"{n:03}.cls", b"%d" % shard) for n in range(50)])

    asked: list[int] = []
    read_ranges = TarShards.read_ranges

    def noted(source: TarShards, unit: int, ranges: Any, into: Any) -> None:
        asked.append(len(ranges))
        read_ranges(source, unit, ranges, into)

    monkeypatch.setattr(TarShards, "read_ranges", noted)
    for order in (True, Sequential(200)):
        with Loader(
            f"{tmp_path}/{{0..3}}.tar",
            batch_size=20,
            epochs=1,
            shuffle=order,
            transforms=[DecodeRaw("uint8")],
            dtype="uint8",
            memory="10 MB",
            report=None,
        ) as loader:
            read = [
                (row.copy(), int(label))
                for rows, labels in loader
                for row, label in zip(rows, labels, strict=True)
            ]
        assert sorted((int(row[0]), int(row[1])) for row, _ in read) == [
            (s, n) for s in range(4) for n in range(50)
        ]
        assert all(row[0] == label for row, label in read)
    assert 0 < len(asked) < 200


def test_a_list_of_paths_is_a_source_of_a_loader(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.tar", {"a.jpg": b"%d" % n}) for n in range(3)]
    lines: list[str] = []

    with Loader(
        paths,
        batch_size=3,
        epochs=1,
        shuffle=False,
        transforms=[DecodeRaw("uint8")],
        dtype="uint8",
        report=lines.append,
    ) as loader:
        ((rows, labels),) = loader

    assert rows.tobytes() == b"012"
    assert labels.tolist() == [-1] * 3
    assert f"TarShards '{paths[0]} and 2 more'" in lines[0]


def test_a_large_shard_that_answers_is_not_taken_for_a_store_that_does_not(tmp_path: Path) -> None:
    """A timeout is of calls without an answer: indexing one file may last longer, and Ctrl-C ends it in between."""
    shard = write(tmp_path / "a.tar", {f"{number}.jpg": b"" for number in range(5000)})
    asked: list[str] = []

    class Noting(Calls):
        def at(self, place: str) -> None:
            asked.append(place)
            super().at(place)

    TarShards(shard, calls=Noting(), refresh="full")

    assert asked.count(str(shard)) >= 5


def test_a_forked_process_reads_although_a_thread_was_opening_files(tmp_path: Path) -> None:
    source = TarShards(write(tmp_path / "a.tar", {"a.jpg": b"1"}))
    assert source.read(0) == b"1"

    with source._open._lock:
        child = multiprocessing.get_context("fork").Process(target=source.read, args=(0,))
        child.start()
    child.join(patient(30))
    if is_hanging := child.is_alive():
        child.kill()
        child.join()

    assert not is_hanging
    assert child.exitcode == 0


def test_a_closed_loader_has_no_file_open(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tar", {"a.jpg": b"1"})
    source = TarShards(shard)
    with Loader(
        source, batch_size=1, epochs=1, transforms=[DecodeRaw("uint8")], dtype="uint8", report=None
    ) as loader:
        assert len(list(loader)) == 1

    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    assert str(shard) not in links
    assert source.read(0) == b"1"
    source.close()


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def _with_headers(headers: dict[str, str], content: bytes) -> bytes:
    """Return a tar with one member that has this PAX header."""
    member = tarfile.TarInfo("a.jpg")
    member.size, member.pax_headers = len(content), headers
    return member.tobuf(tarfile.PAX_FORMAT) + content.ljust(512, b"\0") + bytes(1024)


@for_each(
    ("headers", "message"),
    [
        ({"path": "a\0b.jpg"}, "is no tar file"),
        ({"size": "-1"}, "is no tar file"),
        ({"size": "99999999999999999999"}, "is cut off"),
        ({"GNU.sparse.map": "0,1", "GNU.sparse.size": "9"}, "a.jpg is stored as a sparse file"),
    ],
)
def test_what_a_pax_header_says_is_not_trusted(tmp_path: Path, headers: dict[str, str], message: str) -> None:
    (tmp_path / "a.tar").write_bytes(_with_headers(headers, b"content"))

    refused(tmp_path / "a.tar", message)
