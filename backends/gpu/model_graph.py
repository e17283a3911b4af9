"""A model as a list of kernels that depends only on token counts: recorded once, replayed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.backends.gpu.kernels.specification import Number
from pi2.backends.gpu.launchers.interface import DeviceArray, DeviceFacts, Launch
from pi2.backends.gpu.launches import Kernels, choose_kernel_tokens, choose_parts, count_busy_groups
from pi2.backends.gpu.model_arrays import ModelArrays, ModelUse
from pi2.model.blocks import find_attention
from pi2.model.tensor import EMBEDDING, FINAL_NORM, POSITIONS, name_layer_tensor
from pi2.plan.arithmetic.units import name_head
from pi2.plan.documents.model_parts import Moe

_SPAN_TOKENS = 256
"""Least tokens of a span of attention."""
_MOST_SPANS = 16

Work = tuple[Launch, Mapping[str, Number]]
"""A kernel with its arrays, and its numbers."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the list of a step depends on."""

    tokens: int
    spans: int
    """Parts that contexts are divided into."""


class ModelGraph:
    """Lists the kernels of a model that is on a device."""

    def __init__(
        self,
        kernels: Kernels,
        facts: DeviceFacts,
        use: ModelUse,
        arrays: ModelArrays,
        threshold: float,
    ) -> None:
        self._kernels, self._facts, self._use, self._arrays = kernels, facts, use, arrays
        self._model, self._state = use.model, arrays.state
        self._products = use.products
        self._rows = {tensor.name: tensor.rows for tensor in use.list_tensors()}
        if use.predictor == "gate":
            ffn = self._model.ffn
            closed = ffn.threshold if ffn.activation == "fatrelu" else 0.0
            # Gates above it are open.
            threshold = float(np.nextafter(np.float32(closed), np.float32(np.inf)))
        self._threshold = threshold
        self._work: list[Work] = []

    def choose_shape(self, tokens: int, end: int) -> StepShape:
        """The shape of a step of ``tokens`` sequences, the longest of which has ``end`` tokens."""
        wanted = count_busy_groups(self._facts) // (self._model.shape.heads * tokens)
        most = min(wanted, end // _SPAN_TOKENS, _MOST_SPANS, self._arrays.partial_rows // tokens)
        spans = 1
        while spans * 2 <= most:
            spans *= 2
        return StepShape(tokens, spans)

    def list_step(self, shape: StepShape) -> list[Work]:
        """A token each of some sequences, and their logits."""
        self._list_layers(shape, runs=shape.tokens, is_named=self._use.is_sparse)
        return self.list_logits(0, shape.tokens)

    def list_chunk(self, tokens: int, end: int) -> list[Work]:
        """Tokens of a prompt that brings a sequence to ``end``, without logits."""
        self._list_layers(self.choose_shape(tokens, end), runs=1, is_named=False)
        return self._take()

    def list_logits(self, first: int, tokens: int) -> list[Work]:
        """The logits of ``tokens`` tokens of the last chunk, from ``first`` on."""
        self._normalise(FINAL_NORM, "u", first, tokens)
        self._multiply("head", None, tokens, "u", "logits")
        return self._take()

    def _take(self) -> list[Work]:
        work, self._work = self._work, []
        return work

    def _add(
        self, name: str, arrays: Mapping[str, DeviceArray], numbers: Mapping[str, Number]
    ) -> None:
        """Add a kernel; ``arrays`` and ``numbers`` may be more than it takes."""
        self._work.append((self._kernels.bind(name, arrays), numbers))

    def _find_vector(self, name: str, layer: int | None = None) -> DeviceArray:
        """The array of a tensor of float32; ``name``: of a layer its kind."""
        whole = name if layer is None else name_layer_tensor(layer, name)
        return self._arrays.tensors[whole]["values"]

    def _multiply(
        self,
        kind: str,
        layer: int | None,
        tokens: int,
        inputs: str,
        outputs: str,
        bias: str | None = None,
    ) -> None:
        """Add the product of the working array ``inputs`` with a layer's tensor, or the head."""
        product = self._products[kind]
        size = min(choose_kernel_tokens(tokens), 4 if product.blocks > 1 else 64)
        name = name_head(self._model) if layer is None else name_layer_tensor(layer, kind)
        arrays = {
            **self._arrays.tensors[name],
            "inputs": self._state[inputs],
            "outputs": self._state[outputs],
        }
        if product.bias:
            arrays["biases"] = self._find_vector(bias or f"{kind}_bias", layer)
        numbers = {"rows": self._rows[name], "tokens": tokens}
        self._add(f"{product.name}_{size}", arrays, numbers)

    def _normalise(
        self, name: str, target: str, first: int, tokens: int, layer: int | None = None
    ) -> None:
        """Add the norm ``name`` of tokens of x from ``first`` on, into ``target``."""
        arrays = {
            "x": self._state["x"],
            "outputs": self._state[target],
            "weights": self._find_vector(name, layer),
        }
        if self._model.norm.bias:
            arrays["biases"] = self._find_vector(f"{name}_bias", layer)
        self._add("norm", arrays, {"first": first, "tokens": tokens})

    def _list_layers(self, shape: StepShape, runs: int, *, is_named: bool) -> None:
        """Add embedding and layers; ``runs``: sequences that the tokens are of; ``is_named``:
        whether a predictor names the neurons."""
        model, tokens = self._model, shape.tokens
        self._embed(tokens)
        for layer in range(model.shape.layers):
            moe = self._find_mixture(layer)
            if moe is not None and moe.router_input == "layer":
                self._score_experts(layer, tokens, "x")
            if model.residual == "parallel":
                self._normalise("ffn_norm", "v", 0, tokens, layer)
            self._normalise("attention_norm", "u", 0, tokens, layer)
            self._mix_tokens(layer, shape, runs)
            if model.residual != "parallel":
                self._normalise("ffn_norm", "v", 0, tokens, layer)
            self._begin_ffn(layer, moe, tokens)
            if is_named:
                self._compute_named(layer, tokens)
            else:
                self._compute_all(layer, tokens)
            if not self._use.ffn_adds_to_stream:
                self._add_y("ffn_output_norm", layer, tokens)

    def _embed(self, tokens: int) -> None:
        state, numbers = self._state, {"tokens": tokens}
        arrays = {**self._arrays.tensors[EMBEDDING], "ids": state["ids"], "x": state["x"]}
        self._add("embed", arrays, numbers)
        if self._model.positions is not None:
            positions = {"positions": self._find_vector(POSITIONS)}
            self._add("add_positions", self._state | positions, numbers)

    def _mix_tokens(self, layer: int, shape: StepShape, runs: int) -> None:
        """Add what a layer mixes of tokens to x."""
        kind, mixed = "output", "mixed"
        if layer in self._model.state_layers:
            kind, mixed = "state_output", "mixed_state"
            self._list_recurrence(layer, shape.tokens, runs)
        else:
            self._list_attention(layer, shape)
        direct = self._use.adds_to_stream
        self._multiply(kind, layer, shape.tokens, mixed, "x" if direct else "y")
        if not direct:
            self._add_y("attention_output_norm", layer, shape.tokens)

    def _list_attention(self, layer: int, shape: StepShape) -> None:
        """Add the kernels that turn u into ``mixed``."""
        model, state, tokens = self._model, self._state, shape.tokens
        self._multiply("qkv", layer, tokens, "u", "qkv")
        own, latent = find_attention(model, layer), model.attention.latent
        number = self._use.number_attention(layer)
        rope = 0 if own.rope is not model.other_rope else 1
        arrays = {
            **self._arrays.kept[layer],
            **state,
            "cosines": state[f"cosines_{rope}"],
            "sines": state[f"sines_{rope}"],
            "partials": state["span_sums"],
            "tops": state["span_tops"],
        }
        if own.options.head_norm:
            for name in ("query_norm", "key_norm"):
                arrays[name] = self._find_vector(name, layer)
        if own.options.sinks:
            arrays["sinks"] = self._find_vector("sinks", layer)
        numbers = {"context": self._use.context, "tokens": tokens, "spans": shape.spans}
        if latent is not None:
            arrays["mixed"] = state["mixed_latent"]
            arrays["weights"] = self._find_vector("latent_norm", layer)
            if latent.query_rank is not None:
                norm = arrays | {"weights": self._find_vector("latent_query_norm", layer)}
                self._add(f"latent_norm_{number}", norm, numbers)
                self._multiply("latent_query_out", layer, tokens, "made", "queries")
        self._add(f"keep_{number}", arrays, numbers)
        if latent is not None:
            self._multiply("latent_key", layer, tokens, "plain", "absorbed")
        for name in ("attend", "mix"):
            self._add(f"{name}_{number}", arrays, numbers)
        if latent is not None:
            self._multiply("latent_value", layer, tokens, "mixed_latent", "mixed")

    def _list_recurrence(self, layer: int, tokens: int, runs: int) -> None:
        """Add the kernels that turn u into ``mixed_state``; ``runs``: parts of equal length that
        the tokens consist of, each of another sequence."""
        assert self._use.state is not None
        shape, state = self._use.state.shape, self._state
        is_short = shape.kind == "convolution"
        self._multiply("state_in", layer, tokens, "u", "projected")
        numbers = {"runs": runs, "length": tokens // runs, "tokens": tokens}
        arrays = {
            **self._arrays.kept[layer],
            **state,
            "weights": self._find_vector("state_convolution", layer),
        }
        if is_short:
            arrays["convolved"] = state["mixed_state"]
        if shape.convolution_bias:
            arrays["biases"] = self._find_vector("state_convolution_bias", layer)
        self._add("convolve", arrays, numbers)
        if is_short:
            return
        self._multiply("state_gates", layer, tokens, "u", "state_gates")
        arrays |= {
            "gates": state["state_gates"],
            "rates": self._find_vector("state_decay", layer),
            "steps": self._find_vector("state_step", layer),
        }
        if shape.kind == "mamba":
            arrays["skips"] = self._find_vector("state_skip", layer)
        self._add("recur", arrays, numbers)
        arrays |= {"weights": self._find_vector("state_norm", layer), "mixed": state["mixed_state"]}
        self._add("gate_state", arrays, numbers)

    def _add_y(self, norm: str, layer: int, tokens: int) -> None:
        if not self._model.norm.outputs:
            self._add("add", self._state, {"tokens": tokens})
            return
        arrays = {**self._state, "weights": self._find_vector(norm, layer)}
        if self._model.norm.bias:
            arrays["biases"] = self._state["zeros"]
        self._add("add_norm", arrays, {"tokens": tokens})

    def _find_mixture(self, layer: int) -> Moe | None:
        moe = self._model.moe
        return None if moe is None or layer in moe.dense_layers else moe

    def _begin_ffn(self, layer: int, moe: Moe | None, tokens: int) -> None:
        """Add the choice of experts, and biases that the FFN's sum begins with."""
        numbers: dict[str, Number] = {"tokens": tokens}
        if moe is not None:
            if moe.router_input == "ffn":
                self._score_experts(layer, tokens, "v")
            arrays = dict(self._state)
            if moe.choice_bias:
                arrays["choice_biases"] = self._find_vector("choice_bias", layer)
            self._add("route", arrays, numbers)
        elif self._model.moe is not None:
            count = self._model.moe.count_dense(self._model.shape.ffn)
            self._add("route_first", self._state, {"count": count, **numbers})
        if self._model.ffn.bias:
            biases = {"biases": self._find_vector("down_bias", layer)}
            self._add("spread", self._state | biases, numbers)

    def _score_experts(self, layer: int, tokens: int, source: str) -> None:
        arrays, moe = {**self._state, "inputs": self._state[source]}, self._model.moe
        assert moe is not None
        wanted = {"router": True, "shared_router": moe.shared_gate, "router_bias": moe.router_bias}
        arrays |= {name: self._find_vector(name, layer) for name, own in wanted.items() if own}
        self._add("route_scores", arrays, {"tokens": tokens})

    def _list_ffn_arrays(self, layer: int) -> dict[str, DeviceArray]:
        state = self._state
        return {
            **state,
            **self._arrays.neurons[layer],
            "inputs": state["v"],
            "sums": state["x" if self._use.ffn_adds_to_stream else "y"],
            "values": state["activations"],
        }

    def _list_ffn_numbers(self, tokens: int, size: int) -> dict[str, Number]:
        """Return the numbers of kernels that compute ``size`` tokens at a time."""
        neurons, hidden = self._model.layer_neurons, self._model.shape.stored_hidden
        rows = self._arrays.partial_rows
        return {
            "count": neurons,
            "tokens": tokens,
            "parts": choose_parts(self._facts, hidden, neurons, tokens, size, rows),
            "adds": int(self._use.ffn_adds_to_stream or self._model.ffn.bias),
        }

    def _compute_all(self, layer: int, tokens: int) -> None:
        size, arrays = choose_kernel_tokens(tokens), self._list_ffn_arrays(layer)
        numbers = self._list_ffn_numbers(tokens, size)
        for name in (f"values_{64 if self._use.is_sparse else size}", f"sums_{size}", "join"):
            self._add(name, arrays, numbers)

    def _compute_named(self, layer: int, tokens: int) -> None:
        model, arrays = self._model, self._list_ffn_arrays(layer)
        if model.moe is not None:
            arrays["order"] = self._state[f"order_{layer}"]
        neurons = model.layer_neurons
        numbers = self._list_ffn_numbers(tokens, 1) | {
            "n": neurons,
            "most": neurons,
            "first": layer * self._use.sequences,
            "threshold": self._threshold,
        }
        if self._use.predictor == "low-rank":
            self._multiply("predictor_in", layer, tokens, "v", "inner")
            self._multiply("predictor_out", layer, tokens, "inner", "scores", "predictor_bias")
        elif self._use.predictor == "gate":
            self._add("gates", arrays, numbers)
        for name in ("select", "gathered_values", "gathered_sums", "join"):
            self._add(name, arrays, numbers)
