"""The executor of the cpu backend: what each call of the protocol runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Bits
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.arrays import (
    Arrays,
    count_tokens,
    make_arrays,
    make_layer_room,
    make_side_room,
)
from pi2.backends.cpu.attention import Attention, PartCalls
from pi2.backends.cpu.chunk_state import ChunkState
from pi2.backends.cpu.divided import DividedEnds
from pi2.backends.cpu.lanes import order_by_lanes
from pi2.backends.cpu.neurons import Neurons
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.scratch import Scratch
from pi2.backends.cpu.workspace import Views, Workspace
from pi2.backends.experts import list_chosen, make_routers, read_rows
from pi2.backends.kernels.spec import AltUpShape, KernelSpec
from pi2.backends.observer import ExecutorObserver
from pi2.backends.protocol import BuildRequest, add_one_by_one
from pi2.backends.stretches import expand_stretches
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_experts import Moe
from pi2.plan.weights.cutoffs import GATE_CUTOFF
from pi2.plan.weights.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    LAYER_EMBEDDING,
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    POSITIONS,
    STREAM_IN,
    STREAM_OUT,
    name_layer_tensor,
)

_SIDE = (
    *("side_norm", "side_in", "side_down", "side_output_norm", "experts_output_norm"),
    "experts_out",
)
"""Tensors of an FFN beside a layer's experts, and of what is behind these."""
_OWN = (
    *("layer_input_gate", "layer_input_output", "layer_input_norm"),
    *("altup_router", "altup_router_norm", "altup_correct", "altup_scale"),
)
"""Tensors of a layer's own embedding, and of what corrects residual streams."""

_NONE: I32 = np.zeros(0, np.int32)


