"""A whole model on a GPU: `pi2.backends.units.WholeModel`."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.executor import ExecutorObserver
from pi2.backends.gpu.arrays import Memory
from pi2.backends.gpu.instructions import Translator
from pi2.backends.gpu.interpreter import GpuInterpreter, StepShape
from pi2.backends.gpu.launchers.interface import Queue, Recording
from pi2.backends.gpu.launches import OpenDevice
from pi2.backends.gpu.model_arrays import ModelArrays, ModelUse, Placed, describe_use
from pi2.backends.gpu.packing import Uploads
from pi2.backends.units import WholeModel, WholeRequest
from pi2.plan.weights.layout import Tensor

_PIECE_BYTES = 1 << 20
"""Bytes of a program's array that are sent at a time."""


class ModelWeights:
    """Fills a model's arrays."""

    def __init__(self, queue: Queue, use: ModelUse, arrays: ModelArrays) -> None:
        self._use, self._arrays = use, arrays
        self._uploads = Uploads(queue, use.layout, in_slots=use.is_sparse)
        self._is_whole = False
        """Whether the program's arrays are there."""

    def put(self, tensor: Tensor, first: int) -> None:
        """See `pi2.backends.units.WholeModel`."""
        shape = self._arrays.shapes.get(tensor.name)
        if shape is None:
            # Such as predictors that the plan does not use.
            return
        arrays = self._arrays.tensors[tensor.name]
        if not shape.packing.is_float32:
            self._uploads.put(arrays, first, tensor)
            return
        skip = first * (tensor.weights.nbytes // tensor.rows)
        self._uploads.send((arrays["values"], tensor.weights, skip))
        self._arrays.put(tensor.name, skip, tensor.weights)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        arrays, count = self._arrays.neurons[layer], self._use.model.layer_neurons
        self._uploads.keep(arrays, layer, first, bundles, count)

    def put_order(self, layer: int, order: I32) -> None:
        """Tell the stored indices of an MoE model's neurons, expert by expert."""
        self._uploads.send((self._arrays.state[f"order_{layer}"], order.astype(np.int32), 0))

    def expect(self, end: int) -> None:
        """Prepare the tables of positions for a sequence of ``end`` tokens."""
        builder = self._arrays.program.builder
        for tables, own in zip(builder.ropes, builder.turns.values(), strict=True):
            if tables.expect(end) and self._is_whole:
                self._send_area(self._arrays.need(own.ctypes.data)[0])

    def _send_area(self, area: Placed) -> None:
        """Send the host's content of an array of the program."""
        values = area.host.reshape(-1).view(np.uint8)
        for first in range(0, len(values), _PIECE_BYTES):
            piece = values[first : first + _PIECE_BYTES]
            self._uploads.send((area.arrays["values"], piece, first))

    def finish(self) -> None:
        """Send arrays that the program keeps, and zeros, and wait until all has arrived."""
        if not self._is_whole:
            self._arrays.fill()
            for own in self._arrays.areas:
                if not own.is_kept:
                    self._send_area(own)
            self._is_whole = True
        self._uploads.wait()


class GpuModel(WholeModel):
    """A model on a GPU: a step is one submission of uploads, kernels and the logits' download."""

    def __init__(self, request: WholeRequest) -> None:
        """Open the device and make room; raises P360 to P363."""
        resolved = request.resolved
        self._use = use = describe_use(resolved)
        counted = Memory()
        ModelArrays(counted, use, is_real=False)
        request.count(counted.bytes)
        self._observer: ExecutorObserver | None = None
        self._begin_s: float | None = None
        self._named = self._possible = self._tokens = 0
        self._recordings: dict[StepShape, Recording] = {}
        self._device = device = OpenDevice(resolved.device.units[request.name], counted)
        launcher, kernels = device.launcher, device.kernels
        with device.guard():
            self._arrays = arrays = ModelArrays(device.memory, use)
            steps = Translator(use, arrays).translate()
            kernels.load(steps.describe(use, launcher.facts.target), request.progress)
            threshold = resolved.plan.decode.threshold
            self._graph = GpuInterpreter(kernels, launcher.facts, use, arrays, steps, threshold)
            self._queue = launcher.open_queue()
            self._weights = ModelWeights(self._queue, use, arrays)
            for layer, order in enumerate(request.expert_neurons or ()):
                self._weights.put_order(layer, order)
            self._weights.expect(0)
        own = arrays.program.logits
        self._logits: F32 = arrays.host["logits"].view(np.float32).reshape(-1, own.stride)
        self._given = arrays.find_array(own.address)
        """The logits on the device."""
        self._inputs = arrays.inputs

    def put(self, tensor: Tensor, first: int) -> None:
        self._device.enter()
        self._weights.put(tensor, first)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        self._device.enter()
        self._weights.keep(layer, first, bundles)

    def expect(self, end: int) -> None:
        self._device.enter()
        self._weights.expect(end)

    def prefill(
        self, tokens: I32, sequence: int, position: int, progress: Callable[[float], None]
    ) -> None:
        count = len(tokens)
        assert 0 < count <= self._use.chunk and position + count <= self._use.context
        self._begin()
        positions = np.arange(position, position + count)
        self._send(tokens, np.full(count, sequence), positions)
        for launch, numbers in self._graph.list_chunk(count, position + count):
            self._queue.launch(launch, numbers)
        self._queue.submit()
        self._tokens = count

    def logits(self, first: int) -> F32:
        count = min(self._tokens - first, self._use.extent.rows)
        self._begin()
        for launch, numbers in self._graph.list_logits(first, count):
            self._queue.launch(launch, numbers)
        self._fetch(count)
        self._report(f"logits of {count} tokens")
        return self._read(count)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        count = len(tokens)
        self._begin()
        self._send(tokens, np.asarray(sequences), np.asarray(positions))
        self._queue.replay(self._record(self._graph.choose_shape(count, max(positions) + 1)))
        found = self._arrays.host.get("found")
        if found is not None:
            self._queue.download(self._arrays.state["found"], found)
        self._fetch(count)
        if found is not None:
            layers, places = self._use.model.shape.layers, self._use.sequences
            named = found.view(np.int32)[: layers * places].reshape(layers, places)
            self._possible += self._use.model.token_neurons * count
            self._named += int(named[:, :count].sum())
        self._report(f"step of {count} tokens")
        return self._read(count)

    def _record(self, shape: StepShape) -> Recording:
        if shape not in self._recordings:
            self._recordings[shape] = self._queue.record(self._graph.list_step(shape))
        return self._recordings[shape]

    def _begin(self) -> None:
        self._device.enter()
        self._weights.finish()
        if self._begin_s is None:
            self._begin_s = time.perf_counter()

    def _send(
        self, tokens: I32, sequences: np.typing.ArrayLike, positions: np.typing.ArrayLike
    ) -> None:
        for array, values in zip(
            self._inputs, (tokens, sequences, positions, positions), strict=True
        ):
            self._queue.upload(array, np.array(values, np.int32))

    def _fetch(self, count: int) -> None:
        self._queue.download(self._given, self._logits[:count])
        self._wait()

    def _read(self, count: int) -> F32:
        """Logits [n, vocab]."""
        return self._logits[:count, : self._use.model.shape.vocab]

    def _report(self, name: str) -> None:
        assert self._begin_s is not None
        begin_s, end_s = self._begin_s, time.perf_counter()
        self._begin_s = None
        if self._observer is not None:
            self._observer.note_kernel(name, None, begin_s, end_s)

    def count_work(self) -> Mapping[str, float | None]:
        named, possible = self._named, self._possible
        return {"predicted_neurons": named, "active_neurons": None, "possible_neurons": possible}

    def observe(self, observer: ExecutorObserver | None) -> None:
        self._observer = observer

    def close(self) -> None:
        self._device.close(self._wait)

    def _wait(self) -> None:
        self._queue.submit().wait()
