"""The FFN over gathered and contiguous neurons, for every activation, precision and shape."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.arrays import F32, F64
from pi2.backends.kernels.spec import KEPT, PANEL, PARTS, UNPACKED, KernelSpec
from pi2.formats import find_packing
from pi2.plan.documents.model_parts import Activation
from pi2.plan.weights.layout import GROUP, lay_out_bundle, round_up
from tests.helpers.bundles import pack_bundles, unpack_bundles
from tests.helpers.kernels import (
    X86_FEATURES,
    align,
    allocate,
    allocate_blocks,
    compile_anew,
    compile_program,
    list_runnable_isas,
    make_spec,
    measure_error,
    quantize_activations,
)
from tests.helpers.tables import in_table

HIDDEN = st.sampled_from([32, 96, 256, 320, 480, 512, 544, 1056])
ACTIVATIONS = st.sampled_from(["relu", "drelu", "fatrelu", "relu2", "silu"])
PRECISIONS = st.sampled_from(
    [{"ffn": name} for name in ("int4", "int8", "fp16")] + [{"ffn": "int8", "gate_up": "int4"}]
)


def activate(activation: Activation, threshold: float, gate: F64, up: F64) -> F64:
    """The model document's activations in float64."""
    positive = np.maximum(gate, 0)
    match activation:
        case "relu":
            return positive * up
        case "drelu":
            return positive * np.maximum(up, 0)
        case "fatrelu":
            return np.where(gate > threshold, gate, 0) * up
        case "relu2":
            return positive**2 * up
        case "silu":
            return gate / (1 + np.exp(-gate)) * up
    raise AssertionError(activation)


