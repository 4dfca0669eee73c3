"""`penstock check`: bad samples are found, listed and left out."""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.store.tar_files import write
from tests.store.web_server import serving

from penstock import open_source
from penstock.cli.main import INTERRUPTED, main
from penstock.errors import ConfigError, DataError
from penstock.loader import Loader, LoaderConfig, TarSamples
from penstock.loader.checking import check_source
from penstock.loader.skips import SkipList
from penstock.loader.transforms import Resize, ToTensor
from penstock.store import Arrays, ImageFolder, Selection

SAMPLES = 300


@functools.cache
def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (number % 256, 0, 0)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    for number in range(SAMPLES):
        (folder / f"{number:03}.jpg").write_bytes(picture(number))
    (folder / "005.jpg").write_bytes(picture(5)[:-20])
    (folder / "100.jpg").write_bytes(b"")
    (folder / "256.jpg").write_bytes(b"something else")
    return tmp_path / "photos"


def test_the_bad_ones_are_listed_and_the_status_says_so(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "photos"]) == 1

    out = capsys.readouterr().out
    for sample, what in ((5, "cannot be decoded in full"), (100, "is empty"), (256, "not an image")):
        (line,) = (line for line in out.splitlines() if f"/photos/cat/{sample:03}.jpg" in line)
        assert line.split()[0] == str(sample)
        assert what in line
    assert out.splitlines()[-1] == "checked 300 samples, 3 bad"


def test_good_data_have_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12).reshape(6, 2))

    assert main(["check", str(tmp_path / "rows.npy"), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {
        "source": str(tmp_path / "rows.npy"),
        "samples": 6,
        "checked": 6,
        "lacking": {},
        "results": [],
    }


@pytest.mark.usefixtures("obstore_threads")
def test_storage_options_go_to_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12).reshape(6, 2))
    options = ["--storage-options", 'headers={"x-key": "5"}', "--storage-options", "params=sig=a"]
    with serving({"rows.npy?sig=a": (tmp_path / "rows.npy").read_bytes()}) as server:
        address = f"{server.address}/rows.npy"
        assert main(["check", address, *options]) == 0
        assert main(["pack", address, str(tmp_path / "out"), "--to", "records", *options]) == 0
        assert {request.headers["x-key"] for request in server.requests} == {"5"}
    capsys.readouterr()

    assert main(["check", address, "--storage-options", "anon"]) == 1
    assert "--storage-options takes KEY=VALUE" in capsys.readouterr().err


