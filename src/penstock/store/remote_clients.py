"""Clients of stores: obstore for S3, Google's and web servers, fsspec for all else that it reaches.

Each call is one attempt: retries of their own are turned off, as `penstock.store.remote` decides them. Which of the two
a store gets is decided in decisions/0024.
"""

from __future__ import annotations

import asyncio
import base64
import difflib
import functools
import html
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, cast
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

import numpy as np

from penstock.errors import ConfigError
from penstock.store.object_store import (
    Facts,
    ObjectStore,
    Piece,
    RequestError,
    check_address,
    stamp_of_tag,
    without_secrets,
)
from penstock.units import format_count

ANONYMOUS = "anonymous"
_CONNECT_SECONDS = 5.0
#: Of a body, at a time where it is longer: a store may answer with more than was asked for.
_CHUNK_BYTES = 4 << 20
#: A web server that has no ranges sends all of an object for each sample: up to so many bytes that is borne.
_MOST_WHOLE_BYTES = 64 << 20
#: An index page of more is not one.
_MOST_PAGE_BYTES = 64 << 20
_LISTED_AT_ONCE = 1000

#: Answers that ask for fewer requests, and others that may pass.
_REFUSED, _PASSING = (408, 429, 503, 504), range(500, 600)
_LASTING = (501, 505)

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z' -]*)")
_HREF = re.compile(rb"""<a\s[^>]*?href\s*=\s*["']([^"'#]+)["']""", re.IGNORECASE)

_WITHOUT_SIZE = (
    "its server does not say how large it is (no Content-Length), which storage_options={'block_size': 0} find out by "
    "reading each object once"
)

#: What fsspec's drivers call things, and obstore does.
_S3_OPTIONS = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
_S3_FLAGS = {"anon": "skip_signature", "requester_pays": "request_payer"}
_S3_KNOWN = {*_S3_OPTIONS, *_S3_FLAGS, "endpoint_url", "profile", "client_kwargs"}
_WEB_KNOWN = {"headers", "username", "password", "params"}
_S3_CLIENT_KNOWN = {"endpoint_url", "region_name", "verify"}


def root_of(address: str) -> str:
    """Return the part of an address that names a store: scheme, and bucket or host. Raises: ConfigError."""
    check_address(address)
    parts = urlsplit(address)
    if parts.scheme in ("s3", "s3a", "gs", "gcs", "http", "https") and not parts.netloc:
        raise ConfigError(f"{address!r} names no bucket or host: give one, as in s3://bucket/train")
    return f"{parts.scheme}://{parts.netloc}"


def client_of(root: str, options: Mapping[str, Any], timeout_seconds: float) -> ObjectStore:
    """Return a client of a store. options: as fsspec's driver takes them.

    Raises: ConfigError for options that cannot be, or a driver that is not installed.
    """
    scheme = urlsplit(root).scheme
    if scheme in ("http", "https") and not options.keys() - _WEB_KNOWN:
        return _web_store(root, options, timeout_seconds)
    client = options.get("client_kwargs") or {}
    if scheme in ("s3", "s3a") and not options.keys() - _S3_KNOWN and not client.keys() - _S3_CLIENT_KNOWN:
        return _s3_store(root, options, timeout_seconds)
    if scheme in ("gs", "gcs") and not options:
        return _google_store(root, timeout_seconds)
    return ByFsspec(root, options)


def _obstore() -> Any:
    try:
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            f"reading from this address needs the package obstore ({error}): pip install 'penstock[remote]'"
        ) from error
    _check_process()
    return obstore


def _check_process() -> None:
    if _first_process() != os.getpid():
        raise ConfigError(
            f"this process was forked from one that has read from a remote store, whose threads are not in it "
            f"(process {_first_process()}): start processes with the method spawn or forkserver, or open the data "
            "set in them alone"
        )


@functools.cache
def _first_process() -> int:
    return os.getpid()


