"""The executor of the reference backend: a program in numpy, and neurons written to be read."""

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.arithmetic import slice_tensor
from pi2.backends.blocks.contract import FIELDS, PLANES
from pi2.backends.blocks.instructions import FindWeight, Planes
from pi2.backends.blocks.interpreter import Interpret
from pi2.backends.executor import Executor, noted
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.instructions import attention, elements, products, states
from pi2.backends.reference.instructions.arguments import Arguments
from pi2.backends.reference.neurons import activate, compute_activations, multiply_down, widen
from pi2.formats import find_packing
from pi2.model.ffn import count_cutoff_rows
from pi2.model.options import list_own
from pi2.model.tensor import GATE_CUTOFF, name_layer_tensor
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.bundles import join_scales, unpack_part

EXACT = Planes(*3 * (PLANES["fp32"],))


def _make_none() -> F32:
    return np.zeros((0, 0), np.float32)


@dataclass(slots=True)
class NeuronSums:
    """What the neurons of a layer have of a chunk's tokens."""

    read: F32 = field(default_factory=_make_none)
    """Their input [T, neuron width]."""
    total: F32 = field(default_factory=_make_none)
    """Their sum [T, neuron width]."""
    routes: F32 = field(default_factory=_make_none)
    """Weights of an MoE model's experts [T, experts]."""
    squares: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    """Sum of the squares of activations [T]."""
    cutoffs: F32 | None = None
    """Of gates [T, 1], if the layer has them."""


