"""A model as a list of kernels that depends only on token counts: recorded once, replayed."""

from dataclasses import dataclass

import numpy as np

from pi2.backends.gpu.kernels.specification import Number
from pi2.backends.gpu.launchers.interface import DeviceArray
from pi2.backends.gpu.model_sizes import PARTIAL_ROWS, ModelUse
from pi2.backends.gpu.model_weights import Work, WorkList
from pi2.backends.gpu.sizes import choose_kernel_tokens, choose_parts, count_busy_groups
from pi2.model.blocks import find_attention
from pi2.model.tensor import EMBEDDING, FINAL_NORM, POSITIONS
from pi2.plan.arithmetic.units import count_qkv_rows
from pi2.plan.documents.model_parts import Moe


def list_attention(work: WorkList, use: ModelUse, layer: int, tokens: int, spans: int) -> None:
    """Add the kernels that turn u into ``mixed``, contexts in ``spans`` parts."""
    model, state = use.model, work.state
    work.multiply("qkv", layer, count_qkv_rows(model), tokens, "u", "qkv")
    own = find_attention(model, layer)
    rope = 0 if own.rope is not model.other_rope else 1
    arrays = {
        **work.arrays.kept[layer],
        "qkv": state["qkv"],
        "places": state["places"],
        "cosines": state[f"cosines_{rope}"],
        "sines": state[f"sines_{rope}"],
        "partials": state["span_sums"],
        "tops": state["span_tops"],
        "mixed": state["mixed"],
    }
    if own.head_norm:
        arrays["norms"] = state[f"head_norms_{layer}"]
    if use.attention.growth:
        arrays["growth"] = state["growth" if own.growth else "no_growth"]
    if model.attention.sinks:
        arrays["sinks"] = work.find_vector("sinks", layer)
    numbers = {"context": use.context, "tokens": tokens, "spans": spans}
    if model.attention.latent is not None:
        _list_latent_queries(work, use, layer, tokens, arrays)
        arrays["mixed"] = state["mixed_latent"]
    else:
        is_plain = use.attention.head_norm and not own.head_norm
        work.add("keep_plain" if is_plain else "keep", arrays, numbers)
    sees_all = own.window is None and use.attention.window is not None
    for name in ("attend_all" if sees_all else "attend", "mix"):
        work.add(name, arrays, numbers)
    if model.attention.latent is not None:
        work.multiply("latent_value", layer, model.shape.query, tokens, "mixed_latent", "mixed")


def _list_latent_queries(
    work: WorkList, use: ModelUse, layer: int, tokens: int, arrays: dict[str, DeviceArray]
) -> None:
    """Add what keeps the token's vector, and makes queries of it out of the heads' queries."""
    model, state = use.model, work.state
    latent = model.attention.latent
    assert latent is not None
    arrays |= {name: state[name] for name in ("plain", "turned", "absorbed")}
    if latent.query_rank is not None:
        weights = work.find_vector("latent_query_norm", layer)
        norm = {"qkv": state["qkv"], "weights": weights, "made": state["made"]}
        work.add("latent_norm", norm, {"tokens": tokens})
        rows = model.shape.heads * latent.key
        work.multiply("latent_query_out", layer, rows, tokens, "made", "queries")
        arrays["queries"] = state["queries"]
    arrays["weights"] = work.find_vector("latent_norm", layer)
    work.add("keep", arrays, {"context": use.context, "tokens": tokens})
    rows = model.shape.heads * latent.rank
    work.multiply("latent_key", layer, rows, tokens, "plain", "absorbed")


