"""What a launcher is: memory, kernels and queues of one device.

One thread at a time uses a launcher; another one calls ``enter`` first.  Work is put into a queue
and runs in its order, later than the call that asks for it::

    arrays = {name: launcher.allocate(size) ...}
    kernels = launcher.load(image)
    values = launcher.bind(kernels["values_1"], arrays)
    queue = launcher.open_queue()
    queue.upload(arrays["inputs"], inputs)
    queue.launch(values, {"tokens": 1, ...})
    queue.download(arrays["sums"], sums)
    queue.submit().wait()                       # sums holds the result now

What a driver or a device refuses becomes a diagnostic: P360 (there is no device), P361 (its memory
is full) or P362 (it does not compute)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pi2.backends.gpu.kernels.specification import Api, KernelImage, Number, Signature, Target
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import round_up

if TYPE_CHECKING:
    import numpy.typing as npt

    from pi2.arrays import U8

    Array = npt.NDArray[Any]

DeviceKind = Literal["discrete", "integrated", "processor"]
"""``processor``: the machine's own cores play a GPU (PoCL, lavapipe): for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a driver says of a device."""

    api: Api
    number: int
    """The device's number in the API's list."""
    name: str
    driver: str
    kind: DeviceKind
    memory_bytes: int | None
    """Memory of the device's own; None where it uses main memory, or the API does not say."""
    fp16: bool
    """Whether kernels may have fp16 values."""
    compute_units: int | None
    max_array_bytes: int
    """The largest array that a kernel may read."""
    shared_bytes: int
    """Memory that the threads of a work group may share."""
    arch: str | None = None
    """Architecture of a CUDA device, such as ``sm_80``; None for the other APIs."""

    @property
    def is_emulated(self) -> bool:
        """Whether it is no GPU at all: its times say nothing about one."""
        return self.kind == "processor"

    @property
    def target(self) -> Target:
        return Target(api=self.api, fp16=self.fp16, arch=self.arch)


VECTOR_BYTES = 16
"""Arrays are whole vectors."""


@dataclass(slots=True)
class DeviceArray:
    """An array in the device's memory; its first content is undefined."""

    handle: Any
    """What the API calls it."""
    size: int
    """Its size in bytes."""


@dataclass(slots=True)
class LoadedKernel:
    """A kernel that the driver has accepted."""

    signature: Signature
    handle: Any
    """What the API calls it, or the program that it is in."""


class Launch(Protocol):
    kernel: LoadedKernel


class Event(Protocol):
    """A point in a queue."""

    def wait(self) -> None:
        """Return when everything before it is done: downloads are in their arrays then."""


class Recording(Protocol):
    """Kernels with their arrays and numbers, ready to be started again and again."""


class Queue(Protocol):
    """Work that runs in its order: launches, recordings and events of the same launcher."""

    def upload(self, target: DeviceArray, source: Array, offset: int = 0) -> None:
        """Copy ``source`` to byte ``offset`` of ``target``; both are multiples of 4 bytes.
        ``source`` stays as it is until an event that follows is reached."""

    def download(self, source: DeviceArray, target: Array, offset: int = 0) -> None:
        """Copy from byte ``offset`` of ``source`` into ``target`` (contiguous), which is filled
        when an event that follows has been waited for."""

    def launch(self, launch: Any, numbers: Mapping[str, Number]) -> None:
        """Run a kernel; ``numbers`` may hold more than it takes."""

    def record(self, work: Sequence[tuple[Any, Mapping[str, Number]]]) -> Recording:
        """Prepare kernels that will be run more than once in this order; nothing runs yet."""

    def replay(self, recording: Any) -> None:
        """Run this queue's recorded work."""

    def wait_for(self, event: Any) -> None:
        """Let what follows begin after ``event``, of another queue of the launcher."""

    def submit(self) -> Event:
        """Send everything so far to the device."""


class Launcher(Protocol):
    """A device that was opened."""

    facts: DeviceFacts
    allocated_bytes: int = 0
    """Bytes of all arrays that are not released."""

    def allocate(self, size: int) -> DeviceArray:
        """Make an array of ``size`` bytes, a multiple of 4, in whole vectors; raises P361."""
        assert size % 4 == 0, size
        size = round_up(max(size, 1), VECTOR_BYTES)
        array = DeviceArray(self._allocate(size), size)
        self.allocated_bytes += size
        return array

    def _allocate(self, size: int) -> Any:
        """Return the handle of a new array."""

    def release(self, array: DeviceArray) -> None:
        """Give an array's memory back; no work that uses it may be left in a queue."""
        self._release(array.handle)
        self.allocated_bytes -= array.size

    def _release(self, handle: Any) -> None:
        """Give the memory behind a handle back."""

    def allocate_host(self, size: int) -> U8:
        """Make bytes in main memory from and to which copies are fastest."""

    def load(self, image: KernelImage) -> Mapping[str, LoadedKernel]:
        """Hand kernels to the driver; raises P362."""

    def bind(self, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]) -> Launch:
        """Give a kernel its arrays, of more than it takes if there are more."""

    def open_queue(self) -> Queue:
        """Make a queue."""

    def enter(self) -> None:
        """Let the calling thread use the launcher and its queues; drivers that every thread may
        call need nothing for it."""
        return

    def count_free(self) -> int | None:
        """Bytes of the device's memory that are free now; None where the API does not say."""
        return None

    def close(self) -> None:
        """Give everything back, if anything is held beyond the objects themselves."""
        return


@contextmanager
def explain_driver(
    what: str, kinds: tuple[type[Exception], ...], is_full: Callable[[Exception], bool]
) -> Iterator[None]:
    """Turn errors of ``kinds`` into a diagnostic: P361 if memory ``is_full``, or P362."""
    try:
        yield
    except kinds as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        is_memory = is_full(error)
        raise UserError.of(
            "P361" if is_memory else "P362",
            f"{what}: {lines[0] if lines else 'the driver does not say why'}",
            help="give the unit less in the plan's `memory.units`"
            if is_memory
            else "bring the driver up to date, or choose another unit or API in the plan",
            notes=lines[1:12],
        ) from error
