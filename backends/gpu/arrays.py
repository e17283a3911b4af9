"""Arrays on a device that are made and given back together."""

from __future__ import annotations

from collections.abc import Mapping

from pi2.backends.gpu.launchers.interface import DeviceArray, Launcher


class DeviceArrays:
    """All arrays of a user of a device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._all: list[DeviceArray] = []

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, DeviceArray]:
        """Make arrays of ``sizes`` bytes, by name; none where the size is 0.

        Raises P361 where the device has no memory for them.
        """
        arrays = {}
        for name, size in sizes.items():
            if size:
                arrays[name] = self._launcher.allocate(size)
                self._all.append(arrays[name])
        return arrays

    @property
    def total_bytes(self) -> int:
        """What they take."""
        return sum(array.size for array in self._all)

    def release(self) -> None:
        """Give their memory back."""
        arrays, self._all = self._all, []
        for array in arrays:
            self._launcher.release(array)
