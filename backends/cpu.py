"""The cpu backend: TensorIR kernels, compiled for this machine's instruction set.

Activations are quantised to 16 bits per group of 32, as two int8 planes (`kernels.quantize`).
Why not 8 bits: the demo model's logits over 384 tokens of held-out text, against the reference
backend (float32 activations, the same weights):

=======  ==========================  ==================  =====================================
planes   largest difference,         the same, of the    greedy text of 64 tokens
         of the largest logit        worst single token
=======  ==========================  ==================  =====================================
2        2.6e-4                      4.7e-4              as the reference's, in every mode
1        6.2e-3                      1.1e-2              low-rank mode differs from it
=======  ==========================  ==================  =====================================

1e-2 is what is promised.  The second plane costs nothing where memory is the limit, which is
decoding (`tools/bench_kernels.py`), and about half of the rate where arithmetic is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.backends.chunk_state import ChunkState, name_other_arrays
from pi2.backends.experts import list_chosen, route, slice_tensor
from pi2.backends.kernels.cache import load_or_compile
from pi2.backends.kernels.isa import ARCHITECTURES, PAIRED_GROUP_BYTES, choose_isa
from pi2.backends.kernels.runtime import Library, find_runtime_library
from pi2.backends.kernels.spec import (
    KEPT,
    KV_BLOCK,
    KV_DTYPES,
    PANEL,
    PARTS,
    SPANS,
    UNPACKED,
    KernelSpec,
)
from pi2.backends.protocol import BuildRequest
from pi2.backends.rope import compute_rope_tables
from pi2.plan.layout import GROUP, round_up
from pi2.plan.model import Model
from pi2.plan.sizes import LOGIT_ROWS
from pi2.plan.tensor_names import EMBEDDING, FINAL_NORM, HEAD, POSITIONS, name_layer_tensor

NAME = "cpu"
PLANES = 2
_MOST_ARENAS = 256
"""Views of arenas that are remembered."""

_U8 = npt.NDArray[np.uint8]
_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]
_F32 = npt.NDArray[np.float32]


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return what keeps the kernels from running here."""
    obstacles = []
    if architecture not in ARCHITECTURES:
        obstacles.append(f"no kernels for architecture {architecture}")
    if find_runtime_library() is None:
        obstacles.append("apache-tvm is not installed")
    if importlib.util.find_spec("tvm_ffi") is None:
        obstacles.append("apache-tvm-ffi is not installed")
    return obstacles


def build(request: BuildRequest) -> CpuExecutor:
    """Compile the kernels unless they are cached, and make the executor."""
    spec = make_spec(request)
    library = Library(load_or_compile(spec, request.progress), request.threads, request.cores)
    return CpuExecutor(request, spec, library)


def make_spec(request: BuildRequest) -> KernelSpec:
    """Return what the kernels for a request depend on."""
    model, shape = request.model, request.model.shape
    ranks = {
        request.tensors[name].rows // model.expert_count
        for layer in range(shape.layers)
        if (name := name_layer_tensor(layer, "predictor_in")) in request.tensors
    }
    return KernelSpec(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        epsilon=model.norm.epsilon,
        activation=model.ffn.activation,
        threshold=model.ffn.threshold if model.ffn.activation == "fatrelu" else 0.0,
        qkv_bias=model.attention.qkv_bias,
        window=model.attention.sliding_window,
        kv=request.kv_type,
        attention=model.quantization.attention,
        embedding=model.quantization.embedding,
        head=model.quantization.embedding if model.tied_head else model.quantization.head,
        ffn=request.bundle.precision,
        gate_rows=request.bundle.precision if request.gate_rows is not None else None,
        predictor=model.quantization.predictor if ranks else None,
        ranks=tuple(sorted(ranks)),
        stride=request.bundle.stride,
        threads=request.threads,
        planes=PLANES,
        chunk_planes=1 if request.chunk_type == "int8" else PLANES,
        # With gates that are known there is less to read in a row: measured in docs/performance.md.
        phases=request.phases or (1 if request.gate_rows is None else 2),
        architecture=request.architecture,
        features=tuple(sorted(request.features)),
        norm=model.norm.kind,
        norm_bias=model.norm.bias,
        parallel=model.residual == "parallel",
        keeps_input=model.residual == "parallel" or _routes_by_input(model),
        experts=0 if model.moe is None else model.moe.experts,
        positions=model.positions is not None,
        output_bias=model.attention.output_bias,
        head_norm=model.attention.head_norm,
        score_scale=model.attention.scale,
        score_cap=model.attention.softcap,
        some_full=model.attention.sliding_window is not None
        and model.attention.window_layers is not None,
        gated=model.ffn.gated,
        ffn_bias=model.ffn.bias,
        embedding_factor=model.multipliers.embedding,
        residual_factor=model.multipliers.residual,
        logit_factor=model.multipliers.logits,
        logit_cap=model.logit_softcap,
    )


