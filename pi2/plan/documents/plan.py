"""The plan document: this model on this device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from pi2.plan.documents.common import Count, Document, Identifier, Share, Table
from pi2.plan.documents.quantities import Bytes

Reference = Annotated[
    str,
    StringConstraints(min_length=1, max_length=500),
    Field(examples=["host", "../my.device.toml"]),
]
"""A relative path, or the short name of a shipped document."""

Selector = Annotated[
    str,
    StringConstraints(pattern=r"^\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*$", max_length=500),
    Field(examples=["0-7,28-31"]),
]
"""Layers: numbers and ranges, both ends included, such as ``"0-7,28-31"``."""

Cores = Annotated[
    str,
    StringConstraints(pattern=r"^\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*$", max_length=500),
    Field(examples=["4-7", "0,2"]),
]
"""Cores by the system's numbers: numbers and ranges, both ends included, such as ``"4-7"``."""

Split = Annotated[
    dict[Identifier, Share], Field(min_length=1, examples=[{"cpu": 0.25, "npu": 0.75}])
]
"""Shares by unit."""

BackendName = Literal["null", "reference", "cpu"]
"""A backend of ``backends/``."""


class Segments(Table):
    """Regions of the memory budget; together they may not exceed it."""

    runtime: Bytes
    """Interpreter, libraries, tokenizer: what a process needs before the model."""
    attention: Bytes
    """Everything dense that stays resident: embeddings, attention, norms, head."""
    kv: Bytes
    """Keys and values of the context."""
    predictor: Bytes
    """Activation predictors, or all gate rows where ``decode.predictor = "gate"``."""
    hot: Bytes
    """Neurons that are loaded at start and stay."""
    cold: Bytes
    """Cache of the other neurons, filled on demand."""
    workspace: Bytes
    """Activations, staging buffers of the prefill, logits."""


class Memory(Table):
    """The budget is a promise: the process, everything included, stays under it."""

    budget: Bytes
    """Highest resident set of the process."""
    segments: Segments
    """What the budget is spent on."""
    embedding: Literal["resident", "flash"] = "resident"
    """Where rows of the embedding come from: ``flash`` reads those of the tokens that come, a few
    KiB each, and leaves the memory to neurons.  Where the embedding is the head too, every token
    needs all of it, and it stays."""


class Bundle(Table):
    """How one neuron lies in the store."""

    stride: Bytes
    """Distance of two neurons in a layer's file: a multiple of the device's block."""
    scales: Literal["inline", "resident"] = "inline"
    """Where the scales of quantised weights lie: ``inline`` in the bundles, read with the weights;
    ``resident`` in a file of their own for each layer, loaded at start into the segment
    ``attention``, so that bundles are smaller and less is read of each missing neuron.  As the
    store has them: `pi2 store repack` changes it."""


class LayerSettings(Table):
    """Settings of a layer."""

    split: Split
    """Share of the layer's neurons that each unit computes; adds up to 1."""
    hot: Share
    """Share of the layer's neurons that stay resident."""


class LayerOverride(Table):
    """Settings for some layers only."""

    select: Selector
    """Which layers, such as ``"0-7,28-31"``."""
    id: Identifier | None = None
    """Name by which a plan that extends this one changes this exception, or removes it."""
    split: Split | None = None
    """Replaces ``layers.split``."""
    hot: Share | None = None
    """Replaces ``layers.hot``."""


class Layers(LayerSettings):
    """Settings of all layers, and exceptions."""

    overrides: Annotated[tuple[LayerOverride, ...], Field(max_length=256)] = ()
    """Exceptions, in order: of two that set the same key of a layer, the later one counts."""


