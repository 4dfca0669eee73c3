"""A command as a user types it, in this process and with the errors that `main` would print."""

from __future__ import annotations

import argparse
from typing import Any


def run_command(commands: Any, *words: object) -> None:
    """Run one of a module's commands. commands: the module, whose `add` adds them. words: of the command line."""
    parser = argparse.ArgumentParser()
    commands.add(parser.add_subparsers())
    options = parser.parse_args([str(word) for word in words])
    options.run(options)
