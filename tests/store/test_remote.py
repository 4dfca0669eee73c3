"""Data sets on remote stores: what web servers and object stores answer, and what becomes of it."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import fsspec
import h5py  # type: ignore[import-untyped]
import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from obstore.store import S3Store
from tests.contracts.test_source_contract import (
    Opened,
    arrays,
    arrow,
    compressed_hdf5,
    file_list,
    flat_folder,
    hdf5,
    image_folder,
    litdata,
    mosaic,
    packed_mosaic,
    parquet,
    tar_shards,
    tf_records,
)
from tests.for_each import for_each
from tests.interpreters import Interpreters
from tests.patience import brief, patient, wait_until
from tests.store import hdfs_server
from tests.store.test_litdata import GOLDEN as LITDATA
from tests.store.web_server import Answer, Request, WebServer, serving

from penstock.cache_folders import Folders
from penstock.errors import ClosedError, ConfigError, DataError
from penstock.loader import Loader
from penstock.loader.resume import describe_data
from penstock.loader.transforms import DecodeRaw
from penstock.policy import Extents, merge_reads, requests
from penstock.store import (
    Arrays,
    ArrowFiles,
    FileList,
    FlatFolder,
    Hdf5,
    ImageFolder,
    LitDataChunks,
    Manifest,
    MosaicShards,
    PackedFiles,
    ParquetFiles,
    Records,
    TarShards,
    TFRecords,
    Tokens,
    catalogs,
    open_source,
    read_all_merged,
    read_group,
    remote_clients,
)
from penstock.store.calls import Calls
from penstock.store.files import FileSource
from penstock.store.remote import Objects, objects_in
from penstock.store.selection import Selection

pytestmark = pytest.mark.usefixtures("obstore_threads", "fsspec_threads", "signed_s3_options", "s3_options")

Remote = FileSource | PackedFiles

#: How a source is written, what opens it, and where it is below the folder.
KINDS: list[Any] = [
    (image_folder, ImageFolder, ""),
    pytest.param(flat_folder, FlatFolder, "", marks=pytest.mark.slow),
    (file_list, FileList, "/list.csv"),
    (tar_shards, TarShards, "/{0..8}.tar"),
    pytest.param(tar_shards, TarShards, "", marks=pytest.mark.slow),
    (tf_records, TFRecords, "/*.tfrecord"),
    pytest.param(tf_records, TFRecords, "", marks=pytest.mark.slow),
    (mosaic, MosaicShards, "/mds"),
    pytest.param(packed_mosaic, MosaicShards, "/mds", marks=pytest.mark.slow),
    (litdata, LitDataChunks, "/lit"),
    pytest.param(arrow, ArrowFiles, "", marks=pytest.mark.slow),
    (arrow, ArrowFiles, "/*.arrow"),
    pytest.param(parquet, ParquetFiles, "", marks=pytest.mark.slow),
    (parquet, ParquetFiles, "/*.parquet"),
    (arrays, Arrays, "/*.npy"),
    (hdf5, Hdf5, "/*.h5"),
    pytest.param(compressed_hdf5, Hdf5, "/*.h5", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _own_catalogs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("catalogs")
    monkeypatch.setattr(catalogs, "_folders", lambda: Folders((folder,), folder, ""))


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serving() as found:
        yield found


def objects_of_folder(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def put_all(options: dict[str, str], place: str, folder: Path) -> None:
    """Write the files of a folder below a place in the bucket."""
    config = {
        "endpoint": options["endpoint_url"],
        "access_key_id": options["key"],
        "secret_access_key": options["secret"],
        "region": "us-east-1",
    }
    store = S3Store("bucket", config=config, client_options={"allow_http": True})  # type: ignore[arg-type]
    for name, data in objects_of_folder(folder).items():
        obstore.put(store, f"{place}/{name}", data)


def no_request_threads() -> bool:
    """Return whether all threads that ask a store have ended, also those that listed what a closed source reads."""
    return all(thread.name != "penstock-request" for thread in threading.enumerate())


def check_reads(source: Remote, opened: Opened) -> None:
    assert [bytes(source.read(sample)) for sample in range(len(source))] == opened.contents
    ids = np.array([5, 3, 0, 5, 8])
    begins = np.concatenate(([0], np.cumsum(source.sizes_bytes[ids])))
    into = np.zeros(begins[-1], np.uint8)
    assert read_group(source, ids, into, begins) == []
    assert into.tobytes() == b"".join(opened.contents[sample] for sample in ids)


@pytest.mark.parametrize(("build", "kind", "below"), KINDS)
class TestEachSource:
    """What is read from an address is what would be read from a folder, sample by sample."""

    def test_from_a_web_server(
        self, build: Any, kind: Any, below: str, server: WebServer, tmp_path: Path
    ) -> None:
        local = build(tmp_path)
        server.objects = {f"a b/{name}": data for name, data in objects_of_folder(tmp_path).items()}
        address = f"{server.address}/a%20b{below}"

        for source in (kind(address), open_source(address)):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(source.read, range(len(source))))
            check_reads(source, local)
            with closing(pickle.loads(pickle.dumps(source))) as again:
                check_reads(again, local)
            assert describe_data(source)["names_sizes_labels"] or kind is FileList
            if kind not in (FileList, Arrays):
                assert describe_data(source) == describe_data(local.source)
                assert source.classes == local.source.classes
            assert source.describe(3).startswith(server.address)
            source.close()
        assert no_request_threads()

    @pytest.mark.parametrize("server_options", ["signed_s3_options", "s3_options"])
    def test_from_s3(
        self,
        build: Any,
        kind: Any,
        below: str,
        server_options: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
    ) -> None:
        local = build(tmp_path)
        options = request.getfixturevalue(server_options)
        place = f"s3://bucket/{abs(hash(request.node.name))}"
        put_all(options, place.removeprefix("s3://bucket/"), tmp_path)

        source = kind(place + below, storage_options=options)
        check_reads(source, local)
        source.close()

    def test_from_what_fsspec_reaches(
        self, build: Any, kind: Any, below: str, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        local = build(tmp_path)
        place = f"memory://{abs(hash(request.node.name))}"
        for name, data in objects_of_folder(tmp_path).items():
            fsspec.filesystem("memory").pipe_file(f"{place}/{name}", data)

        source = kind(place + below)
        check_reads(source, local)
        source.close()


@pytest.mark.parametrize("server_options", ["signed_s3_options", "s3_options"])
def test_s3fs_reads_where_an_option_is_its_own(
    server_options: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    local = tar_shards(tmp_path)
    options = request.getfixturevalue(server_options)
    put_all(options, "by-s3fs", tmp_path)

    source = TarShards("s3://bucket/by-s3fs", storage_options={**options, "default_block_size": 1 << 20})
    check_reads(source, local)
    source.close()


# -- One object, and what may happen to it -------------------------------------------------------------

CONTENT = np.random.default_rng(0).bytes(100_000)


def records_of(server: WebServer, **options: float) -> Records:
    server.objects["data.bin"] = CONTENT
    return Records(f"{server.address}/data.bin", "u1", 10_000, storage_options=options)


@pytest.fixture
def records(server: WebServer) -> Iterator[Records]:
    """Ten records of 10,000 bytes in one object."""
    with closing(records_of(server)) as source:
        yield source


@pytest.fixture
def hasty_records(server: WebServer) -> Iterator[Records]:
    """The same, which fail for good after a tenth of a second."""
    with closing(records_of(server, retry_seconds=0.1, timeout_seconds=brief(0.5))) as source:
        yield source


def record(number: int) -> bytes:
    return CONTENT[10_000 * number : 10_000 * (number + 1)]


def first(answer: Answer, times: int = 1) -> Callable[[Request], Answer | None]:
    """Give a wrong answer so many times."""
    numbers = count()
    return lambda request: answer if next(numbers) < times else None


@pytest.mark.parametrize(
    "answer",
    [
        *(Answer(status=status) for status in (408, 429, 500, 502, 503, 504)),
        Answer(reset=True),
        Answer(cut=100),
        Answer(cut=10_000),
    ],
)
def test_what_passes_is_tried_again(server: WebServer, records: Records, answer: Answer) -> None:
    server.fault = first(answer)

    assert records.read(3) == record(3)

    found = objects_in(records)
    assert found is not None
    ((began, ended),) = found.take_lost()
    assert began < ended
    assert found.take_lost() == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=401), "may not be read by anonymous .401 Unauthorized.: give this identity"),
        (Answer(status=403), "may not be read by anonymous .403 Forbidden."),
        (Answer(status=404), "has vanished or was never there .*: check the address, or open"),
        (Answer(status=400), "was answered with 400 Bad Request: check the address"),
        (Answer(status=302, location="file:///etc/passwd"), "was answered with 302 Found: check the address"),
        (Answer(added=5), "was answered with 10,005 bytes or more where 10,000 were asked for: check"),
        (Answer(shifted=7), "another part was sent than was asked for .*; check the address"),
    ],
)
def test_what_does_not_pass_is_an_error_at_once(
    server: WebServer, records: Records, answer: Answer, message: str
) -> None:
    server.fault = lambda request: answer
    before = len(server.requests)

    with pytest.raises(DataError, match=f"^{server.address}/data.bin .*{message}"):
        records.read(3)
    assert len(server.requests) == before + 1


def test_what_fails_for_longer_than_its_budget_is_an_error_that_says_how_often(
    server: WebServer, hasty_records: Records
) -> None:
    server.fault = lambda request: Answer(status=503)

    with pytest.raises(
        DataError, match=r"data.bin cannot be read: 503 Service Unavailable; \d+ attempts in .* failed"
    ):
        hasty_records.read(3)


def test_a_request_without_an_answer_is_given_up_and_made_again(
    server: WebServer, hasty_records: Records
) -> None:
    server.fault = first(Answer(silent=True))

    # The time-out is longer than the budget here, and the last attempt comes after it.
    with pytest.raises(DataError, match=r"cannot be read: no answer in time; 1 attempt in .* failed"):
        hasty_records.read(3)
    assert hasty_records.read(3) == record(3)


def test_a_server_without_ranges_is_read_as_a_whole(server: WebServer, records: Records) -> None:
    server.fault = lambda request: Answer(whole=True)

    assert records.read(3) == record(3)


def test_a_redirect_is_followed_without_credentials(server: WebServer) -> None:
    server.objects["data.bin"] = CONTENT
    with serving({"elsewhere.bin": CONTENT}) as other:
        with pytest.raises(ConfigError, match=r"//me:\*\*\*@.* has a password in it: give it apart"):
            open_source(f"http://me:secret@127.0.0.1:{server.port}/data.bin")
        options = {"username": "me", "password": "secret"}
        source = Records(f"{server.address}/data.bin", "u1", 10_000, storage_options=options)
        assert server.requests[-1].headers["authorization"].startswith("Basic ")
        location = other.address.replace("127.0.0.1", "localhost") + "/elsewhere.bin"
        server.fault = lambda request: Answer(status=302, location=location)

        assert source.read(3) == record(3)

        assert "authorization" not in other.requests[-1].headers
        assert "secret" not in repr(source) + source.describe(3)
        source.close()


def test_an_object_of_another_content_is_an_error_and_not_delivered(
    server: WebServer, records: Records
) -> None:
    server.objects["data.bin"] = CONTENT[::-1]
    with pytest.raises(DataError, match=r"data\.bin was written again since it was listed"):
        records.read(3)

    server.objects["data.bin"] = CONTENT + b"more"
    with pytest.raises(DataError, match=r"has grown from 100,000 to 100,004 bytes since it was listed"):
        records.read(3)

    server.objects["data.bin"] = CONTENT
    assert records.read(3) == record(3)


def test_a_picture_of_the_same_size_and_another_content_is_an_error(server: WebServer) -> None:
    server.objects = {f"set/{k}.png": bytes([k]) * 100 for k in range(3)}
    with_source = FlatFolder(f"{server.address}/set")
    server.objects["set/1.png"] = b"x" * 100

    with pytest.raises(DataError, match=r"set/1\.png was written again since it was listed"):
        with_source.read(1)
    assert with_source.read(2) == bytes([2]) * 100
    with_source.close()


def test_row_groups_at_an_address_come_by_few_requests_and_only_their_column(
    server: WebServer, tmp_path: Path
) -> None:
    samples = [random.Random(number).randbytes(4_000) for number in range(400)]
    others = [random.Random(-number).randbytes(30_000) for number in range(400)]
    table = pa.table({"image": samples, "other": others, "label": list(range(400))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, compression="none")
    server.objects = {"set/a.parquet": (tmp_path / "a.parquet").read_bytes()}
    source = open_source(f"{server.address}/set")
    before = len(server.requests)
    fails = count()
    server.fault = lambda request: Answer(status=503) if next(fails) % 3 == 0 else None

    with Loader(
        source,
        batch_size=40,
        epochs=1,
        transforms=[DecodeRaw("uint8", (4_000,))],
        dtype="uint8",
        shuffle=False,
    ) as loader:
        batches = [batch[0].tobytes() for batch in loader]

    assert b"".join(batches) == b"".join(samples)
    answered = [request for request in server.requests[before:] if request.between]
    # Four row groups of 400 KB beside 3 MB that nobody wants, the end of the file, and what failed in between.
    assert len(answered) <= 24
    assert sum(end - begin for begin, end in (each.between or (0, 0) for each in answered)) < 4_000_000


def test_a_table_at_an_address_that_changes_is_an_error(server: WebServer, tmp_path: Path) -> None:
    opened = parquet(tmp_path)
    server.objects = objects_of_folder(tmp_path)
    with closing(ParquetFiles(f"{server.address}/*.parquet")) as source:
        name = opened.files[3].name
        server.objects[name] = server.objects[name][::-1]

        with pytest.raises(DataError, match=rf"{name} was written again since it was listed"):
            source.read(3)
        assert source.read(2) == opened.contents[2]


def test_chunks_that_are_arrow_files_are_read_from_addresses(server: WebServer) -> None:
    server.objects = objects_of_folder(LITDATA / "rows")

    with closing(LitDataChunks(server.address, sample="text")) as source:
        assert [source.read(number) for number in range(len(source))] == [
            b"sample %d" % number for number in range(5)
        ]


def test_chunks_of_an_hdf5_file_are_brought_before_the_library_that_decodes_them_is_asked(
    server: WebServer, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (64, 50_000), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("data", data=rows, chunks=(8, 10_000), compression="gzip", compression_opts=1)
    server.objects = objects_of_folder(tmp_path)

    with closing(Hdf5(f"{server.address}/x.h5")) as source:
        assert source.read(0) == rows[0].tobytes()  # the library opens the file
        before = len(server.requests)
        ids = np.array([60, 17, 16, 61])
        into, begins = np.empty(4 * 50_000, np.uint8), 50_000 * np.arange(5)
        assert read_group(source, ids, into, begins) == []
        assert np.array_equal(into.reshape(4, -1), rows[ids])
        # Five chunks lie side by side, for rows 16 to 23 and for 56 to 63.
        assert len(server.requests) - before == 2

        server.objects["x.h5"] = server.objects["x.h5"][::-1]
        with pytest.raises(DataError, match=r"x\.h5 was written again since it was listed"):
            source.read(30)
    server.objects["x.h5"] = server.objects["x.h5"][:100_000]
    with pytest.raises(DataError, match=r"x\.h5 is no complete HDF5 file"):
        Hdf5(f"{server.address}/x.h5")


def test_an_object_of_fsspecs_that_changes_is_an_error() -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/changing/a.bin", b"1" * 100)
    source = Records("memory://changing/a.bin", "u1", 10)
    assert source.read(1) == b"1" * 10

    files.pipe_file("/changing/a.bin", b"2" * 100)
    with pytest.raises(DataError, match=r"a\.bin was written again since it was listed"):
        source.read(1)
    source.close()


def test_closing_ends_what_waits_to_be_tried_again(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(requests, name, 3600.0)
    monkeypatch.setattr(random, "random", lambda: 0.9)
    server.objects["data.bin"] = CONTENT
    source = Records(f"{server.address}/data.bin", "u1", 10_000)
    server.fault = lambda request: Answer(status=503)
    found = objects_in(source)
    assert found is not None
    errors: list[BaseException] = []

    def read() -> None:
        try:
            source.read(3)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: "retry 1 after 503 Service Unavailable, failing for" in found.waits())
    assert found.waits().startswith(f"waits for {server.address}/data.bin, ")

    source.close()

    thread.join(patient(20))
    assert [type(error) for error in errors] == [ClosedError]
    server.fault = lambda request: None
    assert source.read(3) == record(3)
    source.close()


def test_a_source_that_is_closed_in_the_midst_of_requests_reads_groups_again(server: WebServer) -> None:
    server.objects["data.bin"] = CONTENT
    records = Records(f"{server.address}/data.bin", "u1", 10_000)
    into = np.zeros(80_000, np.uint8)
    begins = 10_000 * np.arange(9)
    server.seconds = 1.5
    thread = threading.Thread(target=read_group, args=(records, np.arange(8), into.copy(), begins))
    thread.start()
    wait_until(lambda: server.under_way == 8)
    records.close()  # its threads end after a moment
    server.seconds = 0.05
    thread.join()

    assert read_group(records, np.arange(8), into, begins) == []
    found = objects_in(records)
    assert found is not None
    assert found._limit.in_flight == 0
    assert into.tobytes() == CONTENT[:80_000]
    records.close()


def test_the_requests_of_a_group_are_under_way_at_once(server: WebServer, records: Records) -> None:
    server.together = 8
    ids = np.arange(8)
    into = np.zeros(80_000, np.uint8)

    assert read_group(records, ids, into, 10_000 * np.arange(9)) == []

    assert into.tobytes() == CONTENT[:80_000]
    assert server.most_at_once == 8


@pytest.mark.parametrize("is_selection", [False, True])
def test_merged_reads_of_a_group_are_under_way_at_once(
    server: WebServer, records: Records, is_selection: bool
) -> None:
    source: Records | Selection = records.select(slice(None)) if is_selection else records
    ids = np.array([8, 0, 9, 1, 4, 5])
    extents = Extents(*records.extents(ids))
    reads = merge_reads(extents, lambda requests, nbytes: requests * 1e-6 + nbytes * 1e-9)
    assert len(reads) == 3
    into = np.zeros(60_000, np.uint8)
    server.together = 3
    server.fault = lambda request: Answer(status=403) if request.between == (40_000, 60_000) else None
    before = len(server.requests)

    assert read_all_merged(source, reads, ids[reads.which], into, 10_000 * np.arange(7)) == []

    assert into.tobytes() == b"".join(record(number) for number in ids[reads.which])
    assert server.most_at_once == 3
    # One was refused, so that each of its samples was read by itself.
    assert len(server.requests) == before + 3 + 1 + 2


def test_one_bad_object_of_a_group_does_not_spoil_the_others(server: WebServer, records: Records) -> None:
    server.fault = lambda request: Answer(status=403) if request.between == (20_000, 30_000) else None
    into = np.zeros(50_000, np.uint8)

    ((index, error),) = read_group(records, np.arange(5), into, 10_000 * np.arange(6))

    assert (index, type(error)) == (2, DataError)
    assert into[30_000:].tobytes() == CONTENT[30_000:50_000]


FORKS = """
import os, sys
from penstock.errors import ConfigError
from penstock.store import Records
source = Records(sys.argv[1], "u1", 10_000)
source.read(3)
if os.fork() == 0:
    try:
        source.read(3)
    except ConfigError as error:
        os.write(1, str(error).encode())
    finally:
        os._exit(0)
