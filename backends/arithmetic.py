"""Arithmetic in numpy that several backends share: routers, RoPE, ranges of neurons."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pi2.arrays import F32, F64, I32, I64
from pi2.backends.protocol import Tensor
from pi2.model.blocks import Attention
from pi2.model.tensor import name_layer_tensor
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.documents.model_parts import Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """What routes the tokens of a layer: float32 arrays."""

    moe: Moe
    weights: F32 | None = None
    """[experts, hidden]; None for a layer without router."""
    bias: F32 | None = None
    """[1, experts], added to scores."""
    choice_bias: F32 | None = None
    """[1, experts], added to weights or scores to choose by."""
    norm: F32 | None = None
    """[1, hidden], of an RMSNorm of the router's input."""
    epsilon: float = 0.0
    """Added to the mean of squares there."""
    width: int = 0
    """Elements that it is taken of; zeros follow."""
    expert_scale: F32 | None = None
    """[1, experts], factors of the experts' weights."""
    shared: F32 | None = None
    """[1, hidden], the router of the shared experts."""
    down_biases: F32 | None = None
    """[experts, hidden]: what each expert adds to the FFN's sum, times its weight."""
    experts: int
    """All experts of a layer, with shared ones and the ones that only dense layers need."""
    dense_experts: int
    """Experts that hold the FFN of a layer without router."""

    def route(self, inputs: F32) -> F32:
        """Weights float32 [T, experts] of all experts for ``inputs`` [T, hidden], 0 for experts
        that do not compute a token."""
        weights = np.zeros((len(inputs), self.experts), np.float32)
        if self.weights is None:
            weights[:, : self.dense_experts] = 1
            return weights
        first, inputs = self.moe.experts, self._normalize(inputs)
        weights[:, :first] = route(self.moe, self._multiply(inputs), self.choice_bias)
        if self.expert_scale is not None:
            weights[:, :first] *= self.expert_scale
        shared = weights[:, first : first + self.moe.shared_experts]
        shared[:] = self.moe.shared_factor
        if self.shared is not None:
            shared /= 1 + np.exp(-(inputs @ self.shared.T))
        return weights

    def score(self, inputs: F32) -> F32:
        """Scores float32 [T, experts] of the experts that are not shared, for ``inputs``
        [T, hidden]; of a layer with a router."""
        return self._multiply(self._normalize(inputs))

    def _normalize(self, inputs: F32) -> F32:
        if self.norm is None:
            return inputs
        squares = np.square(inputs).sum(axis=-1, keepdims=True) / np.float32(self.width)
        inputs = inputs / np.sqrt(squares + np.float32(self.epsilon)) * self.norm
        return np.asarray(inputs * np.float32(self.moe.input_scale))

    def _multiply(self, inputs: F32) -> F32:
        assert self.weights is not None, "the layer has no router"
        scores = inputs @ self.weights.T
        return np.asarray(scores if self.bias is None else scores + self.bias)

    def add_biases(self, routes: F32) -> F32:
        """What the biases of the experts add to the FFN's sum [T, hidden], by ``routes``."""
        assert self.down_biases is not None
        used = np.flatnonzero(routes.any(axis=0))
        return np.asarray(routes[:, used] @ self.down_biases[used])


def make_routers(model: Model, read: Callable[[str], F32]) -> list[Router]:
    """Routers of all layers; ``read`` gives a tensor of the store in float32 [rows, length]."""
    moe, routers = model.moe, []
    if moe is None:
        return []
    for layer, ffn in enumerate(block.ffn for block in model.blocks):

        def find(kind: str, is_there: bool, layer: int = layer) -> F32 | None:
            return read(name_layer_tensor(layer, kind)) if is_there else None

        mixed = ffn.has_router
        routers.append(
            Router(
                moe=moe,
                weights=find("router", mixed),
                bias=find("router_bias", mixed and moe.router_bias),
                choice_bias=find("choice_bias", mixed and moe.choice_bias),
                norm=find("router_norm", mixed and moe.router_input == "stream"),
                epsilon=model.norm.epsilon,
                width=model.shape.hidden,
                expert_scale=find("expert_scale", mixed and moe.expert_scale),
                shared=find("shared_router", mixed and moe.shared_gate),
                down_biases=find("down_bias", model.ffn.bias),
                experts=model.expert_count,
                dense_experts=0 if mixed else ffn.active,
            )
        )
    return routers


