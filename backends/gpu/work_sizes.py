"""How work is divided so that a device is busy: which kernel takes some tokens, and into how many
parts a sum goes."""

from __future__ import annotations

from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.backends.gpu.sizes import TILE

_FEW_TOKENS = 16
"""With more tokens, products by tiles of 64 tokens are the cheaper ones."""
_GROUPS_PER_UNIT = 8
"""Work groups that keep a compute unit busy."""
_UNKNOWN_UNITS = 32
"""Compute units where the API does not say."""
_COLUMNS = {1: 256, 4: 256, 64: 64}
"""Elements of the FFN's sum that a work group computes, by the tokens of the kernel."""


def choose_kernel_tokens(tokens: int) -> int:
    """Return how many tokens a work group of the cheapest kernel computes with."""
    return 1 if tokens == 1 else 4 if tokens <= _FEW_TOKENS else 64


def count_busy_groups(facts: DeviceFacts) -> int:
    """Return how many work groups keep the device busy."""
    return _GROUPS_PER_UNIT * (facts.compute_units or _UNKNOWN_UNITS)


def choose_parts(
    facts: DeviceFacts, hidden: int, neurons: int, tokens: int, size: int, rows: int
) -> int:
    """Return into how many parts the sum over ``neurons`` is divided, by a kernel of ``size``
    tokens, where there is room for ``rows`` vectors of a part and a token."""
    groups = -(-hidden // _COLUMNS[size]) * -(-tokens // size)
    most = min(rows // tokens, -(-neurons // TILE))
    return max(1, min(-(-count_busy_groups(facts) // groups), most))
