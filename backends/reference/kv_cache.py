"""Keys and values of the reference backend: whole, or as 8-bit integers."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F16, F32, I8, U8, Raw
from pi2.backends.protocol import BuildRequest
from pi2.plan.arithmetic.kept_sizes import KV_ELEMENT_BYTES
from pi2.plan.weights.projections import list_kept_vectors


def quantize_kv(x: F32) -> tuple[I8, F16]:
    """int8 codes and fp16 scales [...] of vectors [..., head_dim], as the KV cache keeps them.

    The scale is the largest magnitude / 127, rounded; vectors too small for one become zeros.
    """
    scales = (np.abs(x).max(-1) * np.float32(1 / 127)).astype(np.float16)
    kept = scales.astype(np.float32)[..., None]
    factor = np.divide(np.float32(1), kept, out=np.zeros_like(kept), where=kept > 0)
    return np.clip(np.rint(x * factor), -127, 127).astype(np.int8), scales


class KvCache:
    """Keys (0) and values (1) of all layers, or what latent attention keeps (0): as 8-bit integers
    where the plan says so, else whole.

    Rounding them to fp16 would cost five times the error of everything else here.  So they are not,
    although the segment has the size that the plan's type needs.
    """

    def __init__(self, request: BuildRequest) -> None:
        self._int8 = request.kv_type == "int8"
        self._elements: dict[int, Raw] = {}
        """What a layer keeps [sequences, kinds, context, heads, width]."""
        self._scales: dict[int, F16] = {}
        """Scales [sequences, kinds, context, heads] of 8-bit integers."""
        for layer in request.model.attention_layers:
            kinds, heads, size = list_kept_vectors(request.model.view_layer(layer))
            if not kinds:
                continue
            vectors = (request.sequences, kinds, request.context, heads)
            count = int(np.prod(vectors))
            raw = request.allocate("kv", count * size * KV_ELEMENT_BYTES[request.kv_type])
            if request.kv_type == "fp16":
                self._elements[layer] = np.zeros((*vectors, size), np.float32)
                continue
            dtype = np.float32 if request.kv_type == "fp32" else np.int8
            self._elements[layer] = raw.view(dtype).reshape(*vectors, size)
            if self._int8:
                scales = request.allocate("kv", count * 2).view(np.float16)
                self._scales[layer] = scales.reshape(vectors)

    def keep(self, sequence: int, kind: int, layer: int, position: int, x: F32) -> None:
        """Keep ``x`` [T, kv_heads, head_dim] of the tokens from ``position`` on."""
        place = (sequence, kind, slice(position, position + len(x)))
        if self._int8:
            self._elements[layer][place], self._scales[layer][place] = quantize_kv(x)
        else:
            self._elements[layer][place] = x

    def read(self, sequence: int, kind: int, layer: int, end: int) -> F32:
        """What is kept of the tokens before ``end``: float32 [end, kv_heads, head_dim]."""
        place = (sequence, kind, slice(end))
        found = self._elements[layer][place].astype(np.float32)
        if self._int8:
            found *= self._scales[layer][place][..., None].astype(np.float32)
        return found

    def copy(self, sequence: int, first: int, end: int) -> U8:
        """A copy [n] of what is kept of a sequence's tokens from ``first`` to ``end``."""
        parts = [array[sequence, :, first:end] for array in self._arrays]
        return np.concatenate([np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts])

    def put(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `copy` gave for these tokens."""
        done = 0
        for array in self._arrays:
            part = array[sequence, :, first:end]
            size = part.size * part.itemsize
            part[:] = kept[done : done + size].view(part.dtype).reshape(part.shape)
            done += size

    @property
    def _arrays(self) -> list[Raw]:
        return [*self._elements.values(), *self._scales.values()]
