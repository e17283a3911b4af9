"""Schedules: what features choose, which instructions come out, and aarch64 under emulation."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pi2.arrays import F32
from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.backends.kernels.spec import KEPT, PANEL, PARTS, UNPACKED
from pi2.formats import find_packing
from pi2.plan.weights.bundles import assemble_bundles, unpack_part
from pi2.plan.weights.layout import lay_out_bundle
from tests.helpers.aarch64 import (
    ARM_FEATURES,
    emulate,
    generate_assembly,
    make_arm_spec,
    needs_emulator,
)
from tests.helpers.kernels import (
    X86_FEATURES,
    allocate,
    allocate_activations,
    leave_lane_order,
    make_spec,
    measure_error,
    quantize_activations,
)
from tests.helpers.shipped_plans import read_device
from tests.property.test_kernels_ffn import Layer, activate

NEWEST_ARM = "dotprod, fp16"


@pytest.mark.parametrize("name", X86_FEATURES)
def test_features_choose_the_fastest_x86_schedule(name: str) -> None:
    assert choose_isa(X86_FEATURES[name], "x86-64").name == name


def test_a_device_document_chooses_the_schedule_of_its_cores() -> None:
    chosen = {}
    for name in ("oneplus-12", "xiaomi-14", "pixel-8", "raspberry-pi-5"):
        device = read_device(name)
        chosen[name] = choose_isa(set(device.units["cpu"].features or ()), "aarch64").name
    assert set(chosen.values()) == {"dotprod"}


def test_unknown_features_do_no_harm() -> None:
    assert choose_isa({"avx2", "fma", "f16c", "amx"}, "x86-64").name == "avx2"
    assert choose_isa({"neon", "sve"}, "aarch64").name == "neon"
    assert choose_isa({"neon", "dotprod", "i8mm", "sve"}, "aarch64").name == "dotprod"


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("amx", ["vpdpbusd", "zmm"], ["vpmaddubsw", "tdpbssd"]),
        ("avx512vnni", ["vpdpbusd", "zmm"], ["vpmaddubsw"]),
        ("avx512bw", ["vpmaddubsw", "vpmaddwd", "vpermps", "zmm"], ["vpdpbusd"]),
        ("avx2", ["vpmaddubsw", "vfmadd", "vcvtph2ps", "ymm"], ["zmm", "vpdpbusd"]),
        ("sse4.2", ["pmaddubsw"], ["ymm", "vpmaddubsw"]),
        ("x86-64", ["pmullw"], ["ymm", "pmaddubsw"]),
    ],
)
def test_a_gathered_neuron_takes_the_instructions_of_its_schedule(
    name: str, present: list[str], absent: list[str]
) -> None:
    spec = make_spec(hidden=512, features=tuple(sorted(X86_FEATURES[name])))
    code = generate_assembly(spec, "add_neurons")
    assert all(instruction in code for instruction in present)
    assert not any(instruction in code for instruction in absent)


@pytest.mark.parametrize("name", ["add_neurons", "predict_gate"])
def test_prefetches_fill_the_cache_that_the_processor_prefers(name: str) -> None:
    for more, level in (((), "t0"), (("l2-prefetch",), "t1")):
        features = tuple(sorted([*X86_FEATURES["avx512vnni"], *more]))
        code = generate_assembly(make_spec(hidden=512, features=features), name)
        assert set(re.findall(r"prefetch(\w+)", code)) == {level}


@pytest.mark.parametrize("name", ARM_FEATURES)
def test_aarch64_uses_sdot_where_there_is_one(name: str) -> None:
    code = generate_assembly(make_arm_spec(ARM_FEATURES[name], hidden=512), "add_neurons")
    assert ("sdot" in code) == ("dotprod" in ARM_FEATURES[name])
    assert "prfm" in code


@pytest.mark.parametrize("name", ["add_neurons", "add_dense", "begin_ffn", "end_ffn"])
def test_no_kernel_asks_the_runtime_for_memory(name: str) -> None:
    # Large stack arrays become calls that allocate: slow, and outside of the budget.
    spec = make_spec(hidden=4096)
    assert "TVMBackendAllocWorkspace" not in generate_assembly(spec, name)


@needs_emulator
@pytest.mark.parametrize(
    ("features", "precision"),
    [
        *(("neon", precision) for precision in ("int4", "int8", "fp16")),
        # One multiplies integers otherwise, the other halves.
        *(("dotprod", "int4"), ("dotprod", "int8"), ("dotprod, fp16", "fp16")),
    ],
)
def test_gate_rows_on_aarch64(features: str, precision: Any, tmp_path: Path) -> None:
    hidden, neurons = 928, 40
    spec = make_arm_spec(ARM_FEATURES[features], hidden=hidden, ffn=precision)
    rng = np.random.default_rng(0)
    weights, scales = find_packing(precision).quantize(
        rng.standard_normal((neurons, hidden)).astype(np.float32)
    )
    u = rng.standard_normal((1, hidden)).astype(np.float32)
    arrays, stands_for = quantize_activations(u, 2)
    scores, indices = allocate("float32", neurons), allocate("int32", neurons + 1)
    found = allocate("int32", 1)
    second = weights if scales is None else scales.view(np.uint8)
    kernel = emulate(spec, "predict_gate", tmp_path)
    kernel(neurons, 0, 1, weights, second, *arrays, scores, indices, found)
    inputs = u if precision == "fp16" else stands_for
    expected = inputs[0] @ find_packing(precision).dequantize(weights, scales, hidden).T
    assert measure_error(scores, expected) < 1e-5
    assert np.array_equal(indices[: found[0]], np.flatnonzero(scores > 0))


@needs_emulator
@pytest.mark.parametrize(
    ("features", "ffn", "gate_up", "hidden"),
    [
        *((features, "int4", None, 544) for features in ARM_FEATURES),
        *(("neon", "mxfp4", None, 544), ("dotprod", "mxfp4", None, 544)),
        *((NEWEST_ARM, "int8", "q6_k", 512), (NEWEST_ARM, "int8", "int4", 544)),
    ],
)
def test_gathered_neurons_on_aarch64(
    features: str, ffn: Any, gate_up: Any, hidden: int, tmp_path: Path
) -> None:
    formats = {"ffn": ffn, "gate_up": gate_up}
    spec = make_arm_spec(ARM_FEATURES[features], hidden=hidden, **formats)
    layer = Layer(spec, 30, 1, 0)
    slots = np.arange(29, -1, -2).astype(np.int32)
    y, counts = allocate("float32", spec.hidden), allocate("int32", spec.threads + 1)
    scratch: list[npt.NDArray[Any]] = [
        allocate("float32", 30),
        allocate("float32", 30),
        allocate("int32", 30),
        allocate("float32", spec.threads, spec.hidden),
    ]
    kernel = emulate(spec, "add_neurons", tmp_path)
    kernel(len(slots), 0, layer.bundles, slots, *layer.arrays, *scratch, counts, y)
    expected, active = layer.compute(slots)
    assert measure_error(leave_lane_order(y[None]), expected[:1]) < 1e-5
    assert counts[-1] == active


CHUNKS: dict[str, dict[str, Any]] = {
    "gate and up, dReLU": {"hidden": 544, "planes": 2, "chunk_planes": 1},
    "gate and up, SiLU": {"hidden": 96, "activation": "silu", "ffn": "int8"},
    "two experts": {"hidden": 160, "experts": 2},
    "up with a bias": {"hidden": 160, "activation": "relu", "gated": False, "bias": True},
}


@needs_emulator
@pytest.mark.parametrize("name", CHUNKS)
def test_the_ffn_of_a_chunk_on_aarch64(name: str, tmp_path: Path) -> None:
    changes = CHUNKS[name]
    gated, ffn = changes.get("gated", True), changes.get("ffn", "int4")
    layout = lay_out_bundle(
        changes["hidden"], ffn, gated=gated, bias="bias" in changes, mixed="experts" in changes
    )
    spec = make_arm_spec(ARM_FEATURES[NEWEST_ARM], stride=layout.stride, **changes)
    rng = np.random.default_rng(1)
    neurons, tokens, hidden, planes = 37, 5, spec.hidden, spec.chunk_planes
    arrays: list[Any] = allocate_activations(tokens, hidden, spec.most_planes)
    y = allocate("float32", tokens, hidden)
    arrays[3][:] = rng.standard_normal((tokens, hidden))
    emulate(spec, "begin_ffn", tmp_path)(tokens, *arrays, y)
    _, inputs = quantize_activations(arrays[3].copy(), planes)
    rows = [rng.standard_normal((neurons, hidden)).astype(np.float32) * 0.1 for _ in range(3)]
    biases = rng.standard_normal((neurons, 1)).astype(np.float32) if layout.biases else None
    owners = np.arange(neurons, dtype=np.int32) % 2 if "experts" in changes else None
    packed = [find_packing(ffn).quantize(values) for values in (rows if gated else rows[1:])]
    bundles = assemble_bundles(packed, layout, biases, owners)
    parts = [unpack_part(bundles, layout, index) for index in range(len(layout.parts))]
    sums = [inputs @ part.astype(np.float64).T for part in parts[:-1]]
    if biases is not None:
        sums[0] += biases[:, 0]
    up = sums[1] if gated else np.ones_like(sums[0])
    active = activate(spec.ffn.activation, 0.0, sums[0], up)
    routes = allocate("float32", tokens, 2)
    routes[:] = [[1, 0], [1, 0], [0, 1], [0.25, 0.75], [0.5, 0.5]]
    if owners is not None:
        active = active * routes[:, owners]
    expected = active @ parts[-1].astype(np.float64)
    values, masks = allocate("float32", tokens, PANEL), allocate("int32", tokens, PARTS)
    unpacked = allocate("float32", spec.threads, UNPACKED + KEPT, 128)
    kernel = emulate(spec, "add_dense", tmp_path)
    if owners is None:
        kernel(neurons, tokens, bundles, *arrays, values, masks, unpacked, y)
    for expert in range(2 if owners is not None else 0):
        places = allocate("int32", int(np.count_nonzero(owners == expert)))
        places[:] = np.flatnonzero(owners == expert)
        named = np.flatnonzero(routes[:, expert])
        chosen = allocate("int32", len(named))
        chosen[:] = named
        kernel(
            *(len(places), len(named), bundles, places, chosen, *arrays),
            *(values, masks, unpacked, y, routes),
        )
    assert measure_error(leave_lane_order(y), expected) < 1e-5


@pytest.fixture
def vnni_schedule(monkeypatch: pytest.MonkeyPatch) -> Isa:
    """The schedule of VNNI, which machines without it run with the instruction written out."""
    from pi2.backends.blocks import machine
    from pi2.backends.compiler import vectors as v
    from pi2.backends.kernels.operands import DotPrimitive
    from tests.helpers.kernels import list_runnable_isas, make_isa

    def write_out(total: Any, weights: Any, codes: Any, width: int) -> Any:
        lanes = 4 * width
        four = v.cast(weights, "int16", lanes) * v.cast(codes, "int16", lanes)
        plain = DotPrimitive(make_isa("x86-64"), width)
        return total + plain.finish(v.let(four))

    monkeypatch.setattr(machine, "emit_vpdpbusd", write_out)
    # Machine code for what this machine has.
    return dataclasses.replace(make_isa("avx512vnni"), mcpu=make_isa(list_runnable_isas()[-1]).mcpu)


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("length", [32, 992])  # one group, and blocks of each size
def test_the_vnni_schedule_is_right_if_vpdpbusd_does_what_its_manual_says(
    precision: Any, length: int, vnni_schedule: Isa
) -> None:
    from tests.helpers.kernels import compile_kernel, make_multiply

    rows, tokens = 9, 3
    rng = np.random.default_rng(0)
    weights, scales = find_packing(precision).quantize(
        rng.standard_normal((rows, length)).astype(np.float32)
    )
    x = rng.standard_normal((tokens, length)).astype(np.float32)
    arrays, stands_for = quantize_activations(x, 2)
    y = allocate("float32", tokens, rows)
    assert scales is not None
    kernel = compile_kernel(make_multiply(vnni_schedule, length, precision, 2, 1), vnni_schedule)
    kernel(rows, tokens, weights, scales.view(np.uint8), *arrays, y)
    expected = stands_for @ find_packing(precision).dequantize(weights, scales, length).T
    assert measure_error(y, expected) < 1e-5


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_token_of_a_step_has_the_bits_that_it_has_alone(precision: Any, vnni_schedule: Isa) -> None:
    from tests.helpers.kernels import compile_kernel, make_multiply

    length, rows = 992, 75
    rng = np.random.default_rng(0)
    weights, scales = find_packing(precision).quantize(
        rng.standard_normal((rows, length)).astype(np.float32)
    )
    assert scales is not None
    isa = vnni_schedule
    kernel = compile_kernel(make_multiply(isa, length, precision, 2, 2), isa)
    x = rng.standard_normal((9, length)).astype(np.float32)

    def multiply(part: F32) -> F32:
        arrays, _ = quantize_activations(part, 2)
        y = allocate("float32", len(part), rows)
        kernel(rows, len(part), weights, scales.view(np.uint8), *arrays, y)
        return np.asarray(y)

    alone = np.concatenate([multiply(x[token : token + 1]) for token in range(9)])
    assert np.abs(alone).min(axis=1).all(), "every row of every token was computed"
    # One tile of tokens, two of them, and three of which the last has one.
    for tokens in (2, 3, 4, 7, 9):
        assert np.array_equal(multiply(x[:tokens]), alone[:tokens]), tokens
