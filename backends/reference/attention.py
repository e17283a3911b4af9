"""Attention of the reference backend: rotations, KV cache, and the mixing of values."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from pi2.arrays import F16, F32, I8, U8, Raw
from pi2.backends.arithmetic import RopeTables, compute_growth, list_slopes
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.index import KeyIndex
from pi2.backends.reference.operators import (
    DenseTensors,
    cap,
    normalize,
    rotate,
    take_sigmoid,
    take_softplus,
)
from pi2.backends.reference.states import States
from pi2.model.blocks import State, find_attention, list_turns
from pi2.model.states import describe_state
from pi2.model.tensor import name_state_tensor
from pi2.plan.arithmetic.units import KV_ELEMENT_BYTES, DividedRows, count_index_bytes
from pi2.plan.weights.layout import fill_groups


def quantize_kv(x: F32) -> tuple[I8, F16]:
    """int8 codes and fp16 scales (largest magnitude / 127) of vectors [..., head_dim]."""
    scales = (np.abs(x).max(-1) * np.float32(1 / 127)).astype(np.float16)
    kept = scales.astype(np.float32)[..., None]
    factor = np.divide(np.float32(1), kept, out=np.zeros_like(kept), where=kept > 0)
    return np.clip(np.rint(x * factor), -127, 127).astype(np.int8), scales


class KvCache:
    """Keys (0) and values (1) of all layers, or latent vectors (0): int8 if the plan states it,
    else unrounded, since fp16 would cost five times the other errors."""

    def __init__(self, request: BuildRequest) -> None:
        self._int8 = request.kv_type == "int8"
        self._elements: dict[int, Raw] = {}
        """What a layer keeps [sequences, kinds, context, heads, width]."""
        self._scales: dict[int, F16] = {}
        """Scales [sequences, kinds, context, heads] of 8-bit integers."""
        for layer, block in enumerate(request.model.blocks):
            kinds, heads, size = (0, 0, 0) if block.attention is None else block.attention.kept
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
        self._indexes: dict[int, F32] = {}
        """Keys of layers with an index [sequences, 1, context, width], unrounded."""
        index = request.model.attention.index
        for layer, block in enumerate(request.model.blocks):
            if index is None or block.attention is None or block.attention.chooses != "index":
                continue
            keys = request.sequences, 1, request.context, index.width
            request.allocate("kv", int(np.prod(keys)) * count_index_bytes(request.kv_type))
            self._indexes[layer] = np.zeros(keys, np.float32)

    def keep_index(self, sequence: int, layer: int, position: int, keys: F32) -> F32:
        """Keep the keys [T, width] of an index; return the keys of all tokens up to then."""
        array, end = self._indexes[layer][sequence, 0], position + len(keys)
        array[position:end] = keys
        found: F32 = array[:end]
        return found

    def keep(self, sequence: int, kind: int, layer: int, position: int, x: F32) -> None:
        """Keep ``x`` [T, kv_heads, head_dim] of the tokens from ``position`` on."""
        place = (sequence, kind, slice(position, position + len(x)))
        if self._int8:
            self._elements[layer][place], self._scales[layer][place] = quantize_kv(x)
        else:
            self._elements[layer][place] = x

    def read(self, sequence: int, kind: int, layer: int, end: int) -> F32:
        """The KV cache of the tokens before ``end``: float32 [end, kv_heads, head_dim]."""
        place = (sequence, kind, slice(end))
        found = self._elements[layer][place].astype(np.float32)
        if self._int8:
            found *= self._scales[layer][place][..., None].astype(np.float32)
        return found

    def copy(self, sequence: int, first: int, end: int) -> U8:
        """A copy [n] of the KV cache of a sequence's tokens from ``first`` to ``end``."""
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
        return [*self._elements.values(), *self._scales.values(), *self._indexes.values()]


