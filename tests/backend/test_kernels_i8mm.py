"""The schedule for ARM's matrix instruction: assembly, exact integers, and whole kernels."""

import collections
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.backends.kernels.spec import KEPT, PANEL, PARTS, UNPACKED
from pi2.formats import find_packing
from pi2.plan.weights.bundles import assemble_bundles, unpack_part
from pi2.plan.weights.layout import GROUP, Precision, lay_out_bundle, round_up
from tests.backend.test_kernels_executor import feed
from tests.helpers.aarch64 import (
    ARM_FEATURES,
    Emulated,
    emulate,
    generate,
    generate_assembly,
    make_arm_spec,
    needs_emulator,
)
from tests.helpers.kernels import (
    RandomModel,
    allocate,
    allocate_activations,
    allocate_tiles,
    leave_lane_order,
    list_runnable_isas,
    make_isa,
    make_multiply,
    measure_error,
    quantize_activations,
)
from tests.property.test_kernels_ffn import activate

LENGTH = 1504
"""Two blocks of 16 groups, then one each of 8, 4, 2 and 1."""


def pair_activations(
    codes: npt.NDArray[Any], scales: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return codes [tokens, planes, length] in natural order and scales as `i8mm` says."""
    tokens, planes, length = codes.shape
    even = tokens + tokens % 2
    padded = np.full((even, planes, length), 99, np.int8)
    padded[:tokens] = codes
    order = padded.reshape(even // 2, 2, planes, length // 8, 8).transpose(0, 2, 3, 1, 4)
    paired = allocate("int8", even, planes, length)
    paired[...] = order.reshape(even, planes, length)
    wide = np.full((even, length // GROUP), 7, np.float32)
    wide[:tokens] = scales
    paired_scales = allocate("float32", even, length // GROUP)
    paired_scales[...] = wide.reshape(even // 2, 2, -1).transpose(0, 2, 1).reshape(even, -1)
    return paired, paired_scales


class Product:
    """A compiled `make_multiply`, and integers to try it with."""

    def __init__(self, isa: Isa, precision: Precision, planes: int, folder: Path) -> None:
        emit = make_multiply(isa, LENGTH, precision, planes, 2)
        self._kernel = Emulated(generate(isa, "aarch64", "multiply", emit), "multiply", folder)
        self._isa, self._precision, self._planes = isa, precision, planes

    def compute(self, weights: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Multiply integers whose scales are all 1."""
        tokens, rows = len(x), len(weights)
        high = (x + 128) >> 8
        parts = np.stack([high, x - 256 * high] if self._planes == 2 else [x], 1).astype(np.int8)
        ones = np.ones((tokens, LENGTH // GROUP), np.float32)
        pairs = self._isa.pairs
        if pairs and tokens > 1:
            codes, scales = pair_activations(parts, ones)
        else:
            # One token has the order of all other schedules.
            codes, scales = allocate("int8", *parts.shape), ones
            for plane in range(self._planes):
                codes[:, plane] = find_packing("int8").pack(parts[:, plane]).view(np.int8)
        sums = (-8 * x.reshape(tokens, -1, GROUP).sum(-1)).astype(np.int32)
        packed = find_packing(self._precision).pack(weights.astype(np.int8))
        each: npt.NDArray[Any] = np.ones((rows, LENGTH // GROUP), np.float16)
        if self._precision == "ternary":
            each = np.ones((rows, 1), np.float32)
        y = allocate("float32", tokens, rows)
        self._kernel(
            *(rows, tokens, packed, each.view(np.uint8)),
            *(codes, scales, sums, allocate("float32", tokens, LENGTH)),
            *([allocate_tiles(2, LENGTH)] if pairs else []),
            y,
        )
        return y


@needs_emulator
@pytest.mark.parametrize(
    ("features", "precision", "planes"),
    [
        ("i8mm", "int4", 1), ("i8mm", "int4", 2), ("i8mm", "int8", 1), ("i8mm", "int8", 2),
        ("i8mm", "ternary", 2), ("dotprod, fp16", "int4", 2), ("dotprod, fp16", "ternary", 2),
    ],
)  # fmt: skip
def test_both_schedules_have_the_sums_of_integers(
    features: str, precision: Precision, planes: int, tmp_path: Path
) -> None:
    product = Product(
        choose_isa(set(ARM_FEATURES[features]), "aarch64"), precision, planes, tmp_path
    )
    rng = np.random.default_rng(0)
    lowest, highest = {"int4": (-8, 7), "int8": (-128, 127), "ternary": (-1, 1)}[precision]
    limit = 127 if planes == 1 else 32512
    most = min(limit, 1500) if precision == "int8" else limit
    for rows, tokens in ((1, 2), (7, 3), (8, 4), (9, 5), (21, 9), (16, 1)):
        weights = rng.integers(lowest, highest + 1, (rows, LENGTH))
        x = rng.integers(-most, most + 1, (tokens, LENGTH))
        expected = x @ weights.T
        # Scales of 1 and sums below 2^24: float32 has them exactly, whatever is added first.
        assert np.abs(expected).max() < 2**24
        assert np.array_equal(product.compute(weights, x), expected), (rows, tokens)
    # One group at its extremes, all others zero.
    weights = np.full((3, LENGTH), lowest)
    weights[1] = highest
    for group in (0, 5, 17, 40, 45, 46):
        x = np.zeros((2, LENGTH), np.int64)
        x[:, group * GROUP : (group + 1) * GROUP] = [[-limit], [limit]]
        expected = (x @ weights.T).astype(np.float32)
        assert np.array_equal(product.compute(weights, x), expected), group


FFNS: dict[str, dict[str, Any]] = {
    "gate and up, dReLU": {"hidden": 544, "planes": 2, "chunk_planes": 1},
    "gate and up, SiLU": {"hidden": 96, "activation": "silu", "ffn": "int8"},
    "4-bit floats": {"hidden": 160, "activation": "silu", "ffn": "mxfp4"},
    "two experts": {"hidden": 160, "experts": 2},
    "up with a bias": {"hidden": 160, "activation": "relu", "gated": False, "bias": True},
}


@needs_emulator
@pytest.mark.parametrize("name", FFNS)
def test_the_ffn_of_a_chunk(name: str, tmp_path: Path) -> None:
    changes = FFNS[name]
    gated, ffn = changes.get("gated", True), changes.get("ffn", "int4")
    layout = lay_out_bundle(
        changes["hidden"], ffn, gated=gated, bias="bias" in changes, mixed="experts" in changes
    )
    spec = make_arm_spec(ARM_FEATURES["i8mm"], stride=layout.stride, **changes)
    rng = np.random.default_rng(1)
    neurons, tokens, hidden, planes = 37, 5, spec.hidden, spec.chunk_planes

    # What `begin_ffn` makes of x is in the order that is documented.
    arrays: list[Any] = allocate_activations(tokens + 1, hidden, planes)
    arrays.append(allocate_tiles(spec.threads, hidden))
    y = allocate("float32", tokens, hidden)
    arrays[3][:tokens] = rng.standard_normal((tokens, hidden))
    emulate(spec, "begin_ffn", tmp_path)(tokens, *arrays, y)
    natural, inputs = quantize_activations(arrays[3][:tokens].copy(), planes)
    codes = np.stack(
        [
            find_packing("int8").unpack(natural[0][:, p].view(np.uint8), hidden)
            for p in range(planes)
        ],
        1,
    )
    paired, scales = pair_activations(codes, natural[1])
    last = slice(None, tokens - 1)
    assert np.array_equal(arrays[0][last], paired[last])
    assert np.array_equal(arrays[1][last], scales[last])

    # Of mxfp4, 32 neurons share scales.
    count = round_up(neurons, GROUP)
    rows = [rng.standard_normal((count, hidden)).astype(np.float32) * 0.1 for _ in range(3)]
    biases = rng.standard_normal((neurons, 1)).astype(np.float32) if layout.biases else None
    owners = np.arange(neurons, dtype=np.int32) % 2 if "experts" in changes else None
    packed = [
        (weights[:neurons], None if scales is None else scales[:neurons])
        for weights, scales in (
            find_packing(ffn).quantize(values, spread=part.spread)
            for values, part in zip(rows if gated else rows[1:], layout.parts, strict=True)
        )
    ]
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
        # Token 2 with 3, with which it is multiplied; token 4 has no other.
        named = [[0, 1, 2, 3, 4], [2, 3, 4]][expert]
        chosen = allocate("int32", len(named))
        chosen[:] = named
        kernel(
            *(len(places), len(named), bundles, places, chosen, *arrays),
            *(values, masks, unpacked, y, routes),
        )
    assert measure_error(leave_lane_order(y), expected) < 1e-5


def list_innermost_loops(code: str) -> list[list[str]]:
    """Bodies of loops without a loop inside, of aarch64 assembly."""
    lines = [line.strip() for line in code.splitlines()]
    labels: dict[str, int] = {}
    loops = []
    for place, line in enumerate(lines):
        label = re.match(r"(\.LBB\w+):", line)
        if label:
            labels[label[1]] = place
        jump = re.match(r"(?:b\.\w+|cbn?z|tbn?z)\s.*?(\.LBB\w+)$", line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] + 1 : place + 1]
            if not any(re.match(r"\.LBB\w+:", inner) for inner in body):
                loops.append([inner for inner in body if re.match(r"[a-z]", inner)])
    return loops


@pytest.mark.parametrize("name", ["dotprod, fp16", "i8mm"])
def test_only_cores_with_i8mm_are_given_smmla(name: str) -> None:
    spec = make_arm_spec(ARM_FEATURES[name], hidden=512)
    assert ("smmla" in generate_assembly(spec, "add_dense")) == (name == "i8mm")
    # One token gains nothing from it.
    assert "smmla" not in generate_assembly(spec, "predict_gate")


@pytest.mark.parametrize("planes", [1, 2])
def test_the_innermost_loop_is_loads_and_smmla(planes: int) -> None:
    spec = make_arm_spec(ARM_FEATURES["i8mm"], hidden=4096, planes=planes, chunk_planes=planes)
    loops = list_innermost_loops(generate_assembly(spec, "add_dense"))
    bodies = [loop for loop in loops if any("smmla" in line for line in loop)]
    # Gates of four tokens; gates of the last two or one, and ups of two or one.
    body, *halves = sorted(bodies, key=len, reverse=True)
    assert [sum("smmla" in line for line in half) for half in halves] == [planes * 16] * 2
    counts = collections.Counter(line.split()[0] for line in body)
    # A group of 32 of 8 rows and 4 tokens, a plane of activations: 32 products an instruction.
    assert counts["smmla"] == planes * 32
    # Nothing is brought into another order, and with two planes few sums go to the stack.
    assert not any(name.startswith(("zip", "uzp", "trn", "tbl", "ext")) for name in counts)
    assert sum(counts[name] for name in counts if name.startswith("st")) <= 4 * (planes - 1)
    # The rest: loads by two, the sum's start, and the product with the scales.
    assert len(body) <= (96 if planes == 1 else 152)


@pytest.mark.skipif("avx2" not in list_runnable_isas(), reason="needs AVX2")
def test_an_executor_gives_its_kernels_what_pairs_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any machine runs the schedule with `smmla` written out, in a whole model."""
    from tvm.tirx import Shuffle
    from tvm.tirx.script import builder as T

    from pi2.backends.compiler import cache
    from pi2.backends.compiler import vectors as v
    from pi2.backends.compiler.compile import compile_library
    from pi2.backends.cpu import backend as cpu
    from pi2.backends.kernels import i8mm
    from pi2.backends.kernels.program import Program
    from pi2.backends.kernels.spec import KernelSpec
    from pi2.backends.reference import backend as reference

    def call(kind: str, name: str, *arguments: Any) -> Any:
        return v.let(T.call_llvm_pure_intrin(kind, f"llvm.x86.avx2.{name}", *arguments))

    def write_out(total: Any, weights: Any, codes: Any) -> Any:
        wide = v.let(v.cast(weights, "int16", 16))
        tokens = [
            v.let(v.cast(Shuffle([codes, codes], [*half, *half]), "int16", 16))
            for half in (range(8), range(8, 16))
        ]
        products = [call("int32x8", "pmadd.wd", wide, token) for token in tokens]
        pairs = call("int32x8", "phadd.d", *products)
        return total + Shuffle([call("int32x8", "phadd.d", pairs, pairs)], [0, 1, 4, 5])

    def compile_here(spec: KernelSpec, _progress: Any) -> Path:
        output = tmp_path / "kernels.so"
        compile_library(Program(spec), output, lambda _label, _share: None)
        return output

    own = dataclasses.replace(make_isa("avx2"), name="pairs", pairs=True)
    monkeypatch.setattr(KernelSpec, "isa", own)  # the program has this machine's
    monkeypatch.setattr(i8mm, "emit_smmla", write_out)
    monkeypatch.setattr(cache, "load_or_compile", compile_here)
    model = RandomModel(hidden=160, ffn=45, chunk=5, context=32, threads=3, rank=None)
    ours, truth = cpu.build(model.request), reference.build(model.request)
    position = 0
    for count in (5, 1, 2, 3):
        ids = list(range(position, position + count))
        found = feed(ours, model, ids, position, "gate")
        assert measure_error(found, feed(truth, model, ids, position, "gate")) < 3e-4
        position += count
    ours.close()
