"""Weights in number formats, and runners of instructions."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pi2.arrays import I64, U8
from pi2.backends.blocks.contract import FIELDS, BlockSpec
from pi2.backends.blocks.instructions import Weight, put_float
from pi2.backends.reference.executor import NumpyInterpreter
from pi2.formats import Format, find_format
from pi2.model.blocks import Attention
from pi2.plan.documents.model import Model
from tests.helpers.aarch64 import ARM_FEATURES, COMPILER, EMULATOR
from tests.helpers.kernels import X86_FEATURES

if TYPE_CHECKING:
    from tests.helpers.instruction_cases import Case


def find_attention(model: Model, layer: int) -> Attention:
    found = model.blocks[layer].attention
    assert found is not None, layer
    return found


def make_blocks(
    own: Format, count: int, generator: np.random.Generator, spread: float = 0.01
) -> U8:
    """Random blocks [count, block_bytes] whose scales have a ``spread``."""
    if own.is_plain:
        values = (generator.standard_normal(count) * 100 * spread).astype(np.float32)
        if own.name == "f32":
            return values.view(np.uint8).reshape(count, 4)
        if own.name == "f16":
            return values.astype(np.float16).view(np.uint8).reshape(count, 2)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(count, 2)
    raw = generator.integers(0, 256, (count, own.block_bytes), np.uint8)
    scales = (generator.standard_normal(count) * spread).astype(np.float16)
    for place in own.halves:
        raw[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    if own.name == "iq1_m":
        bits = scales.view(np.uint16)
        for number in range(4):
            nibble = (bits >> (4 * number) & 15).astype(np.uint8)
            raw[:, 49 + 2 * number] = raw[:, 49 + 2 * number] & 15 | nibble << 4
    if own.name == "mxfp4":
        raw[:, 0] = generator.integers(115, 125, count)
    if own.name == "ternary":
        # No field of two bits is 3.
        raw &= ~((raw & 0x55) & (raw >> 1 & 0x55))
    if own.name == "nvfp4":
        raw[:, :4] = generator.integers(20, 60, (count, 4))
    return raw


def put_edges(own: Format, raw: U8) -> None:
    """Begin rows [rows, n x block_bytes] with zeros, ones, the largest and smallest scales."""
    blocks = raw.reshape(len(raw), -1, own.block_bytes)
    blocks[0], blocks[1] = 0, 255
    if own.is_plain:
        blocks[1] = 0
    for row, bits in ((1, 0x3C00), (2, 0x7BFF), (3, 0x0001)):
        for place in own.halves:
            blocks[row, :, place], blocks[row, :, place + 1] = bits & 255, bits >> 8
        for number in range(4 if own.name == "iq1_m" else 0):
            nibble = (bits >> (4 * number) & 15) << 4
            blocks[row, :, 49 + 2 * number] = blocks[row, :, 49 + 2 * number] & 15 | nibble
        if own.name == "mxfp4":
            blocks[row, :, 0] = {1: 127, 2: 200, 3: 0}[row]
        if own.name == "nvfp4":
            blocks[row, :, :4] = {1: 0x38, 2: 0x7E, 3: 0x01}[row]


class Runner(Protocol):
    """Who computes an instruction; `lanes` are those of its processor."""

    lanes: int

    def run(self, case: Case) -> None:
        """Compute all items, in place."""


class Numpy:
    """The interpreter of `pi2.backends.reference`."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def run(self, case: Case) -> None:
        own = NumpyInterpreter(None, [], case.kv, lanes=self.lanes)
        table = _make_table(case)
        for part in _split(case.items):
            own.compute(case.kernel, case.format, table.ctypes.data, part)


class Kernels:
    """A library of this processor."""

    def __init__(self, level: int, library: str, isa: str, folder: Path) -> None:
        """Compile it for the schedule ``isa`` (`tests.helpers.kernels.X86_FEATURES`); ``level``:
        how much LLVM optimises."""
        from tvm.target import Target

        from pi2.backends.blocks.program import Program
        from pi2.backends.compiler.compile import compile_library

        class Leveled(Program):
            @property
            def target(self) -> Target:
                return Target({**super().target.export(), "opt-level": level})

        spec = BlockSpec(
            library=library, architecture="x86-64", features=tuple(sorted(X86_FEATURES[isa]))
        )
        assert spec.isa.name == isa
        self.lanes = spec.isa.lanes
        path = folder / f"{library}-{isa}.so"
        compile_library(Leveled(spec), path, lambda label, share: None)
        self._library = ctypes.CDLL(str(path))

    def run(self, case: Case) -> None:
        function, table = getattr(self._library, case.kernel), _make_table(case)
        for first, end in _split(case.items):
            numbers = map(ctypes.c_int64, (first, end, 0))
            function(ctypes.c_void_p(table.ctypes.data), *numbers)


