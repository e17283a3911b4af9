"""Scales and minima of groups by least squares.

Groups are columns [elements, n], which numpy computes many of at once; ``weights`` [elements, n]
weigh squared errors. Several start values of a scale give codes, for which the best scale is known;
the one with the least error is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32
else:
    from pi2.formats.format import np

TILE = 2**16
"""Elements that are fitted together: they stay within a core's cache."""
_SHARES = (0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.04, 1.06)
"""Start values: the distance in codes of the largest element from 0, or from the least, as a share
of all codes."""
_LEAST = 1e-30
"""Numbers that are no larger count as 0: fp16 has none of them."""
_SIGNED_SHARES = (*_SHARES, 0.87, 1.09, -0.84, -0.875)


def weigh(rows: F32, importance: F32 | None, length: int, *, evenly: bool) -> F32:
    """Return what squared errors of ``rows`` [n, width] count: the same (``evenly``) or more where
    a weight is large among the ``length`` around it; or, where it is known, the ``importance``
    [width] of their column, times more for large ones."""
    if importance is None and evenly:
        return np.ones_like(rows)
    groups = rows.reshape(len(rows), -1, length)
    if importance is None:
        spread = np.sqrt(np.square(groups).mean(axis=2, keepdims=True))
        found = (spread + np.abs(groups)).reshape(rows.shape)
    else:
        spread = 2 * np.square(groups).mean(axis=2, keepdims=True)
        found = np.sqrt(np.square(groups) + spread).reshape(rows.shape) * importance
    return np.asarray(found, np.float32)


def turn_groups(rows: F32, length: int) -> F32:
    """Return the groups of ``rows`` [n, width] as columns [length, n x width / length]."""
    return np.ascontiguousarray(rows.reshape(-1, length).T)


