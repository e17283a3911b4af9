"""Neurons that are chosen on the device, against numpy in double precision."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.backends.gpu.kernels.ffn import make_join
from pi2.backends.gpu.kernels.gathered import list_gathered_kernels, make_select
from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.gpu.packing import pack_slots
from tests.helpers.gpu import Bench, RandomNeurons, measure_error

CLOSE = 3e-6


@pytest.mark.parametrize(
    "ffn",
    [
        FfnKernels(hidden=480, precision="int4", activation="relu"),
        FfnKernels(hidden=96, precision="int8", activation="silu", bias=True, experts=3),
        FfnKernels(hidden=96, precision="fp16", activation="gelu", gated=False),
    ],
    ids=lambda ffn: ffn.precision,
)
def test_gathered_neurons_add_up_to_those_of_numpy(launcher: Launcher, ffn: FfnKernels) -> None:
    neurons = RandomNeurons(ffn, count=50)
    packed = pack_slots(neurons.bundles, neurons.layout).list_arrays()
    inputs, routes = neurons.make_inputs(1), neurons.make_routes(1)
    kernels = [*list_gathered_kernels(ffn, launcher.facts.fp16), make_join(ffn)]
    bench = Bench(launcher, kernels)
    # More work is started than there are neurons, as where the device alone knows how many.
    most, parts = 30, 3
    for count in (0, 5, 19):
        chosen = np.sort(np.random.default_rng(count).permutation(50)[:count]).astype(np.int32)
        slots = np.full(most, 49, np.int32)
        slots[:count] = chosen
        arrays = packed | {
            "inputs": inputs,
            "slots": slots,
            "found": np.array([count], np.int32),
            "values": np.full(most, 9, np.float32),
        }
        if routes is not None:
            arrays["routes"] = routes
        numbers = {"most": most, "parts": parts, "tokens": 1, "adds": 0}
        values = bench.run("gathered_values", arrays, numbers)["values"]
        wanted = neurons.compute_values(inputs, routes)[:, chosen]
        partials = np.full((parts, ffn.hidden), 5, np.float32)
        arrays |= {"values": values, "partials": partials}
        arrays["partials"] = bench.run("gathered_sums", arrays, numbers)["partials"]
        arrays["sums"] = np.empty(ffn.hidden, np.float32)
        sums = bench.run("join", arrays, numbers)["sums"]
        if count == 0:
            assert not sums.any()
            continue
        assert measure_error(values[:count], wanted[0]) < CLOSE
        all_values = np.zeros((1, 50))
        all_values[:, chosen] = wanted
        assert measure_error(sums, neurons.compute_sums(all_values)[0]) < CLOSE


@pytest.mark.parametrize("size", [1, 255, 1003])
def test_scores_that_reach_the_threshold_are_selected_in_order(
    launcher: Launcher, size: int
) -> None:
    scores = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    scores[size // 2] = 0.25
    found = Bench(launcher, [make_select()]).run(
        "select",
        {
            "scores": scores,
            "slots": np.full(size, -1, np.int32),
            "found": np.empty(1, np.int32),
        },
        {"n": size, "threshold": 0.25},
    )
    wanted = np.flatnonzero(scores >= 0.25)
    assert found["found"][0] == len(wanted)
    np.testing.assert_array_equal(found["slots"][: len(wanted)], wanted)
