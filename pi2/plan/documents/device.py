"""The device document: a kind of machine, its compute units, memory and storage."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pi2.plan.documents.common import Count, Document, Identifier, Origin, Share, Table
from pi2.plan.documents.quantities import (
    Bytes,
    BytesPerSecond,
    Hertz,
    Seconds,
    Watts,
    explain_giga_ops,
)

IsaFeature = Literal[
    "sse4.2",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512vnni",
    "amx-int8",
    "l2-prefetch",
    "neon",
    "fp16",
    "dotprod",
    "i8mm",
    "sve",
]
"""A feature of a processor that kernels are chosen by."""

UnitKind = Literal["cpu", "gpu", "npu"]
"""A kind of compute unit."""


class RateFigure(Origin):
    """A transfer rate and where it comes from."""

    value: BytesPerSecond
    """The rate, for example ``"43.9 GB/s"``."""


class PowerFigure(Origin):
    """An electric power and where it comes from."""

    value: Watts
    """The power, for example ``"5.1 W"``."""


class ShareFigure(Origin):
    """A part of a whole and where it is known from."""

    value: Share
    """The part, from 0 to 1."""


def _read_giga_ops(value: Any) -> Any:
    found = explain_giga_ops(value) if isinstance(value, str) else None
    return value if found is None else found[0]


class ComputeFigure(Origin):
    """An arithmetic rate and where it comes from."""

    giga_ops: Annotated[
        float,
        BeforeValidator(_read_giga_ops, json_schema_input_type=float | str),
        Field(gt=0.0, examples=[350.0]),
    ]
    """Operations per second, in units of 1e9, or a data sheet's ``"45 TOPS"``; a multiply-add
    counts as two."""
    precision: Literal["int4", "int8", "fp16", "fp32"]
    """Type of the operands."""
    peak: bool = False
    """Whether it is the most that the unit can do, as data sheets say: programs reach a part."""


class ThreadsFigure(RateFigure):
    """Read bandwidth of main memory with a number of threads."""

    threads: Count
    """Threads that read at the same time."""


KernelName = Literal[
    "multiply",
    "project",
    "attend",
    "predict",
    "predict-gate",
    "gather",
    "gather-open",
    "wake",
    "dense",
    "project-many",
    "norm",
    "look-up",
    "route",
    "find",
    "engine",
    "engine-cached",
    "engine-token",
]
"""A step of pi2's own engine. For one token: ``multiply``, a matrix of `size` rows; ``project``, a
layer's attention without context, with projections of `size` rows; ``attend``, the extra time for
`size` tokens of context; ``predict``, the low-rank predictor of `size` neurons, and
``predict-gate``, their gates; ``gather``, `size` scattered neurons, and ``gather-open``, the same
with known gates; ``wake``, the extra time of the first such call after `size` microseconds without
work; ``norm``, the beginning and end of a layer's FFN; ``look-up``, the neuron cache with `size`
missing neurons; ``find``, the neurons in `size` slots of the cache; ``route``, the choice among
`size` experts; ``engine``, the engine's work in a layer between these steps if all its neurons are
resident, and ``engine-token`` once per token, measured with `size` layers; ``engine-cached``, the
same in a layer that takes `size` neurons from the cache. For many tokens: ``dense``, 512 neurons
for `size` tokens; ``project-many``, a layer's attention for `size` tokens."""


class KernelFigure(Origin):
    """Time of one call of a kernel, with all threads."""

    kernel: KernelName
    """Which one."""
    size: Annotated[int, Field(ge=0, le=2**31 - 1, examples=[1024])]
    """Problem size; see ``kernel`` for its meaning."""
    time: Seconds
    """Time of one call from Python; for ``look-up``, the additional time for ``size`` missing
    neurons."""
    bytes: Bytes | None = None
    """Bytes of weights and KV cache that the call reads; absent if reading does not dominate the
    time."""
    giga_ops: float | None = Field(default=None, gt=0.0, examples=[350.0])
    """Operations per second, in units of 1e9, if arithmetic takes the time."""
    width: Annotated[int, Field(ge=32, le=2**20, examples=[4096])] | None = None
    """Hidden size of the model that was measured; default: 4096."""
    kv: Literal["fp16", "int8", "fp32"] = "fp16"
    """Type of the KV cache during the measurement."""
    activations: Literal["int8", "int16", "fp32"] = "int16"
    """Precision of the inputs of projections during the measurement."""


class CpuCluster(Table):
    """Cores of one kind."""

    id: Identifier
    """Name that plans give threads to, for example ``"big"``."""
    cores: Count
    """Number of cores."""
    frequency: Hertz | None = None
    """Maximum sustained clock frequency."""
    core: str | None = Field(default=None, examples=["cortex-x4"])
    """Micro-architecture, for example ``"cortex-x4"``; chooses the compiler's schedule."""


class Memory(Table):
    """Main memory, or the memory of a graphics card."""

    capacity: Bytes | None = None
    """Installed memory; absent means *ask the machine*."""
    usable: Bytes | None = None
    """Memory that the system leaves to one process, if less than the capacity."""
    read_bandwidth: RateFigure | None = None
    """Rate that all units reach together."""
    peak_bandwidth: RateFigure | None = None
    """Theoretical rate of the memory interface, which no program reaches."""


class Hexagon(Table):
    """What programs must know of a Hexagon NPU."""

    version: Annotated[str, Field(pattern=r"^v(6[6-9]|[7-9][0-9])$", examples=["v75"])] | None = (
        None
    )
    """Version of the instruction set, ``v66`` or newer: programs are compiled for the newest that
    compilers know and that is not above it; default: the oldest, which newer ones also run."""
    own_memory: Annotated[Bytes, Field(examples=["8 MiB"])] | None = None
    """The NPU's own fast memory (VTCM), which holds what a graph keeps while it runs; absent means
    that it is not known, and main memory holds it."""


