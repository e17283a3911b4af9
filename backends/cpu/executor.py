"""The executor of the cpu backend: what each call of the protocol runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.chunk_state import Arguments, ChunkState, name_other_arrays
from pi2.backends.compiler.runtime import Library
from pi2.backends.cpu.arrays import Arrays, make_arrays
from pi2.backends.cpu.attention import bind_attention, make_rope_tables
from pi2.backends.cpu.neurons import Neurons
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.workspace import Workspace
from pi2.backends.experts import list_chosen, route
from pi2.backends.kernels.spec import KV_BLOCK, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.weights.layout import round_up
from pi2.plan.weights.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    POSITIONS,
    name_layer_tensor,
)

_NONE: I32 = np.zeros(0, np.int32)


class CpuExecutor:
    """Executor of `pi2.backends.protocol`: one call of a kernel per method."""

    def __init__(self, request: BuildRequest, spec: KernelSpec, library: Library) -> None:
        model, layers = request.model, range(request.model.shape.layers)
        # A step is a chunk of a token of each sequence.
        request = replace(request, chunk=max(request.chunk, request.sequences))
        space = Workspace(request, library)
        self._space = space
        self._spec = spec
        self._chunk = request.chunk
        self._context = round_up(request.context, KV_BLOCK)
        self._ids = space.make("int32", request.chunk)
        self._logits = space.make("float32", min(request.chunk, LOGIT_ROWS), spec.vocab)
        arrays = make_arrays(space, spec, request.chunk, request.sequences)
        self._prediction = Prediction(request, space, spec, library, arrays.hidden)
        self._neurons = Neurons(request, space, spec, library, arrays, self._prediction)
        self._moe = model.moe
        kinds = ["router"] if spec.experts else []
        kinds += ["shared_router"] if model.moe is not None and model.moe.shared_gate else []
        self._routers = [
            tuple(_read_rows(request, name_layer_tensor(layer, kind)) for kind in kinds)
            for layer in layers
        ]
        self._sequence = self._token = 0
        self._step: tuple[Sequence[int], Sequence[int]] | None = None
        """Sequences and positions of a step; None in a chunk."""
        self._x_rows = arrays.x_rows
        self._step_kernels = _find_step_kernels(request, spec, library)
        self._embed = library.find("embed")
        self._positions = library.find("add_positions") if spec.positions else None
        self._attend = [
            library.find(
                "attend_all" if spec.some_full and model.find_window(layer) is None else "attend"
            )
            for layer in layers
        ]
        self._begin = self._begin_step = library.find("begin_ffn")
        if spec.sequences and spec.has_other_chunks:
            self._begin_step = library.find("begin_step")
        self._end = library.find("end_ffn")
        self._head = library.find("logits")
        self._head_logits = space.wrap(self._logits)
        self._ropes = make_rope_tables(request, space, spec)
        self._now = self._bind_first_chunk(request, arrays)
        self._chunks = [self._now]
        for _ in range(request.chunks - 1):
            self._chunks.append(self._add_chunk(self._now, arrays.own))

    def _bind_first_chunk(self, request: BuildRequest, arrays: Arrays) -> ChunkState:
        """Return the arguments of all kernels for the first chunk of a prompt."""
        space, spec, layers = self._space, self._spec, range(request.model.shape.layers)
        x, y, hidden = arrays.x, arrays.y, arrays.hidden
        # What the FFN reads: with parallel residuals, the layer's input.
        before = arrays.kept if spec.parallel else x
        return ChunkState(
            normalized=arrays.normalized,
            layer_input=arrays.layer_input,
            routes=arrays.weights,
            embed=(*space.wrap_tensor(EMBEDDING), space.wrap(self._ids), x),
            positions=(*space.wrap_tensor(POSITIONS)[:1], x) if spec.positions else (),
            attend=bind_attention(request, space, spec, arrays, self._context, self._ropes),
            begin=[
                (
                    before,
                    *space.wrap_norm(name_layer_tensor(layer, "ffn_norm"), spec.norm_bias),
                    *hidden,
                    y,
                )
                for layer in layers
            ],
            dense=self._neurons.dense,
            gather=self._neurons.dense_one,
            end=[self._bind_end(layer, arrays) for layer in layers],
            head=(
                x,
                *space.wrap_norm(FINAL_NORM, spec.norm_bias),
                *space.wrap_tensor(EMBEDDING if request.model.tied_head else HEAD),
                *(space.wrap_tensor(HEAD_BIAS) if spec.head_bias else ()),
                *hidden,
            ),
        )

    def _bind_end(self, layer: int, arrays: Arrays) -> Arguments:
        """Return the arguments of ``end_ffn``."""
        wrap, spec = self._space.wrap_tensor, self._spec
        bias = wrap(name_layer_tensor(layer, "down_bias")) if spec.ffn_bias else ()
        norm: Arguments = ()
        if spec.norm_outputs:
            # What the FFN has read is not needed any more.
            norm = (*wrap(name_layer_tensor(layer, "ffn_output_norm")), arrays.hidden[3])
        return (arrays.x, arrays.y, *bias, *norm)

    def _add_chunk(self, first: ChunkState, own: Arguments) -> ChunkState:
        """Make room for another chunk; ``own`` are the views of what ``first`` has for itself."""
        space, chunk, hidden = self._space, self._chunk, self._spec.hidden
        normalized = space.make("float32", chunk, hidden)
        arrays = [space.make("float32", chunk, hidden) for _ in range(2)]
        views: list[Any] = [space.wrap(array) for array in arrays]
        # Where kernels take tokens in pairs, the last one may be alone.
        even = round_up(chunk, 2)
        views += space.make_activations(even, hidden, self._spec.most_planes, normalized)
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

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        self._now = self._chunks[number]

    def select_sequence(self, number: int) -> None:
        """Let chunks be those of another sequence."""
        self._sequence = number

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step."""
        self._token = number
        self._prediction.select_token(number)
        self._neurons.select_token(number)

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Set x to the embeddings of a token each of several sequences."""
        self.select_chunk(0)
        self.embed(tokens)
        self._step = sequences, positions

    def attend_step(self, layer: int) -> None:
        """Add the attention block of each sequence."""
        assert self._step is not None and self._step_kernels, "built for one sequence"
        sequences, positions = self._step
        count, context, attend = self._now.tokens, self._context, self._now.attend
        if layer == 0 and self._positions is not None:
            table = self._now.positions[:-1]
            for row, position in zip(self._x_rows, positions, strict=False):
                self._positions(1, position, *table, row)
        project, mix, output = self._step_kernels[layer]
        common = attend[0][layer]
        project(count, 0, context, *common)
        for token, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            mix(token, position, context, *attend[sequence][layer])
        output(count, 0, context, *common)

    def embed(self, tokens: I32) -> None:
        """Set x to the embeddings of ``tokens``."""
        self._step = None
        if self._token:
            self.select_token(0)
        count = len(tokens)
        self._now.tokens = count
        self._ids[:count] = tokens
        self._embed(count, *self._now.embed)

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block."""
        if layer == 0 and self._positions is not None:
            self._positions(self._now.tokens, position, *self._now.positions)
        arguments = self._now.attend[self._sequence][layer]
        self._attend[layer](self._now.tokens, position, self._context, *arguments)

    def begin_ffn(self, layer: int) -> None:
        """Normalise x and clear the FFN's sum."""
        now = self._now
        begin = self._begin if self._step is None else self._begin_step
        begin(now.tokens, *now.begin[layer])
        self._prediction.begin(now.tokens)
        if self._moe is not None:
            read = now.normalized
            if self._moe.router_input == "layer" and now.layer_input is not None:
                read = now.layer_input
            tokens = slice(0, now.tokens)
            now.routes[tokens] = route(self._moe, read[tokens], *self._routers[layer])

    def list_experts(self) -> I32:
        """Return the experts that the router chose."""
        return list_chosen(self._now.routes[self._token]) if self._moe is not None else _NONE

    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        """Return the neurons whose predictor score reaches ``threshold``."""
        chosen = self.list_experts() if experts is None else experts
        return self._prediction.find_named(layer, threshold, chosen)

    def read_scores(self) -> F32:
        """Return the scores of the last prediction."""
        return self._prediction.read_scores()

    def predict_gate(self, layer: int) -> I32:
        """Return the neurons whose gate is open."""
        assert self._prediction.has_gates, "gate rows were not given to build"
        return self._prediction.find_open(layer, self.list_experts())

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        """Return whether the gates of gathered neurons are open."""
        return self._neurons.find_open(layer, arena, slots, indices)

    def add_neurons(
        self,
        layer: int,
        arena: U8,
        slots: I32,
        indices: I32 | None = None,
        known: bool = False,
    ) -> None:
        """Add gathered neurons for one token."""
        self._neurons.add_gathered(layer, arena, slots, indices, known)

    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        """Add contiguous neurons for all tokens."""
        now = self._now
        routes = None if self._moe is None else now.routes[: now.tokens]
        is_step = self._step is not None
        self._neurons.add_neighbours(
            layer, bundles, first, now.tokens, now.gather, now.dense, routes, is_step=is_step
        )

    def end_ffn(self, layer: int) -> None:
        """Add the FFN's sum to x."""
        self._end(self._now.tokens, *self._now.end[layer])

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        for tables in self._ropes:
            tables.expect(end)

    def read_ffn_input(self) -> F32:
        """Return what the FFN reads, before it was rounded to integers."""
        values: F32 = np.asarray(self._now.normalized[: self._now.tokens], np.float32)
        return values

    def read_routes(self) -> F32:
        """Return the weights of a mixture's experts."""
        return self._now.routes[: self._now.tokens]

    def logits(self, first: int) -> F32:
        """Return logits of the tokens from ``first`` on, as many as there is room for."""
        count = min(self._now.tokens - first, len(self._logits))
        self._head(first, count, *self._now.head, self._head_logits)
        return self._logits[:count]

    def count_active(self) -> int:
        """Return the non-zero activations since the last call."""
        return self._neurons.count_active()

    def close(self) -> None:
        """Forget every array."""
        self._neurons.close()
        self._prediction.close()
        for state in self._chunks:
            state.attend.clear()
            state.begin.clear()


def _find_step_kernels(
    request: BuildRequest, spec: KernelSpec, library: Library
) -> list[tuple[Any, Any, Any]]:
    """The three parts of the attention block for each layer; empty for a single sequence."""
    if not spec.sequences:
        return []
    everything = [
        spec.some_full and request.model.find_window(layer) is None
        for layer in range(request.model.shape.layers)
    ]
    project, output = library.find("attend_project"), library.find("attend_output")
    mixes = {full: library.find("attend_mix_all" if full else "attend_mix") for full in everything}
    return [(project, mixes[full], output) for full in everything]


def _read_rows(request: BuildRequest, name: str) -> F32:
    """Rows of a tensor in float32 [rows, length]."""
    tensor = request.tensors[name]
    return np.asarray(tensor.weights).view(np.float32).reshape(-1, tensor.length)
