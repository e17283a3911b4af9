"""Rates of GPUs, and of processors that play one, through the launchers that compute with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pi2.arrays import F32, Raw
from pi2.backends.gpu.devices import Survey, open_device, survey_api
from pi2.backends.gpu.kernels.specification import Api, GpuSpec, ProductKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.gpu.launches import Kernels, number_product
from pi2.backends.gpu.packing import pack_matrix
from pi2.formats import find_packing
from pi2.plan.weights.layout import matrix_bytes
from pi2.probing.steps import StepFacts, Times, collect_rounds, make_timer
from pi2.progress import Progress

WIDTH = 4096
ROWS = (256, 16384)
"""Rows of matrices for one token: the small one shows what starting a kernel costs."""
DENSE_ROWS = 3 * 512
"""Gate, up and down of 512 neurons."""
TOKENS = 128
_SIMILAR = 1e-3
"""Relative error of a result at which the device's arithmetic counts as right."""
_CHECKED_ROWS = 64


STEPS = (
    *(
        StepFacts(
            kernel="multiply", size=rows, read_bytes=matrix_bytes(rows, WIDTH, "int4"), width=None
        )
        for rows in ROWS
    ),
    StepFacts(
        kernel="dense",
        size=TOKENS,
        read_bytes=matrix_bytes(DENSE_ROWS, WIDTH, "int4"),
        operations=2.0 * DENSE_ROWS * WIDTH * TOKENS,
        width=None,
    ),
)


class GpuBench:
    """Measures in a process of its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def survey(self, api: Api) -> Survey:
        return survey_api(api)

    def measure(self, api: Api, number: int, rounds: int) -> Times:
        """``rounds`` median seconds of each step; ArithmeticError for wrong results."""
        bench = DeviceBench(open_device(api, number), self._progress)
        return collect_rounds({step: make_timer(bench.prepare(step)) for step in STEPS}, rounds)

    def close(self) -> None:
        """Release nothing: the process ends."""


class DeviceBench:
    def __init__(self, launcher: Launcher, progress: Progress) -> None:
        self._launcher = launcher
        self._product = ProductKernels(length=WIDTH, precision="int4")
        spec = GpuSpec(target=launcher.facts.target, products=(self._product,))
        self._kernels = Kernels(launcher)
        self._kernels.load(spec, progress)
        self._queue = launcher.open_queue()

    def prepare(self, step: StepFacts) -> Callable[..., None]:
        """A function that runs the step and waits for it; its result was compared with numpy's."""
        rows, tokens = (step.size, 1) if step.kernel == "multiply" else (DENSE_ROWS, step.size)
        random = np.random.default_rng(5)
        matrix = random.standard_normal((rows, WIDTH), np.float32)
        weights, scales = find_packing("int4").quantize(matrix)
        inputs = random.standard_normal((tokens, WIDTH), np.float32)
        outputs = np.zeros((tokens, rows), np.float32)
        packed = pack_matrix(weights, scales, WIDTH, "int4")
        sent: dict[str, Raw] = {**packed, "inputs": inputs, "outputs": outputs}
        arrays = {name: self._launcher.allocate(value.nbytes) for name, value in sent.items()}
        for name, value in sent.items():
            self._queue.upload(arrays[name], value)
        size = 1 if tokens == 1 else 64
        launch = self._kernels.bind(f"{self._product.name}_{size}", arrays)
        recording = self._queue.record([(launch, number_product(rows, WIDTH) | {"tokens": tokens})])

        def run(_: int = 0) -> None:
            self._queue.replay(recording)
            self._queue.submit().wait()

        run()
        self._queue.download(arrays["outputs"], outputs)
        self._queue.submit().wait()
        some = slice(0, None, max(1, rows // _CHECKED_ROWS))
        few = None if scales is None else scales[some]
        wanted = inputs @ find_packing("int4").dequantize(weights[some], few, WIDTH).T
        _check_product(outputs[:, some], wanted)
        return run


def _check_product(found: F32, wanted: F32) -> None:
    error = float(np.abs(wanted - found).max() / np.abs(wanted).max())
    if not error < _SIMILAR:
        raise ArithmeticError(f"its results differ from the processor's by {error:.1%}")
