"""What every dense unit does, whatever plays it: the contract of `pi2.backends.units`."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.backends.hexagon.arrays import UnitArrays
from pi2.backends.hexagon.dense_unit import HexagonUnit
from pi2.backends.reference.neurons import widen
from pi2.backends.units import DenseUnit, UnitFailed
from pi2.formats import find_packing
from pi2.plan.weights.layout import Precision, Tensor
from tests.helpers.dense_units import KINDS, Neurons, UnitKind, make_neurons
from tests.helpers.gpu import require_launcher
from tests.helpers.slow import keep_quick

MIXTURE = {"moe": {"experts": 4, "active_experts": 2}, "shape": {"ffn": 9}}
ACTIVATIONS = ("relu", "drelu", "fatrelu", "relu2", "silu", "gelu", "gelu_tanh")


LAYOUTS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": {"ffn": "int8"}},
    "fp16": {"quantization": {"ffn": "fp16"}},
    "plain with biases": {"ffn": {"activation": "relu", "gated": False, "bias": True}},
    "gated with biases": {"ffn": {"activation": "silu", "bias": True}},
    "odd width": {"shape": {"hidden": 96}},
}
KEPT = (37, 30)
"""Neurons of each layer that the unit of several tests keeps."""


def pair(values: Iterable[str], few: tuple[str, ...]) -> list[Any]:
    """Every kind with every value.  GPUs have a few, and `test_gpu_ffn` the others; each push
    compiles graphs of a few."""
    pairs = ((kind, value) for kind in KINDS for value in values)
    return [
        pytest.param(
            kind,
            value,
            id=f"{kind.name}-{value}",
            marks=kind.marks if value in few or kind.name != "hexagon" else pytest.mark.slow,
        )
        for kind, value in pairs
        if value in few or kind.api is None
    ]


PARAMETERS = [pytest.param(kind, id=kind.name, marks=kind.marks) for kind in KINDS]


@pytest.fixture(scope="module", params=PARAMETERS)
def kind(request: pytest.FixtureRequest) -> UnitKind:
    found = request.param
    assert isinstance(found, UnitKind)
    if found.api is not None:
        require_launcher(found.api)
    if obstacles := found.find_obstacles():
        pytest.skip("; ".join(obstacles))
    return found


@pytest.fixture(scope="module")
def neurons() -> Neurons:
    return make_neurons()


@pytest.fixture(scope="module")
def unit(kind: UnitKind, neurons: Neurons) -> Iterator[DenseUnit]:
    """Keeps the first neurons of both layers, for tests that ask it to compute and no more."""
    made = kind.make(neurons.request(KEPT))
    neurons.fill(made, KEPT)
    yield made
    made.close()


@pytest.fixture
def units() -> Iterator[list[DenseUnit]]:
    made: list[DenseUnit] = []
    yield made
    for unit in made:
        unit.close()
        unit.close()


def begin(
    kind: UnitKind, units: list[DenseUnit], neurons: Neurons, kept: tuple[int, int], **given: Any
) -> DenseUnit:
    unit = kind.make(neurons.request(kept, **given))
    units.append(unit)
    neurons.fill(unit, kept)
    return unit


def draw_inputs(neurons: Neurons, tokens: int, seed: int = 1) -> F32:
    """Inputs that units may round to int8 without a change: whole 64ths, the largest of each token
    127 of them."""
    values = np.random.default_rng(seed).standard_normal((tokens, neurons.layout.hidden))
    whole = np.rint(values * (127 / np.abs(values).max(axis=1, keepdims=True)))
    return (whole / 64).astype(np.float32)


def check(kind: UnitKind, found: F32, expected: Any) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    largest = max(float(np.abs(expected).max()), kind.least)
    assert float(np.abs(found - expected).max()) <= kind.tolerance * largest


@pytest.mark.parametrize(("kind", "activation"), pair(ACTIVATIONS, ("relu",)), indirect=["kind"])
def test_it_computes_every_activation(
    kind: UnitKind, units: list[DenseUnit], activation: str
) -> None:
    threshold = {"threshold": 0.01} if activation == "fatrelu" else {}
    neurons = make_neurons({"ffn": {"activation": activation, **threshold}})
    unit = begin(kind, units, neurons, (37, 37))
    inputs = draw_inputs(neurons, 3)
    check(kind, unit.finish(unit.start(1, inputs)), neurons.compute(1, inputs, None, range(37)))


@pytest.mark.parametrize(
    ("kind", "layout"), pair(LAYOUTS, ("fp16", "gated with biases")), indirect=["kind"]
)
def test_it_knows_every_layout_of_bundles(
    kind: UnitKind, units: list[DenseUnit], layout: str
) -> None:
    neurons = make_neurons(LAYOUTS[layout])
    unit = begin(kind, units, neurons, (5, 11))
    inputs = draw_inputs(neurons, 2)
    for layer, kept in enumerate((5, 11)):
        expected = neurons.compute(layer, inputs, None, range(kept))
        check(kind, unit.finish(unit.start(layer, inputs)), expected)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9])
def test_it_takes_any_number_of_tokens_up_to_a_chunk(
    kind: UnitKind, unit: DenseUnit, neurons: Neurons, tokens: int
) -> None:
    inputs = draw_inputs(neurons, tokens)
    expected = neurons.compute(0, inputs, None, range(37))
    check(kind, unit.finish(unit.start(0, inputs)), expected)


@pytest.mark.parametrize("wanted", [0, 1, 7, 36, 37])
def test_it_computes_the_first_of_what_it_keeps(
    kind: UnitKind, unit: DenseUnit, neurons: Neurons, wanted: int
) -> None:
    inputs = draw_inputs(neurons, 2)
    expected = neurons.compute(0, inputs, None, range(wanted))
    check(kind, unit.finish(unit.start(0, inputs, None, wanted)), expected)


def test_layer_of_which_it_has_nothing_gives_zeros(kind: UnitKind, units: list[DenseUnit]) -> None:
    neurons = make_neurons()
    unit = begin(kind, units, neurons, (0, 4))
    assert not unit.finish(unit.start(0, draw_inputs(neurons, 2))).any()


@pytest.mark.parametrize("scales", ["inline", "resident"])
def test_experts_compute_their_own_tokens(
    kind: UnitKind, units: list[DenseUnit], scales: Any
) -> None:
    neurons = make_neurons(MIXTURE, scales=scales)
    kept = (neurons.model.layer_neurons, 17)
    unit = begin(kind, units, neurons, kept)
    inputs = draw_inputs(neurons, 5)
    routes = np.random.default_rng(3).random((5, 4), np.float32)
    routes[routes < 0.5] = 0
    for layer, count in enumerate(kept):
        expected = neurons.compute(layer, inputs, routes, range(count))
        check(kind, unit.finish(unit.start(layer, inputs, routes)), expected)


@pytest.mark.parametrize("scales", ["inline", "resident"])
def test_neurons_may_be_added_as_they_come(
    kind: UnitKind, units: list[DenseUnit], scales: Any
) -> None:
    """Buffers are used again after ``wait``; a stretch may be longer than was said."""
    neurons = make_neurons(scales=scales)
    unit = begin(kind, units, neurons, (6, 6))
    inputs = draw_inputs(neurons, 4)
    buffer = np.zeros((20, neurons.stored[0].shape[1]), np.uint8)
    job = unit.start(0, inputs)
    for first, count in ((6, 16), (22, 1), (23, 14)):
        buffer[:count] = neurons.stored[0][first : first + count]
        unit.add(job, buffer[:count], first)
        unit.wait(job)
        buffer[:] = 255
    check(kind, unit.finish(job), neurons.compute(0, inputs, None, range(37)))
    job = unit.start(1, inputs, None, 0)
    unit.add(job, neurons.stored[1][10:30], 10)
    check(kind, unit.finish(job), neurons.compute(1, inputs, None, range(10, 30)))


@pytest.mark.parametrize("precision", keep_quick(["int4", "int8", "fp16"], ["int4"]))
def test_it_multiplies_with_rows_of_matrices(
    kind: UnitKind, units: list[DenseUnit], precision: Precision
) -> None:
    """Of projections and of the head, for one token and for several, between jobs of neurons."""
    neurons = make_neurons()
    sizes = {"layers.0.qkv": (96, 64), "layers.1.output": (32, 96), "head": (160, 64)}
    matrices = {name: draw_matrix(name, *size, precision) for name, size in sizes.items()}
    unit = begin(kind, units, neurons, (20, 20), tensors=matrices)
    for name, tensor in matrices.items():
        weights = widen(tensor).astype(np.float64)
        tensor.weights.view(np.uint8)[:] = 255  # the unit has copied them
        for tokens in (1, 9):
            given = np.random.default_rng(tokens).standard_normal((tokens, tensor.length))
            inputs = given.astype(np.float32)
            job = unit.multiply(name, inputs)
            inputs[:] = np.nan
            check(kind, unit.finish(job), given.astype(np.float32).astype(np.float64) @ weights.T)
    inputs = draw_inputs(neurons, 3)
    expected = neurons.compute(1, inputs, None, range(20))
    check(kind, unit.finish(unit.start(1, inputs)), expected)


def draw_matrix(name: str, rows: int, length: int, precision: Precision) -> Tensor:
    values = np.random.default_rng(rows).standard_normal((rows, length), dtype=np.float32)
    weights, scales = find_packing(precision).quantize(values)
    return Tensor(
        name=name, rows=rows, length=length, precision=precision, weights=weights, scales=scales
    )


def test_several_jobs_are_under_way_and_finished_in_any_order(
    kind: UnitKind, unit: DenseUnit, neurons: Neurons
) -> None:
    inputs = [draw_inputs(neurons, tokens, seed=tokens) for tokens in (1, 5, 9)]
    for order in ((0, 1, 2), (2, 0, 1)):
        given = [values.copy() for values in inputs]
        jobs = [unit.start(number % 2, values) for number, values in enumerate(given)]
        for values in given:
            values[:] = np.nan  # the unit has copied them
        for number in order:
            expected = neurons.compute(number % 2, inputs[number], None, range(KEPT[number % 2]))
            check(kind, unit.finish(jobs[number]).copy(), expected)


def test_it_tells_what_it_did_and_when(unit: DenseUnit, neurons: Neurons) -> None:
    seen: list[tuple[str, float, float]] = []
    unit.observe(lambda *work: seen.append(work))
    unit.finish(unit.start(0, draw_inputs(neurons, 2)))
    unit.finish(unit.start(1, draw_inputs(neurons, 2)))
    unit.observe(None)
    unit.finish(unit.start(1, draw_inputs(neurons, 2)))
    assert ["layer 0" in seen[0][0], "layer 1" in seen[1][0], len(seen)] == [True, True, 2]
    (_, start, end), (_, later, _) = seen
    assert 0 < start <= end <= later
    assert unit.busy_s >= end - start


def test_what_it_keeps_is_counted(kind: UnitKind, units: list[DenseUnit]) -> None:
    neurons = make_neurons()
    unit = begin(kind, units, neurons, (30, 7))
    assert sum(neurons.allocated) >= 37 * neurons.layout.used_bytes
    if isinstance(unit, HexagonUnit):
        counted = UnitArrays(unit._share)
        assert neurons.allocated == [counted.bytes, counted.loading_bytes]


def test_a_unit_without_memory_is_a_failure(
    units: list[DenseUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pi2.backends.reference import neurons as dense_unit

    def fail(*arguments: Any) -> None:
        raise MemoryError

    neurons = make_neurons()
    unit = dense_unit.ThreadUnit(neurons.request((30, 30)))
    units.append(unit)
    monkeypatch.setattr(dense_unit, "compute_activations", fail)
    with pytest.raises(UnitFailed, match="no memory"):
        unit.finish(unit.start(0, draw_inputs(neurons, 1)))


def test_it_can_be_used_again_when_jobs_are_given_up(
    kind: UnitKind, unit: DenseUnit, neurons: Neurons
) -> None:
    inputs = draw_inputs(neurons, 5)
    for _ in range(3):
        jobs = [unit.start(1, draw_inputs(neurons, 9)) for _ in range(3)]
        buffer = neurons.stored[1][30:37].copy()
        unit.add(jobs[0], buffer, 30)
        unit.give_up()
        buffer[:] = 255
        unit.give_up()
    job = unit.start(1, inputs)
    unit.add(job, neurons.stored[1][30:], 30)
    check(kind, unit.finish(job), neurons.compute(1, inputs, None, range(37)))


def test_jobs_that_are_given_up_leave_nothing_behind(
    kind: UnitKind, units: list[DenseUnit]
) -> None:
    neurons = make_neurons()
    unit = begin(kind, units, neurons, (30, 30))
    for _ in range(3):
        unit.start(0, draw_inputs(neurons, 9))
    unit.close()
