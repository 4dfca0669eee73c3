"""`penstock decode-server`: read and decode for trainings on other machines."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.graph import listening_worker
from penstock.cli.options import is_given, parsed_amount
from penstock.cli.output import add_command, print_line
from penstock.errors import ConfigError
from penstock.units import parse_bytes

if TYPE_CHECKING:
    from penstock.loader.decode_work import StoredSamples

_DESCRIPTION = """\
Reads and decodes samples of a data set for trainings on other machines, which name it in
Loader(decode_servers=[...]): it hands back crops as bytes, encrypted, to who has its key. It runs until Ctrl-C.
With --task it is a worker of graphs, too, for nodes that read, decode and crop. See docs/howto/decode-servers.md.
"""
_EPILOG = """\
examples:
  penstock decode-server photos/train --listen 10.0.0.7:7447
  penstock decode-server "shards/train-{000..099}.tar" --listen node7 --memory "64 GiB"
  penstock decode-server photos/train --listen node7 --task /job:decode/task:0 --graph-listen node7
"""
_GRAPH_LISTEN = "127.0.0.1"


def add_decode_server(commands: Any) -> None:
    summary = "read and decode for trainings on other machines"
    parser = add_command(commands, "decode-server", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "source", metavar="SOURCE", help="data set as a loader takes it: a folder, list, table, or shards"
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default="127.0.0.1",
        help='"host:port" of this machine, by which trainings reach it (%(default)s; port 7447)',
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="secret that the trainings have, too; made if it is not there "
        "(default: $PENSTOCK_DECODE_KEY, or ~/.config/penstock/decode-servers.key)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        default="1 GiB",
        help="memory to decode in, and to keep samples as stored (%(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads that decode for loaders (default: two for each processor)",
    )
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="name of a worker of graphs that it is, too, such as /job:decode/task:0: Call nodes find the function "
        "`samples` there, which reads",
    )
    parser.add_argument(
        "--graph-listen",
        metavar="ADDRESS",
        help=f'"host:port" for graphs, where --task is given ({_GRAPH_LISTEN}; port 7448)',
    )
    parser.add_argument(
        "--graph-key",
        type=Path,
        metavar="FILE",
        help="secret of the graph's workers, as of `penstock graph worker`",
    )
    parser.add_argument(
        "--module",
        metavar="MODULE",
        help="Python module with more `functions`, and `batches`, for graphs: such as a Loader of the data set",
    )


def _run(options: argparse.Namespace) -> None:
    from penstock.loader.decode_serving import serving
    from penstock.ranks.decode_access import address_of
    from penstock.store import open_source

    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}; at least one decodes")
    address = address_of(options.listen)
    memory_bytes = int(parsed_amount("--memory", parse_bytes, options.memory))
    _check_worker(options)
    with serving(
        open_source(options.source),
        address,
        key=options.key,
        memory_bytes=memory_bytes,
        threads=options.threads,
    ) as made:
        for line in made.report:
            print_line(line)
        sys.stdout.flush()
        with _worker(options, made.stored):
            made.server.run()


def _check_worker(options: argparse.Namespace) -> None:
    """Refuse what is wrong about the worker of graphs, before there is a key or a server. Raises: ConfigError."""
    if options.task is None:
        for name in ("graph_listen", "graph_key", "module"):
            if is_given(options, name):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} is for nodes of graphs: give the name of this worker, too, by --task"
                )
        return
    from penstock.graph.workers import access as of_graph
    from penstock.ranks import decode_access as of_trainings

    of_graph.check_task(options.task, "--task ")
    of_graph.address_of(options.graph_listen or _GRAPH_LISTEN)
    one, other = of_trainings.KEY.path(options.key), of_graph.KEY.path(options.graph_key)
    is_one = one.resolve() == other.resolve()
    if one.exists() and other.exists():
        is_one = of_trainings.KEY.read(one) == of_graph.KEY.read(other)
    if is_one:
        raise ConfigError(
            f"{other} has the graph's secret, and the trainings have the same in {one}: who has the graph's may read "
            "and write any file of this user, so name another file by --graph-key"
        )


def _worker(options: argparse.Namespace, stored: StoredSamples) -> contextlib.AbstractContextManager[Any]:
    """Return a worker that reads samples for graphs, to be entered; nothing without --task."""
    if options.task is None:
        return contextlib.nullcontext()
    from penstock.graph import SampleReader

    functions = {"samples": SampleReader(stored)}
    listen = options.graph_listen or _GRAPH_LISTEN
    return listening_worker(options.task, listen, options.graph_key, options.module, functions=functions)
