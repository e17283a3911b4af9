"""Dense units of this machine, random neurons for them, and the sums to expect."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest

from pi2.arrays import F32, F64, I32, U8
from pi2.backends.gpu.dense_unit import GpuUnit
from pi2.backends.gpu.kernels.specification import Api
from pi2.backends.hexagon.dense_unit import HexagonUnit
from pi2.backends.hexagon.session import find_unit_obstacles
from pi2.backends.reference.neurons import ThreadUnit
from pi2.backends.units import DenseUnit, UnitRequest
from pi2.formats import find_packing
from pi2.plan.arithmetic.units import UnitShare
from pi2.plan.documents.device import Unit
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_units import Graphs
from pi2.plan.weights.bundles import assemble_bundles, split_scales, unpack_part
from pi2.plan.weights.layout import GROUP, BundleLayout, ScalesPlace, Tensor
from tests.helpers.models import make_model


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    name: str
    make: Callable[[UnitRequest], DenseUnit]
    tolerance: float
    """Largest difference from float64 arithmetic, of the largest element of a sum."""
    least: float = 1e-6
    """Size of sums below which errors are no smaller: that of a few neurons that nearly cancel."""
    api: Api | None = None
    """What must have a device."""
    find_obstacles: Callable[[], list[str]] = list
    """What this machine lacks for it."""

    @property
    def marks(self) -> tuple[pytest.MarkDecorator, ...]:
        return (pytest.mark.slow,) if self.api == "webgpu" else ()


def _describe_gpu(api: Api, architecture: Literal["opencl", "vulkan", "cuda"]) -> UnitKind:
    unit = Unit(kind="gpu", architecture=architecture, emulated=True)

    def make(request: UnitRequest) -> GpuUnit:
        return GpuUnit(replace(request, share=replace(request.share, unit=unit)))

    return UnitKind(name=api, make=make, tolerance=1e-5, api=api)


NPU = Unit(kind="npu", architecture="hexagon", emulated=True)


def _make_npu(request: UnitRequest) -> HexagonUnit:
    # The same few graphs for every test of a model: each library takes a second to compile.
    graphs = Graphs(tokens=(1, 16), shares=(0.5, 1.0))
    return HexagonUnit(replace(request, share=replace(request.share, unit=NPU, graphs=graphs)))


KINDS = (
    UnitKind(name="thread", make=ThreadUnit, tolerance=1e-5),
    _describe_gpu("opencl", "opencl"),
    _describe_gpu("webgpu", "vulkan"),
    _describe_gpu("cuda", "cuda"),
    # It rounds inputs and values of neurons to int8.
    UnitKind(
        name="hexagon",
        make=_make_npu,
        tolerance=0.02,
        least=4e-3,
        find_obstacles=lambda: find_unit_obstacles(NPU),
    ),
)


@dataclass(slots=True)
class Neurons:
    """Random neurons of a model of two layers, as its store has them, and a unit's request."""

    model: Model
    layout: BundleLayout
    """With the scales in the bundles."""
    whole: list[U8]
    """Bundles [neurons, stride] of each layer, with their scales."""
    stored: list[U8]
    """The same as they lie in the store."""
    scales: list[U8] | None
    """Scales of each layer's neurons, where they do not lie in bundles."""
    biases: list[F32]
    """Biases [neurons, n] of each layer."""
    experts: list[I32]
    """Expert of each neuron, by layer; empty without experts."""
    allocated: list[int] = field(default_factory=list)

    def request(
        self, kept: Sequence[int], tensors: Mapping[str, Tensor] = MappingProxyType({})
    ) -> UnitRequest:
        def allocate(size: int) -> U8:
            self.allocated.append(size)
            return np.zeros(size, np.uint8)

        def adopt(region: U8) -> U8:
            self.allocated.append(region.nbytes)
            return region

        share = UnitShare(
            unit=Unit(kind="gpu", emulated=True),
            model=self.model,
            bundle=self.layout
            if self.scales is None
            else self.model.lay_out_bundle(scales="resident"),
            neurons=tuple(kept),
            chunk=9,
            jobs=3,
            stretch=16,
            matrices={
                name: (own.rows, own.length, own.precision or "fp32")
                for name, own in tensors.items()
            },
        )
        return UnitRequest(
            name="second",
            share=share,
            scales=self.scales,
            tensors=tensors,
            allocate=allocate,
            adopt=adopt,
            count=self.allocated.append,
        )

    def fill(self, unit: DenseUnit, kept: Sequence[int]) -> None:
        """Give the unit what it keeps, as the engine does: into its own room, or in pieces."""
        for layer, count in enumerate(kept):
            room = unit.offer_room(layer) if count else None
            if room is not None:
                room[:count] = self.stored[layer][:count]
                unit.keep(layer, 0, room[:count])
                continue
            for first in range(0, count, 16):
                piece = self.stored[layer][first : min(first + 16, count)].copy()
                unit.keep(layer, first, piece)
                piece[:] = 255  # the unit has its own copy

    def compute(self, layer: int, inputs: F32, routes: F32 | None, wanted: Sequence[int]) -> F64:
        """Sum [T, hidden] of the neurons ``wanted`` of a layer, in float64."""
        chosen = np.array(list(wanted), np.int64)
        bundles, layout = self.whole[layer][chosen], self.layout
        parts = [
            unpack_part(bundles, layout, index).astype(np.float64)
            for index in range(len(layout.parts))
        ]
        x = inputs.astype(np.float64)
        values = [x @ part.T for part in parts[:-1]]
        if layout.biases:
            values = [v + self.biases[layer][chosen, i] for i, v in enumerate(values)]
        active = _activate(self.model, *values)
        if routes is not None:
            active = active * routes[:, self.experts[layer][chosen]]
        return np.asarray(active @ parts[-1])


