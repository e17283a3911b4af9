"""A whole model on a GPU: `pi2.backends.units.WholeModel`."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.executor import ExecutorObserver
from pi2.backends.gpu.devices import check_memory, open_unit
from pi2.backends.gpu.launchers.interface import DeviceFacts, Launcher, Recording
from pi2.backends.gpu.model_graph import ModelGraph, StepShape
from pi2.backends.gpu.model_sizes import ModelUse, count_host_bytes, count_logit_rows, list_arrays
from pi2.backends.gpu.model_weights import ModelArrays, Work, WorkList
from pi2.backends.gpu.packing import load_kernels
from pi2.backends.units import WholeModel, WholeRequest
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import Tensor


class GpuModel(WholeModel):
    """A model on a GPU: a step is one submission of uploads, kernels and the logits' download."""

    program, touched_bytes, waited_s = None, 0, 0.0

    def __init__(self, request: WholeRequest) -> None:
        """Open the device and make room; raises P360 to P363."""
        self._use = use = ModelUse(
            model=request.model,
            layout=request.bundle,
            chunk=max(request.chunk, request.sequences),
            sequences=request.sequences,
            context=request.context,
            kv=request.kv_type,
            predictor=request.predictor,
        )
        sizes = list(list_arrays(use))
        request.count(sum(sizes) + count_host_bytes(use))
        self._observer: ExecutorObserver | None = None
        self._begin_s: float | None = None
        self._named = self._possible = 0
        self._launcher: Launcher | None = open_unit(request.unit)
        launcher = self._launcher
        self._arrays: ModelArrays | None = None
        try:
            check_memory(launcher, sizes)
            kernels = load_kernels(
                launcher, use.describe_kernels(launcher.facts.target), request.progress
            )
            self._queue = launcher.open_queue()
            self._arrays = ModelArrays(launcher, use)
            work = WorkList(launcher, kernels, use, self._arrays)
            self._graph = ModelGraph(work, request.threshold)
            self._recordings: dict[StepShape, Recording] = {}
            rows, shape = count_logit_rows(use), use.model.shape
            self._logits: F32 = launcher.allocate_host(4 * rows * shape.vocab).view(np.float32)
            self._found: I32 = launcher.allocate_host(4 * shape.layers * use.sequences).view(
                np.int32
            )
            for layer, order in enumerate(request.expert_neurons or ()):
                self._arrays.put_order(layer, order)
            self._arrays.expect(0)
        except BaseException:
            self.close()
            raise
        self._tokens = 0
        self._end = 0

    @property
    def facts(self) -> DeviceFacts:
        assert self._launcher is not None, "it is closed"
        return self._launcher.facts

    @property
    def _device(self) -> ModelArrays:
        assert self._arrays is not None, "it is closed"
        return self._arrays

    def _enter(self) -> ModelArrays:
        assert self._launcher is not None, "it is closed"
        self._launcher.enter()
        return self._device

    def put(self, tensor: Tensor, first: int) -> None:
        self._enter().put(tensor, first)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        self._enter().keep(layer, first, bundles)

    def expect(self, end: int) -> None:
        self._enter().expect(end)

    def abandon(self) -> None:
        """Do nothing: work that has begun ends by itself."""

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
        count = min(self._tokens - first, count_logit_rows(self._use))
        self._begin()
        for launch, numbers in self._graph.list_logits(first, count):
            self._queue.launch(launch, numbers)
        self._fetch(count * vocab, 0)
        self._report(f"logits of {count} tokens")
        return self._finish(count)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        count = len(tokens)
        self._begin()
        self._send(tokens, np.asarray(sequences), np.asarray(positions))
        self._queue.replay(self._record(self._graph.choose_shape(count, max(positions) + 1)))
        named = self._use.model.shape.layers * self._use.sequences if self._use.is_sparse else 0
        self._fetch(count * self._use.model.shape.vocab, named)
        if named:
            self._possible += self._use.model.token_neurons * count
            self._named += int(self._found.reshape(-1, self._use.sequences)[:, :count].sum())
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
        self._enter().finish_loading()
        if self._begin_s is None:
            self._begin_s = time.perf_counter()

    def _send(
        self, tokens: I32, sequences: np.typing.ArrayLike, positions: np.typing.ArrayLike
    ) -> None:
        places = np.stack([np.asarray(sequences), np.asarray(positions)], 1).astype(np.int32)
        state = self._device.state
        self._queue.upload(state["ids"], np.array(tokens, np.int32))
        self._queue.upload(state["places"], places)

    def _fetch(self, logits: int, named: int) -> None:
        state = self._device.state
        self._queue.download(state["logits"], self._logits[:logits])
        if named:
            self._queue.download(state["found"], self._found[:named])
        self._queue.submit().wait()

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
        arrays, self._arrays = self._arrays, None
        launcher, self._launcher = self._launcher, None
        # A device that is lost has nothing to give back.
        try:
            if launcher is not None and arrays is not None:
                launcher.enter()
                self._queue.submit().wait()
        except UserError:
            pass
        for give_back in (
            None if arrays is None else arrays.release,
            None if launcher is None else launcher.close,
        ):
            try:
                if give_back is not None:
                    give_back()
            except UserError:
                continue
