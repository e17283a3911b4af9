"""The FFN on GPUs against numpy in double precision, over odd shapes; PoCL and lavapipe emulate."""

import dataclasses
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from pi2.backends.gpu import launches
from pi2.backends.gpu.dense_unit import GpuUnit
from pi2.backends.gpu.kernels.ffn import make_values
from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.gpu.packing import pack_neurons, pack_slots
from pi2.backends.units import UnitRequest
from pi2.plan.arithmetic.units import UnitShare
from pi2.plan.documents.device import Unit
from pi2.plan.documents.model_parts import Activation, Ffn
from tests.helpers.goldens import measure_error
from tests.helpers.gpu import Bench, RandomNeurons
from tests.helpers.slow import mark_slow

CLOSE = 3e-6
"""Of the largest value: everything is added up in float32, in an order of the device's own."""


def make(
    launcher: Launcher, neurons: RandomNeurons, counts: list[int], chunk: int,
    patch: pytest.MonkeyPatch,
) -> GpuUnit:  # fmt: skip
    """A unit on the device, which stays open when it is closed."""
    patch.setattr(launcher, "close", lambda: None)
    patch.setattr(launches, "open_unit", lambda unit: launcher)
    ffn = neurons.ffn
    experts = SimpleNamespace(weighs="input" if ffn.weighs_input else "output")
    model: Any = SimpleNamespace(
        ffn=ffn.options, moe=experts if ffn.experts else None, expert_count=ffn.experts,
        tied_head=False,
    )  # fmt: skip
    share = UnitShare(
        unit=Unit(kind="gpu", emulated=True), model=model, bundle=neurons.layout,
        neurons=counts, chunk=chunk, stretch=32,
    )  # fmt: skip
    nothing: Any = None
    return GpuUnit(
        UnitRequest(
            name="gpu", share=share, count=lambda size: None, allocate=nothing, adopt=nothing
        )
    )


PLAIN = FfnKernels(hidden=480, precision="int4", options=Ffn(activation="silu"))
"""15 groups: blocks of 8, 4, 2 and 1 lanes in the store, and half a strip of columns here."""
VARIED = FfnKernels(
    hidden=96, precision="int4", experts=3, options=Ffn(activation="relu2", gated=False, bias=True)
)


@pytest.mark.parametrize(
    "ffn",
    [
        PLAIN,
        # Neurons that are zero for all tokens of a work group are not read.
        mark_slow(dataclasses.replace(PLAIN, precision="int8", options=Ffn(activation="relu"))),
        mark_slow(dataclasses.replace(PLAIN, precision="fp16")),
        VARIED,
    ],
    ids=["int4", "int8", "fp16", "ungated, biases, experts"],
)
def test_sums_of_any_number_of_tokens_are_those_of_numpy(
    launcher: Launcher, ffn: FfnKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    neurons = RandomNeurons(ffn, count=107)
    dense = make(launcher, neurons, [neurons.count], 70, monkeypatch)
    for first in range(0, neurons.count, 60):
        dense.keep(0, first, neurons.bundles[first : first + 60])
    for tokens in (1, 2, 7, 16, 17, 70):
        inputs, routes = neurons.make_inputs(tokens), neurons.make_routes(tokens)
        wanted = neurons.compute_sums(neurons.compute_values(inputs, routes))
        assert measure_error(dense.finish(dense.start(0, inputs, routes)), wanted) < CLOSE, tokens
    dense.close()


WEIGHED = FfnKernels(
    hidden=96, precision="int4", experts=3, weighs_input=True, options=Ffn(activation="silu")
)


@pytest.mark.parametrize(
    "ffn",
    [PLAIN, VARIED, WEIGHED],
    ids=["gated", "ungated, biases, experts", "experts that read what is weighed"],
)
def test_neurons_in_rows_have_values_of_those_in_tiles(launcher: Launcher, ffn: FfnKernels) -> None:
    neurons = RandomNeurons(ffn, count=107)
    kernel = make_values(dataclasses.replace(ffn, in_rows=True), launcher.facts.fp16, 64)
    bench = Bench(launcher, [kernel])
    packed = pack_slots(neurons.bundles, neurons.layout)
    for tokens in (1, 65):
        inputs, routes = neurons.make_inputs(tokens), neurons.make_routes(tokens)
        arrays = packed | {"inputs": inputs, "values": np.empty((tokens, 107), np.float32)}
        arrays |= {} if routes is None else {"routes": routes}
        found = bench.run(
            "values_64",
            {name: arrays[name] for name in bench.list_arrays("values_64")},
            {"count": 107, "tokens": tokens},
        )
        assert measure_error(found["values"], neurons.compute_values(inputs, routes)) < CLOSE


@pytest.mark.parametrize(
    "activation", [*(own for own in get_args(Activation) if own != "xielu"), "clamped silu"]
)
def test_every_activation(launcher: Launcher, activation: Any) -> None:
    if activation == "clamped silu":
        options = Ffn(activation="silu", slope=1.7, limit=1.5, up_offset=1.0)
    else:
        options = Ffn(activation=activation, threshold=0.3 if activation == "fatrelu" else 0.0)
    ffn = FfnKernels(hidden=32, precision="int8", options=options)
    neurons = RandomNeurons(ffn, count=64)
    inputs = 3 * neurons.make_inputs(2)
    bench = Bench(launcher, [make_values(ffn, launcher.facts.fp16, 1)])
    arrays = pack_neurons(neurons.bundles, neurons.layout)
    found = bench.run(
        "values_1",
        {name: arrays[name] for name in ("gate_up_weights", "gate_up_scales")}
        | {"inputs": inputs, "values": np.empty((2, 64), np.float32)},
        {"count": 64, "tokens": 2},
    )
    assert measure_error(found["values"], neurons.compute_values(inputs, None)) < CLOSE