def _activate(model: Model, gate: F64, up: F64 | None = None) -> F64:
    kind, x = model.ffn.activation, gate
    if kind in ("relu", "drelu"):
        active = np.maximum(x, 0)
    elif kind == "fatrelu":
        active = np.where(x > model.ffn.threshold, x, 0)
    elif kind == "relu2":
        active = np.maximum(x, 0) ** 2
    elif kind == "silu":
        active = x / (1 + np.exp(-x))
    elif kind == "gelu_tanh":
        active = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    else:
        from math import erf

        active = 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    if up is None:
        return np.asarray(active)
    return np.asarray(active * (np.maximum(up, 0) if kind == "drelu" else up))


def make_neurons(
    changes: Mapping[str, Any] | None = None, *, count: int = 37, scales: ScalesPlace = "inline",
    seed: int = 0,
) -> Neurons:  # fmt: skip
    shape = {"layers": 2, "ffn": count, **(changes or {}).get("shape", {})}
    model = make_model({"predictor": None, **(changes or {}), "shape": shape})
    random = np.random.default_rng(seed)
    layout = model.lay_out_bundle()
    whole, biases, experts = [], [], []
    for _ in range(2):
        neurons = model.layer_neurons
        parts = [
            find_packing(layout.precision).quantize(
                random.standard_normal((neurons, layout.hidden), dtype=np.float32)
                / np.float32(GROUP)
            )
            for _ in layout.parts
        ]
        bias = random.standard_normal((neurons, len(layout.biases))).astype(np.float32)
        owner = random.integers(0, max(1, model.expert_count), neurons).astype(np.int32)
        is_mixed = layout.expert_offset is not None
        whole.append(
            assemble_bundles(
                parts, layout, bias if layout.biases else None, owner if is_mixed else None
            )
        )
        biases.append(bias)
        experts.append(owner)
    apart = None if scales == "inline" else model.lay_out_bundle(scales="resident")
    split = None if apart is None else [split_scales(bundles, apart) for bundles in whole]
    return Neurons(
        model=model,
        layout=layout,
        whole=whole,
        stored=whole if split is None else [bundles for bundles, _ in split],
        scales=None if split is None else [rows for _, rows in split],
        biases=biases,
        experts=experts,
    )
