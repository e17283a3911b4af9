"""Instructions of layers with a state: short convolution, delta rule, Mamba-2, Mamba.

Files have rows of the projections in orders of their own.  Products are as the file has its rows;
tables say where the kernels find what `pi2.model.states` calls the rows of ``state_in`` and
``state_gates``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I64
from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.contract import STATE_BLOCK
from pi2.backends.blocks.instructions import Weight, put_float
from pi2.backends.blocks.operands import Area, Gates, HeadNorm, Product
from pi2.backends.blocks.room import StateMemory
from pi2.model.states import StateShape, list_state_tensors
from pi2.model.tensor import DenseTensor, Place, split_mixer_kind, split_name
from pi2.plan.documents.model import Model


@dataclass(frozen=True, slots=True)
class _Rows:
    """Products of a token that matrices of the file give, and where rows of a tensor are."""

    area: Area
    places: I64


class StateBuilder:
    """Adds the mixers that keep a state."""

    def __init__(self, model: Model, builder: Builder, memory: StateMemory) -> None:
        self._model = model
        self._builder = builder
        self._memory = memory

    def add(self, layer: int, mixer: int, shape: StateShape, read: Area) -> Area:
        """Add a mixer that reads ``read``; what its output projection reads."""
        listed = list_state_tensors(Place(self._model, layer, mixer), shape)
        tensors = {split_mixer_kind(split_name(own.name)[1])[0]: own for own in listed}
        inputs = [own for kind in ("state_in", "state_gates") if (own := tensors.get(kind))]
        projected = self._project(inputs, read, shape)
        place = layer, mixer
        if shape.kind == "convolution":
            # b, c and x.
            parts = [projected.area.skip(int(n)) for n in projected.places[:: shape.width]]
            mixed = self._builder.take_area("state mixed", shape.width)
            self._convolve(place, shape, parts[2], parts[:2], None, mixed)
            return mixed
        made = self._builder.take_area("state convolved", shape.channels)
        channels = projected.places[: shape.channels]
        first = int(channels.min())
        is_whole = np.array_equal(np.sort(channels), np.arange(first, first + len(channels)))
        if is_whole:
            source, order = projected.area.skip(first), channels - first
            self._convolve(place, shape, source, [], None, made, order)
        else:
            order = np.arange(shape.channels)
            self._convolve(place, shape, projected.area, [], channels, made)
        if shape.kind == "mamba1":
            return self._scan(place, shape, projected, made)
        return self._recur(place, shape, projected, made, order)

    def _project(self, tensors: Sequence[DenseTensor], read: Area, shape: StateShape) -> _Rows:
        """Add the products with all matrices of ``tensors``, each once."""
        builder, found = self._builder, dict[str, tuple[int, str, Weight]]()
        places, total = [], 0
        for tensor in tensors:
            if builder.is_stored:
                kind = split_mixer_kind(split_name(tensor.name)[1])[0]
                found[kind] = total, kind, builder.need(kind)
                places.append(total + np.arange(tensor.rows))
                total += tensor.rows
                continue
            for source in tensor.sources:
                weight = builder.need(source.key)
                name = weight.name or source.key
                if name not in found:
                    found[name] = total, source.key, weight
                    total += weight.rows
                rows = np.arange(source.shape[0])
                rows = rows if source.rows is None else np.array(source.rows())
                rows = rows if weight.order is None else weight.order[rows]
                places.append(found[name][0] + rows)
        area = builder.take_area("state projected", total)
        joined = np.concatenate(places)
        bias = 0
        if shape.projection_bias:
            known = builder.need("state_in_bias")

            def read_bias() -> F32:
                values = np.zeros(total, np.float32)
                values[joined[: shape.rows]] = known.read()
                return values

            bias = builder.keep(total, read_bias).ctypes.data
        products = [
            Product(key=key, weight=weight, y=area.skip(first), bias=bias and bias + 4 * first)
            for first, key, weight in found.values()
        ]
        builder.add_products(read, self._model.shape.hidden, products)
        return _Rows(area, joined)

    def _convolve(
        self,
        place: tuple[int, int],
        shape: StateShape,
        x: Area,
        gates: Sequence[Area],
        places: I64 | None,
        y: Area,
        order: I64 | None = None,
    ) -> None:
        """Add the convolution of ``x``, or of its elements ``places``; channel i is element
        ``order[i]`` of ``y``."""
        builder, channels = self._builder, shape.channels

        def keep(key: str, count: int) -> int:
            source = builder.need(key)

            def read() -> F32:
                values = source.read().reshape(-1, channels)
                return (values if order is None else _put(values, order)).reshape(-1)

            kept: F32 = builder.keep(count, read)
            return kept.ctypes.data

        weights = keep("state_convolution", shape.kernel * channels)
        bias = keep("state_convolution_bias", channels) if shape.convolution_bias else 0
        more = {
            "weights": weights,
            "bias": bias,
            "places": self._keep_numbers(places),
            "tails": self._memory.find(*place)[0],
            "sequence_stride": self._memory.stride,
            "is_silu": int(shape.kind != "convolution"),
        }
        if gates:
            more |= {"before": gates[0].address, "after": gates[1].address, "has_gates": 1}
        builder.add_convolution(x, y, channels, shape.kernel, more)

    def _keep_numbers(self, places: I64 | None) -> int:
        return 0 if places is None else self._builder.keep_numbers(places.tolist())

    def _recur(
        self, place: tuple[int, int], shape: StateShape, projected: _Rows, made: Area, order: I64
    ) -> Area:
        """Add what follows the convolution, channel i of which is element ``order[i]``."""
        builder, heads = self._builder, shape.value_heads
        is_delta, of_keys = shape.kind == "delta", shape.decay_of == "key"
        keys = shape.key_heads * shape.key_dim
        gates = projected.places[shape.rows : shape.rows + shape.gates]
        steps, step_of = projected.area, gates[heads:] if is_delta else gates
        if shape.decay_rank:
            steps = self._expand("state_decays", projected, gates[heads:], shape.decay_rank)
            step_of = np.arange(shape.decays)
        if of_keys:
            step_of = step_of[:: shape.key_dim]
        factors = builder.take_area("state factors", heads + shape.decays)
        query, key = (made.skip(int(order[n])) for n in (0, keys))
        inside = {
            "queries": query.address,
            "keys": key.address,
            "x_stride": made.stride,
            "key_dim": shape.key_dim,
            "heads": heads,
            "is_delta": int(is_delta),
            "of_keys": int(of_keys),
        }
        builder.add(
            "prepare",
            inside
            | {
                "key_heads": shape.key_heads,
                **projected.area.put("entries"),
                "entry_of": self._keep_numbers(gates[:heads]),
                **steps.put("steps"),
                "step_of": self._keep_numbers(step_of),
                "bias": builder.read_vector("state_step", place[0]),
                "rates": builder.read_vector("state_decay", place[0]),
                "floor": put_float(shape.decay_floor or 0.0),
                "has_floor": int(shape.decay_floor is not None),
                "shortest": put_float(shape.shortest_step),
                "longest": put_float(
                    math.inf if shape.longest_step is None else shape.longest_step
                ),
                **factors.put("y"),
            },
            each=heads,
            grain=4,
        )
        skip = builder.read_vector("state_skip", place[0]) if shape.kind == "mamba" else 0
        mixed = builder.take_area("state mixed", shape.width)
        builder.add(
            "recur",
            inside
            | {
                "values": made.address,
                "value_of": self._keep_numbers(order[2 * keys :: shape.value_dim]),
                "group": heads // shape.key_heads,
                "value_dim": shape.value_dim,
                **factors.put("factors"),
                "skip": skip,
                "memory": self._memory.find(*place)[1],
                "sequence_stride": self._memory.stride,
                **mixed.put("y"),
                **builder.put_tokens(),
            },
            items=heads * -(-shape.value_dim // STATE_BLOCK),
            grain=4,
        )
        return self._finish(place, shape, projected, gates, mixed)

    def _scan(
        self, place: tuple[int, int], shape: StateShape, projected: _Rows, values: Area
    ) -> Area:
        """Add the first Mamba's recurrence over convolved ``values``."""
        builder, rank, depth = self._builder, shape.step_rank, shape.key_dim
        parts = builder.take_area("state parts", shape.parts)
        builder.add_product(values, shape.width, "state_parts", None, parts)
        if shape.part_norm != "none":
            is_weighted = shape.part_norm == "weighted"
            weights: F32 = builder.keep(
                shape.parts, lambda: builder.read_values("state_part_norm") if is_weighted else 1.0
            )
            for first, size in ((0, rank), (rank, depth), (rank + depth, depth)):
                norm = HeadNorm(
                    weights=weights.ctypes.data + 4 * first,
                    step=0,
                    place="before",
                    epsilon=shape.part_epsilon,
                )
                part = parts.skip(first)
                builder.add_gates(part, part, [0], size, norm=norm)
        steps = builder.take_area("state steps", shape.width)
        builder.add_product(parts, rank, "state_steps", None, steps)
        mixed = builder.take_area("state mixed", shape.width)
        builder.add(
            "scan",
            {
                **values.put("x"),
                **projected.area.skip(int(projected.places[shape.channels])).put("gates"),
                **steps.put("steps"),
                "keys": parts.skip(rank).address,
                "queries": parts.skip(rank + depth).address,
                "parts_stride": parts.stride,
                "bias": builder.read_vector("state_step", place[0]),
                "rates": builder.read_vector("state_decay", place[0]),
                "skip": builder.read_vector("state_skip", place[0]),
                "memory": self._memory.find(*place)[1],
                "sequence_stride": self._memory.stride,
                "width": shape.width,
                "key_dim": depth,
                **mixed.put("y"),
                **builder.put_tokens(),
            },
            items=-(-shape.width // STATE_BLOCK),
            grain=2,
        )
        return mixed

    def _finish(
        self, place: tuple[int, int], shape: StateShape, projected: _Rows, factors: I64, mixed: Area
    ) -> Area:
        """Add the norm and the gates of what heads have mixed."""
        builder, is_delta = self._builder, shape.kind == "delta"
        parts = shape.value_heads if is_delta else shape.norm_groups
        width = shape.width // parts
        area, gates = projected.area, projected.places[shape.channels : shape.rows]
        if shape.gate_rank:
            latents = factors[len(factors) - shape.gate_rank :]
            area = self._expand("state_output_gates", projected, latents, shape.gate_rank)
            gates = np.arange(shape.width)
        given = builder.take_area("state gated", shape.width)
        columns = builder.need("state_output").columns
        targets = np.arange(shape.width) if columns is None else columns
        norm = None
        if shape.has_norm:
            norm = HeadNorm(
                weights=builder.read_vector("state_norm", place[0]),
                step=0 if is_delta else width,
                place="before" if is_delta else "after",
            )
        builder.add_gates(
            mixed,
            given,
            range(0, shape.width, width),
            width,
            Gates(area, gates[::width].tolist(), shape.gate if is_delta else "silu"),
            norm,
            targets[::width].tolist(),
        )
        return given

    def _expand(self, key: str, projected: _Rows, latents: I64, rank: int) -> Area:
        """Add the product with a matrix that reads latents, which are neighbours."""
        builder = self._builder
        area = builder.take_area(key, builder.need(key).rows)
        builder.add_product(projected.area.skip(int(latents[0])), rank, key, None, area)
        return area


def _put(values: F32, order: I64) -> F32:
    """``values`` [..., n] with element i in place ``order[i]``."""
    moved = np.empty_like(values)
    moved[..., order] = values
    return moved
