"""What it costs to hand a tensor from one process to another in TensorFlow and in Ray, for benchmarks/graph/workers.py.

    python benchmarks/graph/rivals.py [--repeats N]

TensorFlow's gRPC: the same chain of negations that take turns on two servers, in TensorFlow's own graph mode; a hop is
the difference between a chain of 22 hops and one of two. Ray: half of an actor's round trip, which is a call, too.
Medians, and the least. Needs tensorflow and ray. Nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

SIZES = {"4 KiB": 4 << 10, "10 MiB": 10 << 20}
HOPS = 22
SERVER = """
import sys
import tensorflow as tf
tf.compat.v1.train.Server({"worker": sys.argv[1:]}, job_name="worker", task_index=1)
print(flush=True)
sys.stdin.read()
"""
ADDRESSES = ["127.0.0.1:45831", "127.0.0.1:45832"]


def seconds_of(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return the median and the least time of a call."""
    call()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took), min(took)


@contextlib.contextmanager
def second_server() -> Iterator[None]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVER, *ADDRESSES], stdin=pipe, stdout=pipe) as server:
        assert server.stdout is not None, "it is a pipe"
        server.stdout.readline()
        yield
        server.kill()


def tensorflow_hops(repeats: int) -> Iterator[tuple[str, float, float]]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    options = v1.ConfigProto()
    options.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    options.graph_options.rewrite_options.disable_meta_optimizer = True  # which would merge two negations
    with second_server():
        own = v1.train.Server({"worker": ADDRESSES}, job_name="worker", task_index=0)
        for name, nbytes in SIZES.items():
            graph = v1.Graph()
            with graph.as_default():
                with v1.device("/job:worker/task:0"):
                    ones = v1.ones_initializer()
                    start = v1.get_variable(
                        "x", [nbytes // 4], initializer=ones, use_resource=True
                    ).read_value()
                ends = []
                for hops in (2, HOPS):
                    x = start
                    for hop in range(hops + 1):
                        with v1.device(f"/job:worker/task:{hop % 2}"):
                            x = -x
                    ends.append(x.op)
                init = v1.global_variables_initializer()
            with v1.Session(own.target, graph=graph, config=options) as session:
                session.run(init)
                short, long = (seconds_of(partial(session.run, end), repeats) for end in ends)
            yield name, (long[0] - short[0]) / (HOPS - 2), (long[1] - short[1]) / (HOPS - 2)


def ray_hops(repeats: int) -> Iterator[tuple[str, float, float]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    class Echo:
        def give(self, x: Any) -> Any:
            return x

    actor: Any = ray.remote(Echo).remote()
    for name, nbytes in SIZES.items():
        x = np.zeros(nbytes, np.uint8)
        median, least = seconds_of(partial(lambda given: ray.get(actor.give.remote(given)), x), repeats)
        yield name, median / 2, least / 2
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    for rival, hops in (("TensorFlow's gRPC", tensorflow_hops), ("Ray", ray_hops)):
        for name, median, least in hops(repeats):
            print(f"{rival}, {name}: {1e6 * median:,.0f} us a hop, {1e6 * least:,.0f} at least", flush=True)


if __name__ == "__main__":
    main()
