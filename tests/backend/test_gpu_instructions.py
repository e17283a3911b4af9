"""Instructions of a program on GPUs next to numpy's line of each, over odd shapes."""

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pi2.backends.blocks.contract import FIELDS, ROUTERS
from pi2.backends.blocks.instructions import put_float
from pi2.backends.gpu.instructions import make_step
from pi2.backends.gpu.kernels.compile import make_step as make_kernel
from pi2.backends.gpu.kernels.specification import FIXED, StepKernel
from pi2.backends.gpu.launchers.interface import Launcher
from tests.helpers.blocks import Numpy
from tests.helpers.goldens import measure_error
from tests.helpers.gpu import Bench
from tests.helpers.instruction_cases import (
    TOKENS,
    Case,
    Draw,
    draw_cache,
    list_common,
    list_routing,
    make_attention,
    place_cache,
    put,
)
from tests.helpers.state_cases import list_states

CLOSE = 3e-6
ROUNDED = {"fp32": CLOSE, "fp16": CLOSE, "int8": 3e-5}
"""Bounds by elements of the KV cache: what is kept is the same, but for a code of int8."""
KERNELS = ("normalize", "cap", "term", "grow", "turn", "gate_heads", "route", "spread")
STATE_KERNELS = ("convolve", "prepare", "recur")
SPANS = 3


def is_computed(case: Case) -> bool:
    """Whether stores have such an instruction, and models that a GPU computes."""
    own = case.values
    return not (
        own.get("neighbours")
        or own.get("swapped")
        or own.get("has_table")
        or own.get("has_expert_scale")
        or own.get("bias_of_score")
        or own.get("of_keys")
        or (case.kernel == "cap" and own["limit"] < 0)
        or (case.kernel == "route" and ROUTERS[own["kind"]] not in ("softmax", "sigmoid"))
    )


def list_cases(kernel: str) -> Iterator[Case]:
    for listed in (list_common, list_routing, list_states):
        for case in listed(Draw(4)):
            if case.kernel == kernel and is_computed(case):
                yield complete(case)


def complete(case: Case) -> Case:
    values = case.values
    if case.kernel in ("convolve", "recur"):
        # A chunk of one sequence, which begins.
        values = {**values, "sequences": np.zeros(TOKENS, np.int32)}
        values["positions"] = np.arange(TOKENS, dtype=np.int32)
    return Case(kernel=case.kernel, items=case.items, values=values, kv=case.kv)


def run(
    launcher: Launcher, case: Case, tokens: int, more: Mapping[str, Any], **numbers: int
) -> dict[str, Any]:
    """Run a case on a device; return what is in its arrays then."""
    arrays = {name: own for name, own in case.values.items() if isinstance(own, np.ndarray)}
    on_device = {name: own.copy() for name, own in arrays.items()}
    for name in ("key_scales", "value_scales"):
        if name in on_device:
            on_device[name] = on_device[name].astype(np.float32)
    places = dict(enumerate(arrays, 1))
    values = dict.fromkeys(FIELDS[case.kernel], 0)
    for name, value in case.values.items():
        if name in values and name not in arrays:
            values[name] = put_float(value) if isinstance(value, float) else int(value)
    values |= {name: number for number, name in places.items() if name in values}

    def find(address: int) -> Any:
        return (SimpleNamespace(name=places[address]), 0) if address in places else None

    format = case.kv if case.kernel in ("keep", "attend") else ""
    step = make_step(case.kernel, values, format, {}, find)
    assert isinstance(step.kernel, StepKernel)
    bench = Bench(launcher, [make_kernel(step.kernel, launcher.facts.fp16)])
    wanted = bench.list_arrays(step.kernel.name)
    given = {name: own for name, own in (on_device | dict(more)).items() if name in wanted}
    return bench.run(step.kernel.name, given, {**step.numbers, "tokens": tokens, **numbers})


@pytest.mark.parametrize("kernel", KERNELS + STATE_KERNELS)
def test_kernels_compute_what_numpy_defines(launcher: Launcher, kernel: str) -> None:
    cases = list(list_cases(kernel))
    assert cases
    for number, case in enumerate(cases):
        expected = copy.deepcopy(case)
        Numpy(4).run(expected)
        found = run(launcher, case, TOKENS, {}, runs=1, steps=TOKENS)
        for name, value in found.items():
            # States lie in another order.
            if name == "memory":
                continue
            wanted = expected.values[name]
            if wanted.dtype.kind == "i":
                np.testing.assert_array_equal(value, wanted)
                continue
            error = measure_error(value[~np.isnan(wanted)], wanted[~np.isnan(wanted)])
            assert error < CLOSE, f"case {number}: {name} is off by {error}"