class CpuExecutor:
    """Executor of `pi2.backends.protocol`: one call of a kernel per method."""

    def __init__(self, request: BuildRequest, spec: KernelSpec, library: Library) -> None:
        model, chunk = request.model, count_tokens(request)
        layers = range(model.shape.layers)
        space = Workspace(request, library)
        self._space = space
        self._spec = spec
        self._library = library
        self._lanes = order_by_lanes(spec.neuron_width, spec.ffn)
        self._ends = DividedEnds(request)
        self._ids = space.make("int32", chunk)
        self._logits = space.make("float32", min(chunk, LOGIT_ROWS), spec.vocab)
        arrays = [make_arrays(space, spec, chunk) for _ in range(request.chunks)]
        if spec.isa.pairs:
            tiles = space.make_tiles("hidden", spec.threads, spec.hidden)
            if spec.latent_experts:
                tiles |= space.make_tiles("experts", spec.threads, spec.neuron_width)
            for own in arrays:
                own.views.update(tiles)
        views, read = arrays[0].views, arrays[0].neuron_views
        self._prediction = Prediction(request, space, spec, library, read)
        scratch = Scratch(space, spec)
        self._neurons = Neurons(request, space, spec, library, read, self._prediction, scratch)
        self._attention = Attention(request, space, spec, library, scratch)
        self._moe = model.moe
        self._routers = make_routers(model, lambda name: read_rows(request.tensors[name]))
        self._observer: ExecutorObserver | None = None
        self._sequence = self._token = 0
        self._step: tuple[Sequence[int], Sequence[int]] | None = None
        """Sequences and positions of a step; None in a chunk."""
        self._norms = [
            space.wrap_tensors(
                norm=name_layer_tensor(layer, "ffn_norm"),
                norm_bias=name_layer_tensor(layer, "ffn_norm_bias"),
                experts_in=name_layer_tensor(layer, "experts_in"),
                gate_cutoff=name_layer_tensor(layer, GATE_CUTOFF),
            )
            for layer in layers
        ]
        # With parallel residuals, the FFN reads the layer's input.
        self._read_by_ffn = "before" if spec.parallel else "x"
        read = {"x": views[self._read_by_ffn]}
        self._prediction.bind_foresight(library, self._norms, read, views)
        self._signs = [_find_sign(model, layer) for layer in layers]
        """By layer, the side of their mean on which gates have a cutoff; nothing without one."""
        self._begin_given = [(*self._tell_routed(layer), *self._signs[layer]) for layer in layers]
        """By layer, what a call that begins its FFN is given beside the number of tokens."""
        self._router_views = self._wrap_routers()
        self._has_cutoffs = False
        """Whether gates of the layer that is computed have one."""
        self._cutoff_room: Views = {}
        if spec.cutoff_rows:
            parts = space.make("float32", chunk, spec.cutoff_rows)
            self._cutoff_room["cutoff_parts"] = space.wrap(parts)
        self._outputs = [
            space.wrap_tensors(
                down_bias=name_layer_tensor(layer, "down_bias"),
                output_norm=name_layer_tensor(layer, "ffn_output_norm"),
                layer_scale=name_layer_tensor(layer, "layer_scale"),
                **{kind: name_layer_tensor(layer, kind) for kind in (*_SIDE, *_OWN)},
            )
            for layer in layers
        ]
        room = make_layer_room(space, spec, chunk)
        side = make_side_room(space, spec, chunk) | room
        self._outputs = [own | side for own in self._outputs]
        self._layer_embedding = room | space.wrap_tensors(
            layer_embedding=LAYER_EMBEDDING,
            layer_projection=LAYER_PROJECTION,
            layer_projection_norm=LAYER_PROJECTION_NORM,
            stream_in=STREAM_IN,
        )
        self._vocabulary = space.wrap_tensors(
            embedding=EMBEDDING,
            table=POSITIONS,
            norm=FINAL_NORM,
            norm_bias=f"{FINAL_NORM}_bias",
            head_bias=HEAD_BIAS,
        )
        head = EMBEDDING if model.tied_head else HEAD
        self._vocabulary |= space.wrap_own_rows("head", head, spec.other_head)
        self._vocabulary["ids"] = space.wrap(self._ids)
        self._vocabulary["logits"] = space.wrap(self._logits)
        self._vocabulary |= self._make_joining_room(spec.altup)
        self._chunks = [self._bind_chunk(own) for own in arrays]
        self._now = self._chunks[0]
        self._attend_step = self._attention.bind_step(views)
        self._begin_step, self._end_step = self._now.begin, self._now.end
        self._embed_layers_step = self._now.embed_layers
        if spec.sequences and spec.has_other_chunks:
            self._begin_step = self._bind_begin("step", views)
            self._embed_layers_step = self._bind_embed_layers("embed_layers_step", views)
            if spec.multiplies_at_end:
                self._end_step = self._bind_end("end_step", arrays[0])
        self._step_positions: list[BoundCall] = []
        """Calls for the positions of a step's tokens, one for each."""
        if spec.positions and spec.sequences:
            self._step_positions = [
                self._bind_positions({"x": space.wrap(row)}, 1)
                for row in arrays[0].x[: request.step_tokens]
            ]

    def _make_joining_room(self, altup: AltUpShape | None) -> Views:
        """Return views of what joins several residual streams; none where there is one."""
        if altup is None:
            return {}
        space, count = self._space, altup.others
        rows = space.make("float32", len(self._logits), count, self._spec.hidden)
        room = {"joined": space.wrap(rows)}
        for stream in range(count):
            room |= space.wrap_parts(stream, count, **{f"stream_out_{stream}": STREAM_OUT})
        return room

    def _bind_chunk(self, arrays: Arrays) -> ChunkState:
        """Return the calls of all kernels for a chunk of a prompt."""
        bind, views, vocabulary = self._library.bind, arrays.views, self._vocabulary
        return ChunkState(
            arrays=arrays,
            embed=bind("embed", "tokens", vocabulary, views),
            embed_layers=self._bind_embed_layers("embed_layers", views),
            positions=self._bind_positions(views) if self._spec.positions else None,
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

    def _bind_begin(self, what: str, views: Views) -> list[BoundCall]:
        """Return the calls that begin the FFN of each layer, in a chunk (``ffn``) or a step."""
        read = {"x": views[self._read_by_ffn]}
        calls, routed = [], "" if self._spec.router is None else "routed"
        for layer, own in enumerate(self._norms):
            arrays = (read, own, self._router_views[layer], self._cutoff_room, views)
            name, given = f"begin_{what}", f"tokens {routed}"
            if self._signs[layer]:
                name, given = f"begin_cut_{what}", f"{given} sign"
            calls.append(self._library.bind(name, given, *arrays, layer=layer, name="begin_ffn"))
        return calls

    def _bind_embed_layers(self, function: str, views: Views) -> BoundCall | None:
        """Return the call that makes what layers have of their own; None without that."""
        if self._spec.layer_input is None:
            return None
        arrays = (self._layer_embedding, views)
        return self._library.bind(function, "tokens room", *arrays, name="embed_layers")

    def _bind_end(self, function: str, arrays: Arrays) -> list[BoundCall]:
        """Return the calls that end the FFN of each layer."""
        views = arrays.views
        # What the FFN has read is not needed any more when it ends.
        views = views | {"whole": views["hidden_values"]}
        calls = []
        for layer, own in enumerate(self._outputs):
            if self._spec.layer_input is not None:
                own = own | {"layer_input": self._space.wrap(arrays.layer_inputs[layer])}
            bound = self._library.bind(function, "tokens", own, views, layer=layer, name="end_ffn")
            calls.append(bound)
        return calls

    def _tell_routed(self, layer: int) -> tuple[int, ...]:
        """Return whether the compiled router is the layer's, where there is one."""
        if self._spec.router is None:
            return ()
        return (int(self._routers[layer].weights is not None),)

    def _wrap_routers(self) -> list[Views]:
        """Return views of the router of each layer that calls which begin FFNs take: where the
        layer has none, those of another one, which are not used; nothing where the router is not
        compiled."""
        if self._spec.router is None:
            return [{} for _ in self._norms]
        kinds = ("router", "router_bias", "choice_bias", "shared_router")
        found = {
            layer: self._space.wrap_tensors(
                **{kind: name_layer_tensor(layer, kind) for kind in kinds}
            )
            for layer, router in enumerate(self._routers)
            if router.weights is not None
        }
        spare = next(iter(found.values()))
        return [found.get(layer, spare) for layer in range(len(self._norms))]

    def _bind_positions(self, views: Views, tokens: int | None = None) -> BoundCall:
        """Return the call that adds learned position vectors, of a chunk or ``tokens``."""
        sizes = None if tokens is None else {"tokens": tokens}
        table = {"table": self._vocabulary["table_weights"]}
        return self._library.bind("add_positions", "tokens position", table, views, sizes=sizes)

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        self._now = self._chunks[number]
        if self._observer is not None:
            self._observer.select_chunk(number)

    def select_sequence(self, number: int) -> None:
        """Let chunks be those of another sequence."""
        self._sequence = number

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step."""
        self._token = number
        self._prediction.select_token(number)
        self._neurons.select_token(number)

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Set x to the embeddings of tokens of some sequences."""
        self.select_chunk(0)
        self._embed(tokens, self._embed_layers_step)
        self._step = sequences, positions

    def attend_step(self, layer: int) -> None:
        """Add the attention block of each sequence."""
        assert self._step is not None and self._attend_step, "built for one token"
        sequences, positions = self._step
        count, context = self._now.tokens, self._attention.context
        if layer == 0:
            for add, position in zip(self._step_positions, positions, strict=False):
                add(1, position)
        for calls in self._attend_step[layer]:
            calls.project(count, 0, context)
            for token, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
                calls.mix[sequence](token, position, context)
            calls.output(count, 0, context)

    def embed(self, tokens: I32) -> None:
        """Set x to the embeddings of ``tokens``."""
        self._embed(tokens, self._now.embed_layers)

    def _embed(self, tokens: I32, embed_layers: BoundCall | None) -> None:
        self._step = None
        if self._token:
            self.select_token(0)
        count = len(tokens)
        self._now.tokens = count
        self._ids[:count] = tokens
        self._now.embed(count)
        if embed_layers is not None:
            embed_layers(count, self._now.arrays.layer_inputs.shape[1])

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block."""
        now = self._now
        if layer == 0 and now.positions is not None:
            now.positions(now.tokens, position)
        for attend in now.attend[self._sequence][layer]:
            attend(now.tokens, position, self._attention.context)

    def begin_attention(self, layer: int, position: int) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        now = self._now
        if layer == 0 and self._step is None and now.positions is not None:
            now.positions(now.tokens, position)
        elif layer == 0 and self._step is not None:
            for add, place in zip(self._step_positions, self._step[1], strict=False):
                add(1, place)
        return self._ends.normalize_attention(now.arrays.x[: now.tokens], layer)

    def project(self, layer: int) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        self._find_parts(layer).project(self._now.tokens, 0, self._attention.context)

    def put_projected(self, layer: int, values: F32) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        self._ends.put_projected(self._attention.qkv[: len(values)], layer, values)

    def mix(self, layer: int, position: int) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        count, context = self._now.tokens, self._attention.context
        mix = self._find_parts(layer).mix
        if self._step is None:
            mix[self._sequence](count, position, context)
        else:
            for token, (sequence, place) in enumerate(zip(*self._step, strict=True)):
                mix[sequence](token, place, context)
        return self._attention.mixed[:count]

    def project_output(self, layer: int) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        self._find_parts(layer).output(self._now.tokens, 0, self._attention.context)

    def put_output(self, layer: int, values: F32) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        self._ends.put_output(self._now.arrays.x[: len(values)], layer, values)

    def _find_parts(self, layer: int) -> PartCalls:
        """The parts of the attention block for what is computed now."""
        # Rows are divided of layers with attention alone.
        return (self._now.parts if self._step is None else self._attend_step)[layer][0]

    def read_head_input(self, first: int) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        end = min(self._now.tokens, first + len(self._logits))
        return self._ends.normalize_head(self._now.arrays.x[first:end])

    def put_logits(self, values: F32) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        logits: F32 = self._logits[: len(values)]
        self._ends.put_logits(logits, values)
        return logits

    def begin_ffn(self, layer: int) -> None:
        """Normalise x and clear the FFN's sum."""
        now = self._now
        begin = now.begin if self._step is None else self._begin_step
        begin[layer](now.tokens, *self._begin_given[layer])
        self._has_cutoffs = bool(self._signs[layer])
        self._prediction.begin(now.tokens)
        if self._moe is not None:
            self._route(layer, self._moe)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    @property
    def foresees(self) -> bool:
        """See `pi2.backends.protocol.Foreseer`."""
        return self._spec.foresees

    def foresee(self, following: int, layer: int, threshold: float) -> None:
        """See `pi2.backends.protocol.Foreseer`."""
        self._prediction.begin(self._now.tokens)
        self._prediction.foresee(following, layer, threshold)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    def list_foreseen(self) -> I32:
        """See `pi2.backends.protocol.Foreseer`."""
        return self._prediction.list_foreseen()

    def _route(self, layer: int, moe: Moe) -> None:
        """Set the weights of the experts, unless the compiled router has, and add their biases."""
        arrays, tokens = self._now.arrays, slice(0, self._now.tokens)
        if not any(self._tell_routed(layer)):
            arrays.routes[tokens] = self._routers[layer].route(self.read_router_input())
        if self._spec.ffn_bias:
            self.add_sum(self._routers[layer].add_biases(arrays.routes[tokens]))

    def list_experts(self) -> I32:
        """Return the experts that the router chose."""
        return list_chosen(self._now.arrays.routes[self._token]) if self._moe else _NONE

    def list_chunk_experts(self) -> I32:
        """Return the experts that the router chose for any token."""
        if self._moe is None:
            return _NONE
        return np.flatnonzero(self.read_routes().any(axis=0)).astype(np.int32)

    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        """Return the neurons whose predictor score reaches ``threshold``."""
        chosen = self.list_experts() if experts is None else experts
        return self._prediction.find_named(layer, threshold, chosen)

    def read_scores(self) -> F32:
        """Return the scores of the last prediction."""
        return self._prediction.read_scores()

    def predict_gate(self, layer: int, experts: I32 | None = None, slots: I32 | None = None) -> I32:
        """Return the neurons whose gate is open."""
        if experts is not None and slots is not None:
            return self._prediction.find_open_of(layer, experts, slots)
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
        stretch: int = 1,
    ) -> None:
        """Add gathered neurons for one token."""
        self._neurons.add_gathered(layer, arena, slots, indices, known, stretch)

    def add_twins(self, layer: int, indices: I32) -> None:
        """Add neurons' twins for one token."""
        self._neurons.add_twins(layer, indices)

    def add_named_neurons(
        self,
        layer: int,
        arena: U8,
        slots: I32,
        indices: I32,
        named: I64,
        known: bool = False,
        stretch: int = 1,
    ) -> None:
        """Add gathered neurons to the tokens of a step that have named them."""
        tokens = self._now.tokens
        if not self._neurons.can_share(tokens, known):
            add_one_by_one(self, layer, arena, slots, indices, named, known, stretch)
        elif len(slots):
            own, numbers = expand_stretches(slots, stretch), expand_stretches(indices, stretch)
            named = named if stretch == 1 else named.repeat(stretch)
            self._neurons.add_shared(layer, arena, own, numbers, named, tokens)

    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        """Add contiguous neurons for all tokens."""
        now = self._now
        routes = None if self._moe is None else now.arrays.routes[: now.tokens]
        is_step = self._step is not None
        if self._observer is not None:
            self._observer.add_dense(layer, bundles, first)
        self._neurons.add_neighbours(
            bundles, first, now.tokens, now.neighbours[layer], routes, is_step=is_step
        )

    def share_input(self) -> tuple[F32, F32 | None]:
        """Return what neurons read, before it was rounded to integers, and the routes."""
        read = self._now.arrays.neuron_input[: self._now.tokens]
        return read, None if self._moe is None else self.read_routes()

    def add_sum(self, values: F32) -> None:
        """Add what another unit has computed."""
        if self._lanes is not None:
            values = values.take(self._lanes, axis=1)
        self._now.arrays.total[: len(values)] += values

    def end_ffn(self, layer: int) -> None:
        """Add the FFN's sum to x."""
        if self._observer is not None:
            self._observer.end_ffn(layer)
        end = self._now.end if self._step is None else self._end_step
        end[layer](self._now.tokens)

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        for tables in self._attention.ropes.values():
            tables.expect(end)

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        """See `pi2.backends.protocol.ContextKeeper`."""
        return self._attention.read(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """See `pi2.backends.protocol.ContextKeeper`."""
        self._attention.put(sequence, first, end, kept)

    def read_state(self, sequence: int) -> F32:
        """See `pi2.backends.protocol.StateKeeper`."""
        states = self._attention.states
        return np.zeros(0, np.float32) if states is None else states.read(sequence)

    def put_state(self, sequence: int, state: F32) -> None:
        """See `pi2.backends.protocol.StateKeeper`."""
        if self._attention.states is not None:
            self._attention.states.put(sequence, state)

    def read_ffn_input(self) -> F32:
        """Return what the FFN reads, before it was rounded to integers."""
        return self._now.arrays.normalized[: self._now.tokens]

    def read_router_input(self) -> F32:
        """Return what the router reads."""
        arrays = self._now.arrays
        kind = "ffn" if self._moe is None else self._moe.router_input
        read = arrays.x if kind == "stream" else arrays.normalized
        if kind == "layer" and arrays.layer_input is not None:
            read = arrays.layer_input
        return read[: self._now.tokens]

    def read_routes(self) -> F32:
        """Return the weights of a mixture's experts."""
        return self._now.arrays.routes[: self._now.tokens]

    def read_cutoffs(self) -> F32 | None:
        """Return the cutoffs of the layer's gates."""
        now = self._now
        return now.arrays.cutoffs[: now.tokens, None] if self._has_cutoffs else None

    def logits(self, first: int) -> F32:
        """Return logits of the tokens from ``first`` on, as many as there is room for."""
        count = min(self._now.tokens - first, len(self._logits))
        self._now.head(first, count)
        return self._logits[:count]

    def count_active(self) -> int:
        """Return the non-zero activations since the last call."""
        return self._neurons.count_active()

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of every kernel and of the neurons of prompts."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        self._library.observe(None if observer is None else observer.note_kernel)

    def close(self) -> None:
        """Forget every array."""
        self._library.close()
        self._neurons.close()
        self._chunks.clear()


def _find_sign(model: Model, layer: int) -> tuple[float, ...]:
    """1 or -1 where the gates of a layer have a cutoff, above or below their mean."""
    deviations = model.find_cutoff(layer)
    return () if deviations is None else (math.copysign(1.0, deviations),)
