"""Samples of sources as values: text and numbers in place of bytes, and all members of a tar shard's keys."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.for_each import for_each
from tests.store.litdata_files import write_litdata
from tests.store.mds_files import write_mds
from tests.store.tar_files import npy, write

from penstock.errors import ConfigError, DataError
from penstock.loader import Loader, SourceSamples, TarSamples, mapped
from penstock.store import (
    Arrays,
    ArrowFiles,
    ArrowTable,
    JsonLines,
    LitDataChunks,
    MosaicShards,
    ParquetFiles,
)
from penstock.store.calls import Calls


def image(ending: str, pixels: np.ndarray) -> bytes:
    return bytes(cv2.imencode(ending, pixels)[1])


def members(number: int) -> dict[str, bytes]:
    """Return all that the key of a number has."""
    pixels = np.full((4, 6, 3), (0, 0, 10 * number), np.uint8)  # OpenCV's blue, green and red
    return {
        f"x/{number}.png": image(".png", pixels),
        f"x/{number}.seg.png": image(".png", np.full((4, 6), number, np.uint8)),
        f"x/{number}.txt": f"picture {number} ü".encode(),
        f"x/{number}.cls": b"%d\n" % number,
        f"x/{number}.json": json.dumps({"a": number, "in": {"b": [number, 0.5]}, f"k{number}": 1}).encode(),
        f"x/{number}.npy": npy(np.arange(number + 1, dtype=np.int16)),
        f"x/{number}.pickle": b"P",
    }


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for shard in range(2):
        content = {name: data for key in range(3) for name, data in members(3 * shard + key).items()}
        write(tmp_path / f"{shard}.tar", content)
    return f"{tmp_path}/{{0..1}}.tar"


def batches(source: Any, **options: Any) -> list[Any]:
    with Loader(source, batch_size=4, epochs=1, shuffle=False, report=None, **options) as loader:
        return list(loader)


# -- Members of tar shards ---------------------------------------------------------------------------------------------


def test_all_members_of_a_key_are_fields_of_a_sample_decoded_by_their_endings(shards: str) -> None:
    sample = TarSamples(shards)[4]

    assert list(sample) == ["png", "seg.png", "txt", "cls", "json", "npy", "pickle"]
    assert sample["png"].shape == sample["seg.png"].shape == (4, 6, 3)
    assert sample["png"][0, 0].tolist() == [40, 0, 0]
    assert (sample["txt"], sample["cls"], sample["pickle"]) == ("picture 4 ü", 4, b"P")
    assert sample["json"] == {"a": 4, "in": {"b": [4, 0.5]}, "k4": 1}
    assert (sample["npy"].dtype, sample["npy"].tolist()) == (np.int16, [0, 1, 2, 3, 4])


def test_a_batch_has_arrays_text_and_objects_of_json_as_they_are(shards: str) -> None:
    fields = {
        "image": "jpg;png",
        "mask": ".SEG.png",
        "caption": "txt",
        "label": "cls",
        "meta": "json",
        "ids": "npy",
    }
    samples = TarSamples(shards, fields, decode={"mask": "mask", "label": float})

    first, second = batches(samples, padded={"ids": -1})

    assert first["image"].shape == (4, 4, 6, 3)
    assert first["mask"].shape == (4, 4, 6)
    assert second["mask"][:, 0, 0].tolist() == second["label"].tolist() == [4, 5]
    assert second["label"].dtype == np.float64
    assert second["caption"] == ["picture 4 ü", "picture 5 ü"]
    assert second["meta"][1]["k5"] == 1
    assert first["ids"].tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]]


def test_fields_of_json_are_fields_of_samples(shards: str) -> None:
    samples = TarSamples(shards, {"a": "json:a", "half": "json:in.b.1", "rest": "json:in", "caption": "txt"})

    assert samples[2] == {"a": 2, "half": 0.5, "rest": {"b": [2, 0.5]}, "caption": "picture 2 ü"}
    assert TarSamples(shards, ["txt", "cls"])[2] == {"txt": "picture 2 ü", "cls": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"in": {"z": 1}}', "it has no field 'in.b', the path of 'b'; correct it"),
        (b"{", "JSONDecodeError: Expecting property name"),
    ],
)
def test_a_field_that_json_lacks_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    shard = write(tmp_path / "a.tar", {"x.json": b'{"in": {"b": 1}}', "y.json": content})
    samples = TarSamples(shard, {"b": "json:in.b"})

    assert samples[0] == {"b": 1}
    with pytest.raises(DataError) as caught:
        samples[1]
    assert str(caught.value).startswith(f"{shard}: y.json, taken as json: {message}")
    assert str(caught.value).endswith("; correct it, or leave 'b' out of fields=")


def test_the_first_of_its_endings_that_a_key_has_is_a_field(tmp_path: Path) -> None:
    shard = write(
        tmp_path / "a.tar", {"a.png": b"ap", "a.jpg": b"aj", "b.png": b"bp", "c.jpg": b"cj", "c.png": b""}
    )
    samples = TarSamples(shard, {"image": "jpg;png"}, decode={"image": "bytes"})

    assert [samples[number]["image"] for number in range(3)] == [b"aj", b"bp", b"cj"]


def test_a_field_that_a_key_lacks_has_its_default_or_is_named(tmp_path: Path) -> None:
    lines: list[str] = []
    shard = write(
        tmp_path / "a.tar", {"a.cls": b"1", "a.txt": b"t", "b.cls": b"2", "c.other": b"", "d.cls": b"3"}
    )
    samples = TarSamples(shard, ["cls", "txt"], calls=Calls(report=lines.append))

    (batch,) = batches(samples, optional={"txt": "none"})

    assert batch["txt"] == ["t", "none", "none"]
    assert lines == [f"{shard}: 1 key without a sample left out, the first {shard}: c"]
    name = re.escape(f"{shard}: b")
    for each in (samples, samples.map(dict)):
        with pytest.raises(
            DataError,
            match=rf"{name} lacks 'txt', which the first sample has: give 'txt' a default by optional=",
        ):
            batches(each)


def test_a_field_that_no_key_has_is_refused_with_the_endings_that_there_are(shards: str) -> None:
    for _ in range(2):  # also where a catalog may have been kept
        with pytest.raises(ConfigError) as caught:
            TarSamples(shards, {"label": "cls", "capt": "captoin;caption"})

        assert str(caught.value).startswith("fields has 'capt', and no key of ")
        assert "ends in captoin or caption; the first key has png, seg.png, txt, cls, json," in str(
            caught.value
        )


def test_samples_read_together_are_those_read_alone_by_threads_processes_and_a_function_with_draws(
    shards: str,
) -> None:
    samples = TarSamples(shards, ["cls", "npy"])
    drawn: Any = samples.map(with_draws)

    threads, processes = batches(drawn), batches(drawn, workers=1)

    assert [each["cls"] for each in samples.__getitems__([5, 0, 5])] == [5, 0, 5]
    assert threads[1]["length"].tolist() == [5, 6]
    assert [batch["draw"].tolist() for batch in threads] == [batch["draw"].tolist() for batch in processes]
    rngs = [np.random.default_rng(number) for number in (1, 2, 1, 2)]
    assert drawn.__getitems__([4, 2], 0, rngs[:2]) == [
        drawn.__getitem__(4, 0, rngs[2]),
        drawn.__getitem__(2, 0, rngs[3]),
    ]
    assert [each["length"].tolist() for each in batches(samples.map(without_draws))] == [[1, 2, 3, 4], [5, 6]]
    assert len(drawn) == len(samples.map(without_draws)) == 6
    with pytest.raises(ConfigError, match="7 is no function of a sample"):
        samples.map(7)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="there is no sample 6: TarMembers"):
        samples[6]


class Alone:
    """A data set that makes samples one by one, and draws."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"draw": rng.integers(1000)}