def read_rows(tensor: Tensor) -> F32:
    """Rows of a tensor of float32 [rows, length]."""
    return np.asarray(tensor.weights).view(np.float32).reshape(-1, tensor.length)


def route(moe: Moe, scores: F32, choice_bias: F32 | None = None) -> F32:
    """Weights [T, experts] of chosen, unshared experts, else 0, by ``scores`` [T, experts];
    ``softmax`` spans all experts before the choice, as in Mixtral."""
    weights = np.zeros_like(scores)
    rows = np.arange(len(scores))[:, None]
    if moe.router == "mixer":
        chosen, best = _mix(moe, scores)
    else:
        shares = _take_shares(moe, scores)
        worth = scores if moe.choice_bias_of == "score" else shares
        wanted = worth if choice_bias is None else worth + choice_bias
        if moe.groups > 1:
            wanted = np.where(_choose_groups(moe, wanted), wanted, -np.inf)
        chosen = _find_best(wanted, moe.active_experts)
        best = shares[rows, chosen]
        if moe.normalise_weights:
            best = best / np.maximum(best.sum(axis=-1, keepdims=True), np.float32(1e-20))
    # numpy's put_along_axis takes longer, once or twice a layer between kernels.
    weights[rows, chosen] = best * np.float32(moe.scaling)
    return weights


def _take_shares(moe: Moe, scores: F32) -> F32:
    if moe.router == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-scores)))
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))


def _find_best(values: F32, count: int) -> I64:
    """Places of the largest values of each row [T, count]; of equal ones the first."""
    return np.argsort(-values, axis=-1, kind="stable")[:, :count]


def _choose_groups(moe: Moe, wanted: F32) -> F32:
    """Whether each expert's group is one of the best [T, experts], as bool."""
    grouped = wanted.reshape(len(wanted), moe.groups, -1)
    count = 1 if moe.group_score == "best" else 2
    worth = np.sort(grouped, axis=-1)[..., -count:].sum(axis=-1)
    active = np.zeros_like(worth, np.bool_)
    np.put_along_axis(active, _find_best(worth, moe.active_groups), True, axis=-1)
    return np.repeat(active, grouped.shape[-1], axis=-1)


def _mix(moe: Moe, scores: F32) -> tuple[I64, F32]:
    """Chosen experts and weights [T, active experts] by SparseMixer (arXiv 2409.12136): each is the
    best left, weighted by the softmax of scores not much lower."""
    left = scores.copy()
    chosen, weights = [], []
    for _ in range(moe.active_experts):
        best = _find_best(left, 1)
        top = np.take_along_axis(left, best, axis=-1)
        far = (top - scores) / np.maximum(np.abs(scores), top) > 2 * moe.tolerance
        counted = np.where(far, -np.inf, left)
        shares = np.exp(counted - top)
        shares /= shares.sum(axis=-1, keepdims=True)
        chosen.append(best)
        weights.append(np.take_along_axis(shares, best, axis=-1))
        np.put_along_axis(left, best, -np.inf, axis=-1)
    return np.concatenate(chosen, axis=-1), np.concatenate(weights, axis=-1)


def list_chosen(routes: F32) -> I32:
    """Experts, ascending, that compute a token, from its weights float32 [experts]."""
    # `flatnonzero` is three functions of Python.
    return routes.nonzero()[0].astype(np.int32)


def slice_tensor(tensor: Tensor, part: int, parts: int) -> Tensor:
    """Rows of part ``part`` of ``parts`` equal ones; a tensor of one row is cut in its length."""
    if parts == 1:
        # Whole, also where one row is packed into another number of elements.
        return tensor
    if tensor.rows == 1:
        size = tensor.length // parts
        values = tensor.weights[:, part * size : (part + 1) * size]
        return replace(tensor, length=size, weights=values)
    size = tensor.rows // parts
    rows = slice(part * size, (part + 1) * size)
    scales = None if tensor.scales is None else tensor.scales[rows]
    return replace(tensor, rows=size, weights=tensor.weights[rows], scales=scales)


