"""The reference backend: numpy in float32, straight from the store's bytes.

It is the truth that every kernel is tested against, so it is written to be read: weights are
dequantised where they are used, activations are never quantised, and nothing is fused.  Keys and
values are 8-bit integers only where the plan says so.
"""

from __future__ import annotations

from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.executor import ReferenceExecutor
from pi2.backends.reference.kv_cache import quantize_kv
from pi2.backends.reference.operators import activate, cap

__all__ = [
    "NAME",
    "ReferenceExecutor",
    "activate",
    "build",
    "cap",
    "find_obstacles",
    "quantize_kv",
]

NAME = "reference"


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: numpy runs everywhere."""
    return []


def build(request: BuildRequest) -> ReferenceExecutor:
    """Make the executor; nothing is compiled."""
    return ReferenceExecutor(request)