class LatentAttention:
    """What all layers keep, and the tables of positions."""

    def __init__(self, request: BuildRequest, read: Callable[[int, str], F32]) -> None:
        """``read`` gives a tensor of a layer [rows, length]."""
        self._model, self._read = request.model, read
        latent = self._model.attention.latent
        assert latent is not None
        self._latent = latent
        self.kept = KvCache(request)
        self.index = KeyIndex(self._model, read, self.kept.keep_index)
        size = (request.context, latent.rotated // 2)
        arrays = (np.empty(size, np.float32), np.empty(size, np.float32))
        self._rope = RopeTables(self._model.rope, latent.rotated, arrays)

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        self._rope.expect(end)

    def _normalize(self, layer: int, x: F32, kind: str) -> F32:
        norm = self._model.norm.model_copy(
            update={"kind": "rmsnorm", "epsilon": self._latent.epsilon}
        )
        return normalize(norm, x, self._read(layer, kind)[:, : x.shape[-1]])

    def _find_queries(self, layer: int, made: F32) -> tuple[F32, F32]:
        """Queries [T, heads, plain + rotated], and the vectors that give them."""
        rank, heads, queries = self._latent.query_rank, self._model.shape.heads, made
        if rank is not None:
            normal = self._normalize(layer, made, "latent_query_norm")
            made = np.pad(normal, ((0, 0), (0, fill_groups(rank) - rank)))
            queries = made @ self._read(layer, "latent_query_out").T
        return queries.reshape(len(made), heads, self._latent.key), made

    def mix(self, layer: int, qkv: F32, x: F32, sequence: int, position: int) -> F32:
        """The mixed values of the queries of ``qkv`` [T, rows], made of ``x``; the sequence's KV
        latents are appended from ``position`` on."""
        shape, latent = self._model.shape, self._latent
        count, end = len(qkv), position + len(qkv)
        gates = shape.heads if self._model.attention.output_gate else 0
        last = qkv.shape[1] - latent.kept
        cuts = [last - gates, last, qkv.shape[1] - latent.rotated]
        made, gate, vector, key = np.split(qkv, cuts, axis=-1)
        cos, sin = (table[position:end] for table in self._rope.arrays)
        query, made = self._find_queries(layer, made)
        plain, turned = query[..., : latent.plain], rotate(query[..., latent.plain :], cos, sin)
        padding = ((0, 0), (0, 0), (0, fill_groups(latent.plain) - latent.plain))
        by_head = self._read(layer, "latent_key").reshape(shape.heads, latent.rank, -1)
        absorbed = np.einsum("thp,hrp->thr", np.pad(plain, padding), by_head)
        query = np.concatenate([absorbed, turned], axis=-1)
        query = query * compute_growth(self._model, layer, position, end)[:, None, None]
        vector = self._normalize(layer, vector, "latent_norm")
        kept = np.concatenate([vector, rotate(key[:, None], cos, sin)[:, 0]], axis=-1)
        self.kept.keep(sequence, 0, layer, position, kept[:, None])
        keys = self.kept.read(sequence, 0, layer, end)[:, 0]

        visible = np.arange(end)[None, :] <= np.arange(position, end)[:, None]
        scale = np.float32(self._model.attention.scale or 1 / math.sqrt(latent.key))
        scores = np.einsum("thk,sk->hts", query, keys) * scale
        chosen = self.index.see(layer, x, made, (sequence, position), (cos, sin))
        seen = visible[None] if chosen is None else visible & chosen
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        found = np.einsum("hts,sr->thr", weights, keys[:, : latent.rank])
        padding = ((0, 0), (0, 0), (0, fill_groups(latent.rank) - latent.rank))
        by_head = self._read(layer, "latent_value").reshape(shape.heads, shape.head_dim, -1)
        mixed = np.einsum("thr,hvr->thv", np.pad(found, padding), by_head)
        if gates:
            mixed = mixed * take_sigmoid(gate)[:, :, None]
        mixed = mixed.reshape(count, -1)
        return np.pad(mixed, ((0, 0), (0, shape.stored_query - shape.query))).astype(np.float32)


class Attention:
    """KV caches of all sequences, and the tables of positions."""

    def __init__(self, request: BuildRequest, read: Callable[[int, str], F32]) -> None:
        """``read`` gives a tensor of a layer [rows, length]."""
        self._model, self._read = request.model, read
        self._head_norm = self._model.norm.model_copy(update={"kind": "rmsnorm"})
        self.kept = KvCache(request)
        self.index = KeyIndex(self._model, read, self.kept.keep_index)
        self._ropes = {}
        for turn in list_turns(self._model):
            arrays = np.empty((2, request.context, turn[1] // 2), np.float32)
            self._ropes[turn] = RopeTables(*turn, (arrays[0], arrays[1]))

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        for tables in self._ropes.values():
            tables.expect(end)

    def _normalize_heads(self, x: F32, layer: int, kind: str) -> F32:
        """Norm of queries or keys [T, heads, head_dim], of each head or of all together."""
        flat = x
        if self._model.attention.head_norm_of == "all":
            flat = x.reshape(len(x), -1)
        return normalize(self._head_norm, flat, self._read(layer, kind)).reshape(x.shape)

    def _turn(self, x: F32, layer: int, kind: str, position: int) -> F32:
        """Queries or keys [T, heads, head_dim] from ``position`` on as attention takes them: with
        their norm, cut and rotated."""
        attention = self._model.attention
        own = find_attention(self._model, layer)
        has_norm, is_first = own.head_norm, attention.head_norm_place == "before"
        if has_norm and is_first:
            x = self._normalize_heads(x, layer, kind)
        if attention.clip is not None:
            x = np.clip(x, -attention.clip, attention.clip)
        rope = self._ropes[own.turn]
        cos, sin = (table[position : position + len(x)] for table in rope.arrays)
        x = rotate(x, cos, sin)
        if has_norm and not is_first:
            x = self._normalize_heads(x, layer, kind)
        return x

    def _keep(self, layer: int, key: F32, value: F32, sequence: int, position: int) -> None:
        """Append keys and values [T, kv_heads, head_dim] of tokens from ``position`` on."""
        attention = self._model.attention
        if attention.value_norm:
            value = normalize(self._head_norm, value, np.ones(1, np.float32))
        if attention.clip is not None:
            value = np.clip(value, -attention.clip, attention.clip)
        key = self._turn(key, layer, "key_norm", position)
        self.kept.keep(sequence, 0, layer, position, key)
        self.kept.keep(sequence, 1, layer, position, value)

    def mix(self, layer: int, qkv: F32, x: F32, sequence: int, position: int) -> F32:
        """The mixed values of the queries of ``qkv`` [T, rows], made of ``x``; the sequence's KV
        cache is extended from ``position`` on."""
        shape, count = find_attention(self._model, layer), len(qkv)
        attention = shape.options
        end = position + count
        kv_width = shape.keys if shape.has_keys else 0
        keys_end, values_end = shape.query + kv_width, shape.query + 2 * kv_width
        query, key, value, gates = np.split(qkv, [shape.query, keys_end, values_end], axis=-1)
        query = query.reshape(count, shape.heads, shape.head_dim)
        query = self._turn(query, layer, "query_norm", position)
        query = query * compute_growth(self._model, layer, position, end)[:, None, None]
        if shape.has_keys:
            each = (count, shape.kv_heads, shape.head_dim)
            self._keep(layer, key.reshape(each), value.reshape(each), sequence, position)
        source = layer if shape.key_layer is None else shape.key_layer
        keys, values = (self.kept.read(sequence, kind, source, end) for kind in (0, 1))

        seen = np.arange(end)[None, :]
        now = np.arange(position, end)[:, None]
        visible = seen <= now
        window = shape.window
        if window is not None:
            is_chunked = attention.window_kind == "chunked"
            visible &= seen >= now // window * window if is_chunked else seen > now - window
        cos, sin = (table[position:end] for table in self._ropes[shape.turn].arrays)
        chosen = self.index.see(layer, x, x, (sequence, position), (cos, sin))
        scale = np.float32(attention.scale or 1 / math.sqrt(shape.head_dim))
        sinks = self._read(layer, "sinks")[0] if attention.sinks else None
        slopes = list_slopes(shape)
        mixed = np.empty((count, shape.heads, shape.head_dim), np.float32)
        for head in range(shape.heads):
            kv_head = head * shape.kv_heads // shape.heads
            scores = query[:, head] @ keys[:, kv_head].T
            scores = cap(scores * scale, attention.softcap)
            if slopes:
                scores = scores - np.float32(slopes[head]) * (now - seen)
            own = visible if chosen is None else visible & chosen[kv_head]
            scores = np.where(own, scores, -np.inf)
            top = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True)
            weights /= total if sinks is None else total + np.exp(sinks[head] - top)
            mixed[:, head] = weights @ values[:, kv_head]
        padding = np.zeros((count, shape.stored_query - shape.query), np.float32)
        flat = mixed.reshape(count, -1) * np.float32(attention.value_scale)
        if attention.output_gate:
            is_soft = attention.output_gate_function == "softplus"
            flat = flat * (take_softplus(gates) if is_soft else take_sigmoid(gates))
        return np.concatenate([flat, padding], axis=1)


Part = tuple[slice, int, int]
"""Tokens of a sequence, the sequence, and the position of the first of them."""


class Mixing:
    """One mixer after the other: a layer may have two of them."""

    def __init__(self, request: BuildRequest, tensors: DenseTensors) -> None:
        self._model = request.model
        self._tensors = tensors
        kind = Attention if self._model.attention.latent is None else LatentAttention
        self.attention = kind(request, tensors.read_layer)
        """The KV cache."""
        self._shape = describe_state(self._model)
        self.states = None if self._shape is None else States(request, self._shape)
        """States of layers that have one; None without such layers."""
        self._divided = request.rows or DividedRows(unit="")
        self._has_state = False
        """Whether the mixer keeps a state."""
        self._number = 0
        """Which of the layer's mixers it is."""
        self.read: F32 = np.zeros((0, self._model.shape.stored_hidden), np.float32)
        """Its input [T, hidden]."""
        self.mixed: F32 = self.read
        """What its output projection reads [T, width]."""
        self._products = self._gates = self._output = self.read

    def begin(self, layer: int, number: int, read: F32) -> None:
        """Let the calls that follow be about a layer's mixer ``number``, which reads ``read`` [T,
        hidden]."""
        mixer = self._model.blocks[layer].mixers[number]
        self._has_state, self._number = isinstance(mixer, State), number
        self.read = read

    def project(self, layer: int) -> None:
        """Multiply with the rows of its projection that no other unit computes."""
        if self._has_state:
            self._project_state(layer)
            return
        first = self._divided.qkv
        weights = self._tensors.read_layer(layer, "qkv")
        self._products = np.zeros((len(self.read), len(weights)), np.float32)
        self._products[:, first:] = self.read @ weights[first:].T
        if self._model.attention.has_bias:
            self._products += self._tensors.read_layer(layer, "qkv_bias")[0]

    def _project_state(self, layer: int) -> None:
        assert self._shape is not None
        self._products = self.read @ self._read_state(layer, "state_in").T
        if self._shape.projection_bias:
            self._products = self._products + self._read_state(layer, "state_in_bias")[0]
        self._gates = np.zeros((len(self.read), 0), np.float32)
        if self._shape.gates:
            self._gates = self.read @ self._read_state(layer, "state_gates").T

    def _read_state(self, layer: int, kind: str) -> F32:
        return self._tensors.read(name_state_tensor(layer, self._number, kind))

    def put_projected(self, values: F32) -> None:
        """Add the products [T, n] with the first rows."""
        self._products[:, : values.shape[1]] += values

    def mix(self, layer: int, parts: Sequence[Part]) -> F32:
        """Return what the mixer makes of all tokens [T, width], and keep what later ones need."""
        if self._has_state:
            assert self.states is not None
            mixed = [
                self.states.mix(
                    (sequence, layer, self._number),
                    self._products[tokens],
                    self._gates[tokens],
                    first,
                )
                for tokens, sequence, first in parts
            ]
        else:
            mixed = [
                self.attention.mix(layer, self._products[tokens], self.read[tokens], *place)
                for tokens, *place in parts
            ]
        self.mixed = np.concatenate(mixed)
        if not self._has_state and self._model.attention.sub_norm:
            weights = self._tensors.read_layer(layer, "attention_sub_norm")
            width = self._model.shape.query
            self.mixed = normalize(self._model.norm, self.mixed, weights, width=width)
        return self.mixed

    def project_output(self, layer: int) -> F32 | None:
        """Return the products with the mixer's output [T, hidden]; None if the first rows' are
        missing, which another unit computes."""
        if self._shape is not None and self._has_state:
            first, has_bias = 0, self._shape.projection_bias
            weights = self._read_state(layer, "state_output")
            bias = self._read_state(layer, "state_output_bias") if has_bias else None
        else:
            first, has_bias = self._divided.output, self._model.attention.output_bias
            weights = self._tensors.read_layer(layer, "output")
            bias = self._tensors.read_layer(layer, "output_bias") if has_bias else None
        self._output = np.zeros((len(self.mixed), len(weights)), np.float32)
        self._output[:, first:] = self.mixed @ weights[first:].T
        if bias is not None:
            self._output += bias[0]
        return self._output if first == 0 else None

    def put_output(self, values: F32) -> F32:
        """Complete what `project_output` has left with the products [T, n] with the first rows;
        return it [T, hidden]."""
        self._output[:, : values.shape[1]] += values
        return self._output
