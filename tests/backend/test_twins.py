"""Neurons' twins: the cpu backend against the reference backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.backends.cpu import backend as cpu
from pi2.backends.protocol import Executor, Twins
from pi2.backends.reference import backend as reference
from pi2.plan.weights.layout import TwinPrecision
from pi2.store.twins import make_twins
from tests.helpers.kernels import DEMO_LIKE, X86_FEATURES, RandomModel, align, measure_error

FIRST = 40
"""Neurons of a layer that have no twin."""

ODD_BLOCKS: dict[TwinPrecision, dict[str, Any]] = {
    "int2": {**DEMO_LIKE, "hidden": 64 * 11},
    "int3": {**DEMO_LIKE, "hidden": 128 * 7},
}
"""Blocks of 16, 4 and 2 lanes, or of 16, 8 and 4."""


def make_model(precision: TwinPrecision, **settings: Any) -> RandomModel:
    """A random model whose neurons have twins from the 40th on."""
    model = RandomModel(**ODD_BLOCKS[precision], **settings)
    bundle = model.request.bundle
    bundles = [align(make_twins(own[FIRST:], bundle, precision)[0]) for own in model.bundles]
    twins = Twins(precision=precision, bundles=bundles)
    model.request = dataclasses.replace(model.request, twins=twins)
    return model


def compute(executor: Executor, model: RandomModel, *, twins: bool) -> F32:
    """Logits of a token of which every other neuron from the 40th on is computed by its twin."""
    executor.embed(np.array([7], np.int32))
    for layer, bundles in enumerate(model.bundles):
        executor.attend(layer, 0)
        executor.begin_ffn(layer)
        every = np.arange(len(bundles), dtype=np.int32)
        others = every[FIRST::2]
        executor.add_neurons(layer, bundles, np.setdiff1d(every, others).astype(np.int32))
        if twins:
            executor.add_twins(layer, others)
        else:
            executor.add_neurons(layer, bundles, others)
        executor.end_ffn(layer)
    return np.array(executor.logits(0))


@pytest.mark.parametrize(
    ("precision", "kind"), [("int2", "int16"), ("int2", "fp32"), ("int3", "int16")]
)
def test_twins_are_computed_as_the_reference_does(precision: TwinPrecision, kind: Any) -> None:
    exactly = {"kv_type": "fp32", "chunk_type": "fp32"} if kind == "fp32" else {}
    model = make_model(precision, token_type=kind, **exactly)
    ours, truth = cpu.build(model.request), reference.build(model.request)
    found, expected = compute(ours, model, twins=True), compute(truth, model, twins=True)
    assert measure_error(found, expected) < (1e-5 if kind == "fp32" else 3e-4)
    exact = compute(truth, model, twins=False)
    assert measure_error(expected, exact) > 1e-3, "twins are not the neurons themselves"
    assert ours.count_active() > 0


@pytest.mark.parametrize(("precision", "kind"), [("int2", "int16"), ("int3", "fp32")])
def test_narrower_registers_unpack_twins_alike(precision: TwinPrecision, kind: Any) -> None:
    exactly = {"kv_type": "fp32", "chunk_type": "fp32"} if kind == "fp32" else {}
    model = make_model(precision, token_type=kind, **exactly)
    expected = compute(reference.build(model.request), model, twins=True)
    features = frozenset(X86_FEATURES["avx2"])
    ours = cpu.build(dataclasses.replace(model.request, features=features))
    assert measure_error(compute(ours, model, twins=True), expected) < 3e-4
