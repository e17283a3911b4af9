"""A dense unit on a GPU: `pi2.backends.units.DenseUnit` over `DenseFfn`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pi2.arrays import F32, U8
from pi2.backends.gpu.dense import DenseFfn, DenseRows
from pi2.backends.gpu.devices import check_memory, open_unit
from pi2.backends.gpu.launchers.interface import DeviceFacts, Launcher
from pi2.backends.gpu.packing import WholeTiles
from pi2.backends.gpu.sizes import DenseSizes, count_experts, describe_model_ffn, describe_rows
from pi2.backends.reference.neurons import join_layer_scales
from pi2.backends.units import NotedUnit, UnitFailed, UnitRequest
from pi2.diagnostics import UserError


@dataclass(slots=True)
class _Job:
    start_s: float
    product: str = ""
    """Its matrix; or neurons of a layer."""
    layer: int = -1
    kept: int = 0
    added: int = 0


class GpuUnit(NotedUnit):
    """A unit that computes on a GPU, through the first of its APIs that has a device."""

    def __init__(self, request: UnitRequest) -> None:
        """Open the device and make room; `UnitFailed` where that cannot be."""
        self._request = request
        model, layout = request.model, request.whole_bundle
        sizes = DenseSizes(
            layout=layout,
            experts=count_experts(model),
            counts=request.neurons,
            chunk=request.chunk,
            jobs=request.jobs,
            stretch=request.stretch,
        )
        ffn = describe_model_ffn(layout, model)
        rows = describe_rows(request.shapes, request.chunk, request.jobs)
        request.count(sizes.device_bytes + sizes.host_bytes)
        if rows is not None:
            request.count(sum(rows.list_arrays()) + rows.host_bytes)
        self._launcher: Launcher | None = None
        self._ffn: DenseFfn | None = None
        self._rows: DenseRows | None = None
        self._jobs: dict[int, _Job] = {}
        self._tiles = WholeTiles()
        self._end_s = 0.0
        with _explain():
            self._launcher = launcher = open_unit(request.unit)
            try:
                wanted = [*sizes.list_arrays(), *(() if rows is None else rows.list_arrays())]
                check_memory(launcher, wanted)
                self._ffn = DenseFfn(launcher, sizes, ffn, request.progress)
                if rows is not None:
                    self._rows = DenseRows(launcher, rows, request.matrices, request.progress)
            except BaseException:
                self._launcher = None
                ffn_made, self._ffn = self._ffn, None
                if ffn_made is not None:
                    ffn_made.close()
                launcher.close()
                raise

    @property
    def facts(self) -> DeviceFacts:
        assert self._launcher is not None, "it is closed"
        return self._launcher.facts

    def offer_room(self, layer: int) -> U8 | None:
        """Return None: neurons are rearranged on their way to the device."""
        return None

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Send the bundles to the device, in whole tiles: the rest waits for the next ones."""
        request = self._request
        whole = join_layer_scales(request.scales, request.bundle, layer, bundles, first)
        first, whole = self._tiles.take(layer, first, whole, request.neurons[layer])
        if len(whole):
            with _explain():
                self._dense.upload(layer, first, whole)

    @property
    def _dense(self) -> DenseFfn:
        assert self._ffn is not None, "it is closed"
        return self._ffn

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        count = self._request.neurons[layer]
        start_s = time.perf_counter()
        with _explain():
            number = self._dense.start(layer, inputs, routes, neurons)
        kept = count if neurons is None else min(neurons, count)
        self._jobs[number] = _Job(start_s, layer=layer, kept=kept)
        return number

    def multiply(self, name: str, inputs: F32) -> int:
        assert self._rows is not None, f"it has no rows of {name}"
        start_s = time.perf_counter()
        with _explain():
            number = -1 - self._rows.start(name, inputs)
        self._jobs[number] = _Job(start_s, name)
        return number

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Copy ranges of neurons to the device, and let the job compute them."""
        request, known = self._request, self._jobs[job]
        for begin in range(0, len(bundles), request.stretch):
            piece = bundles[begin : begin + request.stretch]
            whole = join_layer_scales(
                request.scales, request.bundle, known.layer, piece, first + begin
            )
            with _explain():
                self._dense.add(job, whole)
        known.added += len(bundles)

    def finish(self, job: int) -> F32:
        """Return the job's sum, or its products."""
        part = self._dense if job >= 0 else self._rows
        assert part is not None
        with _explain():
            found = part.finish(job if job >= 0 else -1 - job)
        known = self._jobs.pop(job)
        if known.product:
            self._report(f"{known.product}, until the products were fetched", known.start_s)
        elif known.kept or known.added:
            added = f" and {known.added} added" if known.added else ""
            name = f"layer {known.layer}: {known.kept} kept{added} neurons"
            self._report(f"{name}, until the sum was fetched", known.start_s)
        return found

    def _report(self, name: str, start_s: float) -> None:
        """Count the time from submission, or the end of the job before, to the result's arrival."""
        end_s = time.perf_counter()
        start_s = min(max(start_s, self._end_s), end_s)
        self._end_s = end_s
        self.note(name, start_s, end_s)

    def give_up(self) -> None:
        """Forget all jobs, when the device has finished them."""
        with _explain():
            self._dense.give_up()
            if self._rows is not None:
                self._rows.give_up()
        self._jobs.clear()

    def close(self) -> None:
        ffn, self._ffn = self._ffn, None
        rows, self._rows = self._rows, None
        launcher, self._launcher = self._launcher, None
        self._jobs.clear()
        # A device that is lost has nothing to give back.
        for part in (ffn, rows, launcher):
            if part is not None:
                try:
                    part.close()
                except UserError:
                    continue


@contextmanager
def _explain() -> Iterator[None]:
    """Turn what a launcher reports into a failure of the unit."""
    try:
        yield
    except UserError as error:
        found = error.diagnostics[0]
        raise UnitFailed(found.message, help=found.help) from error
    except MemoryError as error:
        raise UnitFailed("there is no main memory left for it") from error