class Io(Table):
    """How neurons are read."""

    mode: Literal["direct", "buffered"] = "direct"
    """``direct`` goes past the page cache (O_DIRECT), ``buffered`` through it."""
    engine: Literal["pread", "io_uring", "mmap"] = "io_uring"
    """``io_uring`` (Linux) queues many requests in one system call, without threads, and gives way
    to ``pread`` where the system has none; ``pread`` reads with threads, one request each;
    ``mmap`` copies out of mapped files, through the page cache: a baseline."""
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Threads that issue reads; with ``io_uring``, half the clusters that a layer's reads are
    divided into."""
    depth: Annotated[int, Field(ge=1, le=4096)] = 192
    """Most requests of ``io_uring`` in flight.  With more than the system's queue for the drive
    holds (on Linux often 256, and others use it too) the computing thread waits for room in it."""
    merge_gap: Annotated[int, Field(ge=0, le=15)] = 0
    """Neighbours in the store are read in one request; so are two neurons with at most this many
    others between them, which are read and thrown away."""
    verify: Literal["never", "first-read"] = "never"
    """``first-read`` compares every neuron with its checksum when it is read for the first time,
    and the other files of the store with their hashes at loading."""


class Cache(Table):
    """The cache of cold neurons: the segment ``cold``."""

    policy: Literal["lfu", "lru"] = "lfu"
    """Which neuron goes when another one comes: ``lfu``, the one that was used least often, old
    uses counting less and less; ``lru``, the one that was not used for longest."""
    fill: bool = True
    """Whether loading fills it with the neurons that follow the hot ones in stored order."""
    rebalance: Annotated[Count, Field(examples=[64])] | None = None
    """Generated tokens after which each layer's hot neurons are weighed against cold ones again: a
    64th of the layer becomes cold where it is used less than cold slots are on average, as when the
    text differs from the one that was counted; the next 64th becomes hot where it is used twice as
    often and in memory anyway, and cold again when the context takes back what it lent.  What stays
    in memory is not read again.  Absent leaves hot neurons as the plan says."""


class Threads(Table):
    """Compute threads."""

    compute: Annotated[int, Field(ge=1, le=1024, examples=[4])] | None = None
    """Number of compute threads; absent means one per core of the device."""
    cores: Cores | None = None
    """Cores that compute threads are bound to, one each, in this order; absent lets the system
    move them.  Threads that read from flash are never bound."""


ActivationType = Literal["int8", "int16", "fp32"]


class Prefill(Table):
    """How a prompt is processed: dense, in chunks."""

    chunk: Annotated[int, Field(ge=1, le=1024)] = 128
    """Tokens that go through a layer together."""
    activations: ActivationType = "int16"
    """What the cpu backend rounds the inputs of matrices to, with a scale for 32 of them: ``int8``
    takes half of the arithmetic, and moves logits by up to 1 % of the largest; ``fp32`` rounds
    nothing and is slower."""


class Decode(Table):
    """How tokens are generated."""

    predictor: Literal["none", "gate", "low-rank"] = "low-rank"
    """``none`` computes every neuron; ``gate`` computes all gates first and is lossless for the
    ReLU family, while other models need ``[sparsity]``; ``low-rank`` uses trained predictors."""
    threshold: float = 0.0
    """Predictor score from which a neuron counts as active: higher is faster and less exact."""
    missing_threshold: Annotated[float, Field(examples=[1.0])] | None = None
    """Predictor score from which a neuron that is not in memory is read, where that shall be higher
    than ``threshold``: fewer reads, and a few of the neurons that fire rarely are left out.  Absent
    means the same as ``threshold``."""
    phases: Annotated[Literal[1, 2], Field(examples=[2])] | None = None
    """How neurons in memory are computed: 1 takes gate, up and down of a few neurons at a time, 2
    the gates of all, then ups where gates are open, then downs where neurons fire.  Both give the
    same bits.  Absent means 2 with ``predictor = "gate"``, where gates are known beforehand, and
    else 1, which was quicker with ReLU, dReLU and SiLU (docs/lab/kernels.md).  Neurons with biases
    or without gates are computed one by one in either case."""
    activations: Literal["int16", "fp32"] = "int16"
    """What the cpu backend rounds the inputs of matrices to, as in ``prefill``: ``int16`` moves
    logits by a few parts in 10,000 of the largest, ``fp32`` rounds nothing (docs/exactness.md)."""
    batch: Annotated[int, Field(ge=1, le=64, examples=[4])] = 1
    """Sequences that may generate at the same time, each with its own keys and values in
    ``memory.segments.kv``: weights and neurons are read once for all of them."""
    look_ahead: Literal["none", "attention", "layer"] = "none"
    """``attention`` predicts a layer's neurons from its input, before its attention, so that
    attention hides the reads; ``layer`` before the FFN of the layer before it, so that the storage
    is never idle.  Predictors then do not see what comes in between, and find a little less."""


SparsityMethod = Literal["cats", "cats-teal"]


class Sparsity(Table):
    """Which neurons of a SiLU or GELU model count as zero while tokens are generated.

    With ``decode.predictor = "gate"``.  One of ``target`` and ``max_perplexity_increase`` says how
    much; `pi2 sparsity calibrate` turns it into thresholds.  Prompts are computed whole.
    """

    method: SparsityMethod
    """``cats``: neurons whose act(gate) is small, so that up and down are not read; ``cats-teal``:
    also those whose act(gate) * up is small, so that down is not read, divided where it costs
    least."""
    target: Annotated[float, Field(gt=0.0, lt=1.0, examples=[0.5])] | None = None
    """Share of up and down that is not read."""
    max_perplexity_increase: Annotated[float, Field(gt=0.0, examples=[0.02])] | None = None
    """Largest share by which the perplexity may grow."""
    thresholds: Annotated[Reference, Field(examples=["llama.thresholds.toml"])]
    """File of the calibrated thresholds, relative to the plan file."""


class Sampling(Table):
    """How a token is drawn, unless a run says otherwise; without this table, greedily.

    In this order: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, Field(ge=0.0, le=100.0, examples=[0.7])] = 0.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1, examples=[40])] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, examples=[0.9])] = 1.0
    """Keep the smallest set of tokens whose probabilities reach p."""
    min_p: Share = 0.0
    """Keep tokens with at least min_p times the probability of the most likely one."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, examples=[1.1])] = 1.0
    """Divides the positive logits of tokens already seen, multiplies their negative ones."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, examples=[1])] | None = None
    """Start of the random numbers; absent draws another one for every run."""


