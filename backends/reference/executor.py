"""The executor of the reference backend: every call of the protocol, written to be read."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.arithmetic import list_chosen, make_routers
from pi2.backends.executor import ObservableExecutor, noted
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.attention import Mixing, Part
from pi2.backends.reference.operators import (
    AltUp,
    DenseTensors,
    LayerInputs,
    Prediction,
    activate,
    cap,
    compute_activations,
    enter_layers,
    join_input,
    multiply_down,
)
from pi2.backends.reference.states import ChunkState, begin_chunk
from pi2.memory.granules import expand_stretches
from pi2.model.ffn import count_cutoff_rows
from pi2.model.options import list_own
from pi2.model.tensor import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    GATE_CUTOFF,
    HEAD_BIAS,
    LAYER_EMBEDDING,
    POSITIONS,
    name_layer_tensor,
    name_mixer_norm,
)
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.arithmetic.units import name_head
from pi2.plan.documents.model_parts import SideFfn
from pi2.plan.weights.bundles import join_scales, unpack_part
from pi2.plan.weights.layout import BundleLayout


class ReferenceExecutor(ObservableExecutor):
    """Executor of `pi2.backends.protocol` in numpy."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._layout = request.whole_bundle
        self._model = request.model
        self._dense = DenseTensors(request)
        self._mixing = Mixing(request, self._dense)
        self._routers = make_routers(self._model, self._dense.read)
        self._layer_inputs = LayerInputs(request.model, self._dense.read)
        self._altup = AltUp(request.model, self._dense.read)
        none = np.zeros((0, self._model.shape.stored_hidden), np.float32)
        self._none = none, self._layer_inputs.make_none(), self._altup.make_none()
        """What chunks of no token begin with."""
        self._chunk = self._sequence = self._token = 0
        self._now = begin_chunk(*self._none)
        """The chunk that calls are about."""
        self._others: dict[int, ChunkState] = {}
        """Other chunks."""
        self._step: tuple[Sequence[int], Sequence[int]] | None = None
        """Sequences and positions of a step; None in a chunk."""
        self._head_rows = 0 if request.rows is None else request.rows.head
        """First rows of the head that another unit computes."""
        self._products = none
        self._active = 0
        self._prediction = Prediction(request)

    def select_chunk(self, number: int) -> None:
        self._others[self._chunk] = self._now
        self._chunk = number
        self._now = self._others.get(number) or begin_chunk(*self._none)
        if self._observer is not None:
            self._observer.select_chunk(number)

    def select_sequence(self, number: int) -> None:
        self._sequence = number

    def select_token(self, number: int) -> None:
        self._token = number

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        self.select_chunk(0)
        self.embed(tokens)
        self._step = sequences, positions

    @noted
    def attend_step(self, layer: int) -> None:
        self._attend(layer, 0)

    @noted
    def embed(self, tokens: I32) -> None:
        x = enter_layers(self._model, self._dense.take_rows(EMBEDDING, tokens))
        if self._model.norm.embedding_weights:
            x = self._dense.normalize(x, EMBEDDING_NORM)
        _, added, streams = self._none
        if self._model.layer_embedding is not None:
            rows = np.arange(len(tokens), dtype=np.int32)
            added = self._layer_inputs.make(self._dense.take_rows(LAYER_EMBEDDING, rows), x)
        if self._model.altup is not None:
            streams = self._altup.make(x)
        self._now = begin_chunk(x, added, streams)
        self._token = 0
        self._step = None

    def join(self, given: F32) -> None:
        self._now.x = join_input(
            self._model, self._now.x, given, partial(self._dense.read_layer, 0)
        )

    @noted
    def attend(self, layer: int, position: int) -> None:
        self._attend(layer, position)

    def _attend(self, layer: int, position: int) -> None:
        read, kinds = self.begin_attention(layer, position), self._model.layers
        for number in range(len(self._model.blocks[layer].mixers)):
            if number:
                if kinds is None or not kinds.parallel:
                    read = self._dense.normalize_input(self._now.x, layer, name_mixer_norm(number))
                self._mixing.begin(layer, number, read)
            self.project(layer)
            self.mix(layer, position)
            self.project_output(layer)

    def _list_parts(self, position: int) -> list[Part]:
        if self._step is None:
            return [(slice(0, len(self._now.x)), self._sequence, position)]
        return [
            (slice(row, row + 1), sequence, own)
            for row, (sequence, own) in enumerate(zip(*self._step, strict=True))
        ]

    def begin_attention(self, layer: int, position: int) -> F32:
        now = self._now
        if layer == 0 and self._model.positions is not None:
            table = self._dense.read(POSITIONS)
            now.x = now.x.copy()
            for tokens, _, first in self._list_parts(position):
                now.x[tokens] += table[first : first + tokens.stop - tokens.start]
        if self._model.altup is not None:
            now.x, now.streams = self._altup.predict(layer, now.x, now.streams)
        now.input = now.x
        if self._model.blocks[layer].mixers:
            read = self._dense.normalize_input(now.x, layer, "attention_norm")
            self._mixing.begin(layer, 0, read)
        return self._mixing.read

    def project(self, layer: int) -> None:
        self._mixing.project(layer)

    def put_projected(self, layer: int, values: F32) -> None:
        self._mixing.put_projected(values)

    def mix(self, layer: int, position: int) -> F32:
        return self._mixing.mix(layer, self._list_parts(position))

    def project_output(self, layer: int) -> None:
        output = self._mixing.project_output(layer)
        if output is not None:
            self._add_mixed(layer, output)

    def put_output(self, layer: int, values: F32) -> None:
        self._add_mixed(layer, self._mixing.put_output(values))

    def _add_mixed(self, layer: int, output: F32) -> None:
        self._add_output(output, layer, "attention_output_norm")
        if self._model.altup is not None:
            self._now.x = self._altup.add_laurel(layer, self._now.x, self._mixing.read)

    def _add_output(self, output: F32, layer: int, norm: str) -> None:
        output = self._dense.normalize_output(output, layer, norm)
        self._now.x = self._now.x + output * np.float32(self._model.multipliers.residual)

    @noted
    def begin_ffn(self, layer: int) -> None:
        now = self._now
        x = now.input if self._model.residual == "parallel" else now.x
        now.u = self._dense.normalize_input(x, layer, "ffn_norm")
        now.v = self._read_experts(layer)
        now.y = np.zeros_like(now.v)
        now.squares = np.zeros(len(now.x), np.float32)
        now.cutoffs = self._find_cutoffs(layer)
        moe, has_bias = self._model.moe, self._model.ffn.bias
        if moe is not None:
            now.routes = self._routers[layer].route(self.read_router_input())
        elif has_bias:
            now.y += self._dense.read_layer(layer, "down_bias")[0]
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    def _read_experts(self, layer: int) -> F32:
        """What neurons read [T, neuron width], of what the FFN reads."""
        width = self._model.stored_neuron_width
        if self._model.moe is None or self._model.moe.latent is None:
            return self._now.u
        made = self._now.u @ self._dense.read_layer(layer, "experts_in").T
        return np.pad(made, ((0, 0), (0, width - made.shape[1])))

    def _find_cutoffs(self, layer: int) -> F32 | None:
        """Cutoffs of a layer's gates [T, 1]; None where it has none."""
        deviations = self._model.blocks[layer].ffn.cutoff
        if deviations is None:
            return None
        parts = self._dense.read_layer(layer, GATE_CUTOFF) @ self._now.u.T
        count = count_cutoff_rows(self._model)
        mean, *rest = parts[:count] + parts[count:] if len(parts) > count else parts
        length = np.sqrt(np.square(rest).sum(axis=0))
        return np.asarray((mean + math.copysign(1.0, deviations) * length)[:, None])

    def list_experts(self) -> I32:
        if self._model.moe is None:
            return np.empty(0, np.int32)
        return list_chosen(self._now.routes[self._token])

    def list_chunk_experts(self) -> I32:
        any_routes = np.any(self._now.routes, axis=0) if self._model.moe else np.empty(0)
        return np.flatnonzero(any_routes).astype(np.int32)

    @noted
    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        chosen = self.list_experts() if experts is None else experts
        return self._prediction.find_named(layer, threshold, self._get_input(), chosen)

    def _get_input(self) -> F32:
        """What neurons read of the selected token [1, neuron width]."""
        return self._now.v[self._token : self._token + 1]

    def read_scores(self) -> F32:
        return self._prediction.scores

    @noted
    def predict_gate(self, layer: int) -> I32:
        cutoffs = self._select_cutoffs(slice(self._token, self._token + 1))
        return self._prediction.find_open(layer, self._get_input(), self.list_experts(), cutoffs)

    def _activate(self, bundles: U8, tokens: slice) -> F32:
        """Activations [T, n] of the neurons of ``bundles`` [n, .], which have their scales, for
        ``tokens``."""
        routes = None if self._model.moe is None else self._now.routes[tokens]
        read, cutoffs = self._now.v[tokens], self._select_cutoffs(tokens)
        return compute_activations(self._model, self._layout, read, bundles, routes, cutoffs)

    def _select_cutoffs(self, tokens: slice) -> F32 | None:
        """Cutoffs of the layer's gates for ``tokens`` [n, 1]; None where it has none."""
        return None if self._now.cutoffs is None else self._now.cutoffs[tokens]

    def _join(self, layer: int, bundles: U8, indices: I32 | slice | None) -> U8:
        """Bundles [n, .] with their scales in them, of the neurons ``indices``."""
        if self._request.scales is None:
            return bundles
        assert indices is not None, "scales are resident: indices say which belong to a neuron"
        return join_scales(bundles, self._request.scales[layer], self._request.bundle, indices)

    @noted
    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        bundles = self._join(layer, arena[slots], indices)
        gates = self._now.v[self._token] @ unpack_part(bundles, self._layout, 0).T
        return self._prediction.is_open(gates)

    @noted
    def add_neurons(
        self,
        layer: int,
        arena: U8,
        slots: I32,
        indices: I32 | None = None,
        known: bool = False,
        stretch: int = 1,
    ) -> None:
        slots = expand_stretches(slots, stretch)
        indices = None if indices is None else expand_stretches(indices, stretch)
        bundles = self._join(layer, arena[slots], indices)
        token = slice(self._token, self._token + 1)
        active = self._activate(bundles, token)
        if known and self._model.is_smooth:
            active = np.where(np.abs(active) >= self._prediction.get_limits(layer)[1], active, 0)
        self._active += int(np.count_nonzero(active))
        self._add(active, bundles, token)

    @noted
    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        if self._observer is not None:
            self._observer.add_dense(layer, bundles, first)
        joined = self._join(layer, bundles, slice(first, first + len(bundles)))
        self._add(self._activate(joined, slice(None)), joined, slice(None))

    def _add(
        self, active: F32, bundles: U8, tokens: slice, layout: BundleLayout | None = None
    ) -> None:
        """Add neurons whose activations are known, laid out as the store's or as ``layout``."""
        self._now.squares[tokens] += np.square(active).sum(axis=1)
        self._now.y[tokens] += multiply_down(layout or self._layout, active, bundles)

    def share_input(self) -> tuple[F32, F32 | None]:
        return self._now.v, None if self._model.moe is None else self._now.routes

    def add_sum(self, values: F32) -> None:
        self._now.y += values

    @noted
    def end_ffn(self, layer: int) -> None:
        if self._observer is not None:
            self._observer.end_ffn(layer)
        now = self._now
        if self._model.moe is not None and self._model.ffn.bias:
            # Here, because a plan may change the routes after ``begin_ffn``.
            now.y += self._routers[layer].add_biases(now.routes)
        if self._model.ffn.sub_norm:
            mean = now.squares / np.float32(self._model.layer_neurons)
            now.y = now.y / np.sqrt(mean + np.float32(self._model.norm.epsilon))[:, None]
        moe, side = self._model.moe, self._model.side_ffn
        if moe is not None and moe.latent is not None:
            now.y = now.y @ self._dense.read_layer(layer, "experts_out").T
        if side is not None and side.norms:
            now.y = self._dense.normalize(now.y, name_layer_tensor(layer, "experts_output_norm"))
        if side is not None:
            now.y = now.y + self._compute_side(layer, side)
        self._add_output(now.y, layer, "ffn_output_norm")
        if self._model.altup is not None:
            self._correct_streams(layer)
        elif self._model.layer_embedding is not None:
            now.x = now.x + self._layer_inputs.mix(layer, now.x, now.added[layer])
        if self._model.layer_scale:
            now.x = now.x * self._dense.read_layer(layer, "layer_scale")[0, 0]
        for own, options in list_own(self._model):
            now.x = own.compute(now.x, options, partial(self._dense.read_layer, layer))

    def _correct_streams(self, layer: int) -> None:
        """Correct what the layer has predicted, and add its own embedding to all streams but x."""
        altup, now = self._altup, self._now
        now.x, now.streams = altup.correct(layer, now.x, now.input, now.streams)
        read = altup.scale_gate_input(layer, now.x)
        now.streams = now.streams + self._layer_inputs.mix(layer, read, now.added[layer])

    def _compute_side(self, layer: int, side: SideFfn) -> F32:
        u, is_gated = self._now.u, self._model.ffn.gated
        if side.norms:
            u = self._dense.normalize(self._now.x, name_layer_tensor(layer, "side_norm"))
        terms = np.split(u @ self._dense.read_layer(layer, "side_in").T, 1 + is_gated, axis=1)
        value = activate(self._model, terms[0], terms[1] if is_gated else None)
        down = self._dense.read_layer(layer, "side_down")
        padding = ((0, 0), (0, down.shape[1] - value.shape[1]))
        output = np.pad(value, padding) @ down.T
        if not side.norms:
            return np.asarray(output)
        return self._dense.normalize(output, name_layer_tensor(layer, "side_output_norm"))

    def expect(self, end: int) -> None:
        self._mixing.attention.expect(end)

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        return self._mixing.attention.kept.copy(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        self._mixing.attention.kept.put(sequence, first, end, kept)

    def read_state(self, sequence: int) -> F32:
        states = self._mixing.states
        return np.zeros(0, np.float32) if states is None else states.read(sequence)

    def put_state(self, sequence: int, state: F32) -> None:
        if self._mixing.states is not None:
            self._mixing.states.put(sequence, state)

    def read_router_input(self) -> F32:
        now = self._now
        kind = "ffn" if self._model.moe is None else self._model.moe.router_input
        return {"ffn": now.u, "layer": now.input, "stream": now.x}[kind]

    def read_routes(self) -> F32:
        return self._now.routes

    def read_cutoffs(self) -> F32 | None:
        return self._now.cutoffs

    def read_head_input(self, first: int) -> F32:
        tokens = slice(first, first + LOGIT_ROWS)
        x = self.join_streams(self._now.x[tokens], self._now.streams[:, tokens])
        return self._dense.normalize(x, FINAL_NORM)

    def join_streams(self, x: F32, streams: F32) -> F32:
        """Input of the last norm [T, hidden], from x and the other ``streams``."""
        return x if self._model.altup is None else self._altup.join(x, streams)

    @noted
    def logits(self, first: int) -> F32:
        own = self._head_rows
        head = self._dense.read(name_head(self._model))
        x = self.read_head_input(first)
        self._products = np.zeros((len(x), len(head)), np.float32)
        self._products[:, own:] = x @ head[own:].T
        return self._finish_logits()

    def put_logits(self, values: F32) -> F32:
        self._products[:, : values.shape[1]] = values
        return self._finish_logits()

    def _finish_logits(self) -> F32:
        logits = self._products
        if self._model.head_bias:
            logits = logits + self._dense.read(HEAD_BIAS)
        logits = logits * np.float32(self._model.multipliers.logits)
        return cap(logits, self._model.logit_softcap)

    def count_active(self) -> int:
        active, self._active = self._active, 0
        return active

    def close(self) -> None:
        self._now = begin_chunk(*self._none)
        self._others.clear()
