"""DLIO's workloads by its own loader for PyTorch and by Penstock's plug-ins, in turn: how busy the accelerator is.

    benchmarks/dlio/set_up.sh
    .venv/bin/python benchmarks/dlio/run.py                  # all workloads; about ten minutes
    .venv/bin/python benchmarks/dlio/run.py --workloads unet3d,checkpoint --repeats 3

Data are made once, in benchmarks/.cache/dlio-data (1.2 GB), and dropped from the page cache before each run. Steps are
slept through, as on a GPU: 52 of 150 to 300 ms an epoch, since utilisation of shorter ones measures DLIO itself; 60 of
100 ms between saves of 300 MB. Both sides have as many threads, or worker processes.

DLIO's utilisation leaves out the seconds in which it waits for a save, so the run's seconds are printed, too: from the
beginning of the first epoch until DLIO has closed everything. Penstock's snapshots are durable by then; what torch.save
wrote is not synced.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from penstock.measure.pagecache import drop_files

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache"
WORKLOADS = ("unet3d", "resnet50", "cosmoflow", "checkpoint")
LOADERS = {
    "pytorch": [],
    "penstock": [
        "++workload.reader.data_loader_classname=penstock_dlio.PenstockDataLoader",
        "++workload.reader.data_loader_sampler=index",
    ],
}
SAVES = "++workload.checkpoint.checkpoint_mechanism_classname=penstock_dlio.PenstockCheckpointing"


def dlio(workload: str, out: Path, data: Path, options: list[str]) -> None:
    """Run DLIO once. Raises: SystemExit with its output where it fails."""
    command = [str(CACHE / "dlio/bin/python"), "-m", "dlio_benchmark.main"]
    command += [f"--config-dir={HERE}", f"workload={workload}", f"hydra.run.dir={out}"]
    environment = os.environ | {"PYTHONPATH": str(HERE), "DFTRACER_ENABLE": "0"}
    done = subprocess.run([*command, *options], cwd=data, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(done.args)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


class Result:
    """What a run found: utilisation in per cent, seconds of the run, and how long DLIO waited for each save."""

    def __init__(self, out: Path) -> None:
        summary = json.loads((out / "summary.json").read_text("utf-8"))
        epochs = json.loads((out / "per_epoch_stats.json").read_text("utf-8"))
        begin, end = (
            datetime.datetime.fromisoformat(text) for text in (epochs["1"]["start"], summary["end"])
        )
        self.utilisation = float(summary["metric"]["train_au_mean_percentage"])
        self.run_seconds = (end - begin).total_seconds()
        self.saves = [
            float(found["duration"])
            for epoch in epochs.values()
            for name, found in epoch.items()
            if name.startswith("ckpt")
        ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="of benchmarks/dlio/workload, with commas"
    )
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(arguments)
    data = CACHE / "dlio-data"
    data.mkdir(parents=True, exist_ok=True)
    for workload in options.workloads.split(","):
        if not (data / "data" / workload).is_dir():
            made = ["++workload.workflow.generate_data=True", "++workload.workflow.train=False"]
            dlio(workload, data / "out", data, made)
        found: dict[str, list[Result]] = {name: [] for name in LOADERS}
        for number in range(options.repeats):
            for name in list(LOADERS)[:: -1 if number % 2 else 1]:
                drop_files(str(path) for path in (data / "data" / workload).rglob("*") if path.is_file())
                shutil.rmtree(data / "checkpoints", ignore_errors=True)
                out = data / "out" / f"{workload}-{name}"
                saves = [SAVES] if workload == "checkpoint" and name == "penstock" else []
                dlio(workload, out, data, LOADERS[name] + saves)
                found[name].append(Result(out))
        for name, results in found.items():
            shares = [result.utilisation for result in results]
            line = f"{workload:12}{name:10}utilisation {statistics.median(shares):6.2f} %"
            line += f" ({min(shares):.2f} to {max(shares):.2f})"
            line += f"   run {statistics.median(result.run_seconds for result in results):.2f} s"
            if waits := [seconds for result in results for seconds in result.saves]:
                line += f"   a save {statistics.median(waits):.3f} s, at most {max(waits):.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