class Layer:
    def __init__(
        self, spec: KernelSpec, neurons: int, tokens: int, seed: int, shifts: F64 | None = None
    ) -> None:
        """``shifts`` [neurons]: what is added to the gates."""
        rng = np.random.default_rng(seed)
        self.spec = spec
        self.tokens = tokens
        formats = spec.precision
        layout = lay_out_bundle(spec.hidden, formats.ffn, spec.stride, gate_up=formats.gates)
        # Of mxfp4, 32 neurons share scales.
        gate, up, down = (
            rng.standard_normal((round_up(neurons, 32), spec.hidden)).astype(np.float32)
            for _ in range(3)
        )
        x = rng.standard_normal((tokens, spec.hidden)).astype(np.float32) * 0.1
        if shifts is not None:
            x[:, :GROUP] = 1
            gate[:neurons, :GROUP] += shifts[:, None] / GROUP
        self.bundles = align(pack_bundles(gate, up, down, layout)[:neurons])
        self.parts = [part.astype(np.float64) for part in unpack_bundles(self.bundles, layout)]
        self.arrays, stands_for = quantize_activations(x, spec.planes)
        is_exact = find_packing(formats.gates).meets_values
        self.inputs = x.astype(np.float64) if is_exact else stands_for

    def compute(self, slots: npt.NDArray[Any]) -> tuple[F64, int]:
        """Sum [tokens, hidden] and the number of non-zero activations, in float64."""
        gate, up, down = (part[slots] for part in self.parts)
        spec = self.spec
        values = activate(
            spec.ffn.activation, spec.ffn.threshold, self.inputs @ gate.T, self.inputs @ up.T
        )
        return values @ down, int(np.count_nonzero(values))

    def gather(self, slots: npt.NDArray[Any], *, known: bool = False) -> tuple[F32, int]:
        """Sum of ``add_neurons`` for the first token, or of ``add_open_neurons`` with ``known``."""
        spec, count = self.spec, len(slots)
        # A line more than the kernels may use: nobody must have written to it.
        lists = [allocate(dtype, count + 16) for dtype in ("float32", "float32", "int32")]
        for array in lists:
            array[count:] = 77
        partial = allocate("float32", spec.threads, spec.hidden)
        counts = allocate("int32", spec.threads + 1)
        y = allocate("float32", spec.hidden)
        one = [array[:1].copy() for array in self.arrays]
        one = [np.array(array) for array in one]
        aligned = [allocate(array.dtype.name, *array.shape) for array in one]
        for target, source in zip(aligned, one, strict=True):
            target[:] = source
        wanted = allocate("int32", max(count, 1))
        wanted[:count] = slots
        kernel = compile_program("add_open_neurons" if known else "add_neurons", spec)
        writeable = self.bundles.copy()
        gates = self.list_gates(slots) if known else []
        kernel(count, 0, writeable, wanted, *aligned, *lists, partial, counts, y, *gates)
        assert all((array[count:] == 77).all() for array in lists)
        return leave_lane_order(spec, y[None])[0], int(counts[-1])

    def list_gates(self, slots: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Scores of all neurons, and the places of ``slots`` among them."""
        scores = allocate("float32", len(self.bundles))
        scores[:] = self.inputs[0] @ self.parts[0].T
        indices = allocate("int32", max(len(slots), 1))
        indices[: len(slots)] = slots
        return [scores, indices]

    def compute_dense(self, begin: int, end: int) -> F32:
        """What ``add_dense`` makes of neurons ``begin`` to ``end``; ``left`` float32 [tokens,
        PANEL] is what it keeps of the last panel."""
        spec = self.spec
        values = allocate("float32", self.tokens, PANEL)
        unpacked = allocate("float32", spec.threads, UNPACKED + KEPT, 128)
        y = allocate("float32", self.tokens, spec.hidden)
        kernel = compile_program("add_dense", spec)
        bundles = self.bundles[begin:end].copy()
        masks = allocate("int32", self.tokens, PARTS)
        given = (spec.isa, spec.threads, self.tokens, spec.hidden, spec.chunk_planes)
        arrays = (*self.arrays, *allocate_blocks(*given), values, masks, unpacked)
        kernel(end - begin, self.tokens, bundles, *arrays, y)
        self.left = values
        return leave_lane_order(spec, y)


def leave_lane_order(spec: KernelSpec, y: npt.NDArray[Any]) -> F32:
    """The sum that ``end_ffn`` gives."""
    total, given = allocate("float32", *y.shape), allocate("float32", *y.shape)
    total[:] = y
    compile_program("end_ffn", spec)(len(y), total, given)
    return given


@settings(max_examples=12)
@given(
    hidden=HIDDEN, precision=PRECISIONS, activation=ACTIVATIONS, threads=st.integers(1, 3),
    planes=st.sampled_from([1, 2, 4]), passes=st.sampled_from([1, 2]), neurons=st.integers(1, 80),
    tokens=st.integers(2, 9), data=st.data(),
)  # fmt: skip
def test_gathered_and_dense_sums_are_those_of_float64(
    hidden: int, precision: dict[str, Any], activation: Activation, threads: int, planes: int,
    passes: int, neurons: int, tokens: int, data: st.DataObject,
) -> None:  # fmt: skip
    spec = make_spec(
        hidden=hidden, **precision, activation=activation,
        threshold=0.2 if activation == "fatrelu" else 0.0, threads=threads, planes=planes,
        chunk_planes=planes, passes=passes,
    )  # fmt: skip
    layer = Layer(spec, neurons, tokens, data.draw(st.integers(0, 2**32 - 1)))
    slots = np.array(
        data.draw(st.lists(st.integers(0, neurons - 1), unique=True, max_size=neurons)), np.int32
    )
    found, active = layer.gather(slots)
    expected, _ = layer.compute(slots)
    assert measure_error(found, expected[0]) < 1e-5
    if activation != "silu":
        values = activate(
            activation,
            spec.ffn.threshold,
            layer.inputs[:1] @ layer.parts[0][slots].T,
            layer.inputs[:1] @ layer.parts[1][slots].T,
        )
        assert active == np.count_nonzero(values)
    middle = neurons // 2
    dense = layer.compute_dense(0, middle) + layer.compute_dense(middle, neurons)
    expected, _ = layer.compute(np.arange(neurons))
    assert measure_error(dense, expected) < 1e-5


@pytest.mark.parametrize(("hidden", "planes", "passes"), [(96, 2, 1), (544, 4, 2)])
def test_sums_of_ternary_neurons_are_those_of_float64(
    hidden: int, planes: int, passes: int
) -> None:
    changes = {"planes": planes, "chunk_planes": planes, "passes": passes}
    layer = Layer(make_spec(hidden=hidden, ffn="ternary", activation="relu2", **changes), 60, 5, 7)
    slots = np.arange(0, 60, 3, dtype=np.int32)
    assert measure_error(layer.gather(slots)[0], layer.compute(slots)[0][0]) < 1e-5
    assert measure_error(layer.compute_dense(0, 60), layer.compute(np.arange(60))[0]) < 1e-5


def test_more_neurons_than_a_panel() -> None:
    layer = Layer(make_spec(hidden=96), 2 * PANEL + 37, 5, 1)
    count = len(layer.bundles)
    expected, _ = layer.compute(np.arange(count))
    assert measure_error(layer.compute_dense(0, count), expected) < 1e-5
    assert measure_error(layer.gather(np.arange(count))[0], expected[0]) < 1e-5


@in_table
def test_ups_of_open_gates_alone_give_the_bits_of_all_ups(
    isa: str, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in list_runnable_isas():
        pytest.skip(f"this processor has no {isa}")
    features = tuple(sorted(X86_FEATURES[isa]))
    spec = make_spec(hidden=544, features=features, planes=planes, chunk_planes=planes, threads=3)
    # A panel whose gates are all closed, one with all of them open, and one with a tenth.
    shifts = np.repeat([-60.0, 60.0, -7.0], [PANEL, PANEL, 101])
    # More tokens than threads, and fewer: threads share the neurons of a token.
    layers = [Layer(spec, len(shifts), tokens, 8, shifts) for tokens in (7, 2)]
    opened = layers[0].inputs @ layers[0].parts[0].T > 0
    shares = [part.mean() for part in np.split(opened, [PANEL, 2 * PANEL], axis=1)]
    assert shares[0] == 0 and shares[1] == 1 and 0.05 < shares[2] < 0.15
    found = [layer.compute_dense(0, len(shifts)) for layer in layers]
    for layer, own in zip(layers, found, strict=True):
        assert measure_error(own, layer.compute(np.arange(len(shifts)))[0]) < 1e-5
        # Of closed gates, no more than the gates was computed.
        assert (layer.left[:, :101] < 0).any()
    with compile_anew():
        monkeypatch.setattr(KernelSpec, "skips_ups", False)
        for layer, own in zip(layers, found, strict=True):
            assert np.array_equal(own, layer.compute_dense(0, len(shifts)))
            assert (layer.left >= 0).all()


def test_equal_input_gives_equal_bits() -> None:
    layer = Layer(make_spec(threads=3), 200, 4, 2)
    slots = np.random.default_rng(0).permutation(200)[:150].astype(np.int32)
    first, _ = layer.gather(slots)
    assert all(np.array_equal(first, layer.gather(slots)[0]) for _ in range(20))
    dense = layer.compute_dense(0, 200)
    assert all(np.array_equal(dense, layer.compute_dense(0, 200)) for _ in range(20))


def test_the_dense_sum_does_not_depend_on_the_number_of_threads() -> None:
    alone = Layer(make_spec(threads=1), 130, 6, 3).compute_dense(0, 130)
    assert np.array_equal(alone, Layer(make_spec(threads=3), 130, 6, 3).compute_dense(0, 130))


@pytest.mark.parametrize("activation", ["relu", "drelu", "silu"])
def test_one_loop_and_gates_first_give_equal_bits(activation: Activation) -> None:
    slots = np.random.default_rng(0).permutation(150)[:101].astype(np.int32)
    layers = [
        Layer(make_spec(hidden=96, threads=3, activation=activation, passes=passes), 150, 2, 6)
        for passes in (1, 2)
    ]
    (at_once, active), (in_turn, also_active) = (layer.gather(slots) for layer in layers)
    assert np.array_equal(at_once, in_turn) and active == also_active


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("count", [37, 38, 39, 40])
def test_threads_whose_neurons_all_fire_leave_each_others_alone(count: int, passes: int) -> None:
    # A list is as long as what is kept in it: nothing may be written behind its end.
    layer = Layer(make_spec(hidden=96, threads=2, activation="relu", passes=passes), 120, 2, 7)
    slots = np.flatnonzero(layer.inputs[0] @ layer.parts[0].T > 1e-3)[:count].astype(np.int32)
    expected, _ = layer.compute(slots)
    for known in (False, True):
        found, active = layer.gather(slots, known=known)
        assert active == count
        assert measure_error(found, expected[0]) < 1e-5


@pytest.mark.parametrize("place", [0, 1, 17, 59])
def test_a_neuron_is_worth_the_same_wherever_it_is_computed(place: int) -> None:
    # All others have closed gates for this input: the sum is that one neuron's.
    layer = Layer(make_spec(threads=3, activation="relu"), 60, 2, 4)
    gate, _, _ = layer.parts
    open_gates = np.flatnonzero(layer.inputs[0] @ gate.T > 0)
    slots = np.resize(np.flatnonzero(layer.inputs[0] @ gate.T < -1e-3), 60).astype(np.int32)
    slots[place] = open_gates[0]
    alone, _ = layer.gather(open_gates[:1].astype(np.int32))
    among_others, active = layer.gather(slots)
    assert active == 1
    assert np.array_equal(alone, among_others)


def test_no_neurons_add_nothing() -> None:
    found, active = Layer(make_spec(), 4, 2, 5).gather(np.zeros(0, np.int32))
    assert not found.any()
    assert active == 0
