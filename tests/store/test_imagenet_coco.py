"""ImageNet's own files of labels and names, and COCO's."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each
from tests.store.web_server import serving

from penstock.errors import ConfigError, DataError
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.store import CocoImages, ImageFolder, ImageNetVal, read_class_names

#: ILSVRC2012_ID, WNID, words and num_children: the numbers do not follow the wnids.
SYNSETS = [
    (1, "n03", "crane, bird", 0),
    (2, "n01", "tench", 0),
    (3, "n02", "goldfish", 0),
    (4, "n00", "animal", 3),
]
NAMES = "n01 tench\nn02 goldfish, Carassius\nn03 crane\n"


pytestmark = pytest.mark.usefixtures("obstore_threads")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_val(samples: int = 3) -> None:
    Path("val").mkdir()
    for number in range(1, samples + 1):
        Path(f"val/ILSVRC2012_val_{number:08}.JPEG").write_bytes(b"%d" % number)


def write_devkit(truth: str = "1\n3\n2\n") -> Path:
    from scipy.io import savemat

    Path("devkit/data").mkdir(parents=True)
    kind = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("num_children", "f8")]
    savemat("devkit/data/meta.mat", {"synsets": np.array(SYNSETS, kind)})
    path = Path("devkit/data/ILSVRC2012_validation_ground_truth.txt")
    path.write_text(truth)
    return path


class TestImageNet:
    def test_kaggles_solution_gives_the_labels_of_the_training(self) -> None:
        write_val()
        for wnid in ("n01", "n02", "n03"):
            Path("train", wnid).mkdir(parents=True)
            Path("train", wnid, "1.JPEG").write_bytes(b"1")
        Path("LOC_synset_mapping.txt").write_text(NAMES)
        Path("LOC_val_solution.csv").write_text(
            "ImageId,PredictionString\nILSVRC2012_val_00000002,n03 1 2 3 4 n03 5 6 7 8 \n"
            "ILSVRC2012_val_00000001,n01 1 2 3 4 \n"
        )

        train = ImageFolder("train", names="LOC_synset_mapping.txt")
        val = ImageNetVal("val", "LOC_val_solution.csv", names="LOC_synset_mapping.txt")

        assert [val.read(0), val.read(1)] == [b"2", b"1"]
        assert val.labels.tolist() == [2, 0]
        assert train.classes == val.classes == ("tench", "goldfish, Carassius", "crane")
        assert val.wnids == ("n01", "n02", "n03")
        assert ImageNetVal("val", "LOC_val_solution.csv").classes == ("n01", "n03"), "those that there are"

    def test_the_development_kit_numbers_classes_in_its_own_way(self) -> None:
        write_val()

        val = ImageNetVal("val", write_devkit(), names="devkit/data/meta.mat")

        assert val.labels.tolist() == [2, 1, 0]
        assert val.classes == ("tench", "goldfish", "crane, bird")
        assert ImageNetVal("val", "devkit/data/ILSVRC2012_validation_ground_truth.txt").classes == (
            "n01",
            "n02",
            "n03",
        )

    @pytest.mark.parametrize(
        ("truth", "message"),
        [
            ("1\n4\n", "line 2: '4' is no number of a class"),
            ("1\nx\n", "line 2: 'x' is no number"),
            ("1\n2,3\n", "line 2: '2' is no number"),
            ("", "names no image"),
            ("1\n1\n1\n1\n", r"line 4: .*val_00000004\.JPEG cannot be found"),
            ("ImageId,PredictionString\n../ILSVRC2012_val_00000001,n01\n", "line 2: '../ILSV.* may lead out"),
            ("ImageId,PredictionString\nILSVRC2012_val_00000001,\n", "line 2: .* is no image and its classes"),
            ("ImageId,PredictionString\nILSVRC2012_val_00000001,n09 1\n", "line 2: n09 is a class that names="),
            ("ImageId,PredictionString\nILSVRC2012_val_00000001,n01\nILSVRC2012_val_00000001,n01\n", "line 3: .*there"),
        ],
    )  # fmt: skip
    def test_bad_truths_are_refused_with_their_line(self, truth: str, message: str) -> None:
        write_val()

        with pytest.raises(DataError, match=message):
            ImageNetVal("val", write_devkit(truth), names="devkit/data/meta.mat")

    def test_images_truth_and_names_may_be_at_addresses(self) -> None:
        write_val()
        write_devkit()
        Path("names.txt").write_text(NAMES)
        with serving() as server:
            server.objects = {str(file): file.read_bytes() for file in Path().rglob("*.*") if file.is_file()}
            truth = f"{server.address}/devkit/data/ILSVRC2012_validation_ground_truth.txt"

            with closing(
                ImageNetVal(f"{server.address}/val", truth, names=f"{server.address}/names.txt")
            ) as source:
                assert [source.read(sample) for sample in range(3)] == [b"1", b"2", b"3"]
                assert source.labels.tolist() == [2, 1, 0]
                assert source.classes == ("tench", "goldfish, Carassius", "crane")
            del server.objects["devkit/data/meta.mat"]
            with pytest.raises(DataError, match=r"meta\.mat has vanished or was never there"):
                ImageNetVal(f"{server.address}/val", truth)

    def test_a_kit_without_its_table_is_named(self) -> None:
        write_val()
        truth = write_devkit()
        for content, message in (
            (b"garbage", "meta.mat has no synsets"),
            (None, "meta.mat cannot be read: No such"),
        ):
            if content is None:
                Path("devkit/data/meta.mat").unlink()
            else:
                Path("devkit/data/meta.mat").write_bytes(content)
            with pytest.raises(DataError, match=message):
                ImageNetVal("val", truth)


class TestClassNames:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("names.txt", "n01 tench\n\nn02\tgoldfish, x\n"),
            ("names.json", '{"n01": "tench", "n02": "goldfish, x"}'),
            ("imagenet_class_index.json", '{"0": ["n01", "tench"], "1": ["n02", "goldfish, x"]}'),
        ],
    )
    def test_the_usual_files_are_read(self, name: str, text: str) -> None:
        Path(name).write_text(text)

        assert read_class_names(name) == {"n01": "tench", "n02": "goldfish, x"}

    @for_each(
        ("name", "text", "message"),
        [
            ("a.txt", "n01 a\nn02\n", "line 2: n02 has no name"),
            ("a.txt", "n01 a\nn01 b\n", "line 2: n01 is there already"),
            ("a.txt", "", "names no class"),
            ("a.json", "[1]", "is no JSON of names"),
            ("a.json", "{", "is no JSON of names"),
            ("a.json", '{"a": 1}', "values that are no text"),
        ],
    )
    def test_others_are_refused(self, name: str, text: str, message: str) -> None:
        Path(name).write_text(text)

        with pytest.raises(DataError, match=message):
            read_class_names(name)

    def test_a_folder_without_a_name_is_named(self) -> None:
        Path("train/n07").mkdir(parents=True)
        Path("train/n07/1.jpg").write_bytes(b"1")
        Path("names.txt").write_text(NAMES)

        with pytest.raises(DataError, match=r"names\.txt has no name for n07"):
            ImageFolder("train", names="names.txt")


def write_coco(**changes: Any) -> Path:
    Path("images").mkdir(exist_ok=True)
    for number in (7, 8, 9):
        Path(f"images/{number}.jpg").write_bytes(b"%d" % number)
    found = {
        "images": [{"id": number, "file_name": f"{number}.jpg"} for number in (9, 7, 8)],
        "categories": [{"id": 90, "name": "elk"}, {"id": 3, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 9, "category_id": 3, "bbox": [0, 0, 1, 1]},
            {"id": 2, "image_id": 9, "category_id": 90, "bbox": [0, 0, 1, 1]},
            {"id": 3, "image_id": 7, "category_id": 90, "bbox": [0, 0, 1, 1]},
            {"id": 4, "image_id": 7, "category_id": 90, "bbox": [0, 0, 2, 2]},
        ],
    }
    Path("annotations").mkdir(exist_ok=True)
    path = Path("annotations/instances.json")
    path.write_text(json.dumps(found | changes))
    return path


class TestCoco:
    def test_images_have_the_categories_of_their_annotations(self) -> None:
        source = CocoImages(write_coco(), "images")

        assert [source.read(sample) for sample in range(3)] == [b"9", b"7", b"8"]
        assert isinstance(source.labels, dict)
        assert source.labels["image_id"].tolist() == [9, 7, 8]
        assert source.labels["categories"].tolist() == [[1, 1], [0, 1], [0, 0]]
        assert source.classes == ("cat", "elk")
        with Loader(
            source, batch_size=3, epochs=1, shuffle=False, transforms=[DecodeRaw("u1", (1,))], report=None
        ) as loader:
            (batch,) = [{name: each.copy() for name, each in batch.items()} for batch in loader]
        assert batch["image_id"].tolist() == [9, 7, 8]

    @pytest.mark.parametrize("annotations_are_here", [True, False])
    def test_images_and_annotations_may_be_at_addresses(self, annotations_are_here: bool) -> None:
        path = write_coco()
        with serving() as server:
            server.objects = {str(file): file.read_bytes() for file in Path().rglob("*.*") if file.is_file()}
            annotations = path if annotations_are_here else f"{server.address}/{path}"

            with closing(CocoImages(annotations, f"{server.address}/images")) as source:
                assert [source.read(sample) for sample in range(3)] == [b"9", b"7", b"8"]
                assert source.describe(0) == f"{server.address}/images/9.jpg"

    def test_one_category_each_is_a_label(self) -> None:
        one_each = [{"image_id": image, "category_id": 3 if image == 9 else 90} for image in (9, 7, 8)]
        source = CocoImages(write_coco(annotations=one_each), "images", labels="category")
        assert np.asarray(source.labels).tolist() == [0, 1, 1]

        with pytest.raises(DataError, match='image 9: has 2 categories, and labels="category" takes one'):
            CocoImages(write_coco(), "images", labels="category")
        with pytest.raises(ConfigError, match="labels is 'boxes'"):
            CocoImages(write_coco(), "images", labels="boxes")  # type: ignore[arg-type]

    @for_each(
        ("changes", "message"),
        [
            ({"images": None}, "has no list of images"),
            ({"images": []}, "lists no images"),
            ({"images": [{"id": 7}]}, "image 7: file_name is None"),
            ({"images": [{"id": 7, "file_name": "a\0.jpg"}], "annotations": []}, "image 7: .*zero byte"),
            ({"images": [{"id": "7", "file_name": "7.jpg"}]}, "image 0 of the list: id is '7'"),
            ({"images": [{"id": 7, "file_name": "7.jpg"}] * 2}, "image 7: is there twice"),
            ({"images": [{"id": n, "file_name": "7.jpg"} for n in (7, 8, 9)]}, r"image 8: .*7\.jpg is there already"),
            ({"images": [{"id": n, "file_name": f"../{n}.jpg"} for n in (7, 8, 9)]}, "image 7: '../7.jpg' may lead"),
            ({"images": [{"id": n, "file_name": f"/{n}.jpg"} for n in (7, 8, 9)]}, "image 7: '/7.jpg' may lead out"),
            ({"images": [{"id": n, "file_name": f"{n}0.jpg"} for n in (7, 8, 9)]}, "image 7: .*70.jpg cannot be found"),
            ({"annotations": [{"id": 5, "image_id": 1, "category_id": 3}]}, "annotation 5: image_id is 1, and"),
            ({"annotations": [{"image_id": 7}]}, "annotation 0: category_id is None"),
            ({"categories": [{"id": 3}, {"id": 3}]}, "category 3: is there twice"),
            ({"categories": "cat"}, "has no list of categories"),
        ],
    )  # fmt: skip
    def test_others_are_refused_with_what_is_wrong(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            CocoImages(write_coco(**changes), "images")

    def test_what_is_no_json_is_named(self) -> None:
        path = write_coco()
        for content, message in ((b"{", "is no JSON"), (b"\xff", "line 1: is no text in UTF-8")):
            path.write_bytes(content)
            with pytest.raises(DataError, match=message):
                CocoImages(path, "images")
