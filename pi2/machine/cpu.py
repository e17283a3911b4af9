"""The processor: architecture, instruction-set features, cores that may be used."""

from __future__ import annotations

import ctypes
import os
import platform
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError
from pi2.machine.memory import find_cpu_quota, read_int, read_text
from pi2.tile_permission import permit_tiles

if TYPE_CHECKING:
    from pi2.plan.documents.device import IsaFeature


_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_FEATURES: Mapping[str, Mapping[str, IsaFeature]] = _TABLE["features"]
LEVELS: Mapping[str, Mapping[str, Sequence[IsaFeature]]] = _TABLE["levels"]
LIMIT = "PI2_CPU"
"""Environment variable that hides features of this processor: the best one of `LEVELS` to use."""


def read_hwcaps() -> frozenset[IsaFeature] | None:
    """Features of every core; None where the C library does not tell."""
    try:
        ask = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return None
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    places = _TABLE["hwcaps"].items()
    return frozenset(name for name, (entry, bit) in places if int(ask(entry)) >> bit & 1) or None


def list_allowed_cores() -> list[int]:
    """Return the cores that the calling thread may use; empty where threads cannot be bound."""
    ask = getattr(os, "sched_getaffinity", None)
    try:
        return [] if ask is None else sorted(ask(0))
    except OSError:  # a sandbox that forbids the question
        return []


def bind_calling_thread(cores: Iterable[int]) -> None:
    """Let the calling thread run on ``cores`` only; threads that it starts inherit them."""
    os.sched_setaffinity(0, cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCores:
    cores: int
    """Number of them that are online."""
    max_hz: float | None = None
    """Highest clock, if the system says."""
    core: str | None = None
    """Micro-architecture, such as ``cortex-x4``, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor as far as this process may use it."""

    name: str
    """Commercial name, or the best that the system says."""
    architecture: str
    """``x86-64``, ``aarch64``, or what the system calls one that pi2 has no kernels for."""
    features: frozenset[IsaFeature]
    """Features that *every* core has: a thread may run on any of them."""
    cores_online: int
    """Cores of the machine."""
    cores: int
    """Cores that this process may use: its affinity and its container's quota, at least 1."""
    quota_cores: float | None
    """The container's share of processor time in cores, if it sets one."""
    clusters: tuple[CpuCores, ...]
    """Kinds of cores, the fastest first; at least one."""


def detect_cpu(
    root: Path = Path("/"), *, machine: str | None = None, affinity: int | None = None
) -> Cpu:
    """Detect the processor; ``machine`` and ``affinity`` replace the running system's answers."""
    reported = (machine or platform.machine()).lower()
    architecture = _TABLE["architectures"].get(reported, reported)
    is_here = machine is None and root == Path("/")
    processors = _read_processors(root)
    online = len(processors) or os.cpu_count() or 1
    if affinity is None:
        affinity = len(list_allowed_cores()) or online
    quota = find_cpu_quota(root)
    cores = affinity if quota is None else min(affinity, int(quota))
    clusters = _group_cores(root, processors) or (CpuCores(cores=online),)
    features = read_hwcaps() if is_here and architecture == "aarch64" else None
    features = features or _find_features(architecture, processors)
    if is_here and "amx-int8" in features and not permit_tiles():
        features -= {"amx-int8"}
    if is_here and (level := os.environ.get(LIMIT)):
        features = _limit_features(architecture, features, level)
    return Cpu(
        name=_name_cpu(root, processors, clusters),
        architecture=architecture,
        features=features,
        cores_online=online,
        cores=max(1, cores),
        quota_cores=quota,
        clusters=clusters,
    )


def list_features(architecture: str, level: str) -> frozenset[IsaFeature]:
    """Return what processors of a generation of `LEVELS` have; raises `UserError` P699."""
    levels = LEVELS.get(architecture, {})
    found: frozenset[IsaFeature] = frozenset()
    for name, own in levels.items():
        found |= frozenset(own)
        if name == _TABLE["aliases"].get(level, level):
            return found
    raise _refuse(f"{level} names no generation of {architecture} processors", levels)


def _limit_features(architecture: str, own: Set[IsaFeature], level: str) -> frozenset[IsaFeature]:
    wanted = list_features(architecture, level)
    if missing := sorted(wanted - own):
        levels = LEVELS[architecture]
        runnable = [name for name in levels if list_features(architecture, name) <= own]
        raise _refuse(f"{level} needs {', '.join(missing)}: this processor has less", runnable)
    return wanted


def _refuse(problem: str, levels: Iterable[str]) -> UserError:
    help_text = f"set {LIMIT} to one of {', '.join(levels)}, or unset it"
    return UserError.of("P699", f"{LIMIT}={problem}", help=help_text)


Processor = Mapping[str, str]
"""The entries of one logical processor in ``/proc/cpuinfo``."""


def _read_processors(root: Path) -> list[Processor]:
    """Processors of ``/proc/cpuinfo``, with entries of the whole system, as phones have them."""
    common: dict[str, str] = {}
    processors: list[dict[str, str]] = []
    for block in (read_text(root / "proc/cpuinfo") or "").split("\n\n"):
        entries = {}
        for line in block.splitlines():
            name, colon, value = line.partition(":")
            if colon:
                entries[name.strip()] = value.strip()
        # "Processor" with a capital is the name of the whole chip on old Arm kernels.
        (common.update if "processor" not in entries else processors.append)(entries)
    return [{**common, **entries} for entries in processors]


def _find_features(architecture: str, processors: Sequence[Processor]) -> frozenset[IsaFeature]:
    names = _FEATURES.get(architecture, {})
    found: list[frozenset[IsaFeature]] = []
    for processor in processors:
        words = set(processor.get("flags", processor.get("Features", "")).split())
        family = f"{processor.get('vendor_id')} {processor.get('cpu family')}"
        tables = names, _TABLE["families"].get(family, {})
        found.append(frozenset(own[word] for own in tables for word in words & own.keys()))
    if found:
        return frozenset.intersection(*found)
    # Without /proc only what the architecture itself promises is certain.
    return frozenset({"neon"}) if architecture == "aarch64" else frozenset()


def _group_cores(root: Path, processors: Sequence[Processor]) -> tuple[CpuCores, ...]:
    groups: dict[tuple[float, str], int] = {}
    for processor in processors:
        folder = root / f"sys/devices/system/cpu/cpu{processor['processor']}"
        khz = read_int(folder / "cpufreq/cpuinfo_max_freq") or 0
        key = (khz * 1e3, _name_core(processor) or "")
        groups[key] = groups.get(key, 0) + 1
    return tuple(
        CpuCores(cores=cores, max_hz=hz or None, core=core or None)
        for (hz, core), cores in sorted(groups.items(), reverse=True)
    )


def _name_core(processor: Processor) -> str | None:
    """Micro-architecture of an Arm core; x86 states a model name instead."""
    try:
        implementer = int(processor["CPU implementer"], 0)
        part = int(processor["CPU part"], 0)
    except (KeyError, ValueError):
        return None
    return _TABLE["arm_cores"].get(f"{part:03x}") if implementer == 0x41 else None


def _name_cpu(root: Path, processors: Sequence[Processor], clusters: Sequence[CpuCores]) -> str:
    for processor in processors[:1]:
        for key in ("model name", "Hardware"):
            if processor.get(key):
                return processor[key]
    board = (read_text(root / "sys/firmware/devicetree/base/model") or "").strip("\0\n ")
    if board:
        return board
    known = [f"{cluster.cores}x {cluster.core}" for cluster in clusters if cluster.core]
    return ", ".join(known) or platform.processor() or "unknown"