class Pipeline(Table):
    """How reading and computing go together while a token is generated.

    The engine heeds ``phases``, ``cluster`` and ``prefill``; ``policy`` is read by `pi2 simulate`
    only.  It lets a plan describe other engines, so that they can be compared on the same device.
    """

    policy: Literal["neuron-cluster", "layer-barrier", "mmap"] = "neuron-cluster"
    """``neuron-cluster`` computes what is in memory while one thread reads the rest, cluster by
    cluster; ``layer-barrier`` reads all that a layer misses, then computes; ``mmap`` maps the
    file and waits for every page that is not in memory."""
    phases: Literal[1, 2] = 1
    """Reads for a missing neuron: the whole bundle in 1, or gate first and, only where the gate is
    open, up and down (2); the others do not stay in the cache.  Neighbours in the store, which
    share a request, are read whole in either case, and so are neurons whose gates are known, with
    ``predictor = "gate"``.  2 reads fewer bytes in more requests."""
    cluster: Count = 64
    """Neurons that are read and computed together, at least."""
    prefill: Literal["chunks-first", "layers-first"] = "chunks-first"
    """``chunks-first`` takes a chunk of the prompt through all layers, then the next, and reads
    what is not in memory again for every chunk; ``layers-first`` reads every layer once, in one
    sequential stream, and takes up to 512 tokens through it before the next, as many as the segment
    ``workspace`` has room for."""


KvType = Literal["fp16", "int8", "fp32"]


class Kv(Table):
    """The cache of keys and values."""

    type: KvType = "fp16"
    """Type of its elements: ``int8`` halves it, with a scale for every head's vector of a token;
    ``fp32`` doubles it and rounds nothing."""
    context: Annotated[Count, Field(examples=[4096])]
    """Most tokens of prompt and answer together."""
    lend: bool = False
    """Whether cold neurons lie in what the context does not use yet of the segment ``kv``; they go
    as it grows, those that are needed least first, and may come again with the next sequence."""


class Plan(Document):
    """A model on a device (``*.plan.toml``): what runs where, and what memory is spent on."""

    device: Reference
    """Device document: relative path or short name."""
    model: Reference
    """Model document: relative path or short name."""
    store: Annotated[Reference, Field(examples=["stores/pi2-demo"])]
    """Neuron store: a folder, relative to the plan file."""
    backends: dict[Literal["cpu", "gpu", "npu"], BackendName] = {"cpu": "cpu"}
    """Backend by kind of unit."""
    memory: Memory
    """Budget and segments."""
    bundle: Bundle
    """Neuron bundles."""
    layers: Layers
    """Per-layer split."""
    cache: Cache = Cache.default()
    """Cold neurons in memory."""
    io: Io = Io.default()
    """Reads from flash."""
    threads: Threads = Threads.default()
    """Compute threads."""
    prefill: Prefill = Prefill.default()
    """Prompt processing."""
    decode: Decode = Decode.default()
    """Token generation."""
    sparsity: Sparsity | None = None
    """Sparsity of models whose neurons are never zero."""
    sampling: Sampling = Sampling.default()
    """How tokens are drawn."""
    pipeline: Pipeline = Pipeline.default()
    """Order of reading and computing."""
    kv: Kv
    """Context."""
