"""The arrays that most kernels of the executor take: the residual stream and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pi2.arrays import F32
from pi2.backends.chunk_state import Arguments
from pi2.backends.cpu.workspace import Workspace
from pi2.backends.kernels.spec import KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Arrays of a chunk of tokens, and the kernels' views of them."""

    normalized: F32
    """What the FFN reads [chunk, hidden], before it is rounded."""
    layer_input: F32 | None
    """What attention reads, where the FFN or a router reads it too."""
    weights: F32
    """Weights of the experts [chunk, experts]."""
    x: Any
    x_rows: Arguments
    """Views of x of each token of a step, where there are several sequences."""
    y: Any
    hidden: Arguments
    """Quantised activations of the model's width."""
    kept: Any | None
    """View of ``layer_input``."""
    routes: Arguments
    """View of ``weights``; empty without experts."""

    @property
    def own(self) -> Arguments:
        """The views that every chunk of a prompt has for itself."""
        kept = () if self.kept is None else (self.kept,)
        return (self.x, self.y, *self.hidden[:4], *self.routes, *kept)


def count_tiles(spec: KernelSpec) -> int:
    """Return the tiles for weights that kernels need: as many as threads, or none."""
    return spec.threads if spec.isa.pairs else 0


def make_arrays(space: Workspace, spec: KernelSpec, chunk: int, sequences: int) -> Arrays:
    """Make the arrays of the first chunk, which holds a token of each sequence, too."""
    residual = space.make("float32", chunk, spec.hidden)
    y = space.wrap(space.make("float32", chunk, spec.hidden))
    normalized = space.make("float32", chunk, spec.hidden)
    hidden = space.make_activations(
        chunk, spec.hidden, spec.most_planes, normalized, tiles=count_tiles(spec)
    )
    layer_input = space.make("float32", chunk, spec.hidden) if spec.keeps_input else None
    weights = space.make("float32", chunk, max(1, spec.experts))
    return Arrays(
        normalized=normalized,
        layer_input=layer_input,
        weights=weights,
        x=space.wrap(residual),
        x_rows=tuple(space.wrap(residual[t]) for t in range(sequences)) if sequences > 1 else (),
        y=y,
        hidden=hidden,
        kept=None if layer_input is None else space.wrap(layer_input),
        routes=(space.wrap(weights),) if spec.experts else (),
    )
