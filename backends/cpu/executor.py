"""The executor of the cpu backend: what each call of the protocol runs."""

from collections.abc import Sequence

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Bits
from pi2.backends.arithmetic import list_chosen, make_routers, read_rows
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.attention import Attention, PartCalls
from pi2.backends.cpu.bindings import Bindings, DividedEnds
from pi2.backends.cpu.neurons import Neurons
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.workspace import Scratch, Workspace, count_tokens, make_arrays
from pi2.backends.executor import ExecutorObserver, PartGroup
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest, add_one_by_one
from pi2.formats import find_packing
from pi2.memory.granules import expand_stretches
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.weights.layout import GROUP, Precision, split_lanes


def order_by_lanes(hidden: int, precision: Precision) -> I32 | None:
    """Elements [hidden] in *lane order* (`pi2.backends.kernels.neurons`): natural position of each;
    None if both orders are the same."""
    if find_packing(precision).is_plain:
        return None
    blocks, first = [], 0
    for lanes in split_lanes(hidden):
        elements = np.arange(first, first + lanes * GROUP, dtype=np.int32).reshape(lanes, GROUP)
        # Within a block, element e of all its groups comes before element e + 1 of any.
        blocks.append(elements.T.reshape(-1))
        first += lanes * GROUP
    return np.concatenate(blocks)


_NONE: I32 = np.zeros(0, np.int32)


