"""Rounded activations, and how far: the cpu backend against the reference."""

from typing import Any

import numpy as np
import pytest

from pi2.backends.cpu import backend as cpu
from pi2.backends.reference import backend as reference
from tests.backend.test_kernels_executor import MODELS, feed
from tests.helpers.kernels import RandomModel, measure_error
from tests.helpers.slow import keep_quick

pytestmark = pytest.mark.usefixtures("quick_kernels")


def test_chunks_may_be_rounded_to_8_bits_and_single_tokens_are_not() -> None:
    options = MODELS["demo-like"]
    coarse = RandomModel(**options, chunk_type="int8")
    fine = RandomModel(**options)
    ids = list(range(20))
    expected = feed(reference.build(fine.request), fine, ids[:16], 0)
    found = feed(cpu.build(coarse.request), coarse, ids[:16], 0)
    assert 3e-4 < measure_error(found, expected) < 1e-2
    for mode in ("none", "gate"):
        runs = []
        for model in (coarse, fine):
            executor = cpu.build(model.request)
            runs.append([feed(executor, model, [i], at, mode)[0] for at, i in enumerate(ids[:5])])
        assert np.array_equal(runs[0], runs[1])


@pytest.mark.parametrize(
    ("token", "chunk"),
    keep_quick([("fp32", "int8"), ("int16", "fp32"), ("int8", "int16")], [("fp32", "int8")]),
)
def test_single_tokens_and_chunks_may_be_rounded_differently(token: Any, chunk: Any) -> None:
    mixed = RandomModel(**MODELS["demo-like"], token_type=token, chunk_type=chunk)
    ours, truth = cpu.build(mixed.request), reference.build(mixed.request)
    limits = {"int8": 1e-2, "int16": 3e-4, "fp32": 3e-4}
    assert measure_error(feed(ours, mixed, [7], 0), feed(truth, mixed, [7], 0)) < limits[token]
    ids = list(range(20))
    ours, truth = cpu.build(mixed.request), reference.build(mixed.request)
    # The head rounds what it reads as it does for a token.
    found, expected = feed(ours, mixed, ids[:16], 0), feed(truth, mixed, ids[:16], 0)
    assert measure_error(found, expected) < max(limits[chunk], limits[token])
