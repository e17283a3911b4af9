"""A device and its kernels: loaded, bound to arrays, and chosen by what there is to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.gpu.arrays import TILE, Memory
from pi2.backends.gpu.devices import check_memory, open_unit
from pi2.backends.gpu.kernels.specification import GpuSpec, KernelImage, Number
from pi2.backends.gpu.launchers.interface import (
    DeviceArray,
    DeviceFacts,
    Launch,
    Launcher,
    LoadedKernel,
)
from pi2.backends.units import UnitFailed
from pi2.diagnostics import UserError
from pi2.plan.documents.device import Unit
from pi2.progress import Progress

IMAGE = ".json"
"""Suffix of the file of an image."""


def load_image(spec: GpuSpec, progress: Progress) -> KernelImage:
    """Compiled kernels of ``spec``; raises P363 without the API's compiler, P651."""
    return KernelImage.from_json(load_or_compile(spec, progress, IMAGE).read_text())


class Kernels:
    """Kernels of a device, each bound once to the same arrays."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._loaded: dict[str, LoadedKernel] = {}
        self._bound: dict[tuple[str, tuple[int, ...]], Launch] = {}

    def load(self, spec: GpuSpec, progress: Progress) -> None:
        """Add the kernels of ``spec``; raises what `load_image` raises, and P362."""
        assert spec.target == self._launcher.facts.target, (spec.target, self._launcher.facts)
        self._loaded |= self._launcher.load(load_image(spec, progress))

    def bind(self, name: str, arrays: Mapping[str, DeviceArray]) -> Launch:
        """Give a kernel its arrays, of more than it takes if there are more."""
        kernel = self._loaded[name]
        chosen = {key: arrays[key] for key in kernel.signature.arrays}
        key = (name, tuple(map(id, chosen.values())))
        if key not in self._bound:
            self._bound[key] = self._launcher.bind(kernel, chosen)
        return self._bound[key]


class OpenDevice:
    """The device of a unit, with its memory and its kernels."""

    def __init__(self, unit: Unit, counted: Memory) -> None:
        """Open it; P360 without one, P361 without room for the ``counted`` arrays."""
        self._is_open = True
        self.launcher = open_unit(unit)
        self.memory, self.kernels = Memory(self.launcher), Kernels(self.launcher)
        with self.guard():
            check_memory(self.launcher, counted.sizes)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Give the device back if its use fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def enter(self) -> None:
        """Let the calling thread use it."""
        assert self._is_open, "it is closed"
        self.launcher.enter()

    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Give it back, once the work has ended that ``finish`` waits for; may be called twice."""
        if not self._is_open:
            return
        ends = self.launcher.enter, finish, self.memory.release, self.launcher.close
        # A device that is lost has nothing to give back.
        for end in filter(None, ends):
            with suppress(UserError, UnitFailed):
                end()
        self._is_open = False


def number_product(rows: int, length: int, blocks: int = 1) -> dict[str, Number]:
    """Return the numbers of a product of a whole matrix with vectors that follow each other."""
    return {
        **dict.fromkeys(("inputs_at", "tile", "begin", "biases_at", "outputs_at"), 0),
        "inputs_stride": length * blocks,
        "inputs_each": length,
        "rows": rows,
        "outputs_stride": rows,
        "outputs_each": rows // blocks,
        "factor": 1.0,
    }


_FEW_TOKENS = 16
"""With more tokens, products by tiles of 64 tokens are the cheaper ones."""
_GROUPS_PER_UNIT = 8
"""Work groups that keep a compute unit busy."""
_UNKNOWN_UNITS = 32
"""Compute units where the API does not say."""
_COLUMNS = {1: 256, 4: 256, 64: 64}
"""Elements of the FFN's sum that a work group computes, by the tokens of the kernel."""


def choose_kernel_tokens(tokens: int) -> int:
    """Return how many tokens a work group of the cheapest kernel computes with."""
    return 1 if tokens == 1 else 4 if tokens <= _FEW_TOKENS else 64


def count_busy_groups(facts: DeviceFacts) -> int:
    """Return how many work groups keep the device busy."""
    return _GROUPS_PER_UNIT * (facts.compute_units or _UNKNOWN_UNITS)


def choose_parts(
    facts: DeviceFacts, hidden: int, neurons: int, tokens: int, size: int, rows: int
) -> int:
    """Return into how many parts the sum over ``neurons`` is divided, by a kernel of ``size``
    tokens, if there is room for ``rows`` vectors of a part and a token."""
    groups = -(-hidden // _COLUMNS[size]) * -(-tokens // size)
    most = min(rows // tokens, -(-neurons // TILE))
    return max(1, min(-(-count_busy_groups(facts) // groups), most))
