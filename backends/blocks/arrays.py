"""Arrays of a program, and instructions that only need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import PIECE, complete_arguments
from pi2.backends.blocks.instructions import FindWeight, Instruction, Way, Weight, put_float
from pi2.backends.blocks.operands import Area, Extent, Matrix, Routed
from pi2.backends.blocks.room import KvCache, Memory
from pi2.formats.packing import GROUP, round_up
from pi2.model.blocks import list_turns
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.documents.model_parts import Norm as NormOptions

if TYPE_CHECKING:
    from pi2.arrays import F32, I32, I64, U8
    from pi2.backends.arithmetic import RopeTables
    from pi2.backends.blocks.interpreter import Interpreter

_ANY_LENGTH = 1 << 40
_LITTLE = {
    "gate": 2048,
    "cap": 2048,
    "collapse": 1024,
    "quantize_q8_k": 16384,
    "quantize_q8_0": 16384,
}
"""Elements up to which one thread computes a token."""


class ProgramArrays:
    """Adds instructions, and allocates their arrays."""

    def __init__(
        self,
        model: Model,
        find: FindWeight,
        interpreter: Interpreter,
        cache: KvCache,
        memory: Memory,
        extent: Extent,
    ) -> None:
        self._model, self.extent = model, extent
        self.is_stored = extent.outside
        """Whether a neuron store has the tensors (`pi2.model.tensors`)."""
        self.is_real = memory.is_real
        self.take, self.keep = memory.take, memory.keep
        self._planes = max(extent.planes)
        self._find = find
        self._interpreter = interpreter
        self.cache = cache
        self._tokens = tokens = extent.tokens
        self._context = context = extent.positions
        self._threads = extent.threads
        self._areas: dict[tuple[str, int, int], Area] = {}
        self._codes: dict[tuple[object, int, int], int] = {}
        self._grids: dict[str, U8] = {}
        self._vectors: dict[tuple[str, int | None, int, float], F32] = {}
        """By name, layer, mixer and offset, or by length and value."""
        self._orders: dict[tuple[int, ...], I64] = {}
        self._growths: dict[float, F32] = {}
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
        self.numbers: I32 = self.take("int32", tokens)
        """Tokens of a call."""
        self.listed: I32 = self.take("int32", tokens)
        """The same; rows that come with a call change only the first."""
        self.sequences: I32 = self.take("int32", tokens)
        self.positions: I32 = self.take("int32", tokens)
        self.places: I32 = self.take("int32", tokens)
        """Rows of the learned positions."""
        self.known_numbers: I32 = self.take("int32", tokens)
        """Rows of a table that has some tokens: others have the first one."""
        self.turns: dict[tuple[Rope, int], F32] = {
            turn: self.take("float32", 2, context, max(turn[1] // 2, 1))
            for turn in list_turns(model)
        }
        """Cosines and sines."""
        self.ropes: list[RopeTables] = []
        if memory.is_real:
            from pi2.backends.arithmetic import RopeTables

            self.ropes = [RopeTables(*turn, (own[0], own[1])) for turn, own in self.turns.items()]
        experts, active = (
            (1, 1) if model.moe is None else (model.moe.experts, model.moe.active_experts)
        )
        pairs = tokens * active
        self._ones: F32 = self.keep(experts, lambda: 1.0)
        self._zeros: I32 = self.take("int32", pairs)
        self._steps: I32 = self.keep(pairs, lambda: range(pairs), "int32")

    def fill(self, value: float, length: int) -> int:
        """Return the address of so many numbers that are all the same."""
        place = "constant", length, 0, value
        if place not in self._vectors:
            self._vectors[place] = self.keep(length, lambda: value)
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

    def read_scale(self, key: str) -> float:
        """Return the only number of a tensor of the addition's layer, if there are numbers."""
        return float(self.read_values(key)[0]) if self.is_real else 1.0

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
            whole = GROUP if self.is_stored else 16
            stride = width if is_tight else round_up(width, whole)
            array = self.take("float32", stride * each * (tokens or self._tokens))
            self._areas[key] = Area(array.ctypes.data, stride)
        return self._areas[key]

    def read_vector(self, key: str, layer: int | None, offset: float = 0.0, least: int = 0) -> int:
        """Return the address of a vector as float32, filled up with zeros to ``least`` elements; 0
        where the model has none."""
        pattern = getattr(self._model.tensors, key, None)
        # Two keys may name one tensor.
        place = pattern or key, layer, self.mixer, offset
        if place not in self._vectors:
            weight = self.find(key, layer)
            if weight is None:
                return 0
            is_there = weight.format == "f32" and not (offset or weight.added)
            count = weight.rows * weight.experts * weight.length
            if not (is_there and self.is_stored and count >= least):
                kept = self.take("float32", max(count, least), segment="attention")
                self._vectors[place] = kept
                if self.is_real:
                    kept[:count] = weight.read() + offset
            elif not self.is_real:
                return 1
            else:
                assert weight.data is not None
                self._vectors[place] = weight.data.view("float32")
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
        way = Way(address=self._interpreter.find(kernel, own), items=items, each=each, grain=grain)
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
        instruction.values = complete_arguments(instruction.kernel, instruction.values)
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
        each: int = 1,
    ) -> None:
        """Normalise vectors, ``each`` of a token, with ``norm`` or the model's, times ``factor``;
        ``added``: to what y holds."""
        norm = norm or self._model.norm
        offset = norm.weight_offset
        weights = self.read_vector(key, self.layer, offset)
        bias = self.read_vector(f"{key}_bias", self.layer) if norm.bias else 0
        self.add(
            "normalize",
            {
                **x.put("x"),
                "weights": weights,
                "bias": bias,
                **y.put("y"),
                "length": length,
                "epsilon": put_float(norm.epsilon),
                "centred": int(norm.kind == "layernorm"),
                "added": int(added),
                "factor": put_float(factor),
            },
            each=each,
            label=key or "norm",
        )

    def need_scratch(self, size: int) -> None:
        """Let every thread have so many bytes that keep nothing from one instruction to the
        next."""
        self._scratch_size = max(self._scratch_size, size)

    def finish(self) -> U8:
        """Allocate what instructions share that were added so far; return the threads' scratch."""
        self.need_scratch(self.extent.scratch_bytes)
        size = -(-self._scratch_size // 64) * 64
        scratch: U8 = self.take("uint8", size * self._threads)
        partials = self.take("uint8", self._partial_size)
        for instruction in self.instructions:
            if "partials" in instruction.values:
                instruction.values["partials"] = partials.ctypes.data
            if "scratch" in instruction.values:
                instruction.values |= {"scratch": scratch.ctypes.data, "scratch_stride": size}
        return scratch

    def add_term(self, x: Area, y: Area, length: int, weights: int = 0) -> None:
        """Add vectors to others; with the address of weights, give their products instead."""
        values = {**x.put("x"), **y.put("y"), "length": length}
        self.add("term", values | {"weights": weights}, each=1)

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
