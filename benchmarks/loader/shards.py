"""Images per second from JPEG files in tar shards to float32 batches: Penstock, WebDataset, PyTorch over files.

    python benchmarks/loader/make_images.py      # once: 2,000 photographs, about 105 KB each
    sh benchmarks/loader/set_up_peers.sh         # once: WebDataset in an environment of its own
    python benchmarks/loader/shards.py [--quick] [--rounds N] [--only NAME...]

The photographs of images.py in 20 shards, made once, with the same transforms; the page cache is warm. Processes take
turns as there. Penstock shuffles fully. WebDataset shuffles shards and a buffer of 1,000 samples; DataLoader reads the
files themselves, shuffled fully. Each of them at the number of workers that is best for it.

Targets: 1.5 x WebDataset's rate, 2 x DataLoader's, each as most write it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import images
from images import Contender, run_rounds
from peer_protocol import CACHE, IMAGES

WEBDATASET = CACHE / "webdataset" / "bin" / "python"
SHARDS = 20
COMPARISONS = (
    ("penstock shards", "WebDataset opencv", 1.5),
    ("penstock shards", "WebDataset expert", None),
    ("penstock shards", "DataLoader opencv", 2.0),
    ("penstock shards", "DataLoader expert", None),
    ("penstock shards", "penstock files", None),
)


def write_shards(folder: Path, shards: Path) -> str:
    """Write an image folder as shards, unless that is done; return their pattern."""
    pattern = f"{shards}/photographs-{{000..{SHARDS - 1:03}}}.tar"
    if shards.exists():
        return pattern
    unfinished = shards.with_name(f"{shards.name}.part")
    unfinished.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder.glob("*/*.jpg"))
    labels = sorted({path.parent.name for path in paths})
    for shard in range(SHARDS):
        with tarfile.open(unfinished / f"photographs-{shard:03}.tar", "w") as tar:
            for number in range(shard, len(paths), SHARDS):
                label = str(labels.index(paths[number].parent.name)).encode()
                for ending, content in (("jpg", paths[number].read_bytes()), ("cls", label)):
                    member = tarfile.TarInfo(f"{number:06}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
    unfinished.rename(shards)
    return pattern


def contenders(folder: Path, pattern: str, threads: int, workers: list[int]) -> list[Contender]:
    def penstock(source: str) -> list[str]:
        options = ["--threads", str(threads), "--resampling", "bilinear", "--via", "loader"]
        return [sys.executable, "peer_penstock.py", "--images", source, *options]

    found = [
        Contender("penstock shards", penstock(pattern)),
        Contender("penstock files", penstock(str(folder))),
    ]
    for count in workers:
        for via in ("opencv", "expert"):
            common = ["--workers", str(count), "--via", via]
            command = [sys.executable, "peer_torch.py", "--images", str(folder), *common]
            found.append(Contender(f"DataLoader {via}, {count} workers", command))
            if WEBDATASET.exists():
                command = [str(WEBDATASET), "peer_webdataset.py", "--images", pattern, *common]
                found.append(Contender(f"WebDataset {via}, {count} workers", command))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=cores + 1, help="Penstock's decoding threads")
    parser.add_argument("--workers", type=int, nargs="+", default=[cores, 2 * cores])
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="one round: shows that it runs, not how fast")
    options = parser.parse_args(argv)
    if not options.images.exists():
        raise SystemExit("no images: run benchmarks/loader/make_images.py first")
    pattern = write_shards(options.images, CACHE / "shards")
    chosen = [
        contender
        for contender in contenders(options.images, pattern, options.threads, options.workers)
        if not options.only or any(part in contender.name for part in options.only)
    ]
    images.print_heading(options.images, options.threads)
    run_rounds(chosen, 1 if options.quick else options.rounds)
    images.report(chosen, COMPARISONS, ("DataLoader", "WebDataset"))


if __name__ == "__main__":
    main()
