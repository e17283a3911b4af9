"""How neurons may be read, and how long one takes: the choices of ``[io]``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pi2.simulate.flash import Flash, FlashPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class IoChoice:
    """An engine with its settings."""

    engine: Literal["pread", "io_uring"]
    threads: int
    depth: int
    neuron_s: float
    """Time of one of many reads of a neuron."""


def list_io_choices(flash: Flash, stride: int, range_bytes: int) -> list[IoChoice]:
    """The settings that somebody measured, each with a neuron's time, the fastest first.

    A device whose figures state neither depth nor threads has one choice: one thread with
    io_uring's usual depth.
    """
    settings = sorted(
        {(item.depth, item.threads) for item in flash.points if item.pattern == "random"},
        key=str,
    )
    found: dict[tuple[str, int, int], IoChoice] = {}
    for depth, threads in settings:
        choice = _make_choice(flash, stride, range_bytes, depth, threads)
        key = (choice.engine, choice.threads, choice.depth)
        if key not in found or choice.neuron_s < found[key].neuron_s:
            found[key] = choice
    return sorted(found.values(), key=lambda item: (item.neuron_s, item.threads, item.depth))


def find_neuron_s(
    flash: Flash,
    stride: int,
    range_bytes: int,
    *,
    engine: str,
    threads: int,
    depth: int,
) -> float:
    """Time of one of many neurons with a plan's settings: those of the nearest measured ones."""
    choices = list_io_choices(flash, stride, range_bytes)
    same = [item for item in choices if item.engine == engine] or choices

    def distance(item: IoChoice) -> tuple[int, int]:
        if engine == "io_uring":
            return abs(item.depth - depth), abs(item.threads - threads)
        return abs(item.threads - threads), abs(item.depth - depth)

    return min(same, key=distance).neuron_s


def _make_choice(
    flash: Flash, stride: int, range_bytes: int, depth: int | None, threads: int | None
) -> IoChoice:
    """Rates of other blocks are scaled by what this setting reaches at the blocks it has."""
    queued = depth is not None or threads is None
    points = [item for item in flash.points if (item.depth, item.threads) == (depth, threads)]
    own = [item for item in points if item.pattern == "random"]
    best = _find_rate(flash, flash.points, stride, range_bytes)
    share = 1.0
    common = {item.block_bytes for item in own}
    ratios = [
        _find_rate(flash, own, block, range_bytes)
        / _find_rate(flash, flash.points, block, range_bytes)
        for block in common
    ]
    if ratios:
        share = min(1.0, sum(ratios) / len(ratios))
    penalty = 1.0 - flash.reader_penalty if (threads or 1) > 1 else 1.0
    return IoChoice(
        engine="io_uring" if queued else "pread",
        threads=threads or 1,
        depth=depth or 128,
        neuron_s=stride / (best * share * penalty),
    )


def _find_rate(flash: Flash, points: Iterable[FlashPoint], block: int, range_bytes: int) -> float:
    part = Flash(
        points=tuple(item for item in points if item.pattern == "random"),
        latency_s=flash.latency_s,
        reader_penalty=flash.reader_penalty,
        block_bytes=flash.block_bytes,
    )
    return part.find_rate_bytes_s("random", block, range_bytes=range_bytes)
