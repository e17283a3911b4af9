"""What a device does: times of measured steps at a model's width, and all of its rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter
from typing import Literal, get_args

import numpy as np

from pi2.costs.constants import CERTAIN, Constants, Figure, Flash, Side, Spread
from pi2.plan.documents.device import ComputeFigure, KernelFigure, KernelName, Unit
from pi2.plan.documents.plan import ActivationType, KvType

USUAL_WIDTH = 4096
"""Width of the model that kernels were measured with, if a figure does not state it."""
_ENOUGH_SHARE = 0.6
"""Share of the cores that reads as fast as all."""
Step = Literal["multiply", "project", "attend", "predict", "gather", "gate", "open"]
"""A step whose time depends on its bytes: ``gate`` computes all gates, ``open`` the neurons whose
gates are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Seconds = ``call_s`` + bytes / ``bytes_s``."""

    call_s: float
    bytes_s: float


_NOTHING = Linear(call_s=0.0, bytes_s=inf)
"""A step that takes no time."""
Draw = Callable[[list[KernelFigure]], tuple[float, ...] | None]
"""Numbers of the figures of a kernel at one width, in the order of their sizes."""


class KernelTimes:
    """Times of a processor's steps, from the figures that its device states."""

    def __init__(
        self,
        unit: Unit,
        width: int | None,
        constants: Constants,
        *,
        kv: KvType = "fp16",
        activations: ActivationType = "int16",
    ) -> None:
        """``width`` of the model, None for the largest; other ``kv`` or ``activations`` as well."""
        self._unit = unit
        self._width = width
        self._constants = constants
        self.cores = max(1, sum(cluster.cores for cluster in unit.clusters))
        self.barrier_s = self.cores * constants.core_barrier_s
        """Until all threads have met."""
        self._kernels: dict[KernelName, list[KernelFigure]] = {}
        for name in get_args(KernelName):
            if found := _choose_figures(unit, name, kv, activations):
                self._kernels[name] = found

    @property
    def measured(self) -> bool:
        return bool(self._kernels)

    def has(self, kernel: KernelName) -> bool:
        return kernel in self._kernels

    def find(self, kernel: KernelName, draw: Draw) -> tuple[float, ...] | None:
        """Numbers that ``draw`` takes from figures of one width, interpolated to the model's width;
        None if it takes none."""
        by_width: dict[int, list[KernelFigure]] = {}
        for item in self._kernels.get(kernel, []):
            by_width.setdefault(item.width or USUAL_WIDTH, []).append(item)
        every = (
            (x, draw(sorted(by_width[x], key=lambda item: item.size))) for x in sorted(by_width)
        )
        drawn = [(width, numbers) for width, numbers in every if numbers is not None]
        if not drawn:
            return None
        widths, found = zip(*drawn, strict=True)
        at = self._width or widths[-1]
        return tuple(float(np.interp(at, widths, numbers)) for numbers in zip(*found, strict=True))

    def find_time(self, kernel: KernelName, default_s: float, *, most: bool = False) -> float:
        """Seconds of a step that does not depend on its work, or of its least or ``most``."""
        found = self.find(kernel, lambda items: (float(items[-1 if most else 0].time),))
        return default_s if found is None else found[0]

    def find_linear(self, kernel: KernelName, bandwidth: float, call_s: float) -> Linear:
        """Line through the largest measurements of two widths, else the plain bandwidth."""
        found = [item for item in self._kernels.get(kernel, []) if item.bytes]
        if not found:
            return Linear(call_s=call_s, bytes_s=bandwidth)
        largest = max(found, key=lambda item: item.bytes or 0)
        smallest = min(found, key=lambda item: item.bytes or 0)
        assert largest.bytes is not None and smallest.bytes is not None
        seconds = max(float(largest.time) - call_s, float(largest.time) / 2)
        if smallest.width != largest.width and smallest.time < largest.time:
            rate = (largest.bytes - smallest.bytes) / float(largest.time - smallest.time)
            return Linear(
                call_s=max(float(smallest.time) - smallest.bytes / rate, 0.0), bytes_s=rate
            )
        return Linear(call_s=call_s, bytes_s=largest.bytes / seconds)

    def find_attend(self, bandwidth: float) -> Linear:
        """The KV cache of the context; short rows cost more per byte."""
        found = self.find("attend", lambda items: (float(items[-1].time) / (items[-1].bytes or 1),))
        return Linear(call_s=0.0, bytes_s=bandwidth if found is None else 1.0 / found[0])

    def find_gather(self, bandwidth: float, kernel: KernelName = "gather") -> Linear:
        found = self.find(kernel, _draw_gather) or self.find("gather", _draw_gather)
        if found is None:
            return Linear(
                call_s=self.barrier_s, bytes_s=bandwidth * self._constants.gather_efficiency
            )
        call_s, neuron_s, width = found
        return Linear(call_s=call_s, bytes_s=width / neuron_s)

    def find_look_up(self) -> tuple[Linear, float, float]:
        """Seconds of a look-up: fixed, per missing neuron, for any missing one, per cached one."""
        found = self.find("look-up", _draw_look_up)
        if found is None:
            return Linear(call_s=self.barrier_s, bytes_s=inf), 0.0, 0.0
        call_s, neuron_s, place_s = found
        touch_s = 0.0
        if touches := self.find("engine-cached", lambda items: draw_line(items[0], items[-1])):
            fixed_s, touch_s = touches
            call_s = max(fixed_s - self.find_time("engine", 0.0), 0.0)
        return Linear(call_s=call_s, bytes_s=1.0 / neuron_s), place_s, touch_s

    def find_many(self, kernel: KernelName) -> tuple[float, float] | None:
        if (found := self.find(kernel, _draw_many)) is not None:
            once_s, token_s = found
            return once_s, token_s
        rate = self.find_ops(kernel)
        return None if rate is None else (0.0, 2.0 / rate)

    def find_ops(self, kernel: KernelName, *, few: bool = False) -> float | None:
        own = self._kernels.get(kernel, [])
        widest = max((item.width or USUAL_WIDTH for item in own), default=0)
        rates = [
            (item.size, item.giga_ops)
            for item in own
            if item.giga_ops and (item.width or USUAL_WIDTH) == widest
        ]
        if rates:
            return (min if few else max)(rates, key=itemgetter(0))[1] * 1e9
        order = {"int4": 0, "int8": 1, "fp16": 2, "fp32": 3}
        stated = min(self._unit.compute, key=lambda item: order[item.precision], default=None)
        return None if stated is None else count_ops(stated, self._constants)