class ArmKernels:
    """A library of an aarch64 processor, run under qemu."""

    def __init__(self, library: str, features: str, folder: Path) -> None:
        """Compile it for a processor with ``features`` (`tests.helpers.aarch64`)."""
        from pi2.backends.blocks.program import Program
        from pi2.backends.compiler.compile import aim

        spec = BlockSpec(
            library=library, architecture="aarch64", features=tuple(sorted(ARM_FEATURES[features]))
        )
        self.lanes = spec.isa.lanes
        program = Program(spec)
        target = aim(program.target, "aarch64-linux-gnu")
        objects = program.write_objects(folder, target, lambda label, share: None)
        names = " ".join(f"X({name})" for name in program.list_kernels())
        self._program = folder / f"{library}-{features}"
        assert COMPILER is not None
        harness = Path(__file__).parent.parent / "backend" / "blocks_harness.c"
        subprocess.run(
            [
                *(COMPILER, "-O1", "-static", f"-DKERNELS={names}", str(harness)),
                *(*map(str, objects), "-o", str(self._program), "-lm"),
            ],
            check=True,
        )

    def run(self, case: Case) -> None:
        given = [case.values[name] for name in FIELDS[case.kernel]]
        message = struct.pack("<qq", case.items, len(given))
        for value in given:
            if isinstance(value, np.ndarray):
                message += struct.pack("<qq", value.nbytes, 0) + value.tobytes()
            else:
                message += struct.pack("<qq", -1, _give(value))
        assert EMULATOR is not None
        done = subprocess.run(
            [EMULATOR, "-cpu", "max", str(self._program), case.kernel],
            input=message,
            capture_output=True,
            check=True,
        )
        place = 0
        for value in given:
            if isinstance(value, np.ndarray):
                found = np.frombuffer(done.stdout, value.dtype, value.size, place)
                value[...] = found.reshape(value.shape)
                place += value.nbytes
        assert place == len(done.stdout)


def _make_table(case: Case) -> I64:
    assert set(case.values) == set(FIELDS[case.kernel]), set(case.values) ^ set(FIELDS[case.kernel])
    numbers: I64 = np.array([_give(case.values[name]) for name in FIELDS[case.kernel]], np.int64)
    return numbers


def _split(items: int) -> list[tuple[int, int]]:
    """Return two parts, as two threads take them."""
    return [(0, items // 2), (items // 2, items)]


def _give(value: Any) -> int:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return int(value.ctypes.data)
    return put_float(value) if isinstance(value, float) else int(value)


class RandomWeights:
    """Tensors of a model with random numbers, made when they are asked for."""

    def __init__(self, model: Model, formats: Sequence[str], seed: int = 0) -> None:
        self._model = model
        self._formats = formats
        self._seed = seed
        self._made: dict[tuple[str, int], Weight | None] = {}
        self.neighbours = False

    def __call__(self, key: str, layer: int, mixer: int = 0) -> Weight | None:
        """See `pi2.backends.blocks.instructions.FindWeight`."""
        if (key, layer) not in self._made:
            self._made[key, layer] = self._make(key, layer)
        return self._made[key, layer]

    def _make(self, key: str, layer: int) -> Weight | None:
        shape = self._find_shape(key, layer)
        if shape is None:
            return None
        generator = np.random.default_rng([self._seed, layer, *key.encode()])
        experts, rows, length = shape
        if rows == 1 and key != "shared_router":
            values = generator.standard_normal((experts, length)) * 0.1
            values = values + (1.0 if "norm" in key and "bias" not in key else 0.0)
            raw = values.astype(np.float32).view(np.uint8).reshape(-1)
            return Weight(format="f32", rows=1, length=length * experts, data=raw)
        if key in ("router", "shared_router"):
            values = generator.standard_normal((rows, length)) * 0.2
            raw = values.astype(np.float32).view(np.uint8).reshape(-1)
            return Weight(format="f32", rows=rows, length=length, data=raw)
        name = self._formats[len(self._made) % len(self._formats)]
        own = find_format(name)
        if length % own.block:
            own = find_format("q8_0" if length % 32 == 0 else "f32")
        # About as large as weights are.
        size = np.std(own.decode(make_blocks(own, 64, generator).reshape(1, -1)))
        spread = float(0.01 * 0.06 / size)
        count = experts * rows * length // own.block
        raw = make_blocks(own, count, generator, spread).reshape(-1)
        return Weight(
            format=own.name,
            rows=rows,
            length=length,
            data=np.ascontiguousarray(raw),
            experts=experts,
            neighbours=self.neighbours,
        )

    def _find_shape(self, key: str, layer: int) -> tuple[int, int, int] | None:
        """Experts, rows and length of a tensor; None if the model has none of that key."""
        model, own = self._model, find_attention(self._model, layer)
        hidden, ffn = model.shape.hidden, model.shape.ffn
        query, keys = own.query, own.keys
        shapes = {
            "embedding": (model.shape.vocab, hidden),
            "head": None if model.tied_head else (model.shape.vocab, hidden),
            "query": (query, hidden),
            "key": (keys, hidden),
            "value": (keys, hidden),
            "query_bias": (1, query),
            "key_bias": (1, keys),
            "value_bias": (1, keys),
            "query_norm": (1, own.head_dim),
            "key_norm": (1, own.head_dim),
            "output": (hidden, query),
            "output_bias": (1, hidden),
            "attention_sub_norm": (1, query),
            "ffn_sub_norm": (1, ffn),
            "sinks": (1, own.heads),
            "gate": (ffn, hidden),
            "up": (ffn, hidden),
            "gate_bias": (1, ffn),
            "up_bias": (1, ffn),
            "down": (hidden, ffn),
            "down_bias": (1, hidden),
            **dict.fromkeys(("attention_norm", "ffn_norm", "final_norm"), (1, hidden)),
        }
        moe = model.moe
        if moe is not None:
            shared = moe.shared_ffn or moe.shared_experts * ffn
            dense, one = moe.dense_ffn or 0, moe.experts
            shapes |= {
                "router": (one, hidden),
                "router_bias": (1, one),
                "choice_bias": (1, one),
                "expert_scale": (1, one),
                "shared_router": (1, hidden),
                "shared_gate": (shared, hidden),
                "shared_up": (shared, hidden),
                "shared_down": (hidden, shared),
                "dense_gate": (dense, hidden),
                "dense_up": (dense, hidden),
                "dense_down": (hidden, dense),
            }
        found = shapes.get(key)
        is_expert = moe is not None and key.removesuffix("_bias") in ("gate", "up", "down")
        experts = moe.experts if moe is not None and is_expert else 1
        return None if found is None else (experts, *found)
