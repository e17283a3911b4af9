"""Kernels in tests: compiled in the test's own process, and numpy in float64 to compare with."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32, F64, I8, U8
from pi2.backends.host import HostLoops, load_host_loops
from pi2.backends.kernels.isa import (
    BLOCK_TOKENS,
    Isa,
    choose_isa,
    count_blocks_bytes,
    count_tile_bytes,
)
from pi2.backends.kernels.spec import KernelSpec, describe_kernels
from pi2.backends.protocol import BuildRequest
from pi2.formats import find_packing
from pi2.machine.cpu import LEVELS, detect_cpu, list_features
from pi2.model.tensor import EMBEDDING, FINAL_NORM, HEAD, name_layer_tensor
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Attention, Rope
from pi2.plan.documents.model_parts import Ffn, Moe, Predictor, Quantization, Shape
from pi2.plan.documents.plan import ActivationType, KvType
from pi2.plan.weights.bundles import slice_part
from pi2.plan.weights.layout import GROUP, Precision, Tensor, lay_out_bundle, split_lanes
from pi2.progress import ignore_progress
from tests.helpers.bundles import pack_bundles

X86_FEATURES: Mapping[str, frozenset[str]] = {
    name: frozenset(list_features("x86-64", name)) for name in LEVELS["x86-64"]
}
"""Features by the name of the schedule that they choose."""


@functools.cache
def make_loops() -> HostLoops:
    return load_host_loops(ignore_progress, frozenset(detect_cpu().features))


DEMO_LIKE: dict[str, Any] = {"hidden": 256, "ffn": 200, "heads": 8, "kv_heads": 4, "head_dim": 32}
"""Of a `RandomModel`."""

ODD: dict[str, Any] = {
    "hidden": 352, "ffn": 77, "heads": 5, "kv_heads": 1, "head_dim": 96, "activation": "silu",
    "bias": True, "tied_head": False, "window": 6, "rank": None,
    "precision": {"ffn": "int8", "attention": "int8", "embedding": "int4", "head": "fp16"},
    "threads": 1, "limits": (0.15, 0.05),
}  # fmt: skip
"""One whose sizes fill no block."""


def find_own_features() -> frozenset[str]:
    return frozenset(detect_cpu().features)


def list_runnable_isas() -> list[str]:
    cpu = detect_cpu()
    if cpu.architecture != "x86-64":
        return []
    own = frozenset(cpu.features)
    return [name for name, features in X86_FEATURES.items() if features <= own]


def make_isa(name: str) -> Isa:
    isa = choose_isa(X86_FEATURES[name], "x86-64")
    assert isa.name == name
    return isa


def allocate(dtype: str, *shape: int) -> npt.NDArray[Any]:
    """Return a zeroed array that begins at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size].view(dtype).reshape(shape)


