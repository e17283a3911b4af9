"""Neurons that are chosen on the device, against numpy in double precision."""

import numpy as np
import pytest

from pi2.backends.gpu.kernels.ffn import make_join
from pi2.backends.gpu.kernels.gathered import list_gathered_kernels, make_gates, make_select
from pi2.backends.gpu.kernels.specification import FfnKernels, SelectKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.gpu.packing import pack_slots
from pi2.plan.documents.model_parts import Ffn
from pi2.plan.weights.bundles import slice_bias, unpack_part
from tests.helpers.goldens import measure_error
from tests.helpers.gpu import Bench, RandomNeurons

CLOSE = 3e-6


KINDS = pytest.mark.parametrize(
    "ffn",
    [
        FfnKernels(hidden=480, precision="int4", options=Ffn(activation="relu")),
        FfnKernels(
            hidden=96, precision="int8", experts=3, options=Ffn(activation="silu", bias=True)
        ),
        FfnKernels(hidden=96, precision="fp16", options=Ffn(activation="gelu", gated=False)),
    ],
    ids=lambda ffn: ffn.precision,
)
# More work is started than there are neurons, as where the device alone knows how many.
MOST, PARTS, FIRST = 30, 3, 2


@KINDS
@pytest.mark.parametrize("counts", [(0,), (19, 0, 30, 1)], ids=["none", "several tokens"])
def test_gathered_neurons_add_up_to_those_of_numpy(
    launcher: Launcher, ffn: FfnKernels, counts: tuple[int, ...]
) -> None:
    neurons, tokens = RandomNeurons(ffn, count=50), len(counts)
    inputs, routes = neurons.make_inputs(tokens), neurons.make_routes(tokens)
    bench = Bench(launcher, [*list_gathered_kernels(ffn, launcher.facts.fp16), make_join(ffn)])
    random = np.random.default_rng(1)
    slots = np.full((tokens, MOST), 49, np.int32)
    wanted = np.zeros((tokens, 50))
    every = neurons.compute_values(inputs, routes)
    for token, count in enumerate(counts):
        chosen = np.sort(random.permutation(50)[:count]).astype(np.int32)
        slots[token, :count] = chosen
        wanted[token, chosen] = every[token, chosen]
    arrays = pack_slots(neurons.bundles, neurons.layout) | {
        "inputs": inputs,
        "slots": slots,
        "found": np.array([9, 9, *counts], np.int32),
        "values": np.full((tokens, MOST), 9, np.float32),
        "partials": np.full((PARTS, tokens, ffn.hidden), 5, np.float32),
        "sums": np.empty((tokens, ffn.hidden), np.float32),
    }
    if routes is not None:
        arrays["routes"] = routes
    numbers = {"most": MOST, "first": FIRST, "parts": PARTS, "tokens": tokens, "adds": 0}
    for kernel in ("gathered_values", "gathered_sums", "join"):
        names = bench.list_arrays(kernel)
        arrays |= bench.run(kernel, {name: arrays[name] for name in names}, numbers)
    sums = arrays["sums"]
    scale = max(np.abs(every).max(), 1.0)
    for token, count in enumerate(counts):
        found = arrays["values"][token]
        picked = wanted[token, slots[token, :count]]
        assert np.abs(found[:count] - picked).max(initial=0) < CLOSE * scale
        assert np.all(found[count:] == 9)
        if count == 0:
            assert not sums[token].any()
    if any(counts):
        assert measure_error(sums, neurons.compute_sums(wanted)) < CLOSE


@KINDS
def test_gates_are_those_of_numpy(launcher: Launcher, ffn: FfnKernels) -> None:
    neurons = RandomNeurons(ffn, count=50)
    inputs = neurons.make_inputs(3)
    order = np.random.default_rng(2).permutation(50).astype(np.int32)
    packed = pack_slots(neurons.bundles, neurons.layout)
    arrays = packed | {"inputs": inputs, "scores": np.empty((3, 50), np.float32)}
    arrays |= {"order": order} if ffn.experts else {}
    bench = Bench(launcher, [make_gates(ffn, launcher.facts.fp16)])
    names = bench.list_arrays("gates")
    found = bench.run("gates", {name: arrays[name] for name in names}, {"most": 50, "tokens": 3})
    wanted = inputs @ unpack_part(neurons.bundles, neurons.layout, 0).astype(np.float64).T
    if ffn.options.bias:
        wanted = wanted + slice_bias(neurons.bundles, neurons.layout, 0)
    if ffn.experts:
        wanted = wanted[:, order]
    assert measure_error(found["scores"], wanted) < CLOSE


@pytest.mark.parametrize("size", [1, 255, 1003])
def test_scores_that_reach_threshold_are_selected_in_order(launcher: Launcher, size: int) -> None:
    scores = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
    scores[:, size // 2] = 0.25
    found = Bench(launcher, [make_select(SelectKernels())]).run(
        "select",
        {
            "scores": scores,
            "slots": np.full((2, size), -1, np.int32),
            "found": np.full(5, -2, np.int32),
        },
        {"n": size, "first": 3, "threshold": 0.25, "tokens": 2},
    )
    assert list(found["found"][:3]) == [-2] * 3
    for token in range(2):
        wanted = np.flatnonzero(scores[token] >= 0.25)
        assert found["found"][3 + token] == len(wanted)
        np.testing.assert_array_equal(found["slots"][token, : len(wanted)], wanted)


@pytest.mark.parametrize("scored", [False, True], ids=["all of them", "those that may fire"])
def test_neurons_of_chosen_experts_are_selected(launcher: Launcher, scored: bool) -> None:
    random = np.random.default_rng(7)
    experts, each = 5, 60
    size = experts * each
    order = random.permutation(size).astype(np.int32)
    routes = np.array([[0, 0.25, 0, 0, 0.75], [0, 0, 1, 0, 0]], np.float32)
    scores = random.standard_normal((2, size)).astype(np.float32)
    select = SelectKernels(scored=scored, experts=experts, expert_neurons=each)
    arrays = {
        "routes": routes,
        "order": order,
        "slots": np.full((2, size), -1, np.int32),
        "found": np.full(2, -2, np.int32),
    }
    arrays |= {"scores": scores} if scored else {}
    found = Bench(launcher, [make_select(select)]).run(
        "select", arrays, {"n": size, "first": 0, "threshold": 0.0, "tokens": 2}
    )
    for token in range(2):
        chosen = np.repeat(routes[token] != 0, each)
        wanted = order[chosen & (scores[token] >= 0) if scored else chosen]
        assert found["found"][token] == len(wanted)
        np.testing.assert_array_equal(found["slots"][token, : len(wanted)], wanted)
