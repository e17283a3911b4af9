"""A model of random weights on a GPU that has all of it, made where it lies: no store is needed.

Weights keep values near 1, and no neuron is zero by chance: activations are SiLU, whatever the
model says, so that what is named is also read.  Which neurons predictors name is drawn once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import I64, U8, Raw
from pi2.backends.gpu.arrays import Memory
from pi2.backends.gpu.instructions import Translator
from pi2.backends.gpu.interpreter import GpuInterpreter, StepShape
from pi2.backends.gpu.launchers.interface import DeviceArray, Launcher, Recording
from pi2.backends.gpu.launches import Kernels
from pi2.backends.gpu.model import ModelWeights
from pi2.backends.gpu.model_arrays import ModelArrays, ModelUse
from pi2.model.tensor import EMBEDDING
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType, PredictorMode
from pi2.progress import Progress

_PIECE_BYTES = 16 << 20
_SCALE = 0.004
_DEVIATION = 0.02
"""Of weights in fp16; those of int4 with the scale above are about as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a token."""

    launch_s: float
    """Until the work was handed over: uploads, one submission."""
    total_s: float
    """Until the logits had arrived."""


def shape_model(model: Model, layers: int | None) -> Model:
    """The model with SiLU, and with its first ``layers`` layers alone."""
    ffn = model.ffn.model_copy(update={"activation": "silu", "threshold": 0.0})
    shape = model.shape
    if layers is not None:
        shape = shape.model_copy(update={"layers": min(layers, shape.layers)})
    return model.model_copy(update={"ffn": ffn, "shape": shape})


def describe_random_use(
    model: Model, active: float | None, prompt: int, context: int, kv: KvType
) -> ModelUse:
    """How a model is used whose neurons are named, or all computed where ``active`` is None."""
    predictor: PredictorMode = "none" if active is None else "low-rank"
    return ModelUse(
        model=model,
        layout=model.lay_out_bundle(),
        chunk=prompt,
        sequences=1,
        context=context,
        kv=kv,
        predictor=predictor,
    )


class RandomModel:
    """A model on a device, and what takes tokens through it."""

    def __init__(
        self, launcher: Launcher, use: ModelUse, active: float | None, progress: Progress
    ) -> None:
        """``active``: share of the neurons that predictors name in steps; None computes all."""
        self.use = use
        self._launcher, self._active = launcher, active
        self._queue = launcher.open_queue()
        self._random = np.random.default_rng(7)
        self._memory = Memory(launcher)
        self._arrays = arrays = ModelArrays(self._memory, use)
        self._fill_all()
        kernels, steps = Kernels(launcher), Translator(use, arrays).translate()
        kernels.load(steps.describe(use, launcher.facts.target), progress)
        self._graph = GpuInterpreter(kernels, launcher.facts, use, arrays, steps, 0.0)
        self._given = arrays.find_array(arrays.program.logits.address)
        self._logits = arrays.host["logits"].view(np.float32)[: use.model.shape.vocab]
        self._recordings: dict[StepShape, Recording] = {}

    def _fill_all(self) -> None:
        for name, arrays in self._arrays.tensors.items():
            kind = name.rpartition(".")[2]
            self._fill_tensor(kind, arrays)
        for arrays in self._arrays.neurons:
            self._fill_tensor("neurons", arrays)
        weights = ModelWeights(self._queue, self.use, self._arrays)
        weights.expect(0)
        weights.finish()

    def _fill_tensor(self, kind: str, arrays: Mapping[str, DeviceArray]) -> None:
        """Fill a tensor's arrays, by the names of the kernels' parameters."""
        has_scales = any(name.endswith("_scales") for name in arrays)
        for name, array in arrays.items():
            if kind == "predictor_out":
                # The bias alone is the score.
                self._repeat(array, np.zeros(1 << 10, np.uint8))
            elif kind == "predictor_bias":
                named = self._random.random(array.size // 4) < (self._active or 0.0)
                self._repeat(array, np.where(named, 1, -1).astype(np.float32))
            elif name.endswith("_scales"):
                self._repeat(array, np.full(1 << 10, _SCALE, np.float16))
            elif name == "experts":
                expert = np.arange(array.size // 4, dtype=np.int32) // self.use.model.shape.ffn
                self._repeat(array, expert)
            elif name.endswith("_weights") and has_scales:
                self._repeat(array, self._random.integers(0, 256, _PIECE_BYTES, np.uint8))
            elif name.endswith("_weights"):
                self._repeat(array, self._draw_floats(np.float16))
            else:
                # Norms; biases and positions add nothing.
                value = 1.0 if "norm" in kind and not kind.endswith("_bias") else 0.0
                self._repeat(array, np.full(1 << 10, value, np.float32))

    def _draw_floats(self, dtype: type[np.float16] | type[np.float32]) -> Raw:
        values = self._random.standard_normal(_PIECE_BYTES // 8, np.float32)
        return (_DEVIATION * values).astype(dtype)

    def _repeat(self, array: DeviceArray, values: Raw) -> None:
        """Fill an array with ``values``, one copy after the other."""
        piece: U8 = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for first in range(0, array.size, piece.nbytes):
            self._queue.upload(array, piece[: min(piece.nbytes, array.size - first)], first)
        self._queue.submit().wait()

    @property
    def device_bytes(self) -> int:
        """What the model takes of the device."""
        return self._memory.device_bytes

    def count_step_bytes(self, position: int) -> int:
        """Bytes that a token at ``position`` must read: weights, keys and values, no other."""
        total = 0
        for name, arrays in self._arrays.tensors.items():
            if name != EMBEDDING or self.use.model.tied_head:
                total += sum(array.size for array in arrays.values())
        neurons = sum(array.size for layer in self._arrays.neurons for array in layer.values())
        kept = self._arrays.kept_bytes
        active = 1.0 if self._active is None else self._active
        return total + int(neurons * active) + kept * position // self.use.context

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt and of its last token's logits."""
        begin_s = time.perf_counter()
        self._send(np.arange(tokens), np.arange(tokens))
        work = self._graph.list_chunk(tokens, tokens)
        for launch, numbers in [*work, *self._graph.list_logits(tokens - 1, 1)]:
            self._queue.launch(launch, numbers)
        self._fetch()
        return time.perf_counter() - begin_s

    def step(self, position: int) -> StepTimes:
        """Compute a token at ``position``; the first time its kernels are recorded."""
        shape = self._graph.choose_shape(1, position + 1)
        if shape not in self._recordings:
            self._recordings[shape] = self._queue.record(self._graph.list_step(shape))
        begin_s = time.perf_counter()
        self._send(np.array([position % 7]), np.array([position]))
        self._queue.replay(self._recordings[shape])
        self._queue.download(self._given, self._logits)
        event = self._queue.submit()
        launched_s = time.perf_counter()
        event.wait()
        return StepTimes(launch_s=launched_s - begin_s, total_s=time.perf_counter() - begin_s)

    def _send(self, tokens: I64, positions: I64) -> None:
        tokens = tokens % self.use.model.shape.vocab
        given = tokens, np.zeros_like(positions), positions, positions
        for array, values in zip(self._arrays.inputs, given, strict=True):
            self._queue.upload(array, values.astype(np.int32))

    def _fetch(self) -> None:
        self._queue.download(self._given, self._logits)
        self._queue.submit().wait()

    def is_finite(self) -> bool:
        """Whether the last logits are numbers."""
        return bool(np.isfinite(self._logits).all())

    def close(self) -> None:
        """Give the device's memory back."""
        self._queue.submit().wait()
        self._memory.release()
