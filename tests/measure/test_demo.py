"""The demonstration's parts; the whole of it is `make demo`."""

import io
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console
from tests.spans import spans_of

import penstock.torch as pt
from penstock.cli.main import main
from penstock.errors import ConfigError, DataError
from penstock.measure import demo
from penstock.measure.demo import (
    TRANSFORMS,
    DemoRun,
    StoredImages,
    _table,
    run_demo,
    split_folder,
    write_digits,
)
from penstock.store import ImageFolder, open_source
from penstock.trace import NO_PLACE, SOURCE, Kind, Trace


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("demo"))


def test_the_digits_are_all_there_under_their_labels(digits: Path) -> None:
    from sklearn.datasets import load_digits

    source, scans = ImageFolder(digits), load_digits()

    assert len(source) == 1797
    assert source.classes == tuple("0123456789")
    for sample in range(0, 1797, 100):
        number = int(Path(source.path_of(sample)).stem)
        picture = cv2.imread(source.path_of(sample), cv2.IMREAD_GRAYSCALE)
        assert picture is not None
        assert source.labels[sample] == scans.target[number]
        # Averaged over its 4 x 4 pixels, an enlarged pixel has about its grey level again.
        levels = picture.reshape(8, 4, 8, 4).mean(axis=(1, 3)) * 16 / 255
        assert np.abs(levels - scans.images[number]).mean() < 1


def test_digits_that_were_written_before_are_kept(digits: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*.png")}

    write_digits(digits.parent)

    assert {path: path.stat().st_mtime_ns for path in digits.rglob("*.png")} == before


def test_the_split_is_a_partition_with_a_fifth_of_every_class_to_test_on(
    digits: Path, tmp_path: Path
) -> None:
    train_list, test_list, classes = split_folder(digits, tmp_path)
    train, test, whole = open_source(train_list), open_source(test_list), ImageFolder(digits)

    paths = [[source.describe(k) for k in range(len(source))] for source in (train, test, whole)]
    assert sorted(paths[0] + paths[1]) == sorted(paths[2])
    assert classes == 10
    of_whole, of_test = (np.bincount(np.asarray(source.labels)) for source in (whole, test))
    assert of_test.tolist() == (of_whole // 5).tolist()


def test_a_folder_that_cannot_teach_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    cv2.imwrite(str(tmp_path / "only" / "one.png"), np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="one label folder"):
        split_folder(tmp_path, tmp_path)

    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="other"):
        split_folder(tmp_path, tmp_path)

    cv2.imwrite(str(tmp_path / "other" / "two.png"), np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="fewer than 5 images"):
        split_folder(tmp_path, tmp_path)


def test_both_loaders_see_the_same_pixels(digits: Path) -> None:
    source = ImageFolder(digits)
    dataset = StoredImages(source)

    with pt.Loader(
        source, batch_size=50, epochs=1, shuffle=False, transforms=TRANSFORMS, memory="32 MiB", report=None
    ) as loader:
        images, labels = next(iter(loader))
        for row in range(50):
            image, label = dataset[row]
            assert (images[row] == image).all()
            assert int(labels[row]) == label


def test_the_table_fits_a_terminal_and_its_counts_add_up() -> None:
    """The store gave two samples, one of them ahead into memory; the later epochs took both from there."""
    taken = [
        (0.0, 0.1, 0, 100, 0, 0, Kind.READ, SOURCE, 1, 0),
        (0.0, 0.1, 1, 100, 0, -1, Kind.READ, SOURCE, 1, 0),
        (0.1, 0.2, 1, 100, 0, 0, Kind.HIT, 1, 1, 0),
        *((0.5 + e, 0.6 + e, k, 100, e, 0, Kind.HIT, 1, 1, 0) for e in (1, 2) for k in (0, 1)),
        *((0.6 + e, 0.7 + e, k, 0, e, 0, Kind.DECODE, NO_PLACE, 1, 0) for e in range(3) for k in (0, 1)),
    ]
    waits = [(float(e), 12.34 + e, -1, 0, e, 0, Kind.WAIT, NO_PLACE, 0, 0) for e in range(3)]
    watched = Trace(spans_of(waits), {}, True)
    traced = Trace(spans_of(taken + waits), {}, True)
    text = io.StringIO()

    table = _table([DemoRun("PyTorch, 16 workers", watched, 0.975), DemoRun("Penstock", traced, 0.975)])
    Console(file=text, width=80).print(table)

    assert "…" not in text.getvalue()
    ours = text.getvalue().split("Penstock")[1].split()
    assert ours == ["37.02", "s", "12.34", "s", "12.34", "2", "4", "97.5%"]
    assert "epoch 0" in text.getvalue()


def test_its_json_has_the_stall_of_each_run_by_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = [(0.0, 2.0, -1, 0, epoch, 0, Kind.WAIT, NO_PLACE, 0, 0) for epoch in range(2)]
    runs = [DemoRun("Penstock", Trace(spans_of(waits), {}, True), 0.975)]
    monkeypatch.setattr(demo, "run_demo", lambda *given: runs)

    assert main(["demo", "--json"]) == 0

    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result == {
        "loader": "Penstock",
        "stall_seconds": 4.0,
        "stall_seconds_by_epoch": [2.0, 2.0],
        "accuracy": 0.975,
    }


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_the_whole_demonstration(tmp_path: Path) -> None:
    text = io.StringIO()

    theirs, predicted, ours = run_demo(None, tmp_path, 12, Console(file=text, width=100))

    assert ours.accuracy == theirs.accuracy
    assert ours.accuracy is not None
    assert ours.accuracy > 0.97
    assert ours.stall_seconds < theirs.stall_seconds
    assert predicted.epochs[0].reads_by_place == ours.epochs[0].reads_by_place
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "the same 276 batches in the same order" in text.getvalue()
