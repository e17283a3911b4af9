"""The simulator's constants: all of them, with meaning, unit and origin.

They are properties of programs and of kinds of hardware, the same for every plan, model and device.
Documents state the figures that differ between devices and models.

Read rates of a flash device between its measured points.

A figure holds for one block size, pattern, extent of the file, issuing core, depth and number of
threads. A question takes the figures of its pattern; of several cores, depths or thread counts it
takes the nearest. It interpolates the rate over extent and block size, both on logarithmic scales,
because rates follow powers of both over wide ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import exp, log
from typing import Literal

from pi2.plan.documents.device import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a document that was used."""

    name: str
    status: str
    source: str


def describe_statuses(figures: tuple[Figure, ...]) -> str:
    counts = Counter(item.status for item in figures)
    parts = [f"{count} {status}" for status, count in sorted(counts.items())]
    return f"{len(figures)} figures of device and model: {', '.join(parts)}"


Pattern = Literal["sequential", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPoint:
    """One figure of a device's ``storage.reads``."""

    pattern: Pattern
    block_bytes: int
    rate_bytes_s: float
    range_bytes: int | None = None
    core: str | None = None
    depth: int | None = None
    threads: int | None = None
    burst: int | None = None
    """Reads that are asked for at once; None for as many as keep the storage busy."""
    overlap: float | None = None
    """Part of their time that computing hides; None if it was not measured."""


def list_points(storage: Storage) -> tuple[FlashPoint, ...]:
    """The rates of a device document, without rates of short bursts."""
    return tuple(item for item in _list_all(storage) if item.burst is None)


def list_bursts(storage: Storage) -> tuple[FlashPoint, ...]:
    """What a few reads at a time reach: the fixed part of a batch shows in them."""
    return tuple(item for item in _list_all(storage) if item.burst is not None)


def _list_all(storage: Storage) -> tuple[FlashPoint, ...]:
    return tuple(
        FlashPoint(
            pattern=item.pattern,
            block_bytes=item.block,
            rate_bytes_s=float(item.rate),
            range_bytes=item.range,
            core=item.cluster,
            depth=item.depth,
            threads=item.threads,
            burst=item.burst,
            overlap=item.overlap,
        )
        for item in storage.reads
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """The flash of a device, as far as reading goes."""

    points: tuple[FlashPoint, ...]
    latency_s: float
    """One small read in an idle queue."""
    reader_penalty: float
    """Part of the rate lost where several threads issue reads."""
    block_bytes: int
    """Block size that direct reads are multiples of."""
    queue: int = 128
    """Reads in flight beyond which the storage is not faster."""
    has_io_uring: bool = True
    """Whether programs may use it."""
    bursts: tuple[FlashPoint, ...] = ()
    """Rates of a few reads at a time."""

    def find_rate_bytes_s(
        self,
        pattern: Pattern,
        block_bytes: int,
        *,
        range_bytes: int | None = None,
        core: str | None = None,
        threads: int = 1,
    ) -> float:
        """Rate of reads of ``block_bytes`` within ``range_bytes`` of a file, interpolated on
        logarithmic scales; LookupError if the device has no figure of the pattern."""
        points = [item for item in self.points if item.pattern == pattern]
        if not points:
            raise LookupError(pattern)
        points = keep_core(points, core)
        by_block: list[tuple[float, float]] = []
        for block in sorted({item.block_bytes for item in points}):
            same = [item for item in points if item.block_bytes == block]
            by_block.append((block, _rate_in_range(same, range_bytes)))
        smallest, rate = by_block[0]
        if block_bytes < smallest:
            seconds = max(block_bytes / rate, self.latency_s / threads)
            return block_bytes / min(seconds, smallest / rate)
        return interpolate_logs(by_block, block_bytes)


def keep_core(points: Iterable[FlashPoint], core: str | None) -> list[FlashPoint]:
    """If figures differ in the core only, keep the wanted core's, else the fastest."""
    kept: dict[tuple[object, ...], FlashPoint] = {}
    for item in points:
        key = (
            item.pattern,
            item.block_bytes,
            item.range_bytes,
            item.depth,
            item.threads,
            item.burst,
        )
        old = kept.get(key)
        better = old is None or (
            old.core != core and (item.core == core or item.rate_bytes_s > old.rate_bytes_s)
        )
        if better:
            kept[key] = item
    return list(kept.values())


def _rate_in_range(points: Sequence[FlashPoint], range_bytes: int | None) -> float:
    """Rate of figures of one block size at an extent; one without an extent is the widest."""
    wide = [item for item in points if item.range_bytes is None]
    narrow = [item for item in points if item.range_bytes is not None]
    if not narrow or (range_bytes is None and wide):
        return max(item.rate_bytes_s for item in wide)
    curve: list[tuple[float, float]] = []
    for extent in sorted({item.range_bytes for item in narrow if item.range_bytes is not None}):
        same = [item for item in narrow if item.range_bytes == extent]
        curve.append((extent, max(item.rate_bytes_s for item in same)))
    return interpolate_logs(curve, range_bytes or curve[0][0])


def interpolate_logs(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate on logarithmic scales; constant below the first point and above the last."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            share = (log(at) - log(x0)) / (log(x1) - log(x0))
            return exp(log(y0) + share * (log(y1) - log(y0)))
    return curve[-1][1]


Kind = Literal["published", "estimated", "calibrated", "assumed"]


def _constant(value: float, unit: str, kind: Kind, meaning: str) -> float:
    """A field with its description; the type is what the field holds."""
    return field(default=value, metadata={"unit": unit, "kind": kind, "meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of the simulation; `describe_constants` lists them for people."""

    barrier_s: float = _constant(
        20e-6,
        "s",
        "calibrated",
        "time in which all CPU threads of a parallel operation have met and gone on",
    )
    dense_launch_s: float = _constant(
        400e-6, "s", "calibrated", "time from asking an NPU or GPU for a graph until it computes"
    )
    card_launch_s: float = _constant(
        60e-6,
        "s",
        "assumed",
        "the same for a card with memory of its own, which a PC's processor asks by way of PCI "
        "Express: starts of three kernels, and the way of a token's input and sum",
    )
    recorded_kernel_s: float = _constant(
        3e-6,
        "s",
        "assumed",
        "a kernel's start and end where a GPU replays a recorded list of them, which nothing else "
        "hides while the kernels are small",
    )
    submit_s: float = _constant(
        60e-6,
        "s",
        "assumed",
        "a token's submission to a GPU that has the whole model, and its logits' way back",
    )
    whole_gather_efficiency: float = _constant(
        0.6,
        "share",
        "assumed",
        "part of its memory's rate that such a GPU reaches with single neurons",
    )
    gather_efficiency: float = _constant(
        0.36,
        "share",
        "calibrated",
        "part of the streaming bandwidth that a CPU reaches with single neurons",
    )
    product_part: float = _constant(
        0.4,
        "share",
        "estimated",
        "part of a gathered neuron's time that every further sequence of a step adds which names "
        "it, in pi2's own kernels (133 of 334 us of a layer; Zen 5)",
    )
    rounded_part: float = _constant(
        0.33,
        "share",
        "estimated",
        "the same with decode.batch_activations: half of the products of gates and ups, which are "
        "three eighths of it",
    )
    read_latency_s: float = _constant(
        70e-6,
        "s",
        "estimated",
        "one small read in an idle queue, where the device states no storage.latency",
    )
    place_s: float = _constant(
        1.9e-6,
        "s",
        "calibrated",
        "putting one neuron that was read into the cache: choosing what to drop, copying, entering",
    )
    reader_penalty: float = _constant(
        0.4,
        "share",
        "published",
        "read rate lost where several cores issue reads, on UFS, eMMC and SD where the device "
        "states none (PowerInfer-2, sec 2.3.2)",
    )
    up_down_share: float = _constant(
        0.8,
        "share",
        "published",
        "missing neurons whose gate is open, so that up and down are read too "
        "(PowerInfer-2: gate, up and down are active together in 80 %)",
    )
    named_margin: float = _constant(
        0.245,
        "sigma",
        "calibrated",
        "how much lower than a neuron's own threshold the one is from which a low-rank predictor "
        "names it, in standard deviations of its input, where the model does not state "
        "predictor.active: 1.5 neurons for each that fires where a tenth of them does",
    )
    default_active: float = _constant(
        0.107,
        "share",
        "estimated",
        "active neurons of a ReLU model that states none (Bamboo 10 %, ProSparse 10.7 %)",
    )
    default_spread: float = _constant(
        0.95,
        "sigma",
        "calibrated",
        "how far the means of neurons' inputs are apart, in standard deviations of an input, where "
        "the model states no sparsity.skew (PowerInfer publishes 26 % of OPT-30B's neurons for "
        "80 % of its activations, and 43 % of a ReGLU model's: 0.79 and 0.76)",
    )
    smooth_spread: float = _constant(
        4.5,
        "sigma",
        "estimated",
        "the same for SiLU models whose small gates are cut: a least recently used cache of half "
        "of the neurons misses a tenth of those that are used, as LLM in a flash does with ReLU",
    )
    token_variation: float = _constant(
        0.1,
        "sigma",
        "calibrated",
        "standard deviation of what a token moves the activation threshold of all neurons by, in "
        "standard deviations of a neuron's input",
    )
    streaming_compute_share: float = _constant(
        0.55,
        "share",
        "calibrated",
        "part of its prefill rate that an NPU keeps while weights come from flash",
    )
    arm_of_peak: float = _constant(
        0.62,
        "share",
        "estimated",
        "part of the peak memory bandwidth that ARM cores reach, where the device states no rate: "
        "0.57 on the OnePlus 12, 0.57 to 0.68 on other phones and boards",
    )
    x86_of_peak: float = _constant(
        0.70,
        "share",
        "estimated",
        "the same for x86 with two channels of memory or fewer: 0.54 to 0.93 on PCs",
    )
    wide_of_peak: float = _constant(
        0.42,
        "share",
        "estimated",
        "the same where memory is made for a GPU on the same chip, and is wider than the CPU's own "
        "link to it: 0.35 to 0.5",
    )
    server_of_peak: float = _constant(
        0.65,
        "share",
        "estimated",
        "the same for servers, whose cores reach memory through a mesh: 0.5 to 0.85",
    )
    arm_core_ops_s: float = _constant(
        9.6e9,
        "1/s",
        "estimated",
        "operations with 4-bit weights of a token that a core of a board does, a multiply-add "
        "counting as two: slow cores have as large parts as fast ones; 4 in a cycle, 3 to 8",
    )
    fast_core_ops_s: float = _constant(
        35e9, "1/s", "estimated", "the same for cores of phones and laptops: 9 in a cycle, 6 to 12"
    )
    x86_core_ops_s: float = _constant(
        45e9, "1/s", "estimated", "the same for x86 with AVX2: 9 in a cycle, 6 to 16"
    )
    core_barrier_s: float = _constant(
        1.6e-6,
        "s",
        "estimated",
        "what a barrier takes more for each core beyond 16, which write to one place in turn: a "
        "cache line's way between cores, 0.5 to 2 us with the wait for the last one",
    )
    warm_share: float = _constant(
        0.67,
        "share",
        "published",
        "part of its flash's rate that a phone keeps in a run that reads all the time: 1645 of "
        "2460 MiB/s (BigMoeOnEdge); figures of devices whose CPU was seen computing a model have "
        "it in them",
    )
    reading_core_share: float = _constant(
        0.5,
        "share",
        "estimated",
        "part of the processor's rates that stays in such a run, on a device without a measured "
        "one, 0.45 to 0.7: a router's choice stops all threads; reads and the system take time of "
        "the cores; phones are hot (114 ms of a token instead of 57 on a laptop of BigMoeOnEdge)",
    )
    unseen_overlap: float = _constant(
        0.5,
        "share",
        "estimated",
        "part of reading that computing hides, on a device without a measured run: `pi2 "
        "probe` finds 0.2 to 0.9 on PCs, since interrupts and copies take time of the cores",
    )
    vendor_ops_share: float = _constant(
        0.3,
        "share",
        "estimated",
        "part of the arithmetic rate that a vendor claims which programs reach: 10.8 of 34 TOPS on "
        "the OnePlus 12's NPU, 0.2 to 0.5",
    )
    dense_of_peak: float = _constant(
        0.75,
        "share",
        "estimated",
        "part of main memory's peak bandwidth that an NPU or GPU reaches: 0.73 on the OnePlus 12, "
        "0.7 to 0.8",
    )
    card_of_peak: float = _constant(
        0.78,
        "share",
        "estimated",
        "part of the peak bandwidth of its own memory that a graphics card reaches: 0.65 to 0.85",
    )
    fast_card_of_peak: float = _constant(
        0.90,
        "share",
        "estimated",
        "the same for cards of 900 GB/s and more, which have large caches and fast clocks: 0.85 to "
        "0.95",
    )
    slow_kernel_s: float = _constant(
        4e-6, "s", "estimated", "`recorded_kernel_s` of cards with less than 900 GB/s: 3 to 6 us"
    )
    metal_kernel_s: float = _constant(
        8e-6,
        "s",
        "estimated",
        "a kernel's start and end where the list of them cannot be replayed (Metal): 4 to 12 us",
    )
    both_of_peak: float = _constant(
        59.6 / 76.8, "share", "estimated", "the same for all units together"
    )


def describe_constants(constants: Constants) -> list[tuple[str, float, str, str, str]]:
    return [
        (
            item.name,
            float(getattr(constants, item.name)),
            str(item.metadata["unit"]),
            str(item.metadata["kind"]),
            str(item.metadata["meaning"]),
        )
        for item in fields(constants)
    ]