class Unit(Table):
    """A compute unit: what a plan gives work to."""

    kind: UnitKind
    """Kind of unit; a plan's ``backends`` are by kind."""
    model: str = Field(default="", max_length=120, examples=["Adreno 750"])
    """Commercial name of the unit."""
    architecture: (
        Literal["x86-64", "aarch64", "opencl", "cuda", "metal", "vulkan", "hexagon"] | None
    ) = None
    """Instruction set or programming interface; for a CPU, absent means *ask the machine*."""
    features: tuple[IsaFeature, ...] | None = Field(default=None, examples=[["neon", "dotprod"]])
    """CPU features that kernels may use; absent means *ask the machine*.  With ``l2-prefetch``,
    prefetches fill the second-level cache, which is faster on Zen 4."""
    clusters: tuple[CpuCluster, ...] = ()
    """Kinds of cores of a CPU; empty means *ask the machine*."""
    read_bandwidth: RateFigure | None = None
    """Rate at which the whole unit reads main memory."""
    hexagon: Annotated[Hexagon, Field(examples=[{"version": "v75"}])] | None = None
    """Of an NPU whose architecture is ``hexagon``: what programs are compiled for."""
    memory: Memory | None = None
    """Dedicated memory, such as a graphics card's; absent means that the unit uses main memory."""
    compute: tuple[ComputeFigure, ...] = ()
    """Arithmetic rates by operand type."""
    bandwidth_by_threads: tuple[ThreadsFigure, ...] = ()
    """Read bandwidth with fewer threads than cores, and with all."""
    kernels: tuple[KernelFigure, ...] = ()
    """Times of pi2's own kernels, as `pi2 probe` measures them."""
    power: PowerFigure | None = None
    """Power drawn while the unit works."""
    emulated: bool | None = None
    """Whether the unit is emulated by the processor's own cores, as PoCL does for OpenCL;
    planner and simulator do not count it as a separate unit."""


class ReadFigure(Origin):
    """Read rate of the storage for one access pattern."""

    pattern: Literal["sequential", "random"]
    """Order of the reads."""
    block: Bytes
    """Bytes of one read."""
    rate: BytesPerSecond
    """Bytes per second; ``"250000 IOPS"`` is of the figure's block."""
    range: Bytes | None = None
    """Extent of the file that random reads fall into."""
    depth: Count | None = None
    """Reads in flight at the same time."""
    threads: Count | None = None
    """Number of threads that issue the reads."""
    cluster: str | None = Field(default=None, examples=["big"])
    """CPU cluster that issues the reads, if it matters."""
    burst: Count | None = Field(default=None, examples=[16])
    """Reads that are asked for at once, the queue being empty before and after; absent means as
    many as it takes to keep the storage busy."""
    overlap: Share | None = None
    """Part of the time of these reads that computing with all cores hides; default: the
    storage's."""
    overlap_spread: float | None = Field(default=None, ge=0.0, examples=[0.05])
    """Standard deviation of the measurements of ``overlap``, as it is."""

    @model_validator(mode="before")
    @classmethod
    def _read_operations(cls, values: Any) -> Any:
        """A data sheet's ``rate = "250000 IOPS"`` is of the figure's own block."""
        if isinstance(values, dict) and str(values.get("rate", "")).rstrip().endswith("IOPS"):
            return {**values, "rate": f"{values['rate']} x {values.get('block')}"}
        return values


EXAMPLE_READS = {
    "random": 'pattern = "random", block = "4 KiB", rate = "250000 IOPS"',
    "sequential": 'pattern = "sequential", block = "1 MiB", rate = "4.2 GB/s"',
}
"""The least that data sheets state, and planning needs."""


class Storage(Table):
    """Flash or disk that holds the neuron store."""

    kind: Literal["ufs", "nvme", "sata", "emmc", "sd", "virtual"] | None = None
    """Type of the device."""
    block_size: Bytes | None = None
    """Logical block size, which direct reads are multiples of; absent means *ask the machine*."""
    queue_depth: Count | None = None
    """Entries of the command queue."""
    queues: Count | None = None
    """Number of command queues."""
    latency: Seconds | None = None
    """Time of one small read in an idle queue."""
    latency_spread: float | None = Field(default=None, ge=0.0, examples=[0.05])
    """Standard deviation of the measurements of ``latency`` relative to their mean."""
    reader_penalty: ShareFigure | None = None
    """Part of the read rate that is lost where several cores issue reads instead of one."""
    overlap: ShareFigure | None = None
    """Part of the time of reads that computing with all cores hides: 1 where reading costs the
    cores nothing, 0 where it needs them all."""
    sustained: ShareFigure | None = None
    """Part of these rates that stays in a run that reads all the time, as flash gets hot; default:
    0.75, and 1 where pi2's kernels were measured."""
    core_share: ShareFigure | None = None
    """Part of its speed that the processor keeps in such a run; default: 0.5, and 1 where pi2's
    kernels were measured."""
    reads: tuple[ReadFigure, ...] = ()
    """Measured or published read rates."""


class Device(Document):
    """A kind of machine (``*.device.toml``): shareable, without serial numbers."""

    id: Identifier
    """Short name, the same as the file's."""
    units: Annotated[dict[Identifier, Unit], Field(min_length=1)]
    """Compute units by name; plans use these names."""
    memory: Memory = Memory.default()
    """Main memory."""
    storage: Storage = Storage.default()
    """Flash or disk."""
    power: PowerFigure | None = None
    """Power of the whole device while all of its units work."""
    noise: ShareFigure | None = None
    """Variation of the time of the same work while nothing else is asked of the machine."""
