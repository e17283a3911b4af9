"""The KV cache, attention over it, and the index that chooses its keys."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32, F64, I32, I64, Bits
from pi2.backends.blocks.contract import KV_TYPES
from pi2.backends.blocks.sizes import LIST_HEAD, PARTIAL, SCORES
from pi2.backends.reference.instructions.arguments import Arguments, Array, widen
from pi2.plan.arithmetic.units import find_index_type


def _view_cache(own: Arguments, name: str, shape: tuple[int, int, int], stride: int) -> Array:
    """Return vectors [sequences, heads, positions, width] of a kind; positions are ``stride``
    elements apart."""
    steps = _list_steps(own, name)
    whole = (*shape, getattr(own, f"{name}_width"))
    return own.view(f"{name}_cache", whole, (*steps, stride, 1), dtype=KV_TYPES[own.kv])


def _view_scales(own: Arguments, name: str, shape: tuple[int, int, int], stride: int) -> Array:
    first, second = (step // stride for step in _list_steps(own, name))
    return own.view(f"{name}_scales", shape, (first, second, 1), dtype="float16")


def _list_steps(own: Arguments, name: str) -> tuple[int, int]:
    return getattr(own, f"{name}_sequence_stride"), getattr(own, f"{name}_head_stride")


def _count_ring(own: Arguments) -> int:
    """Return the positions that the KV cache has of a sequence."""
    return (own.key_head_stride or own.key_sequence_stride) // own.key_width


def keep(own: Arguments) -> None:
    """Append keys and values; codes of int8 are divided by a scale in fp16."""
    token, head = np.divmod(own.items, own.heads)
    sequences, positions = own.find_sequences(token)
    positions = positions % _count_ring(own)
    shape = int(sequences.max(initial=0)) + 1, own.heads, int(positions.max(initial=0)) + 1
    for name in ("key", "value"):
        width = getattr(own, f"{name}_width")
        if not width:
            continue
        heads = int(token.max(initial=-1)) + 1, own.heads, width
        x = own.view(f"{name}s", heads, (own.x_stride, width, 1))[token, head]
        cache = _view_cache(own, name, shape, width)
        if own.kv == "int8":
            top = np.abs(x).max(-1) * np.float32(1 / 127)
            scales = top.astype(np.float16)
            kept = scales.astype(np.float32)
            with np.errstate(divide="ignore"):
                factors = np.where(kept > 0, np.float32(1) / kept, np.float32(0))
            x = np.clip(np.rint(x * factors[:, None]), -127, 127)
            _view_scales(own, name, shape, width)[sequences, head, positions] = scales
        cache[sequences, head, positions] = x


class _Heads:
    """Heads that share keys, of a sequence."""

    def __init__(self, own: Arguments, sequence: int, number: int, end: int) -> None:
        """``end``: the first position that is not read."""
        self._own, self._place = own, (sequence, number)
        self._ring = _count_ring(own)
        self._shape = sequence + 1, number + 1, min(end, self._ring)
        self.heads = slice(number * own.group, (number + 1) * own.group)

    def _read(self, name: str, stride: int, positions: slice | I32) -> F64:
        place = *self._place, np.r_[positions] % self._ring
        found = widen(_view_cache(self._own, name, self._shape, stride)[place])
        if self._own.kv == "int8":
            found *= _view_scales(self._own, name, self._shape, stride)[place][:, None]
        return found

    def mix(
        self, tokens: slice, positions: slice | I32, visible: Bits | None, has_sinks: bool
    ) -> tuple[F64, F64, F64]:
        """Return of ``tokens`` and heads [T, group] the mix of values at ``positions``, weighed
        with exp(score - largest), the largest score, and the sum of weights.
        ``visible`` [T, positions]: what each token sees."""
        own, group = self._own, self._own.group
        shape = tokens.stop, own.heads, own.key_width
        queries = own.view("queries", shape, (own.query_stride, own.key_width, 1))
        keys = self._read("key", own.key_width, positions)
        scores = widen(queries[tokens, self.heads]) @ keys.T * own.real("scale")
        cap = own.real("cap")
        if cap:
            scores = cap * np.tanh(scores / cap)
        if own.has_slopes:
            slopes = own.vector("slopes", own.heads)[self.heads, None]
            now = own.numbers("positions", tokens.stop)[tokens]
            scores -= slopes * (now[:, None, None] - np.r_[positions])
        if visible is not None:
            scores = np.where(visible[:, None, :], scores, -np.inf)
        sinks = own.vector("sinks", own.heads)[self.heads] if has_sinks else np.full(group, -np.inf)
        top = np.maximum(scores.max(-1), sinks)
        weights = np.exp(scores - top[..., None])
        values = self._read("value", own.value_stride, positions)
        return weights @ values, top, weights.sum(-1) + np.exp(sinks - top)

    def put(self, tokens: slice, mixed: F64, total: F64) -> None:
        own = self._own
        shape = tokens.stop, own.heads, own.value_width
        y = own.view("y", shape, (own.y_stride, own.value_width, 1))
        y[tokens, self.heads] = mixed / total[..., None]


def _find_first(own: Arguments, positions: I64) -> I64:
    """Return the first position that tokens at ``positions`` see."""
    if not own.window:
        return np.zeros_like(positions)
    if own.is_chunked:
        return positions // own.window * own.window
    return np.maximum(positions + 1 - own.window, 0)


def _list_chosen(own: Arguments, token: int, head: int) -> I32 | None:
    """Return the positions that are chosen for a query head of a token; None if it sees all."""
    if not own.reach or own.numbers("positions", token + 1)[token] < own.reach:
        return None
    skip = (token * own.lists + head * own.lists // own.heads) * own.list_stride
    return own.numbers("chosen", int(own.numbers("chosen", 1, skip)[0]), skip + LIST_HEAD)


def _cut_context(own: Arguments, position: int, chosen: I32 | None) -> list[tuple[int, int]]:
    """Return the parts of the context of a token, or of chosen positions: first and last one."""
    first, end = int(_find_first(own, np.array(position))), position + 1
    if chosen is not None:
        first, end = 0, len(chosen)
    size = max(SCORES, -(-(end - first) // (own.parts * 16)) * 16)
    return [(begin, min(begin + size, end)) for begin in range(first, end, size)]


def _view_partials(own: Arguments, tokens: int) -> Array:
    """Return [tokens, heads, parts, .]: mix, largest score, and sum of weights."""
    return own.view("partials", (tokens, own.heads, own.parts, own.value_width + PARTIAL))


def attend(own: Arguments) -> None:
    """Compute parts of contexts, or, as `attend_chosen`, of contexts for which keys are chosen; a
    context of one part is finished."""
    groups, is_chosen = own.heads // own.group, own.kernel == "attend_chosen"
    for rest in range(own.first // own.parts, -(-own.last // own.parts)):
        token, head = divmod(rest, groups)
        (sequence,), (position,) = own.find_sequences(np.array([token]))
        chosen = _list_chosen(own, token, head * own.group)
        if is_chosen != (chosen is not None):
            continue
        parts = _cut_context(own, int(position), chosen)
        end = int(position if chosen is None else chosen.max()) + 1
        heads = _Heads(own, int(sequence), head, end)
        tokens, first = slice(token, token + 1), rest * own.parts
        for number in range(max(0, own.first - first), min(len(parts), own.last - first)):
            place, has_sinks = slice(*parts[number]), bool(own.has_sinks) and number == 0
            positions = place if chosen is None else chosen[place]
            mixed, top, total = heads.mix(tokens, positions, None, has_sinks)
            if len(parts) == 1:
                heads.put(tokens, mixed, total)
            else:
                partial = _view_partials(own, token + 1)[token, heads.heads, number]
                partial[:, : own.value_width] = mixed[0]
                partial[:, own.value_width :][:, :2] = np.stack([top[0], total[0]], -1)


attend_chosen = attend


def join(own: Arguments) -> None:
    width = own.value_width
    for item in own.items.tolist():
        token, head = place = divmod(item, own.heads)
        position, chosen = own.numbers("positions", token + 1)[token], _list_chosen(own, *place)
        count = len(_cut_context(own, int(position), chosen))
        if count < 2:
            continue
        parts = widen(_view_partials(own, token + 1)[token, head, :count])
        weights = np.exp(parts[:, width] - parts[:, width].max())
        total = weights @ parts[:, width + 1]
        y = own.view("y", (width,), skip=token * own.y_stride + head * width)
        y[...] = weights @ parts[:, :width] / total


def attend_many(own: Arguments) -> None:
    """Mix values for tiles of tokens of a chunk, which follow each other."""
    groups, tiles = own.heads // own.group, -(-own.tokens // own.tile)
    for item in own.items.tolist():
        number, head = divmod(item, groups)
        first = (tiles - 1 - number) * own.tile
        tokens = slice(first, min(first + own.tile, own.tokens))
        (sequence,), (position,) = own.find_sequences(np.array([first]))
        if own.reach:
            tokens = slice(first, min(tokens.stop, first + own.reach - int(position)))
        if tokens.stop <= first:
            continue
        positions = int(position) + np.arange(tokens.stop - first)
        begin, end = int(_find_first(own, positions).min()), int(positions[-1]) + 1
        seen = np.arange(begin, end)
        visible = (seen <= positions[:, None]) & (seen >= _find_first(own, positions)[:, None])
        heads = _Heads(own, int(sequence), head, end)
        mixed, _, total = heads.mix(tokens, slice(begin, end), visible, bool(own.has_sinks))
        heads.put(tokens, mixed, total)


def keep_index(own: Arguments) -> None:
    """Append keys of the index."""
    own.kv = find_index_type(own.kv)
    keep(own)


def _score(own: Arguments, token: int, end: int) -> F32:
    """Return the scores [lists, end] of tokens before a token."""
    heads, width = own.heads, own.width
    queries = own.view("queries", (heads, width), skip=token * own.query_stride)
    skip = int(own.numbers("sequences", token + 1)[token]) * own.key_sequence_stride
    dtype = KV_TYPES[find_index_type(own.kv)]
    keys = own.view("key_cache", (end, width), dtype=dtype, skip=skip)
    scores = widen(queries) @ widen(keys).T
    if own.has_weights:
        weights = own.view("weights", (heads,), skip=token * own.weights_stride)
        scores = (widen(weights) @ np.maximum(scores, 0))[None]
    return scores.astype(np.float32)


def _find_end(own: Arguments, token: int) -> int:
    return int(own.numbers("positions", token + 1)[token]) + 1


def rank(own: Arguments) -> None:
    """Write scores of parts of contexts; of a context of one part, `choose` makes them itself."""
    for item in own.items.tolist() if own.parts > 1 else ():
        token, part = divmod(item, own.parts)
        end = _find_end(own, token)
        each = -(-end // (own.parts * 16)) * 16
        place = slice(part * each, min((part + 1) * each, end))
        if end > own.reach and place.start < place.stop:
            row = token * own.lists * own.scores_stride
            scores = own.view("scores", (own.lists, end), (own.scores_stride, 1), skip=row)
            scores[:, place] = _score(own, token, end)[:, place]


def choose(own: Arguments) -> None:
    """Write the lists of tokens that see more than ``reach`` tokens."""
    for token in own.items.tolist():
        end, row = _find_end(own, token), token * own.lists * own.scores_stride
        if end <= own.reach:
            continue
        scores = (
            own.view("scores", (own.lists, end), (own.scores_stride, 1), skip=row)
            if own.parts > 1
            else _score(own, token, end)
        )
        found = choose_keys(
            scores[:, None], end - 1, chosen=own.count, block=own.block, local=own.local
        )
        for number, flags in enumerate(found[:, 0]):
            places = np.flatnonzero(flags)
            skip = (token * own.lists + number) * own.list_stride
            own.numbers("chosen", 1, skip)[:] = len(places)
            own.numbers("chosen", len(places), skip + LIST_HEAD)[:] = places


def choose_keys(scores: F32, position: int, *, chosen: int, block: int, local: int) -> Bits:
    """Which keys [lists, T, end] tokens from ``position`` on attend to, by their scores; of equal
    ones, the first counts.  See `pi2.plan.documents.model_mixing.Index`."""
    lists, count, end = scores.shape
    now = np.arange(position, position + count)[:, None]
    seen = np.where(np.arange(end)[None] <= now, scores, -np.inf)
    blocks = -(-end // block)
    filled = np.full((lists, count, blocks * block), -np.inf, np.float32)
    filled[..., :end] = seen
    best = filled.reshape(lists, count, blocks, block).max(-1)
    own, numbers = now // block, np.arange(blocks)[None]
    best = np.where((numbers <= own) & (numbers > own - local), np.inf, best)
    order = np.argsort(-best, axis=-1, kind="stable")[..., :chosen]
    found = np.zeros(best.shape, bool)
    np.put_along_axis(found, order, True, axis=-1)
    return np.repeat(found, block, axis=-1)[..., :end]


def _view_memory(own: Arguments, sequence: int, length: int) -> Array:
    """Return values and gates of tokens [ring, length]."""
    return own.view("memory", (own.ring, length), skip=sequence * own.sequence_stride)


def record(own: Arguments) -> None:
    """Keep values and gates of tokens."""
    sequences, positions = own.find_sequences(own.items)
    x = own.vectors("x", own.length)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        _view_memory(own, int(sequence), own.length)[position % own.ring] = x[row]


def pool(own: Arguments) -> None:
    """Make vectors of blocks that tokens end, and say where they go."""
    width, block, (sequences, positions) = own.width, own.block, own.find_sequences(own.items)
    given = width * (1 + own.overlaps)
    bias, y = own.view("bias", (block, given)), own.vectors("y", width)
    starts, rows = (own.numbers(name, own.last)[own.first :] for name in ("starts", "rows"))
    starts[:] = positions // block * block
    is_last = positions + 1 == starts + block
    rows[:] = np.where(is_last, own.base + positions // block, own.spare)
    for row in np.flatnonzero(is_last):
        start, memory = int(starts[row]), _view_memory(own, int(sequences[row]), 2 * given)
        parts = [(range(start, start + block), slice(given - width, given))]
        if own.overlaps and start:
            parts.append((range(start - block, start), slice(0, width)))
        values = [widen(memory[np.array(p) % own.ring, :given][:, part]) for p, part in parts]
        gates = [
            widen(memory[np.array(p) % own.ring, given:][:, part]) + bias[:, part]
            for p, part in parts
        ]
        weights = np.exp(np.concatenate(gates) - np.concatenate(gates).max(0))
        y[row] = (weights * np.concatenate(values)).sum(0) / weights.sum(0)


def see(own: Arguments) -> None:
    """List the rows that tokens see: of their window, and of blocks before their end."""
    for token in own.items.tolist():
        end = int(own.numbers("positions", token + 1)[token]) + 1
        places = [*range(max(0, end - own.window), end)]
        places += range(own.base, own.base + end // own.block)
        own.numbers("chosen", 1, token * own.list_stride)[:] = len(places)
        own.numbers("chosen", len(places), token * own.list_stride + LIST_HEAD)[:] = places
