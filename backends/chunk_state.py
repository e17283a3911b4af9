"""What an executor of kernels keeps for each chunk of a prompt, and how arguments name it.

Kernels' arguments are made once.  Those for another chunk are the same but for the arrays that
each chunk has for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pi2.arrays import F32

Arguments = tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class ChunkState:
    """A chunk of T tokens in the course of the layers."""

    tokens: int = 0
    normalized: F32
    """What the FFN reads [chunk, hidden], before it is rounded."""
    layer_input: F32 | None
    """What attention reads, where the FFN or a router reads it too."""
    routes: F32
    """Weights of the experts [chunk, experts]."""
    embed: Arguments
    positions: Arguments
    attend: list[list[Arguments]]
    """Of each sequence, by layer."""
    begin: list[Arguments]
    dense: Arguments
    gather: Arguments
    """Of neurons next to each other, for one token."""
    end: list[Arguments]
    head: Arguments


def name_other_arrays(state: ChunkState, others: Mapping[int, Any], **arrays: Any) -> ChunkState:
    """The state of another chunk: ``others`` are its views by the ``id`` of the first one's, and
    ``arrays`` its arrays."""

    def change(arguments: Arguments) -> Arguments:
        return tuple(others.get(id(view), view) for view in arguments)

    return replace(
        state,
        **arrays,
        embed=change(state.embed),
        positions=change(state.positions),
        attend=[[change(arguments) for arguments in layers] for layers in state.attend],
        begin=[change(arguments) for arguments in state.begin],
        dense=change(state.dense),
        gather=change(state.gather),
        end=[change(arguments) for arguments in state.end],
        head=change(state.head),
    )