def count_ops(figure: ComputeFigure, constants: Constants) -> float:
    """Operations per second that programs reach."""
    return figure.giga_ops * 1e9 * (constants.vendor_ops_share if figure.peak else 1.0)


def _choose_figures(
    unit: Unit, kernel: KernelName, kv: KvType, activations: ActivationType
) -> list[KernelFigure]:
    """A kernel's figures with these types; else with the one that matters most to it."""
    own = [item for item in unit.kernels if item.kernel == kernel]
    wishes: tuple[tuple[KvType | None, ActivationType | None], ...] = (
        (kv, activations),
        (kv, None) if kernel == "attend" else (None, activations),
        ("fp16", "int16"),
        (None, None),
    )
    for wanted_kv, wanted in wishes:
        found = [
            item
            for item in own
            if wanted_kv in (None, item.kv) and wanted in (None, item.activations)
        ]
        if found:
            types = (found[0].kv, found[0].activations)
            return [item for item in found if (item.kv, item.activations) == types]
    return []


def _draw_gather(items: list[KernelFigure]) -> tuple[float, float, float]:
    """Seconds of a call, and of a neuron, which grow with its width; and that width."""
    smallest, largest = items[0], items[-1]
    assert largest.bytes is not None and smallest.bytes is not None
    rate = largest.bytes / float(largest.time)
    if largest.bytes > smallest.bytes and largest.time > smallest.time:
        rate = (largest.bytes - smallest.bytes) / float(largest.time - smallest.time)
    call_s = min(max(float(smallest.time) - smallest.bytes / rate, 0.0), float(smallest.time))
    width = largest.width or USUAL_WIDTH
    return call_s, width / rate, float(width)


