"""Names that a server answers to: a page can let its own name stand for this machine's address.

Such a page (DNS rebinding) is of the server's origin to its browser; the ``Host`` header says what
its address is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""What this machine is called by itself."""


def list_own_names(
    address: str, *, has_keys: bool, origins: Iterable[str] = ()
) -> frozenset[str] | None:
    """Names that requests to a server at ``address`` may have in ``Host``; None lets all be.

    A server that others reach has names that nobody tells it, and one with keys is safe: a page
    does not know them.  ``origins``: pages that may ask; their hosts are names of a proxy before
    the server, too.
    """
    if has_keys or not is_loopback(address) or "*" in origins:
        return None
    return _LOCAL | {_cut_port(address)} | {_cut_port(item.split("://")[-1]) for item in origins}


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches what listens at ``address``."""
    if address.lower() == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def is_own_name(host: bytes, names: frozenset[str]) -> bool:
    """Whether the value of a ``Host`` header is one of ``names``, with or without a port."""
    return _cut_port(host.decode("latin-1")) in names


def _cut_port(host: str) -> str:
    """The name or address alone, as it is compared."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]