@for_each("is_by_list", [True, False])
def test_a_function_of_samples_that_draw_gets_them_as_they_are_without_it(
    shards: str, is_by_list: bool
) -> None:
    drawing: Any = TarSamples(shards, ["npy"]).map(with_draws) if is_by_list else Alone()

    def draws(source: Any, **options: Any) -> list[list[int]]:
        return [batch["draw"].tolist() for batch in batches(source, **options)]

    expected = draws(drawing)
    assert draws(mapped(drawing, dict)) == draws(mapped(drawing, dict), workers=1) == expected
    twice = mapped(drawing, and_more)
    assert draws(twice) == expected
    assert len({number for batch in batches(twice) for number in batch["more"].tolist()}) == 6
    with pytest.raises(ConfigError, match=r" asks for rng, .* call data\.__getitem__\(number, rng="):
        mapped(drawing, dict)[3]


def and_more(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return sample | {"more": rng.random()}


def with_draws(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return without_draws(sample) | {"draw": rng.integers(1000)}


def without_draws(sample: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(sample["npy"])}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a.png": b"no picture"}, "a.png, taken as rgb: not an image"),
        ({"a.png": b""}, "a.png, taken as rgb: the file is empty"),
        ({"a.txt": b"\xff"}, "a.txt, taken as text: UnicodeDecodeError"),
        (
            {"a.cls": b"cat"},
            "a.cls, taken as int: ValueError: invalid literal for int() with base 10: 'cat'; correct it, "
            "or give another decode= for 'cls'",
        ),
        ({"a.json": b"{"}, "a.json, taken as json: JSONDecodeError"),
        ({"a.json": b"[" * 100_000}, "a.json, taken as json: RecursionError"),
        ({"a.npy": npy(np.array([{}], object))}, "a.npy, taken as npy: ValueError: an array of object"),
        (
            {"a.npy": npy(np.arange(9))[:-1]},
            "a.npy, taken as npy: ValueError: 71 bytes of numbers, and its header says 72",
        ),
        (
            {"a.npy": npy(np.arange(9)).replace(b"(9,)", b"(999999999999999,)")},
            "a.npy, taken as npy: ValueError: 86 bytes of numbers, and its header says 7,999,999,999,999,992",
        ),
        ({"a.npy": b"PK"}, "a.npy, taken as npy: ValueError"),
    ],
)
def test_a_member_that_is_not_what_its_ending_says_is_named(
    tmp_path: Path, content: dict[str, bytes], message: str
) -> None:
    shard = write(tmp_path / "a.tar", {"a.other": b"-", **content})
    samples = TarSamples(
        shard, [ending for ending in ("png", "txt", "cls", "json", "npy") if f"a.{ending}" in content]
    )

    with pytest.raises(DataError) as caught:
        samples[0]

    assert f"{shard}: {message}" in str(caught.value)