def _widen_cache(request: BuildRequest) -> BuildRequest:
    """Let keys and values be float32, and be counted as fp16."""
    plain = request.allocate

    def allocate(segment: str, size: int) -> U8:
        if segment != "kv":
            return plain(segment, size)
        plain(segment, size // 2)
        return np.zeros(size, np.uint8)

    return replace(request, kv_type="fp32", allocate=allocate)


class ReferenceExecutor(Executor):
    """Computes in numpy."""

    def __init__(
        self,
        request: BuildRequest,
        find: FindWeight | None = None,
        interpret: Interpret | None = None,
    ) -> None:
        """Rounds nothing but int8 keys and values: fp16 would cost five times the other errors;
        ``find``: see `Executor`; ``interpret`` replaces the interpreter, which then rounds."""
        if interpret is None:
            own = _widen_cache(request) if request.kv_type == "fp16" else request
            super().__init__(own, interpret=NumpyInterpreter, planes=EXACT, find=find)
        else:
            super().__init__(request, interpret=interpret, find=find)
        self._request, self._tensors = request, request.tensors
        self._layout = request.whole_bundle
        self._chunks = [NeuronSums() for _ in range(request.chunks)]
        self.now = self._chunks[0]
        """Of the chunk that calls are about."""
        self._active = 0
        self._scores: F32 = np.zeros(0, np.float32)
        """Scores [neurons] of the last prediction by predictors; -inf if none was asked."""

    def select_chunk(self, number: int) -> None:
        super().select_chunk(number)
        self.now = self._chunks[number]

    def begin_ffn(self, layer: int) -> None:
        """Compute what neurons read, and clear their sum."""
        now, exchange = self.now, self.exchange
        self.read_layer(layer)
        width, count = self._model.stored_neuron_width, self.tokens
        now.read = self.view(exchange.read, width)[:count].copy()
        now.total = np.zeros_like(now.read)
        now.squares = np.zeros(count, np.float32)
        if exchange.routes is not None:
            now.routes = self.view(exchange.routes, self._model.expert_count)[:count].copy()
        now.cutoffs = self._find_cutoffs(layer)
        if self._observer is not None:
            self._observer.begin_ffn(layer)

    def _read_tensor(self, layer: int, kind: str) -> F32:
        return widen(self._tensors[name_layer_tensor(layer, kind)])

    def _find_cutoffs(self, layer: int) -> F32 | None:
        """Cutoffs of a layer's gates [T, 1]; None where it has none."""
        deviations = self._model.blocks[layer].ffn.cutoff
        if deviations is None:
            return None
        parts = self._read_tensor(layer, GATE_CUTOFF) @ self.now.read.T
        count = count_cutoff_rows(self._model)
        mean, *rest = parts[:count] + parts[count:] if len(parts) > count else parts
        length = np.sqrt(np.square(rest).sum(axis=0))
        return np.asarray((mean + math.copysign(1.0, deviations) * length)[:, None])

    def read_routes(self) -> F32:
        return self.now.routes

    def read_cutoffs(self) -> F32 | None:
        return self.now.cutoffs

    @noted
    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        if self._model.moe is None:
            self._scores = self._score(layer, 0, self._get_input())[0]
        else:
            groups = self._group(layer)
            self._scores = np.full(self._request.neurons, -np.inf, np.float32)
            for expert in (self.list_experts() if experts is None else experts).tolist():
                self._scores[groups[expert]] = self._score(layer, expert, self._get_input())[0]
        return np.flatnonzero(self._scores >= threshold).astype(np.int32)

    def _score(self, layer: int, expert: int, u: F32) -> F32:
        """Predictor scores [T, ffn] of the neurons of an expert (0 without experts) at inputs
        ``u`` [T, hidden]."""
        names = (name_layer_tensor(layer, f"predictor_{part}") for part in ("in", "out", "bias"))
        inner, outer, bias = (
            widen(slice_tensor(self._tensors[name], expert, self._model.expert_count))
            for name in names
        )
        return np.asarray(np.maximum(u @ inner.T, 0) @ outer.T + bias)

    def _group(self, layer: int) -> I32:
        """Stored indices of the neurons of each expert [experts, ffn]."""
        assert self._request.expert_neurons is not None
        return self._request.expert_neurons[layer].reshape(self._model.expert_count, -1)

    def score_all(self, layer: int, experts: I32) -> F32:
        """Predictor scores [T, neurons] of all neurons; ``experts`` [neurons]: whose they are."""
        scores = np.empty((len(self.now.read), len(experts)), np.float32)
        for expert in range(self._model.expert_count):
            scores[:, experts == expert] = self._score(layer, expert, self.now.read)
        return scores

    def _get_input(self) -> F32:
        """What neurons read of the selected token [1, neuron width]."""
        return self.now.read[self._token : self._token + 1]

    def read_scores(self) -> F32:
        return self._scores

    @noted
    def predict_gate(self, layer: int) -> I32:
        request, layout = self._request, self._request.bundle
        assert request.gate_rows is not None
        weights, scales = request.gate_rows[layer]
        rows = find_packing(layout.gate_up).dequantize(weights, scales, layout.hidden)
        gate = rows @ self._get_input()[0]
        if request.gate_biases is not None:
            gate = gate + request.gate_biases[layer]
        if self._model.is_smooth:
            cutoffs = self._select_cutoffs(slice(self._token, self._token + 1))
            value = activate(self._model, gate[None], None, cutoffs)[0]
            least: F32 | float = self._get_limits(layer)[0]
            if request.expert_limits is not None:
                limits = np.array(request.expert_limits[layer], np.float32)
                least = np.repeat(limits, self._model.shape.ffn)
            fires = np.abs(value) >= least
            if cutoffs is not None:
                fires &= value != 0
        else:
            fires = self._is_open(gate)
        if request.expert_neurons is None:
            return np.flatnonzero(fires).astype(np.int32)
        groups = self._group(layer)
        chosen = self.list_experts().tolist()
        named = [groups[n][fires.reshape(groups.shape)[n]] for n in chosen]
        return np.sort(np.concatenate(named))

    def _is_open(self, gates: F32) -> Bits:
        """Whether these gates, of an activation that is not smooth, let anything through."""
        fatrelu = self._model.ffn.activation == "fatrelu"
        return np.asarray(gates > (self._model.ffn.threshold if fatrelu else 0.0))

    def _get_limits(self, layer: int) -> tuple[float, float]:
        """What counts as zero of a smooth activation, and of its product with the up."""
        return (0.0, 0.0) if self._request.limits is None else self._request.limits[layer]

    def _activate(self, bundles: U8, tokens: slice) -> F32:
        """Activations [T, n] of the neurons of ``bundles`` [n, .], which have their scales, for
        ``tokens``."""
        routes = None if self._model.moe is None else self.now.routes[tokens]
        read, cutoffs = self.now.read[tokens], self._select_cutoffs(tokens)
        return compute_activations(self._model, self._layout, read, bundles, routes, cutoffs)

    def _select_cutoffs(self, tokens: slice) -> F32 | None:
        """Cutoffs of the layer's gates for ``tokens`` [n, 1]; None where it has none."""
        return None if self.now.cutoffs is None else self.now.cutoffs[tokens]

    def _join(self, layer: int, bundles: U8, indices: I32 | slice | None) -> U8:
        """Bundles [n, .] with their scales in them, of the neurons ``indices``."""
        if self._request.scales is None:
            return bundles
        assert indices is not None, "scales are resident: indices say which belong to a neuron"
        return join_scales(bundles, self._request.scales[layer], self._request.bundle, indices)

    @noted
    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        bundles = self._join(layer, arena[slots], indices)
        gates = self.now.read[self._token] @ unpack_part(bundles, self._layout, 0).T
        return self._is_open(gates)

    @noted
    def add_neurons(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None = None, known: bool = False
    ) -> None:
        bundles = self._join(layer, arena[slots], indices)
        token = slice(self._token, self._token + 1)
        active = self._activate(bundles, token)
        if known and self._model.is_smooth:
            active = np.where(np.abs(active) >= self._get_limits(layer)[1], active, 0)
        self._active += int(np.count_nonzero(active))
        self._add(active, bundles, token)

    @noted
    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        if self._observer is not None:
            self._observer.add_dense(layer, bundles, first)
        joined = self._join(layer, bundles, slice(first, first + len(bundles)))
        self._add(self._activate(joined, slice(None)), joined, slice(None))

    def _add(self, active: F32, bundles: U8, tokens: slice) -> None:
        """Add neurons whose activations are known."""
        self.now.squares[tokens] += np.square(active).sum(axis=1)
        self.now.total[tokens] += multiply_down(self._layout, active, bundles)

    def share_input(self) -> tuple[F32, F32 | None]:
        return self.now.read, None if self._model.moe is None else self.now.routes

    def add_sum(self, values: F32) -> None:
        self.now.total += values

    def end_ffn(self, layer: int) -> None:
        """Give the neurons' sum to the program."""
        if self._observer is not None:
            self._observer.end_ffn(layer)
        now, model = self.now, self._model
        if model.moe is not None and model.ffn.bias:
            now.total += now.routes @ self._read_tensor(layer, "down_bias")
        if model.ffn.sub_norm:
            mean = now.squares / np.float32(model.layer_neurons)
            now.total /= np.sqrt(mean + np.float32(model.norm.epsilon))[:, None]
        self.view(self.exchange.given, now.total.shape[1])[: self.tokens] = now.total
        self.finish(layer)
        for own, options in list_own(model):
            self.catch_up()
            x = self.view(self.program.x, model.shape.stored_hidden)[: self.tokens]
            x[:] = own.compute(x, options, partial(self._read_tensor, layer))

    def count_active(self) -> int:
        active, self._active = self._active, 0
        return active


INSTRUCTIONS: Mapping[str, Callable[[Arguments], None]] = {
    name: next(
        getattr(module, name)
        for module in (attention, elements, products, states)
        if hasattr(module, name)
    )
    for name in FIELDS
}
"""Definitions of kernels by their names."""


class NumpyInterpreter:
    """See `pi2.backends.blocks.interpreter.Interpreter`: one thread, and nothing is compiled."""

    def __init__(
        self, model: Model | None, formats: list[str], kv: KvType, *, lanes: int = 4
    ) -> None:
        """``lanes``: of the registers for which inputs of products are ordered."""
        self.lanes, self._kv = lanes, kv
        self._found: list[tuple[str, str | None]] = []

    def find(self, kernel: str, own: str | None = None) -> int:
        if (kernel, own) not in self._found:
            self._found.append((kernel, own))
        return self._found.index((kernel, own))

    def run(self, program: int, begin: int, end: int, most: int) -> None:
        words = (ctypes.c_int64 * (8 * end)).from_address(program)
        for place in range(8 * begin, 8 * end, 8):
            number, arguments, items, *_, first, _ = words[place : place + 8]
            if first < items:
                self.compute(*self._found[number], arguments, (first, items))

    def compute(self, kernel: str, own: str | None, address: int, items: tuple[int, int]) -> None:
        """Compute items ``items`` of a kernel, whose arguments are at an address."""
        given = Arguments(kernel, address, items, format=own, kv=self._kv, lanes=self.lanes)
        INSTRUCTIONS[kernel](given)

    def close(self) -> None:
        """Do nothing: it has nothing."""
