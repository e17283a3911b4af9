"""Instructions of a model, layer by layer, over the unconverted tensors of files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Raw
from pi2.backends.arithmetic import RopeTables, compute_growth
from pi2.backends.blocks.contract import (
    ACTIVATIONS,
    GATES,
    NORM_PLACES,
    PIECE,
    ROUTERS,
    Heads,
    describe_heads,
)
from pi2.backends.blocks.instructions import FindWeight, Instruction, Way, Weight, put_float
from pi2.backends.blocks.room import (
    PARTS,
    Allocate,
    KvCache,
    Libraries,
    count_attention_bytes,
    count_partial_bytes,
    count_quantized_bytes,
    count_scratch_bytes,
    count_tile_tokens,
    count_together,
    list_offsets,
    make_tables,
)
from pi2.model.blocks import Attention, list_turns
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.documents.model_parts import Norm as NormOptions

A = TypeVar("A", bound=Raw)
_GRAIN_BYTES = 1 << 16
"""Bytes of weights that a thread takes at a time, at most."""
_ANY_LENGTH = 1 << 40
_LITTLE = {"gate": 2048, "cap": 2048, "quantize_q8_k": 16384, "quantize_q8_0": 16384}
"""Elements up to which one thread computes a token."""
_LITTLE_JOIN = 4096
"""Elements of all heads up to which one thread joins parts of a context."""
_NO_LIMIT = 3e38
"""Above every gate."""
_SHARES = 8
"""Parts of a matrix that there are at least for each thread."""


_SCRATCH = {"scratch": 0, "scratch_stride": 0}
"""Arguments that `Builder.finish` sets."""


def put_optional(name: str, address: int) -> dict[str, int]:
    """Return the argument ``name``, and the flag of its presence."""
    return {name: address, f"has_{name}": int(address != 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Pairs of tokens and chosen experts of a layer, by addresses."""

    active: int
    """Experts of a token."""
    experts: int
    """Experts that are chosen from."""
    expert_of: int
    place_of: int
    token_of: int
    """The token of each pair."""
    starts: int
    pairs: int
    weights: int
    """float32, of each pair."""
    predicted: int
    """Experts of each pair that the next layer would choose, and their weights."""
    predicted_weights: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor that instructions read, equal parts one after the other; it may be streamed."""

    key: str
    layer: int | None
    weight: Weight
    instructions: tuple[int, ...]
    numbers: I32 | None = None
    """Rows that the call's tokens look up; None of a matrix that all of a token reads."""
    skip: int = 0
    """Bytes of each part that are not read."""


@dataclass(frozen=True, slots=True)
class Area:
    """Vectors of tokens: float32, ``stride`` elements apart."""

    address: int
    stride: int

    def put(self, name: str) -> dict[str, int]:
        """Return the arguments ``name`` and its stride."""
        return {name: self.address, f"{name}_stride": self.stride}

    def skip(self, elements: int) -> Area:
        """Return the vectors that begin so many elements later."""
        return Area(self.address + 4 * elements, self.stride)


@dataclass(frozen=True, slots=True)
class _Codes:
    address: int
    stride: int
    planes: int
    plane_stride: int


@dataclass(frozen=True, slots=True)
class Gates:
    """What multiplies heads."""

    area: Area
    places: Sequence[int]
    """First element of each head's gates in a token."""
    kind: str
    """One of `GATES`."""
    each: int = 1
    """0 where all elements of a head have one gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """A norm of heads, before or after their gates."""

    weights: int
    """Address of the first head's weights; the next head's begin ``step`` elements later."""
    step: int
    place: str
    """One of `NORM_PLACES`."""
    epsilon: float | None = None
    """Added to the mean of squares, if it is not the model's."""