def test_a_bad_member_leaves_out_its_own_sample_alone(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tar", {f"{key}.cls": b"x" if key == 5 else b"%d" % key for key in range(8)})

    found = batches(TarSamples(shard, ["cls"]), on_error="skip")

    assert [number for batch in found for number in batch["cls"].tolist()] == [0, 1, 2, 3, 4, 6, 7]
    os.truncate(shard, 2560)
    with pytest.raises(DataError, match=f"{shard} is cut off"):
        TarSamples(shard, ["cls"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [("a.txt", b""), ("b.txt", b""), ("a.cls", b"")],
            "members of a lie apart, with those of other keys between",
        ),
        ([("a.txt", b"1"), ("a.txt", b"2")], "a.txt is there twice, at bytes 512 and 1,536"),
        ([("a.jpg", b"1")], "has 1 member but none that ends in txt, cls"),
    ],
)
def test_keys_that_cannot_be_taken_are_named(
    tmp_path: Path, content: list[tuple[str, bytes]], message: str
) -> None:
    shard = write(tmp_path / "a.tar", content)

    with pytest.raises(DataError) as caught:
        TarSamples(shard, ["txt", "cls"])

    assert str(caught.value).startswith(str(shard))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "decode", "message"),
    [
        ({}, {}, "fields is {}; it has the endings of members by names of yours"),
        ("jpg", {}, "fields is 'jpg'"),
        ({"a": ""}, {}, "fields is {'a': ''}"),
        ({"a": 1}, {}, "fields is {'a': 1}"),
        ({"a": "cls", "b": "txt;cls"}, {}, "fields has .cls for 'a' and 'b': a member is one field"),
        ({"a": "json:a", "b": "json"}, {}, "fields has .json for 'b' and 'a': a member is one field"),
        ({"a": "cls"}, {"b": "text"}, "decode has 'b'; fields that are members are a"),
        ({"a": "json:a"}, {"a": "text"}, "decode has 'a'; fields that are members are "),
        ({"a": "cls"}, {"a": "pickle"}, "decode has 'pickle' for 'a'; it is one of rgb, mask, text"),
    ],
)
def test_other_fields_and_words_are_refused(shards: str, fields: Any, decode: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TarSamples(shards, fields, decode=decode)

    assert message in str(caught.value)


# -- Text of tables ----------------------------------------------------------------------------------------------------

TABLE = pa.table({"text": ["one", "", "drei ü", "four", "five"], "label": [1, 0, 1, 1, 0]})


def write_arrow(path: Path, table: pa.Table) -> Path:
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    return path


def text_sources(folder: Path) -> dict[str, Any]:
    pq.write_table(TABLE, folder / "a.parquet")
    return {
        "parquet": folder / "a.parquet",
        "arrow": write_arrow(folder / "a.arrow", TABLE),
        "columns": ParquetFiles(folder / "a.parquet", sample="text"),
        "table": ArrowTable(TABLE),
    }


@pytest.mark.parametrize("kind", ["parquet", "arrow", "columns", "table"])
def test_a_column_of_text_comes_as_str_beside_its_labels(tmp_path: Path, kind: str) -> None:
    (texts, labels), (more, _) = batches(text_sources(tmp_path)[kind])

    assert texts == ["one", "", "drei ü", "four"]
    assert labels.tolist() == [1, 0, 1, 1]
    assert more == ["five"]


def test_what_is_selected_of_text_is_text_and_labels_with_names_are_a_dict(tmp_path: Path) -> None:
    table = TABLE.append_column("score", pa.array([0.5, 1, 2, 3, 4]))
    part = ArrowTable(table, sample="text", label=["label", "score"]).select([2, 0])

    ((texts, labels),) = batches(part)

    assert texts == ["drei ü", "one"]
    assert (labels["label"].tolist(), labels["score"].tolist()) == ([1, 1], [2.0, 0.5])
    assert batches(ArrowFiles(write_arrow(tmp_path / "b.arrow", TABLE), label=None).select([2, 0])) == [
        ["drei ü", "one"]
    ]


def test_text_of_shards_that_streaming_and_litdata_wrote_is_str(tmp_path: Path) -> None:
    shards = [[(b"one", 1), (b"zwei", 0)]]
    write_mds(tmp_path / "mds", shards, column_encodings=["str", "int", "float32"])
    write_litdata(tmp_path / "litdata", shards)
    index = tmp_path / "litdata" / "index.json"
    index.write_text(index.read_text().replace('"bytes"', '"str"'))

    for kind, folder in ((MosaicShards, "mds"), (LitDataChunks, "litdata")):
        ((texts, labels),) = batches(kind(tmp_path / folder, sample="image"))
        assert (texts, labels.tolist()) == (["one", "zwei"], [1, 0])


def test_bytes_stay_bytes_and_numbers_are_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.float32).reshape(3, 2))

    assert SourceSamples(ArrowTable(pa.table({"blob": [b"\xff", b"b"]})))[0] == b"\xff"
    assert SourceSamples(Arrays(tmp_path / "a.npy"))[2].tolist() == [4.0, 5.0]
    with pytest.raises(ConfigError, match=r"transforms is empty, and the samples of .* are bytes"):
        batches(ArrowTable(pa.table({"blob": [b"\xff", b"b"]})))
    with pytest.raises(ConfigError, match=r"source is 'a'; it is a source of penstock\.store"):
        SourceSamples("a")  # type: ignore[arg-type]