def test_members_and_columns_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    label = b'{"kind": "cat", "age": 1.5}'
    write(
        Path("a.tar"),
        {"a.jpg": b"no", "a.thumb.jpg": picture(1), "a.json": label, "b.thumb.jpg": b"", "b.json": label},
    )
    options = ["--member", "thumb.jpg", "--label", "json:kind,json:age"]

    assert main(["check", "a.tar", *options, "--write-skips", "bad.jsonl"]) == 1

    *_, how = capsys.readouterr().out.splitlines()
    expected = "Loader(open_source('a.tar', options={'member': 'thumb.jpg', 'label': ['json:kind', 'json:age']}), ..."
    assert how == f"written to bad.jsonl: {expected}, skip='bad.jsonl') leaves them out"
    source = open_source("a.tar", options={"member": "thumb.jpg", "label": ["json:kind", "json:age"]})
    with Loader(
        source, batch_size=1, epochs=1, transforms=[Resize((8, 8)), ToTensor()], skip="bad.jsonl", report=None
    ) as loader:
        (batch,) = loader
    assert batch["age"].tolist() == [1.5]
    assert main(["check", "a.tar", "--member", "thumb.jpg", "--label", "", "--no-decode", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checked"] == 2
    assert main(["check", "a.tar", "--member", "thumb.jpg", "--label", "nothing"]) == 1
    assert "a has no label, .nothing" in capsys.readouterr().err


def test_text_is_checked_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    broken = pa.array([b"\xff"]).cast(pa.string(), safe=False)
    for name, more in (("good", []), ("bad", [broken])):
        column = pa.chunked_array([pa.array(["one", "", "drei ü"]), *more])
        pq.write_table(pa.table({"text": column}), f"{name}.parquet")
    Path("lines.jsonl").write_text('{"a": 1}\n[2]\n{"a": 3}\n')

    for options in ([], ["--sample", "text"], ["--no-decode"]):
        assert main(["check", "good.parquet", *options]) == 0
    capsys.readouterr()
    assert main(["check", "bad.parquet", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["sample"] == 3
    assert "row 3 is no text in UTF-8" in row["reason"]
    assert main(["check", "lines.jsonl", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["sample"] == 1
    assert "line 2 is [2]" in row["reason"]


def test_a_member_is_decoded_by_its_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write(tmp_path / "a.tar", {f"{key}.json": b"{" if key == 5 else b"{}" for key in range(9)})

    assert main(["check", str(shard), "--member", "json"]) == 1

    out = capsys.readouterr().out
    assert "5.json, taken as json: JSONDecodeError" in " ".join(out.split())
    assert "checked 9 samples, 1 bad" in out
    assert "of each key, the member that ends in json alone: --fields all" in out


def test_all_members_are_checked_and_the_list_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    members = {
        f"{key}.{ending}": content
        for key in range(9)
        for ending, content in (
            ("jpg", picture(key)),
            ("seg.png", picture(key)),
            ("json", b'{"a": %d}' % key),
        )
    }
    write(Path("a.tar"), members | {"2.seg.png": b"none", "7.json": b"{"})

    assert main(["check", "a.tar"]) == 0
    assert "of each key, the picture alone: --fields all" in capsys.readouterr().out
    assert main(["check", "a.tar", "--fields", "jpg,seg.png"]) == 1
    assert "of each key, the members that end in jpg, seg.png" in capsys.readouterr().out
    assert main(["check", "a.tar", "--fields", "all", "--write-skips", "bad.jsonl", "--json"]) == 1

    assert [each["sample"] for each in json.loads(capsys.readouterr().out)["results"]] == [2, 7]
    assert main(["check", "a.tar", "--fields", "all", "--write-skips", "new.jsonl"]) == 1
    assert "Loader(TarSamples('a.tar'), ..., skip='new.jsonl')" in capsys.readouterr().out
    with Loader(
        TarSamples("a.tar"), batch_size=7, epochs=1, shuffle=False, skip="bad.jsonl", report=None
    ) as loader:
        (batch,) = loader
    assert [each["a"] for each in batch["json"]] == [0, 1, 3, 4, 5, 6, 8]
    assert main(["check", "a.tar", "--fields", "all", "--member", "jpg"]) == 1
    assert "--fields is given with --member" in capsys.readouterr().err


def test_a_key_without_a_field_is_bad_and_keys_that_lines_lack_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    members = {f"{key}.{ending}": b"1" for key in range(9) for ending in ("txt", "json", "cls")}
    del members["4.json"]
    write(Path("a.tar"), members)
    lines = [{"a": 1}, {"a": 2, "b": 3}, {"a": 4, "b": 5, "c": 6}]
    Path("lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))

    for more in ([], ["--no-decode"]):
        assert main(["check", "a.tar", "--fields", "all", "--json", *more]) == 1
        (row,) = json.loads(capsys.readouterr().out)["results"]
        assert (row["sample"], row["reason"].partition(":")[0]) == (4, str(tmp_path / "a.tar"))
        assert row["reason"].endswith(
            ": 4 lacks 'json': add the member, or train with a default by optional="
        )
    for good in (["txt,cls"], ["txt,json,cls", "--optional", "json,cls"], ["all", "--optional", "json"]):
        assert main(["check", "a.tar", "--fields", *good]) == 0
    assert main(["check", "a.tar", "--fields", "all", "--optional", "txt"]) == 1
    capsys.readouterr()
    for wrong, message in (
        (["--fields", "all", "--optional", "text"], "optional has 'text'; fields are txt, json, cls"),
        (["--optional", "json"], "--optional is of the members that --fields names"),
    ):
        assert main(["check", "a.tar", *wrong]) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["check", "lines.jsonl"]) == 0
    assert "defaults by optional=: 'b' (1 line), 'c' (2 lines)" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "lines.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lacking"] == {"b": 1, "c": 2}


def test_lines_that_name_files_are_read_as_either_kind(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lines.jsonl").write_text('{"image": "photos/cat/001.jpg"}\n{"image": "photos/cat/005.jpg"}\n')

    assert main(["check", "lines.jsonl", "--kind", "json-lines"]) == 0
    for more in ([], ["--kind", "manifest"]):
        assert main(["check", "lines.jsonl", "--write-skips", "bad.jsonl", "--overwrite", *more]) == 1
        opened_by = "'lines.jsonl'" if not more else "Manifest('lines.jsonl')"
        assert f"Loader({opened_by}, ..., skip='bad.jsonl')" in capsys.readouterr().out
    assert main(["pack", "lines.jsonl", "out", "--to", "tar", "--kind", "json-lines"]) == 0
    assert main(["check", "lines.jsonl", "--kind", "manifest", "--member", "jpg"]) == 1
    assert "--kind is given with --member: leave one of them out" in capsys.readouterr().err


def test_a_loader_leaves_out_what_is_listed(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "photos", "--write-skips", "bad.jsonl", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)["results"]
    assert [each["sample"] for each in results] == [5, 100, 256]
    arguments: dict[str, Any] = {"batch_size": 50, "transforms": [Resize((4, 4)), ToTensor()], "report": None}

    with Loader("photos", epochs=2, skip=Path("bad.jsonl"), **arguments) as loader:
        batches = [len(images) for _ in range(2) for images, _ in loader]
        state = loader.state_dict()

    assert batches == 2 * [50, 50, 50, 50, 50, 47], "batches are complete"
    with (
        Loader("photos", epochs=2, **arguments) as loader,
        pytest.raises(ConfigError, match="of another run"),
    ):
        loader.load_state_dict(state)
    with Loader("photos", epochs=2, skip="bad.jsonl", **arguments) as loader:
        loader.load_state_dict(state)


def test_a_split_of_the_data_set_takes_the_same_list(damaged: Path) -> None:
    main(["check", "photos", "--write-skips", "bad.jsonl"])
    parts = ImageFolder("photos").split([0.5, 0.5])
    good = set(range(SAMPLES)) - {5, 100, 256}

    left = []
    for part in parts:
        with Loader(part, batch_size=9, epochs=1, transforms=[Resize((4, 4))], dtype="uint8", skip="bad.jsonl",
                    report=None) as loader:  # fmt: skip
            source = loader._parts.setup.source
            assert isinstance(source, Selection)
            left += source.ids.tolist()

    assert sorted(left) == sorted(good)


class Stopped:
    """Raises Ctrl-C once so many samples are checked."""

    def __init__(self, samples: int) -> None:
        self.samples, self.seen = samples, list[int]()

    def __call__(self, checked: int) -> None:
        self.seen.append(checked)
        if checked >= self.samples:
            raise KeyboardInterrupt


def test_what_was_interrupted_goes_on_where_it_was(damaged: Path) -> None:
    source, path = ImageFolder("photos"), Path("bad.jsonl")
    unbroken = check_source(source)
    for samples in (1, 100, 200, 300):  # each further than the one before
        found = SkipList.read(path) if path.exists() else SkipList.of(source)
        done, before = Stopped(samples), found.checked
        with pytest.raises(KeyboardInterrupt):
            check_source(source, found=found, keep=path, done=done)
        assert done.seen[0] == before

    found = check_source(source, found=SkipList.read(path), keep=path)

    assert found == unbroken == SkipList.read(path)
    assert sorted(found.bad) == [5, 100, 256]


def test_ctrl_c_leaves_what_was_found(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(source: Any, *, done: Callable[[int], None], **arguments: Any) -> None:
        check_source(source, done=Stopped(128), **arguments)

    monkeypatch.setattr("penstock.loader.checking.check_source", stopped)

    assert main(["check", "photos", "--write-skips", "bad.jsonl"]) == INTERRUPTED

    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "checked 128 of 300 samples, 2 bad",
        "written to bad.jsonl: the same command continues",
    ]
    with pytest.raises(ConfigError, match="128 of 300 samples were checked: let penstock check finish"):
        Loader("photos", batch_size=9, epochs=1, transforms=[Resize((4, 4)), ToTensor()], skip="bad.jsonl")


def test_a_list_is_kept_while_it_grows(damaged: Path) -> None:
    """A kill costs what was checked since the last time: here nothing, as the clock jumps."""
    seconds = iter(range(0, 10**6, 1000))
    checked: list[int] = []

    def look(samples: int) -> None:
        if Path("bad.jsonl").exists():
            checked.append(SkipList.read("bad.jsonl").checked)

    check_source(ImageFolder("photos"), keep=Path("bad.jsonl"), done=look, clock=lambda: next(seconds))

    assert checked == [64, 128, 192, 256, 300]


def test_samples_that_are_no_pictures_are_read_alone(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "photos", "--no-decode", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["checked"] == SAMPLES
    assert [each["sample"] for each in found["results"]] == [100]
    assert "is empty" in found["results"][0]["reason"]


def test_a_shard_that_is_cut_off_meanwhile_has_bad_samples(tmp_path: Path) -> None:
    """Reads of several samples fail, and those are named whose bytes are not there."""
    np.save(tmp_path / "rows.npy", np.zeros((200, 1000), np.uint8))
    source = Arrays(tmp_path / "rows.npy")
    os.truncate(tmp_path / "rows.npy", 100_000)

    for decodes in (True, False):
        found = check_source(source, decodes=decodes)

        assert (found.checked, len(found.bad)) == (200, 200)
        assert "has shrunk from" in found.bad[0].reason


def test_nothing_but_bad_samples_is_an_end_too(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(70):
        (tmp_path / "cat" / f"{number}.jpg").write_bytes(b"no picture")

    found = check_source(ImageFolder(tmp_path))

    assert (found.checked, len(found.bad)) == (70, 70)


def test_other_lists_are_refused(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "photos", "--write-skips", "bad.jsonl"])
    np.save("rows.npy", np.zeros((300, 2)))
    capsys.readouterr()

    assert main(["check", "rows.npy", "--write-skips", "bad.jsonl"]) == 1
    assert "bad.jsonl is of another data set" in capsys.readouterr().err
    assert main(["check", "photos", "--write-skips", "bad.jsonl"]) == 1
    assert "bad.jsonl is complete, 3 bad samples: --overwrite checks anew" in capsys.readouterr().err
    assert main(["check", "photos", "--write-skips", "nowhere/bad.jsonl"]) == 1
    assert "there is no folder nowhere" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"bad\.jsonl is of another data set"):
        Loader(Arrays("rows.npy"), batch_size=2, epochs=1, skip="bad.jsonl")
    with pytest.raises(ConfigError, match="data set list, which reads by itself"):
        Loader([np.zeros(3)] * 9, batch_size=2, epochs=1, skip="bad.jsonl")
    with pytest.raises(ConfigError, match=r"skip is \[3\]; it is the path"):
        LoaderConfig("photos", batch_size=2, epochs=1, transforms=[ToTensor()], skip=[3])  # type: ignore[arg-type]
    os.unlink("photos/cat/007.jpg")
    with pytest.raises(ConfigError, match="or of this one before it changed"):
        Loader("photos", batch_size=2, epochs=1, transforms=[Resize((4, 4)), ToTensor()], skip="bad.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r"line \d: is no JSON"),
        (lambda text: "{}\n" + text, "line 1: is no list of samples to skip"),
        (lambda text: "", "line 1: is no list of samples to skip"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "has version 2, and this Penstock reads 1",
        ),
        (lambda text: text.replace('"checked": 300', '"checked": 301'), "301 of 300 samples cannot"),
        (lambda text: text + '{"sample": 300}\n', "line 5: sample is 300; the data set has 300"),
        (lambda text: text + '{"sample": "7"}\n', "line 5: sample is '7'"),
    ],
)
def test_a_damaged_list_is_named_with_its_line(
    damaged: Path, change: Callable[[str], str], message: str
) -> None:
    main(["check", "photos", "--write-skips", "bad.jsonl"])
    Path("bad.jsonl").write_text(change(Path("bad.jsonl").read_text()))

    with pytest.raises(DataError, match=rf"bad\.jsonl.*{message}"):
        SkipList.read("bad.jsonl")


def test_a_list_may_be_changed_by_hand(damaged: Path) -> None:
    main(["check", "photos", "--write-skips", "bad.jsonl"])
    with open("bad.jsonl", "a") as file:
        file.write('{"sample": 7}\n')

    with Loader("photos", batch_size=9, epochs=1, transforms=[Resize((4, 4)), ToTensor()], skip="bad.jsonl",
                report=None) as loader:  # fmt: skip
        assert loader.plan.samples == SAMPLES - 4
