"""Files of web servers: one GET, within a time and a size, from the host that was named."""

from __future__ import annotations

from queue import Empty, Queue
from threading import Thread
from typing import NoReturn
from urllib.parse import urljoin, urlsplit

from pi2.diagnostics import UserError
from pi2.plan.toml.source import MAX_BYTES

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


def fetch_url(url: str, *, timeout_s: float) -> bytes:
    """Bytes of the file at ``url``.

    Raises `UserError`: P720 (no answer, or not the file), P721 (too slow), P722 (too large), P723
    (a redirect to another host), P725 (no such file).
    """
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
                    if answer.status_code != 200:
                        _refuse_status(current, answer.status_code)
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
    """Target of a redirect, if it stays with the host."""
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


def _refuse_status(url: str, status: int) -> NoReturn:
    code = "P725" if status in (404, 410) else "P720"
    what = "has no such file" if code == "P725" else "cannot be fetched"
    raise UserError.of(code, f"{url} {what}: HTTP status {status}", help="check the address")


def _refuse_size(url: str) -> NoReturn:
    message = f"{url} is larger than {MAX_BYTES:,} bytes"
    raise UserError.of("P722", message, help="documents are small texts")


def _refuse_time(url: str, timeout_s: float) -> NoReturn:
    message = f"{url} did not arrive within {timeout_s:g} seconds"
    raise UserError.of("P721", message, help="try again later")