def test_text_is_collated_as_that_of_any_data_set(tmp_path: Path) -> None:
    samples = SourceSamples(text_sources(tmp_path)["columns"]).map(lambda sample: len(sample[0]))

    assert [batch.tolist() for batch in batches(samples)] == [[3, 0, 6, 4], [4]]
    assert batches(SourceSamples(ArrowTable(TABLE)), collate_fn=len) == [4, 1]
    for kind in ("parquet", "table"):
        assert batches(text_sources(tmp_path)[kind], collate_fn=len, cache="rows") == [4, 1]


def test_lines_name_the_files_that_samples_are_made_of_and_errors_the_function(tmp_path: Path) -> None:
    path, shard = text_sources(tmp_path)["parquet"], write(tmp_path / "a.tar", {"a.cls": b"1"})
    rows, members = SourceSamples(ParquetFiles(path, sample="text")), TarSamples(shard)
    of_rows, of_members = f"of ParquetFiles {str(path)!r}", f"of TarSamples {str(shard)!r}"

    for source, named in (
        (path, of_rows),
        (rows, of_rows),
        (rows.map(with_length), of_rows),
        (members, of_members),
        (members.map(dict), of_members),
    ):
        lines: list[str] = []
        with Loader(source, batch_size=2, epochs=1, report=lines.append) as loader:
            list(loader)
        assert any(named in line for line in lines)
        assert not any("Mapped" in line or "SourceSamples" in line for line in lines)
    with pytest.raises(
        ConfigError, match=r"SourceSamples\.map\(with_length\) with workers=1 reads by itself"
    ):
        batches(rows.map(with_length), readers=2, workers=1)