def align(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy = allocate(array.dtype.name, *array.shape)
    copy[...] = array
    copy.flags.writeable = False
    return copy


def allocate_segment(_segment: str, size: int) -> U8:
    """Stand in for the budget's allocator."""
    return allocate("uint8", size)


@functools.lru_cache(maxsize=256)
def compile_kernel(emit: Callable[[Any], None], isa: Isa) -> Callable[..., None]:
    import tvm

    from pi2.backends.compiler.compile import generate, make_target
    from pi2.backends.compiler.vectors import make_function

    module = tvm.IRModule({"kernel": make_function("kernel", emit)})
    kernel = tvm.runtime.Executable(generate(module, make_target(isa))).jit()["kernel"]

    def call(*arguments: Any) -> None:
        kernel(*(a.reshape(-1) if isinstance(a, np.ndarray) else a for a in arguments))

    return call


_programs: list[dict[tuple[str, KernelSpec], Callable[..., None]]] = [{}]
"""Compiled functions of specs; the last one counts."""


def compile_program(name: str, spec: KernelSpec) -> Callable[..., None]:
    """Compile one function of a spec; see `compile_anew` where its emitter is replaced."""
    from pi2.backends.kernels.program import Program

    compiled, key = _programs[-1], (name, spec)
    if key not in compiled:
        program = Program(spec)
        compiled[key] = compile_kernel(program.list_functions()[name], program.isa)
    return compiled[key]


@contextmanager
def compile_anew() -> Iterator[None]:
    """Use no kernels from before, and leave none behind: for tests that replace what emits them."""
    _programs.append({})
    try:
        yield
    finally:
        _programs.pop()


@functools.cache
def make_multiply(
    isa: Isa, length: int, precision: Precision, planes: int, threads: int
) -> Callable[[Any], None]:
    """A kernel (rows, tokens; weights, scales, activations; y [tokens, rows])."""
    from tvm.tirx.script import builder as T

    from pi2.backends.compiler import vectors as v
    from pi2.backends.kernels.matrix import Matrix, emit_multiply
    from pi2.backends.kernels.schedule import take_activations

    def emit(take: Any) -> None:
        rows, tokens = take.take_number("rows"), take.take_number("tokens")
        matrix = Matrix(
            weights=take.take_array("weights", "uint8"),
            scales=take.take_array("scales", "uint8"),
            rows=rows,
            length=length,
            precision=precision,
        )
        x = take_activations(take, "x", length, planes, tokens, planes)
        y = take.take_array("y", "float32")

        def keep(token: Any, row: Any, value: Any) -> None:
            v.store(y, token * rows + row, value, 1)

        emit_multiply(isa, threads, matrix, x, (T.int32(0), tokens), keep)

    return emit


def allocate_activations(tokens: int, length: int, planes: int) -> list[npt.NDArray[Any]]:
    return [
        allocate("int8", tokens, planes, length),
        allocate("float32", tokens, length // GROUP),
        allocate("int32", tokens, length // GROUP),
        allocate("float32", tokens, length),
    ]


def allocate_blocks(isa: Isa, threads: int, tokens: int, length: int, planes: int) -> list[I8]:
    """Return what schedules that multiply tokens in tiles take for a chunk."""
    if not isa.blocks:
        return []
    tiles = allocate("int8", threads, count_tile_bytes(length))
    return [tiles, allocate("int8", -(-tokens // BLOCK_TOKENS), count_blocks_bytes(length, planes))]


def quantize_activations(x: F32, planes: int) -> tuple[list[npt.NDArray[Any]], F64]:
    """Quantise as the kernels do; return their four arrays, and the values that they stand for."""
    tokens, length = x.shape
    if planes == 4:
        arrays = allocate_activations(tokens, length, planes)
        arrays[0].view(np.float32).reshape(tokens, length)[:] = put_in_lane_order(x)
        arrays[3][:] = x
        return arrays, x.astype(np.float64)
    limit = 127 * 256 if planes == 2 else 127
    groups = x.reshape(tokens, -1, GROUP)
    largest = np.abs(groups).max(-1)
    safe = np.where(largest < 1e-30, np.float32(1), largest)
    factor = np.where(largest < 1e-30, np.float32(0), np.float32(limit) / safe)
    codes = np.rint(groups * factor[..., None].astype(np.float32)).astype(np.int64)
    scales = np.where(largest < 1e-30, np.float32(0), largest * np.float32(1.0 / limit))
    arrays = allocate_activations(tokens, length, planes)
    high = (codes + 128) >> 8
    parts = [high, codes - 256 * high] if planes == 2 else [codes]
    for plane, part in enumerate(parts):
        flat = part.reshape(tokens, length).astype(np.int8)
        arrays[0][:, plane] = find_packing("int8").pack(flat).view(np.int8)
    arrays[1][:] = scales
    arrays[2][:] = -8 * codes.sum(-1)
    arrays[3][:] = x
    stands_for = codes * scales.astype(np.float64)[..., None]
    return arrays, stands_for.reshape(tokens, length)


def leave_lane_order(y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return sums [tokens, hidden] of the FFN's kernels in natural order."""
    places = put_in_lane_order(np.arange(y.shape[1], dtype=np.float32)[None])[0].astype(int)
    return y[:, np.argsort(places)]


def put_in_lane_order(x: F32) -> F32:
    """Rows with element e of group j of a block of L lanes at ``e * L + j``."""
    parts, start = [], 0
    for lanes in split_lanes(x.shape[1]):
        block = x[:, start : start + lanes * GROUP].reshape(len(x), lanes, GROUP)
        parts.append(block.transpose(0, 2, 1).reshape(len(x), -1))
        start += lanes * GROUP
    return np.concatenate(parts, 1)


def measure_error(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    top = float(np.abs(expected).max())
    difference = float(np.abs(found.astype(np.float64) - expected).max())
    return difference / top if top > 0 else difference


def make_model(
    *, activation: str, heads: int = 4, kv_heads: int = 2, head_dim: int = 32,
    window: int | None = None, experts: int = 0, **changes: Any,
) -> Model:  # fmt: skip
    """A model of one layer; ``changes`` are keys of its shape, FFN or quantisation."""
    sizes = {"layers": 1, "hidden": 256, "ffn": 32, "vocab": 100, "context": 32} | {
        key: changes.pop(key) for key in ("hidden", "vocab") if key in changes
    }
    own = {key: changes.pop(key) for key in ("threshold", "gated", "bias") if key in changes}
    mixture = Moe(experts=experts, active_experts=experts, router="none") if experts else None
    assert changes.keys() <= Quantization.model_fields.keys(), changes
    return Model(
        schema_version=2,
        id="random",
        shape=Shape(**sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        attention=Attention(sliding_window=window),
        ffn=Ffn.model_validate({"activation": activation, **own}),
        moe=mixture,
        quantization=Quantization().model_copy(update=changes),  # stores know more formats
    )


_CHOICES = frozenset(
    {
        *("gates", "ranks", "stride", "scales", "threads", "planes", "chunk_planes", "passes"),
        *("architecture", "features", "upper_steps", "sequences", "looks_ahead"),
    }
)


def make_spec(**changes: Any) -> KernelSpec:
    """Return a small spec for this machine; ``changes`` are of `make_model` and of the run."""
    run = {key: changes.pop(key) for key in list(changes) if key in _CHOICES}
    model = make_model(**{"activation": "drelu"} | changes)
    choices: dict[str, Any] = {
        "gates": True, "ranks": (64,),
        "stride": lay_out_bundle(model.shape.hidden, model.quantization.ffn).stride, "threads": 2,
        "planes": 2, "chunk_planes": 2, "architecture": "x86-64",
        "features": tuple(sorted(find_own_features() - {"avx512vnni"})),
    }  # fmt: skip
    return describe_kernels(model, **(choices | run))


class RandomModel:
    """A model with random weights, as a backend sees it."""

    def __init__(
        self, *, layers: int = 2, hidden: int = 64, ffn: int = 96, heads: int = 4,
        kv_heads: int = 2, head_dim: int = 16, vocab: int = 80, context: int = 60, chunk: int = 16,
        threads: int = 2, activation: str = "drelu", threshold: float = 0.0,
        window: int | None = None, bias: bool = False, tied_head: bool = True,
        rank: int | None = 32, rope: Rope | None = None, kv_type: KvType = "fp16",
        chunk_type: ActivationType = "int16", token_type: ActivationType = "int16",
        precision: Mapping[str, Precision] | None = None, features: frozenset[str] | None = None,
        limits: tuple[float, float] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self._rng = np.random.default_rng(seed)
        self._tensors: dict[str, Tensor] = {}
        chosen = {
            "ffn": "int4",
            "attention": "int4",
            "embedding": "int8",
            "head": "int8",
            "predictor": "int8",
        } | dict(precision or {})
        self.model = Model(
            schema_version=3,
            id="random",
            shape=Shape(
                layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads,
                head_dim=head_dim, vocab=vocab, context=context,
            ),
            rope=rope or Rope(),
            attention=Attention(qkv_bias=bias, sliding_window=window),
            ffn=Ffn.model_validate({"activation": activation, "threshold": threshold}),
            tied_head=tied_head,
            quantization=Quantization.model_validate(chosen),
            predictor=None if rank is None else Predictor(rank=rank),
        )  # fmt: skip
        quantization = self.model.quantization
        self._add_matrix(EMBEDDING, vocab, hidden, quantization.embedding, scale=1.0)
        if not tied_head:
            self._add_matrix(HEAD, vocab, hidden, quantization.head)
        self._add_floats(FINAL_NORM, hidden, mean=1.0)
        layout = self.model.lay_out_bundle()
        self.bundles: list[U8] = []
        gates = []
        for layer in range(layers):
            qkv = (heads + 2 * kv_heads) * head_dim
            name = functools.partial(name_layer_tensor, layer)
            self._add_floats(name("attention_norm"), hidden, mean=1.0)
            self._add_floats(name("ffn_norm"), hidden, mean=1.0)
            self._add_matrix(name("qkv"), qkv, hidden, quantization.attention)
            self._add_matrix(name("output"), hidden, heads * head_dim, quantization.attention)
            if bias:
                self._add_floats(name("qkv_bias"), qkv, mean=0.0)
            if rank is not None:
                self._add_matrix(name("predictor_in"), rank, hidden, quantization.predictor)
                self._add_matrix(name("predictor_out"), ffn, rank, quantization.predictor)
                self._add_floats(name("predictor_bias"), ffn, mean=0.0)
            parts = [self._draw(ffn, hidden, hidden**-0.5) for _ in range(3)]
            packed = pack_bundles(parts[0], parts[1], parts[2], layout)
            self.bundles.append(align(packed))
            weights, scales = slice_part(packed, layout, 0)
            gates.append((align(weights), None if scales is None else align(scales)))
        self.request = BuildRequest(
            model=self.model, tensors=self._tensors, bundle=layout, neurons=ffn, chunk=chunk,
            context=context, kv_type=kv_type, chunk_type=chunk_type, token_type=token_type,
            gate_rows=dict(enumerate(gates)), limits=None if limits is None else [limits] * layers,
            threads=threads, features=find_own_features() if features is None else features,
            architecture="x86-64", allocate=allocate_segment, progress=ignore_progress,
        )  # fmt: skip

    def _draw(self, rows: int, length: int, scale: float) -> F32:
        return (self._rng.standard_normal((rows, length)) * scale).astype(np.float32)

    def _add_matrix(
        self, name: str, rows: int, length: int, precision: Precision, scale: float | None = None
    ) -> None:
        values = self._draw(rows, length, length**-0.5 if scale is None else scale)
        weights, scales = find_packing(precision).quantize(values)
        self._tensors[name] = Tensor(
            name=name, rows=rows, length=length, precision=precision, weights=align(weights),
            scales=None if scales is None else align(scales),
        )  # fmt: skip

    def _add_floats(self, name: str, length: int, mean: float) -> None:
        values = np.float32(mean) + self._draw(1, length, 0.1)
        self._tensors[name] = Tensor(
            name=name, rows=1, length=length, precision=None, weights=align(values)
        )