def list_recurrence(work: WorkList, use: ModelUse, layer: int, tokens: int, runs: int) -> None:
    """Add the kernels that turn u into ``mixed_state``; ``runs``: parts of equal length that the
    tokens consist of, each of another sequence."""
    assert use.state is not None
    shape, state = use.state.shape, work.state

    is_short = shape.kind == "convolution"
    work.multiply("state_in", layer, shape.rows, tokens, "u", "projected")
    numbers = {"runs": runs, "length": tokens // runs, "tokens": tokens}
    arrays = {
        **work.arrays.kept[layer],
        "projected": state["projected"],
        "places": state["places"],
        "weights": work.find_vector("state_convolution", layer),
        "convolved": state["mixed_state" if is_short else "convolved"],
    }
    if shape.convolution_bias:
        arrays["biases"] = work.find_vector("state_convolution_bias", layer)
    work.add("convolve", arrays, numbers)
    if is_short:
        return
    work.multiply("state_gates", layer, shape.gates, tokens, "u", "state_gates")
    arrays |= {
        "gates": state["state_gates"],
        "rates": work.find_vector("state_decay", layer),
        "steps": work.find_vector("state_step", layer),
        "recurred": state["recurred"],
    }
    if shape.kind == "mamba":
        arrays["skips"] = work.find_vector("state_skip", layer)
    work.add("recur", arrays, numbers)
    arrays |= {"weights": work.find_vector("state_norm", layer), "mixed": state["mixed_state"]}
    work.add("gate_state", arrays, numbers)


_SPAN_TOKENS = 256
"""Least tokens of a span of attention."""
_MOST_SPANS = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the list of a step depends on."""

    tokens: int
    spans: int
    """Parts that contexts are divided into."""


class ModelGraph:
    """Lists the kernels of a model that is on a device."""

    def __init__(self, work: WorkList, threshold: float) -> None:
        use, arrays = work.use, work.arrays
        self._work, self._launcher = work, work.launcher
        self._use, self._arrays = use, arrays
        self._model = use.model
        self._state = arrays.state
        activation = self._model.ffn.activation
        if use.predictor == "gate":
            closed = self._model.ffn.threshold or 0.0 if activation == "fatrelu" else 0.0
            # Gates above it are open.
            threshold = float(np.nextafter(np.float32(closed), np.float32(np.inf)))
        self._threshold = threshold

    def choose_shape(self, tokens: int, end: int) -> StepShape:
        """The shape of a step of ``tokens`` sequences, the longest of which has ``end`` tokens."""
        wanted = count_busy_groups(self._launcher.facts) // (self._model.shape.heads * tokens)
        most = min(wanted, end // _SPAN_TOKENS, _MOST_SPANS, self._count_rows() // tokens)
        spans = 1
        while spans * 2 <= most:
            spans *= 2
        return StepShape(tokens, spans)

    def list_step(self, shape: StepShape) -> list[Work]:
        """A token each of some sequences, and their logits."""
        self._embed(shape.tokens)
        for layer in range(self._model.shape.layers):
            self._begin_layer(layer, shape.tokens)
            self._mix_tokens(layer, shape, runs=shape.tokens)
            self._begin_ffn(layer, shape.tokens)
            if self._use.is_sparse:
                self._compute_named(layer, shape.tokens)
            else:
                self._compute_all(layer, shape.tokens)
            self._end_ffn(layer, shape.tokens)
        self._compute_logits(0, shape.tokens)
        return self._work.take()

    def list_chunk(self, tokens: int, end: int) -> list[Work]:
        """Tokens of a prompt that brings a sequence to ``end``, without logits."""
        shape = self.choose_shape(tokens, end)
        self._embed(tokens)
        for layer in range(self._model.shape.layers):
            self._begin_layer(layer, tokens)
            self._mix_tokens(layer, shape, runs=1)
            self._begin_ffn(layer, tokens)
            self._compute_all(layer, tokens)
            self._end_ffn(layer, tokens)
        return self._work.take()

    def list_logits(self, first: int, tokens: int) -> list[Work]:
        """The logits of ``tokens`` tokens of the last chunk, from ``first`` on."""
        self._compute_logits(first, tokens)
        return self._work.take()

    def _embed(self, tokens: int) -> None:
        state, numbers = self._state, {"tokens": tokens}
        arrays = {**self._work.find_tensor(EMBEDDING), "ids": state["ids"], "x": state["x"]}
        self._work.add("embed", arrays, numbers)
        if self._model.positions is not None:
            arrays = {
                "places": state["places"],
                "positions": self._work.find_vector(POSITIONS),
                "x": state["x"],
            }
            self._work.add("add_positions", arrays, numbers)

    def _begin_layer(self, layer: int, tokens: int) -> None:
        moe = self._find_mixture(layer)
        if moe is not None and moe.router_input == "layer":
            self._score_experts(layer, tokens, "x")
        if self._model.residual == "parallel":
            self._work.normalise("ffn_norm", "v", 0, tokens, layer)
        self._work.normalise("attention_norm", "u", 0, tokens, layer)

    def _mix_tokens(self, layer: int, shape: StepShape, runs: int) -> None:
        """Add what a layer mixes of tokens to x; ``runs``: sequences that the tokens are of."""
        kind, mixed = "output", "mixed"
        if layer in self._model.state_layers:
            kind, mixed = "state_output", "mixed_state"
            list_recurrence(self._work, self._use, layer, shape.tokens, runs)
        else:
            list_attention(self._work, self._use, layer, shape.tokens, shape.spans)
        direct = self._use.adds_to_stream
        hidden, target = self._model.shape.stored_hidden, "x" if direct else "y"
        self._work.multiply(kind, layer, hidden, shape.tokens, mixed, target)
        if not direct:
            self._add_y("attention_output_norm", layer, shape.tokens)

    def _add_y(self, norm: str, layer: int, tokens: int) -> None:
        arrays = {"x": self._state["x"], "y": self._state["y"]}
        if not self._model.norm.outputs:
            self._work.add("add", arrays, {"tokens": tokens})
            return
        arrays["weights"] = self._work.find_vector(norm, layer)
        if self._model.norm.bias:
            arrays["biases"] = self._state["zeros"]
        self._work.add("add_norm", arrays, {"tokens": tokens})

    def _begin_ffn(self, layer: int, tokens: int) -> None:
        if self._model.residual != "parallel":
            self._work.normalise("ffn_norm", "v", 0, tokens, layer)
        if self._model.moe is not None:
            self._route(layer, tokens)
        if self._model.ffn.bias:
            arrays = {"y": self._state["y"], "biases": self._work.find_vector("down_bias", layer)}
            if self._model.moe is not None:
                arrays["routes"] = self._state["routes"]
            self._work.add("spread", arrays, {"tokens": tokens})

    def _find_mixture(self, layer: int) -> Moe | None:
        moe = self._model.moe
        return None if moe is None or layer in moe.dense_layers else moe

    def _route(self, layer: int, tokens: int) -> None:
        arrays, moe = {"routes": self._state["routes"]}, self._find_mixture(layer)
        if moe is None:
            assert self._model.moe is not None
            count = self._model.moe.count_dense(self._model.shape.ffn)
            self._work.add("route_first", arrays, {"count": count, "tokens": tokens})
            return
        if moe.router_input == "ffn":
            self._score_experts(layer, tokens, "v")
        arrays["route_scores"] = self._state["route_scores"]
        if moe.choice_bias:
            arrays["choice_biases"] = self._work.find_vector("choice_bias", layer)
        self._work.add("route", arrays, {"tokens": tokens})

    def _score_experts(self, layer: int, tokens: int, source: str) -> None:
        arrays = {
            "inputs": self._state[source],
            "router": self._state[f"router_{layer}"],
            "route_scores": self._state["route_scores"],
        }
        if self._model.moe is not None and self._model.moe.router_bias:
            arrays["router_biases"] = self._work.find_vector("router_bias", layer)
        self._work.add("route_scores", arrays, {"tokens": tokens})

    def _list_ffn_arrays(self, layer: int) -> dict[str, DeviceArray]:
        state = self._state
        sums = state["x" if self._use.ffn_adds_to_stream else "y"]
        arrays = {**self._arrays.neurons[layer], "inputs": state["v"], "sums": sums}
        arrays |= {"values": state["activations"], "partials": state["partials"]}
        names = ("routes", "slots", "found", "scores")
        return arrays | {name: state[name] for name in names if name in state}

    def _compute_all(self, layer: int, tokens: int) -> None:
        arrays, neurons = self._list_ffn_arrays(layer), self._model.layer_neurons
        size = choose_kernel_tokens(tokens)
        parts = self._choose_parts(neurons, tokens, size)
        numbers = {"count": neurons, "tokens": tokens, "parts": parts}
        numbers["adds"] = int(self._sums_hold_something())
        self._work.add(f"values_{64 if self._use.is_sparse else size}", arrays, numbers)
        self._work.add(f"sums_{size}", arrays, numbers)
        self._work.add("join", arrays, numbers)

    def _sums_hold_something(self) -> bool:
        return self._use.ffn_adds_to_stream or self._model.ffn.bias

    def _compute_named(self, layer: int, tokens: int) -> None:
        arrays, neurons = self._list_ffn_arrays(layer), self._model.layer_neurons
        if self._model.moe is not None:
            arrays["order"] = self._state[f"order_{layer}"]
        parts = self._choose_parts(neurons, tokens, 1)
        numbers: dict[str, Number] = {
            "n": neurons,
            "most": neurons,
            "first": layer * self._use.sequences,
            "tokens": tokens,
            "parts": parts,
            "threshold": self._threshold,
            "adds": int(self._sums_hold_something()),
        }
        if self._use.predictor == "low-rank":
            self._score_neurons(layer, tokens)
        elif self._use.predictor == "gate":
            self._work.add("gates", arrays, numbers)
        for name in ("select", "gathered_values", "gathered_sums", "join"):
            self._work.add(name, arrays, numbers)

    def _score_neurons(self, layer: int, tokens: int) -> None:
        model, multiply = self._model, self._work.multiply
        assert model.predictor is not None
        rows, bias = model.expert_count * model.predictor.rank, "predictor_bias"
        multiply("predictor_in", layer, rows, tokens, "v", "inner")
        multiply("predictor_out", layer, model.layer_neurons, tokens, "inner", "scores", bias)

    def _end_ffn(self, layer: int, tokens: int) -> None:
        if not self._use.ffn_adds_to_stream:
            self._add_y("ffn_output_norm", layer, tokens)

    def _compute_logits(self, first: int, tokens: int) -> None:
        self._work.normalise(FINAL_NORM, "u", first, tokens)
        self._work.multiply("head", None, self._model.shape.vocab, tokens, "u", "logits")

    def _count_rows(self) -> int:
        return max(PARTIAL_ROWS, self._use.chunk)

    def _choose_parts(self, neurons: int, tokens: int, size: int) -> int:
        hidden, rows = self._model.shape.stored_hidden, self._count_rows()
        return choose_parts(self._launcher.facts, hidden, neurons, tokens, size, rows)