def _routes_by_input(model: Model) -> bool:
    """Whether a router reads what attention reads."""
    return model.moe is not None and model.moe.router_input == "layer"


class _Workspace:
    """Arrays of the executor, taken from the plan's segments and wrapped for the kernels."""

    def __init__(self, request: BuildRequest, library: Library) -> None:
        self._request = request
        self._library = library
        self._kept: list[npt.NDArray[Any]] = []

    def make(self, dtype: str, *shape: int, segment: str = "workspace") -> npt.NDArray[Any]:
        """Return a zeroed array of the segment."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        raw = self._request.allocate(segment, round_up(max(size, 1), 64))
        return raw[:size].view(kind).reshape(shape)

    def wrap(self, array: npt.NDArray[Any]) -> Any:
        """Return a kernel's view of an array and keep the array."""
        self._kept.append(array)
        return self._library.wrap(array)

    def wrap_tensor(self, name: str) -> tuple[Any, ...]:
        """Return the kernels' views of a tensor of the store: weights, and scales if it has any.

        fp16 weights have no scales: the weights stand in, and are not read as such.
        """
        return self.wrap_part(name, 0, 1)

    def wrap_part(self, name: str, part: int, parts: int) -> tuple[Any, ...]:
        """Return the same of a part of a tensor's rows."""
        tensor = slice_tensor(self._request.tensors[name], part, parts)
        if tensor.precision is None:
            return (self.wrap_floats(np.asarray(tensor.weights).view(np.float32)),)
        weights = self.wrap(np.asarray(tensor.weights).view(np.uint8))
        if tensor.scales is None:
            return (weights, weights)
        return (weights, self.wrap(np.asarray(tensor.scales).view(np.uint8)))

    def wrap_floats(self, values: npt.NDArray[Any]) -> Any:
        """Return a kernel's view of float32 values, of an aligned copy where they lie badly."""
        flat = values.reshape(-1)
        if flat.ctypes.data % 64:
            copy = self.make("float32", len(flat), segment="predictor")
            copy[:] = flat
            flat = copy
        return self.wrap(flat)

    def wrap_norm(self, name: str, bias: bool) -> tuple[Any, ...]:
        """Return the kernels' views of a norm: weight, and bias if it has one."""
        return (*self.wrap_tensor(name), *(self.wrap_tensor(f"{name}_bias") if bias else ()))

    def make_activations(
        self,
        tokens: int,
        length: int,
        planes: int,
        values: _F32 | None = None,
        *,
        tiles: int = 0,
    ) -> tuple[Any, ...]:
        """Return codes, scales, sums and values for ``tokens`` vectors, and ``tiles``, as many as
        there are threads, where the kernels take tokens in pairs."""
        if values is None:
            values = self.make("float32", tokens, length)
        groups = length // GROUP
        even = round_up(tokens, 2) if tiles else tokens
        arrays = (
            self.wrap(self.make("int8", even, planes, length)),
            self.wrap(self.make("float32", even, groups)),
            self.wrap(self.make("int32", tokens, groups)),
            self.wrap(values),
        )
        if not tiles:
            return arrays
        return (*arrays, self.wrap(self.make("int8", tiles, groups * PAIRED_GROUP_BYTES)))