class Builder:
    """Adds instructions, and allocates their arrays."""

    def __init__(
        self,
        model: Model,
        find: FindWeight,
        libraries: Libraries,
        cache: KvCache,
        *,
        tokens: int,
        step_tokens: int,
        context: int,
        threads: int,
        planes: int,
        allocate: Allocate,
    ) -> None:
        """``tokens``: most of a call; ``step_tokens``: most that may be of different sequences."""
        self._model = model
        self._step_tokens, self._allocate = step_tokens, allocate
        self._planes = planes
        self._find = find
        self._libraries = libraries
        self._cache = cache
        self._tokens = tokens
        self._context = context
        self._threads = threads
        self._kept: list[U8] = []
        """Everything that instructions know by its address."""
        self._areas: dict[tuple[str, int, int], Area] = {}
        self._codes: dict[tuple[str, int, int], int] = {}
        self._grids: dict[str, U8] = {}
        self._vectors: dict[tuple[str, int | None, int, float], F32] = {}
        """By key, layer, mixer and offset, or by length and value."""
        self._orders: dict[tuple[int, ...], I64] = {}
        self._growths: dict[bytes, F32] = {}
        self._scratch_size = self._partial_size = 0
        self.routed: Routed | None = None
        """What layers with experts share."""
        self.instructions: list[Instruction] = []
        self.matrices: list[Matrix] = []
        self.layer: int | None = None
        """Layer of the addition, and number of the mixer in it."""
        self.mixer = 0
        self.rms = model.norm.model_copy(update={"kind": "rmsnorm", "bias": False})
        """The norm of heads, routers and latent vectors."""
        self.numbers: I32 = self._take(4 * tokens).view(np.int32)
        """Tokens of a call."""
        self.sequences: I32 = self._take(4 * tokens).view(np.int32)
        self.positions: I32 = self._take(4 * tokens).view(np.int32)
        self.places: I32 = self._take(4 * tokens).view(np.int32)
        """Rows of the learned positions."""
        self.known_numbers: I32 = self._take(4 * tokens).view(np.int32)
        """Rows of a table that has some tokens: others have the first one."""
        self.ropes: dict[tuple[Rope, int], RopeTables] = {}
        for turn in list_turns(model):
            shape = 2, context, max(turn[1] // 2, 1)
            arrays: F32 = self._take(4 * math.prod(shape)).view(np.float32).reshape(shape)
            self.ropes[turn] = RopeTables(*turn, (arrays[0], arrays[1]))
        experts, active = (
            (1, 1) if model.moe is None else (model.moe.experts, model.moe.active_experts)
        )
        pairs = tokens * active
        self._ones: F32 = self.keep(np.ones(experts, np.float32))
        self._zeros: I32 = self._take(4 * pairs).view(np.int32)
        self._steps: I32 = self.keep(np.arange(pairs, dtype=np.int32))

    def _take(self, size: int, segment: str = "workspace") -> U8:
        self._kept.append(self._allocate(segment, size))
        return self._kept[-1]

    def keep(self, array: A, segment: str = "workspace") -> A:
        """Return a copy in memory of the budget."""
        kept: Any = self._take(array.nbytes, segment).view(array.dtype).reshape(array.shape)
        kept[...] = array
        own: A = kept
        return own

    def fill(self, value: float, length: int) -> int:
        """Return the address of so many numbers that are all the same."""
        place = "constant", length, 0, value
        if place not in self._vectors:
            self._vectors[place] = self.keep(np.full(length, value, np.float32))
        return self._vectors[place].ctypes.data

    def find(self, key: str, layer: int | None = None) -> Weight | None:
        return self._find(key, layer or 0, self.mixer)

    def need(self, key: str, layer: int | None = None) -> Weight:
        """Return a matrix that must be there, by default of the addition's layer."""
        layer = self.layer if layer is None else layer
        weight = self.find(key, layer)
        assert weight is not None, f"the source has no tensor {key} of layer {layer}"
        return weight

    def read_values(self, key: str) -> F32:
        """Return a vector of the addition's layer."""
        return self.need(key).read()

    def put_tokens(self) -> dict[str, int]:
        """Return the arguments that say to what sequences tokens belong, and where they stand."""
        return {"sequences": self.sequences.ctypes.data, "positions": self.positions.ctypes.data}

    def take_area(
        self,
        name: str,
        width: int,
        each: int = 1,
        tokens: int | None = None,
        *,
        is_tight: bool = False,
    ) -> Area:
        """Return the array of a name, for all tokens or some, ``each`` of one; nothing is between
        the vectors of a tight one."""
        key = name, width, each
        if key not in self._areas:
            stride = width if is_tight else -(-width // 16) * 16
            array = self._take(4 * stride * each * (tokens or self._tokens))
            self._areas[key] = Area(array.ctypes.data, stride)
        return self._areas[key]

    def read_vector(self, key: str, layer: int | None, offset: float = 0.0) -> int:
        """Return the address of a vector as float32; 0 where the model has none."""
        place = key, layer, self.mixer, offset
        if place not in self._vectors:
            weight = self.find(key, layer)
            if weight is None:
                return 0
            self._vectors[place] = self.keep(weight.read() + np.float32(offset), "attention")
        return self._vectors[place].ctypes.data

    def add(
        self,
        kernel: str,
        values: dict[str, int],
        *,
        own: str | None = None,
        items: int = 0,
        each: int = 0,
        grain: int = 1,
        waits: bool = True,
        orders: tuple[int, int] | None = None,
        plane: int = 0,
        label: str = "",
    ) -> int:
        """Add an instruction of ``items``, or of so many for ``each`` token; return its number."""
        way = Way(address=self._libraries.find(kernel, own), items=items, each=each, grain=grain)
        return self._append(
            Instruction(
                kernel=kernel,
                values=values,
                ways=(way, way, way),
                orders=orders,
                plane=plane,
                layer=self.layer,
                waits=waits,
                is_little=each > 0 and values.get("length", 0) <= _LITTLE.get(kernel, _ANY_LENGTH),
                label=label or kernel,
            )
        )

    def _append(self, instruction: Instruction) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1

    def add_norm(
        self,
        key: str,
        x: Area,
        y: Area,
        length: int,
        *,
        added: bool = False,
        norm: NormOptions | None = None,
        factor: float = 1.0,
    ) -> None:
        """Normalise vectors with ``norm`` or the model's, times ``factor``; ``added``: to what y
        holds."""
        norm = norm or self._model.norm
        offset = norm.weight_offset
        weights = self.read_vector(key, self.layer, offset)
        bias = self.read_vector(f"{key}_bias", self.layer) if norm.bias else 0
        self.add(
            "normalize",
            {
                **x.put("x"),
                **put_optional("weights", weights),
                **put_optional("bias", bias),
                **y.put("y"),
                "length": length,
                "epsilon": put_float(norm.epsilon),
                "centred": int(norm.kind == "layernorm"),
                "added": int(added),
                "factor": put_float(factor),
            },
            each=1,
            label=key or "norm",
        )

    def make_product(
        self, key: str, layer: int, y: Area, has_bias: bool = False, **more: Any
    ) -> Product:
        """Return the matrix ``key`` of a layer as a product, with its bias."""
        bias = self.read_vector(f"{key}_bias", layer) if has_bias else 0
        return Product(key=key, weight=self.need(key, layer), y=y, bias=bias, **more)

    def list_inputs(
        self, fused: str, layer: int, parts: list[tuple[str, Area]], has_bias: bool, **more: Any
    ) -> list[Product]:
        """Return the matrices of ``parts``, or one that has all of them."""
        is_fused = getattr(self._model.tensors, fused, None) is not None
        if is_fused and self.find(fused, layer) is not None:
            parts = [(fused, parts[0][1])]
        return [self.make_product(key, layer, y, has_bias, **more) for key, y in parts]

    def add_zeros(self, y: Area, length: int) -> None:
        self.add_cap(Area(self.fill(0.0, length), 0), length, 0.0, 1.0, y)

    def add_products(
        self, x: Area, length: int, products: Sequence[Product], *, each: int = 1
    ) -> None:
        """Add matrices times the same vectors, ``each`` of a token, which are quantised first as
        the formats want."""
        inputs: dict[str, _Codes] = {}
        for product in products:
            self._quantize(x, length, product.weight, inputs, each)
        for place, product in enumerate(products):
            codes = inputs[self._name_form(product.weight)]
            number = self._multiply(product, codes, waits=place == len(products) - 1)
            self.matrices.append(Matrix(product.key, self.layer, product.weight, (number,)))

    def add_heads(self, x: Area, length: int, product: Product, heads: int, first: int = 0) -> None:
        """Add a matrix of each head, from its row ``first`` on, times a vector of each.  Strides
        are between heads, which follow each other without gaps."""
        weight, y, inputs = product.weight, product.y, dict[str, _Codes]()
        each = weight.rows // heads
        self._quantize(x, length, weight, inputs, heads)
        codes, numbers = inputs[self._name_form(weight)], []
        for head in range(heads):
            skip = (head * each + first) * weight.row_bytes
            data = None if weight.data is None else weight.data[skip:]
            own = replace(
                product,
                weight=replace(weight, rows=each - first, data=data),
                y=Area(y.skip(head * y.stride).address, heads * y.stride),
            )
            place = replace(
                codes, address=codes.address + head * codes.stride, stride=heads * codes.stride
            )
            numbers.append(self._multiply(own, place, waits=head == heads - 1))
        skip = first * weight.row_bytes
        self.matrices.append(Matrix(product.key, self.layer, weight, tuple(numbers), skip=skip))

    def add_turned_heads(self, x: Area, rows: int, product: Product, heads: int) -> None:
        """Add the first rows of each head's matrix, turned, times a vector of each.  Strides are
        between heads, which follow each other without gaps."""
        weight, y = product.weight, product.y
        scale = weight.scales[0] if weight.scales else 1.0
        way = Way(address=self._libraries.find("multiply_turned", weight.format), items=heads)
        number = self._append(
            Instruction(
                kernel="multiply_turned",
                values={
                    "weights": find_address(weight),
                    "grid": self._find_grid(weight.format),
                    "x": x.address,
                    "x_stride": heads * x.stride,
                    "x_each": x.stride,
                    "y": y.address,
                    "y_stride": heads * y.stride,
                    "y_each": y.stride,
                    "blocks": weight.length // weight.kind.block,
                    "tokens": 0,
                    "rows": rows,
                    "each": weight.rows // heads,
                    "factor": put_float(scale),
                },
                ways=(way, way, way),
                layer=self.layer,
                label=product.key,
            )
        )
        self.matrices.append(Matrix(product.key, self.layer, weight, (number,)))

    def _quantize(
        self, x: Area, length: int, weight: Weight, inputs: dict[str, _Codes], each: int
    ) -> None:
        """Bring vectors into the form that a format is multiplied with, unless they are."""
        assert weight.length == length, f"a matrix has {weight.length} columns, not {length}"
        kind = weight.kind.activations
        form = self._name_form(weight)
        if form in inputs:
            return
        if kind == "float":
            inputs[form] = _Codes(x.address, 4 * x.stride, 1, 0)
            return
        stride = count_quantized_bytes(kind, length)
        plane = stride * each * self._tokens
        key = form, length, each
        if key not in self._codes:
            self._codes[key] = self._take(plane * self._planes).ctypes.data
        target = self._codes[key]
        inputs[form] = _Codes(target, stride, self._planes, plane)
        if kind == "q8_k":
            name, orders = "order", (self._find_order(weight.format), self._find_order(""))
        else:
            name, orders = "together", (self._count_together(weight.format), 1)
        rest = self.take_area("rest", length, each) if self._planes > 1 else None
        for number in range(self._planes):
            is_last = number == self._planes - 1
            source = x if number == 0 or rest is None else rest
            self.add(
                f"quantize_{kind}",
                {
                    **source.put("x"),
                    "y": target + number * plane,
                    "y_stride": stride,
                    "length": length,
                    "rest": 0 if is_last or rest is None else rest.address,
                    "has_rest": int(not is_last),
                    "rest_stride": 0 if rest is None else rest.stride,
                    name: orders[0],
                    # The rest is too small for an fp16 scale.
                    **({"rounds": int(number == 0)} if kind == "q8_0" else {}),
                },
                plane=number,
                each=each * length // (256 if kind == "q8_k" else 32),
                grain=8,
                orders=orders,
                label="quantize",
            )

    def _name_form(self, weight: Weight) -> str:
        kind = weight.kind.activations
        if kind == "float":
            return kind
        find = self._find_order if kind == "q8_k" else self._count_together
        return f"{kind} {find(weight.format)}"

    def _count_together(self, name: str) -> int:
        return count_together(name, 4 * self._libraries.isa.lanes)

    def _find_order(self, name: str) -> int:
        """Return the address of the order of a format's activations, the same for the same one."""
        offsets = list_offsets(name, 4 * self._libraries.isa.lanes)
        if offsets not in self._orders:
            self._orders[offsets] = self.keep(np.array(offsets, np.int64))
        return self._orders[offsets].ctypes.data

    def _find_grid(self, name: str) -> int:
        if name not in self._grids:
            self._grids[name] = self.keep(make_tables(name))
        return self._grids[name].ctypes.data

    def _multiply(self, product: Product, codes: _Codes, *, waits: bool) -> int:
        weight, y = product.weight, product.y
        size = count_scratch_bytes(self._libraries.isa.lanes)
        self._scratch_size = max(self._scratch_size, size)
        return self._append(
            Instruction(
                kernel="multiply",
                values={
                    "weights": find_address(weight),
                    "grid": self._find_grid(weight.format),
                    "x": codes.address,
                    "x_stride": codes.stride,
                    "planes": codes.planes,
                    "plane_stride": codes.plane_stride,
                    **y.put("y"),
                    "blocks": weight.length // weight.kind.block,
                    "tokens": 0,
                    **put_optional("bias", product.bias),
                    "added": int(product.added),
                    "factor": put_float(product.factor),
                    "scales": self._place_scales(weight),
                    "rows": weight.rows,
                    **_SCRATCH,
                    **self._list_pairs(product),
                },
                ways=self._list_ways(weight, product.routed),
                pairs=1 if product.routed is None else product.routed.active,
                layer=self.layer,
                waits=waits,
                label=product.key,
            )
        )

    def _place_scales(self, weight: Weight) -> int:
        """Return the address of a number for each of a matrix's experts."""
        if not weight.scales:
            return self._ones.ctypes.data
        return self.keep(np.array(weight.scales, np.float32)).ctypes.data

    def _list_pairs(self, product: Product) -> dict[str, int]:
        one, several, routed = self._zeros.ctypes.data, self._steps.ctypes.data, product.routed
        if routed is None:
            return {
                "expert_of": one,
                "place_of": one,
                "x_of": several,
                "y_of": several,
                "expert_bytes": 0,
                "pairs": several,
                "starts": 0,
                "experts": 1,
                "routes": 0,
                "has_routes": 0,
            }
        weight = product.weight
        return {
            "expert_of": routed.expert_of,
            "place_of": routed.place_of,
            "x_of": routed.token_of if product.of_tokens else several,
            "y_of": several if product.of_tokens else routed.token_of,
            "expert_bytes": weight.row_bytes * weight.rows,
            "pairs": routed.pairs,
            "starts": routed.starts,
            "experts": routed.experts,
            "routes": routed.weights,
            "has_routes": int(product.is_weighed),
        }

    def _list_ways(self, weight: Weight, routed: Routed | None) -> tuple[Way, Way, Way]:
        share = -(-weight.rows // (self._threads * _SHARES))
        grain = max(1, min(share, _GRAIN_BYTES // weight.row_bytes))
        one, few = (
            Way(address=self._libraries.find(kernel, weight.format), items=weight.rows, grain=grain)
            for kernel in ("multiply", "multiply_few")
        )
        if routed is not None:
            few = one
        if weight.kind.is_plain:
            return one, few, few
        panels = -(-weight.rows // self._libraries.isa.lanes)
        many = self._libraries.find("multiply_many", weight.format)
        return one, few, Way(address=many, items=panels)

    def finish(self) -> None:
        """Allocate what instructions share that were added so far."""
        size = -(-self._scratch_size // 64) * 64
        scratch = self._take(size * self._threads)
        partials = self._take(self._partial_size)
        for instruction in self.instructions:
            if "partials" in instruction.values:
                instruction.values["partials"] = partials.ctypes.data
            if "scratch" in instruction.values:
                instruction.values |= {"scratch": scratch.ctypes.data, "scratch_stride": size}

    def add_rows(
        self, key: str, weight: Weight, numbers: I32, y: Area, factor: float, *, added: bool = False
    ) -> None:
        """Look rows of a matrix up, one for each token."""
        number = self.add(
            "take_rows",
            {
                "weights": find_address(weight),
                "grid": self._find_grid(weight.format),
                "numbers": numbers.ctypes.data,
                **y.put("y"),
                "blocks": weight.length // weight.kind.block,
                "factor": put_float(factor),
                "added": int(added),
            },
            own=weight.format,
            each=1,
            label=key,
        )
        self.matrices.append(Matrix(key, None, weight, (number,), numbers))

    def add_cap(
        self,
        x: Area,
        length: int,
        limit: float,
        factor: float,
        y: Area | None = None,
        *,
        each: int = 1,
    ) -> None:
        """Multiply vectors, ``each`` of a token, and cap them with tanh or cut them at a negative
        limit: into ``y``, or in place."""
        self.add(
            "cap",
            {
                **x.put("x"),
                **(y or x).put("y"),
                "length": length,
                "limit": put_float(limit),
                "factor": put_float(factor),
            },
            each=each * -(-length // PIECE),
            label="cap" if limit else "scale",
        )

    def add_term(self, x: Area, y: Area, length: int, weights: int = 0) -> None:
        """Add vectors to others; with the address of weights, give their products instead."""
        values = {**x.put("x"), **y.put("y"), "length": length}
        self.add("term", values | put_optional("weights", weights), each=1)

    def add_growth(self, x: Area, length: int, layer: int) -> None:
        """Multiply queries with the factors of their positions, if the layer has them."""
        factors = compute_growth(self._model, layer, 0, self._context)
        if (factors == 1).all():
            return
        content = factors.tobytes()
        if content not in self._growths:
            self._growths[content] = self.keep(factors)
        values = {
            **x.put("x"),
            "length": length,
            "positions": self.positions.ctypes.data,
            "factors": self._growths[content].ctypes.data,
        }
        self.add("grow", values, each=1)

    def add_cut(self, x: Area, length: int, deviations: float) -> None:
        """Cut gates at so many deviations above their mean."""
        values = {**x.put("x"), "length": length, "deviations": put_float(deviations)}
        self.add("cut", values, each=1)

    def add_gate(
        self, gates: Area, ups: Area | None, y: Area, length: int, *, each: int = 1
    ) -> None:
        """Add the activation of the FFN, ``each`` of a token."""
        ffn, limit = self._model.ffn, self._model.ffn.limit
        kind: str = ffn.activation
        if kind == "silu" and (limit is not None or ffn.slope != 1.0):
            kind, limit = "swiglu", _NO_LIMIT if limit is None else limit
        elif kind == "fatrelu":
            limit = ffn.threshold
        self.add(
            "gate",
            {
                "gates": gates.address,
                "ups": 0 if ups is None else ups.address,
                "has_ups": int(ups is not None),
                "x_stride": gates.stride,
                **y.put("y"),
                "length": length,
                "kind": ACTIVATIONS.index(kind),
                "limit": put_float(limit or 0.0),
                "slope": put_float(ffn.slope),
                "up_offset": put_float(ffn.up_offset),
            },
            each=each * -(-length // PIECE),
            label="activation",
        )

    def list_routed(self) -> Routed:
        """Return the pairs of one more layer."""
        moe = self._model.moe
        assert moe is not None
        active, experts = moe.active_experts, moe.experts
        if self.routed is None:
            pairs = active * self._tokens
            self.routed = Routed(
                active=active,
                experts=experts,
                expert_of=self._take_numbers(pairs),
                place_of=0,
                token_of=self.keep(
                    np.repeat(np.arange(self._tokens, dtype=np.int32), active)
                ).ctypes.data,
                starts=self._take_numbers(experts + 1),
                pairs=self._take_numbers(pairs),
                weights=self._take_numbers(pairs),
                predicted=self._take_numbers(pairs),
                predicted_weights=self._take_numbers(pairs),
            )
        places: I32 = self.keep(np.arange(experts, dtype=np.int32))
        return replace(self.routed, place_of=places.ctypes.data)

    def add_routing(self, scores: Area, layer: int, routed: Routed) -> None:
        """Add the choice of experts by their scores, and lists of their tokens."""
        self.add_choice(scores, layer, routed.expert_of, routed.weights)
        nothing = Way(address=self._libraries.find("group"))
        self._append(
            Instruction(
                kernel="group",
                values={
                    "chosen": routed.expert_of,
                    "active": routed.active,
                    "tokens": 0,
                    "experts": routed.experts,
                    "starts": routed.starts,
                    "pairs": routed.pairs,
                },
                ways=(nothing, nothing, replace(nothing, items=1)),
                layer=layer,
                label="group",
            )
        )

    def add_choice(self, scores: Area, layer: int, chosen: int, weights: int) -> None:
        """Add what a router makes of scores: experts and weights of each pair, at two addresses."""
        moe = self._model.moe
        assert moe is not None
        choice = self.read_vector("choice_bias", layer) if moe.choice_bias else 0
        scales = self.read_vector("expert_scale", layer) if moe.expert_scale else 0
        self.add(
            "route",
            {
                **scores.put("scores"),
                "experts": moe.experts,
                "active": moe.active_experts,
                "chosen": chosen,
                "weights": weights,
                **put_optional("choice_bias", choice),
                **put_optional("expert_scale", scales),
                "kind": ROUTERS.index(moe.router),
                "bias_of_score": int(moe.choice_bias_of == "score"),
                "groups": moe.groups,
                "active_groups": moe.active_groups,
                "best_two": int(moe.group_score == "best-two"),
                "normalise": int(moe.normalise_weights),
                "scaling": put_float(moe.scaling),
                "tolerance": put_float(moe.tolerance),
                **_SCRATCH,
            },
            each=1,
        )
        self._scratch_size = max(self._scratch_size, 4 * (2 * moe.experts + moe.groups))

    def _take_numbers(self, count: int) -> int:
        """Return the address of numbers of 32 bits."""
        return self._take(4 * count).ctypes.data

    def add_weighing(self, x: Area, length: int, scores: Area, *, each: int = 1) -> None:
        self.add("weigh", {**x.put("x"), "length": length, **scores.put("scores")}, each=each)

    def add_turn(
        self,
        x: Area,
        heads: int,
        own: Attention,
        key: str,
        *,
        neighbours: bool,
        waits: bool,
        width: int | None = None,
    ) -> None:
        """Turn queries or keys, with their norm; ``width``: elements from one head to the next."""
        attention = own.options
        weights, place = 0, "none"
        if own.head_norm and attention.head_norm_of == "head":
            weights, place = self._read_head_norm(key, own), attention.head_norm_place
        tables = self.ropes[own.turn]
        self._add_turn(
            x,
            heads,
            width or own.head_dim,
            Norm(weights, place),
            {
                "cos": tables.arrays[0].ctypes.data,
                "sin": tables.arrays[1].ctypes.data,
                "table_stride": own.turned_width // 2,
                "rotated": own.rope.count_rotated(own.turned_width),
                "neighbours": int(neighbours),
                "swapped": int(own.rope.pairs == "swapped"),
            },
            waits=waits,
        )

    def add_parts_norm(
        self, x: Area, parts: int, width: int, weights: int = 0, *, waits: bool = True
    ) -> None:
        """Normalise so many parts of vectors; the address of no weights stands for ones."""
        if weights == 0:
            weights = self.fill(1.0, width)
        names = ("cos", "sin", "table_stride", "rotated", "neighbours", "swapped")
        still = dict.fromkeys(names, 0)
        self._add_turn(x, parts, width, Norm(weights, "before"), still, waits=waits)

    def _add_turn(
        self, x: Area, heads: int, width: int, norm: Norm, turn: dict[str, int], *, waits: bool
    ) -> None:
        self.add(
            "turn",
            {
                **x.put("x"),
                "heads": heads,
                "head_dim": width,
                "weights": norm.weights,
                "norm_place": NORM_PLACES.index(norm.place),
                "epsilon": put_float(self._model.norm.epsilon),
                "positions": self.positions.ctypes.data,
                **turn,
            },
            each=heads,
            grain=4,
            waits=waits,
        )

    def _read_head_norm(self, key: str, own: Attention) -> int:
        if not self._model.attention.head_norm_weights:
            return self.fill(1.0, own.head_dim)
        return self.read_vector(key, self.layer, self._model.norm.weight_offset)

    def add_gates(
        self,
        x: Area,
        y: Area,
        x_of: Sequence[int],
        width: int,
        gates: Gates | None = None,
        norm: HeadNorm | None = None,
        y_of: Sequence[int] | None = None,
    ) -> None:
        """Add gates of heads of ``width`` elements, which begin at elements ``x_of`` of tokens, and
        go one after the other or to ``y_of``; without ``gates`` heads are moved."""
        starts = range(0, width * len(x_of), width)
        gate_of = starts if gates is None else gates.places
        tables = {"x_of": x_of, "gate_of": gate_of, "y_of": starts if y_of is None else y_of}
        own = None if norm is None else norm.epsilon
        epsilon = self._model.norm.epsilon if own is None else own
        kept: list[I32] = [self.keep(np.array(table, np.int32)) for table in tables.values()]
        self.add(
            "gate_heads",
            {
                **x.put("x"),
                **(x if gates is None else gates.area).put("gates"),
                **{name: table.ctypes.data for name, table in zip(tables, kept, strict=True)},
                "gate_each": 1 if gates is None else gates.each,
                "kind": -1 if gates is None else GATES.index(gates.kind),
                **y.put("y"),
                "heads": len(x_of),
                "width": width,
                "weights": 0 if norm is None else norm.weights,
                "weights_step": 0 if norm is None else norm.step,
                "norm_place": NORM_PLACES.index("none" if norm is None else norm.place),
                "epsilon": put_float(epsilon),
            },
            each=len(x_of),
            grain=4,
        )

    def add_keep(self, keys: Area, values: Area | None, shape: Attention, layer: int) -> None:
        """Append a token's vectors to the KV cache; latent ones have no values."""
        heads = describe_heads(shape)
        places = self._place_cache(heads, layer)
        self.add(
            "keep",
            {
                "keys": keys.address,
                "values": keys.address if values is None else values.address,
                "x_stride": keys.stride,
                "heads": heads.key_heads,
                **places,
                "value_width": 0 if values is None else heads.value,
            },
            each=heads.key_heads,
            grain=2,
        )

    def _place_cache(self, heads: Heads, layer: int) -> dict[str, int]:
        arrays = self._cache.find(layer)
        # All heads read the same latent vectors, which are their values too.
        is_latent = len(arrays) == 1
        found = self.put_tokens()
        for kind, own, width in (("key", arrays[0], heads.key), ("value", arrays[-1], heads.value)):
            array, scales = own.elements, own.scales
            sequence, head, _, _ = (size // array.itemsize for size in array.strides)
            found |= {
                f"{kind}_width": width,
                f"{kind}_cache": array.ctypes.data,
                f"{kind}_scales": 0 if scales is None else scales.ctypes.data,
                f"{kind}_sequence_stride": sequence,
                f"{kind}_head_stride": 0 if is_latent else head,
            }
        return found

    def add_attention(self, queries: Area, y: Area, shape: Attention, layer: int) -> None:
        """Mix the values that queries see in the KV cache."""
        attention, heads = shape.options, describe_heads(shape)
        source = layer if shape.key_layer is None else shape.key_layer
        values = self._cache.find(source)[-1].elements
        sinks = self.read_vector("sinks", layer) if shape.sinks else 0
        group, lanes = heads.group, self._libraries.isa.lanes
        size = count_attention_bytes(group, heads.key, heads.value, lanes)
        self._scratch_size = max(self._scratch_size, size)
        size = count_partial_bytes(shape.heads, heads.value, self._step_tokens)
        self._partial_size = max(self._partial_size, size)
        width = shape.head_dim if shape.latent is None else shape.latent.key
        arguments = {
            "queries": queries.address,
            "query_stride": queries.stride,
            "heads": shape.heads,
            "group": group,
            **self._place_cache(heads, source),
            "value_stride": values.shape[-1],
            "window": shape.window or 0,
            "is_chunked": int(attention.window_kind == "chunked"),
            "scale": put_float(attention.scale or 1 / math.sqrt(width)),
            "cap": put_float(attention.softcap or 0.0),
            **put_optional("sinks", sinks),
            **y.put("y"),
            "tokens": 0,
            "tile": count_tile_tokens(group),
            "parts": PARTS,
            "partials": 0,
            **_SCRATCH,
        }
        # Several tokens have a context each, in parts; of many, contexts are not divided.
        groups = shape.heads // group
        one = Way(address=self._libraries.find("attend"), each=groups * PARTS)
        apart = replace(one, each=groups)
        many = apart
        if heads.key % lanes == 0 and heads.value % lanes == 0:
            address, tokens = self._libraries.find("attend_many"), count_tile_tokens(group)
            many = Way(address=address, each=groups, tokens=tokens)
        join = Way(address=self._libraries.find("join"), each=shape.heads)
        for kernel, ways, other in (
            ("attend", (one, one, many), apart),
            ("join", (join, join, replace(join, each=0)), replace(join, each=0)),
        ):
            self._append(
                Instruction(
                    kernel=kernel,
                    values=dict(arguments),
                    ways=ways,
                    apart=other,
                    orders=(PARTS, 1),
                    layer=self.layer,
                    is_little=kernel == "join" and shape.heads * heads.value <= _LITTLE_JOIN,
                    label=kernel,
                )
            )


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of heads."""

    weights: int
    """Their address."""
    place: str
    """One of `NORM_PLACES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix, and the use of its products."""

    key: str
    weight: Weight
    y: Area
    bias: int = 0
    """Address of a vector; 0 without."""
    added: bool = False
    """Whether the result is added to y."""
    factor: float = 1.0
    routed: Routed | None = None
    """The experts that have tokens, if the matrix belongs to experts."""
    of_tokens: bool = True
    """Whether experts read tokens and give something for each pair, or the other way round."""
    is_weighed: bool = False
    """Whether results are multiplied with the weights of experts."""


def find_address(weight: Weight) -> int:
    """Return where a tensor's bytes are; 0 where they come later."""
    return 0 if weight.data is None else int(weight.data.ctypes.data)