os.wait()
source.close()
"""


def test_a_forked_child_is_told_that_it_cannot_read(server: WebServer, interpreters: Interpreters) -> None:
    server.objects["data.bin"] = CONTENT

    done = interpreters.run(FORKS, f"{server.address}/data.bin")

    assert done.returncode == 0, done.stderr
    assert "this process was forked from one that has read from a remote store" in done.stdout
    assert "start processes with the method spawn or forkserver" in done.stdout


@pytest.mark.parametrize("decoders", [0, None])
def test_ctrl_c_ends_the_wait_for_a_store_that_fails(server: WebServer, decoders: int | None) -> None:
    server.objects["data.bin"] = CONTENT
    patient_source = Records(f"{server.address}/data.bin", "u1", 10_000)
    with Loader(patient_source, batch_size=2, epochs=1, report=None, decoders=decoders) as waiting:
        server.fault = lambda request: Answer(status=503)
        found = objects_in(patient_source)
        assert found is not None

        def interrupt() -> None:
            wait_until(found.waits)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(waiting))
        interrupter.join()


# -- Listing -------------------------------------------------------------------------------------------


def test_a_second_start_lists_and_indexes_nothing_that_did_not_change(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 100)
    from tests.contracts.test_source_contract import write_tar

    for shard in range(2):
        members = {f"{k:04}.jpg": bytes([shard, k % 256]) * 20 for k in range(60)}
        write_tar(tmp_path / f"{shard}.tar", members)
    server.objects = objects_of_folder(tmp_path)
    address = f"{server.address}/{{0..1}}.tar"
    TarShards(address).close()
    before = len(server.requests)

    source = TarShards(address)

    assert [each.method for each in server.requests[before:]] == ["HEAD", "HEAD"]
    write_tar(tmp_path / "1.tar", {"0000.jpg": b"other"})
    server.objects["1.tar"] = (tmp_path / "1.tar").read_bytes()
    before = len(server.requests)
    source.close()
    source = TarShards(address)
    assert len(source) == 61
    assert {each.path for each in server.requests[before:] if each.method == "GET"} == {"1.tar"}
    source.close()


def test_a_folder_that_did_not_change_keeps_its_catalog_and_one_that_did_does_not(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 100)
    server.objects = {f"set/{k % 2}/{k:04}.png": bytes([k % 256]) * 8 for k in range(120)}
    source = open_source(f"{server.address}/set")
    again = open_source(f"{server.address}/set")
    assert again.catalog is not None
    assert source.catalog is not None
    assert again.catalog.digest() == source.catalog.digest()

    server.objects["set/0/0000.png"] = b"other..."
    changed = open_source(f"{server.address}/set")
    assert changed.catalog is not None
    assert changed.catalog.digest() != source.catalog.digest()
    old = open_source(f"{server.address}/set", refresh="never")
    assert old.catalog is not None
    assert old.catalog.digest() == changed.catalog.digest()
    for each in (source, again, changed, old):
        each.close()


def test_a_list_on_this_host_names_addresses(server: WebServer, tmp_path: Path) -> None:
    server.objects = {"x/a.png": b"aa", "y/b.png": b"bbb"}
    rows = [f"{server.address}/y/b.png,1", f"{server.address}/x/a.png,0"]
    (tmp_path / "list.csv").write_text("\n".join(rows))

    source = open_source(tmp_path / "list.csv")

    assert [source.read(k) for k in range(2)] == [b"bbb", b"aa"]
    source.close()
    assert no_request_threads()

    del server.objects["y/b.png"]
    with pytest.raises(DataError, match=r"y/b\.png has vanished"):
        open_source(tmp_path / "list.csv", refresh="full")
    assert no_request_threads()


@pytest.mark.parametrize("heading", ["path,label", "file_name,kind"])
def test_a_list_at_an_address_names_nothing_of_another_store(server: WebServer, heading: str) -> None:
    """Else whoever writes the list has credentials of its store sent elsewhere, or files of this host read."""
    for other in ("http://elsewhere.invalid/b.png", "file:///etc/passwd"):
        text = f"{heading}\n{server.address}/a.png,0\n{other},1\n"
        server.objects = {"a.png": b"aa", "list.csv": text.encode()}

        with pytest.raises(DataError, match=f"list.csv, line 3: {other} is in another store than the list"):
            open_source(f"{server.address}/list.csv")

    for other, wrong in (
        ("http:///b.png", "names no bucket or host"),
        ("http://a:b@c/d.png", "has a password"),
    ):
        text = f"{heading}\n{server.address}/a.png,0\n{other},1\n"
        server.objects = {"a.png": b"aa", "list.csv": text.encode()}

        with pytest.raises(DataError, match=f"list.csv, line 3: .*{wrong}"):
            open_source(f"{server.address}/list.csv")


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv"])
def test_a_table_at_an_address_names_files_beside_it(server: WebServer, name: str, tmp_path: Path) -> None:
    text = {
        "train.jsonl": '{"file_name": "x/a.png", "label": 0.5}\n{"file_name": "y/b.png", "label": 2}\n',
        "train.csv": "file_name,label\nx/a.png,0.5\ny/b.png,2\n",
    }[name]
    server.objects = {
        f"d/{name}": text.encode(),
        "d/x/a.png": b"aa",
        "d/y/b.png": b"bbb",
        "e/x/a.png": b"cccc",
    }
    address = f"{server.address}/d/{name}"

    for source in (open_source(address), Manifest(address, labels="label", refresh="full")):
        assert isinstance(source, Manifest)
        assert [source.read(k) for k in range(2)] == [b"aa", b"bbb"]
        assert np.asarray(source.labels).tolist() == [0.5, 2]
        source.close()
    (tmp_path / "here.csv").write_text("file,label\nx/a.png,1\n")
    elsewhere = Manifest(tmp_path / "here.csv", folder=f"{server.address}/e")
    assert elsewhere.read(0) == b"cccc"
    elsewhere.close()
    server.objects[f"d/{name}"] = b"file_name\n\xff\n"
    with pytest.raises(DataError, match=f"{name}, line 2: is no text in UTF-8"):
        Manifest(address, file="file_name")


def test_tokens_and_labels_come_from_addresses(server: WebServer) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    labels = io.BytesIO()
    np.save(labels, np.arange(10))
    rows = io.BytesIO()
    np.save(rows, np.zeros((10, 4), np.float32))
    server.objects = {"t.bin": tokens.tobytes(), "l.npy": labels.getvalue(), "x.npy": rows.getvalue()}

    source = Tokens(f"{server.address}/t.bin", length=9, dtype="uint16")
    assert np.frombuffer(source.read(2), np.uint16).tolist() == list(range(18, 28))
    labelled = Arrays(f"{server.address}/x.npy", labels=f"{server.address}/l.npy")
    assert isinstance(labelled.labels, np.ndarray)
    assert labelled.labels.tolist() == list(range(10))
    source.close()
    labelled.close()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("missing", "/missing has vanished or was never there"),
        ("set/*.tar", r"no object fits .*/set/\*\.tar, asked as anonymous"),
        ("set/x.h5", r"set/x\.h5 has vanished or was never there"),
    ],
)
def test_what_is_not_there_is_named(server: WebServer, place: str, message: str) -> None:
    server.objects = {"set/a.png": b"a"}

    with pytest.raises((DataError, ConfigError), match=message):
        open_source(f"{server.address}/{place}")


def test_a_server_that_lists_nothing_says_so(server: WebServer) -> None:
    server.objects = {"set/a.png": b"a"}
    server.lists = False

    with pytest.raises(DataError, match="/set has vanished or was never there"):
        open_source(f"{server.address}/set")


@for_each(
    ("place", "options", "message"),
    [
        ("/tmp/x", {"anon": True}, r"storage_options \(anon\) are of an address .* /tmp/x is a path"),
        (
            "s3://bucket",
            {"retry_seconds": 0},
            "retry_seconds of storage_options is 0; it is a number of seconds above zero",
        ),
        ("s3://", None, "names no bucket or host"),
        (
            "http://x/y",
            {"zzz": "me"},
            r"storage_options has 'zzz', which http:// does not take: correct its name",
        ),
        ("http://x/y", {"usr": "me"}, "has 'usr', which http:// does not take: 'username' is alike"),
        ("http://x/y", {"params": 5}, "http://x cannot be opened with these storage_options: "),
        ("http://x/a.tar?sig=5", None, r"^http://x/a\.tar\?\.\.\.: what is behind the \? .*={'params': "),
        (
            "pipe:aws s3 cp s3://b/{0..9}.tar -",
            None,
            r"^pipe:aws s3 cp .* runs a command, .*: give the files",
        ),
        ("s3://x/y", {"end_point_url": "me"}, "which s3:// does not take: 'endpoint_url' is alike"),
        ("nosuch://x/y", None, "nosuch://x cannot be opened"),
        (["s3://a/b.tar", "/c.tar"], None, "the list has paths and addresses"),
    ],
)
def test_what_cannot_be_opened_is_said(place: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(place, storage_options=options)


@pytest.mark.parametrize("params", ["?sig=a%2Fb", {"sig": "a/b"}])
def test_a_signature_of_get_reads_shards_and_is_shown_nowhere(
    server: WebServer, tmp_path: Path, params: Any
) -> None:
    local = tar_shards(tmp_path)
    server.objects = {f"{name}?sig=a/b": data for name, data in objects_of_folder(tmp_path).items()}
    server.fault = lambda request: None if request.method == "GET" else Answer(status=403)

    with closing(TarShards(f"{server.address}/{{0..8}}.tar", storage_options={"params": params})) as source:
        check_reads(source, local)
        with closing(pickle.loads(pickle.dumps(source))) as again:
            check_reads(again, local)
        server.objects.clear()
        with pytest.raises(DataError, match=r"vanished .* asked as the params given") as caught:
            source.read(0)
    assert "sig=" not in "".join(traceback.format_exception(caught.value))


def test_the_key_that_finds_nothing_is_named_and_its_secret_is_not(signed_s3_options: dict[str, str]) -> None:
    with pytest.raises(DataError) as caught:
        Records("s3://bucket/nothing.bin", "u1", 10, storage_options=signed_s3_options)
    assert f"asked as {signed_s3_options['key']}" in str(caught.value)
    assert signed_s3_options["secret"] not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"secret": "hushhush"}, {"key": "nobody", "secret": "hushhush"}, {"anon": True}]
)
def test_who_is_refused_is_named(signed_s3_options: dict[str, str], wrong: dict[str, Any]) -> None:
    options = {**signed_s3_options, **wrong}
    if "anon" in wrong:
        del options["key"], options["secret"]
    who = "anonymous" if "anon" in wrong else options["key"]

    with pytest.raises(
        DataError, match=f"s3://bucket/x.bin may not be read by {who} .403 Forbidden."
    ) as caught:
        Records("s3://bucket/x.bin", "u1", 10, storage_options=options)
    assert "hushhush" not in str(caught.value)


def test_credentials_are_found_where_awss_tools_find_them(
    signed_s3_options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = signed_s3_options["key"], signed_s3_options["secret"]
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id={key}\naws_secret_access_key={secret}\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "found.bin").write_bytes(CONTENT)
    put_all(signed_s3_options, "credentials", tmp_path / "data")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_ENDPOINT_URL", signed_s3_options["endpoint_url"])

    assert Objects().identity("s3://bucket/x") == key
    source = Records("s3://bucket/credentials/found.bin", "u1", 10_000)
    assert source.read(3) == record(3)
    source.close()


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_store_that_does_not_answer_is_reported_with_the_retry_and_its_cause(
    refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.calls._FAILING_SECONDS", 0.01)
    lines: list[str] = []

    with pytest.raises(DataError, match="check the address, as nothing has answered there yet"):
        open_source(
            f"{refusing}/a.tar", calls=Calls(report=lines.append), storage_options={"retry_seconds": 0.5}
        )

    assert lines
    wanted = rf"waits for {refusing}/a.tar, retry \d+ after a broken or refused connection, failing for .*s"
    assert all(re.fullmatch(wanted, line) for line in lines)


def test_a_store_that_has_never_answered_is_given_up_sooner(
    refusing: str, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.remote.FIRST_ANSWER_SECONDS", 0.01)
    server.objects["a"] = b"content"

    for objects in (Objects(), pickle.loads(pickle.dumps(Objects()))):
        with pytest.raises(DataError, match="nothing has answered there yet"):
            objects.facts([f"{refusing}/a"])
        # One that has answered is waited for as ever.
        facts = objects.facts([f"{server.address}/a"])[0]
        server.fault = first(Answer(reset=True), 5)
        assert objects.content(facts) == b"content"
        objects.close()


def test_a_redirect_in_a_circle_is_an_error_at_once(server: WebServer) -> None:
    server.fault = lambda request: Answer(status=302, location=f"{server.address}/a.bin")

    with pytest.raises(DataError, match="it leads from one address to the next without an end"):
        Objects().facts([f"{server.address}/a.bin"])


class Hub(dict[str, bytes]):
    """Files of the data set me/rows as Hugging Face's hub serves them, and what its interface says of them."""

    FILES, INTERFACE = "datasets/me/rows/resolve/main/", "api/datasets/me/rows"

    def get(self, path: str, default: Any = None) -> Any:
        if not path.startswith(self.INTERFACE):
            return super().get(path, default)
        kind, _, folder = path.partition("?")[0].removeprefix(self.INTERFACE).partition("/main")
        if kind != "/tree":
            return json.dumps({"id": "me/rows", "sha": "0" * 40, "private": False}).encode()
        names = {name.removeprefix(self.FILES): len(content) for name, content in self.items()}
        within = [
            {"type": "file", "path": name, "size": nbytes, "oid": "0" * 40}
            for name, nbytes in names.items()
            if name.startswith(folder.strip("/"))
        ]
        return json.dumps(within).encode()


