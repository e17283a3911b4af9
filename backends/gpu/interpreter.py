"""A program as a list of launches that depends only on token counts: recorded once, replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pi2.backends.gpu.instructions import ProgramSteps
from pi2.backends.gpu.kernels.specification import Number, ProductKernels
from pi2.backends.gpu.launchers.interface import DeviceArray, DeviceFacts, Launch
from pi2.backends.gpu.launches import (
    Kernels,
    choose_kernel_tokens,
    choose_parts,
    count_busy_groups,
    number_product,
)
from pi2.backends.gpu.model_arrays import ModelArrays, ModelUse
from pi2.model.tensor import name_layer_tensor

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


class GpuInterpreter:
    """Lists the launches of a model that is on a device."""

    def __init__(
        self,
        kernels: Kernels,
        facts: DeviceFacts,
        use: ModelUse,
        arrays: ModelArrays,
        program: ProgramSteps,
        threshold: float,
    ) -> None:
        self._kernels, self._facts = kernels, facts
        self._use, self._arrays, self._model = use, arrays, use.model
        self._head = arrays.program.head
        self._steps, self._adders = program.steps, program.adders
        exchange = arrays.exchange
        areas = {"inputs": exchange.read, "sums": exchange.given}
        areas |= {} if exchange.routes is None else {"routes": exchange.routes}
        self._state = dict(arrays.state)
        self._state |= {name: arrays.find_array(own.address) for name, own in areas.items()}
        if use.predictor == "gate":
            ffn = self._model.ffn
            closed = ffn.threshold if ffn.activation == "fatrelu" else 0.0
            # Gates above it are open.
            threshold = float(np.nextafter(np.float32(closed), np.float32(np.inf)))
        self._threshold = threshold

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
        layers = self._list_layers(shape, runs=shape.tokens, is_named=self._use.is_sparse)
        return [*layers, *self.list_logits(0, shape.tokens)]

    def list_chunk(self, tokens: int, end: int) -> list[Work]:
        """Tokens of a prompt that brings a sequence to ``end``, without logits."""
        return list(self._list_layers(self.choose_shape(tokens, end), runs=1, is_named=False))

    def list_logits(self, first: int, tokens: int) -> list[Work]:
        """The logits of ``tokens`` tokens of the last chunk, from ``first`` on."""
        begin, norm = self._head, self._steps[self._head]
        assert norm is not None
        moved = norm.numbers["x_at"] + first * norm.numbers["x_stride"]
        return [
            *self._run(begin, begin + 1, {"tokens": tokens, "x_at": moved}),
            *self._run(begin + 1, len(self._steps), {"tokens": tokens}),
        ]

    def _bind(
        self, name: str, arrays: Mapping[str, DeviceArray], numbers: Mapping[str, Number]
    ) -> Work:
        """Return a kernel; ``arrays`` and ``numbers`` may be more than it takes."""
        return self._kernels.bind(name, arrays), numbers

    def _run(self, begin: int, end: int, numbers: Mapping[str, Number]) -> Iterator[Work]:
        """Yield instructions ``begin`` to ``end``."""
        for own in filter(None, self._steps[begin:end]):
            tokens = int(numbers["tokens"]) * own.each
            name = own.kernel.name
            if isinstance(own.kernel, ProductKernels):
                name = f"{name}_{_choose_size(own.kernel, tokens)}"
            yield self._bind(name, own.arrays, {**own.numbers, **numbers, "tokens": tokens})

    def _list_layers(self, shape: StepShape, runs: int, *, is_named: bool) -> Iterator[Work]:
        """Yield embedding and layers; ``runs``: sequences that the tokens are of; ``is_named``:
        whether a predictor names the neurons."""
        tokens, at = shape.tokens, 0
        numbers: dict[str, Number] = {"tokens": tokens, "spans": shape.spans}
        numbers |= {"runs": runs, "steps": tokens // runs}
        for layer, own in enumerate(self._arrays.exchange.layers):
            yield from self._run(at, own.gap, numbers)
            at = own.gap
            arrays, adds = self._list_ffn_arrays(layer), self._adders[layer] is not None
            if self._use.has_expert_biases:
                biases = self._arrays.tensors[name_layer_tensor(layer, "down_bias")]["values"]
                more = {**numbers, "adds": int(adds)}
                yield self._bind("spread_biases", arrays | {"biases": biases}, more)
            if is_named:
                yield from self._compute_named(layer, tokens, arrays, adds=adds)
            else:
                yield from self._compute_all(tokens, arrays, adds=adds)
        yield from self._run(at, self._head, numbers)

    def _list_ffn_arrays(self, layer: int) -> dict[str, DeviceArray]:
        own = {"values": self._state["activations"], **self._arrays.neurons[layer]}
        target = self._adders[layer]
        return self._state | own | ({} if target is None else {"sums": target})

    def _list_ffn_numbers(self, tokens: int, size: int, *, adds: bool) -> dict[str, Number]:
        """Return the numbers of kernels that compute ``size`` tokens at a time."""
        neurons, hidden = self._model.layer_neurons, self._model.stored_neuron_width
        rows = self._arrays.partial_rows
        return {
            "count": neurons,
            "tokens": tokens,
            "parts": choose_parts(self._facts, hidden, neurons, tokens, size, rows),
            "adds": int(adds or self._use.has_expert_biases),
        }

    def _compute_all(
        self, tokens: int, arrays: Mapping[str, DeviceArray], *, adds: bool
    ) -> Iterator[Work]:
        size = choose_kernel_tokens(tokens)
        numbers = self._list_ffn_numbers(tokens, size, adds=adds)
        for name in (f"values_{64 if self._use.is_sparse else size}", f"sums_{size}", "join"):
            yield self._bind(name, arrays, numbers)

    def _compute_named(
        self, layer: int, tokens: int, arrays: dict[str, DeviceArray], *, adds: bool
    ) -> Iterator[Work]:
        neurons = self._model.layer_neurons
        if self._model.moe is not None:
            arrays["order"] = self._state[f"order_{layer}"]
        numbers = self._list_ffn_numbers(tokens, 1, adds=adds) | {
            "n": neurons,
            "most": neurons,
            "first": layer * self._use.sequences,
            "threshold": self._threshold,
        }
        if self._use.predictor == "low-rank":
            for kind, x, y in (("in", "inputs", "inner"), ("out", "inner", "scores")):
                yield self._predict(layer, f"predictor_{kind}", tokens, x, y)
        elif self._use.predictor == "gate":
            yield self._bind("gates", arrays, numbers)
        for name in ("select", "gathered_values", "gathered_sums", "join"):
            yield self._bind(name, arrays, numbers)

    def _predict(self, layer: int, kind: str, tokens: int, x: str, y: str) -> Work:
        """Return the product of a layer's predictor with the working array ``x``."""
        kernel, name = self._use.predictors[kind], name_layer_tensor(layer, kind)
        arrays = {**self._arrays.tensors[name], "inputs": self._state[x], "outputs": self._state[y]}
        if kernel.bias:
            bias = name_layer_tensor(layer, "predictor_bias")
            arrays["biases"] = self._arrays.tensors[bias]["values"]
        numbers = number_product(self._arrays.shapes[name].rows, kernel.length, kernel.blocks)
        size = _choose_size(kernel, tokens)
        return self._bind(f"{kernel.name}_{size}", arrays, numbers | {"tokens": tokens})


def _choose_size(kernel: ProductKernels, tokens: int) -> int:
    return min(choose_kernel_tokens(tokens), 4 if kernel.blocks > 1 else 64)
