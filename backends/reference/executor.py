"""The executor of the reference backend: every call of the protocol, written to be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Bits
from pi2.backends.experts import list_chosen, make_routers
from pi2.backends.observer import ObservableExecutor, noted
from pi2.backends.protocol import BuildRequest, Tensor, add_one_by_one
from pi2.backends.reference.altup import AltUp
from pi2.backends.reference.attention import Attention
from pi2.backends.reference.latent import LatentAttention
from pi2.backends.reference.layer_inputs import LayerInputs
from pi2.backends.reference.neurons import compute_activations, multiply_down
from pi2.backends.reference.operators import activate, cap, normalize
from pi2.backends.reference.prediction import Prediction
from pi2.backends.reference.states import States
from pi2.backends.stretches import expand_stretches
from pi2.plan.arithmetic.rows import DividedRows, name_head
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model_experts import SideFfn
from pi2.plan.documents.model_states import Mixer
from pi2.plan.weights.bundles import join_scales, unpack_part
from pi2.plan.weights.cutoffs import GATE_CUTOFF, count_cutoff_rows
from pi2.plan.weights.layout import BundleLayout, lay_out_twin
from pi2.plan.weights.rounding import dequantize
from pi2.plan.weights.states import describe_state
from pi2.plan.weights.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD_BIAS,
    LAYER_EMBEDDING,
    POSITIONS,
    name_layer_tensor,
    name_mixer_norm,
    name_state_tensor,
)


class ReferenceExecutor(ObservableExecutor):
    """Executor of `pi2.backends.protocol` in numpy."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._layout = request.whole_bundle
        self._model = request.model
        shape = self._model.shape
        latent = self._model.attention.latent
        self._attention = Attention(request) if latent is None else LatentAttention(request)
        self._routers = make_routers(self._model, self._matrix)
        state = describe_state(self._model)
        self._states = None if state is None else States(request, state)
        self._mixer: Mixer = "attention"
        """What mixes tokens now: a layer may have two of them, one after the other."""
        self._number = 0
        """Its number in the layer."""
        self._x = np.zeros((0, shape.stored_hidden), np.float32)
        self._input = self._x
        self._layer_inputs = LayerInputs(request.model, self._matrix)
        self._added = self._layer_inputs.make_none()
        """What layers have of their own for the chunk's tokens [layers, T, width]."""
        self._altup = AltUp(request.model, self._matrix)
        self._streams = self._altup.make_none()
        """Residual streams beside x [streams - 1, T, hidden]."""
        self._cutoffs: F32 | None = None
        """Of the layer's gates [T, 1], where it has them."""
        self._u = self._x
        self._v = self._x
        """What neurons read: u, or what is made of it for experts of another width."""
        self._routes = self._x
        self._y = self._x
        self._squares = np.zeros(0, np.float32)
        """Sums of the squares of the neurons' activations [T], for their norm."""
        self._chunk = self._sequence = self._token = 0
        self._step: tuple[Sequence[int], Sequence[int]] | None = None
        """Sequences and positions of a step; None in a chunk."""
        self._divided = request.rows or DividedRows(unit="")
        self._gates = self._x
        self._read = self._qkv = self._mixed = self._output = self._products = self._x
        self._others: dict[int, tuple[Any, ...]] = {}
        """What belongs to other chunks."""
        self._active = 0
        self._prediction = Prediction(request, self._widen)

    def _matrix(self, name: str) -> F32:
        return self._widen(self._request.tensors[name])

    @staticmethod
    def _widen(tensor: Tensor) -> F32:
        if tensor.precision is None:
            return tensor.weights.reshape(tensor.rows, tensor.length).astype(np.float32)
        weights = np.asarray(tensor.weights).view(np.uint8)
        return dequantize(weights, tensor.scales, tensor.length, tensor.precision)

    def _layer(self, layer: int, kind: str) -> F32:
        return self._matrix(name_layer_tensor(layer, kind))

    def _state(self, layer: int, kind: str) -> F32:
        """A tensor of the mixer with a state whose turn it is."""
        return self._matrix(name_state_tensor(layer, self._number, kind))

    def _bias(self, layer: int, kind: str, there: bool) -> F32 | float:
        """A vector to add, or 0 where the model has none."""
        return self._layer(layer, kind)[0] if there else 0.0

    def _normalize(self, x: F32, name: str) -> F32:
        bias = self._matrix(f"{name}_bias") if self._model.norm.bias else None
        width = self._model.shape.hidden
        return normalize(self._model.norm, x, self._matrix(name), bias, width)

    def _normalize_input(self, x: F32, layer: int, kind: str) -> F32:
        """What attention or the FFN reads."""
        if not self._model.norm.inputs:
            return x
        return self._normalize(x, name_layer_tensor(layer, kind))

    def select_chunk(self, number: int) -> None:
        self._others[self._chunk] = (
            *(self._x, self._input, self._u, self._v, self._routes, self._y),
            *(self._squares, self._added, self._streams, self._cutoffs),
        )
        self._chunk = number
        none = (np.zeros((0, self._model.shape.stored_hidden), np.float32),) * 7
        others = (self._layer_inputs.make_none(), self._altup.make_none(), None)
        kept = self._others.get(number, (*none, *others))
        self._x, self._input, self._u, self._v, self._routes, self._y, *rest = kept
        self._squares, self._added, self._streams, self._cutoffs = rest
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
        self._x = self._take_rows(EMBEDDING, tokens)
        self._x = self._x * np.float32(self._model.multipliers.embedding)
        if self._model.layer_embedding is not None:
            rows = self._take_rows(LAYER_EMBEDDING, np.arange(len(tokens), dtype=np.int32))
            self._added = self._layer_inputs.make(rows, self._x)
        if self._model.altup is not None:
            self._streams = self._altup.make(self._x)
        self._token = 0
        self._step = None

    def _take_rows(self, name: str, rows: I32) -> F32:
        """Rows of an embedding, float32 [n, length]."""
        tensor = self._request.tensors[name]
        assert tensor.precision is not None
        weights = np.asarray(tensor.weights).view(np.uint8)[rows]
        scales = None if tensor.scales is None else tensor.scales[rows]
        return dequantize(weights, scales, tensor.length, tensor.precision)

    @noted
    def attend(self, layer: int, position: int) -> None:
        self._attend(layer, position)

    def _attend(self, layer: int, position: int) -> None:
        self.begin_attention(layer, position)
        for number, mixer in enumerate(self._model.list_mixers(layer)):
            self._mixer, self._number = mixer, number
            if number:
                self._read = self._normalize_input(self._x, layer, name_mixer_norm(number))
            self.project(layer)
            self.mix(layer, position)
            self.project_output(layer)

    def _list_parts(self, position: int) -> list[tuple[slice, int, int]]:
        """Tokens of each sequence, the sequence, and the position of the first of them."""
        if self._step is None:
            return [(slice(0, len(self._x)), self._sequence, position)]
        return [
            (slice(row, row + 1), sequence, own)
            for row, (sequence, own) in enumerate(zip(*self._step, strict=True))
        ]

    def begin_attention(self, layer: int, position: int) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        if layer == 0 and self._model.positions is not None:
            table = self._matrix(POSITIONS)
            self._x = self._x.copy()
            for tokens, _, first in self._list_parts(position):
                self._x[tokens] += table[first : first + tokens.stop - tokens.start]
        if self._model.altup is not None:
            self._x, self._streams = self._altup.predict(layer, self._x, self._streams)
        self._input = self._x
        mixers = self._model.list_mixers(layer)
        if mixers:
            self._mixer, self._number = mixers[0], 0
            self._read = self._normalize_input(self._x, layer, "attention_norm")
        return self._read

    def project(self, layer: int) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        if self._mixer != "attention":
            self._project_state(layer)
            return
        first = self._divided.qkv
        weights = self._layer(layer, "qkv")
        products = np.zeros((len(self._read), len(weights)), np.float32)
        products[:, first:] = self._read @ weights[first:].T
        self._qkv = products + self._bias(layer, "qkv_bias", self._model.attention.has_bias)

    def _project_state(self, layer: int) -> None:
        """Multiply with the projections into a layer with a state."""
        state = describe_state(self._model)
        assert state is not None
        self._qkv = self._read @ self._state(layer, "state_in").T
        if state.projection_bias:
            self._qkv = self._qkv + self._state(layer, "state_in_bias")[0]
        self._gates = np.zeros((len(self._read), 0), np.float32)
        if state.gates:
            self._gates = self._read @ self._state(layer, "state_gates").T

    def put_projected(self, layer: int, values: F32) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        self._qkv[:, : values.shape[1]] += values

    def mix(self, layer: int, position: int) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        parts = self._list_parts(position)
        if self._mixer != "attention":
            assert self._states is not None
            mixed = [
                self._states.mix(
                    (sequence, layer, self._number), self._qkv[tokens], self._gates[tokens], first
                )
                for tokens, sequence, first in parts
            ]
        else:
            mixed = [
                self._attention.mix(layer, self._qkv[tokens], *place) for tokens, *place in parts
            ]
        self._mixed = np.concatenate(mixed)
        if self._mixer == "attention" and self._model.attention.sub_norm:
            weights, width = self._layer(layer, "attention_sub_norm"), self._model.shape.query
            self._mixed = normalize(self._model.norm, self._mixed, weights, width=width)
        return self._mixed

    def project_output(self, layer: int) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        state = describe_state(self._model)
        if state is not None and self._mixer != "attention":
            first, read, kind, has_bias = 0, self._state, "state_output", state.projection_bias
        else:
            first, read, kind = self._divided.output, self._layer, "output"
            has_bias = self._model.attention.output_bias
        weights = read(layer, kind)
        output = np.zeros((len(self._mixed), len(weights)), np.float32)
        output[:, first:] = self._mixed @ weights[first:].T
        self._output = output + (read(layer, f"{kind}_bias")[0] if has_bias else 0.0)
        if first == 0:
            self._add_mixed(layer)

    def put_output(self, layer: int, values: F32) -> None:
        """See `pi2.backends.protocol.RowDivider`."""
        self._output[:, : values.shape[1]] += values
        self._add_mixed(layer)

    def _add_mixed(self, layer: int) -> None:
        """Add what attention gives to x, and LAuReL."""
        self._add_output(self._output, name_layer_tensor(layer, "attention_output_norm"))
        if self._model.altup is not None:
            self._x = self._altup.add_laurel(layer, self._x, self._read)

    def _add_output(self, output: F32, norm: str) -> None:
        """Add what attention or the FFN gives to x."""
        if self._model.norm.outputs:
            width = self._model.shape.hidden
            output = normalize(self._model.norm, output, self._matrix(norm), width=width)
        self._x = self._x + output * np.float32(self._model.multipliers.residual)

    @noted
    def begin_ffn(self, layer: int) -> None:
        x = self._input if self._model.residual == "parallel" else self._x
        self._u = self._normalize_input(x, layer, "ffn_norm")
        self._v = self._read_experts(layer)
        self._y = np.zeros_like(self._v)
        self._squares = np.zeros(len(self._x), np.float32)
        self._cutoffs = self._find_cutoffs(layer)
        moe, has_bias = self._model.moe, self._model.ffn.bias
        if moe is None:
            self._y += self._bias(layer, "down_bias", has_bias)
        else:
            self._routes = self._routers[layer].route(self.read_router_input())
            if has_bias:
                self._y += self._routers[layer].add_biases(self._routes)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    def _read_experts(self, layer: int) -> F32:
        """What neurons read [T, neuron width], of what the FFN reads."""
        width = self._model.stored_neuron_width
        if self._model.moe is None or self._model.moe.latent is None:
            return self._u
        made = self._u @ self._layer(layer, "experts_in").T
        return np.pad(made, ((0, 0), (0, width - made.shape[1])))

    def _find_cutoffs(self, layer: int) -> F32 | None:
        """Cutoffs of a layer's gates [T, 1]; None where it has none."""
        deviations = self._model.find_cutoff(layer)
        if deviations is None:
            return None
        parts = self._layer(layer, GATE_CUTOFF) @ self._u.T
        count = count_cutoff_rows(self._model)
        mean, *rest = parts[:count] + parts[count:] if len(parts) > count else parts
        length = np.sqrt(np.square(rest).sum(axis=0))
        return np.asarray((mean + math.copysign(1.0, deviations) * length)[:, None])

    def list_experts(self) -> I32:
        return list_chosen(self._routes[self._token]) if self._model.moe else np.empty(0, np.int32)

    def list_chunk_experts(self) -> I32:
        any_routes = np.any(self._routes, axis=0) if self._model.moe else np.empty(0)
        return np.flatnonzero(any_routes).astype(np.int32)

    @noted
    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        chosen = self.list_experts() if experts is None else experts
        return self._prediction.find_named(layer, threshold, self._get_input(), chosen)

    def _get_input(self) -> F32:
        """What neurons read of the selected token [1, neuron width]."""
        return self._v[self._token : self._token + 1]

    def score_low_rank(self, layer: int, expert: int, u: F32) -> F32:
        """Predictor scores [T, ffn] of the neurons of an expert (0 without experts) at inputs
        ``u`` [T, neuron width]."""
        return self._prediction.score(layer, expert, u)

    def read_scores(self) -> F32:
        return self._prediction.scores

    @noted
    def predict_gate(self, layer: int, experts: I32 | None = None, slots: I32 | None = None) -> I32:
        if experts is not None and slots is not None:
            return self._prediction.find_open_of(layer, self._get_input(), experts, slots)
        cutoffs = self._select_cutoffs(slice(self._token, self._token + 1))
        return self._prediction.find_open(layer, self._get_input(), self.list_experts(), cutoffs)

    def _activate(self, bundles: U8, tokens: slice) -> F32:
        """Activations [T, n] of the neurons of ``bundles`` [n, .], which have their scales, for
        ``tokens``."""
        routes = None if self._model.moe is None else self._routes[tokens]
        read, cutoffs = self._v[tokens], self._select_cutoffs(tokens)
        return compute_activations(self._model, self._layout, read, bundles, routes, cutoffs)

    def _select_cutoffs(self, tokens: slice) -> F32 | None:
        """Cutoffs of the layer's gates for ``tokens`` [n, 1]; None where it has none."""
        return None if self._cutoffs is None else self._cutoffs[tokens]

    def _join(
        self,
        layer: int,
        bundles: U8,
        indices: I32 | slice | None,
    ) -> U8:
        """Bundles [n, .] with their scales in them, of the neurons ``indices``."""
        if self._request.scales is None:
            return bundles
        assert indices is not None, "scales are resident: indices say which belong to a neuron"
        return join_scales(bundles, self._request.scales[layer], self._request.bundle, indices)

    @noted
    def find_open(
        self,
        layer: int,
        arena: U8,
        slots: I32,
        indices: I32 | None = None,
    ) -> Bits:
        bundles = self._join(layer, arena[slots], indices)
        gates = self._v[self._token] @ unpack_part(bundles, self._layout, 0).T
        return self._prediction.is_open(gates)

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
        add_one_by_one(self, layer, arena, slots, indices, named, known, stretch)

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
    def add_twins(self, layer: int, indices: I32) -> None:
        twins = self._request.twins
        assert twins is not None, "neurons have no twins"
        layout = lay_out_twin(self._layout, twins.precision)
        own = twins.bundles[layer]
        bundles = own[indices - (self._request.neurons - len(own))]
        token = slice(self._token, self._token + 1)
        routes = None if self._model.moe is None else self._routes[token]
        read, cutoffs = self._v[token], self._select_cutoffs(token)
        active = compute_activations(self._model, layout, read, bundles, routes, cutoffs)
        self._active += int(np.count_nonzero(active))
        self._add(active, bundles, token, layout)

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
        self._squares[tokens] += np.square(active).sum(axis=1)
        self._y[tokens] += multiply_down(layout or self._layout, active, bundles)

    def share_input(self) -> tuple[F32, F32 | None]:
        return self._v, None if self._model.moe is None else self._routes

    def add_sum(self, values: F32) -> None:
        self._y += values

    @noted
    def end_ffn(self, layer: int) -> None:
        if self._observer is not None:
            self._observer.end_ffn(layer)
        if self._model.ffn.sub_norm:
            mean = self._squares / np.float32(self._model.layer_neurons)
            self._y = self._y / np.sqrt(mean + np.float32(self._model.norm.epsilon))[:, None]
        moe, side = self._model.moe, self._model.side_ffn
        if moe is not None and moe.latent is not None:
            self._y = self._y @ self._layer(layer, "experts_out").T
        if side is not None and side.norms:
            self._y = self._normalize(self._y, name_layer_tensor(layer, "experts_output_norm"))
        if side is not None:
            self._y = self._y + self._compute_side(layer, side)
        self._add_output(self._y, name_layer_tensor(layer, "ffn_output_norm"))
        if self._model.altup is not None:
            self._correct_streams(layer)
        elif self._model.layer_embedding is not None:
            self._x = self._x + self._layer_inputs.mix(layer, self._x, self._added[layer])
        if self._model.layer_scale:
            self._x = self._x * self._layer(layer, "layer_scale")[0, 0]

    def _correct_streams(self, layer: int) -> None:
        """Correct what the layer has predicted, and add its own embedding to all streams but x."""
        altup, before = self._altup, self._input
        self._x, self._streams = altup.correct(layer, self._x, before, self._streams)
        read = altup.scale_gate_input(layer, self._x)
        self._streams = self._streams + self._layer_inputs.mix(layer, read, self._added[layer])

    def _compute_side(self, layer: int, side: SideFfn) -> F32:
        """What the FFN beside the experts gives."""
        u = self._u
        if side.norms:
            u = self._normalize(self._x, name_layer_tensor(layer, "side_norm"))
        terms = np.split(u @ self._layer(layer, "side_in").T, 1 + self._model.ffn.gated, axis=1)
        value = activate(self._model, terms[0], terms[1] if self._model.ffn.gated else None)
        down = self._layer(layer, "side_down")
        padding = ((0, 0), (0, down.shape[1] - value.shape[1]))
        output = np.pad(value, padding) @ down.T
        if not side.norms:
            return np.asarray(output)
        return self._normalize(output, name_layer_tensor(layer, "side_output_norm"))

    def expect(self, end: int) -> None:
        """See `pi2.backends.protocol.LengthAware`."""
        self._attention.expect(end)

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        """See `pi2.backends.protocol.ContextKeeper`."""
        return self._attention.kept.copy(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """See `pi2.backends.protocol.ContextKeeper`."""
        self._attention.kept.put(sequence, first, end, kept)

    def read_state(self, sequence: int) -> F32:
        """See `pi2.backends.protocol.StateKeeper`."""
        return np.zeros(0, np.float32) if self._states is None else self._states.read(sequence)

    def put_state(self, sequence: int, state: F32) -> None:
        """See `pi2.backends.protocol.StateKeeper`."""
        if self._states is not None:
            self._states.put(sequence, state)

    def read_ffn_input(self) -> F32:
        """See `pi2.backends.protocol.InputReader`."""
        return self._u

    def read_router_input(self) -> F32:
        """See `pi2.backends.protocol.InputReader`."""
        kind = "ffn" if self._model.moe is None else self._model.moe.router_input
        return {"ffn": self._u, "layer": self._input, "stream": self._x}[kind]

    def read_routes(self) -> F32:
        """See `pi2.backends.protocol.InputReader`."""
        return self._routes

    def read_cutoffs(self) -> F32 | None:
        """See `pi2.backends.protocol.InputReader`."""
        return self._cutoffs

    def read_head_input(self, first: int) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        tokens = slice(first, first + LOGIT_ROWS)
        return self._normalize(
            self.join_streams(self._x[tokens], self._streams[:, tokens]), FINAL_NORM
        )

    def join_streams(self, x: F32, streams: F32) -> F32:
        """What the last norm reads [T, hidden], of x and the ``streams`` beside it."""
        return x if self._model.altup is None else self._altup.join(x, streams)

    @noted
    def logits(self, first: int) -> F32:
        own = self._divided.head
        head = self._matrix(name_head(self._model))
        x = self.read_head_input(first)
        self._products = np.zeros((len(x), len(head)), np.float32)
        self._products[:, own:] = x @ head[own:].T
        return self._finish_logits()

    def put_logits(self, values: F32) -> F32:
        """See `pi2.backends.protocol.RowDivider`."""
        self._products[:, : values.shape[1]] = values
        return self._finish_logits()

    def _finish_logits(self) -> F32:
        logits = self._products
        if self._model.head_bias:
            logits = logits + self._matrix(HEAD_BIAS)
        logits = logits * np.float32(self._model.multipliers.logits)
        return cap(logits, self._model.logit_softcap)

    def count_active(self) -> int:
        active, self._active = self._active, 0
        return active

    def close(self) -> None:
        self._x = self._input = self._u = self._y = np.zeros((0, 0), np.float32)