def _settings(timeout_seconds: float, is_plain: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all of obstore's stores get."""
    client = {
        "connect_timeout": f"{min(_CONNECT_SECONDS, timeout_seconds)}s",
        "read_timeout": f"{timeout_seconds}s",
        "timeout": "24h",
        "allow_http": is_plain,
        **more,
    }
    return {"client_options": client, "retry_config": {"max_retries": 0}}


def _web_store(root: str, options: Mapping[str, Any], timeout_seconds: float) -> ByObstore:
    headers = dict(options.get("headers") or {})
    identity = (
        "the headers given" if {"authorization", "cookie"} & {each.lower() for each in headers} else ANONYMOUS
    )
    if "username" in options:
        identity = str(options["username"])
        pair = f"{identity}:{options.get('password', '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    more = {"default_headers": headers} if headers else {}
    if params := options.get("params"):
        identity = "the params given" if identity == ANONYMOUS else identity

    def make(obstore: Any) -> Any:
        query = params.removeprefix("?") if isinstance(params, str) else urlencode(params or {})
        # obstore puts paths before what is behind the ?.
        url = f"{root}/?{query}" if query else root
        return obstore.store.HTTPStore.from_url(url, **_settings(timeout_seconds, True, more))

    return WebStore(root, _made(root, make), identity, is_signed=bool(params))


def _s3_store(root: str, options: Mapping[str, Any], timeout_seconds: float) -> ByObstore:
    client = options.get("client_kwargs") or {}
    config = {_S3_OPTIONS[name]: value for name, value in options.items() if name in _S3_OPTIONS and value}
    config |= {_S3_FLAGS[name]: bool(value) for name, value in options.items() if name in _S3_FLAGS and value}
    endpoint = options.get("endpoint_url") or client.get("endpoint_url") or _endpoint_of_environment()
    region = client.get("region_name")
    more = {"allow_invalid_certificates": True} if client.get("verify") is False else {}
    credentials: Any = None
    identity = str(config.get("access_key_id", ANONYMOUS))
    if "access_key_id" not in config and not config.get("skip_signature"):
        credentials, identity, found = _found_credentials(options.get("profile"))
        region = region or found
        if credentials is None:
            config["skip_signature"] = True
    if endpoint:
        config["endpoint"] = endpoint
    if region or not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        config["region"] = region or "us-east-1"
    settings = _settings(timeout_seconds, str(endpoint).startswith("http://"), more)
    if credentials is not None:
        settings["credential_provider"] = credentials
    bucket = urlsplit(root).netloc
    store = _made(root, lambda obstore: obstore.store.S3Store(bucket, config=config, **settings))
    return ByObstore(root, store, identity)


def _google_store(root: str, timeout_seconds: float) -> ByObstore:
    bucket = urlsplit(root).netloc
    settings = _settings(timeout_seconds, False, {})
    store = _made(root, lambda obstore: obstore.store.GCSStore(bucket, **settings))
    return ByObstore(root, store, "the application's default credentials")


def _made(root: str, make: Callable[[Any], Any]) -> Any:
    obstore = _obstore()
    try:
        return make(obstore)
    except Exception as error:
        reason = str(error).partition("\n\n")[0]
        raise ConfigError(
            f"{without_secrets(root)} cannot be opened with these storage_options: {reason}"
        ) from error


def _endpoint_of_environment() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _found_credentials(profile: str | None) -> tuple[Any, str, str | None]:
    """Return credentials where AWS's own tools find them, whose they are, and the region that goes with them.

    Files, profiles and single sign-on are botocore's to find. Without it there are the environment and the services
    of the machine, which obstore asks by itself.
    """
    try:
        import botocore.session
    except ImportError:
        if profile is not None:
            raise ConfigError(
                f"storage_options has profile={profile!r}, which boto3 reads: pip install boto3"
            ) from None
        key = os.environ.get("AWS_ACCESS_KEY_ID")
        return _OF_ENVIRONMENT, key or "the credentials of this machine", None
    try:
        session: Any = botocore.session.Session(profile=profile)
        found = session.get_credentials()
        region = session.get_config_variable("region")
    except Exception as error:
        raise ConfigError(f"the credentials for S3 cannot be read: {error}") from error
    if found is None:
        return None, f"{ANONYMOUS}, as no credentials were found", region
    return _Credentials(found), str(found.get_frozen_credentials().access_key), region


_OF_ENVIRONMENT = None


class _Credentials:
    """Credentials as obstore asks for them, which botocore renews."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __call__(self) -> dict[str, Any]:
        frozen = self._found.get_frozen_credentials()
        # None: asked for each request, from what botocore has in memory.
        expires_at = getattr(self._found, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires_at if isinstance(expires_at, datetime) else None,
        }


class ByObstore:
    """A store by obstore, whose calls do not hold the interpreter's lock."""

    def __init__(self, root: str, store: Any, identity: str, *, is_signed: bool = False) -> None:
        self._root, self._store, self.identity = root, store, identity
        #: Whether requests have a signature in their URLs, which errors of obstore show.
        self._is_signed = is_signed
        import obstore

        self._obstore = obstore

    def _path_of(self, address: str) -> str:
        return address[len(self._root) :].strip("/")

    def _address_of(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _cause(self, error: Exception) -> Exception | None:
        """Return what a traceback may show."""
        return None if self._is_signed else error

    def facts(self, address: str) -> Facts:
        try:
            found = self._obstore.head(self._store, self._path_of(address))
        except Exception as error:
            raise _of_obstore(error) from self._cause(error)
        return self._facts_of(found)._replace(address=address)

    def walk(self, address: str) -> Iterable[Facts]:
        try:
            for chunk in self._obstore.list(
                self._store, self._path_of(address) or None, chunk_size=_LISTED_AT_ONCE
            ):
                yield from (self._facts_of(each) for each in chunk)
        except Exception as error:
            raise _of_obstore(error) from self._cause(error)

    def level(self, address: str) -> tuple[list[Facts], list[str]]:
        try:
            found = self._obstore.list_with_delimiter(self._store, self._path_of(address) or None)
        except Exception as error:
            raise _of_obstore(error) from self._cause(error)
        objects = [self._facts_of(each) for each in found["objects"]]
        return objects, [self._address_of(each) for each in found["common_prefixes"]]

    def read(self, piece: Piece) -> None:
        length = len(piece.into)
        is_whole = length == piece.nbytes
        try:
            self._read(piece, None if is_whole else (piece.begin, piece.begin + length))
        except RequestError:
            raise
        except Exception as error:
            if is_whole or not _is_without_ranges(error):
                raise _of_obstore(error) from self._cause(error)
            if piece.nbytes > _MOST_WHOLE_BYTES:
                raise RequestError(
                    "final",
                    f"is on a server that does not answer with ranges, and has {piece.nbytes:,} bytes: up to "
                    f"{_MOST_WHOLE_BYTES:,} are read as a whole for a sample; use another server, or a copy",
                ) from self._cause(error)
            whole = np.empty(piece.nbytes, np.uint8)
            try:
                self._read(piece._replace(begin=0, into=whole.data), None)
            except RequestError:
                raise
            except Exception as again:
                raise _of_obstore(again) from self._cause(again)
            piece.into[:] = whole[piece.begin : piece.begin + length].data

    def _read(self, piece: Piece, between: tuple[int, int] | None) -> None:
        options: Any = {} if between is None else {"range": between}
        result = self._obstore.get(self._store, self._path_of(piece.address), options=options)
        check_same(piece, self._facts_of(result.meta))
        into, at = np.frombuffer(piece.into, np.uint8), 0
        chunks: Any = (
            [result.bytes()] if into.size <= _CHUNK_BYTES else result.stream(min_chunk_size=_CHUNK_BYTES)
        )
        for chunk in chunks:
            content = np.frombuffer(chunk, np.uint8)
            if at + content.size > into.size:
                raise too_long(into.size, at + content.size)
            into[at : at + content.size] = content  # without the interpreter's lock
            at += content.size
        if at != into.size:
            raise RequestError("passing", f"a body of {at:,} bytes in place of {into.size:,}")

    def _facts_of(self, found: Mapping[str, Any]) -> Facts:
        modified = found["last_modified"]
        stamp = stamp_of_tag(found["e_tag"], modified.timestamp() if modified else None)
        return Facts(self._address_of(found["path"]), found["size"], stamp)


class WebStore(ByObstore):
    """A web server: its objects are listed as far as it has index pages."""

    def facts(self, address: str) -> Facts:
        if not self._is_signed:
            return super().facts(address)
        try:  # a signature of GET is none of HEAD
            found = self._obstore.get(self._store, self._path_of(address), options={"range": (0, 1)})
        except Exception as error:
            raise _of_obstore(error) from self._cause(error)
        return self._facts_of(found.meta)._replace(address=address)

    def _path_of(self, address: str) -> str:
        return unquote(super()._path_of(address))

    def _address_of(self, path: str) -> str:
        return f"{self._root}/{quote(path, safe='/~@:!$&()*+,;=')}"

    def walk(self, address: str) -> Iterable[Facts]:
        objects, folders = self.level(address)
        yield from objects
        for folder in folders:
            yield from self.walk(folder)

    def level(self, address: str) -> tuple[list[Facts], list[str]]:
        """See `ObjectStore`. Sizes are not on the page."""
        base = address.rstrip("/") + "/"
        try:
            # Behind a path obstore puts no "/", without which servers redirect, which it follows.
            page = self._obstore.get(self._store, self._path_of(address))
            if page.meta["size"] > _MOST_PAGE_BYTES:
                raise RequestError("final", f"is no index page: it has {page.meta['size']:,} bytes")
            content = bytes(page.bytes())
        except RequestError:
            raise
        except Exception as error:
            raise _of_obstore(error) from self._cause(error)
        objects: dict[str, None] = {}
        folders: dict[str, None] = {}
        for link in _HREF.findall(content):
            target = urljoin(base, html.unescape(link.decode("utf-8", "replace")))
            name = target[len(base) :]
            # What leads elsewhere, up, or sorts the page.
            if not target.startswith(base) or "?" in name or not name.strip("/") or ".." in name:
                continue
            first, is_folder, rest = name.partition("/")
            if not rest:
                (folders if is_folder else objects)[base + first] = None
        if not objects and not folders and b"<a" not in content.lower():
            raise RequestError("final", "is not listed by its server, which sends no index page: give names")
        return [Facts(each, -1, 1) for each in objects], list(folders)


def check_same(piece: Piece, found: Facts) -> None:
    """Raise RequestError unless an object is as it was when it was listed."""
    if found.nbytes == piece.nbytes and found.stamp == piece.stamp:
        return
    how = "was written again"
    if found.nbytes != piece.nbytes:
        verb = "grown" if found.nbytes > piece.nbytes else "shrunk"
        how = f"has {verb} from {piece.nbytes:,} to {found.nbytes:,} bytes"
    raise RequestError("final", f"{how} since it was listed: open the data set again, once it is complete")


def too_long(wanted: int, there: int) -> RequestError:
    return RequestError(
        "final",
        f"was answered with {format_count(there, 'byte')} or more where {wanted:,} were asked for: check the store "
        "and any proxy on the way to it",
    )


def _is_without_ranges(error: Exception) -> bool:
    text = str(error)
    return "non-partial response" in text or "Range request not supported" in text


def _of_obstore(error: Exception) -> RequestError:
    """Return what an error of obstore means. It says the status in words only."""
    text = str(error)
    reason = text.partition("\n\n")[0]
    if status := _STATUS.search(reason):
        return of_status(int(status[1]), status[2].strip())
    if isinstance(error, FileNotFoundError):
        return RequestError("missing", "not found")
    if "kind: Timeout" in text:
        return RequestError("refused", "no answer in time", is_answer=False)
    for sign, why in (
        ("InvalidCertificate", "its certificate is not valid"),
        ("dns error", "its host is not known"),
        ("redirect without LOCATION", "it is in another region: name that, as AWS_REGION"),
        ("TooManyRedirects", "it leads from one address to the next without an end"),
        ("Content-Length Header missing", _WITHOUT_SIZE),
        ("Requested ", "another part was sent than was asked for"),
        ("Content-Range header", "a part was sent that is not said to be the one asked for"),
        ("non-partial response", "all was sent where a part was asked for"),
    ):
        if sign in text:
            return RequestError(
                "final", f"cannot be read: {why} ({_brief(reason)}); check the address and the store"
            )
    if "HTTP error" in reason:
        if "body" in reason:
            return RequestError("passing", "a body that was cut off")
        return RequestError("passing", "a broken or refused connection", is_answer=False)
    return RequestError("final", f"cannot be read: {_brief(reason)}; check the address and the store")


def of_status(status: int, words: str = "") -> RequestError:
    """Return what a status says."""
    text = f"{status} {words}".strip()
    kind: Literal["refused", "passing", "missing", "forbidden", "final"] = "final"
    if status in (401, 403):
        kind = "forbidden"
    elif status in (404, 410):
        kind = "missing"
    elif status in _REFUSED:
        kind = "refused"
    elif status in _PASSING and status not in _LASTING:
        kind = "passing"
    if kind == "final":
        text = f"was answered with {text}: check the address and the store"
    return RequestError(kind, text)


def _brief(reason: str) -> str:
    return re.sub(r"https?://\S+", "", reason)[:200].strip()


def _without_queries(text: str) -> str:
    """Return a text without its URLs' queries, which tokens may be in."""
    return re.sub(r"\?\S+", "", text)


class ByFsspec:
    """A store by an fsspec driver. Where it does not say with a content of what version that is, it is asked again."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        scheme = urlsplit(root).scheme
        try:
            import fsspec

            kind = fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{without_secrets(root)} cannot be opened: {error}") from error
        try:
            _check_known(scheme, kind, options)
            more = kind._get_kwargs_from_urls(root)
            more = {name: value for name, value in more.items() if name not in ("path", "protocol", "fo")}
            # hdfs-native keeps no listings, and takes each option for a setting of Hadoop.
            is_native = kind.__module__.partition(".")[0] == "hdfs_native"
            listings = {} if is_native else {"use_listings_cache": False}
            self._files = fsspec.filesystem(
                scheme, **{**more, **options, **listings}, skip_instance_cache=True
            )
        except ConfigError:
            raise
        except Exception as error:
            names = ", ".join(sorted(options)) or "none"
            raise ConfigError(
                f"{without_secrets(root)} cannot be opened with storage_options of {names}: {error}"
            ) from error
        _first_process()
        self._root = root
        is_web = kind.protocol == _WEBHDFS
        if is_web:
            self._files.session.hooks["response"].append(_refuse_final)
        self._is_hadoop = is_web or is_native
        self._content = _content_of_webhdfs if is_web else _content_of
        given = {**more, **options}
        found = next((given[name] for name in _IDENTITIES if given.get(name)), "")
        self.identity = str(found) or ("the given credentials" if options else "the driver's own credentials")

    def _asked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RequestError:
            raise
        except Exception as error:
            # Of WebHDFS neither forbidden, missing nor a wrong request, such as StandbyException; of hdfs-native any.
            if self._is_hadoop and isinstance(error, RuntimeError):
                text = _without_queries(str(error))[:200]
                found = (kind for name, kind in _FINAL_OF_HADOOP.items() if name in text)
                raise RequestError(next(found, "passing"), text) from error
            raise _of_driver(error) from (None if self._is_hadoop else error)  # whose URL may have a token

    def _path_of(self, address: str) -> str:
        return str(self._files._strip_protocol(address))

    def _facts_of(self, address: str, info: Mapping[str, Any]) -> Facts:
        if info.get("type") == "directory":
            raise RequestError("missing", "is a folder")
        tag = next((info[name] for name in _TAGS if info.get(name)), None)
        size = info.get("size")
        return Facts(address, -1 if size is None else int(size), stamp_of_tag(_text_of(tag), None))

    def facts(self, address: str) -> Facts:
        found = self._facts_said(address)
        if found.nbytes >= 0:
            return found
        # Of a store that does not say it, the size is that of the content, which is read for it.
        path = self._path_of(address)
        return found._replace(nbytes=len(self._asked(lambda: self._content(self._files, path, None))))

    def _facts_said(self, address: str) -> Facts:
        """Return what the store says of an object, which may lack its size: -1."""
        return self._facts_of(address, self._asked(lambda: self._files.info(self._path_of(address))))

    def walk(self, address: str) -> Iterable[Facts]:
        base = self._path_of(address)

        def ask() -> Any:
            self._files.invalidate_cache()
            return self._files.find(base, detail=True)

        for path, info in self._asked(ask).items():
            yield self._facts_of(self._below(address, base, path), info)

    def level(self, address: str) -> tuple[list[Facts], list[str]]:
        base = self._path_of(address)

        def ask() -> Any:
            self._files.invalidate_cache()
            return self._files.ls(base, detail=True)

        objects, folders = [], []
        for info in self._asked(ask):
            path = info["name"].rstrip("/")
            if path == base.rstrip("/"):
                continue
            found = self._below(address, base, path)
            if info["type"] == "directory":
                folders.append(found)
            else:
                objects.append(self._facts_of(found, info))
        return objects, folders

    def _below(self, address: str, base: str, path: str) -> str:
        return f"{address.rstrip('/')}/{path[len(base) :].strip('/')}"

    def read(self, piece: Piece) -> None:
        path, length = self._path_of(piece.address), len(piece.into)
        between = None if length == piece.nbytes else (piece.begin, piece.begin + length)
        content = self._asked(lambda: self._content(self._files, path, between))
        found = self._facts_said(piece.address)
        check_same(piece, found if found.nbytes >= 0 else found._replace(nbytes=piece.nbytes))
        if len(content) > length:
            raise too_long(length, len(content))
        if len(content) < length:
            raise RequestError("passing", f"a body of {len(content):,} bytes in place of {length:,}")
        piece.into[:] = content


def _content_of(files: Any, path: str, between: tuple[int, int] | None) -> bytes:
    """Return an object's bytes, or those between two places."""
    if between is None:
        return cast(bytes, files.cat_file(path))
    return cast(bytes, files.cat_file(path, start=between[0], end=between[1]))


def _content_of_webhdfs(files: Any, path: str, between: tuple[int, int] | None) -> bytes:
    """As `_content_of`: fsspec's driver takes what a data node says of an error for the file's content, and reads
    5 MiB more than it is asked for.
    """
    place = {} if between is None else {"offset": between[0], "length": between[1] - between[0]}
    answer = files._call("OPEN", path=path, redirect=False, **place)
    if "Location" in answer.headers:
        answer = files.session.get(files._apply_proxy(answer.headers["Location"]))
        answer.raise_for_status()
    return cast(bytes, answer.content)


def _refuse_final(response: Any, *_: Any, **__: Any) -> None:
    """Raise RequestError for an answer of Hadoop that stays the same: fsspec's driver leaves out which it is."""
    if response.status_code < 400:
        return
    try:
        name = response.json()["RemoteException"]["exception"]
    except (ValueError, KeyError, TypeError):
        return
    if name in _FINAL_OF_HADOOP:
        raise RequestError(_FINAL_OF_HADOOP[name], f"{response.status_code} {name}")


_FINAL_OF_HADOOP: Mapping[str, Literal["forbidden", "missing"]] = {
    "InvalidToken": "forbidden",
    "AccessControlException": "forbidden",
    "AuthenticationException": "forbidden",
    "AuthorizationException": "forbidden",
    "InvalidPathException": "missing",
    "ParentNotDirectoryException": "missing",
}

#: How fsspec's driver for Hadoop's REST interface calls itself.
_WEBHDFS = ("webhdfs", "webHDFS")
#: What drivers call who asks.
_IDENTITIES = ("key", "account_name", "username", "user")


def _check_known(scheme: str, kind: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the option that a driver takes without a word, and never uses."""
    known = {*inspect.signature(kind.__init__).parameters, *_OF_ALL_DRIVERS}
    if scheme in ("http", "https"):
        import aiohttp

        known |= {*inspect.signature(aiohttp.ClientSession._request).parameters, *_WEB_KNOWN}
    elif scheme not in ("s3", "s3a") and kind.protocol != _WEBHDFS:
        return
    known -= {"self", "storage_options", "kwargs", "method", "str_or_url", "data", "json"}
    for name in sorted(options.keys() - known):
        close = difflib.get_close_matches(name, known, 1, 0.5)
        raise ConfigError(
            f"storage_options has {name!r}, which {scheme}:// does not take: "
            + (f"{close[0]!r} is alike" if close else "correct its name, or leave it out")
        )


#: What fsspec itself takes for every driver.
_OF_ALL_DRIVERS = ("use_listings_cache", "listings_expiry_time", "max_paths", "batch_size")


def _text_of(tag: object) -> str | None:
    """Return a tag as text; a time in one way, however a listing or a question about one object writes it."""
    if isinstance(tag, str):
        try:
            tag = datetime.fromisoformat(tag)
        except ValueError:
            return str(tag)
    if isinstance(tag, datetime):
        return str(tag.timestamp())
    return None if tag is None else str(tag)


#: What drivers call an entity tag, or the time of the last change.
_TAGS = (
    *("ETag", "etag", "e_tag", "md5Hash", "content_md5", "checksum", "blob_id", "sha", "crc32c"),
    *(
        "LastModified", "last_modified", "last_commit", "mtime", "modificationTime", "modification_time",
        "modify", "updated", "modified",
    ),
    "created",
)  # fmt: skip


def _of_driver(error: Exception) -> RequestError:
    """Return what an error of an fsspec driver means, which are of many kinds."""
    if isinstance(error, RequestError):
        return error
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if status is None and isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int) and 400 <= status < 600:
        return of_status(status)
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return RequestError("missing", "not found")
    text = _without_queries(f"{type(error).__name__}: {error}")[:200]
    if isinstance(error, PermissionError):
        return RequestError("forbidden", text)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return RequestError("refused", "no answer in time", is_answer=False)
    is_of_network = (
        type(error).__module__.partition(".")[0] in _NETWORK and "Credentials" not in type(error).__name__
    )
    if isinstance(error, OSError) or is_of_network:
        return RequestError("passing", text, is_answer=False)
    return RequestError("final", f"cannot be read: {text}; check the address and the store")


_NETWORK = ("aiohttp", "botocore", "aiobotocore", "requests", "urllib3", "httpx", "httpcore", "http")
