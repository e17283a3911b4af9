"""Sizes of a token's arrays."""

from __future__ import annotations

from pi2.formats import Activations
from pi2.plan.documents.model import Model

_LINE = 64
STAGE_BYTES = 8192
"""Bytes in which a thread unpacks blocks of some rows."""

QUERIES = 8
"""Queries that are multiplied with the same keys at once."""
SCORES = 256
"""Positions whose scores are kept of each."""
_TILE_QUERIES = 32
"""Queries of tokens of a tile, of the heads that share keys."""


def count_tile_tokens(group: int) -> int:
    """Return the tokens of a tile of attention, where ``group`` heads share keys."""
    return max(1, _TILE_QUERIES // group)


def count_attention_bytes(group: int, head_dim: int, lanes: int) -> int:
    """Return the bytes that a thread needs for a tile of attention."""
    queries = -(-count_tile_tokens(group) * group // QUERIES) * QUERIES
    return 4 * (queries * (SCORES + head_dim + 2) + head_dim * lanes) + _LINE


def count_scratch_bytes(length: int, lanes: int) -> int:
    """Return the bytes that a thread needs for a panel of ``lanes`` rows of ``length``."""
    # Of 256 elements 64 registers are weights, and 25, or 24 of 8 groups, what belongs to them.
    registers = -(-length // 256) * (64 + 32)
    return STAGE_BYTES + registers * 4 * lanes


def count_quantized_bytes(kind: Activations, length: int) -> int:
    """Return the bytes of a token of ``length`` elements, whole cache lines."""
    if kind == "float":
        size = 4 * length
    elif kind == "q8_k":
        size = length + length // 64 + length // 8 + length // 16
    else:
        size = length + 3 * (length // 8)
    return -(-size // _LINE) * _LINE


def count_longest_input(model: Model) -> int:
    """Return the elements of the longest vector that a matrix is multiplied with."""
    shape, moe = model.shape, model.moe
    widths = [shape.hidden, shape.ffn, *(view.shape.query for view, _ in model.list_views())]
    if moe is not None:
        widths += [moe.shared_ffn or moe.shared_experts * shape.ffn, moe.dense_ffn or 0]
    return max(widths)


def count_token_bytes(model: Model, planes: int = 1) -> int:
    """Return the bytes that arrays of a token have at most: the residual stream, what norms give,
    queries, keys and values, what heads mix, gates and ups, and each of the inputs of matrices in
    ``planes`` of 8 bits in up to three orders."""
    hidden, ffn, moe = model.shape.hidden, model.shape.ffn, model.moe
    views = [view for view, _ in model.list_views()]
    query = max(view.shape.query for view in views)
    keys = max(view.shape.kv_heads * view.shape.head_dim for view in views)
    floats = 4 * hidden + 2 * query + 2 * keys
    if moe is not None:
        beside = max(moe.shared_ffn or moe.shared_experts * ffn, moe.dense_ffn or 0)
        floats += moe.experts + 4 * moe.active_experts
        ffn = moe.active_experts * ffn + beside
    floats += 3 * ffn
    inputs = (hidden, query, ffn)
    if planes > 1:
        floats += sum(inputs)
    codes = 3 * planes * sum(count_quantized_bytes("q8_0", width) for width in inputs)
    return 4 * floats + codes + 32 * _LINE
