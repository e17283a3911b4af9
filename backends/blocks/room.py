"""Memory of a model without its weights, as numbers before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from pi2.arrays import F16, F32, U8, Raw
from pi2.backends.blocks.contract import KV_TYPES, MOST_TOGETHER, PLANES, describe_heads
from pi2.backends.executor import CONTEXT_BLOCK
from pi2.formats import Activations
from pi2.formats.packing import align_bytes
from pi2.model.blocks import count_indexes, list_attention, list_turns
from pi2.model.states import describe_state
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.arithmetic.units import count_state_bytes, find_index_type
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Index
from pi2.plan.documents.plan import KvType

_LINE = 64
STAGE_BYTES = 8192
"""Bytes in which a thread unpacks blocks of some rows."""
STRETCH = 8192
"""Elements of a row that are unpacked at a time, at most."""
PANEL_TOKENS = 512
"""Tokens that share a panel; each has sums."""

QUERIES = 8
"""Queries that are multiplied with the same keys at once."""
SCORES = 256
"""Positions whose scores are kept of each."""
_TILE_QUERIES = 32
"""Queries of tokens of a tile, of the heads that share keys."""


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
    return max(1, _TILE_QUERIES // group)


def count_attention_bytes(group: int, key: int, value: int, lanes: int) -> int:
    """Return the bytes that a thread needs for heads of ``key`` and ``value`` elements."""
    queries = -(-count_tile_tokens(group) * group // QUERIES) * QUERIES
    tile = queries * (SCORES + value + 2) + key * lanes
    return 4 * max(tile, 4 * SCORES_ROW) + _LINE


def count_partial_bytes(heads: int, value: int, threads: int) -> int:
    """Return the bytes of all parts of the contexts of some tokens, or of one part for each
    thread."""
    return 4 * max(SINGLE * PARTS * heads, MOST_TOGETHER * threads) * (value + PARTIAL)


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


def count_scratch_bytes(lanes: int) -> int:
    """Return the bytes that a thread needs for a panel of ``lanes`` rows, and for its sums."""
    return STAGE_BYTES + count_panel_bytes(lanes) + max(PLANES.values()) * PANEL_TOKENS * 4 * lanes


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


def count_token_bytes(model: Model, planes: int = 1) -> int:
    """Most bytes of a token's arrays, from the residual stream to gates and ups. Quantised inputs
    have ``planes`` and up to three orders."""
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
    if planes > 1:
        floats += sum(inputs)
    codes = 3 * planes * sum(count_quantized_bytes("q8_0", width) for width in inputs)
    return 4 * floats + codes + 32 * _LINE


GRIDS: Mapping[str, int] = {
    "iq1_s": 2048 * 8,
    "iq1_m": 2048 * 8,
    "iq2_xxs": 256 * 8,
    "iq2_xs": 512 * 8,
    "iq2_s": 1024 * 8,
    "iq3_xxs": 256 * 4,
    "iq3_s": 512 * 4,
}
"""Bytes of each format's grid."""


def count_table_bytes(name: str) -> int:
    """Return the bytes of the tables of a format; 0 where it has none."""
    return GRIDS[name] + 128 if name in GRIDS else 0


def place_tables(name: str) -> Path:
    """Return where a phone's bundle, which lacks the package `gguf`, has the tables of a format."""
    return Path(__file__).with_name(f"{name}.tables")


def make_tables(name: str) -> U8:
    """Return the tables of a format; zeros where it has none."""
    if name not in GRIDS:
        return np.zeros(64, np.uint8)
    if place_tables(name).exists():
        return np.fromfile(place_tables(name), np.uint8)
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    values = np.asarray(kind.grid).reshape(-1)
    if name.startswith("iq1"):
        # -1, 0 and 1 in eighths, to which an eighth is added or not.
        values = values * 8
    grid: U8 = values.astype(np.int8).view(np.uint8)
    assert grid.size == GRIDS[name]
    signs: U8 = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    return np.ascontiguousarray(np.concatenate([grid, signs]))


CHUNK = 16
"""Elements that always have the same scale."""


