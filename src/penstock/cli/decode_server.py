"""`penstock decode-server`: read and decode for trainings on other machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from penstock.cli.options import parsed_amount
from penstock.cli.output import add_command, print_line
from penstock.errors import ConfigError
from penstock.units import parse_bytes

_DESCRIPTION = """\
Reads and decodes samples of a data set for trainings on other machines, which name it in
Loader(decode_servers=[...]): it hands back crops as bytes, encrypted, to who has its key. It runs until Ctrl-C.
See docs/howto/decode-servers.md.
"""
_EPILOG = """\
examples:
  penstock decode-server photos/train --listen 10.0.0.7:7447
  penstock decode-server "shards/train-{000..099}.tar" --listen node7 --memory "64 GiB"
"""


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
        "--threads", type=int, metavar="N", help="threads that decode (default: two for each processor)"
    )


def _run(options: argparse.Namespace) -> None:
    from penstock.loader.decode_serving import serving
    from penstock.ranks.decode_access import address_of
    from penstock.store import open_source

    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}; at least one decodes")
    address = address_of(options.listen)
    memory_bytes = int(parsed_amount("--memory", parse_bytes, options.memory))
    with serving(
        open_source(options.source),
        address,
        key=options.key,
        memory_bytes=memory_bytes,
        threads=options.threads,
    ) as (server, _, lines):
        for line in lines:
            print_line(line)
        sys.stdout.flush()
        server.run()
