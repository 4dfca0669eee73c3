"""keep="crops": a picture is decoded for several epochs at once, and every batch is that of decoding it each time."""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interpreters import Interpreters
from tests.loader.pictures import CountedFolder, drawn

from penstock import read_trace
from penstock.errors import ConfigError
from penstock.loader import Loader, LoaderConfig, pixels_on_disk, predict
from penstock.loader.jobs_pixels import JobsCropDecoder, JobsPictureDecoder
from penstock.loader.transforms import (
    CenterCrop,
    ColorJitter,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
)
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.replay import replay_of
from penstock.ranks import alone
from penstock.simulate import loading
from penstock.store import job_memory
from penstock.store.disk import DiskTier, disk_tiers
from penstock.store.group import Bytes, Failed, Ids
from penstock.trace.schema import JOBS_MEMORY, NO_PLACE, Kind

COUNT, EPOCHS = 45, 7
NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that a decoder shrinks by 1 to 8 for a crop of 20 pixels; JPEG, some PNG, one narrower than the crop."""
    sizes = np.random.default_rng(3).integers(30, 420, (COUNT, 2)).tolist()
    return drawn(tmp_path_factory.mktemp("photos") / "a", [(90, 12), *sizes[1:]])


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of about one size, as the first of them says it."""
    return drawn(tmp_path_factory.mktemp("alike") / "a", [(60 + sample, 70) for sample in range(16)])


def batches_of(source: Any, transforms: Any, keep: str, **arguments: Any) -> list[tuple[bytes, bytes]]:
    """Return all batches of a run, epoch by epoch."""
    how = {"batch_size": 8, "epochs": EPOCHS, "seed": 5, "report": None, "decoders": 2, **arguments}
    with Loader(source, transforms=transforms, keep=keep, **how) as loader:
        return [
            (images.tobytes(), labels.tobytes()) for _ in range(how["epochs"]) for images, labels in loader
        ]


#: Whose memory has space for less than half of the crops.
SMALL = Machine(
    SharedStore(None, Curve(((1, 1e8),)), 1e-4),
    (
        StorageClass("staging", 10**8, 1, Curve(((1, 1e9),))),
        StorageClass("memory", 25_000, 1, Curve(((1, 1e9),))),
    ),
)
#: The same for decoded pictures, which turn out to be larger than the first one says.
SMALL_FOR_PICTURES = replace(
    SMALL, storage=(SMALL.storage[0], replace(SMALL.storage[1], capacity_bytes=1_000_000))
)
FIXED = (Resize(24), CenterCrop(20))
RANDOM = (RandomResizedCrop(20), RandomHorizontalFlip(), RandomVerticalFlip(0.3))