def _draw_look_up(items: list[KernelFigure]) -> tuple[float, float, float] | None:
    """Seconds of a look-up without misses, per missing neuron, and for any miss."""
    if len(items) < 2:
        return None
    none, few, most = items[0], items[1], items[-1]
    neuron_s = float(most.time) / most.size
    if len(items) > 2:
        slope_s = float(most.time - few.time) / (most.size - few.size)
        neuron_s = min(neuron_s, max(slope_s, 1e-9))
    return float(none.time), neuron_s, float(most.time) - most.size * neuron_s


def draw_line(
    few: KernelFigure, many: KernelFigure, *, by_bytes: bool = False
) -> tuple[float, float]:
    """Seconds of a call, and of each of its things, or bytes, by two measurements."""
    first, last = ((item.bytes or 0) if by_bytes else item.size for item in (few, many))
    each_s = max(float(many.time - few.time), 0.0) / max(last - first, 1)
    return float(few.time) - first * each_s, each_s


def _draw_many(items: list[KernelFigure]) -> tuple[float, float] | None:
    few, many = items[0], items[-1]
    if not few.giga_ops or not many.giga_ops or few.size == many.size:
        return None
    weights = many.giga_ops * 1e9 * float(many.time) / (2.0 * many.size)
    once_s, token_s = draw_line(few, many)
    return max(once_s, 0.0) / weights, token_s / weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseUnit:
    """An NPU or GPU that computes hot neurons next to the CPU."""

    name: str
    bytes_s: float
    launch_s: float
    ops_s: float | None
    is_npu: bool = True
    """Whether it has one scale for a row of weights, as NPUs do."""
    has_memory: bool = False
    """Whether it has memory of its own for its neurons, and takes no main memory bandwidth."""
    spread: Spread = CERTAIN
    ops_spread: Spread = CERTAIN

    def vary(self, side: Side) -> DenseUnit:
        share, ops = self.spread.find(side), self.ops_spread.find(side)
        return replace(
            self,
            bytes_s=share * self.bytes_s,
            launch_s=self.launch_s / share,
            ops_s=self.ops_s and ops * self.ops_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does, for all threads of its processor."""

    measured: bool
    """Whether pi2's own kernels were measured on it."""
    cores: int
    enough_cores: float = 5.0
    """Cores that read as fast as all, if fewer were not measured."""
    core_share: float = 1.0
    """Part of the processor's rates that stays in runs which read from flash all the time."""
    core_ops_s: tuple[float, ...] = ()
    """Operations per second of each core for one token, fastest first; none if kernels were
    measured."""
    bandwidth_bytes_s: float
    """Rate at which the processor reads memory."""
    steps: Mapping[Step, Linear]
    norm_s: float
    route_s: float = 0.0
    """Time to choose an MoE model's experts."""
    python_s: float = 0.0
    """What the engine does in a layer between the steps."""
    token_s: float = 0.0
    """Time of the engine's own work once per token."""
    look_up: Linear = _NOTHING
    """Time of a look-up in the neuron cache; its "bytes" are missing neurons."""
    place_s: float = 0.0
    """What a look-up takes more where anything is missing, however little."""
    find_s: float = 0.0
    """Time to find the neurons of a call's slots, whose gates are wanted."""
    find_hot_s: float = 0.0
    """Time to find the neurons of a layer that is all hot."""
    wake_s: float = 0.0
    """What a call takes more after threads had nothing to do."""
    room_s: float = 0.0
    """Seconds to find room for a read neuron, if look-ups were not measured."""
    touch_s: float = 0.0
    """Each neuron that is found in the cache: its use is counted."""
    dense_many: tuple[float, float] | None = None
    """Seconds per weight of dense neurons for a pass, and for each token of it; None if unknown."""
    project_many: tuple[float, float] | None = None
    """Seconds of a weight of a layer's projections, for a pass and for each of its tokens."""
    few_ops_s: float | None = None
    """Operations per second for a few tokens, such as a batch."""
    shared_bytes_s: float
    dense: DenseUnit | None = None
    flash: Flash | None = None
    whole_unit: str | None = None
    """The GPU or NPU that has the whole model; None if the processor computes."""
    overlap: float = 1.0
    """Part of reading that computing with all cores can hide."""
    beside_overlap: float = 1.0
    """The same of computing with another unit, which leaves the cores to reads."""
    power_w: float | None = None
    """Power of the processor while it generates; None where it is not stated."""
    both_w: float | None = None
    """Power of the whole device while the other unit computes as well."""
    bandwidths: tuple[tuple[int, float], ...] = ()
    """Read bandwidth by number of threads."""
    types: Mapping[tuple[KvType, ActivationType], Mapping[Step, Linear]] = field(
        default_factory=dict
    )
    """Steps with other keys, values and activations than fp16 and int16."""
    figures: tuple[Figure, ...] = ()
    """Figures of the device's document that the rates come from."""
    spread: Spread = CERTAIN
    """Of the processor's rates."""
    call_spread: Spread = CERTAIN
    """Of the inverse of its fixed times."""
    ops_spread: Spread = CERTAIN
    """Of its arithmetic with many tokens."""
    flash_spread: Spread = CERTAIN
    constants: Constants = field(default_factory=Constants)
    """Replacements of figures that the device does not state."""

    def slow_cores(self, share: float, calls: float = 1.0) -> Rates:
        """These rates of a processor that keeps ``share`` of its speed."""
        core_ops_s = tuple(share * item for item in self.core_ops_s)
        bytes_s = share * self.bandwidth_bytes_s
        slow = replace(self, bandwidth_bytes_s=bytes_s, core_ops_s=core_ops_s)
        return slow.scale_kernels(share, calls)

    def vary(self, side: Side) -> Rates:
        """These rates at one end of their ranges."""
        spreads = self.spread, self.call_spread, self.ops_spread, self.flash_spread
        share, calls, ops, reads = (item.find(side) for item in spreads)
        many = (self.dense_many, self.project_many)
        dense_many, project_many = (x and (x[0] / ops, x[1] / ops) for x in many)
        return replace(
            self.slow_cores(share, calls),
            norm_s=self.norm_s / calls,
            route_s=self.route_s / calls,
            token_s=self.token_s / calls,
            dense_many=dense_many,
            project_many=project_many,
            few_ops_s=self.few_ops_s and ops * self.few_ops_s,
            shared_bytes_s=share * self.shared_bytes_s,
            dense=self.dense and self.dense.vary(side),
            flash=self.flash and self.flash.scale(reads),
        )

    def scale_kernels(self, share: float, calls: float = 1.0) -> Rates:
        """These rates with kernels that read at ``share`` of their rate, and start at ``calls``."""

        def scale(steps: Mapping[Step, Linear]) -> Mapping[Step, Linear]:
            return {
                name: Linear(call_s=line.call_s / calls, bytes_s=share * line.bytes_s)
                for name, line in steps.items()
            }

        types = {key: scale(steps) for key, steps in self.types.items()}
        return replace(self, steps=scale(self.steps), types=types)

    def choose(self, kv: KvType, activations: ActivationType = "int16") -> Rates:
        return replace(self, steps={**self.steps, **self.types.get((kv, activations), {})})

    @property
    def stream_overlap(self) -> float:
        """Part of the time of reads in order that computing hides: they cost the cores less."""
        points = () if self.flash is None else self.flash.points
        found = [x.overlap for x in points if x.pattern == "sequential" and x.overlap is not None]
        return max(found, default=self.overlap)

    @property
    def fair_share(self) -> float:
        """Share of a matrix that the dense unit computes; 0 if it has memory of its own."""
        if self.dense is None or self.dense.has_memory:
            return 0.0
        return round(self.dense.bytes_s / (self.dense.bytes_s + self.bandwidth_bytes_s), 2)

    def scale(self, threads: int) -> float:
        """Part of the processor's speed that ``threads`` threads have."""
        if threads >= self.cores:
            return 1.0
        if not self.bandwidths:
            return min(1.0, threads / min(self.cores * _ENOUGH_SHARE, self.enough_cores))
        best = max(rate for _, rate in self.bandwidths)
        below = [item for item in self.bandwidths if item[0] <= threads]
        if not below:
            return threads / self.cores
        count, rate = max(below)
        return min(1.0, rate / best * threads / count)
