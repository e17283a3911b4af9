"""What a server does by itself: it unloads idle models, and yields memory to other programs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.diagnostics import UserError
from pi2.logging import get_logger

if TYPE_CHECKING:
    from pi2.serving.hosts import Hosts

PERIOD_S, PAUSE_S = 0.5, 60.0
"""Seconds between two looks, and until the next one after a failure."""
HIGH, LOW = 10.0, 1.0
"""Percent of ten seconds in which a program waited for memory: from here on models shrink, and
below they may grow again."""
STEP, LEAST = 0.8, 0.2
"""What a budget is multiplied by at once, and altogether at most."""
SHRINK_LOOKS, GROW_LOOKS = 10, 120
"""Looks after a change before the next one."""


def read_stalls(root: Path = Path("/")) -> float:
    """Percent of the last ten seconds in which some program of this machine, or of this control
    group, has waited for memory; 0 if the system does not tell."""
    highest = 0.0
    for name in ("proc/pressure/memory", "sys/fs/cgroup/memory.pressure"):
        try:
            found = re.search(r"some avg10=([0-9.]+)", (root / name).read_text("ascii"))
        except (OSError, ValueError):
            continue
        highest = max(highest, float(found[1]) if found else 0.0)
    return highest


class Yielding:
    """Chooses the part of its budget that a model may have, from how long programs wait."""

    def __init__(self) -> None:
        self.part = 1.0
        self._looks = 0

    def look(self, stalls: float) -> float | None:
        """Another part, if it is time for one."""
        self._looks += 1
        if stalls >= HIGH and self.part > LEAST and self._looks >= SHRINK_LOOKS:
            self.part, self._looks = max(LEAST, self.part * STEP), 0
            return self.part
        if stalls >= LOW:
            self._looks = min(self._looks, SHRINK_LOOKS)
        elif self.part < 1.0 and self._looks >= GROW_LOOKS:
            self.part, self._looks = min(1.0, self.part / STEP), 0
            return self.part
        return None


async def keep_house(hosts: Hosts) -> None:
    """Look after the models until it is cancelled."""
    yielding = {name: Yielding() for name, host in hosts.hosts.items() if host.plan.yields}
    while True:
        await asyncio.sleep(PERIOD_S)
        try:
            await hosts.unload_idle()
            await _yield_memory(hosts, yielding)
        except Exception:
            get_logger().exception("idle models were not unloaded, or memory was not yielded")
            await asyncio.sleep(PAUSE_S)


async def _yield_memory(hosts: Hosts, yielding: Mapping[str, Yielding]) -> None:
    stalls = read_stalls() if yielding else 0.0
    for name, own in yielding.items():
        host = hosts.hosts[name]
        part = own.look(stalls) if host.is_loaded else None
        if part is None:
            continue
        try:
            await hosts.change_budget(int(host.stated_bytes * part), name)
        except UserError as error:
            get_logger().info("memory is not yielded", model=name, reason=str(error))
