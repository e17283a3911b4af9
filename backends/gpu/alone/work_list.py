"""A list of kernels under construction, each with its arrays and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from pi2.backends.gpu.alone.use import ModelUse
from pi2.backends.gpu.alone.weights import ModelArrays
from pi2.backends.gpu.kernels.signature import Number
from pi2.backends.gpu.kernels.specification import ProductKernels
from pi2.backends.gpu.launchers.interface import DeviceArray, Launch, Launcher, LoadedKernel
from pi2.backends.gpu.work_sizes import choose_kernel_tokens

Work = tuple[Launch, Mapping[str, Number]]
"""A kernel with its arrays, and its numbers."""


class WorkList:
    """Binds kernels to a model's arrays, each pair once, and lists them."""

    def __init__(
        self,
        launcher: Launcher,
        kernels: Mapping[str, LoadedKernel],
        use: ModelUse,
        arrays: ModelArrays,
    ) -> None:
        self.launcher, self.use = launcher, use
        self._kernels = kernels
        self.arrays = arrays
        self.state = arrays.state
        """What is computed with, by name."""
        self._bound: dict[tuple[str, tuple[int, ...]], Launch] = {}
        self._work: list[Work] = []

    def take(self) -> list[Work]:
        """Return the list, and begin another."""
        work, self._work = self._work, []
        return work

    def add(
        self, name: str, arrays: Mapping[str, DeviceArray], numbers: Mapping[str, Number]
    ) -> None:
        """Add a kernel; ``arrays`` and ``numbers`` may be more than it takes."""
        kernel = self._kernels[name]
        chosen = {key: arrays[key] for key in kernel.signature.arrays}
        key = (name, tuple(map(id, chosen.values())))
        if key not in self._bound:
            self._bound[key] = self.launcher.bind(kernel, chosen)
        self._work.append((self._bound[key], numbers))

    def find_tensor(self, name: str) -> Mapping[str, DeviceArray]:
        """The arrays of a tensor."""
        return self.arrays.tensors[name]

    def find_vector(self, name: str) -> DeviceArray:
        """The array of a tensor of float32."""
        return self.arrays.tensors[name]["values"]

    def multiply(
        self,
        product: ProductKernels,
        tensor: str,
        rows: int,
        tokens: int,
        inputs: DeviceArray,
        outputs: DeviceArray,
        bias: str | None = None,
    ) -> None:
        """Add the product of ``inputs`` with the ``rows`` of ``tensor``."""
        size = min(choose_kernel_tokens(tokens), 4 if product.blocks > 1 else 64)
        arrays = {**self.find_tensor(tensor), "inputs": inputs, "outputs": outputs}
        if product.bias:
            assert bias is not None, product
            arrays["biases"] = self.find_vector(bias)
        self.add(f"{product.name}_{size}", arrays, {"rows": rows, "tokens": tokens})

    def normalise(self, name: str, source: str, target: str, first: int, tokens: int) -> None:
        """Add the norm ``name`` of tokens of ``source`` from ``first`` on, into ``target``."""
        arrays = {
            "x": self.state[source],
            "outputs": self.state[target],
            "weights": self.find_vector(name),
        }
        if self.use.model.norm.bias:
            arrays["biases"] = self.find_vector(f"{name}_bias")
        self.add("norm", arrays, {"first": first, "tokens": tokens})