def compute_frequencies(rope: Rope, head_dim: int, *, is_long: bool = False) -> F64:
    """Angular frequencies [head_dim / 2] in radians per token, rotated pairs first.

    ``linear`` divides all by the factor; ``llama3`` divides the long wavelengths, keeps the short
    ones, and blends between (the rule that Llama 3.1 published with its configuration); ``yarn``
    blends by the number of rotations within the original context (arXiv 2309.00071, section 3.2);
    ``longrope`` divides each by its own number, another if ``is_long`` (arXiv 2402.13753);
    ``proportional`` divides all by the factor, and leaves the last pairs as they are."""
    rotated = rope.count_rotated(head_dim)
    frequencies = np.zeros(head_dim // 2)
    if rotated:
        plain = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        frequencies[: rotated // 2] = _scale(rope, plain, rotated, is_long)
    return frequencies


class RopeTables:
    """Cosines and sines [context, head_dim / 2] in fixed arrays; ``longrope`` takes the length
    after the call, as transformers does."""

    def __init__(self, rope: Rope, head_dim: int, arrays: tuple[F32, F32]) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._is_long = False
        self.arrays = arrays
        self._fill()

    def expect(self, end: int) -> None:
        """Prepare for calls that bring the sequence to ``end`` tokens."""
        is_long = self._rope.is_long(end)
        if is_long != self._is_long:
            self._is_long = is_long
            self._fill()

    def _fill(self) -> None:
        context = len(self.arrays[0])
        tables = compute_rope_tables(self._rope, self._head_dim, context, is_long=self._is_long)
        for array, table in zip(self.arrays, tables, strict=True):
            array[:] = table


def compute_rope_tables(
    rope: Rope, head_dim: int, context: int, *, is_long: bool = False
) -> tuple[F32, F32]:
    """Cosines and sines [context, head_dim / 2], float32."""
    angles = np.outer(np.arange(context), compute_frequencies(rope, head_dim, is_long=is_long))
    cosines, sines = np.cos(angles), np.sin(angles)
    factor = _find_factor(rope, is_long)
    if factor != 1.0:
        pairs = rope.count_rotated(head_dim) // 2
        cosines[:, :pairs] *= factor
        sines[:, :pairs] *= factor
    return cosines.astype(np.float32), sines.astype(np.float32)


def _find_factor(rope: Rope, is_long: bool) -> float:
    if is_long and rope.long_attention_factor is not None:
        return rope.long_attention_factor
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        return 0.1 * math.log(rope.factor) + 1.0
    if rope.kind == "longrope":
        return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def list_slopes(shape: Attention) -> list[float]:
    """Falls of scores with every token of distance, by heads; none if scores do not fall."""
    alibi, heads = shape.options.alibi, shape.heads
    if alibi is None:
        return []
    whole = 1 << (heads.bit_length() - 1)
    odd = range(1, 2 * (heads - whole), 2)
    shares = [*(head / whole for head in range(1, whole + 1)), *(own / whole / 2 for own in odd)]
    return [2.0 ** (-alibi * share) for share in shares]


def compute_growth(model: Model, layer: int, first: int, end: int) -> F32:
    """Factors float32 [end - first] of queries of ``layer`` at positions from ``first`` on, which
    grow with every interval; 1 in layers where they do not."""
    own = model.blocks[layer].attention
    if own is None or own.growth == 0.0:
        return np.ones(end - first, np.float32)
    interval = own.options.growth_interval or model.rope.original_context
    turns = np.floor((np.arange(first, end) + own.options.growth_offset) / interval)
    return (1 + own.growth * np.log1p(turns)).astype(np.float32)


def _scale(rope: Rope, frequencies: F64, rotated: int, is_long: bool) -> F64:
    """Frequencies [rotated / 2] with the scaling of ``rope``."""
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        turning = np.arange(rotated // 2) < int(rope.share * rotated / 2)
        return frequencies * turning / rope.factor
    if rope.kind == "longrope":
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / np.asarray(factors, np.float64)
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        turns = rope.original_context / wavelengths
        # Where both are the same, as in Llama 4, nothing is between them.
        width = (high - low) or math.ulp(low)
        kept = np.clip((turns - low) / width, 0.0, 1.0)
    elif rope.kind == "yarn":
        first = _find_pair(rope, rope.fast_rotations, rotated)
        last = _find_pair(rope, rope.slow_rotations, rotated)
        if rope.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        # The published code widens an empty range, so as not to divide by zero.
        width = (last - first) or 0.001
        kept = 1 - np.clip((np.arange(rotated // 2) - first) / width, 0.0, 1.0)
    else:
        return frequencies
    return np.asarray((1 - kept) * frequencies / rope.factor + kept * frequencies)


def _find_pair(rope: Rope, rotations: float, rotated: int) -> float:
    """Number of the pair that turns ``rotations`` times within the original context."""
    turns = rope.original_context / (rotations * 2 * math.pi)
    return rotated * math.log(turns) / (2 * math.log(rope.theta))