def draw_attention(kind: str, group: int, own: dict[str, Any], *, is_latent: bool) -> Case:
    positions = np.array([0, 19, 300, 429], np.int32)
    values = {"window": 0, "is_chunked": 0, "has_sinks": 0, "cap": 0.0, "parts": 1, **own}
    more: dict[str, Any] = {"is_latent": is_latent, "widths": (48, 32), "context": 448}
    return make_attention(kind, Draw(4), positions, group, values, **more)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("group", "own", "is_latent"),
    [
        (3, {"window": 300, "cap": 2.0}, False),
        (2, {"window": 300, "is_chunked": 1, "has_sinks": 1}, False),
        (4, {}, True),
    ],
    ids=["window", "chunks and sinks", "latent"],
)
def test_spans_of_contexts_are_joined(
    launcher: Launcher, kind: str, group: int, own: dict[str, Any], is_latent: bool
) -> None:
    case = draw_attention(kind, group, own, is_latent=is_latent)
    expected = copy.deepcopy(case)
    Numpy(4).run(expected)
    values, tokens = case.values, len(case.values["positions"])
    width, heads = values["value_width"], values["heads"]
    for spans in (1, SPANS):
        more = {
            "span_sums": np.full((spans, tokens, heads, width), 7, np.float32),
            "span_tops": np.full((spans, tokens, heads, 2), 7, np.float32),
        }
        more |= run(launcher, case, tokens, more, spans=spans)
        join = Case(kernel="join", items=0, values=values)
        found = run(launcher, join, tokens, more, spans=spans)["y"]
        used = heads * width
        error = measure_error(found[:, :used], expected.values["y"][:, :used])
        assert error < ROUNDED[kind], spans


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("has_values", [True, False], ids=["keys and values", "latent"])
def test_vectors_are_kept_as_numpy_rounds_them(
    launcher: Launcher, kind: str, has_values: bool
) -> None:
    draw, heads, widths = Draw(4), 3, {"key": 40, "value": 24}
    sequences, positions = np.array([0, 1, 0], np.int32), np.array([0, 3, 1], np.int32)
    stride = heads * widths["key"] + 5
    values: dict[str, Any] = {"x_stride": stride, "heads": heads}
    values |= {"sequences": sequences, "positions": positions}
    for name, width in widths.items():
        used = width if has_values or name == "key" else 0
        values |= place_cache(name, draw_cache(kind, draw, heads, 48, width), used)
        values[f"{name}s"] = draw.floats(3, stride)
    values["keys"][2] = 0.0
    case = Case(kernel="keep", items=3 * heads, values=values, kv=kind)
    expected = copy.deepcopy(case)
    Numpy(4).run(expected)
    found = run(launcher, case, 3, {})
    names = [name for name in found if name.endswith(("_cache", "_scales"))]
    assert len(names) == (1 + has_values) * (1 + (kind == "int8"))
    for name in names:
        np.testing.assert_array_equal(found[name], expected.values[name])


def test_known_arguments_are_fields_of_their_kernels() -> None:
    for kernel, names in FIXED.items():
        assert names <= set(FIELDS[kernel]), kernel


def test_rows_of_vectors_are_multiplied_and_added(launcher: Launcher) -> None:
    draw, length, rows = Draw(4), 75, 11
    x, weights, bias = draw.floats(3, length), draw.floats(rows, length), draw.floats(rows)
    before = draw.floats(3, rows)
    values = {**put("x", x), **put("y", before), "weights": weights, "bias": bias, "has_bias": 1}
    values |= {"blocks": length, "rows": rows, "added": 1, "factor": 0.5}
    case = Case(kernel="multiply", items=rows, values=values)
    found = run(launcher, case, 3, {})["y"]
    wanted = before + np.float32(0.5) * (x.astype(np.float64) @ weights.T + bias)
    assert measure_error(found, wanted) < CLOSE
