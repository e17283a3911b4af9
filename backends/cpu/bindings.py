"""Calls of the executor's kernels, bound to the tensors and arrays that they take."""

import math
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.arithmetic import Router, read_rows
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.attention import Attention, PartCalls
from pi2.backends.cpu.neurons import NeighbourCalls, Neurons
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.workspace import (
    Arrays,
    Views,
    Workspace,
    count_tokens,
    make_layer_room,
    make_side_room,
)
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.operators import cap, join_input, normalize
from pi2.model.ffn import list_router_tensors
from pi2.model.tensor import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    STREAM_OUT,
    Place,
    name_layer_tensor,
)
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import AltUp


@dataclass(slots=True, kw_only=True)
class ChunkState:
    """A chunk of T tokens in the course of the layers."""

    tokens: int = 0
    arrays: Arrays
    embed: BoundCall
    embed_layers: BoundCall | None
    """Makes the layers' own bindings, for layers that have some."""
    positions: BoundCall | None
    """Adds learned position vectors, if there are any."""
    attend: list[list[tuple[BoundCall, ...]]]
    """By sequence and layer; empty where rows are divided."""
    parts: list[tuple[PartCalls, ...]]
    """By layer, if rows of the attention block are divided; else empty."""
    begin: list[BoundCall]
    """By layer."""
    neighbours: list[NeighbourCalls]
    """By layer."""
    end: list[BoundCall]
    """By layer."""
    head: BoundCall


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCalls:
    """Calls for a step of several tokens; all others are chunk 0's."""

    attend: list[tuple[PartCalls, ...]]
    """By layer; empty where steps have one token."""
    begin: list[BoundCall]
    """By layer."""
    end: list[BoundCall]
    """By layer."""
    embed_layers: BoundCall | None
    positions: list[BoundCall]
    """By token, for its position."""


class DividedEnds:
    """Norms before projections and head, and operations after products."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._model = request.model

    def _read(self, name: str) -> F32 | None:
        """A float32 tensor [1, n] as a vector; None where the model has none."""
        tensor = self._request.tensors.get(name)
        return None if tensor is None else np.asarray(tensor.weights).view(np.float32).reshape(-1)

    def normalize(self, x: F32, name: str) -> F32:
        """``x`` [T, hidden] by the norm ``name``."""
        weight = self._read(name)
        assert weight is not None, name
        bias = self._read(f"{name}_bias") if self._model.norm.bias else None
        return normalize(self._model.norm, x, weight, bias, self._model.shape.hidden)

    def normalize_attention(self, x: F32, layer: int) -> F32:
        """What a layer's projection reads [T, hidden]."""
        if not self._model.norm.inputs:
            return x
        return self.normalize(x, name_layer_tensor(layer, "attention_norm"))

    def normalize_head(self, x: F32) -> F32:
        """What the head reads [T, hidden]."""
        return self.normalize(x, FINAL_NORM)

    def join(self, x: F32, given: F32) -> None:
        """Set embeddings ``x`` [T, hidden] to what the layer of an MTP head reads."""

        def read(kind: str) -> F32:
            return read_rows(self._request.tensors[name_layer_tensor(0, kind)])

        x[:] = join_input(self._model, x, given, read)

    def put_projected(self, qkv: F32, layer: int, values: F32) -> None:
        """Set the first columns of ``qkv`` [T, rows] to ``values`` [T, n] and their biases."""
        bias = self._read(name_layer_tensor(layer, "qkv_bias"))
        count = values.shape[1]
        qkv[:, :count] = values if bias is None else values + bias[:count]

    def put_output(self, x: F32, layer: int, values: F32) -> None:
        """Add ``values`` [T, n] and their biases to the first columns of ``x`` [T, hidden]."""
        bias = self._read(name_layer_tensor(layer, "output_bias"))
        count = values.shape[1]
        total = values if bias is None else values + bias[:count]
        x[:, :count] += total * np.float32(self._model.multipliers.residual)

    def put_logits(self, logits: F32, values: F32) -> None:
        """Set the first columns of ``logits`` [T, vocab] by ``values`` [T, n]."""
        count = values.shape[1]
        bias = self._read(HEAD_BIAS) if self._model.head_bias else None
        total = values if bias is None else values + bias[:count]
        total = total * np.float32(self._model.multipliers.logits)
        logits[:, :count] = cap(total, self._model.logit_softcap)


