"""A whole model on a GPU: its program and its arrays, which the same lines count or allocate."""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.backends.blocks import room as blocks
from pi2.backends.blocks.contract import describe_heads
from pi2.backends.blocks.layers import Uncompiled, start_layers
from pi2.backends.blocks.operands import Extent
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.gpu.arrays import Memory, count_matrix, count_neurons, count_partial_rows
from pi2.backends.gpu.kernels.specification import FfnKernels, ProductKernels
from pi2.model.blocks import list_attention
from pi2.model.options import describe_unknown, read_options
from pi2.model.tensor import DenseTensor
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.sizes import STAGED_NEURONS, count_chunk_tokens
from pi2.plan.arithmetic.units import Need, list_unknown_formats
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType, PredictorMode
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import BundleLayout

if TYPE_CHECKING:
    from pi2.arrays import U8, Raw
    from pi2.backends.blocks.instructions import Weight
    from pi2.backends.gpu.launchers.interface import DeviceArray
    from pi2.plan.arithmetic.resolved import ResolvedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    model: Model
    layout: BundleLayout
    """Bundles with their scales in them."""
    chunk: int
    """Most tokens that are computed together."""
    sequences: int
    context: int
    kv: KvType
    predictor: PredictorMode

    @property
    def is_sparse(self) -> bool:
        """Whether steps compute some neurons apart."""
        return self.predictor != "none"

    @property
    def ffn(self) -> FfnKernels:
        return FfnKernels.of(self.layout, self.model, in_rows=self.is_sparse)

    @property
    def has_expert_biases(self) -> bool:
        """Whether the sum of neurons begins with biases of experts."""
        return self.model.moe is not None and self.model.ffn.bias

    @property
    def extent(self) -> Extent:
        return Extent(
            chunk=max(self.chunk, self.sequences),
            step_tokens=self.sequences,
            context=self.context,
            threads=1,
            sequences=self.sequences,
            kv=self.kv,
            outside=True,
        )

    def list_tensors(self) -> list[DenseTensor]:
        ranks = None
        if self.predictor == "low-rank" and self.model.predictor is not None:
            ranks = [self.model.predictor.rank] * self.model.shape.layers
        return list_tensors(self.model, ranks)

    @property
    def predictors(self) -> Mapping[str, ProductKernels]:
        """Kernels of the products that name neurons, by the kind of tensor."""
        predictor, options = self.model.predictor, self.model.quantization
        if self.predictor != "low-rank" or predictor is None:
            return {}
        hidden, rank = self.model.stored_neuron_width, predictor.rank
        count, precision = self.model.expert_count, options.predictor
        return {
            "predictor_in": ProductKernels(length=hidden, precision=precision, relu=True),
            "predictor_out": ProductKernels(
                length=rank, precision=precision, bias=True, blocks=count
            ),
        }


