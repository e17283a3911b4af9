"""From a reference to bytes, wherever they are."""

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import NoReturn
from urllib.parse import unquote, urljoin, urlsplit

from pi2.caches import find_cache_folder, replace_file
from pi2.diagnostics import UserError
from pi2.plan.toml.source import MAX_BYTES
from pi2.sharing.git import Fetched, read_git_file

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


def fetch_url(url: str, *, timeout_s: float) -> bytes:
    """Bytes at ``url``; UserError P720 without answer, P721 slow, P722 large, P723, P725."""
    # A thread, because a server that sends a byte now and then keeps within any time of a read.
    outcome: Queue[bytes | BaseException] = Queue()
    Thread(target=_report, args=(url, timeout_s, outcome), daemon=True).start()
    try:
        found = outcome.get(timeout=timeout_s)
    except Empty:
        _refuse_time(url, timeout_s)
    if isinstance(found, BaseException):
        raise found
    return found


def _report(url: str, timeout_s: float, outcome: Queue[bytes | BaseException]) -> None:
    try:
        outcome.put(_fetch(url, timeout_s))
    except BaseException as error:  # the caller raises it
        outcome.put(error)


def _fetch(url: str, timeout_s: float) -> bytes:
    import httpx2

    limits = httpx2.Timeout(min(10.0, timeout_s))
    # Uncompressed: what arrives is what is counted.
    headers = {"User-Agent": "pi2", "Accept-Encoding": "identity"}
    current = url
    try:
        with httpx2.Client(timeout=limits, headers=headers, follow_redirects=False) as client:
            for _ in range(MAX_REDIRECTS + 1):
                with client.stream("GET", current) as answer:
                    if answer.status_code in _REDIRECTS:
                        current = _follow(url, current, answer.headers.get("Location", ""))
                        continue
                    if (status := answer.status_code) != 200:
                        is_missing = status in (404, 410)
                        what = "has no such file" if is_missing else "cannot be fetched"
                        raise UserError.of(
                            "P725" if is_missing else "P720",
                            f"{current} {what}: HTTP status {status}",
                            help="check the address",
                        )
                    length = answer.headers.get("Content-Length", "")
                    if length.isdecimal() and int(length[:20]) > MAX_BYTES:
                        _refuse_size(url)
                    data = bytearray()
                    for piece in answer.iter_raw():
                        data += piece
                        if len(data) > MAX_BYTES:
                            _refuse_size(url)
                    return bytes(data)
    except httpx2.TimeoutException:
        _refuse_time(url, timeout_s)
    # A proxy or certificate that the environment names may be at fault too.
    except (httpx2.HTTPError, httpx2.StreamError, OSError, ValueError) as error:
        raise UserError.of(
            "P720",
            f"{url} cannot be fetched",
            help="check the address and the network",
            notes=[f"{type(error).__name__}: {str(error) or 'no reason given'}"],
        ) from None
    raise UserError.of("P723", f"{url} redirects more than {MAX_REDIRECTS} times")


def _follow(url: str, current: str, location: str) -> str:
    target = location
    try:
        target = urljoin(current, location)
        here, there = urlsplit(url), urlsplit(target)
        same = (here.scheme, here.hostname, here.port) == (there.scheme, there.hostname, there.port)
    except ValueError:
        same = False
    if not location or not same:
        raise UserError.of(
            "P723",
            f"{url} redirects to another host: {target[:200]}",
            help="if that is where the file is now, name it there",
        )
    return target


def _refuse_size(url: str) -> NoReturn:
    message = f"{url} is larger than {MAX_BYTES:,} bytes"
    raise UserError.of("P722", message, help="documents are small texts")


