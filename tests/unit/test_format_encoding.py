"""Formats of GGUF files that pi2 writes: blocks stand for the numbers that they were made of."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pi2.arrays import F32
from pi2.formats import find_format, list_formats

ENCODED = [name for name, own in list_formats().items() if own.can_encode]
BOUNDS = {
    "f32": 0.0,
    "f16": 5e-4,
    "bf16": 4e-3,
    "q8_0": 0.005,
    "q6_k": 0.018,
    "q5_k": 0.036,
    "q5_1": 0.035,
    "q5_0": 0.042,
    "q4_k": 0.073,
    "q4_1": 0.072,
    "q4_0": 0.083,
}
"""Root of the mean squared error of normal numbers, relative."""


def draw_rows(count: int = 16, width: int = 512) -> F32:
    return np.random.default_rng(0).standard_normal((count, width), np.float32)


def measure(wrong: F32, importance: F32 | float = 1.0) -> float:
    return float((np.square(wrong) * importance).sum())


def test_every_format_of_usual_mixtures_is_written() -> None:
    assert set(ENCODED) == set(BOUNDS)


@pytest.mark.parametrize("name", ENCODED)
def test_numbers_come_back_but_for_the_format_s_error(name: str) -> None:
    own, rows = find_format(name), draw_rows()
    raw = own.encode(rows)
    assert raw.shape == (len(rows), own.count_bytes(rows.shape[1])) and raw.dtype == np.uint8
    assert not own.find_faults(raw).any()
    found = gguf.dequantize(raw, gguf.GGMLQuantizationType(own.number))
    assert (measure(found - rows) / measure(rows)) ** 0.5 <= BOUNDS[name]


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize(
    "numbers",
    [
        np.zeros(512),
        np.full(512, -3.0),
        np.full(512, 1e-40),
        np.r_[np.full(511, 1e-3), 6e4],
        np.r_[np.zeros(300), np.linspace(-1, 1, 212)],
        np.r_[np.full(256, 5.0), np.zeros(256)],
    ],
    ids=["zeros", "equal", "denormal", "an outlier", "half zeros", "positive"],
)
def test_odd_rows_stay_near(name: str, numbers: F32) -> None:
    own, rows = find_format(name), numbers[None].astype(np.float32)
    raw = own.encode(rows)
    assert not own.find_faults(raw).any()
    wrong = np.abs(own.decode(raw) - rows)
    steps = {"q4": 15, "q5": 31, "q6": 62, "q8": 254}.get(name[:2], 250)
    smallest = 1e-40 if name in ("f32", "bf16") else 128 * 2.0**-24  # that scales can have
    assert wrong.max() <= 1.2 * np.abs(rows).max() / (steps / 2) + smallest
    if not rows.any():
        assert not own.decode(raw).any()


@pytest.mark.parametrize("name", [name for name in ENCODED if not find_format(name).is_plain])
def test_important_columns_err_less(name: str) -> None:
    own, rows, importance = find_format(name), draw_rows(), np.ones(512, np.float32)
    importance[::8] = 100.0
    plain, aware = (own.decode(own.encode(rows, given)) - rows for given in (None, importance))
    assert measure(aware, importance) < 0.9 * measure(plain, importance)
    assert measure(aware[:, ::8]) < measure(plain[:, ::8])


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_numbers_of_the_format_itself_hardly_move(name: str) -> None:
    own = find_format(name)
    rows = own.decode(own.encode(draw_rows()))
    again = own.decode(own.encode(rows))
    assert (measure(again - rows) / measure(rows)) ** 0.5 <= BOUNDS[name] / 4


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e6])
def test_what_does_not_fit_is_refused(name: str, number: float) -> None:
    rows = draw_rows(2)
    rows[1, 7] = number
    if number == 1e6 and name in ("f32", "bf16"):
        find_format(name).encode(rows)
        return
    with pytest.raises(ValueError, match=r"a weight is not a finite number|does not fit into fp16"):
        find_format(name).encode(rows)
