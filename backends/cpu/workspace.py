"""Source of the executor's arrays, and their views for kernels."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32
from pi2.backends.arithmetic import slice_tensor
from pi2.backends.compiler.runtime import Library, View
from pi2.backends.kernels.isa import BLOCK_TOKENS, Isa, count_blocks_bytes
from pi2.backends.kernels.mixing_layout import lay_out_mixing
from pi2.backends.kernels.spec import KEPT, UNPACKED, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.model.blocks import list_attention
from pi2.model.tensor import (
    FINAL_NORM,
    FINAL_NORM_BIAS,
    name_mixer_norm,
    split_mixer_kind,
    split_name,
)
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.weights.layout import GROUP, Precision, fill_groups, round_up

Views = dict[str, View]
"""Views of arrays by the names that parameters of kernels have."""
_ROLES = ("norm", "norm_bias", "output_norm")


class Workspace:
    """Arrays of the executor, taken from the plan's segments and wrapped for the kernels."""

    def __init__(self, request: BuildRequest, library: Library) -> None:
        self._request = request
        self._library = library
        self._kept: list[npt.NDArray[Any]] = []
        self._names: dict[int | None, dict[str, str]] = defaultdict(dict)
        """Tensors of the store by layer and kind."""
        for name in request.tensors:
            layer, kind = split_name(name)
            self._names[layer][kind] = name

    def make(self, dtype: str, *shape: int, segment: str = "workspace") -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        raw = self._request.allocate(segment, round_up(max(size, 1), 64))
        return raw[:size].view(kind).reshape(shape)

    def wrap(self, array: npt.NDArray[Any]) -> View:
        self._kept.append(array)
        return self._library.wrap(array)

    def wrap_tensors(self, **tensors: str) -> Views:
        """Views of the store's tensors by kernels' names. fp16 weights replace missing scales."""
        return self.wrap_parts(0, 1, **tensors)

    def wrap_layer(self, layer: int | None, mixer: int | None = None) -> Views:
        """Return views of all tensors of a layer, or of the whole model, by their kinds.

        Its norms also have the names that they have for its FFN, or for one ``mixer``: ``norm``,
        ``norm_bias`` and ``output_norm``."""
        kinds = self._names[layer]
        roles = ("ffn_norm", "ffn_norm_bias", "ffn_output_norm")
        if layer is None:
            roles = (FINAL_NORM, FINAL_NORM_BIAS, "")
        elif mixer is not None:
            roles = (name_mixer_norm(mixer), "attention_norm_bias", "attention_output_norm")
        names = {own: kinds[kind] for own, kind in zip(_ROLES, roles, strict=True) if kind in kinds}
        for kind, name in kinds.items():
            inner, number = split_mixer_kind(kind)
            if number == mixer or not number and inner not in names:
                names[inner] = name
        return self.wrap_tensors(**names)

    def wrap_own_rows(self, parameter: str, name: str, first: int) -> Views:
        """Return views of a packed tensor's rows from ``first`` on."""
        tensor = self._request.tensors[name].take_rows(first)
        weights = self.wrap(np.ascontiguousarray(tensor.weights).view(np.uint8))
        views = {f"{parameter}_weights": weights, f"{parameter}_scales": weights}
        if tensor.scales is not None:
            scales = np.ascontiguousarray(tensor.scales).view(np.uint8)
            views[f"{parameter}_scales"] = self.wrap(scales)
        return views

    def wrap_parts(self, part: int, parts: int, **tensors: str) -> Views:
        views: Views = {}
        for parameter, name in tensors.items():
            if name not in self._request.tensors:
                continue
            tensor = slice_tensor(self._request.tensors[name], part, parts)
            if tensor.precision is None:
                views[parameter] = self.wrap_floats(np.asarray(tensor.weights).view(np.float32))
                continue
            weights = self.wrap(np.asarray(tensor.weights).view(np.uint8))
            views[f"{parameter}_weights"] = views[f"{parameter}_scales"] = weights
            if tensor.scales is not None:
                scales = np.asarray(tensor.scales).view(np.uint8)
                views[f"{parameter}_scales"] = self.wrap(scales)
        return views

    def wrap_floats(self, values: npt.NDArray[Any]) -> View:
        """Return a kernel's view of float32 values, of an aligned copy where they lie badly."""
        flat = values.reshape(-1)
        if flat.ctypes.data % 64:
            copy = self.make("float32", len(flat), segment="predictor")
            copy[:] = flat
            flat = copy
        return self.wrap(flat)

    def make_activations(
        self,
        name: str,
        tokens: int,
        length: int,
        planes: int,
        values: F32 | None = None,
        *,
        isa: Isa | None = None,
        upper: bool = False,
    ) -> Views:
        """Views of codes, scales, sums and values for ``tokens`` vectors, laid out for ``isa``."""
        if values is None:
            values = self.make("float32", tokens, length)
        groups = length // GROUP
        even = round_up(tokens, 2) if isa is not None and isa.pairs else tokens
        more = {}
        if isa is not None and isa.blocks:
            size = count_blocks_bytes(length, planes)
            blocks = self.make("int8", round_up(tokens, BLOCK_TOKENS) // BLOCK_TOKENS, size)
            more[f"{name}_blocks"] = self.wrap(blocks)
        if upper:
            more[f"{name}_upper_sums"] = self.wrap(self.make("int32", tokens, groups))
        return more | {
            f"{name}_codes": self.wrap(self.make("int8", even, planes, length)),
            f"{name}_scales": self.wrap(self.make("float32", even, groups)),
            f"{name}_sums": self.wrap(self.make("int32", tokens, groups)),
            f"{name}_values": self.wrap(values),
        }

    def make_inputs(
        self, name: str, tokens: int, length: int, spec: KernelSpec, values: F32 | None = None
    ) -> Views:
        """Views of what matrices are multiplied with, in the layout of the spec."""
        isa, upper = spec.isa, spec.upper_steps
        return self.make_activations(
            name, tokens, length, spec.most_planes, values, isa=isa, upper=upper
        )

    def make_tiles(self, name: str, spec: KernelSpec, length: int) -> Views:
        """Return the view of the room in which threads unpack weights that several tokens share, if
        they do."""
        if not spec.isa.unpacks:
            return {}
        size = spec.isa.count_tile_bytes(length)
        return {f"{name}_tiles": self.wrap(self.make("int8", spec.threads, size))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """What every chunk of a prompt has for itself."""

    x: F32
    """The residual stream [chunk, hidden]."""
    total: F32
    """The sum of the FFN's neurons [chunk, neuron width]."""
    normalized: F32
    """What the FFN reads [chunk, hidden], before it is rounded."""
    neuron_input: F32
    """What its neurons read [chunk, neuron width], before it is rounded."""
    layer_input: F32 | None
    """Input of attention, if the FFN or a router reads it as well."""
    routes: F32
    """Weights of the experts [chunk, experts]."""
    layer_inputs: F32
    """What layers have of their own [layers, chunk, width]; of width 0 where they have nothing."""
    cutoffs: F32
    """Cutoffs of a layer's gates [chunk], if layers have them."""
    views: Views
    """All of them, and the activations ``hidden``, by the kernels' names; experts of another width
    have ``experts``."""

    @property
    def neuron_views(self) -> Views:
        """Views for functions of the neurons' input and output, of any width."""
        of_experts = [name for name in self.views if name.startswith("experts_")]
        renamed = {
            f"hidden_{name.removeprefix('experts_')}": self.views[name] for name in of_experts
        }
        return self.views | renamed


def wrap_table(space: Workspace, precision: Precision, name: str) -> Views:
    """Return a view of what codes of blocks are looked up in, if they are."""
    from pi2.backends.blocks.room import GRIDS, make_tables

    return {name: space.wrap(make_tables(precision))} if precision in GRIDS else {}


def make_arrays(space: Workspace, spec: KernelSpec, chunk: int) -> Arrays:
    x, normalized = (space.make("float32", chunk, spec.hidden) for _ in range(2))
    total = space.make("float32", chunk, spec.neuron_width)
    layer_input = space.make("float32", chunk, spec.hidden) if spec.keeps_input else None
    routes = space.make("float32", chunk, max(1, spec.experts))
    views = {"x": space.wrap(x), "y": space.wrap(total), "routes": space.wrap(routes)}
    views |= wrap_table(space, spec.precision.gates, "block_table")
    if spec.sub_norm:
        views["squares"] = space.wrap(space.make("float32", chunk))
    views |= space.make_inputs("hidden", chunk, spec.hidden, spec, normalized)
    neuron_input = normalized
    if spec.latent_experts:
        neuron_input = space.make("float32", chunk, spec.neuron_width)
        views |= space.make_inputs("experts", chunk, spec.neuron_width, spec, neuron_input)
    if layer_input is not None:
        views["before"] = space.wrap(layer_input)
    if spec.model.altup is not None:
        views["streams"] = space.wrap(
            space.make("float32", chunk, spec.model.altup.others, spec.hidden)
        )
    cutoffs = np.zeros(0, np.float32)
    if spec.cutoff_rows:
        cutoffs = space.make("float32", chunk)
        views["cutoffs"] = space.wrap(cutoffs)
    own = spec.model.layer_embedding
    layer_inputs = np.zeros((0, chunk, 0), np.float32)
    if own is not None:
        layer_inputs = space.make("float32", spec.model.shape.layers, chunk, own.stored_width)
        views["layer_inputs"] = space.wrap(layer_inputs)
    return Arrays(
        x=x,
        total=total,
        normalized=normalized,
        neuron_input=neuron_input,
        layer_input=layer_input,
        routes=routes,
        layer_inputs=layer_inputs,
        cutoffs=cutoffs,
        views=views,
    )


def make_side_room(space: Workspace, spec: KernelSpec, chunk: int) -> Views:
    """Return views of what an FFN next to experts works with; none without it."""
    if not spec.side_ffn:
        return {}
    length = fill_groups(spec.side_ffn)
    room = space.make_inputs("side_inner", chunk, length, spec)
    room |= space.make_tiles("side_inner", spec, length)
    sizes = {"side_terms": (1 + spec.ffn.gated) * spec.side_ffn}
    sizes |= {"side_output": spec.hidden} if spec.side_norms else {}
    for name, size in sizes.items():
        room[name] = space.wrap(space.make("float32", chunk, size))
    return room


def make_layer_room(space: Workspace, spec: KernelSpec, chunk: int) -> Views:
    """Return views of what embeddings of layers are computed with; none without them."""
    own = spec.model.layer_embedding
    if own is None:
        return {}
    room = space.make_inputs("layer_inner", chunk, own.stored_width, spec)
    room |= space.make_tiles("layer_inner", spec, own.stored_width)
    room["layer_rows"] = space.wrap(space.make("float32", chunk, spec.layer_row))
    return room


def measure_arrays(request: BuildRequest) -> dict[str, int]:
    """Return what the symbols in shapes of kernels' parameters stand for."""
    chunk = count_tokens(request)
    return {
        "tokens": chunk,
        "token_heads": chunk * max(own.heads for own, _ in list_attention(request.model)),
        "logits": min(chunk, LOGIT_ROWS),
        "context": request.context,
        "sequences": request.step_tokens,
        "neurons": request.neurons,
        "expert": request.model.shape.ffn,
        "threads": request.threads,
    }


def count_tokens(request: BuildRequest) -> int:
    return max(request.chunk, request.step_tokens)


DENSE_FLOATS = (UNPACKED + KEPT) * 128
"""Numbers that a thread of the dense FFN has room for."""


class Scratch:
    """Memory that keeps nothing from call to call."""

    def __init__(self, space: Workspace, spec: KernelSpec) -> None:
        specs = spec.list_blocks()
        sizes = [4 * DENSE_FLOATS]
        if spec.attention.latent is None:
            sizes += [lay_out_mixing(own).room_bytes for own in specs]
        self._raw = space.make("uint8", spec.threads * max(sizes))

    def cut(self, *parts: tuple[str, int]) -> list[npt.NDArray[Any]]:
        """Return arrays of types and numbers of elements, side by side in whole cache lines."""
        arrays, done = [], 0
        for dtype, number in parts:
            size = number * np.dtype(dtype).itemsize
            assert size % 64 == 0, parts
            arrays.append(self._raw[done : done + size].view(dtype))
            done += size
        return arrays