class CpuExecutor:
    """Executor of `pi2.backends.protocol`: one call of a kernel per method."""

    def __init__(self, request: BuildRequest, spec: KernelSpec, library: Library) -> None:
        shape, chunk = request.model.shape, request.chunk
        space = _Workspace(request, library)
        self._space = space
        self._library = library
        self._spec = spec
        self._chunk = chunk
        self._context = round_up(request.context, KV_BLOCK)
        self._threads = spec.threads
        neurons = request.neurons
        self._neurons = neurons

        x = space.wrap(space.make("float32", chunk, spec.hidden))
        y = space.wrap(space.make("float32", chunk, spec.hidden))
        normalized = space.make("float32", chunk, spec.hidden)
        isa = choose_isa(frozenset(spec.features), spec.architecture)
        tiles = spec.threads if isa.pairs else 0
        hidden = space.make_activations(chunk, spec.hidden, spec.planes, normalized, tiles=tiles)
        mixed = space.make_activations(chunk, spec.width, spec.planes, tiles=tiles)
        qkv = space.wrap(space.make("float32", chunk, spec.qkv_rows))
        tables = compute_rope_tables(request.model.rope, spec.head_dim, request.context)
        rope = []
        for table in tables:
            copy = space.make("float32", *table.shape)
            copy[:] = table
            rope.append(space.wrap(copy))
        self._ids = space.make("int32", chunk)
        self._slots = space.make("int32", neurons)
        self._wanted = space.make("int32", neurons)
        self._indices = space.make("int32", neurons + 1)
        self._found = space.make("int32", 1)
        self._counts = space.make("int32", spec.threads + 1)
        self._logits = space.make("float32", min(chunk, LOGIT_ROWS), spec.vocab)
        self._scores = space.make("float32", neurons)
        self._named_scores = space.make("float32", neurons if spec.experts else 1)
        scores = space.wrap(self._scores)
        lists = [
            space.wrap(space.make(dtype, neurons)) for dtype in ("float32", "float32", "int32")
        ]
        partial = space.wrap(space.make("float32", spec.threads, spec.hidden))
        values = space.wrap(space.make("float32", chunk, PANEL))
        unpacked = space.wrap(space.make("float32", spec.threads, UNPACKED + KEPT, 128))
        self._every = space.make("int32", neurons)
        self._every[:] = np.arange(neurons)

        head = EMBEDDING if request.model.tied_head else HEAD
        self._embed = library.find("embed")
        embed_arguments = (*space.wrap_tensor(EMBEDDING), space.wrap(self._ids), x)
        spans = tuple(
            space.wrap(space.make("float32", spec.heads, SPANS, *size))
            for size in ((spec.head_dim,), (), ())
        )
        # What the FFN reads: with parallel residuals, the layer's input.
        self._moe = request.model.moe
        layer_input = space.make("float32", chunk, spec.hidden) if spec.keeps_input else None
        kept = None if layer_input is None else space.wrap(layer_input)
        before = kept if spec.parallel else x
        weights = space.make("float32", chunk, max(1, spec.experts))
        routes = (space.wrap(weights),) if spec.experts else ()
        self._routers = [
            np.asarray(request.tensors[name_layer_tensor(layer, "router")].weights)
            .view(np.float32)
            .reshape(-1, spec.hidden)
            for layer in range(shape.layers if spec.experts else 0)
        ]
        self._positions = library.find("add_positions") if spec.positions else None
        position_arguments = (*space.wrap_tensor(POSITIONS)[:1], x) if spec.positions else ()
        self._attend = [
            library.find(
                "attend_all"
                if spec.some_full and request.model.find_window(layer) is None
                else "attend"
            )
            for layer in range(shape.layers)
        ]
        inputs = (x,) if kept is None else (x, kept)
        attend_arguments = [
            (*self._bind_attention(layer, inputs, rope, qkv, hidden, mixed), *spans)
            for layer in range(shape.layers)
        ]
        self._begin = library.find("begin_ffn")
        begin_arguments = [
            (
                before,
                *space.wrap_norm(name_layer_tensor(layer, "ffn_norm"), spec.norm_bias),
                *hidden,
                y,
            )
            for layer in range(shape.layers)
        ]
        self._end = library.find("end_ffn")
        end_arguments = [
            (x, y, *space.wrap_tensor(name_layer_tensor(layer, "down_bias")))
            if spec.ffn_bias
            else (x, y)
            for layer in range(shape.layers)
        ]
        gathers = {True: "add_plain_neurons", False: "add_neurons"}
        self._gather = library.find(gathers[not spec.has_gathered_ffn])
        self._gather_dense = library.find(gathers[spec.has_plain_ffn])
        self._gather_slots = space.wrap(self._slots)
        self._gather_every = space.wrap(self._every)
        scratch = (*hidden, *lists, partial) if spec.has_gathered_ffn else (*hidden, partial)
        self._gather_rest = (*scratch, space.wrap(self._counts), y, *routes)
        # Neurons of a dense layer are not counted as predicted and active.
        uncounted = space.make("int32", spec.threads + 1)
        scratch = (*hidden, partial) if spec.has_plain_ffn else (*hidden, *lists, partial)
        gather_uncounted = (*scratch, space.wrap(uncounted), y, *routes)
        self._dense = library.find("add_dense")
        masks = space.wrap(space.make("int32", chunk, PARTS))
        dense_rest = (*hidden, values, masks, unpacked, y, *routes)
        found = (scores, space.wrap(self._indices), space.wrap(self._found))
        self._predict_gate = None
        self._limits: list[tuple[float, ...]] = [()] * shape.layers
        if spec.gate_rows is not None:
            self._predict_gate = library.find("predict_gate")
            if not spec.has_plain_ffn:
                self._gather_open = library.find("add_open_neurons")
            self._gather_gates = (scores, space.wrap(self._wanted))
            assert request.gate_rows is not None
            if spec.is_smooth:
                self._limits = list(request.limits or [(0.0, 0.0)] * shape.layers)
            self._gate_arguments = [
                [(*gates, *hidden, *found) for gates in self._bind_gates(request, layer)]
                for layer in range(shape.layers)
            ]
        self._expert_neurons = [
            order.reshape(request.model.expert_count, -1) for order in request.expert_neurons or ()
        ]
        self._low_rank = self._bind_predictors(request, hidden, found)
        self._head = library.find("logits")
        head_arguments = (
            x,
            *space.wrap_norm(FINAL_NORM, spec.norm_bias),
            *space.wrap_tensor(head),
            *hidden,
        )
        self._head_logits = space.wrap(self._logits)
        self._read = library.find("read_runs")
        self._arenas: dict[int, tuple[_U8, Any]] = {}
        self._now = ChunkState(
            normalized=normalized,
            layer_input=layer_input,
            routes=weights,
            embed=embed_arguments,
            positions=position_arguments,
            attend=attend_arguments,
            begin=begin_arguments,
            dense=dense_rest,
            gather=gather_uncounted,
            end=end_arguments,
            head=head_arguments,
        )
        own = (x, y, *hidden[:4], *routes, *(() if kept is None else (kept,)))
        self._chunks = [self._now]
        for _ in range(request.chunks - 1):
            self._chunks.append(self._add_chunk(self._now, own))

    def _add_chunk(self, first: ChunkState, own: tuple[Any, ...]) -> ChunkState:
        """Make room for another chunk; ``own`` are the views of what ``first`` has for itself."""
        space, chunk, hidden = self._space, self._chunk, self._spec.hidden
        normalized = space.make("float32", chunk, hidden)
        arrays = [space.make("float32", chunk, hidden) for _ in range(2)]
        views = [space.wrap(array) for array in arrays]
        # Where kernels take tokens in pairs, the last one may be alone.
        even = round_up(chunk, 2)
        views += space.make_activations(even, hidden, self._spec.planes, normalized)
        routes, layer_input = first.routes, first.layer_input
        if self._spec.experts:
            routes = space.make("float32", *routes.shape)
            views.append(space.wrap(routes))
        if layer_input is not None:
            layer_input = space.make("float32", chunk, hidden)
            views.append(space.wrap(layer_input))
        others = {id(old): new for old, new in zip(own, views, strict=True)}
        return name_other_arrays(
            first,
            others,
            normalized=normalized,
            routes=routes,
            layer_input=layer_input,
        )

    def _bind_attention(
        self,
        layer: int,
        inputs: tuple[Any, ...],
        rope: list[Any],
        qkv: Any,
        hidden: tuple[Any, ...],
        mixed: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        space, spec = self._space, self._spec
        size = self._context * spec.kv_heads * spec.head_dim
        dtype = KV_DTYPES[spec.kv]
        cache = [space.wrap(space.make(dtype, size, segment="kv")) for _ in range(2)]
        if spec.kv == "int8":
            size = self._context * spec.kv_heads
            cache += [space.wrap(space.make("float16", size, segment="kv")) for _ in range(2)]

        def wrap_if(there: bool, *kinds: str) -> list[Any]:
            names = [name_layer_tensor(layer, kind) for kind in kinds if there]
            return [view for name in names for view in space.wrap_tensor(name)]

        return (
            *inputs,
            *space.wrap_norm(name_layer_tensor(layer, "attention_norm"), spec.norm_bias),
            *space.wrap_tensor(name_layer_tensor(layer, "qkv")),
            *wrap_if(spec.qkv_bias, "qkv_bias"),
            *wrap_if(spec.head_norm, "query_norm", "key_norm"),
            *space.wrap_tensor(name_layer_tensor(layer, "output")),
            *wrap_if(spec.output_bias, "output_bias"),
            *rope,
            *cache,
            qkv,
            *hidden,
            *mixed,
        )

    def _bind_gates(self, request: BuildRequest, layer: int) -> list[tuple[Any, ...]]:
        """Return views of the gate rows, scales and biases of each of a layer's experts."""
        assert request.gate_rows is not None
        rows, scales = request.gate_rows[layer]
        bound = []
        for expert in range(request.model.expert_count):
            size = request.model.shape.ffn
            part = slice(expert * size, (expert + 1) * size)
            weights = self._space.wrap(rows[part])
            views: tuple[Any, ...] = (weights,)
            views += (weights if scales is None else self._space.wrap(scales[part].view(np.uint8)),)
            if request.gate_biases is not None:
                views += (self._space.wrap_floats(request.gate_biases[layer][part]),)
            bound.append(views)
        return bound

    def _bind_predictors(
        self, request: BuildRequest, hidden: tuple[Any, ...], found: tuple[Any, ...]
    ) -> list[tuple[Any, list[tuple[Any, ...]]]]:
        """Return kernel and arguments of every expert for each layer; empty if the model has no
        predictors."""
        spec, space = self._spec, self._space
        if not spec.ranks:
            return []
        middle = {rank: space.make_activations(1, rank, spec.planes) for rank in spec.ranks}
        bound = []
        for layer in range(request.model.shape.layers):
            parts = request.model.expert_count
            names = [
                name_layer_tensor(layer, f"predictor_{part}") for part in ("in", "out", "bias")
            ]
            rank = request.tensors[names[0]].rows // parts
            arguments = [
                (
                    *space.wrap_part(names[0], expert, parts),
                    *space.wrap_part(names[1], expert, parts),
                    *space.wrap_part(names[2], expert, parts),
                    *hidden,
                    *middle[rank],
                    *found,
                )
                for expert in range(parts)
            ]
            bound.append((self._library.find(f"predict_low_rank_{rank}"), arguments))
        return bound

    def _wrap_arena(self, arena: _U8) -> Any:
        """Return the kernels' view of an arena; the same array is wrapped once."""
        known = self._arenas.get(id(arena))
        if known is not None and known[0] is arena:
            return known[1]
        view = self._library.wrap(arena)
        if len(self._arenas) >= _MOST_ARENAS:
            self._arenas.clear()
        # The array is kept, so that its identity stays its own.
        self._arenas[id(arena)] = (arena, view)
        return view

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        self._now = self._chunks[number]

    def embed(self, tokens: _I32) -> None:
        """Set x to the embeddings of ``tokens``."""
        count = len(tokens)
        self._now.tokens = count
        self._ids[:count] = tokens
        self._embed(count, *self._now.embed)

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block."""
        if layer == 0 and self._positions is not None:
            self._positions(self._now.tokens, position, *self._now.positions)
        arguments = self._now.attend[layer]
        self._attend[layer](self._now.tokens, position, self._context, *arguments)

    def begin_ffn(self, layer: int) -> None:
        """Normalise x and clear the FFN's sum."""
        now = self._now
        self._begin(now.tokens, *now.begin[layer])
        if self._moe is not None:
            read = now.normalized
            if self._moe.router_input == "layer" and now.layer_input is not None:
                read = now.layer_input
            tokens = slice(0, now.tokens)
            now.routes[tokens] = route(self._moe, read[tokens], self._routers[layer])

    def list_experts(self) -> _I32:
        """Return the experts that the router chose."""
        return list_chosen(self._now.routes[0]) if self._moe is not None else self._every[:0]

    def predict_low_rank(self, layer: int, threshold: float, experts: _I32 | None = None) -> _I32:
        """Return the neurons whose predictor score reaches ``threshold``."""
        kernel, arguments = self._low_rank[layer]
        if self._moe is None:
            kernel(self._neurons, float(threshold), *arguments[0])
            return self._indices[: self._found[0]]
        chosen = self.list_experts() if experts is None else experts
        return self._collect(
            layer, chosen, lambda size, n: kernel(size, float(threshold), *arguments[n])
        )

    def read_scores(self) -> _F32:
        """Return the scores of the last prediction."""
        return self._scores if self._moe is None else self._named_scores

    def predict_gate(self, layer: int) -> _I32:
        """Return the neurons whose gate is open."""
        kernel, arguments = self._predict_gate, self._gate_arguments[layer]
        assert kernel is not None, "gate rows were not given to build"
        limits = self._limits[layer][:1]
        if self._moe is None:
            kernel(self._neurons, *limits, *arguments[0])
            return self._indices[: self._found[0]]
        return self._collect(
            layer, self.list_experts(), lambda size, n: kernel(size, *limits, *arguments[n])
        )

    def _collect(self, layer: int, experts: _I32, find: Callable[[int, int], object]) -> _I32:
        """Return the neurons, ascending, that ``find(neurons, expert)`` names of each expert."""
        groups, end = self._expert_neurons[layer], 0
        for expert in experts.tolist():
            find(groups.shape[1], expert)
            count = int(self._found[0])
            named, rows = self._wanted[end : end + count], self._indices[:count]
            groups[expert].take(rows, out=named)
            self._named_scores[named] = self._scores.take(rows)
            end += count
        self._wanted[:end].sort()
        return self._wanted[:end]

    def add_neurons(self, layer: int, arena: _U8, slots: _I32, indices: _I32 | None = None) -> None:
        """Add gathered neurons for one token."""
        count = len(slots)
        self._slots[:count] = slots
        view = self._wrap_arena(arena)
        if indices is None or self._predict_gate is None or self._spec.has_plain_ffn:
            self._gather(count, view, self._gather_slots, *self._gather_rest)
            return
        self._wanted[:count] = indices
        self._gather_open(
            count,
            *self._limits[layer][1:],
            view,
            self._gather_slots,
            *self._gather_rest,
            *self._gather_gates,
        )

    def add_dense(self, layer: int, bundles: _U8) -> None:
        """Add contiguous neurons for all tokens."""
        count = len(bundles)
        view = self._wrap_arena(bundles)
        if self._now.tokens == 1:
            self._gather_dense(count, view, self._gather_every, *self._now.gather)
        else:
            self._dense(count, self._now.tokens, view, *self._now.dense)

    def end_ffn(self, layer: int) -> None:
        """Add the FFN's sum to x."""
        self._end(self._now.tokens, *self._now.end[layer])

    def read_ffn_input(self) -> _F32:
        """Return what the FFN reads, before it was rounded to integers."""
        values: _F32 = np.asarray(self._now.normalized[: self._now.tokens], np.float32)
        return values

    def logits(self, first: int) -> _F32:
        """Return logits of the tokens from ``first`` on, as many as there is room for."""
        count = min(self._now.tokens - first, len(self._logits))
        self._head(first, count, *self._now.head, self._head_logits)
        return self._logits[:count]

    def count_active(self) -> int:
        """Return the non-zero activations since the last call."""
        count = int(self._counts[-1])
        self._counts[-1] = 0
        return count

    def read_runs(
        self,
        fd: int,
        vectors: _I64,
        firsts: _I32,
        counts: _I32,
        offsets: _I64,
        results: _I64,
        start: int,
        step: int,
    ) -> None:
        """Read with preadv, without the GIL."""
        flat = vectors.reshape(-1)
        self._read(fd, start, step, len(firsts), flat, firsts, counts, offsets, results)

    def close(self) -> None:
        """Forget every array."""
        self._arenas.clear()
        for state in self._chunks:
            state.attend.clear()
            state.begin.clear()
        self._low_rank.clear()
