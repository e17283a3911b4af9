"""Time of a prompt: its layers (`pi2.costs.prompts`) added up."""

from __future__ import annotations

from collections.abc import Sequence

from pi2.costs.description import Description
from pi2.costs.prompts import PROMPT, PromptLayer, list_prompt_layers, time_once


def cost_prompt(description: Description, tokens: int = PROMPT) -> float | None:
    """Tokens per second of a prompt of ``tokens``; None where no arithmetic rate is known.

    A piece is read while the one before it is computed; the first one of all has none before it.
    """
    layers = list_prompt_layers(description, tokens)
    if layers is None:
        return None
    stream = description.prompts.stream
    overlap = 0.0 if stream is None else stream.overlap
    seconds = time_once(description, tokens)
    seconds += sum(_time_layer(layer, overlap) * layer.count for layer in layers)
    return tokens / (seconds + _time_start(layers, overlap))


def _time_layer(layer: PromptLayer, overlap: float) -> float:
    seconds = layer.before_s + layer.streamed_s + layer.read_s
    if not layer.pieces:
        return seconds
    read_s, piece_s = layer.read_s / layer.pieces, layer.streamed_s / layer.pieces
    hidden_s = min(layer.before_s + piece_s, read_s) + (layer.pieces - 1) * min(piece_s, read_s)
    return seconds - overlap * hidden_s


def _time_start(layers: Sequence[PromptLayer], overlap: float) -> float:
    """What the first piece is waited for beyond what later ones are."""
    first = next((layer for layer in layers if layer.pieces), None)
    if first is None:
        return 0.0
    read_s, piece_s = first.read_s / first.pieces, first.streamed_s / first.pieces
    hidden_s = min(first.before_s + piece_s, read_s) - min(first.before_s, read_s)
    return overlap * hidden_s
