"""How processes on several machines find each other, and prove that they belong together: addresses, secret files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError

SECRET_BYTES = 32
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+))(?::(?P<port>\d{1,5}))?")


class Address(NamedTuple):
    """Where a process listens. host: a name or an address, of IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address_of(text: object, what: str, port: int) -> Address:
    """Return the address that a text says, "host", "host:7447" or "[::1]:7447".

    what: listens there, for the error; port: unless the text says one. Raises: ConfigError.
    """
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    port_or_default = port if found is None or found["port"] is None else int(found["port"])
    if found is None or not 0 < port_or_default < 1 << 16:
        raise ConfigError(f'{text!r:.80} is no address of a {what}: give "host:port", such as "node7:{port}"')
    return Address(found["six"] or found["host"], port_or_default)


def numeric(host: str) -> str:
    """Return the address of this host that a name stands for; ZeroMQ binds no names. Raises: ConfigError."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found: str = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
        return found
    except OSError as error:
        raise ConfigError(
            f"the address to listen at names {host!r}, which cannot be looked up: {error}; give another"
        ) from error


@contextlib.contextmanager
def needing_zmq(what: str, otherwise: str = "") -> Iterator[None]:
    """Raise ConfigError where what is imported inside needs pyzmq, and that is missing.

    what: "... needs pyzmq"; otherwise: what else can be done.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what}, which is not installed: pip install 'penstock[peers]'{otherwise}"
        ) from error


@dataclass(frozen=True, slots=True)
class SecretFile:
    """A secret of 32 bytes that processes of several machines have in a file.

    what: it belongs to; made_by: the command that makes one. variable: of the environment, names another file;
    name: of the file in the user's configuration.
    """

    what: str
    made_by: str
    variable: str
    name: str

    def path(self, given: str | os.PathLike[str] | None = None) -> Path:
        """Return the path of the secret: a given one, the environment's, or one in the user's configuration."""
        if path := given or os.environ.get(self.variable):
            return Path(path)
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        return Path(config, "penstock", self.name)

    def read(self, path: Path) -> bytes:
        """Return the 32 bytes of a secret's file. Raises: ConfigError where there is none, or others may read it."""
        try:
            mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text("ascii").strip()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} with the key of the {self.what} is not there: {self.made_by} makes one; copy its file to "
                f"here, or name another as ${self.variable}"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} with the key of the {self.what} cannot be read: {error}") from error
        if mode & 0o077:
            raise ConfigError(
                f"{path} has a key, and others may read or write it (mode {mode:04o}): chmod 600 {path}, or make a "
                "new one"
            )
        if not re.fullmatch(f"[0-9a-f]{{{2 * SECRET_BYTES}}}", text):
            raise ConfigError(
                f"{path} has no key of {self.what}, which is {2 * SECRET_BYTES} hexadecimal digits: remove the file "
                f"and let {self.made_by} make one"
            )
        return bytes.fromhex(text)

    def make(self, path: Path) -> bool:
        """Write a new secret unless the file exists; return whether it did not. Raises: ConfigError."""
        if path.exists():
            return False
        own = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(
                os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
            ) as file:
                file.write(f"{secrets.token_hex(SECRET_BYTES)}\n")
            try:
                os.link(own, path)  # of several that start at once, one wins
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(OSError):
                    own.unlink()
        except OSError as error:
            raise ConfigError(f"{path} for the key of the {self.what} cannot be written: {error}") from error
        return True