class CpuExecutor:
    """Executor of `pi2.backends.protocol`: one call of a kernel per method."""

    def __init__(self, request: BuildRequest, spec: KernelSpec, library: Library) -> None:
        model, chunk = request.model, count_tokens(request)
        space = Workspace(request, library)
        self._spec = spec
        self._library = library
        self._lanes = order_by_lanes(spec.neuron_width, spec.precision.ffn)
        self._ends = DividedEnds(request)
        self._ids = space.make("int32", chunk)
        self._logits = space.make("float32", min(chunk, LOGIT_ROWS), spec.model.shape.vocab)
        arrays = [make_arrays(space, spec, chunk) for _ in range(request.chunks)]
        tiles = space.make_tiles("hidden", spec, spec.hidden)
        if spec.latent_experts:
            tiles |= space.make_tiles("experts", spec, spec.neuron_width)
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
        self._bindings = Bindings(
            request,
            space,
            spec,
            library,
            self._attention,
            self._neurons,
            self._routers,
            self._ids,
            self._logits,
        )
        self._has_cutoffs = False
        """Whether gates of the layer that is computed have a cutoff."""
        self._chunks = [self._bindings.bind_chunk(own) for own in arrays]
        self._now = self._chunks[0]
        self._bindings.bind_foresight(self._prediction, views)
        self._step_calls = self._bindings.bind_step(self._now, request.step_tokens)

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        self._now = self._chunks[number]
        if self._observer is not None:
            self._observer.select_chunk(number)

    def select_sequence(self, number: int) -> None:
        self._sequence = number

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step."""
        self._token = number
        self._prediction.select_token(number)
        self._neurons.select_token(number)

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Set x to the embeddings of tokens of some sequences."""
        self.select_chunk(0)
        self._embed(tokens, self._step_calls.embed_layers)
        self._step = sequences, positions

    def attend_step(self, layer: int) -> None:
        """Add the attention block of each sequence."""
        assert self._step is not None and self._step_calls.attend, "built for one token"
        sequences, positions = self._step
        count, context = self._now.tokens, self._attention.context
        if layer == 0:
            for add, position in zip(self._step_calls.positions, positions, strict=False):
                add(1, position)
        for calls in self._step_calls.attend[layer]:
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

    def join(self, given: F32) -> None:
        self._ends.join(self._now.arrays.x[: self._now.tokens], given)

    def attend(self, layer: int, position: int) -> None:
        now = self._now
        if layer == 0 and now.positions is not None:
            now.positions(now.tokens, position)
        for attend in now.attend[self._sequence][layer]:
            attend(now.tokens, position, self._attention.context)

    def begin_attention(self, layer: int, position: int) -> F32:
        now = self._now
        if layer == 0 and self._step is None and now.positions is not None:
            now.positions(now.tokens, position)
        elif layer == 0 and self._step is not None:
            for add, place in zip(self._step_calls.positions, self._step[1], strict=False):
                add(1, place)
        return self._ends.normalize_attention(now.arrays.x[: now.tokens], layer)

    def project(self, layer: int) -> None:
        self._find_parts(layer).project(self._now.tokens, 0, self._attention.context)

    def put_projected(self, layer: int, values: F32) -> None:
        self._ends.put_projected(self._attention.qkv[: len(values)], layer, values)

    def mix(self, layer: int, position: int) -> F32:
        count, context = self._now.tokens, self._attention.context
        mix = self._find_parts(layer).mix
        if self._step is None:
            mix[self._sequence](count, position, context)
        else:
            for token, (sequence, place) in enumerate(zip(*self._step, strict=True)):
                mix[sequence](token, place, context)
        return self._attention.mixed[:count]

    def project_output(self, layer: int) -> None:
        self._find_parts(layer).output(self._now.tokens, 0, self._attention.context)

    def put_output(self, layer: int, values: F32) -> None:
        self._ends.put_output(self._now.arrays.x[: len(values)], layer, values)

    def _find_parts(self, layer: int) -> PartCalls:
        # Rows are divided of layers with attention alone.
        return (self._now.parts if self._step is None else self._step_calls.attend)[layer][0]

    def read_head_input(self, first: int) -> F32:
        end = min(self._now.tokens, first + len(self._logits))
        return self._ends.normalize_head(self._now.arrays.x[first:end])

    def put_logits(self, values: F32) -> F32:
        logits: F32 = self._logits[: len(values)]
        self._ends.put_logits(logits, values)
        return logits

    def begin_ffn(self, layer: int) -> None:
        """Normalise x and clear the FFN's sum."""
        now = self._now
        begin = now.begin if self._step is None else self._step_calls.begin
        begin[layer](now.tokens, *self._bindings.begin_given[layer])
        self._has_cutoffs = bool(self._bindings.signs[layer])
        self._prediction.begin(now.tokens)
        if self._moe is not None:
            self._route(layer)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    @property
    def foresees(self) -> bool:
        return self._spec.foresees

    def foresee(self, following: int, layer: int, threshold: float) -> None:
        self._prediction.begin(self._now.tokens)
        self._prediction.foresee(following, layer, threshold)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    def list_foreseen(self) -> I32:
        return self._prediction.list_foreseen()

    def _route(self, layer: int) -> None:
        if not self._bindings.is_routed[layer]:
            routes = self._routers[layer].route(self.read_router_input())
            self._now.arrays.routes[: self._now.tokens] = routes

    def list_experts(self) -> I32:
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
        return self._prediction.read_scores()

    def predict_gate(self, layer: int) -> I32:
        assert self._prediction.has_gates, "gate rows were not given to build"
        return self._prediction.find_open(layer, self.list_experts())

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
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
        self._neurons.add_gathered(layer, arena, slots, indices, known, stretch)

    @property
    def parts(self) -> int:
        return self._spec.parts

    def add_parts(
        self, layer: int, arena: U8, slots: I32, indices: I32, stretch: int, parts: PartGroup
    ) -> None:
        self._neurons.add_parts(layer, arena, slots, indices, stretch, parts)

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
        tokens = self._now.tokens
        if not self._neurons.can_share(tokens, known):
            add_one_by_one(self, layer, arena, slots, indices, named, known, stretch)
        elif len(slots):
            own, numbers = expand_stretches(slots, stretch), expand_stretches(indices, stretch)
            named = named if stretch == 1 else named.repeat(stretch)
            self._neurons.add_shared(layer, arena, own, numbers, named, tokens)

    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
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
        if self._lanes is not None:
            values = values.take(self._lanes, axis=1)
        self._now.arrays.total[: len(values)] += values

    def end_ffn(self, layer: int) -> None:
        """Add the FFN's sum to x."""
        if self._observer is not None:
            self._observer.end_ffn(layer)
        if self._moe is not None and self._spec.ffn.bias:
            # Here, because a plan may change the routes after ``begin_ffn``.
            self.add_sum(self._routers[layer].add_biases(self.read_routes()))
        end = self._now.end if self._step is None else self._step_calls.end
        end[layer](self._now.tokens)

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        for tables in self._attention.ropes.values():
            tables.expect(end)

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        return self._attention.read(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        self._attention.put(sequence, first, end, kept)

    def read_state(self, sequence: int) -> F32:
        states = self._attention.states
        return np.zeros(0, np.float32) if states is None else states.read(sequence)

    def put_state(self, sequence: int, state: F32) -> None:
        if self._attention.states is not None:
            self._attention.states.put(sequence, state)

    def read_router_input(self) -> F32:
        arrays = self._now.arrays
        kind = "ffn" if self._moe is None else self._moe.router_input
        read = arrays.x if kind == "stream" else arrays.normalized
        if kind == "layer" and arrays.layer_input is not None:
            read = arrays.layer_input
        return read[: self._now.tokens]

    def read_routes(self) -> F32:
        """Return the weights of an MoE model's experts."""
        return self._now.arrays.routes[: self._now.tokens]

    def read_cutoffs(self) -> F32 | None:
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
        self._library.close()
        self._neurons.close()
        self._chunks.clear()
