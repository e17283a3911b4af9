"""Bytes of a model without its weights, as numbers before anything is allocated: plain Python."""

from __future__ import annotations

from pi2.backends.blocks.contract import describe_heads
from pi2.backends.executor import CONTEXT_BLOCK
from pi2.formats import Activations
from pi2.formats.packing import round_up
from pi2.model.attention import Attention
from pi2.model.blocks import count_indexes, list_attention, list_turns
from pi2.model.states import describe_state
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.arithmetic.units import KV_ELEMENT_BYTES, count_state_bytes, find_index_type
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Index
from pi2.plan.documents.plan import KvType

_LINE = 64
STAGE_BYTES = 8192
"""Bytes in which a thread unpacks blocks of some rows."""
STRETCH = 1024
"""Elements of a row that are unpacked at a time, at most."""
PANEL_TOKENS = 512
"""Tokens that share a panel; each has sums."""

QUERIES = 8
"""Queries that are multiplied with the same keys at once."""
SCORES = 256
"""Positions whose scores are kept of each."""
TILE, TILE_POSITIONS = 48, 64
"""Queries of a tile of tokens of a chunk, and positions that are unpacked at once for it."""
UNPACKED = TILE_POSITIONS + 1
"""Places from one piece of those to the next: other sets of the first-level cache."""


SINGLE = 7
"""Tokens at most that are computed one by one."""
PARTS = 8
"""Parts of a context at most, of `SCORES` positions at least."""
PARTIAL = 16
"""Elements of a part in addition to the mixed values: its largest score and its sum."""
LIST_HEAD = 16
"""Numbers before the positions that an index has chosen: how many they are."""
LIST_TAIL = 64
"""Numbers behind them, which are read ahead and not used."""
SCORES_ROW = SCORES + 32
"""Scores of a query, with room for positions before and behind."""


