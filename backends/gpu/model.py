"""A whole model on a GPU: `pi2.backends.units.WholeModel`."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.executor import ExecutorObserver
from pi2.backends.gpu.arrays import Memory
from pi2.backends.gpu.devices import check_memory, open_unit
from pi2.backends.gpu.launchers.interface import DeviceFacts, Launcher, Recording
from pi2.backends.gpu.launches import Kernels
from pi2.backends.gpu.model_arrays import ModelArrays, describe_use
from pi2.backends.gpu.model_graph import ModelGraph, StepShape, Work
from pi2.backends.gpu.model_weights import ModelWeights
from pi2.backends.units import WholeModel, WholeRequest
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import Tensor


class GpuModel(WholeModel):
    """A model on a GPU: a step is one submission of uploads, kernels and the logits' download."""

    def __init__(self, request: WholeRequest) -> None:
        """Open the device and make room; raises P360 to P363."""
        resolved = request.resolved
        self._use = use = describe_use(resolved)
        counted = Memory()
        ModelArrays(counted, use)
        request.count(counted.bytes)
        self._observer: ExecutorObserver | None = None
        self._begin_s: float | None = None
        self._named = self._possible = self._tokens = 0
        self._recordings: dict[StepShape, Recording] = {}
        launcher = open_unit(resolved.device.units[request.name])
        self._launcher: Launcher | None = launcher
        self._memory = Memory(launcher)
        try:
            check_memory(launcher, counted.sizes)
            kernels = Kernels(launcher)
            kernels.load(use.describe_kernels(launcher.facts.target), request.progress)
            self._arrays = arrays = ModelArrays(self._memory, use)
            self._queue = launcher.open_queue()
            self._weights = ModelWeights(self._queue, use, arrays)
            self._graph = ModelGraph(
                kernels, launcher.facts, use, arrays, resolved.plan.decode.threshold
            )
            for layer, order in enumerate(request.expert_neurons or ()):
                self._weights.put_order(layer, order)
            self._weights.expect(0)
        except BaseException:
            self._launcher = None
            self._memory.release()
            launcher.close()
            raise
        self._logits: F32 = arrays.host["logits"].view(np.float32)

    @property
    def facts(self) -> DeviceFacts:
        return self._enter().facts

    def _enter(self) -> Launcher:
        assert self._launcher is not None, "it is closed"
        self._launcher.enter()
        return self._launcher

    def put(self, tensor: Tensor, first: int) -> None:
        self._enter()
        self._weights.put(tensor, first)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        self._enter()
        self._weights.keep(layer, first, bundles)

    def expect(self, end: int) -> None:
        self._enter()
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
        vocab = self._use.model.shape.vocab
        count = min(self._tokens - first, self._arrays.logit_rows)
        self._begin()
        for launch, numbers in self._graph.list_logits(first, count):
            self._queue.launch(launch, numbers)
        self._fetch(count * vocab)
        self._report(f"logits of {count} tokens")
        return self._finish(count)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        count = len(tokens)
        self._begin()
        self._send(tokens, np.asarray(sequences), np.asarray(positions))
        self._queue.replay(self._record(self._graph.choose_shape(count, max(positions) + 1)))
        found = self._arrays.host.get("found")
        if found is not None:
            self._queue.download(self._arrays.state["found"], found)
        self._fetch(count * self._use.model.shape.vocab)
        if found is not None:
            layers, places = self._use.model.shape.layers, self._use.sequences
            named = found.view(np.int32)[: layers * places].reshape(layers, places)
            self._possible += self._use.model.token_neurons * count
            self._named += int(named[:, :count].sum())
        self._report(f"step of {count} tokens")
        return self._finish(count)

    def list_step(self, tokens: int, end: int) -> list[Work]:
        """The kernels of a step of ``tokens`` sequences, the longest of ``end`` tokens."""
        return self._graph.list_step(self._graph.choose_shape(tokens, end))

    def _record(self, shape: StepShape) -> Recording:
        if shape not in self._recordings:
            self._recordings[shape] = self._queue.record(self._graph.list_step(shape))
        return self._recordings[shape]

    def _begin(self) -> None:
        self._enter()
        self._weights.finish()
        if self._begin_s is None:
            self._begin_s = time.perf_counter()

    def _send(
        self, tokens: I32, sequences: np.typing.ArrayLike, positions: np.typing.ArrayLike
    ) -> None:
        places = np.stack([np.asarray(sequences), np.asarray(positions)], 1).astype(np.int32)
        state = self._arrays.state
        self._queue.upload(state["ids"], np.array(tokens, np.int32))
        self._queue.upload(state["places"], places)

    def _fetch(self, logits: int) -> None:
        self._queue.download(self._arrays.state["logits"], self._logits[:logits])
        self._wait()

    def _finish(self, count: int) -> F32:
        """Logits [n, vocab] with the model's factor and cap."""
        model = self._use.model
        found = self._logits[: count * model.shape.vocab].reshape(count, -1)
        if model.multipliers.logits != 1.0:
            found = found * np.float32(model.multipliers.logits)
        if model.logit_softcap is not None:
            limit = np.float32(model.logit_softcap)
            found = limit * np.tanh(found / limit)
        return found

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
        launcher = self._launcher
        if launcher is None:
            return
        # A device that is lost has nothing to give back.
        for end in (launcher.enter, self._wait, self._memory.release, launcher.close):
            with suppress(UserError):
                end()
        self._launcher = None

    def _wait(self) -> None:
        self._queue.submit().wait()
