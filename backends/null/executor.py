"""The null backend: a program of which only routes are drawn, and neurons that fire by chance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pi2.arrays import F32, F64, I32, U8, Bits
from pi2.backends.blocks.instructions import Weight
from pi2.backends.blocks.layers import MOST_LANES
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.executor import noted
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.executor import NumpyInterpreter, ReferenceExecutor
from pi2.backends.reference.instructions import elements
from pi2.backends.reference.instructions.arguments import Arguments
from pi2.backends.units import NumberedUnit, UnitRequest, WholeModel, WholeRequest
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import Tensor


class NullUnit(NumberedUnit[F32]):
    """A `pi2.backends.units.DenseUnit` without arithmetic."""

    def __init__(self, request: UnitRequest) -> None:
        super().__init__(request)
        self._rows = {name: rows for name, (rows, *_) in request.share.matrices.items()}

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Forget the neurons."""

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        return self._begin(np.zeros(inputs.shape, np.float32))

    def multiply(self, name: str, inputs: F32) -> int:
        return self._begin(np.zeros((len(inputs), self._rows[name]), np.float32))

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Leave the neurons out."""

    def finish(self, job: int) -> F32:
        return self._jobs.pop(job)

    def close(self) -> None:
        """There is nothing to give back."""


class NullModel(WholeModel):
    """A `pi2.backends.units.WholeModel` without arithmetic."""

    def __init__(self, request: WholeRequest) -> None:
        shape, moe = request.resolved.model.shape, request.resolved.model.moe
        self._vocab, self._neurons = shape.vocab, shape.layers * shape.ffn
        self._neurons *= 1 if moe is None else moe.active_experts
        self._tokens = self._possible = 0

    def put(self, tensor: Tensor, first: int) -> None:
        """Forget the rows."""

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Forget the neurons."""

    def prefill(
        self, tokens: I32, sequence: int, position: int, progress: Callable[[float], None]
    ) -> None:
        self._tokens = len(tokens)
        self._possible += len(tokens) * self._neurons

    def logits(self, first: int) -> F32:
        return np.zeros((min(self._tokens - first, LOGIT_ROWS), self._vocab), np.float32)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        self._possible += len(tokens) * self._neurons
        return np.zeros((len(tokens), self._vocab), np.float32)

    def count_work(self) -> Mapping[str, float | None]:
        return {"active_neurons": None, "possible_neurons": self._possible}


def compute_hotness(neurons: int, active: float, skew: float) -> F64:
    """Firing chances [neurons], hottest first, mean ``active``; ``skew`` of neurons make 80 %."""
    exponent = 1 - np.log(0.8) / np.log(min(max(skew, 1e-3), 0.79))
    weights = np.arange(1, neurons + 1, dtype=np.float64) ** -exponent
    chances = np.minimum(weights / weights.mean() * active, 1.0)
    for _ in range(8):  # what was cut at 1 is given to the others
        lacking = active / chances.mean()
        chances = np.minimum(chances * lacking, 1.0)
    return np.asarray(chances)


class NullInterpreter(NumpyInterpreter):
    """Counts the instructions of a program.  Routes are drawn, and nothing else is computed: with
    them neurons and experts are chosen, and read."""

    def __init__(self, model: Model | None, formats: list[str], kv: KvType) -> None:
        super().__init__(model, formats, kv, lanes=MOST_LANES)
        self.instructions = 0
        self._random = np.random.default_rng(0)
        self._computed = {
            "route": self._draw,
            "cap": elements.cap,
            "group": elements.group,
            "spread": elements.spread,
        }

    def compute(self, kernel: str, own: str | None, address: int, items: tuple[int, int]) -> None:
        self.instructions += 1
        if kernel in self._computed:
            given = Arguments(kernel, address, items, format=own, kv=self._kv, lanes=self.lanes)
            self._computed[kernel](given)

    def _draw(self, own: Arguments) -> None:
        """Choose experts of each token by chance, with equal weights."""
        order = self._random.random((own.last - own.first, own.experts)).argsort(axis=1)
        own.vectors("weights", own.active, own.active)[...] = 1 / own.active
        chosen = own.view("chosen", (own.last, own.active), dtype="int32")
        chosen[own.first :] = order[:, : own.active]


class NullExecutor(ReferenceExecutor):
    """Neurons are drawn, and none is computed."""

    def __init__(self, request: BuildRequest) -> None:
        model = request.model
        tensors = {own.name: own for own in model.dense_tensors}
        known = StoreWeights(describe_stored(model), tensors)

        def find(key: str, layer: int, mixer: int = 0, /) -> Weight | None:
            weight = known(key, layer, mixer)
            # Zeros that nobody reads take no memory.
            zeros = None if weight is None else np.zeros(weight.size_bytes, np.uint8)
            return None if weight is None else replace(weight, data=zeros)

        super().__init__(request, find, NullInterpreter)
        sparsity = model.sparsity
        active = sparsity.active if sparsity is not None else 1.0
        skew = sparsity.skew if sparsity is not None and sparsity.skew is not None else 0.26
        self._chances = compute_hotness(request.neurons, active, skew)
        self._cut = {
            layer: compute_hotness(request.neurons, 1.0 - model.blocks[layer].ffn.closed, skew)
            for layer in model.cut_layers
        }
        """Chances of neurons to have open gates, by layer with a cutoff."""
        self._random = np.random.default_rng(0)

    def _find_cutoffs(self, layer: int) -> None:
        """Have none: neurons with open gates are drawn."""

    @noted
    def predict_low_rank(self, layer: int, threshold: float, experts: I32 | None = None) -> I32:
        return self._draw(self._chances, self.list_experts() if experts is None else experts)

    def _draw(self, chances: F64, experts: I32) -> I32:
        fires = self._random.random(self._request.neurons) < chances
        if self._request.model.moe is not None:
            # Stored order is by hotness, so that a layer's experts lie mixed.
            chosen = np.zeros(self._request.model.expert_count, bool)
            chosen[experts] = True
            fires &= chosen[np.arange(len(fires)) % len(chosen)]
        return np.flatnonzero(fires).astype(np.int32)

    def read_scores(self) -> F32:
        # Whatever fires is worth a read: there are no scores to tell by.
        return np.full(self._request.neurons, np.inf, np.float32)

    @noted
    def predict_gate(self, layer: int) -> I32:
        return self._draw(self._cut.get(layer, self._chances), self.list_experts())

    @noted
    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None = None) -> Bits:
        return np.ones(len(slots), bool)

    @noted
    def add_neurons(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None = None, known: bool = False
    ) -> None:
        self._active += len(slots)

    @noted
    def add_dense(self, layer: int, bundles: U8, first: int = 0) -> None:
        """Leave the neurons out."""

    @noted
    def end_ffn(self, layer: int) -> None:
        self.finish(layer)
