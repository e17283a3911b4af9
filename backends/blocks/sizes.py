"""Bytes of a model without its weights, as numbers before anything is allocated: plain Python."""

from __future__ import annotations

from pi2.backends.blocks.contract import CONTEXT_BLOCK, Ring
from pi2.formats import Activations
from pi2.formats.packing import round_up
from pi2.model.attention import Attention
from pi2.plan.documents.model_mixing import Index

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


def count_seen_numbers(own: Attention, context: int) -> int:
    """Return the numbers that a list of a token's window and of all pooled vectors has room for."""
    seen = min(own.window or context, context) + context // own.block
    return round_up(LIST_HEAD + seen + LIST_TAIL, 16)


def count_pooled_rows(own: Attention, context: int) -> int:
    """Return the rows of pooled vectors in a KV cache: one of each block, and a last one where
    tokens write that end none."""
    return context // own.block + 1 if own.block else 0


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


_LEAST_CALL = 64
"""Tokens that every ring has room for in addition to its window: drafts may be taken back."""


def count_positions(own: Attention, context: int, tokens: int | None) -> int:
    """Return the positions of a sequence that a layer keeps: its window's and a call's of
    ``tokens``, in whole blocks; the whole context without a window, with pooled vectors, and for
    None."""
    if own.window is None or own.index is not None or own.block:
        return context
    return _count_ring(own.window, context, tokens)


def count_pool_positions(own: Attention, context: int, tokens: int | None) -> Ring:
    """Return the positions of which a layer keeps values and gates for pooled vectors."""
    window = max(own.window or 0, own.pool_reach)
    return Ring(window, _count_ring(window, context, tokens))


def _count_ring(window: int, context: int, tokens: int | None) -> int:
    if tokens is None:
        return context
    return min(context, round_up(window + max(tokens, _LEAST_CALL), CONTEXT_BLOCK) + 16)