def test_a_data_set_of_the_hub_is_read_by_its_own_driver(server: WebServer, tmp_path: Path) -> None:
    import huggingface_hub  # which takes a second, and no other test

    table = pa.table({"image": [bytes([row]) * 2000 for row in range(40)], "label": list(range(40))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10, compression="none")
    content = (tmp_path / "rows.parquet").read_bytes()
    server.objects = Hub({f"{Hub.FILES}data/{name}.parquet": content for name in "ab"})
    options = {"endpoint": server.address, "token": False}

    with closing(ParquetFiles("hf://datasets/me/rows/data/*.parquet", storage_options=options)) as source:
        assert [source.read(sample) for sample in range(80)] == 2 * table["image"].to_pylist()
        assert np.asarray(source.labels).tolist() == 2 * list(range(40))
        server.fault = lambda request: Answer(status=403)
        with pytest.raises(DataError, match=r"hf://datasets/me/rows/data may not be read .*\(403\)"):
            ParquetFiles("hf://datasets/me/rows/data/*.parquet", storage_options=options, refresh="full")
    huggingface_hub.close_session()


class Hadoop(dict[str, bytes]):
    """Files as a cluster has them, by Hadoop's page on WebHDFS: a name node lists, and a data node reads."""

    NAME_NODE, DATA_NODE = "webhdfs/v1/", "datanode/webhdfs/v1/"

    def __init__(self, files: dict[str, bytes], server: WebServer) -> None:
        super().__init__(files)
        self.address = server.address
        server.objects, server.fault = self, self.redirect

    @staticmethod
    def error(status: int, exception: str) -> Answer:
        about = {"exception": exception, "javaClassName": f"org.apache.{exception}", "message": "x" * 20_000}
        return Answer(status, body=json.dumps({"RemoteException": about}).encode())

    def after(self, faults: Iterator[Answer | None], request: Request) -> Answer | None:
        return next(faults, None) or self.redirect(request)

    def redirect(self, request: Request) -> Answer | None:
        name, _, query = request.path.partition("?")
        if name.startswith(self.DATA_NODE):
            return None
        name = name.removeprefix(self.NAME_NODE)
        if not any(each == name or each.startswith(f"{name}/") for each in self):
            return self.error(404, "FileNotFoundException")
        place = f"{self.address}/{self.DATA_NODE}{quote(name)}?{query}&namenoderpcaddress=node:9000"
        return Answer(307, location=place) if "op=OPEN" in query else None

    def status(self, name: str, suffix: str) -> dict[str, Any]:
        content = super().get(name)
        return {
            "pathSuffix": suffix,
            "type": "DIRECTORY" if content is None else "FILE",
            "length": len(content or b""),
            "modificationTime": 1320171722771,
            "owner": "me",
            "permission": "644",
            "replication": 3,
        }

    def get(self, path: str, default: Any = None) -> Any:
        name, _, query = path.partition("?")
        name, asked = name.removeprefix(self.DATA_NODE).removeprefix(self.NAME_NODE), dict(parse_qsl(query))
        if asked["op"] == "OPEN":
            begin = int(asked.get("offset", 0))
            content = self[name][begin:]
            return content[: int(asked.get("length", len(content)))]
        if asked["op"] == "GETFILESTATUS":
            return json.dumps({"FileStatus": self.status(name, "")}).encode()
        assert asked["op"] == "LISTSTATUS"
        inside = {
            each.removeprefix(f"{name}/").partition("/")[0] for each in self if each.startswith(f"{name}/")
        }
        found = [self.status(f"{name}/{each}", each) for each in sorted(inside)]
        return json.dumps({"FileStatuses": {"FileStatus": found}}).encode()


def test_files_of_hadoop_are_read_by_its_rest_interface(server: WebServer, tmp_path: Path) -> None:
    local = image_folder(tmp_path)
    cluster = Hadoop({f"a b/{name}": data for name, data in objects_of_folder(tmp_path).items()}, server)
    place = server.address.replace("http", "webhdfs")

    with closing(open_source(f"{place}/a b", storage_options={"user": "me"})) as source:
        assert isinstance(source, ImageFolder)
        check_reads(source, local)
    assert all("user.name=me" in each.path for each in server.requests)

    cluster["data.bin"] = CONTENT
    with closing(Records(f"{place}/data.bin", "u1", 10_000, storage_options={"user": "me"})) as records:
        server.requests.clear()
        assert records.read(3) == record(3)
        assert sum("op=OPEN" in each.path and "length=10000" in each.path for each in server.requests) == 2

        # What may pass is asked for again: a name node that stands by, a data node that is overloaded.
        for answer in (cluster.error(403, "StandbyException"), cluster.error(503, "IOException")):
            faults = iter([answer] if answer.status == 403 else [None, answer])
            server.fault = partial(cluster.after, faults)
            assert records.read(4) == record(4)
            assert next(faults, "all were given") == "all were given"

        # And what a data node says of an error is not taken for the content.
        forbidden = cluster.error(403, "AccessControlException")
        server.fault = lambda request: forbidden if "datanode" in request.path else cluster.redirect(request)
        with pytest.raises(DataError, match=r"data\.bin may not be read .*me"):
            records.read(5)
        # What stays as it is is asked for once.
        final = cluster.error(403, "InvalidToken")
        server.fault = lambda request: final
        server.requests.clear()
        with pytest.raises(DataError, match=r"data\.bin may not be read .*InvalidToken"):
            records.read(6)
        assert len(server.requests) == 1
    server.fault = cluster.redirect
    with pytest.raises(DataError, match=r"not-there\.bin.*(not found|404)"):
        Records(f"{place}/not-there.bin", "u1", 10_000)
    with pytest.raises(ConfigError, match=r"'usr', which webhdfs:// does not take: 'user' is alike"):
        Records(f"{place}/data.bin", "u1", 10_000, storage_options={"usr": "me"})


class Native(MemoryFileSystem):  # type: ignore[misc]
    """What is peculiar to the driver of `hdfs-native`, over files in memory."""

    __module__, protocol = "hdfs_native.fsspec", "hdfs"
    refused = ""

    def __init__(self, host: str, port: int, **settings: str) -> None:
        super().__init__()
        assert set(map(type, settings.values())) <= {str}, "each is a setting of Hadoop, which is a text"

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": "node", "port": 8020}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return urlsplit(path).path

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        if self.refused:
            raise RuntimeError(f'RPCError("{self.refused}", "refused")')
        found = dict(super().info(path, **more))
        return found | {"modification_time": int(found.pop("created").timestamp() * 1e6)}


def test_hdfs_native_gets_texts_alone_and_its_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("hdfs", Native, clobber=True)
    files = fsspec.filesystem("memory")
    files.pipe_file("/native/a.bin", b"1" * 100)
    with closing(
        Records("hdfs://node:8020/native/a.bin", "u1", 10, storage_options={"dfs.block.size": "1"})
    ) as source:
        assert source.read(1) == b"1" * 10

        monkeypatch.setattr(Native, "refused", "org.apache.hadoop.security.AccessControlException")
        with pytest.raises(DataError, match=r"a\.bin may not be read .*AccessControlException"):
            source.read(2)
        answers = iter(["org.apache.hadoop.ipc.StandbyException", ""])
        monkeypatch.setattr(Native, "refused", property(lambda self: next(answers, "")))
        assert source.read(2) == b"1" * 10
        assert next(answers, "all were given") == "all were given"

        files.pipe_file("/native/a.bin", b"2" * 100)
        with pytest.raises(DataError, match=r"a\.bin was written again since it was listed"):
            source.read(1)


@pytest.mark.slow
def test_files_of_hdfs_are_read_by_hdfs_native_without_java(
    tmp_path: Path, interpreters: Interpreters
) -> None:
    """In a process of its own, as the driver's threads stay."""
    program = "import sys; from tests.store import test_remote as t; t.check_hdfs(t.Path(sys.argv[1]))"
    done = interpreters.run(program, str(tmp_path))
    assert done.returncode == 0, done.stderr


def check_hdfs(folder: Path) -> None:
    """Read from a server that answers as HDFS does."""
    fsspec.register_implementation("hdfs", "hdfs_native.fsspec.HdfsFileSystem", clobber=True)
    local = image_folder(folder)
    with hdfs_server.serving() as cluster:
        cluster.files.update({f"/train/{name}": data for name, data in objects_of_folder(folder).items()})
        with closing(open_source(f"{cluster.address}/train")) as pictures:
            assert isinstance(pictures, ImageFolder)
            check_reads(pictures, local)

        cluster.files["/data.bin"] = CONTENT
        with closing(Records(f"{cluster.address}/data.bin", "u1", 10_000)) as source:
            with Loader(source, batch_size=4, epochs=1, shuffle=False, report=None) as loader:
                rows = [row.tobytes() for batch in loader for row in batch]
            assert rows == [record(number) for number in range(len(source))]

            cluster.reads.clear()
            assert source.read(3) == record(3)
            assert sum(cluster.reads) == 10_000, "no more is read than is asked for"

            cluster.refused["getFileInfo"] = "org.apache.hadoop.security.AccessControlException"
            with pytest.raises(DataError, match=r"data\.bin may not be read .*AccessControlException"):
                source.read(4)
            cluster.refused.clear()
            cluster.changed["/data.bin"] = 1
            with pytest.raises(DataError, match=r"data\.bin was written again since it was listed"):
                source.read(4)
        with pytest.raises(DataError, match=r"not-there\.bin has vanished or was never there"):
            Records(f"{cluster.address}/not-there.bin", "u1", 10_000)


def test_a_token_for_hadoop_is_in_no_error() -> None:
    refused = ConnectionError(
        "Max retries exceeded with url: /webhdfs/v1/a?op=OPEN&delegation=secret (refused)"
    )

    assert str(remote_clients._of_driver(refused)).count("secret") == 0


@pytest.mark.parametrize(("descriptors", "most"), [(-1, 1024), (100_000, 1024), (1024, 512), (10, 8)])
def test_connections_take_half_of_the_descriptors_at_most(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, most: int
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (descriptors, descriptors))

    objects = Objects()

    assert objects.most == most
    assert pickle.loads(pickle.dumps(objects)).most == most


@pytest.mark.usefixtures("obstore_threads", "fsspec_threads")
def test_objects_whose_server_does_not_say_their_size_are_read_once_to_find_out(tmp_path: Path) -> None:
    with serving({"a.bin": b"12345", "b.bin": b"123"}) as server:
        names = tmp_path / "list.txt"
        names.write_text(f"{server.address}/a.bin\n{server.address}/b.bin\n")
        server.fault = lambda request: Answer(sizeless=True)
        advice = r"does not say how large it is \(no Content-Length\), which storage_options={'block_size': 0} find out"
        with pytest.raises(DataError, match=advice):
            open_source(names)

        source = open_source(names, storage_options={"block_size": 0})

        assert source.sizes_bytes.tolist() == [5, 3]
        assert [source.read(0), source.read(1)] == [b"12345", b"123"]
        server.objects["a.bin"] = b"1234567"
        with pytest.raises(
            DataError, match=r"a\.bin was answered with 7 bytes or more where 5 were asked for"
        ):
            source.read(0)
        source.close()
