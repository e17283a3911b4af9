"""GPUs for tests: launchers of this machine, and neurons with what numpy computes of them."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from pi2.arrays import F32, F64, U8
from pi2.backends.gpu.devices import survey_devices
from pi2.backends.gpu.kernels.specification import Api, FfnKernels, Number
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.reference.neurons import activate
from pi2.formats import find_packing
from pi2.plan.weights.bundles import assemble_bundles, slice_bias, slice_experts, unpack_part
from pi2.plan.weights.layout import BundleLayout, lay_out_bundle


@cache
def open_launcher(api: Api) -> Launcher | str:
    from pi2.backends.gpu.devices import open_device

    (survey,) = survey_devices([api])
    if not survey.devices:
        return f"{api}: {survey.obstacle}; {survey.help}"
    return open_device(api)


def require_launcher(api: Api) -> Launcher:
    """The API's device; skips the test where there is none."""
    found = open_launcher(api)
    if isinstance(found, str):
        pytest.skip(found)
    return found


class RandomNeurons:
    def __init__(self, ffn: FfnKernels, count: int, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.ffn, self.count = ffn, count
        self.layout: BundleLayout = lay_out_bundle(
            ffn.hidden,
            ffn.precision,
            gated=ffn.options.gated,
            bias=ffn.options.bias,
            mixed=ffn.experts > 0,
        )
        scale = np.float32(ffn.hidden**-0.5)
        parts = []
        for _ in self.layout.parts:
            rows = random.standard_normal((count, ffn.hidden)).astype(np.float32) * scale
            parts.append(find_packing(ffn.precision).quantize(rows))
        biases = random.standard_normal((count, ffn.parts)).astype(np.float32)
        experts = random.integers(0, max(ffn.experts, 1), count).astype(np.int32)
        self.bundles: U8 = assemble_bundles(
            parts,
            self.layout,
            biases if ffn.options.bias else None,
            experts if ffn.experts else None,
        )

    def make_inputs(self, tokens: int) -> F32:
        random = np.random.default_rng(tokens)
        return random.standard_normal((tokens, self.ffn.hidden)).astype(np.float32)

    def make_routes(self, tokens: int) -> F32 | None:
        """Weights [tokens, experts] of a mixture's experts."""
        if not self.ffn.experts:
            return None
        return np.random.default_rng(tokens).random((tokens, self.ffn.experts)).astype(np.float32)

    def compute_values(self, inputs: F32, routes: F32 | None) -> F64:
        """Activations [tokens, count] in double precision."""
        products: list[F64] = []
        for index in range(self.ffn.parts):
            rows = unpack_part(self.bundles, self.layout, index).astype(np.float64)
            product = inputs.astype(np.float64) @ rows.T
            if self.ffn.options.bias:
                product = product + slice_bias(self.bundles, self.layout, index)
            products.append(product)
        model: Any = SimpleNamespace(ffn=self.ffn.options)
        weights = None if routes is None else routes[:, slice_experts(self.bundles, self.layout)]
        if weights is not None and self.ffn.weighs_input:
            products = [product * weights for product in products]
        up: Any = products[1] if self.ffn.options.gated else None
        values = cast(F64, activate(model, cast(Any, products[0]), up))
        return values if weights is None or self.ffn.weighs_input else values * weights

    def compute_sums(self, values: F64) -> F64:
        last = len(self.layout.parts) - 1
        return values @ unpack_part(self.bundles, self.layout, last).astype(np.float64)


_GUARD = bytes(range(256))
"""What lies behind every array on the device."""


class Bench:
    def __init__(self, launcher: Launcher, kernels: Sequence[Any]) -> None:
        from pi2.backends.gpu.kernels.compile import build_image

        self._launcher = launcher
        self._queue = launcher.open_queue()
        self._kernels = launcher.load(build_image(kernels, launcher.facts.target))

    def list_arrays(self, name: str) -> Sequence[str]:
        return self._kernels[name].signature.arrays

    def run(
        self, name: str, arrays: Mapping[str, npt.NDArray[Any]], numbers: Mapping[str, Number]
    ) -> dict[str, npt.NDArray[Any]]:
        """Run a kernel once; return what is in the arrays then.  Nothing behind them is written."""
        on_device, found = {}, {}
        for key, array in arrays.items():
            data = np.frombuffer(array.tobytes() + _GUARD[array.nbytes % 4 :], np.uint8)
            on_device[key] = self._launcher.allocate(len(data))
            found[key] = np.empty_like(data)
            self._queue.upload(on_device[key], data)
        self._queue.launch(self._launcher.bind(self._kernels[name], on_device), numbers)
        for key, data in found.items():
            self._queue.download(on_device[key], data)
        self._queue.submit().wait()
        results = {}
        for key, array in arrays.items():
            self._launcher.release(on_device[key])
            after = found[key].tobytes()
            assert after[array.nbytes :] == _GUARD[array.nbytes % 4 :], f"{name} overran {key}"
            flat = np.frombuffer(after[: array.nbytes], array.dtype)
            results[key] = flat.reshape(array.shape).copy()
        return results
