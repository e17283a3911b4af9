"""Rounded weights and activations, and how far: the cpu backend against the reference."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32, U8
from pi2.backends.cpu import backend as cpu
from pi2.backends.protocol import Executor
from pi2.backends.reference import backend as reference
from pi2.formats import find_packing
from pi2.plan.weights.bundles import assemble_bundles, unpack_part
from pi2.plan.weights.layout import BundleLayout, lay_out_bundle
from tests.backend.test_kernels_executor import MODELS, feed
from tests.helpers.kernels import DEMO_LIKE, X86_FEATURES, RandomModel, align, measure_error

pytestmark = pytest.mark.usefixtures("quick_kernels")

ODD_BLOCKS: dict[str, dict[str, Any]] = {
    "int2": {**DEMO_LIKE, "hidden": 64 * 11},
    "int3": {**DEMO_LIKE, "hidden": 128 * 7},
}
"""Blocks of 16, 4 and 2 lanes, or of 16, 8 and 4."""


def make_model(precision: Any, kind: Any) -> RandomModel:
    """A random model whose neurons have fewer bits than documents may ask for."""
    exactly: dict[str, Any] = {"kv_type": "fp32", "chunk_type": "fp32"} if kind == "fp32" else {}
    model = RandomModel(**ODD_BLOCKS[precision], token_type=kind, **exactly)
    old = model.request.bundle
    layout = lay_out_bundle(old.hidden, precision, gated=old.is_gated)
    model.bundles[:] = [align(round_bundles(own, old, layout)) for own in model.bundles]
    sizes = model.model.quantization.model_copy(update={"ffn": precision})
    own = model.model.model_copy(update={"quantization": sizes})
    model.request = dataclasses.replace(model.request, model=own, bundle=layout)
    return model


def round_bundles(bundles: U8, old: BundleLayout, layout: BundleLayout) -> U8:
    rows = (unpack_part(bundles, old, part) for part in range(len(old.parts)))
    return assemble_bundles([find_packing(layout.precision).quantize(row) for row in rows], layout)


def compute(executor: Executor, model: RandomModel) -> F32:
    executor.embed(np.array([7], np.int32))
    for layer, bundles in enumerate(model.bundles):
        executor.attend(layer, 0)
        executor.begin_ffn(layer)
        executor.add_neurons(layer, bundles, np.arange(len(bundles), dtype=np.int32))
        executor.end_ffn(layer)
    return np.array(executor.logits(0))


@pytest.mark.parametrize(
    ("precision", "kind", "features"),
    [
        ("int2", "int16", None),
        ("int3", "fp32", None),
        ("int3", "int16", "avx2"),
        ("int2", "fp32", "avx2"),
    ],
)
def test_neurons_are_computed_as_the_reference_does(
    precision: str, kind: str, features: str | None
) -> None:
    model = make_model(precision, kind)
    request = model.request
    if features is not None:
        request = dataclasses.replace(request, features=frozenset(X86_FEATURES[features]))
    ours, truth = cpu.build(request), reference.build(model.request)
    found, expected = compute(ours, model), compute(truth, model)
    assert measure_error(found, expected) < (1e-5 if kind == "fp32" else 3e-4)
    assert ours.count_active() > 0


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


@pytest.mark.parametrize("name", ["demo-like", "odd"])
def test_nothing_is_rounded_where_everything_is_fp32(name: str) -> None:
    model = RandomModel(
        **MODELS[name], kv_type="fp32", token_type="fp32", chunk_type="fp32", seed=5
    )
    ours, truth = cpu.build(model.request), reference.build(model.request)
    ids, position = list(range(40, 56)), 0
    for count in (9, 1, 1, 4, 1):
        chunk = ids[position : position + count]
        found = feed(ours, model, chunk, position, "gate")
        expected = feed(truth, model, chunk, position, "gate")
        assert measure_error(found, expected) < 1e-5
        position += count
    assert ours.count_active() == truth.count_active()


@pytest.mark.parametrize(
    ("token", "chunk"), [("fp32", "int8"), ("int16", "fp32"), ("int8", "int16")]
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