@dataclass(frozen=True, slots=True)
class Order:
    """Fields of 16 bytes each: ``place`` says which 16 elements field f of load b has."""

    loads: int
    fields: int
    place: Callable[[int, int], int]

    def list_parts(self, width: int) -> list[tuple[int, ...]]:
        """Return the content of registers of ``width`` bytes, in the kernels' order."""
        each = width // CHUNK
        return [
            tuple(self.place(load, field) for load in range(first, first + each))
            for first in range(0, self.loads, each)
            for field in range(self.fields)
        ]


NATURAL = Order(16, 1, lambda b, f: b)
NIBBLES = Order(8, 2, lambda b, f: 4 * (b // 2) + b % 2 + 2 * f)
PAIRS = Order(4, 4, lambda b, f: 8 * (b // 2) + b % 2 + 2 * f)
SIXES = Order(8, 2, lambda b, f: 8 * (b // 4) + b % 4 + 4 * f)
HALVES = Order(8, 2, lambda b, f: 2 * b + f)

_ORDERS: Mapping[str, Order] = {
    "q2_k": PAIRS,
    "q3_k": PAIRS,
    "q4_k": NIBBLES,
    "q5_k": NIBBLES,
    "q6_k": SIXES,
    "tq2_0": PAIRS,
    "iq4_xs": HALVES,
}


def find_order(name: str) -> Order:
    """Return the order of a format."""
    return _ORDERS.get(name, NATURAL)


def list_offsets(name: str, width: int) -> tuple[int, ...]:
    """Return where each 16 elements of a block are put, in bytes from its beginning."""
    flat = [chunk for part in find_order(name).list_parts(width) for chunk in part]
    return tuple(CHUNK * flat.index(chunk) for chunk in range(256 // CHUNK))


_BUNDLED = frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"})
"""Formats of nibbles, whose groups of 32 are computed several at once: the first halves of all of
them, then the second ones."""


def count_together(name: str, width: int) -> int:
    """Return the groups of 32 of a format whose halves lie together in activations."""
    return width // CHUNK if name in _BUNDLED and width >= 2 * CHUNK else 1


ALIGNMENT = 64
_MOST_LANES = 16
"""Lanes of the widest registers."""


_VECTORS = 4
"""Tables of a layer, in vectors as long as what attention reads and mixes."""
_TABLES_BYTES = 64 << 10
"""Tables of formats, and the ends of arrays that begin at cache lines."""


def count_kv_bytes(model: Model, context: int, sequences: int, kind: KvType = "fp16") -> int:
    context = -(-context // CONTEXT_BLOCK) * CONTEXT_BLOCK
    found = [(describe_heads(own), layers) for own, layers in list_attention(model) if own.has_keys]
    total = sum(
        layers * count_cache_bytes(kind, sequences * own.key_heads * context, width)
        for own, layers in found
        for width in own.widths
    )
    index = model.attention.index
    if index is not None:
        own_kind = find_index_type(kind)
        each = count_cache_bytes(own_kind, sequences * context, index.width)
        total += count_indexes(model) * each
    return total


def count_cache_bytes(kind: KvType, vectors: int, width: int) -> int:
    """Return the bytes of so many vectors in the KV cache; int8 ones have an fp16 scale each."""
    scale = 2 if kind == "int8" else 0
    return vectors * (width * np.dtype(KV_TYPES[kind]).itemsize + scale)


def count_sequence_states(model: Model, sequences: int) -> int:
    """Return the bytes of the states of so many sequences."""
    return sequences * len(model.states) * count_state_bytes(model)


def _count_tables(model: Model, context: int) -> int:
    """Most bytes of what layers look up: places of heads, experts and channels, factors."""
    shape, own = model.shape, describe_state(model)
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
) -> int:
    """Return the most bytes that computing ``chunk`` tokens, or steps of ``step_tokens``, takes
    without weights and KV cache."""
    rows = max(LOGIT_ROWS, step_tokens)
    tokens = max(chunk, rows)
    turns = sum(4 * max(width, 2) for _, width in list_turns(model))
    heads = [(own.heads, describe_heads(own)) for own, _ in list_attention(model)]
    scratch = max(
        count_scratch_bytes(_MOST_LANES),
        *(count_attention_bytes(own.group, own.key, own.value, _MOST_LANES) for _, own in heads),
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
        tokens * count_token_bytes(model, planes)
        + 4 * vectors
        + rows * (4 * model.shape.vocab + 64)
        + (context + CONTEXT_BLOCK) * turns
        + threads * scratch
        + scores
        + max(count_partial_bytes(count, own.value, threads) for count, own in heads)
        + _count_tables(model, context)
    )


Allocate = Callable[[str, int], U8]
"""Gives zeroed bytes of a segment, which begin at a cache line; pages come when written."""


class StateMemory:
    """States of layers that have one: float32 [sequences, n], of every sequence what convolutions
    read of earlier tokens and the recurrent states."""

    def __init__(self, model: Model, sequences: int, allocate: Allocate) -> None:
        shape, places = describe_state(model), model.states
        each = 0 if shape is None else count_state_bytes(model) // 4
        self.stride = each * len(places)
        """Elements of a sequence."""
        raw = allocate("state", 4 * self.stride * sequences)
        self._values: F32 = raw.view(np.float32).reshape(sequences, self.stride)
        kept = 0 if shape is None else align_bytes(4 * shape.kept)
        self._places = {
            place: (begin, begin + kept)
            for number, place in enumerate(places)
            for begin in (raw.ctypes.data + 4 * each * number,)
        }

    def find(self, layer: int, mixer: int) -> tuple[int, int]:
        """Return the addresses of the first sequence's earlier tokens and recurrent state."""
        return self._places[layer, mixer]

    def read(self, sequence: int) -> F32:
        state: F32 = self._values[sequence].copy()
        return state

    def put(self, sequence: int, state: F32) -> None:
        """Put back what `read` gave."""
        self._values[sequence] = state


@dataclass(frozen=True, slots=True)
class Cached:
    """Vectors of a kind in the KV cache of a layer."""

    elements: Raw
    """[sequences, heads, context, width]."""
    scales: F16 | None
    """[sequences, heads, context] of int8 elements."""


class KvCache:
    """KV cache of the layers."""

    def __init__(
        self, model: Model, context: int, sequences: int, allocate: Allocate, kind: KvType
    ) -> None:
        self._layers: dict[int, list[Cached]] = {}
        for layer, block in enumerate(model.blocks):
            if block.attention is None or not block.attention.has_keys:
                continue
            own = describe_heads(block.attention)
            for width in own.widths:
                shape = sequences, own.key_heads, context
                raw = allocate("kv", count_cache_bytes(kind, prod(shape), width))
                size = prod(shape) * width * np.dtype(KV_TYPES[kind]).itemsize
                elements = raw[:size].view(KV_TYPES[kind]).reshape(*shape, width)
                scales = raw[size:].view(np.float16).reshape(shape) if kind == "int8" else None
                self._layers.setdefault(layer, []).append(Cached(elements, scales))
        self._indexes: dict[int, Raw] = {}
        index, own_kind = model.attention.index, find_index_type(kind)
        for layer, block in enumerate(model.blocks):
            if index is None or block.attention is None or block.attention.chooses != "index":
                continue
            keys = sequences, 1, context, index.width
            raw = allocate("kv", count_cache_bytes(own_kind, prod(keys[:-1]), index.width))
            self._indexes[layer] = raw.view(KV_TYPES[own_kind]).reshape(keys)

    def find(self, layer: int) -> Sequence[Cached]:
        """Return the vectors of a layer: its keys, and its values unless vectors are latent."""
        return self._layers[layer]

    def find_index(self, layer: int) -> Raw:
        """Return the keys of a layer's index [sequences, 1, context, width]."""
        return self._indexes[layer]

    def _list_arrays(self) -> list[Raw]:
        return [*self._indexes.values()] + [
            array
            for vectors in self._layers.values()
            for own in vectors
            for array in (own.elements, own.scales)
            if array is not None
        ]

    def read(self, sequence: int, first: int, end: int) -> U8:
        """Return a copy [n] of the KV cache of a sequence's tokens from ``first`` to ``end``."""
        parts = [
            np.ascontiguousarray(array[sequence, :, first:end]).view(np.uint8).reshape(-1)
            for array in self._list_arrays()
        ]
        return np.concatenate([np.zeros(0, np.uint8), *parts])

    def put(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `read` gave for these tokens."""
        done = 0
        for array in self._list_arrays():
            part: Raw = array[sequence, :, first:end]
            size = part.size * part.itemsize
            part[...] = kept[done : done + size].view(part.dtype).reshape(part.shape)
            done += size
