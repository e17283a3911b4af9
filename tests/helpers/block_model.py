"""The computation of `pi2.backends.blocks` in numpy, written to be read."""

import math

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32
from pi2.backends.arithmetic import compute_growth, compute_rope_tables, route
from pi2.backends.blocks.instructions import FindWeight, Weight
from pi2.formats import Activations
from pi2.model.blocks import find_attention
from pi2.plan.documents.model import Model

F64 = npt.NDArray[np.float64]


def round_activations(x: npt.NDArray[np.floating], kind: Activations) -> F64:
    """Return activations [..., n] as a format's rows are multiplied with them."""
    x = x.astype(np.float32)
    if kind == "float":
        return x.astype(np.float64)
    size = 256 if kind == "q8_k" else 32
    blocks = x.reshape(*x.shape[:-1], -1, size)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    safe = np.where(extreme == 0, 1, extreme)
    if kind == "q8_k":
        inverse = np.where(extreme == 0, 0, np.float32(-127) / safe).astype(np.float32)
        codes = np.minimum(np.rint(blocks * inverse), 127)
        scales = np.divide(np.float32(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    else:
        top = np.abs(extreme)
        inverse = np.where(top == 0, 0, np.float32(127) / np.abs(safe)).astype(np.float32)
        codes = np.rint(blocks * inverse)
        scales = (top / np.float32(127)).astype(np.float16)
    return (codes.astype(np.float64) * scales.astype(np.float64)).reshape(x.shape)


class PlainBlockModel:
    """All logits of a text at once."""

    def __init__(self, model: Model, find: FindWeight, *, rounds: bool = True) -> None:
        """``rounds``: whether activations are rounded to what kernels multiply with."""
        self._model = model
        self._find = find
        self._rounds = rounds

    def compute(self, tokens: list[int]) -> F64:
        model = self._model
        embedding = self._decode(self._need("embedding", 0))
        x = embedding[tokens].astype(np.float64) * model.multipliers.embedding
        self._kept: dict[int, tuple[F64, F64]] = {}
        for layer in range(model.shape.layers):
            before = x
            x = self._add(x, self._attend(layer, x), layer, "attention_output_norm")
            read = before if model.residual == "parallel" else x
            x = self._add(x, self._compute_ffn(layer, read), layer, "ffn_output_norm")
        x = self._normalize("final_norm", 0, x)
        key = "embedding" if model.tied_head else "head"
        logits = self._multiply(self._need(key, 0), x)
        if model.head_bias:
            logits = logits + self._need("head_bias", 0).read()
        logits = logits * model.multipliers.logits
        return self._cap(logits, model.logit_softcap)

    def _need(self, key: str, layer: int) -> Weight:
        weight = self._find(key, layer)
        assert weight is not None, key
        return weight

    def _decode(self, weight: Weight, expert: int | None = None) -> F32:
        assert weight.data is not None
        raw = np.asarray(weight.data).reshape(weight.experts, weight.rows, weight.row_bytes)
        return weight.kind.decode(raw[expert or 0])

    def _multiply(self, weight: Weight, x: F64, expert: int | None = None) -> F64:
        rounded = round_activations(x, weight.kind.activations) if self._rounds else x
        scale = weight.scales[expert or 0] if weight.scales else 1.0
        return rounded @ self._decode(weight, expert).T.astype(np.float64) * scale

    def _cap(self, x: F64, limit: float | None) -> F64:
        return x if limit is None else limit * np.tanh(x / limit)

    def _normalize(self, key: str, layer: int, x: F64, *, is_rms: bool = False) -> F64:
        norm = self._model.norm
        if norm.kind == "layernorm" and not is_rms:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + norm.epsilon)
        weight = self._find(key, layer) if norm.weights or is_rms else None
        if weight is not None:
            x = x * (weight.read() + norm.weight_offset)
        bias = self._find(f"{key}_bias", layer) if norm.bias and not is_rms else None
        return x if bias is None else x + bias.read()

    def _normalize_input(self, key: str, layer: int, x: F64) -> F64:
        return self._normalize(key, layer, x) if self._model.norm.inputs else x

    def _add(self, x: F64, output: F64, layer: int, norm: str) -> F64:
        if self._model.norm.outputs:
            output = self._normalize(norm, layer, output)
        return x + output * self._model.multipliers.residual

    def _project(self, key: str, layer: int, x: F64, has_bias: bool) -> F64:
        output = self._multiply(self._need(key, layer), x)
        bias = self._find(f"{key}_bias", layer) if has_bias else None
        return output if bias is None else output + bias.read()

    def _turn(self, layer: int, x: F64, neighbours: bool) -> F64:
        rope, width = find_attention(self._model, layer).rope, x.shape[-1]
        rotated = rope.count_rotated(width)
        if not rotated:
            return x
        cos, sin = (t[:, None, : rotated // 2] for t in compute_rope_tables(rope, width, len(x)))
        turned, rest = x[..., :rotated], x[..., rotated:]
        if neighbours or rope.pairs == "neighbours":
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = np.split(turned, 2, axis=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        if neighbours or rope.pairs == "neighbours":
            return np.concatenate([np.stack(pair, -1).reshape(turned.shape), rest], -1)
        return np.concatenate([*pair, rest], -1)

    def _attend(self, layer: int, x: F64) -> F64:
        model, attention = self._model, self._model.attention
        shape, count = find_attention(model, layer), len(x)
        read = self._normalize_input("attention_norm", layer, x)
        fused = self._find("fused_qkv", layer) if model.tensors.fused_qkv is not None else None
        keys = shape.keys
        if fused is not None:
            flat = self._project("fused_qkv", layer, read, attention.qkv_bias)
            parts = np.split(flat, [shape.query, shape.query + keys], axis=-1)
            neighbours = fused.neighbours
        else:
            kinds = ("query", "key", "value") if shape.has_keys else ("query",)
            parts = [self._project(kind, layer, read, attention.qkv_bias) for kind in kinds]
            neighbours = self._need("query", layer).neighbours
        turned = []
        for place, part in enumerate(parts[:2]):
            own, norm = part, ("query_norm", "key_norm")[place]
            has_norm = shape.head_norm
            if has_norm and attention.head_norm_of == "all":
                own = self._normalize(norm, layer, own, is_rms=True)
            own = own.reshape(count, -1, shape.head_dim)
            is_of_heads = has_norm and attention.head_norm_of == "head"
            if is_of_heads and attention.head_norm_place == "before":
                own = self._normalize(norm, layer, own, is_rms=True)
            own = self._turn(layer, own, neighbours)
            if is_of_heads and attention.head_norm_place == "after":
                own = self._normalize(norm, layer, own, is_rms=True)
            turned.append(own)
        if shape.has_keys:
            value = parts[2].reshape(count, -1, shape.head_dim)
            self._kept[layer] = (
                turned[1].astype(np.float16).astype(np.float64),
                value.astype(np.float16).astype(np.float64),
            )
        kept, values = self._kept[layer if shape.key_layer is None else shape.key_layer]
        query = turned[0] * compute_growth(model, layer, 0, count)[:, None, None]
        now, seen = np.arange(count)[:, None], np.arange(count)[None, :]
        visible = (seen <= now) & (seen > now - (shape.window or count))
        sinks = self._need("sinks", layer).read() if shape.sinks else None
        scale = attention.scale or 1 / math.sqrt(shape.head_dim)
        mixed = np.empty((count, shape.heads, shape.head_dim))
        for head in range(shape.heads):
            own_head = head * shape.kv_heads // shape.heads
            scores = self._cap(query[:, head] @ kept[:, own_head].T * scale, attention.softcap)
            scores = np.where(visible, scores, -np.inf)
            if sinks is not None:
                scores = np.concatenate([scores, np.full((count, 1), sinks[head])], 1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed[:, head] = weights[:, :count] @ values[:, own_head]
        flat = mixed.reshape(count, -1)
        if attention.sub_norm:
            flat = self._normalize("attention_sub_norm", layer, flat, is_rms=True)
        return self._project("output", layer, flat, attention.output_bias)

    def _activate(self, gate: F64, up: F64 | None) -> F64:
        ffn = self._model.ffn
        if ffn.limit is not None and up is not None:
            gate, up = np.minimum(gate, ffn.limit), np.clip(up, -ffn.limit, ffn.limit)
            return gate / (1 + np.exp(-ffn.slope * gate)) * (up + ffn.up_offset)
        if ffn.activation == "silu":
            active = gate / (1 + np.exp(-gate))
        elif ffn.activation == "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            active = 0.5 * gate * (1 + np.tanh(inner))
        elif ffn.activation == "gelu":
            active = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        else:
            active = np.maximum(gate, 0) ** (2 if ffn.activation == "relu2" else 1)
        return active if up is None else active * up

    def _compute_ffn(self, layer: int, x: F64) -> F64:
        model = self._model
        read = self._normalize_input("ffn_norm", layer, x)
        if model.moe is None:
            return self._compute_dense(layer, read, ("gate", "up", "down"), "fused_gate_up")
        if not model.blocks[layer].ffn.has_router:
            kinds = ("dense_gate", "dense_up", "dense_down")
            return self._compute_dense(layer, read, kinds, "fused_dense")
        return self._compute_mixture(layer, read)

    def _compute_dense(
        self, layer: int, read: F64, kinds: tuple[str, str, str], fused_kind: str,
        scale: F64 | None = None,
    ) -> F64:  # fmt: skip
        ffn = self._model.ffn
        has_fused = getattr(self._model.tensors, fused_kind) is not None
        fused = self._find(fused_kind, layer) if has_fused else None
        if fused is not None:
            both = self._project(fused_kind, layer, read, ffn.bias)
            gate, up = np.split(both, 2, axis=-1)
        elif ffn.gated:
            gate = self._project(kinds[0], layer, read, ffn.bias)
            up = self._project(kinds[1], layer, read, ffn.bias)
        else:
            gate, up = self._project(kinds[1], layer, read, ffn.bias), None
        active = self._activate(gate, up)
        if ffn.sub_norm:
            active = self._normalize("ffn_sub_norm", layer, active, is_rms=True)
        if scale is not None:
            active = active * scale
        return self._project(kinds[2], layer, active, ffn.bias)

    def _compute_mixture(self, layer: int, read: F64) -> F64:
        model, moe = self._model, self._model.moe
        assert moe is not None
        scores = self._multiply(self._need("router", layer), read)
        if moe.router_bias:
            scores = scores + self._need("router_bias", layer).read()
        choice = self._need("choice_bias", layer).read()[None] if moe.choice_bias else None
        weights = route(moe, scores.astype(np.float32), choice)
        output = np.zeros_like(read)
        for expert in range(moe.experts):
            own = weights[:, expert : expert + 1].astype(np.float64)
            used = np.flatnonzero(own)
            if not len(used):
                continue
            inputs = read[used] * (own[used] if moe.weighs == "input" else 1.0)
            terms = []
            for key in ("gate", "up") if model.ffn.gated else ("up",):
                terms.append(self._multiply(self._need(key, layer), inputs, expert))
                terms[-1] = terms[-1] + self._read_bias(key, layer, expert)
            active = self._activate(terms[0], terms[1] if model.ffn.gated else None)
            given = self._multiply(self._need("down", layer), active, expert)
            given = given + self._read_bias("down", layer, expert)
            output[used] += given if moe.weighs == "input" else given * own[used]
        if moe.shared_experts:
            scale = None
            if moe.shared_gate:
                scale = 1 / (1 + np.exp(-self._multiply(self._need("shared_router", layer), read)))
            kinds = ("shared_gate", "shared_up", "shared_down")
            shared = self._compute_dense(layer, read, kinds, "fused_shared", scale)
            output = output + shared * moe.shared_factor
        return output

    def _read_bias(self, key: str, layer: int, expert: int) -> F64:
        if not self._model.ffn.bias:
            return np.zeros(1)
        rows = self._need(key, layer).rows
        bias = self._need(f"{key}_bias", layer).read()
        return bias[expert * rows : (expert + 1) * rows].astype(np.float64)