def count_tile_tokens(group: int) -> int:
    """Return the tokens of a tile of attention if ``group`` heads share keys."""
    return max(1, TILE // group)


def count_attention_bytes(key: int, value: int) -> int:
    """Return the bytes that a thread needs for heads of ``key`` and ``value`` elements."""
    tile = TILE * (TILE_POSITIONS + key + value + 6) + UNPACKED * max(key, value)
    return 4 * max(tile, 4 * SCORES_ROW) + _LINE


def count_partial_bytes(heads: int, value: int, threads: int, tokens: int = SINGLE) -> int:
    """Return the bytes of all parts of the contexts of ``tokens``, `SINGLE` at least, or of one
    part for each thread."""
    parts = max(max(SINGLE, tokens) * PARTS, threads)
    return 4 * parts * heads * (value + PARTIAL)


def count_list_numbers(index: Index) -> int:
    """Return the numbers that a list of chosen positions has room for."""
    return -(-(LIST_HEAD + index.reach + LIST_TAIL) // 16) * 16


def count_lists(index: Index) -> int:
    """Return the lists that an index makes of each token."""
    return 1 if index.kind == "tokens" else index.heads


def count_score_rows(index: Index, threads: int) -> int:
    """Return the rows of scores, one for each list of a step's tokens, or of each thread."""
    return max(SINGLE, threads) * count_lists(index)


def count_panel_bytes(lanes: int) -> int:
    """Return the bytes of a stretch of ``lanes`` rows, unpacked."""
    # Of 256 elements 64 registers are weights, and 25, or 24 of 8 groups, what belongs to them.
    return STRETCH // 256 * (64 + 32) * 4 * lanes


TOGETHER = 8
"""Tokens that are multiplied together, at most."""


def count_scratch_bytes(lanes: int, tokens: int, planes: int) -> int:
    """Return the bytes that a thread needs for a panel of ``lanes`` rows, and for its sums of so
    many tokens."""
    sums = round_up(min(tokens, PANEL_TOKENS), TOGETHER)
    return STAGE_BYTES + count_panel_bytes(lanes) + planes * sums * 4 * lanes


def count_quantized_bytes(kind: Activations, length: int) -> int:
    """Return the bytes of a token of ``length`` elements, whole cache lines."""
    if kind == "float":
        size = 4 * length
    elif kind == "q8_k":
        size = length + length // 64 + length // 8 + length // 16
    else:
        size = length + 3 * (length // 8)
    return -(-size // _LINE) * _LINE


_PAIR_NUMBERS = 18
"""Numbers of each pair of a token and an expert, in lists by token and by expert."""


def count_token_bytes(model: Model, planes: int = 1, orders: int = 3) -> int:
    """Most bytes of a token's arrays, from the residual stream to gates and ups. Quantised inputs
    have ``planes`` and up to so many ``orders``."""
    hidden, ffn, moe = model.shape.hidden, model.shape.ffn, model.moe
    attention = [own for own, _ in list_attention(model)]
    query, keys = max(own.query for own in attention), max(own.keys for own in attention)
    floats, latent = 4 * hidden + 2 * query + 2 * keys, model.attention.latent
    if latent is not None:
        kept = latent.kept + latent.rank + latent.key + 1
        floats += model.shape.heads * kept + (latent.query_rank or 0) + latent.kept
    if moe is not None:
        beside = max(moe.shared_ffn or moe.shared_experts * ffn, moe.dense_ffn or 0)
        floats += moe.experts + _PAIR_NUMBERS * moe.active_experts
        ffn = moe.active_experts * ffn + beside
        floats += 5 * hidden + 2 * (moe.latent or 0)
        if model.side_ffn is not None:
            floats += 3 * model.side_ffn.width
    floats += 3 * ffn
    if model.layer_embedding is not None:
        floats += (model.shape.layers + 3) * model.layer_embedding.width
    state = describe_state(model)
    if model.attention.output_gate:
        floats += 2 * query
    width = 0 if state is None else state.width
    if state is not None:
        # Products, what is convolved, factors, mixed and gated values, and what latents give.
        floats += state.rows + state.gates + state.channels + state.factors + 2 * width
        floats += state.decays * (state.decay_rank > 0) + width * (state.gate_rank > 0)
    ranks = 0 if state is None else max(state.decay_rank, state.gate_rank, state.step_rank)
    inputs = [hidden, query, ffn, width, ranks, 2 * hidden if model.is_mtp else 0]
    if latent is not None:
        heads = model.shape.heads
        inputs += [heads * latent.plain, heads * latent.rank, latent.query_rank or 0]
    floats += 3 * hidden if model.is_mtp else 0
    index = model.attention.index
    if index is not None:
        # Queries, a key and weights of heads, and lists.
        floats += index.heads * (index.width + 1) + index.width + 4
        floats += count_lists(index) * count_list_numbers(index)
    if model.altup is not None:
        count = model.altup.streams
        floats += (4 * count + 1) * hidden + count * (count + 1) + model.altup.laurel_rank
        inputs += [hidden, (count - 1) * hidden, model.altup.laurel_rank, count]
    if model.hyper is not None:
        side, width = model.hyper.streams + 1, model.hyper.streams * hidden
        floats += 3 * width + 2 * model.shape.stored_hidden + model.hyper.factors + 2 * side * side
        inputs.append(width)
    widths = set(inputs)
    if planes > 1:
        floats += sum(widths)
    codes = orders * planes * sum(count_quantized_bytes("q8_0", width) for width in widths)
    return 4 * floats + codes + 32 * _LINE


_MOST_LANES = 16
"""Lanes of the widest registers."""

_VECTORS = 4
"""Tables of a layer, in vectors as long as what attention reads and mixes."""
_TABLES_BYTES = 64 << 10
"""Tables of formats, and the ends of arrays that begin at cache lines."""


_LEAST_CALL = 64
"""Tokens that every ring has room for in addition to its window: drafts may be taken back."""


def count_positions(own: Attention, context: int, tokens: int | None) -> int:
    """Return the positions of a sequence that a layer keeps: those of its window and of a call of
    ``tokens``, in whole blocks; the whole context without a window, and for None."""
    if own.window is None or own.index is not None or tokens is None:
        return context
    return min(context, round_up(own.window + max(tokens, _LEAST_CALL), CONTEXT_BLOCK) + 16)


def count_kv_bytes(
    model: Model, context: int, sequences: int, kind: KvType = "fp16", tokens: int | None = None
) -> int:
    """Return the bytes of the KV cache if calls have ``tokens`` at most."""
    context = -(-context // CONTEXT_BLOCK) * CONTEXT_BLOCK
    total = 0
    for own in (block.attention for block in model.blocks):
        if own is not None and own.has_keys:
            heads, kept = describe_heads(own), count_positions(own, context, tokens)
            vectors = sequences * heads.key_heads * kept
            total += sum(count_cache_bytes(kind, vectors, width) for width in heads.widths)
    index = model.attention.index
    if index is not None:
        own_kind = find_index_type(kind)
        each = count_cache_bytes(own_kind, sequences * context, index.width)
        total += count_indexes(model) * each
    return total


def count_cache_bytes(kind: KvType, vectors: int, width: int) -> int:
    """Return the bytes of so many vectors in the KV cache; int8 ones have an fp16 scale each."""
    scale = 2 if kind == "int8" else 0
    return vectors * (width * KV_ELEMENT_BYTES[kind] + scale)


def count_sequence_states(model: Model, sequences: int) -> int:
    """Return the bytes of the states of so many sequences."""
    return sequences * len(model.states) * count_state_bytes(model)


def _count_tables(model: Model, context: int, is_stored: bool) -> int:
    """Most bytes of what layers look up: places of heads, experts and channels, factors."""
    shape, own = model.shape, describe_state(model)
    size = 0
    # Vectors of stores are used where they lie.
    if not is_stored or own is not None or model.attention.output_gate:
        size = _VECTORS * 4 * shape.layers * (shape.hidden + shape.query)
    size += 16 * shape.layers * model.expert_count
    size += 4 * context * sum(item.growth != 0.0 for item, _ in list_attention(model))
    if own is not None:
        size += len(model.states) * 4 * (own.channels * (own.kernel + 3) + 2 * own.rows)
    return size + _TABLES_BYTES


def count_workspace_bytes(
    model: Model,
    chunk: int,
    step_tokens: int,
    planes: int = 1,
    *,
    context: int = 0,
    threads: int = 1,
    is_stored: bool = False,
) -> int:
    """Return the most bytes that computing ``chunk`` tokens, or steps of ``step_tokens``, takes
    without weights and KV cache; ``is_stored``: of a neuron store's tensors."""
    rows = max(LOGIT_ROWS, step_tokens)
    tokens = max(chunk, rows)
    turns = sum(4 * max(width, 2) for _, width in list_turns(model))
    heads = [(own.heads, describe_heads(own)) for own, _ in list_attention(model)]
    scratch = max(
        count_scratch_bytes(_MOST_LANES, tokens, planes),
        *(count_attention_bytes(own.key, own.value) for _, own in heads),
    )
    index, scores = model.attention.index, 0
    if index is not None:
        scratch = max(scratch, 4 * _MOST_LANES * index.width)
        scores = 4 * count_score_rows(index, threads) * (context + CONTEXT_BLOCK)
    state, vectors = describe_state(model), 0
    if state is not None:
        # Weights of the convolution, places, and vectors of heads.
        each = (state.kernel + 2) * state.channels + 2 * state.width
        each += state.memory if state.step_rank else 0
        vectors = len(model.states) * each
    return (
        tokens * count_token_bytes(model, planes, 2 if is_stored else 3)
        + 4 * vectors
        + rows * (4 * model.shape.vocab + 64)
        + (context + CONTEXT_BLOCK) * turns
        + threads * scratch
        + scores
        + max(
            count_partial_bytes(count, own.value, threads, step_tokens if is_stored else SINGLE)
            for count, own in heads
        )
        + _count_tables(model, context, is_stored)
    )
