"""The schedule for x86-64's tiles: assembly, and the bits of the schedule without them."""

from typing import Any

import numpy as np
import pytest
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels import amx
from pi2.plan.weights.layout import Precision
from tests.helpers.aarch64 import generate_assembly
from tests.helpers.kernels import X86_FEATURES, compile_anew, list_runnable_isas, make_spec
from tests.helpers.tables import in_table
from tests.property.test_kernels_ffn import Layer


@pytest.mark.parametrize("name", ["amx", "avx512vnni"])
def test_chunks_take_tiles_where_there_are_some(name: str) -> None:
    code = generate_assembly(make_spec(features=tuple(sorted(X86_FEATURES[name]))), "add_dense")
    instructions = ("ldtilecfg", "tileloadd", "tdpbssd", "tilestored", "tilerelease")
    assert all((instruction in code) == (name == "amx") for instruction in instructions)


def test_activations_that_are_not_rounded_take_none() -> None:
    features = tuple(sorted(X86_FEATURES["amx"]))
    code = generate_assembly(make_spec(features=features, planes=4, chunk_planes=4), "add_dense")
    assert "tdpbssd" not in code


SHAPES = {**dict.fromkeys(range(4), (16, 64)), 4: (16, 32), 5: (16, 32), 6: (8, 64)}
"""Rows of each tile, and their bytes."""


class Tiles:
    """AMX's instructions written out, for processors without."""

    def configure(self) -> None:
        self._bytes = T.alloc_buffer((8 * 1024,), "int8")

    def load(self, tile: int, buffer: v.Buffer, byte: v.Expr, stride: int) -> None:
        rows, width = SHAPES[tile]
        start = v.let(byte)
        with T.serial(rows) as row:
            own = v.load(buffer, start + row * stride, width)
            v.store(self._bytes, tile * 1024 + row * 64, own, width)

    def emit(self, name: str, *operands: v.Expr) -> None:
        if name == "tilerelease":
            return
        tile = int(operands[0].value) * 1024
        with T.serial(16) as row:
            at = v.let(tile + row * 64)
            match name:
                case "tilezero":
                    v.store(self._bytes, at, v.constant(0, "int8", 64), 64)
                case "tdpbssd":
                    codes, weights = (int(own.value) * 1024 for own in operands[1:])
                    with T.serial(8) as chunk:
                        total = v.load_as(self._bytes, at, "int32", 16)
                        for byte in range(4):
                            code = self._bytes[codes + row * 64 + chunk * 4 + byte]
                            own = self._bytes[v.span(weights + chunk * 64 + byte, 16, 4)]
                            wide = v.cast(own, "int32", 16)
                            total = total + wide * v.splat(v.cast(code, "int32", 1), 16)
                        v.store(self._bytes, at, v.reinterpret(total, "int8", 64), 64)
                case "tilestored64":
                    place = operands[1].args[0]
                    start = place.indices[0] + row * int(operands[2].value)
                    v.store(place.source, start, v.load(self._bytes, at, 64), 64)
                case _:
                    raise AssertionError(name)


@pytest.mark.skipif("avx512vnni" not in list_runnable_isas(), reason="needs AVX-512 with VNNI")
@in_table
def test_dense_ffn_has_the_bits_of_the_schedule_without_tiles(
    hidden: int, neurons: int, tokens: int, activation: str, planes: int, precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "amx" not in list_runnable_isas():
        tiles = Tiles()
        monkeypatch.setattr(amx, "_emit_configuration", tiles.configure)
        monkeypatch.setattr(amx, "_emit_load", tiles.load)
        monkeypatch.setattr(amx, "_emit_instruction", tiles.emit)

    def compute(name: str) -> Any:
        spec = make_spec(
            hidden=hidden, activation=activation, ffn=precision, planes=planes,
            chunk_planes=planes, features=tuple(sorted(X86_FEATURES[name])),
        )  # fmt: skip
        return Layer(spec, neurons, tokens, 3).compute_dense(0, neurons)

    with compile_anew():
        found, expected = compute("amx"), compute("avx512vnni")
    assert expected.any() and np.array_equal(found.view(np.int32), expected.view(np.int32))