class Answer:
    """Answers for sample 5 with an error, with nothing, or with other keys."""

    def __init__(self, how: str) -> None:
        self.how = how

    def of(self, sample: int) -> dict[str, int] | None:
        if sample != 5:
            return {"a": sample}
        if self.how == "error":
            raise ValueError("no fives")
        return None if self.how == "nothing" else {"b": sample}

    def __call__(self, sample: int, rng: np.random.Generator) -> dict[str, int] | None:
        return self.of(sample)


def answer(how: str, sample: int) -> dict[str, int] | None:
    return Answer(how).of(sample)


@for_each("how", ["error", "nothing", "other keys"])
@for_each(
    ("make", "code"),
    [
        (lambda how: partial(answer, how), answer),
        (lambda how: Answer(how).of, Answer.of),
        (lambda how: named_nowhere(how), None),
    ],
)
def test_errors_of_a_function_of_samples_name_it_and_where_it_is(make: Any, code: Any, how: str) -> None:
    function = make(how)
    code = code or function
    named = f"{__name__}.{code.__qualname__} ({__file__}:{code.__code__.co_firstlineno})"

    for first in (0, 5):  # of which the structure is learnt
        with pytest.raises(Exception) as caught:
            batches(mapped([*range(first, 12)], function))
        told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert named in told


def named_nowhere(how: str) -> Any:
    return lambda sample: answer(how, sample)