_LIMITS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
COMPUTED = read_options(_LIMITS["computed"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An array of a program, or a dense tensor: its addresses are in main memory, which is not
    touched."""

    address: int
    host: Any
    """The array in main memory."""
    host_bytes: int
    item_bytes: int
    arrays: Mapping[str, DeviceArray]
    """On the device: ``values``, unless a tensor is packed."""
    is_kept: bool = False
    """Whether it belongs to sequences: keys, values, states."""
    tensor: DenseTensor | None = None

    @property
    def shape(self) -> DenseTensor:
        assert self.tensor is not None, "an area has no precision"
        return self.tensor


_ITEM_BYTES = {"int8": 1, "float16": 2, "int32": 4, "float32": 4}


class _Shadow(blocks.Memory):
    """Arrays of a program that a device has; kept ones are read when their tensors are there."""

    def __init__(self, memory: Memory, kv: KvType, *, is_real: bool) -> None:
        super().__init__(_allocate if is_real else None)
        self._memory, self._kv = memory, kv
        self.placed: list[Placed] = []
        self.later: list[tuple[Any, Callable[[], Any]]] = []

    def take(self, kind: str, *shape: int, segment: str = "workspace") -> Any:
        array, size = super().take(kind, *shape, segment=segment), prod(shape)
        if size and (segment == "kv" or kind in ("int32", "float32")):
            own = _ITEM_BYTES[kind]
            # Scales are float32 on a device: two work groups do not write to one word.
            scaled = 2 if kind == "float16" and self._kv == "int8" else 1
            self.placed.append(
                Placed(
                    address=array.ctypes.data,
                    host=array,
                    host_bytes=own * size,
                    item_bytes=own,
                    arrays=self._memory.take({"values": scaled * own * size}),
                    is_kept=segment in ("kv", "state"),
                )
            )
        return array

    def keep(
        self, count: int, read: Callable[[], Any], kind: str = "float32", segment: str = "workspace"
    ) -> Any:
        array = self.take(kind, count, segment=segment)
        self.later.append((array, read))
        return array


class _ShadowWeights(StoreWeights):
    """Tensors of untouched zeros, until vectors are written to them."""

    def _take(self, name: str) -> Weight | None:
        weight = super()._take(name)
        if weight is not None and weight.data is None:
            weight = self._whole[name] = replace(weight, data=_allocate("", weight.size_bytes))
        return weight

    def place(self, arrays: Mapping[str, Mapping[str, DeviceArray]]) -> Iterator[Placed]:
        """Yield the places of all tensors that were asked for."""
        for name, own in self._whole.items():
            tensor, data = self._tensors[name], own.data
            assert isinstance(tensor, DenseTensor) and data is not None
            yield Placed(
                address=data.ctypes.data,
                host=data,
                host_bytes=own.size_bytes,
                item_bytes=4,
                arrays=arrays[name],
                tensor=tensor,
            )


def _allocate(segment: str, size: int) -> U8:
    import numpy as np

    # The system has no pages for what is never written.
    zeros: U8 = np.zeros(size, np.uint8)
    return zeros


class ModelArrays:
    """A model's arrays on a device, and its program but for neurons, which names them."""

    def __init__(self, memory: Memory, use: ModelUse, *, is_real: bool = True) -> None:
        """Without ``is_real`` arrays are only counted, and instructions name none."""
        model, layers = use.model, range(use.model.shape.layers)
        self.partial_rows = count_partial_rows(use.chunk)
        self.shapes = {tensor.name: tensor for tensor in use.list_tensors()}
        self.tensors = {name: memory.take(_count_tensor(own)) for name, own in self.shapes.items()}
        neurons = count_neurons(use.layout, model.layer_neurons)
        self.neurons = [memory.take(neurons) for _ in layers]
        own = _Shadow(memory, use.kv, is_real=is_real)
        stored, extent = describe_stored(model), use.extent
        weights = (_ShadowWeights if is_real else StoreWeights)(stored, self.shapes)
        self.program = program = start_layers(stored, weights, Uncompiled(), own, extent)
        program.add_model()
        assert program.outside is not None
        self.exchange = program.outside.exchange
        self.areas, self._later = own.placed, own.later
        """Of the program, in their order."""
        self.kept_bytes = sum(
            array.size for area in own.placed if area.is_kept for array in area.arrays.values()
        )
        every = [*own.placed]
        every += weights.place(self.tensors) if isinstance(weights, _ShadowWeights) else []
        self._places = sorted(every, key=lambda area: area.address)
        self._starts = [area.address for area in self._places]
        self.spans = memory.take(self._count_spans(use))
        """Of attention: sums of spans of contexts."""
        working = self._count_working(use)
        self.state = memory.take({name: 4 * count for name, count in working.items()})
        """Of neurons."""
        host = {"logits": 4 * extent.rows * program.logits.stride}
        host |= {"found": 4 * working["found"]} if "found" in working else {}
        self.host = memory.take_host(host)
        memory.host_bytes += self._count_read(extent.positions)
        stretch = min(model.layer_neurons, STAGED_NEURONS)
        memory.pass_on(sum(count_neurons(use.layout, stretch).values()))

    @property
    def inputs(self) -> list[DeviceArray]:
        """Of a call: tokens, sequences, positions, and rows of learned positions."""
        own = self.program.builder
        arrays = (own.numbers, own.sequences, own.positions, own.places)
        return [self.find_array(array.ctypes.data) for array in arrays]

    def find(self, address: int) -> tuple[Placed, int] | None:
        """Return the array at an address, and how many bytes of it come before."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        own = self._places[place]
        skip = address - own.address
        return (own, skip) if skip < own.host_bytes else None

    def need(self, address: int) -> tuple[Placed, int]:
        """Return likewise what must be there."""
        found = self.find(address)
        assert found is not None, address
        return found

    def find_array(self, address: int) -> DeviceArray:
        """Return the program's array that begins at an address."""
        own, skip = self.need(address)
        assert not skip, address
        return own.arrays["values"]

    def put(self, name: str, skip: int, values: Raw) -> None:
        """Write elements of a vector, ``skip`` bytes after its first, for `fill`."""
        own = next((area for area in self._places if area.tensor is self.shapes[name]), None)
        if own is not None:
            flat = values.reshape(-1).view("uint8")
            own.host[skip : skip + len(flat)] = flat

    def fill(self) -> None:
        """Write the arrays that are made of tensors, when these are there."""
        for array, read in self._later:
            array[:] = read()
        self._later = []

    def _count_spans(self, use: ModelUse) -> dict[str, int]:
        """Bytes for spans of each head's context."""
        own = [describe_heads(mixer).value for mixer, _ in list_attention(use.model)]
        vectors = 4 * self.partial_rows * use.model.shape.heads
        return {"span_sums": vectors * max(own, default=0), "span_tops": 2 * vectors}

    def _count_read(self, positions: int) -> int:
        """Bytes of vectors and tables of positions that main memory has, too: tables are made in
        double precision."""
        vectors = (own for own in self.shapes.values() if own.packing.is_float32)
        pairs = sum(max(width // 2, 1) for _, width in self.program.builder.turns)
        return 16 * positions * pairs + sum(4 * own.rows * own.length for own in vectors)

    def _count_working(self, use: ModelUse) -> dict[str, int]:
        """Elements of arrays for neurons."""
        model, steps, neurons = use.model, use.sequences, use.model.layer_neurons
        found = {
            "activations": use.chunk * neurons,
            "partials": self.partial_rows * model.stored_neuron_width,
        }
        if use.predictor == "low-rank" and model.predictor is not None:
            found["inner"] = steps * model.expert_count * model.predictor.rank
        if use.is_sparse:
            found["slots"] = steps * neurons
            found["found"] = steps * model.shape.layers
            found["scores"] = 0 if use.predictor == "router" else steps * neurons
        if use.is_sparse and model.moe is not None:
            found |= {f"order_{layer}": neurons for layer in range(model.shape.layers)}
        return found


def _count_tensor(tensor: DenseTensor) -> Mapping[str, int]:
    """Bytes of a tensor's arrays on the device, by the names of kernels' parameters."""
    if tensor.packing.is_float32:
        return {"values": 4 * tensor.rows * tensor.length}
    return count_matrix(tensor.rows, tensor.length, tensor.precision)


def describe_use(resolved: ResolvedPlan) -> ModelUse:
    plan, bundle = resolved.plan, resolved.bundle
    return ModelUse(
        model=resolved.model,
        layout=bundle.inline if bundle.scales == "resident" else bundle,
        chunk=count_chunk_tokens(plan),
        sequences=plan.decode.batch,
        context=plan.kv.context,
        kv=plan.kv.type,
        predictor=plan.decode.predictor,
    )


def need_whole_memory(resolved: ResolvedPlan) -> Need:
    """Bytes of all weights, KV cache, working memory, and pieces on their way."""
    memory = Memory()
    kept = ModelArrays(memory, describe_use(resolved), is_real=False).kept_bytes
    return Need(
        memory.bytes,
        f"the whole model with its keys, values and states ({approximate_bytes(kept)}), and pieces "
        "of weights on their way to it",
    )


def find_alone_limits(resolved: ResolvedPlan) -> list[str]:
    """Parts of a model that the backend cannot compute, each as the end of a sentence."""
    plan, model = resolved.plan, resolved.model
    limits = []
    if resolved.dense_units:
        limits.append(
            f"takes only whole models, without another unit such as `{resolved.dense_units[0]}`"
        )
    if plan.decode.predictor == "gate" and model.is_smooth:
        limits.append("knows no thresholds of smooth activations")
    if plan.memory.embedding == "flash" and not model.tied_head:
        limits.append("keeps the embedding in its memory: memory.embedding must not be `flash`")
    limits += list_unknown_formats(model)
    if not limits and resolved.bundle.scales == "resident":
        limits.append("takes no neurons whose scales lie apart: bundle.scales must be `inline`")
    limits += describe_unknown(model, COMPUTED, plan.kv.context, _LIMITS["apart"])
    each = 4 if plan.kv.type == "int8" else 2
    if list_attention(model)[0][0].kept[2] % each:
        limits.append(f"keeps no {plan.kv.type} heads whose width is not a multiple of {each}")
    return limits