@pytest.mark.parametrize(
    ("transforms", "keep", "how"),
    [
        pytest.param(
            (*FIXED, ToTensor(), NORMALIZE),
            "crops",
            {"layout": "NHWC", "dtype": "bfloat16", "decoders": 0},
            marks=pytest.mark.slow,
        ),
        pytest.param((*FIXED, ColorJitter(0.4), ToTensor()), "crops", {}, marks=pytest.mark.slow),
        pytest.param(
            (*RANDOM, ToTensor()), "2 crops", {"dtype": "float16", "decoders": 0}, marks=pytest.mark.slow
        ),
        (RANDOM, "5 crops", {"dtype": "uint8", "layout": "NHWC", "decoders": 3}),
        pytest.param(
            (*RANDOM, ColorJitter(0.4, 0.4, 0.4, 0.1), ToTensor()), "3 crops", {}, marks=pytest.mark.slow
        ),
        pytest.param(
            (RandomResizedCrop(40, antialias=False), *RANDOM, ToTensor()),
            "3 crops",
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param((*RANDOM, ToTensor()), "3 crops", {"mix_images": MixUp(3)}, marks=pytest.mark.slow),
        pytest.param((*RANDOM, ToTensor()), "decoded", {"decoders": 3}, marks=pytest.mark.slow),
        (
            (*RANDOM, ColorJitter(0.4), ToTensor()),
            "decoded",
            {"decoders": 0, "rank": 1, "world_size": 2, "ranks": alone},
        ),
        # No longer than the run, and used from a state in its midst.
        pytest.param((*RANDOM, ToTensor()), "30 crops", {}, marks=pytest.mark.slow),
    ],
)
def test_batches_are_those_of_decoding_each_time_with_any_threads_memory_and_resume_point(
    photos: Path, transforms: Any, keep: str, how: dict[str, Any]
) -> None:
    expected = batches_of(photos, transforms, "stored", **how)

    assert batches_of(photos, transforms, keep, **how) == expected
    small = SMALL_FOR_PICTURES if keep == "decoded" else SMALL
    assert batches_of(photos, transforms, keep, **how, machine=small) == expected
    with Loader(
        photos, transforms=transforms, keep=keep, batch_size=8, epochs=EPOCHS, seed=5, report=None, **how
    ) as loader:
        loader.start(2, 3)
        found = [(images.tobytes(), labels.tobytes()) for images, labels in itertools.islice(loader, 1)]
        # The rest of epoch 2 is given up.
        found += [(images.tobytes(), labels.tobytes()) for _ in range(2) for images, labels in loader]
    steps = len(expected) // EPOCHS
    assert found == expected[2 * steps + 3 : 2 * steps + 4] + expected[3 * steps : 5 * steps]


def test_a_fixed_crop_is_made_once_and_a_random_one_every_so_many_epochs(photos: Path) -> None:
    source = CountedFolder(photos)
    batches_of(source, (*FIXED, ToTensor()), "crops")
    assert set(source.reads.values()) == {1}

    source = CountedFolder(photos)
    lines: list[str] = []
    hits: list[int] = []
    # Batches are made when asked for: what is read ahead before its crops are made is decoded once more.
    with Loader(
        source,
        batch_size=5,
        epochs=EPOCHS,
        transforms=(*RANDOM, ToTensor()),
        keep="3 crops",
        seed=1,
        report=lines.append,
        decoders=0,
    ) as loader:
        for _ in range(EPOCHS):
            for _ in loader:
                pass
            stages = loader.metrics[-1].stages.items()
            hits.append(sum(stage.samples for name, stage in stages if name.kind == Kind.HIT))
    # All are decoded in epoch 0, for 0 to 2 epochs more; then a third of them in each.
    assert hits == [0] + [COUNT * 2 // 3] * (EPOCHS - 1)
    assert sum(source.reads.values()) == EPOCHS * COUNT - sum(hits)
    assert any("to keep all samples as crops of 3 epochs each for later epochs" in line for line in lines)


def test_damage_that_an_epochs_crop_does_not_show_is_no_error_of_that_epoch(
    tmp_path: Path, photos: Path
) -> None:
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    for path in sorted((photos / "a").glob("*.jpg"))[:20]:
        content = bytearray(path.read_bytes())
        if path.name != "01.jpg":
            # In its last tenth, in front of the end: the crops of some epochs are above it.
            content[-len(content) // 10 : -8] = bytes(len(content[-len(content) // 10 : -8]))
        (folder / path.name).write_bytes(content)

    def run(keep: str) -> tuple[Any, list[str]]:
        lines: list[str] = []
        how = {"on_error": "skip", "report": lines.append}
        found = batches_of(folder.parent, (RandomResizedCrop(20, (0.05, 0.3)), ToTensor()), keep, **how)
        return found, [line.rpartition("skipped")[2] for line in lines if "skipped" in line]

    expected, skipped = run("stored")
    assert len(skipped) > 1
    assert run("3 crops") == (expected, skipped)


@pytest.mark.parametrize(
    ("transforms", "keep", "how", "message"),
    [
        ((*FIXED, ToTensor()), "3 crops", {}, 'one crop serves all epochs: give keep="crops"'),
        (
            (*RANDOM, ToTensor()),
            "crops",
            {"rank": 0, "world_size": 2},
            "each epoch gives a rank other samples",
        ),
        ((*RANDOM, ToTensor()), "crops", {"share": "jobs"}, "random crops are of one job's seed"),
        ((*FIXED, ToTensor()), "decoded", {}, "do not begin with one RandomResizedCrop"),
        ((RandomResizedCrop(40), *RANDOM), "decoded", {}, "do not begin with one RandomResizedCrop"),
        ((Resize(30), ToTensor()), "crops", {}, "do not begin with steps of Penstock that fix the size"),
        ((lambda picture: picture, *FIXED), "crops", {}, "do not begin with steps of Penstock that fix"),
    ],
)
def test_crops_that_no_run_could_use_are_refused(
    photos: Path, transforms: Any, keep: str, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(
            photos, batch_size=3, epochs=2, transforms=transforms, keep=keep, report=None, ranks=alone, **how
        )


def test_auto_keeps_what_the_machine_says_saves_most_as_the_trace_and_the_prediction_say(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transforms, file = (*RANDOM, ToTensor()), tmp_path / "run.trace"
    memory = StorageClass("memory", 10**7, 1, Curve(((1, 1e9),)))
    slow_decoding = Machine(
        SharedStore(None, Curve(((1, 1e9),))),
        (replace(memory, name="staging"), memory),
        preprocess_bytes_per_second=1e5,
    )
    slow_store = replace(
        slow_decoding,
        source=SharedStore(None, Curve(((1, 1e4),))),
        storage=(memory, replace(memory, name="more", capacity_bytes=2_000_000)),
        preprocess_bytes_per_second=1e9,
    )
    little = replace(slow_decoding, storage=(memory, replace(memory, name="little", capacity_bytes=200_000)))
    kept: list[Any] = []
    stored = batches_of(photos, transforms, "stored")
    for machine in (slow_decoding, little, slow_store):
        config = LoaderConfig(
            photos, transforms=transforms, keep="auto", machine=machine, batch_size=8, epochs=EPOCHS, seed=5
        )
        found = batches_of(photos, transforms, "auto", machine=machine, trace=file)
        assert found == stored
        kept.append(read_trace(file).meta["keep"])
        predicted: Any = predict(config, step_seconds=1e-3).meta.get("keep")
        if kept[-1] is not None and kept[-1]["is_decoded"]:
            predicted["crop_bytes"] = kept[-1]["crop_bytes"]  # how many, only those know who read a picture
        assert predicted == kept[-1]

    decoded, crops, as_stored = kept
    assert (decoded["is_decoded"], decoded["epochs"]) == (True, 0)
    chosen = {"crop_bytes": 20 * 20 * 3, "epochs": crops["epochs"], "is_decoded": False, "disks": 0}
    assert crops == chosen
    assert as_stored is None
    not_measured = replace(slow_decoding, preprocess_bytes_per_second=math.inf)
    how: dict[str, Any] = {"transforms": transforms, "batch_size": 8, "epochs": 2}
    for given, missing in ((None, "no machine= says"), (not_measured, "machine= does not say")):
        with pytest.raises(
            ConfigError, match=rf"{missing} what decoding costs .*--from run.trace.*decode_with"
        ):
            Loader(photos, keep="auto", machine=given, report=None, **how)
    for machine, is_said in ((not_measured, True), (slow_decoding, False)):
        predict(LoaderConfig(photos, **how), machine, step_seconds=1e-3)
        assert (
            "decoding costs (its preprocess), and it is taken as free: " in capsys.readouterr().err
        ) == is_said


def test_ranks_that_share_fixed_crops_read_the_same_as_without(photos: Path) -> None:
    transforms = (*FIXED, ToTensor())
    how = {"rank": 1, "world_size": 2, "ranks": alone}
    assert batches_of(photos, transforms, "crops", **how) == batches_of(photos, transforms, "stored", **how)


def flip_bytes(folder: Path) -> None:
    """Flip some of each sample that is kept there."""
    (samples,) = folder.glob("*.samples")
    content = np.fromfile(samples, np.uint8)
    content[::900] ^= 1
    content.tofile(samples)


@pytest.mark.parametrize(
    ("transforms", "keep"),
    [pytest.param((*FIXED, ToTensor()), "crops", marks=pytest.mark.slow), ((*RANDOM, ToTensor()), "decoded")],
)
def test_jobs_that_share_decode_each_picture_once_and_have_the_batches_of_each_alone(
    alike: Path, tmp_path: Path, transforms: Any, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the ranks of one of them. Their traces say who decoded which."""
    made, lock = Counter[int](), threading.Lock()
    decoder, name = (JobsCropDecoder, "_make") if keep == "crops" else (JobsPictureDecoder, "_decode")
    make: Any = getattr(decoder, name)

    def counting(its: Any, group: Any, which: Any, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        with lock:
            made.update(ids.tolist())
        found: Failed = make(its, group, which, ids, into, begins)
        return found

    places: list[dict[str, Any]] = [{"seed": 0}, {"seed": 1}]
    places += [{"seed": 2, "rank": rank, "world_size": 2, "ranks": alone} for rank in range(2)]
    expected = [batches_of(alike, transforms, "stored", **place) for place in places]
    monkeypatch.setattr(decoder, name, counting)
    monkeypatch.setattr(job_memory, "_PATIENCE_SECONDS", 60.0)
    traces = [tmp_path / f"{number}.trace" for number in range(len(places))]
    with ThreadPoolExecutor(len(expected)) as pool:
        jobs = [
            pool.submit(batches_of, alike, transforms, keep, **place, share="jobs", trace=path)
            for place, path in zip(places, traces, strict=True)
        ]
        assert [job.result() for job in jobs] == expected

    assert made == Counter(range(16))
    decoded, decodes = Counter[int](), 0
    for trace in map(read_trace, traces):
        spans = trace.spans[trace.spans["kind"] == Kind.DECODE]
        decodes += int(spans["samples"].sum())
        assert set(spans["place"].tolist()) <= {NO_PLACE, JOBS_MEMORY}
        for span in spans[spans["place"] == NO_PLACE]:
            ids = trace.ids.get((int(span["rank"]), int(span["flow"])))
            decoded.update([int(span["sample"])] if ids is None else ids.tolist())
    assert decoded == made
    assert decodes == 3 * 16 * EPOCHS


@pytest.mark.parametrize(
    ("transforms", "keep", "memory_bytes"),
    [
        ((*FIXED, ToTensor()), "crops", 7_000),
        pytest.param((*RANDOM, ToTensor()), "decoded", 60_000, marks=pytest.mark.slow),
    ],
)
def test_what_memory_has_no_space_for_a_disk_keeps_as_pixels_and_the_next_run_decodes_none_of_it(
    alike: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transforms: Any,
    keep: str,
    memory_bytes: int,
) -> None:
    # Decoding takes longer than reading pixels.
    machine = replace(
        SMALL,
        storage=(SMALL.storage[0], replace(SMALL.storage[1], capacity_bytes=memory_bytes)),
        preprocess_bytes_per_second=1e5,
    )
    expected = batches_of(alike, transforms, "stored", epochs=3)

    def run(*before: Any) -> tuple[bool, int, list[str]]:
        source, lines = CountedFolder(alike), list[str]()
        how = {"machine": machine, "local_disk": tmp_path / "disk", "trace": tmp_path / "run.trace"}
        found = batches_of(source, (*before, *transforms), keep, epochs=3, report=lines.append, **how)
        return found == expected, sum(source.reads.values()), lines

    is_equal, reads, lines = run()
    form = {"crops": "as one crop each", "decoded": "as decoded pictures"}[keep]
    assert is_equal
    assert any(f"{form} on local disk" in line for line in lines)
    trace = read_trace(tmp_path / "run.trace")
    kept: Any = trace.meta["keep"]
    assert kept["disks"] == 1
    stored = [path.stat().st_size for path in alike.rglob("*.*")]
    sizes_bytes = replay_of(trace).sizes_bytes
    assert min(stored) <= sizes_bytes.min(), "of samples as stored, not of pixels on the disk"
    assert sizes_bytes.max() <= max(stored)
    assert reads >= 16
    config = LoaderConfig(
        alike,
        transforms=transforms,
        keep=keep,
        batch_size=8,
        epochs=3,
        seed=5,
        decoders=2,
        machine=machine,
        local_disk=tmp_path / "disk",
    )
    predicted: Any = predict(config, step_seconds=1e-3).meta["keep"]
    # How large pictures are, only those know who read one.
    assert {**predicted, "crop_bytes": 0} == {**kept, "crop_bytes": 0}
    assert run()[:2] == (True, 0)

    flip_bytes(tmp_path / "disk")
    is_equal, reads, lines = run()
    assert is_equal
    assert reads >= 8
    assert any("is not what was written" in line for line in lines)

    if keep == "crops":  # other steps make others
        assert run(Resize(30))[1] >= 16

    another: Any = lambda *_: {"turbojpeg": "another"}  # noqa: E731
    for whose in ("decoder_versions", "version"):
        with monkeypatch.context() as patched:
            patched.setattr(pixels_on_disk, whose, another)
            is_equal, reads, _ = run()
        assert is_equal
        assert reads >= 16, "of another decoder or version nothing is found"
    assert run()[:2] == (True, 0)


@pytest.mark.parametrize(
    ("transforms", "keep", "disk_bytes"),
    [
        pytest.param((Resize(72), CenterCrop(70), ToTensor()), "crops", 220_000, marks=pytest.mark.slow),
        ((*RANDOM, ToTensor()), "decoded", 280_000),
    ],
)
def test_a_disk_without_space_for_all_pixels_keeps_those_of_some_samples_and_the_others_as_stored(
    alike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transforms: Any, keep: str, disk_bytes: int
) -> None:
    # Decoding takes longer than reading pixels.
    memory = replace(SMALL.storage[1], capacity_bytes=30_000)
    machine = replace(SMALL, storage=(SMALL.storage[0], memory), preprocess_bytes_per_second=1e5)
    expected, disk = batches_of(alike, transforms, "stored", epochs=3), tmp_path / "disk"
    how: Any = {"machine": machine, "local_disk": {disk: disk_bytes}, "epochs": 3}

    for _ in range(2):
        lines = list[str]()
        more = {"trace": tmp_path / "run.trace", "report": lines.append}
        assert batches_of(alike, transforms, keep, **how, **more) == expected
        (line,) = [each for each in lines if each.count(f"on local disk '{disk}'") == 2]
    assert line.count("there already") == 2

    held = dict[str, Ids]()
    for facts in disk_tiers(disk):
        fingerprint = bytes.fromhex(facts.path.name.split("-")[1])
        with closing(DiskTier(disk, disk_bytes, fingerprint, np.full(16, -1))) as tier:
            held[facts.about.rpartition(", as ")[2] if ", as " in facts.about else ""] = tier.held()
    assert set(held) == {"", keep}
    assert 2 <= held[keep].size < 16
    assert set(np.concatenate(list(held.values())).tolist()) == set(range(16))

    recorded: Any = read_trace(tmp_path / "run.trace").meta
    assert recorded["keep"]["disks"] == 1
    config = LoaderConfig(alike, transforms=transforms, keep=keep, batch_size=8, seed=5, decoders=2, **how)
    # How large pictures are, only those know who read one.
    # Of a disk's measured rate each part has its share.
    measured = StorageClass("disk", disk_bytes, 2, Curve(((1, 4e8),)), backend="filesystem", path=str(disk))
    known = replace(machine, storage=(*machine.storage, measured))
    jobs = list[Any]()

    def noted(job: Any, **arguments: Any) -> Any:
        jobs.append(job)
        return predict_job(job, **arguments)

    predict_job = loading.predict
    monkeypatch.setattr(loading, "predict", noted)
    with Loader(config, report=None) as loader:
        loader.predict(machine=known, step_seconds=1e-3)
    rates = [each.read.at(1) for each in jobs[0].machine.storage[2:]]
    assert len(rates) == 2
    assert sum(rates) == pytest.approx(4e8)
    if keep == "crops":
        assert predict(config, step_seconds=1e-3).meta["keep"] == recorded["keep"]
    places = [each.name for each in Machine.from_toml(recorded["machine"]).storage]
    assert places == ["staging", "memory", f"disk, {keep}", "disk"]


#: What disks keep of `alike`, and by which transforms; all that memory has no space for.
ON_DISK = {
    "stored": (*FIXED, ToTensor()),
    "crops": (Resize(72), CenterCrop(70), ToTensor()),
    "decoded": (*RANDOM, ToTensor()),
}


def batches_on_disk(source: Any, disk: Path, keep: str, **arguments: Any) -> list[tuple[bytes, bytes]]:
    memory = replace(SMALL.storage[1], capacity_bytes=30_000)
    machine = replace(SMALL, storage=(SMALL.storage[0], memory), preprocess_bytes_per_second=1e5)
    how: Any = {"machine": machine, "local_disk": {disk: 10**6}, "epochs": 3, **arguments}
    return batches_of(source, ON_DISK[keep], keep, **how)


def on_disk(disk: Path) -> dict[int, bytes]:
    """Return what the only tier of a disk has, all of which is as it was written."""
    (facts,) = disk_tiers(disk)
    with closing(
        DiskTier(disk, 10**6, bytes.fromhex(facts.path.name.split("-")[1]), np.full(16, -1))
    ) as tier:
        ids = tier.held()
        begins = np.concatenate(([0], np.cumsum(tier.sizes_of(ids))))
        into = np.empty(int(begins[-1]), np.uint8)
        assert tier.read_group(ids, into, begins) == []
    return {
        int(sample): into[begin:end].tobytes()
        for sample, begin, end in zip(ids, begins[:-1], begins[1:], strict=True)
    }


@pytest.mark.parametrize(
    ("keep", "points"),
    [
        ("stored", [5]),
        ("crops", [12]),
        ("decoded", [19]),
        *(pytest.param(keep, range(29), marks=pytest.mark.slow) for keep in ON_DISK),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} points",
)
def test_a_loader_that_is_killed_in_any_write_to_a_disk_goes_on_with_what_is_there_when_it_starts_again(
    alike: Path, tmp_path: Path, interpreters: Interpreters, keep: str, points: Sequence[int]
) -> None:
    """A write that it is killed in is done, half done or not done, in turn; and it is killed twice if it can be."""
    program = """
        import os, sys
        from pathlib import Path
        from types import SimpleNamespace
        from penstock.store import disk
        from tests.killed_writes import killed_at
        from tests.loader.pictures import CountedFolder
        from tests.loader.test_crops import batches_on_disk
        source, place, keep, point = CountedFolder(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
        killed = killed_at(point)
        disk.os = SimpleNamespace(**{**vars(os), "write": killed(os.write), "pwrite": killed(os.pwrite)})
        batches_on_disk(source, place, keep, report=lambda line: print(line, flush=True))
    """
    expected, whole = batches_of(alike, ON_DISK[keep], "stored", epochs=3), tmp_path / "whole"
    for _ in range(2):  # a sample that finds no space to wait in is written by the next run
        assert batches_on_disk(CountedFolder(alike), whole, keep) == expected
    kept = on_disk(whole)
    assert len(kept) == 16
    for point in points:
        place, lines = tmp_path / str(point), list[str]()
        for write in (point, point // 2):
            arguments = (str(alike), str(place), keep, str(write))
            with interpreters.start(program, *arguments, stdout=subprocess.PIPE, text=True) as run:
                told, _ = run.communicate()
            # When it starts again it may have fewer to write.
            assert run.returncode == -signal.SIGKILL or (write < point and not run.returncode), told
            lines += told.splitlines()
        there = on_disk(place)
        assert there.items() <= kept.items()
        # The header is a write, and a sample two; two threads write.
        assert len(there) >= (point - 3) // 2

        source = CountedFolder(alike)
        assert batches_on_disk(source, place, keep, report=lines.append) == expected
        assert not [line for line in lines if "damaged" in line or "cannot" in line]
        assert not [sample for sample in there if source.reads[sample] > 1]
        assert there.items() <= on_disk(place).items() <= kept.items()