class Bindings:
    """Binds kernels for the chunks of prompts and for steps."""

    def __init__(
        self,
        request: BuildRequest,
        space: Workspace,
        spec: KernelSpec,
        library: Library,
        attention: Attention,
        neurons: Neurons,
        routers: list[Router],
        ids: I32,
        logits: F32,
    ) -> None:
        """``ids`` [chunk]: tokens to embed; ``logits`` [n, vocab] receives n tokens' logits."""
        model, layers = request.model, range(request.model.shape.layers)
        chunk = count_tokens(request)
        self._space = space
        self._spec = spec
        self._library = library
        self._attention = attention
        self._neurons = neurons
        self.signs = [_find_sign(model, layer) for layer in layers]
        """By layer, the side of their mean on which gates have a cutoff; nothing without one."""
        self.is_routed = [spec.router is not None and own.weights is not None for own in routers]
        """By layer of an MoE model, whether the call that begins its FFN routes."""
        self.begin_given = [(*self._tell_routed(layer), *self.signs[layer]) for layer in layers]
        """By layer, arguments of a call that begins its FFN, after the number of tokens."""
        self._layers = [space.wrap_layer(layer) for layer in layers]
        """Tensors of each layer; another layer's router fills in for a missing one, unused."""
        spare = next((n for n, routed in enumerate(self.is_routed) if routed), None)
        if spare is not None:
            places = (Place(model), model.blocks[spare].ffn)
            kinds = [tensor.name for tensor in list_router_tensors(*places)]
            router = {key: view for key, view in self._layers[spare].items() if key in kinds}
            self._layers = [router | own for own in self._layers]
        self._cutoff_room: Views = {}
        if spec.cutoff_rows:
            parts = space.make("float32", chunk, spec.cutoff_rows)
            self._cutoff_room["cutoff_parts"] = space.wrap(parts)
        room = make_layer_room(space, spec, chunk)
        side = make_side_room(space, spec, chunk) | room
        self._outputs = [own | side for own in self._layers]
        self._vocabulary = space.wrap_layer(None)
        self._layer_embedding = room | self._vocabulary
        head = EMBEDDING if model.tied_head else HEAD
        self._vocabulary |= space.wrap_own_rows("head", head, spec.rows.head)
        self._vocabulary["ids"] = space.wrap(ids)
        self._vocabulary["logits"] = space.wrap(logits)
        self._vocabulary |= self._make_joining_room(spec.model.altup, len(logits))

    def _make_joining_room(self, altup: AltUp | None, logits: int) -> Views:
        """Return views that join residual streams, for so many ``logits``; none of one stream."""
        if altup is None:
            return {}
        space, count = self._space, altup.others
        rows = space.make("float32", logits, count, self._spec.hidden)
        room = {"joined": space.wrap(rows)}
        for stream in range(count):
            room |= space.wrap_parts(stream, count, **{f"stream_out_{stream}": STREAM_OUT})
        return room

    def bind_chunk(self, arrays: Arrays) -> ChunkState:
        bind, views, vocabulary = self._library.bind, arrays.views, self._vocabulary
        return ChunkState(
            arrays=arrays,
            embed=bind("embed", "tokens", vocabulary, views),
            embed_layers=self._bind_embed_layers("embed_layers", views),
            positions=self._bind_positions(views)
            if self._spec.model.positions is not None
            else None,
            attend=[] if self._spec.divides_attention else self._attention.bind_chunk(views),
            parts=self._attention.bind_parts(views) if self._spec.divides_attention else [],
            begin=self._bind_begin("ffn", views),
            neighbours=[
                self._neurons.bind_chunk(layer, arrays.neuron_views)
                for layer in range(len(self._outputs))
            ],
            end=self._bind_end("end_ffn", arrays),
            head=bind("logits", "first tokens", vocabulary, views),
        )

    def bind_step(self, chunk: ChunkState, tokens: int) -> StepCalls:
        """Return the calls for steps of up to ``tokens`` tokens with the arrays of ``chunk``."""
        arrays, spec = chunk.arrays, self._spec
        begin, end, embed_layers = chunk.begin, chunk.end, chunk.embed_layers
        if spec.sequences and spec.has_other_chunks:
            begin = self._bind_begin("step", arrays.views)
            embed_layers = self._bind_embed_layers("embed_layers_step", arrays.views)
            if spec.multiplies_at_end:
                end = self._bind_end("end_step", arrays)
        positions = []
        if spec.model.positions is not None and spec.sequences:
            positions = [
                self._bind_positions({"x": self._space.wrap(row)}, 1) for row in arrays.x[:tokens]
            ]
        return StepCalls(
            attend=self._attention.bind_step(arrays.views),
            begin=begin,
            end=end,
            embed_layers=embed_layers,
            positions=positions,
        )

    def bind_foresight(self, prediction: Prediction, views: Views) -> None:
        """Bind the kernels that predict ahead and begin the present layer's FFN."""
        read = self._find_input(views)
        prediction.bind_foresight(self._library, self._layers, read, views)

    def _find_input(self, views: Views) -> Views:
        # With parallel residuals, the FFN reads the layer's input.
        return {"x": views["before" if self._spec.model.residual == "parallel" else "x"]}

    def _bind_begin(self, what: str, views: Views) -> list[BoundCall]:
        """Return the calls that begin the FFN of each layer, in a chunk (``ffn``) or a step."""
        read, calls = self._find_input(views), []
        routed = "" if self._spec.router is None else "routed"
        for layer, own in enumerate(self._layers):
            arrays = (read, own, self._cutoff_room, views)
            name, given = f"begin_{what}", f"tokens {routed}"
            if self.signs[layer]:
                name, given = f"begin_cut_{what}", f"{given} sign"
            calls.append(self._library.bind(name, given, *arrays, layer=layer, name="begin_ffn"))
        return calls

    def _bind_embed_layers(self, function: str, views: Views) -> BoundCall | None:
        """Return the call that makes what layers have of their own; None without that."""
        if self._spec.model.layer_embedding is None:
            return None
        arrays = (self._layer_embedding, views)
        return self._library.bind(function, "tokens room", *arrays, name="embed_layers")

    def _bind_end(self, function: str, arrays: Arrays) -> list[BoundCall]:
        views = arrays.views
        # What the FFN has read is not needed any more when it ends.
        views = views | {"whole": views["hidden_values"]}
        calls = []
        for layer, own in enumerate(self._outputs):
            if self._spec.model.layer_embedding is not None:
                own = own | {"layer_input": self._space.wrap(arrays.layer_inputs[layer])}
            bound = self._library.bind(function, "tokens", own, views, layer=layer, name="end_ffn")
            calls.append(bound)
        return calls

    def _tell_routed(self, layer: int) -> tuple[int, ...]:
        return () if self._spec.router is None else (int(self.is_routed[layer]),)

    def _bind_positions(self, views: Views, tokens: int | None = None) -> BoundCall:
        """Return the call that adds learned position vectors, of a chunk or ``tokens``."""
        sizes = None if tokens is None else {"tokens": tokens}
        table = {"table": self._vocabulary["positions_weights"]}
        return self._library.bind("add_positions", "tokens position", table, views, sizes=sizes)


def _find_sign(model: Model, layer: int) -> tuple[float, ...]:
    """1 or -1 where the gates of a layer have a cutoff, above or below their mean."""
    deviations = model.blocks[layer].ffn.cutoff
    return () if deviations is None else (math.copysign(1.0, deviations),)
