"""Softmax attention and latent attention (DeepSeek V2): sizes, and the tensors they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from pi2.formats.packing import fill_groups
from pi2.model.tensor import DenseTensor, Order, Place, Source, fill, list_head_rows

if TYPE_CHECKING:
    from pi2.plan.documents import model_mixing

_NO_SINK = -1e30
"""Score of a sink at which any token's score takes all of the attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention of a block; equal if layers compute the same."""

    options: model_mixing.Attention
    """The options of this block."""
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head; with latent attention, of its value."""
    rope: model_mixing.Rope
    keys_are_values: bool = False
    """Whether values are what the key projection gives."""
    key_layer: int | None = None
    """Earlier layer whose KV cache it reads; None if it has its own."""
    chooses: Literal["all", "index", "shared"] = "all"
    """Its keys: all, the choice of its index, or the choice of the last layer before it with an
    index."""
    block: int = 0
    """Tokens of a pooled vector; 0 without such vectors."""
    overlaps: bool = False
    """Whether pooled vectors add the block before."""

    @property
    def window(self) -> int | None:
        """Tokens that a query looks back, itself included; None means all."""
        return self.options.sliding_window

    @property
    def latent(self) -> model_mixing.Latent | None:
        return self.options.latent

    @property
    def pooled(self) -> model_mixing.Pooled | None:
        return self.options.pooled

    @property
    def pool_width(self) -> int:
        """Values that a token gives to pooled vectors, and as many gates."""
        return self.head_dim * (1 + self.overlaps) if self.block else 0

    @property
    def pool_reach(self) -> int:
        """Tokens that a pooled vector is made of."""
        return self.block * (1 + self.overlaps)

    @property
    def index(self) -> model_mixing.Index | None:
        """The index that chooses its keys, its own or a shared one."""
        return None if self.chooses == "all" else self.options.index

    @property
    def has_keys(self) -> bool:
        return self.key_layer is None

    @property
    def query(self) -> int:
        """Width of all query heads together; with latent attention, of their values."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def given(self) -> int:
        """Elements that the output projection reads: of all heads, or of groups of them."""
        own = self.pooled
        return self.query if own is None else own.groups * own.output_rank

    @property
    def stored_query(self) -> int:
        """Length of the output of all heads in stores and backends: zeros fill it up."""
        return fill_groups(self.query)

    @property
    def turned_width(self) -> int:
        """Width of the part of a head that RoPE sees."""
        own = self.latent or self.pooled
        return self.head_dim if own is None else own.rotated

    @property
    def turn(self) -> tuple[model_mixing.Rope, int]:
        """What tables of sines and cosines depend on: RoPE, and the width it sees."""
        return self.rope, self.turned_width

    @property
    def head_norm_widths(self) -> tuple[int, int]:
        """Lengths of the weights of the norms of queries and of keys."""
        if self.options.head_norm_of == "head":
            return self.head_dim, self.head_dim
        return self.query, self.keys

    @property
    def projected(self) -> int:
        """Rows of the projection ``qkv``: queries, keys, values, gates of the output; with latent
        attention the vectors that these are made of."""
        latent, pooled = self.latent, self.pooled
        if pooled is not None:
            return pooled.query_rank + self.head_dim + 2 * self.pool_width
        if latent is not None:
            return (latent.query_rank or self.heads * latent.key) + self.gates + latent.kept
        return self.query + self.gates + (2 * self.keys if self.has_keys else 0)

    @property
    def gates(self) -> int:
        """Rows of ``qkv`` that gate what heads have mixed: of every element, or of every head with
        latent attention."""
        if not self.options.output_gate:
            return 0
        return self.query if self.latent is None else self.heads

    @property
    def kept(self) -> tuple[int, int, int]:
        """The KV cache of a token: kinds of vectors, vectors of a kind, elements of one. Two kinds
        for every key head; one vector with latent attention; no kinds if the layer reads another
        layer's cache."""
        if not self.has_keys:
            return 0, self.kv_heads, self.head_dim
        if self.latent is not None:
            return 1, 1, self.latent.kept
        if self.pooled is not None:
            return 1, 1, self.head_dim
        return 2, self.kv_heads, self.head_dim

    @property
    def head_order(self) -> Sequence[int] | None:
        """Element of the checkpoint's head, or of its part that RoPE sees, at every place of the
        store's. There element i turns with element i + width / 2; None if they are equal."""
        size, pairs = self.turned_width, self.rope.pairs
        rotated = self.rope.count_rotated(size)
        if rotated == 0 or (rotated == size and pairs == "halves"):
            return None
        first, second = range(rotated // 2), range(rotated // 2, rotated)
        if pairs == "swapped":
            first, second = second, first
        elif pairs == "neighbours":
            first, second = range(0, rotated, 2), range(1, rotated, 2)
        rest = range(rotated, size)
        middle = len(rest) // 2
        return [*first, *rest[:middle], *second, *rest[middle:]]


def list_attention_tensors(at: Place, own: Attention) -> Iterator[DenseTensor]:
    """``qkv`` [projected, hidden]: rows of queries, keys, values, then gates of the output;
    ``query_norm`` and ``key_norm`` of a head or of all; ``attention_sub_norm`` [1, query];
    ``sinks`` [1, heads]; `list_latent_tensors`; ``output`` [hidden, query]; biases."""
    if own.pooled is not None:
        yield from list_pooled_tensors(at, own, own.pooled)
        return
    options, shape, every = own.options, at.model.shape, at.model.attention
    is_latent, order = own.latent is not None, own.head_order
    rows: Order | None
    project = list_latent_projected if is_latent else _list_projected
    yield at.matrix("qkv", own.projected, shape.stored_hidden, *project(at, own, "", shape.hidden))
    if options.has_bias:
        yield at.vector("qkv_bias", own.projected, *project(at, own, "_bias"))
    if every.head_norm:
        heads = {"query_norm": own.heads, "key_norm": own.kv_heads}
        for (key, count), width in zip(heads.items(), own.head_norm_widths, strict=True):
            if key == "key_norm" and not own.has_keys:
                continue
            several = 1 if options.head_norm_of == "head" else count
            rows = None if order is None else partial(list_head_rows, several, own.head_dim, order)
            has_weights = options.head_norm_weights
            source = at.take(key, width, rows=rows) if has_weights else fill(width, value=1.0)
            yield at.vector(key, width, source)
    if options.sub_norm:
        source = at.take("attention_sub_norm", own.query)
        yield at.vector("attention_sub_norm", own.stored_query, source)
    if every.sinks:
        source = at.take("sinks", own.heads) if options.sinks else fill(own.heads, value=_NO_SINK)
        yield at.vector("sinks", own.heads, source)
    if own.latent is not None:
        yield from list_latent_tensors(at, own, own.latent)
    if own.chooses == "index":
        yield from list_index_tensors(at, own)
    width = options.value_width or own.head_dim
    filled = None if width == own.head_dim else (own.heads, own.head_dim, True)
    source = at.take("output", shape.hidden, own.heads * width, heads=filled)
    yield at.matrix("output", shape.stored_hidden, own.stored_query, source)
    if options.output_bias:
        source = at.take("output_bias", shape.hidden)
        yield at.vector("output_bias", shape.stored_hidden, source)


def _list_projected(at: Place, own: Attention, suffix: str, *columns: int) -> Iterator[Source]:
    names, options, size = at.model.tensors, own.options, own.head_dim
    inside, order = range(size), own.head_order
    turned = inside if order is None else order
    rows: Order | None
    fused = names.fused_qkv_bias if suffix else names.fused_qkv
    is_together = options.output_gate and names.query_gate is None
    if fused is not None:
        shape = (own.query + 2 * own.keys, *columns)
        for part in ("query", "key", "value"):
            rows = partial(_list_fused_rows, own, part, names.fused_order)
            yield at.take(f"fused_qkv{suffix}", *shape, rows=rows)
    else:
        pick = partial(list_head_rows, own.heads, size, turned, step=1 + is_together)
        rows = pick if is_together or order is not None else None
        yield at.take(f"query{suffix}", own.query * (1 + is_together), *columns, rows=rows)
        if own.has_keys:
            rows = None if order is None else partial(list_head_rows, own.kv_heads, size, turned)
            yield at.take(f"key{suffix}", own.keys, *columns, rows=rows)
            width = options.value_width or size
            filled = None if width == size else (own.kv_heads, size, False)
            key = "key" if own.keys_are_values else f"value{suffix}"
            yield at.take(key, own.kv_heads * width, *columns, heads=filled)
    if is_together:
        rows = partial(list_head_rows, own.heads, size, inside, first=size, step=2)
        yield at.take(f"query{suffix}", own.query * 2, *columns, rows=rows)
    elif options.output_gate and suffix:
        yield fill(own.query)
    elif options.output_gate and options.output_gate_of == "element":
        yield at.take("query_gate", own.query, *columns)
    elif options.output_gate:
        rows = partial(list_head_rows, own.heads, 1, [0] * size)
        yield at.take("query_gate", own.heads, *columns, rows=rows)


def list_fused_heads(
    own: Attention, part: str, order: Literal["stacked", "grouped"]
) -> Sequence[int]:
    """Places of the heads of queries, keys or values in a tensor of all."""
    together = own.heads // own.kv_heads
    if order == "stacked":
        first = {"query": 0, "key": own.heads, "value": own.heads + own.kv_heads}[part]
        return range(first, first + (own.heads if part == "query" else own.kv_heads))
    if part == "query":
        groups = range(own.kv_heads)
        return [group * (together + 2) + n for group in groups for n in range(together)]
    return range(together + (part == "value"), own.heads + 2 * own.kv_heads, together + 2)


def _list_fused_rows(
    own: Attention, part: str, order: Literal["stacked", "grouped"]
) -> Sequence[int]:
    """Rows of queries, keys or values in a tensor of all."""
    turned = own.head_order if part != "value" else None
    inside = range(own.head_dim) if turned is None else turned
    heads = list_fused_heads(own, part, order)
    return [place * own.head_dim + row for place in heads for row in inside]


def list_latent_projected(
    at: Place, own: Attention, suffix: str, *columns: int
) -> Iterator[Source]:
    """Rows of ``qkv``: queries or their latents, gates of heads, keys with values or their latents,
    the rotated key; or their biases, which queries and gates lack."""
    latent = own.latent
    assert latent is not None
    queries, kept = own.heads * latent.key, _order_turned(own, 1, latent.rank)
    if latent.query_rank is not None:
        yield at.take(f"latent_query{suffix}", latent.query_rank, *columns)
    else:
        order = _order_turned(own, own.heads, latent.plain)
        query = at.take("query", queries, *columns, rows=order)
        yield fill(queries) if suffix else query
    if own.options.output_gate:
        yield fill(own.heads) if suffix else at.take("query_gate", own.heads, *columns)
    yield at.take(f"latent{suffix}", latent.kept, *columns, rows=kept)


def list_latent_tensors(
    at: Place, own: Attention, latent: model_mixing.Latent
) -> Iterator[DenseTensor]:
    """``latent_query_norm`` and ``latent_norm``; ``latent_query_out`` [heads (plain + rotated),
    query_rank], which gives queries; ``latent_key`` [heads rank, plain], which turns the plain part
    of a query into one of what keys are made of; ``latent_value`` [heads head_dim, rank], which
    turns what a head has mixed of that into its value."""
    rank, heads = latent.query_rank, own.heads
    if rank is not None:
        yield at.vector("latent_query_norm", fill_groups(rank), at.take("latent_query_norm", rank))
    yield at.copy_vector("latent_norm", latent.rank)
    if rank is not None:
        rows = heads * latent.key
        order = _order_turned(own, heads, latent.plain)
        made = at.take("latent_query_out", rows, rank, rows=order)
        yield at.matrix("latent_query_out", rows, fill_groups(rank), made)
    # Each head has the rows of its keys first.
    size = latent.plain + own.head_dim
    whole = (heads * size, latent.rank)
    keys = at.take("latent_out", *whole)
    yield at.matrix(
        "latent_key", heads * latent.rank, fill_groups(latent.plain), keys, transform="turned keys"
    )
    values = partial(list_head_rows, heads, size, range(latent.plain, size))
    source = at.take("latent_out", *whole, rows=values)
    yield at.matrix("latent_value", own.query, fill_groups(latent.rank), source)


def list_pooled_tensors(
    at: Place, own: Attention, pooled: model_mixing.Pooled
) -> Iterator[DenseTensor]:
    """``latent_query`` [query_rank, hidden] and ``latent`` [head_dim, hidden] with norms,
    ``latent_query_out`` [heads head_dim, query_rank], ``sinks``; ``pool_values`` and ``pool_gates``
    [pool_width, hidden], ``pool_bias`` [block, pool_width] and ``pool_norm``; ``output_group``
    [groups output_rank, heads head_dim / groups] and ``output`` [hidden, groups output_rank]."""
    hidden, rank, width = at.model.shape.hidden, pooled.query_rank, own.pool_width
    sizes = {
        "latent_query": (rank, hidden),
        "latent_query_out": (own.query, rank),
        "latent": (own.head_dim, hidden),
        "output_group": (own.given, own.query // pooled.groups),
        "output": (hidden, own.given),
    }
    vectors = {"latent_query_norm": rank, "latent_norm": own.head_dim}
    vectors |= {"sinks": own.heads} if own.options.sinks else {}
    if own.block:
        sizes |= {"pool_values": (width, hidden), "pool_gates": (width, hidden)}
        vectors |= {"pool_norm": own.head_dim}
        yield at.copy_vector("pool_bias", width, own.block)
    for key, (rows, length) in sizes.items():
        stored = at.model.shape.stored_hidden if key == "output" else rows
        yield at.matrix(key, stored, fill_groups(length), at.take(key, rows, length))
    for key, length in vectors.items():
        yield at.copy_vector(key, length)


def list_index_tensors(at: Place, own: Attention) -> Iterator[DenseTensor]:
    """``index_query`` [heads width, query_rank or hidden]; ``index_key`` [width, hidden] with its
    norm; ``index_weights`` [heads, hidden], or the norm of queries with an index of blocks."""
    index, hidden, latent = own.index, at.model.shape.hidden, own.latent
    assert index is not None
    of_tokens, stored = index.kind == "tokens", at.model.shape.stored_hidden
    length = latent.query_rank if of_tokens and latent is not None else hidden
    length, order = length or hidden, _order_index(own, index)
    rows = partial(list_head_rows, index.heads, index.width, order)
    source = at.take("index_query", index.heads * index.width, length, rows=rows)
    yield at.matrix("index_query", index.heads * index.width, fill_groups(length), source)
    inside = partial(list_head_rows, 1, index.width, order)
    source = at.take("index_key", index.width, hidden, rows=inside)
    yield at.matrix("index_key", index.width, stored, source)
    vectors = ["index_key_norm", "index_key_norm_bias" if of_tokens else "index_query_norm"]
    for key in vectors:
        yield at.vector(key, index.width, at.take(key, index.width, rows=inside))
    if of_tokens:
        yield at.copy("index_weights", index.heads, hidden)


def _order_index(own: Attention, index: model_mixing.Index) -> Sequence[int]:
    """Element of the checkpoint's index head at every place of the store's: halves turn there."""
    rotated = own.rope.count_rotated(own.turned_width)
    turned: Sequence[int] = range(rotated)
    if index.pairs == "neighbours":
        turned = [*range(0, rotated, 2), *range(1, rotated, 2)]
    return [*turned, *range(rotated, index.width)]


def _order_turned(own: Attention, heads: int, plain: int) -> Order | None:
    """Rows of vectors whose part that RoPE sees follows ``plain`` elements."""
    order = own.head_order
    if order is None:
        return None
    inside = [*range(plain), *(plain + place for place in order)]
    return partial(list_head_rows, heads, plain + own.turned_width, inside)