def _refuse_time(url: str, timeout_s: float) -> NoReturn:
    message = f"{url} did not arrive within {timeout_s:g} seconds"
    raise UserError.of("P721", message, help="try again later")


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` whole or not at all; UserError P003 if the system refuses."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise report_unwritable(path, error) from None


def report_unwritable(path: Path, error: OSError) -> UserError:
    return UserError.of("P003", f"cannot be written: {error.strerror or error}", file=str(path))


def write_report(path: Path, text: str) -> None:
    """Write ``text`` to the file that ``path`` leads to, or into the pipe or terminal."""
    data = text.encode("utf-8", errors="surrogateescape")
    if os.path.isfile(path) or not os.path.exists(path):
        write_atomically(Path(os.path.realpath(path)), data)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise report_unwritable(path, error) from None


@dataclass(frozen=True)
class Cache:
    """A folder of files that were fetched."""

    folder: Path

    def _name(self, sha256: str, name: str) -> Path:
        assert len(sha256) == 64 and "/" not in name, (sha256, name)
        return self.folder / "blobs" / sha256 / name

    def add(self, data: bytes, name: str) -> Path:
        """Store ``data``; an existing sound file stays."""
        path = self._name(hash_bytes(data), name)
        if read_regular(path) != data:
            write_atomically(path, data)
        return path

    def find(self, sha256: str, name: str) -> Path | None:
        """The file with this digest; None if absent, UserError P713 for other bytes."""
        path = self._name(sha256, name)
        data = read_regular(path)
        if data is None:
            return None
        if hash_bytes(data) != sha256:
            raise UserError.of(
                "P713",
                f"{path} is not the file that was locked: its SHA-256 is not {sha256[:12]}…",
                help=f"delete {path}, then `pi2 profile add` fetches it again",
                file=str(path),
            )
        return path


def read_regular(path: Path) -> bytes | None:
    """Bytes of a regular file of bearable size; None where there is none, or another thing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            return file.read(MAX_BYTES + 1)
        except OSError:
            return None


GITHUB = "PI2_GITHUB"


@dataclass(frozen=True, kw_only=True)
class Settings:
    cache: Path
    """Folder of everything that was fetched."""
    github: str = "https://github.com"
    """What ``gh:`` stands for; companies have their own."""
    timeout_s: float = 60.0
    """Longest time that one file may take to arrive."""


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of the variables ``PI2_GITHUB`` and ``PI2_CACHE_DIR``; empty ones do not count."""
    values = os.environ if environment is None else environment
    github = values.get(GITHUB) or Settings.github
    return Settings(cache=find_cache_folder("profiles", values), github=github.rstrip("/"))


def is_local(url: str) -> bool:
    """Whether a file at ``url`` is read without a network."""
    return url.startswith("file:")


def refuse_network(url: str, offline: bool) -> None:
    """Raise `UserError` P730 where a network would be needed and may not be used."""
    if offline and not is_local(url):
        raise UserError.of(
            "P730", f"{url} would have to be fetched", help="run it once without --offline"
        )


def fetch(url: str, path: str, revision: str, *, settings: Settings, offline: bool) -> Fetched:
    """Fetch the file at ``url``, or ``path`` at ``revision`` of its repository; nothing is
    written."""
    refuse_network(url, offline)
    if path:
        return read_git_file(url, path, revision, timeout_s=settings.timeout_s)
    if is_local(url):
        return Fetched(data=read_local(Path(unquote(urlsplit(url).path))))
    return Fetched(data=fetch_url(url, timeout_s=settings.timeout_s))


def read_local(path: Path) -> bytes:
    """Bytes of a file of this machine; `UserError` P722, P724 or P725."""
    if path.is_symlink():
        raise UserError.of(
            "P724", "is a symbolic link", file=str(path), help="name the file itself"
        )
    data = read_regular(path)
    if data is None:
        raise UserError.of("P725", "no such file that can be read", file=str(path))
    if len(data) > MAX_BYTES:
        raise UserError.of(
            "P722",
            f"is larger than {MAX_BYTES:,} bytes",
            file=str(path),
            help="documents are small texts",
        )
    return data