def test_a_function_that_makes_other_samples_each_time_is_warned_about(tmp_path: Path) -> None:
    def halved(sample: np.ndarray) -> np.ndarray:
        sample //= 2
        return sample

    def noisy(sample: np.ndarray) -> np.ndarray:
        return sample + own.random(4)

    own, rows = np.random.default_rng(0), np.arange(48).reshape(12, 4)
    for function, before in ((noisy, rows), (halved, rows.copy())):
        causes = (
            r"changes in place .*\(have it change a copy\), or it or the data set draws .*a parameter rng"
        )
        name = rf"<locals>\.{function.__name__} \(.* made other arrays when it was called twice for "
        with pytest.warns(RuntimeWarning, match=name + f".*{causes}"):
            batches(mapped(list(before), function))
    np.save(tmp_path / "rows.npy", rows)
    for fresh in (
        mapped(list(rows), lambda row: row // 2),
        SourceSamples(Arrays(tmp_path / "rows.npy")).map(halved),
    ):
        batches(fresh)


def test_a_builtin_is_named_without_a_place() -> None:
    with pytest.raises(TypeError) as caught:
        batches(mapped([{"a": 1}, {"a": 2}, 3], dict))
    assert any("in builtins.dict, which map calls with" in note for note in caught.value.__notes__)


def with_length(sample: Any, rng: np.random.Generator) -> int:
    return len(sample)


@pytest.mark.parametrize(
    "options", [{"collate_fn": len}, {"cache": "rows"}, {"optional": {"": 0}}, {"padded": {"": 0}}]
)
def test_what_is_for_samples_is_refused_once_a_path_turns_out_not_to_be_text(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))

    with pytest.raises(ConfigError, match="data set"):
        batches(tmp_path / "a.npy", **options)


def test_shards_without_transforms_are_refused_naming_what_has_their_members_as_fields(
    tmp_path: Path,
) -> None:
    shard = write(tmp_path / "a.tar", {"a.png": image(".png", np.zeros((4, 6, 3), np.uint8))})
    with pytest.raises(
        ConfigError, match=r"or give penstock\.loader\.TarSamples, whose samples have members"
    ):
        batches(shard)


