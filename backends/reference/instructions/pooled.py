"""Pooled vectors of blocks of tokens, and lists of visible places."""

from __future__ import annotations

import numpy as np

from pi2.backends.blocks.sizes import LIST_HEAD
from pi2.backends.reference.instructions.arguments import Arguments, Array, widen


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
