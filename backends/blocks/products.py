"""Products of a program with the unconverted tensors of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pi2.backends.blocks.arrays import ProgramArrays
from pi2.backends.blocks.instructions import Instruction, Way, Weight, put_float
from pi2.backends.blocks.operands import Area, Matrix, Product, find_address
from pi2.backends.blocks.room import count_table_bytes, describe_order, list_offsets, make_tables
from pi2.backends.blocks.sizes import count_quantized_bytes, count_scratch_bytes
from pi2.formats.packing import GROUP

if TYPE_CHECKING:
    from pi2.arrays import F32

_GRAIN_BYTES = 1 << 14
"""Bytes of weights that a thread takes at a time, at least."""


@dataclass(frozen=True, slots=True)
class _Codes:
    address: int
    stride: int
    planes: int
    plane_stride: int


class Products(ProgramArrays):
    """Adds products, and what quantises their inputs."""

    def make_product(
        self, key: str, layer: int | None, y: Area, has_bias: bool = False, **more: Any
    ) -> Product:
        """Return the product with a matrix of a layer, by default of the addition's."""
        bias = self.read_vector(f"{key}_bias", layer) if has_bias else 0
        return Product(key=key, weight=self.need(key, layer), y=y, bias=bias, **more)

    def add_product(
        self,
        x: Area,
        length: int,
        key: str,
        layer: int | None,
        y: Area,
        has_bias: bool = False,
        **more: Any,
    ) -> None:
        """Add a matrix times vectors; see `make_product`."""
        self.add_products(x, length, [self.make_product(key, layer, y, has_bias, **more)])

    def list_inputs(
        self, fused: str, layer: int, parts: list[tuple[str, Area]], has_bias: bool, **more: Any
    ) -> list[Product]:
        is_fused = getattr(self._model.tensors, fused, None) is not None
        if is_fused and self.find(fused, layer) is not None:
            parts = [(fused, parts[0][1])]
        return [self.make_product(key, layer, y, has_bias, **more) for key, y in parts]

    def add_products(
        self, x: Area, length: int, products: Sequence[Product], *, each: int = 1
    ) -> None:
        """Add matrices times the same vectors, ``each`` of a token, which are quantised first as
        the formats want."""
        inputs: dict[object, _Codes] = {}
        x, length = self._fill_up(x, length, products[0], each)
        for product in products:
            self._quantize(x, length, product.weight, inputs, each)
        made = [self._leave_scales(place, product) for place, product in enumerate(products)]
        for place, product in enumerate(made):
            codes = inputs[self._name_form(product.weight)]
            number = self._multiply(product, codes, waits=place == len(products) - 1)
            self.matrices.append(Matrix(product.key, self.layer, product.weight, (number,)))
        for own, product in zip(made, products, strict=True):
            if own is not product:
                self._scale_rows(own, product)

    def _leave_scales(self, place: int, product: Product) -> Product:
        """Return a product without what follows the scales of its rows, if they have one each."""
        weight = product.weight
        if weight.row_scales is None:
            return product
        y = self.take_area(f"unscaled {place}", weight.rows)
        return replace(product, y=y, bias=0, added=False, factor=1.0)

    def _scale_rows(self, own: Product, product: Product) -> None:
        """Add what makes ``product`` of its products without scales."""
        scales, rows = product.weight.row_scales, product.weight.rows
        assert scales is not None
        kept = self.keep(rows, lambda: scales)
        self.add_term(own.y, own.y, rows, kept.ctypes.data)
        if product.bias:
            self.add_term(Area(product.bias, 0), own.y, rows)
        if not product.added:
            self.add_cap(own.y, rows, 0.0, product.factor, product.y)
            return
        if product.factor != 1.0:
            self.add_cap(own.y, rows, 0.0, product.factor)
        self.add_term(own.y, product.y, rows)

    def _fill_up(self, x: Area, length: int, product: Product, each: int) -> tuple[Area, int]:
        """Return vectors as long as a matrix's rows, which zeros may fill up."""
        whole = product.weight.length
        if whole == length:
            return x, length
        assert length < whole < length + GROUP, f"rows of {product.key} are {whole} long"
        filled = self.take_area(f"filled {length}", whole, each)
        self.add_cap(x, length, 0.0, 1.0, filled, each=each)
        return filled, whole

    def add_heads(
        self,
        x: Area,
        length: int,
        product: Product,
        heads: int,
        first: int = 0,
        rows: int | None = None,
    ) -> None:
        """Add a matrix of each head, from its row ``first`` on, times a vector of each, or only so
        many ``rows``.  Strides are between heads, which follow each other without gaps."""
        weight, y, inputs = product.weight, product.y, dict[object, _Codes]()
        assert weight.row_scales is None, (
            f"{product.key}: rows of heads have no scales of their own"
        )
        each = weight.rows // heads
        rows = each - first if rows is None else rows
        x, length = self._fill_up(x, length, product, heads)
        self._quantize(x, length, weight, inputs, heads)
        codes, numbers = inputs[self._name_form(weight)], []
        for head in range(heads):
            skip = (head * each + first) * weight.row_bytes
            data = None if weight.data is None else weight.data[skip:]
            own = replace(
                product,
                weight=replace(weight, rows=rows, data=data),
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
        number = self.add(
            "multiply_turned",
            {
                "weights": find_address(weight),
                "grid": self._find_grid(weight.format),
                "x": x.address,
                "x_stride": heads * x.stride,
                "x_each": x.stride,
                "y": y.address,
                "y_stride": heads * y.stride,
                "y_each": y.stride,
                "blocks": weight.length // weight.kind.block,
                "rows": rows,
                "each": weight.rows // heads,
                "factor": put_float(scale),
            },
            own=weight.format,
            items=heads,
            label=product.key,
        )
        self.matrices.append(Matrix(product.key, self.layer, weight, (number,)))

    def _quantize(
        self, x: Area, length: int, weight: Weight, inputs: dict[object, _Codes], each: int
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
            self._codes[key] = self.take("uint8", plane * self._planes).ctypes.data
        target = self._codes[key]
        inputs[form] = _Codes(target, stride, self._planes, plane)
        if kind == "q8_k":
            name, orders = "order", (self._find_order(weight.format), self._find_order(""))
        else:
            name, orders = "together", (self._describe_order(weight.format), 1)
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
                    **(self._describe_plane(number, plane) if kind == "q8_0" else {}),
                },
                plane=number,
                each=each * length // (256 if kind == "q8_k" else 32),
                grain=8,
                orders=orders,
                label="quantize",
            )

    def _describe_plane(self, number: int, size: int) -> dict[str, int]:
        """Only scales of the first plane may be rounded, and the second one has a part of them."""
        return {"rounds": int(number == 0), "upper": size if number == 1 else 0}

    def _name_form(self, weight: Weight) -> object:
        kind = weight.kind.activations
        if kind == "float":
            return kind
        find = self._list_offsets if kind == "q8_k" else self._describe_order
        return kind, find(weight.format)

    def _list_offsets(self, name: str) -> tuple[int, ...]:
        return list_offsets(name, 4 * self._interpreter.lanes)

    def _describe_order(self, name: str) -> int:
        return describe_order(name, 4 * self._interpreter.lanes)

    def _find_order(self, name: str) -> int:
        """Return the address of the order of a format's activations, the same for the same one."""
        offsets = self._list_offsets(name)
        if offsets not in self._orders:
            self._orders[offsets] = self.keep(len(offsets), lambda: offsets, "int64")
        return self._orders[offsets].ctypes.data

    def _find_grid(self, name: str) -> int:
        if name not in self._grids:
            size = count_table_bytes(name) or 64
            self._grids[name] = self.keep(size, lambda: make_tables(name), "uint8")
        return self._grids[name].ctypes.data

    def _multiply(self, product: Product, codes: _Codes, *, waits: bool) -> int:
        weight, y = product.weight, product.y
        lanes, most = self._interpreter.lanes, self._tokens
        self.need_scratch(count_scratch_bytes(lanes, most, self._planes))
        one, several, many, apart = self._list_ways(product)
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
                    "bias": product.bias,
                    "added": int(product.added),
                    "factor": put_float(product.factor),
                    "scales": self._place_scales(weight),
                    "rows": weight.rows,
                    **self._list_pairs(product),
                },
                ways=(one, several, many),
                apart=apart,
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
        kept: F32 = self.keep(len(weight.scales), lambda: weight.scales)
        return kept.ctypes.data

    def _list_pairs(self, product: Product) -> dict[str, int]:
        one, several, routed = self._zeros.ctypes.data, self._steps.ctypes.data, product.routed
        if routed is None:
            return {
                "expert_of": one,
                "place_of": one,
                "x_of": several,
                "y_of": several,
                "pairs": several,
                "experts": 1,
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

    def _list_ways(self, product: Product) -> tuple[Way, Way, Way, Way]:
        """Return the ways of a token, of several, of a chunk, and of many sequences."""
        weight = product.weight
        grain = max(1, _GRAIN_BYTES // weight.row_bytes)
        find = self._interpreter.find
        one, few = (
            Way(address=find(kernel, weight.format), items=weight.rows, grain=grain)
            for kernel in ("multiply", "multiply_few")
        )
        if product.routed is not None:
            few = one
        if weight.kind.is_plain:
            return one, few, few, few
        rows = self._interpreter.lanes
        address = find("multiply_many", weight.format)
        many = Way(address=address, items=-(-weight.rows // rows), rows=rows)
        # Memory is the limit of a few tokens: neighbouring panels are a thread's.
        return one, few, many, replace(many, grain=-(-grain // rows))