def test_what_is_for_bytes_alone_is_refused_of_text(tmp_path: Path) -> None:
    path = text_sources(tmp_path)["parquet"]

    for options, message in (
        ({"keep": "crops"}, "data set"),
        ({"readers": 2}, "row 1 is empty, of which nothing can be kept"),
        (
            {"share": "jobs", "cache": "rows"},
            'the data set of ParquetFiles with cache="rows", whose own code reads',
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            batches(path, **options)
    broken = ArrowTable(pa.table({"text": pa.array([b"\xff"]).cast(pa.string(), safe=False)}))
    with pytest.raises(DataError, match="row 0 is no text in UTF-8"):
        batches(broken)


@pytest.mark.parametrize("kind", ["text", "tar", "mapped"])
def test_a_state_is_of_the_files_that_samples_are_read_from(tmp_path: Path, kind: str) -> None:
    def opened(folder: str, name: str) -> Loader:
        (tmp_path / folder).mkdir(exist_ok=True)
        if kind == "text":
            source: Any = tmp_path / folder / f"{name}.parquet"
            pq.write_table(TABLE, source)
        else:
            shard = write(tmp_path / folder / f"{name}.tar", {"a.cls": b"1", "b.cls": b"2"})
            source = TarSamples(shard) if kind == "tar" else TarSamples(shard).map(without_label)
        return Loader(source, batch_size=2, epochs=1, seed=0, report=None)

    with opened("here", "a") as loader, opened("there", "a") as copy, opened("here", "b") as other:
        state = loader.state_dict()
        copy.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"state is of another run: data\.names_sizes_labels was"):
            other.load_state_dict(state)


def without_label(sample: dict[str, Any]) -> int:
    return len(sample)


def backwards(content: bytes) -> bytes:
    return content[::-1]


@for_each(
    ("fields", "decode", "is_same"),
    [
        ({"label": "cls", "text": "txt"}, {}, True),
        ({"text": "txt", "label": "cls"}, {"label": "int"}, True),  # as usual
        ({"text": "txt"}, {}, False),
        ({"caption": "txt", "label": "cls"}, {}, False),
        ({"text": "txt", "label": "cls"}, {"text": "bytes"}, False),
        ({"text": "txt", "label": "cls"}, {"text": backwards}, False),
        ({"text": "txt", "label": "cls", "age": "json:a"}, {}, False),
    ],
)
def test_a_state_is_of_the_fields_of_samples_and_how_they_are_decoded(
    tmp_path: Path, fields: dict[str, str], decode: dict[str, Any], is_same: bool
) -> None:
    shard = write(tmp_path / "a.tar", {"a.cls": b"1", "a.json": b'{"a": 1}', "a.txt": b"t"})

    def opened(samples: Any) -> Loader:
        return Loader(samples, batch_size=1, epochs=1, seed=0, report=None)

    with (
        opened(TarSamples(shard, {"text": "txt", "label": "cls"})) as loader,
        opened(TarSamples(shard, fields, decode=decode)) as other,
    ):
        state = json.loads(json.dumps(loader.state_dict()))
        if is_same:
            other.load_state_dict(state)
        else:
            with pytest.raises(ConfigError, match=r"data\.fields was \['label: cls as int', 'text: txt as"):
                other.load_state_dict(state)


# -- JSON lines --------------------------------------------------------------------------------------------------------


def test_lines_of_json_are_samples_whatever_their_objects_and_arrays_are(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {
            "text": f"{number} ü",
            "score": number / 2,
            "talk": [{"role": "user"}] * number,
            "in": {f"k{number}": number},
        }
        for number in range(6)
    ]
    lines = [json.dumps(each, ensure_ascii=False) for each in records]
    (tmp_path / "0.jsonl").write_bytes("\ufeff{}\r\n\n{}\n\n".format(*lines[:2]).encode())
    (tmp_path / "1.jsonl").write_text("\n".join(lines[2:]))  # the last line has no end

    source = JsonLines(tmp_path)
    first, second = batches(source)

    names = [source.describe(sample).rpartition("/")[2] for sample in (0, 1, 2, 5)]
    assert names == ["0.jsonl: line 1", "0.jsonl: line 3", "1.jsonl: line 1", "1.jsonl: line 4"]
    assert first["text"] == ["0 ü", "1 ü", "2 ü", "3 ü"]
    assert second["score"].tolist() == [2.0, 2.5]
    assert first["talk"] == [each["talk"] for each in records[:4]]
    assert first["in"] == [{"k0": 0}, {"k1": 1}, {"k2": 2}, {"k3": 3}]
    assert SourceSamples(source)[5] == records[5]
    (tmp_path / "ids.ndjson").write_text('{"ids": [1, 2]}\n{"ids": []}\n{"ids": [3]}\n')
    (ragged,) = batches(SourceSamples(JsonLines(tmp_path / "ids.ndjson").select([0, 2, 1])), ragged=["ids"])
    assert [each.tolist() for each in ragged["ids"]] == [[1, 2], [3], []]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no lines"),
        (b"\n \n", "has no lines"),
        (b"\x1f\x8b\x08{}", "is compressed, so that no line can be read without all before it"),
        (b'{"a": 1}\n[2]\n', "line 2 is [2]; a line is an object"),
        (b'{"a": 1}\n{"a"\n', "line 2 is no JSON"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is no text in UTF-8"),
        (b'{"a": 1}\n{"b": 1}\n', "line 2 lacks 'a' and has 'b', unlike the first sample"),
        (
            b'{"a": [1]}\n{"a": [1, 2]}\n',
            "line 2['a'] is a list of 2 parts, in the first sample it was a sequence of 1 parts: padded={'a': 0} pads",
        ),
        (b'{"a": 1}\n' + b"[" * 100_000, "line 2 is no JSON"),
    ],
)
def test_lines_that_are_no_objects_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)

    with pytest.raises(DataError) as caught:
        batches(JsonLines(tmp_path / "a.jsonl"))

    assert message in str(caught.value)