def list_tiles(count: int, width: int) -> Iterator[slice]:
    """Yield which of ``count`` rows of ``width`` elements are fitted together."""
    step = max(1, TILE // width)
    return (slice(start, start + step) for start in range(0, count, step))


def fit_scales(columns: F32, weights: F32, bottom: int, top: int) -> F32:
    """Return the scales [n] of signed codes from ``bottom`` to ``top``; if ``bottom`` is further
    from 0, a scale has the sign that gives it to the largest element."""
    places = np.abs(columns).argmax(axis=0)[None]
    peaks = np.take_along_axis(columns, places, axis=0)[0]
    reach = max(top, -bottom)
    best = np.full(len(peaks), -1.0, np.float32)
    scales = np.zeros_like(peaks)
    is_there = np.abs(peaks) > _LEAST
    safe = np.where(is_there, -peaks if -bottom > top else peaks, 1)
    # At last, codes are rounded twice by the best scale that was found.
    for share in (*_SIGNED_SHARES, None, None):
        ratio = invert(scales) if share is None else reach * share / safe
        codes = np.rint(columns * ratio.astype(np.float32))
        np.clip(codes, bottom, top, out=codes)
        found, gain = _solve_scale(columns, weights, codes)
        better = gain > best
        best, scales = np.where(better, gain, best), np.where(better, found, scales)
    return np.where(is_there, scales, 0).astype(np.float32)


def invert(numbers: F32) -> F32:
    """Return 1 over each number, and 0 for numbers near 0."""
    return np.divide(1, numbers, out=np.zeros_like(numbers), where=np.abs(numbers) > _LEAST)


def _solve_scale(columns: F32, weights: F32, codes: F32) -> tuple[F32, F32]:
    """Return the best scales [n] of ``codes``, and by how much each lowers the squared error."""
    weighted = weights * codes
    product = np.einsum("en,en->n", weighted, columns)
    size = np.einsum("en,en->n", weighted, codes)
    scales = product / np.where(size > 0, size, 1)
    return scales, scales * product


@dataclass(slots=True)
class Lines:
    """Elements are ``scales`` [n] times a code from 0 on, less ``minima`` [n]."""

    scales: F32
    minima: F32


def fit_lines(columns: F32, weights: F32, top: int, *, is_free: bool = False) -> Lines:
    """Return scales and minima of codes from 0 to ``top``; only free minima may be negative."""
    low, high = columns.min(axis=0), columns.max(axis=0)
    if not is_free:
        low = np.minimum(low, 0)
    reach = np.where(high - low > _LEAST, high - low, 1)
    sums = weights.sum(axis=0), np.einsum("en,en->n", weights, columns)
    best = np.full(len(low), -np.inf, np.float32)
    found = Lines(np.zeros_like(low), -low)
    above = columns - low
    for share in _SHARES:
        codes = np.rint(above * (np.float32(top * share) / reach))
        np.minimum(codes, top, out=codes)
        best = _keep_line(columns, weights, sums, codes, best, found, is_free=is_free)
    for _ in range(2):
        codes = round_lines(columns, found, top)
        best = _keep_line(columns, weights, sums, codes, best, found, is_free=is_free)
    return found


def round_lines(columns: F32, lines: Lines, top: int) -> F32:
    codes = columns + lines.minima
    codes *= invert(lines.scales)
    np.rint(codes, out=codes)
    return np.clip(codes, 0, top, out=codes)


def _keep_line(
    columns: F32,
    weights: F32,
    sums: tuple[F32, F32],
    codes: F32,
    best: F32,
    found: Lines,
    *,
    is_free: bool,
) -> F32:
    """Put the best lines of ``codes`` into ``found`` where they lower the error more than ``best``;
    return by how much they do.  ``sums``: of weights, and of weighted elements."""
    weighted = weights * codes
    one, own = sums
    first = weighted.sum(axis=0)
    second = np.einsum("en,en->n", weighted, codes)
    product = np.einsum("en,en->n", weighted, columns)
    rest = one * second - first * first
    # Where all codes are equal, no line is better than one without a minimum.
    is_line = rest > 1e-6 * one * second
    safe = np.where(is_line, rest, 1)
    scales = (one * product - own * first) / safe
    minima = (first * product - second * own) / safe
    if not is_free:
        alone = product / np.where(second > 0, second, 1)
        is_low = (minima < 0) | ~is_line
        scales, minima = np.where(is_low, alone, scales), np.where(is_low, 0, minima)
        is_line = second > 0
    gain = scales * product - minima * own
    better = (gain > best) & is_line & (scales > 0)
    found.scales = np.where(better, scales, found.scales)
    found.minima = np.where(better, minima, found.minima)
    return np.where(better, gain, best)


@dataclass(slots=True)
class Settled:
    """Whole numbers of groups [n], as float32, and the scales [n / groups] that they multiply,
    which fp16 holds."""

    scales: F32
    minima: F32
    step: F32
    down: F32

    def spread(self, groups: int) -> tuple[F32, F32]:
        return self.step.repeat(groups), self.down.repeat(groups)


def _take_peaks(numbers: F32, groups: int) -> F32:
    """Return the number furthest from 0 of ``groups`` side by side."""
    blocks = numbers.reshape(-1, groups)
    places = np.abs(blocks).argmax(axis=1)[:, None]
    return np.take_along_axis(blocks, places, axis=1)[:, 0]


def _round_half(numbers: F32) -> F32:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


def _divide(numbers: F32, shared: F32, groups: int) -> F32:
    return np.asarray(np.rint(numbers * invert(shared).repeat(groups)), np.float32)


def _sum_groups(numbers: F32, groups: int) -> F32:
    return np.asarray(numbers.reshape(-1, groups).sum(axis=1), np.float32)


@dataclass(frozen=True, slots=True)
class SuperBlock:
    """How groups share a scale, and a minimum: each has whole numbers that multiply them."""

    groups: int
    """That share them, side by side."""
    lowest: int
    highest: int
    """Whole numbers of scales; minima begin with 0."""
    bottom: int
    top: int
    """Codes."""

    def settle(self, columns: F32, weights: F32, lines: Lines) -> Settled:
        """Return whole numbers for ``lines`` [n], and the best fp16 scales for them.

        For each group the neighbours of the nearest whole number are tried as well; then the shared
        scales are the best for all codes."""
        peaks = _take_peaks(lines.scales, self.groups)
        is_signed = -self.lowest > self.highest
        step = _round_half(peaks / np.float32(self.lowest if is_signed else self.highest))
        down = _round_half(_take_peaks(lines.minima, self.groups) / np.float32(self.highest))
        found = Settled(
            np.clip(_divide(lines.scales, step, self.groups), self.lowest, self.highest),
            np.clip(_divide(lines.minima, down, self.groups), 0, self.highest),
            step,
            down,
        )
        self._try_neighbours(columns, weights, found)
        self._share(columns, weights, found)
        return found

    def _try_neighbours(self, columns: F32, weights: F32, found: Settled) -> None:
        step, down = found.spread(self.groups)
        one = weights.sum(axis=0)
        has_minima = bool(down.any())
        best = np.full(len(one), np.inf, np.float32)
        scales, minima = found.scales.copy(), found.minima.copy()
        for change in (0, -1, 1):
            own = np.clip(scales + change, self.lowest, self.highest)
            wide, least = own * step, minima
            if has_minima:
                codes = self.round(columns, wide, minima * down)
                mean = (weights * (codes * wide - columns)).sum(axis=0) / np.where(one > 0, one, 1)
                least = np.clip(np.rint(mean * invert(down)), 0, self.highest)
            wrong = self.round(columns, wide, least * down)
            wrong *= wide
            wrong -= least * down
            wrong -= columns
            error = np.einsum("en,en,en->n", wrong, wrong, weights)
            better = error < best
            best = np.where(better, error, best)
            found.scales[better], found.minima[better] = own[better], least[better]

    def _share(self, columns: F32, weights: F32, found: Settled) -> None:
        step, down = found.spread(self.groups)
        codes = self.round(columns, found.scales * step, found.minima * down)
        units = codes * found.scales
        weighted = weights * units
        second, product, first = (
            _sum_groups(own, self.groups)
            for own in (
                (weighted * units).sum(axis=0),
                (weighted * columns).sum(axis=0),
                weighted.sum(axis=0) * found.minima,
            )
        )
        one, own = (
            _sum_groups(part, self.groups)
            for part in (
                weights.sum(axis=0) * np.square(found.minima),
                (weights * columns).sum(axis=0) * found.minima,
            )
        )
        rest = second * one - first * first
        is_line = rest > 1e-6 * second * one
        safe = np.where(is_line, rest, 1)
        alone = product / np.where(second > 0, second, 1)
        scales = np.where(is_line, (one * product - first * own) / safe, alone)
        minima = np.where(is_line, (first * product - second * own) / safe, 0)
        better = np.isfinite(scales) & np.isfinite(minima) & (minima >= 0)
        before = self._measure(columns, weights, found)
        old = found.step, found.down
        found.step = np.where(better, _round_half(scales), found.step)
        found.down = np.where(better & is_line, _round_half(minima), found.down)
        worse = self._measure(columns, weights, found) > before
        found.step = np.where(worse, old[0], found.step)
        found.down = np.where(worse, old[1], found.down)

    def _measure(self, columns: F32, weights: F32, found: Settled) -> F32:
        step, down = found.spread(self.groups)
        wide, least = found.scales * step, found.minima * down
        wrong = self.round(columns, wide, least) * wide - least - columns
        return _sum_groups(np.einsum("en,en,en->n", wrong, wrong, weights), self.groups)

    def round(self, columns: F32, scales: F32, minima: F32) -> F32:
        codes = columns + minima
        codes *= invert(scales)
        np.rint(codes, out=codes)
        return np.clip(codes, self.bottom, self.top, out=codes)
