"""The plan document: this model on this device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints

from pi2.plan.documents.backends import list_backend_names
from pi2.plan.documents.common import Count, Document, FilePath, Identifier, Share, Table
from pi2.plan.documents.quantities import Bytes
from pi2.plan.documents.sampling import Sampling
from pi2.plan.documents.selectors import list_layers
from pi2.plan.weights.layout import TwinPrecision

Reference = Annotated[FilePath, Field(examples=["host", "../my.device.toml"])]
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

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[list_backend_names()]
"""A folder of ``backends/`` that serves units."""


class Segments(Table):
    """Regions of the memory budget; together they may not exceed it."""

    runtime: Bytes
    """Python interpreter, libraries and tokenizer; a server takes 20 MiB more."""
    attention: Bytes
    """Dense weights that stay resident: embedding, attention, norms, head."""
    kv: Bytes
    """KV cache of the context."""
    predictor: Bytes
    """Activation predictors, or all gate rows with ``decode.predictor = "gate"``; in a mixture
    also which neurons are whose."""
    hot: Bytes
    """Hot neurons: loaded at start and kept."""
    cold: Bytes
    """Cache of cold neurons, filled on demand."""
    workspace: Bytes
    """Activations, prefill staging buffers, logits."""
    state: Bytes = 0
    """States of the layers that have one instead of keys and values, of every sequence."""
    twin: Bytes = 0
    """Twins of the neurons that are not hot."""


class UnitMemory(Table):
    """What a unit beside the sparse one keeps: its neurons, and what it works with."""

    budget: Bytes
    """Most bytes that it may take."""
    shares_main_memory: Annotated[bool, Field(examples=[True])] | None = None
    """Whether they are main memory, and so count against ``memory.budget`` beside the segments;
    absent means as the device says: a unit without ``memory`` of its own uses main memory."""


class Memory(Table):
    """The budget is a promise: the process, everything included, stays under it."""

    budget: Bytes
    """Maximum resident set size of the whole process."""
    segments: Segments
    """What the budget is spent on."""
    units: Annotated[
        dict[Identifier, UnitMemory], Field(examples=[{"gpu": {"budget": "8 GiB"}}])
    ] = {}
    """Memory of each unit that keeps neurons beside the sparse one, by the unit's name.  A unit
    that uses main memory need not have an entry: what it keeps is part of ``segments.hot`` then."""
    embedding: Literal["resident", "flash"] = "resident"
    """Where embedding rows come from: ``flash`` reads a few KiB for each token and leaves the
    memory to neurons. A tied embedding (shared with the head) is always resident, because every
    token needs all of it."""
    lock: Literal["none", "locked", "re-read"] = "none"
    """What happens when the system wants memory back, as phones do: ``none`` leaves it to the
    system, which compresses or swaps what is not in use; ``locked`` locks all segments as they are
    touched, where the limit of locked memory (``ulimit -l``) allows it, and says so where not;
    ``re-read`` maps the dense weights from the store instead of copying them, so that pages which
    the system takes are read again, never swapped (neurons stay in ordinary memory; the store must
    not be changed meanwhile)."""


class Bundle(Table):
    """How one neuron lies in the store."""

    stride: Bytes
    """Distance between two neurons in a layer's file; a multiple of the device's block size."""
    scales: Literal["inline", "resident"] = "inline"
    """Where the scales of quantised weights are stored: ``inline`` in the bundles, read with the
    weights; ``resident`` in a separate file for each layer, loaded at start into the segment
    ``attention``, so that bundles are smaller and less is read for each missing neuron. Must
    match the store; ``pi2 store repack`` changes it."""


class BatchSplit(Table):
    """A split for steps of several sequences."""

    sequences: Annotated[int, Field(ge=2, le=64, examples=[4])]
    """Steps of so many sequences and more, up to the next entry's, are split so."""
    split: Split
    """Share of the layer's neurons that each unit computes; adds up to 1."""


class LayerSettings(Table):
    """Settings of a layer."""

    split: Split
    """Share of the layer's neurons that each unit computes; adds up to 1.  Of the neurons in stored
    order, hottest first, a dense unit (a GPU or an NPU beside a CPU) owns the first share, keeps it
    in memory and computes all of it; the rest belongs to the unit that computes sparsely."""
    hot: Share
    """Share of the layer's neurons that stay in memory, hottest first, those of a dense unit
    included."""
    batches: Annotated[tuple[BatchSplit, ...], Field(max_length=64)] = ()
    """Other splits for steps of several sequences, in ascending order.  A dense unit keeps the
    largest of its shares; the sparse unit keeps hot neurons from the smallest on."""


class LayerOverride(Table):
    """Settings for some layers only."""

    select: Selector
    """Which layers, such as ``"0-7,28-31"``."""
    id: Identifier | None = None
    """Name by which a plan that extends this one changes or removes the exception."""
    split: Split | None = None
    """Replaces ``layers.split``."""
    hot: Share | None = None
    """Replaces ``layers.hot``."""
    batches: (
        Annotated[
            tuple[BatchSplit, ...],
            Field(
                max_length=64, examples=[[{"sequences": 4, "split": {"cpu": 0.25, "npu": 0.75}}]]
            ),
        ]
        | None
    ) = None
    """Replaces ``layers.batches``."""


class Layers(LayerSettings):
    """Settings of all layers, and exceptions."""

    overrides: Annotated[tuple[LayerOverride, ...], Field(max_length=256)] = ()
    """Exceptions, in order: of two that set the same key of a layer, the later one counts."""


class Io(Table):
    """How neurons are read."""

    mode: Literal["direct", "buffered"] = "direct"
    """``direct`` bypasses the page cache (O_DIRECT), ``buffered`` uses it."""
    engine: Literal["pread", "io_uring", "mmap"] = "io_uring"
    """``io_uring`` (Linux) queues many requests per system call, without threads, and falls back
    to ``pread`` where it is not available; ``pread`` reads with threads, one request each;
    ``mmap`` copies from mapped files through the page cache, as a baseline."""
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of threads that issue reads; with ``io_uring``, half the number of clusters that a
    layer's reads are divided into."""
    depth: Annotated[int, Field(ge=1, le=4096)] = 192
    """Maximum number of ``io_uring`` requests in flight. If it exceeds the system's queue for
    the drive (on Linux often 256, shared with other programs), the computing thread waits for
    room."""
    merge_gap: Annotated[int, Field(ge=0, le=15)] = 0
    """Number of unneeded neurons that may be read and discarded between two needed ones, so that
    both are one request. Adjacent neurons are always one request."""
    request: Annotated[Bytes, Field(ge=4096, le=64 << 20, examples=["512 KiB"])] | None = None
    """Bytes of one request where a mixture's experts are read in whole stretches; at most 8 MiB
    are in flight then, so that the first expert arrives soon. Absent means the smallest size
    from 128 KiB to 1 MiB at which the device's storage is nearly at its fastest, or 512 KiB."""
    verify: Literal["never", "first-read"] = "first-read"
    """``first-read`` verifies each neuron's checksum when it is first read, and the hashes of
    the other files at loading. ``never`` computes with whatever the files contain: a damaged byte
    changes the text without notice."""


class Projections(Table):
    """Which unit computes which rows of the matrices beside the FFN.

    The unit beside the sparse one has the first rows of each, and computes them while the sparse
    unit computes the others.
    """

    attention: Annotated[Split, Field(examples=[{"npu": 0.5, "cpu": 0.5}])] | None = None
    """Share of the rows of each layer's attention projections (query, key and value; output) that
    each unit computes; adds up to 1.  Absent leaves them to the sparse unit."""
    head: Annotated[Split, Field(examples=[{"npu": 0.5, "cpu": 0.5}])] | None = None
    """Share of the rows of the head that each unit computes; adds up to 1.  Absent leaves them to
    the sparse unit."""


class Cache(Table):
    """The cache of cold neurons: the segment ``cold``."""

    policy: Literal["lfu", "lru"] = "lfu"
    """Eviction policy: ``lfu`` evicts the neuron used least often, with use counts that decay;
    ``lru`` the least recently used one."""
    fill: bool = True
    """Whether loading fills the cache with the neurons that follow the hot ones in stored order."""
    rebalance: Annotated[Count, Field(examples=[64])] | None = None
    """Number of generated tokens after which each layer's hot set is adjusted: a 64th of the
    layer becomes cold if it is used less than the average cold slot (as when the text differs
    from the statistics); the next 64th becomes hot if it is used twice as often and is in memory
    already, and cold again when the context takes back what it lent. What stays in memory is not
    read again. Absent keeps the hot neurons of the plan."""


class Threads(Table):
    """Compute threads."""

    compute: Annotated[int, Field(ge=1, le=1024, examples=[4])] | None = None
    """Number of compute threads; default: one per core of the device."""
    cores: Cores | None = None
    """Cores that compute threads are pinned to, one each, in this order; absent leaves placement
    to the system. Threads that read from flash are never pinned."""


ActivationType = Literal["int8", "int16", "fp32"]


class Graphs(Table):
    """Shapes that an NPU's programs are compiled for, one for each number of tokens and share.

    A job runs the smallest graphs that hold it, several where none does, and computes zeros where
    they are larger than it.
    """

    tokens: Annotated[
        tuple[Count, ...], Field(min_length=1, max_length=32, examples=[[1, 4, 64, 128]])
    ] = (1, 2, 4, 32, 64, 128)
    """Numbers of tokens: 1, 2, 4 or multiples of 8."""
    shares: (
        Annotated[tuple[Share, ...], Field(min_length=1, max_length=32, examples=[[0.3, 0.5]])]
        | None
    ) = None
    """Shares of a layer's neurons; absent means those that the splits of layers give to the unit,
    or parts of these that fit into its own memory."""


class UnitSettings(Table):
    """How a unit of the device is used."""

    backend: Annotated[BackendName, Field(examples=["reference"])] | None = None
    """Backend of this unit; absent means that of its kind in ``backends``."""
    process: Literal["same", "own"] = "same"
    """Whether a unit that the processor plays (backend ``reference``) works in pi2's process or in
    one of its own, as the driver of an NPU does."""
    graphs: Annotated[Graphs, Field(examples=[{"tokens": [1, 4, 64]}])] | None = None
    """Shapes of an NPU's programs (backend ``hexagon``); absent means defaults."""
    on_failure: Literal["stop", "cpu"] = "stop"
    """What happens when the unit is lost while tokens are generated, or has no memory left:
    ``stop`` ends the run with an error; ``cpu`` goes on without it, its neurons being read from
    flash like any others, and says so."""


class Prefill(Table):
    """How a prompt is processed: dense, in chunks."""

    unit: Annotated[Identifier, Field(examples=["npu"])] | None = None
    """Unit that computes prompts: the FFN's neurons beyond those that it keeps are sent to it as
    they are in memory or come from flash.  Absent leaves them to the sparse unit."""

    chunk: Annotated[int, Field(ge=1, le=1024)] = 128
    """Number of prompt tokens that go through a layer together."""
    activations: ActivationType = "int16"
    """Precision of matrix inputs in the cpu backend, with one scale for 32 of them: ``int8``
    halves the arithmetic and changes logits by up to 1 % of the largest; ``fp32`` rounds nothing
    and is slower."""


PredictorMode = Literal["none", "gate", "low-rank", "router"]


class Speculation(Table):
    """Tokens that are guessed, and verified together: what all of them need is read once.

    Every token is still drawn from the model's own logits, with the random number that it has
    without speculation; a guess is kept where it is the token that was drawn.  So the text is the
    same, greedy or not, but for rounding.
    """

    drafts: Literal["prompt", "resident", "plan"] = "prompt"
    """Who guesses: ``prompt`` takes what came after the last tokens where they stood before, in the
    prompt or in the answer; ``resident`` the model itself, with the neurons that are in memory
    alone, so that nothing is read; ``plan`` a smaller model with the same tokens."""
    plan: Annotated[Reference, Field(examples=["./draft.plan.toml"])] | None = None
    """Plan of the smaller model, with ``drafts = "plan"``: a path relative to this file, or a short
    name.  Its segments but ``runtime`` take what ``memory.budget`` leaves beside this plan's."""
    tokens: Annotated[int, Field(ge=1, le=32)] = 4
    """Maximum number of tokens that are guessed at once.  A step has at most one more, or as many
    as ``decode.batch``: with more sequences under way less is guessed."""
    match: Annotated[int, Field(ge=1, le=16)] = 3
    """Number of last tokens that must have come before, in this order, with ``prompt``."""
    when: Literal["pays", "always"] = "pays"
    """``pays`` speculates as long as steps with guesses touch fewer bytes for each token that is
    kept, and take less time for it, than steps without, and tries again now and then;
    ``always`` whenever there is a guess."""


class Decode(Table):
    """How tokens are generated."""

    predictor: PredictorMode = "low-rank"
    """``none`` computes every neuron; ``gate`` computes all gates first and is lossless for the
    ReLU family, while other models need ``[sparsity]``; ``low-rank`` uses trained predictors;
    ``router``, for mixtures of experts, computes the neurons of the experts that the router
    chooses, all of them and no others, so that nothing is lost, and keeps them in the cache.  In a
    mixture ``none`` computes the chosen experts, too, but keeps nothing of what it reads."""
    threshold: float = 0.0
    """Predictor score from which a neuron counts as active; higher is faster and less accurate."""
    missing_threshold: Annotated[float, Field(examples=[1.0])] | None = None
    """Predictor score from which a neuron that is not in memory is read, if higher than
    ``threshold``: fewer reads, at the cost of leaving out some neurons that fire rarely.
    Default: ``threshold``."""
    passes: Annotated[Literal[1, 2], Field(examples=[2])] | None = None
    """Passes over the neurons in memory: 1 takes gate, up and down of a few neurons at a time, 2
    the gates of all, then ups where gates are open, then downs where neurons fire.  Both give the
    same bits.  Absent means 2 with ``predictor = "gate"``, where gates are known beforehand, and
    else 1, which was quicker with ReLU, dReLU and SiLU (docs/lab/kernels.md).  Neurons with biases
    or without gates are computed one by one in either case."""
    activations: Literal["int16", "fp32"] = "int16"
    """Precision of matrix inputs in the cpu backend, as in ``prefill``: ``int16`` changes logits
    by a few parts in 10,000 of the largest, ``fp32`` rounds nothing (docs/exactness.md)."""
    batch: Annotated[int, Field(ge=1, le=64, examples=[4])] = 1
    """Maximum number of sequences that generate at the same time, each with its own KV cache in
    ``memory.segments.kv``. Weights and neurons are read once for all of them."""
    look_ahead: Literal["none", "attention", "layer"] = "none"
    """When a layer's neurons are predicted: ``none`` after its attention; ``attention`` before
    its attention, which then hides the reads; ``layer`` before the FFN of the previous layer, so
    that storage is never idle. Earlier predictions find slightly fewer active neurons; with
    ``router`` only reads begin early, and what they miss is read in time."""
    speculation: Annotated[Speculation, Field(examples=[{"drafts": "prompt"}])] | None = None
    """Tokens that are guessed and verified together; absent generates them one by one."""

    @property
    def step_tokens(self) -> int:
        """Most tokens that go through the model in a step."""
        drafts = 0 if self.speculation is None else self.speculation.tokens
        return max(self.batch, 1 + drafts)


class ExpertLayers(Table):
    """Other numbers of experts for some layers of a mixture."""

    select: Selector
    """Which layers, such as ``"0-7,28-31"``."""
    read_best: Annotated[int, Field(ge=0, examples=[2])]
    """Replaces ``experts.read_best``."""


class Experts(Table):
    """How far generated tokens may deviate from a mixture's routing, so that less is read.

    Nothing of it is done by default: every expert that the router chose computes, and what is in
    memory changes no bit.  With ``decode.predictor = "router"``; a run's summary says how much of
    the routing weight was replaced or left out, and `pi2 evaluate` what that costs.
    """

    prefer_cached: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.1])] = 0.0
    """Share of the spread of a token's router scores that experts in memory gain on others, so
    that they compute where the router is nearly indifferent."""
    keep_best: Count = 1
    """Number of a token's best experts that are never replaced by ``prefer_cached``."""
    least_weight: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.05])] = 0.0
    """Share of a token's routing weight below which an expert that is not in memory is left out."""
    most_reads: Annotated[int, Field(ge=0, examples=[2])] | None = None
    """Maximum number of experts that a layer reads for a token; those with the smallest weights
    are left out. Absent reads all of them."""
    read_best: Annotated[int, Field(ge=0, examples=[4])] | None = None
    """Number of a token's best experts that are read where they are not in memory; the others
    compute where they are in memory, so that layers whose experts are cold have fewer. Absent
    reads all of them."""
    renormalise: bool = True
    """Whether the weights of the experts that compute are scaled to make up for those left out."""
    layers: Annotated[
        tuple[ExpertLayers, ...],
        Field(max_length=256, examples=[[{"select": "0-3", "read_best": 2}]]),
    ] = ()
    """Exceptions, in order, such as fewer reads in layers whose experts are often missing; of two
    that name a layer, the later one counts."""

    def list_read_best(self, layers: int) -> list[int | None]:
        """Return ``read_best`` of each of a model's layers."""
        found = [self.read_best] * layers
        for item in self.layers:
            for layer in list_layers(item.select, layers):
                found[layer] = item.read_best
        return found

    @property
    def is_lossy(self) -> bool:
        """Whether anything but the router's choice is computed."""
        return bool(self.prefer_cached) or self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Whether experts that are not in memory may be left out."""
        limited = (self.most_reads, self.read_best) != (None, None) or bool(self.layers)
        return bool(self.least_weight) or limited


class Twin(Table):
    """A copy of the neurons in fewer bits, in memory, that computes what dials would leave out.

    The store has it (``pi2 store twin``, ``pi2 convert --twin``).  What is left out by
    ``experts.least_weight``, ``experts.read_best`` or ``experts.most_reads``, or in a predicted
    layer by ``decode.missing_threshold``, is then computed by its twin: nothing is dropped.
    ``most_reads = 0`` lets twins compute everything that is not in memory.  Prompts are exact.
    A run's summary says how much twins have computed, `pi2 evaluate` what that costs.
    """

    precision: TwinPrecision
    """Type of the twin's weights, as the store has them: ``int2`` takes 2.5 bits for a weight,
    where int4 takes 4.5, and is off by a third (root mean square, of the weights'); ``int3`` takes
    3.5, and is off by a sixth."""


SparsityMethod = Literal["cats", "cats-teal"]


class Sparsity(Table):
    """Which neurons of a SiLU or GELU model count as zero while tokens are generated.

    With ``decode.predictor = "gate"``, which keeps all gates in memory; in a mixture of experts
    also with ``"router"``, which reads the gates of the chosen experts first, from a file of the
    store (``pi2 store gates``), and keeps those that are used most in
    ``memory.segments.predictor``.  One of ``target`` and ``max_perplexity_increase`` says how much;
    `pi2 sparsity calibrate` turns it into thresholds.  Prompts are computed whole.
    """

    method: SparsityMethod
    """``cats``: neurons whose act(gate) is small, so that up and down are not read; ``cats-teal``:
    also those whose act(gate) * up is small, so that down is not read, divided where it costs
    least."""
    target: Annotated[float, Field(gt=0.0, lt=1.0, examples=[0.5])] | None = None
    """Share of up and down projections that is skipped."""
    max_perplexity_increase: Annotated[float, Field(gt=0.0, examples=[0.02])] | None = None
    """Maximum relative increase in perplexity."""
    thresholds: Annotated[Reference, Field(examples=["llama.thresholds.toml"])] | None = None
    """File of the calibrated thresholds, relative to the plan file.  Without it a plan whose
    backends are all ``null`` can be simulated and counted, with ``target`` as the share that is
    skipped; any other plan needs it."""


class Serve(Table):
    """How `pi2 serve` and `pi2 chat` go on from prompts that were read before."""

    prefixes: Literal["answers", "prompts", "none"] = "answers"
    """What of earlier prompts is not read again when another one begins with the same tokens:
    ``prompts`` goes on from whole chunks of prompts alone, which are bit for bit what reading them
    again would give; ``answers`` also from tokens that were generated, so that the next turn of a
    conversation reads only what is new: their keys and values are those of generation, which
    leaves out what predictors leave out; ``none`` reads every prompt from its beginning."""
    prefix_cache: Annotated[Bytes, Field(examples=["4 GiB"])] | None = None
    """Most bytes of files in which keys and values of prompts are kept, also when the server ends;
    those that were not used for longest go first.  Absent keeps them in ``memory.segments.kv``
    alone, as long as no other sequence needs the room."""


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
    ``predictor = "gate"``, and those that ``io.verify`` has not compared yet.  2 reads fewer bytes
    in more requests."""
    cluster: Count = 64
    """Minimum number of neurons that are read and computed together."""
    prefill: Literal["chunks-first", "layers-first"] = "chunks-first"
    """``chunks-first`` computes one chunk of the prompt through all layers, then the next, and
    reads what is not in memory again for every chunk; ``layers-first`` reads every layer once,
    sequentially, and computes up to 512 tokens with it before the next layer, as many as fit
    into the segment ``workspace``."""


KvType = Literal["fp16", "int8", "fp32"]


class Kv(Table):
    """The cache of keys and values."""

    type: KvType = "fp16"
    """Element type of the KV cache: ``int8`` halves it, with one scale per head and token;
    ``fp32`` doubles it and rounds nothing."""
    context: Annotated[Count, Field(examples=[4096])]
    """Context length in tokens, prompt and answer together."""
    lend: bool = False
    """Whether cold neurons may use the part of the segment ``kv`` that the context does not use
    yet. They are evicted as the context grows, least needed first."""


class Plan(Document):
    """A model on a device (``*.plan.toml``): what runs where, and what memory is spent on."""

    device: Reference
    """Device document: relative path or short name."""
    model: Reference
    """Model document: relative path or short name."""
    store: Annotated[Reference, Field(examples=["stores/pi2-demo"])]
    """Neuron store: a folder, relative to the plan file."""
    backends: dict[Literal["cpu", "gpu", "npu"], BackendName] = {"cpu": "cpu"}
    """Backend for each kind of unit."""
    units: Annotated[dict[Identifier, UnitSettings], Field(examples=[{"npu": {}}])] = {}
    """Settings of single units, by their names in the device."""
    memory: Memory
    """Budget and segments."""
    bundle: Bundle
    """Neuron bundles."""
    layers: Layers
    """Per-layer split."""
    projections: Projections = Projections.default()
    """Rows of projections and of the head."""
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
    experts: Experts = Experts.default()
    """Deviations from a mixture's routing."""
    twin: Annotated[Twin, Field(examples=[{"precision": "int2"}])] | None = None
    """Neurons in fewer bits that compute instead of being read."""
    sparsity: Sparsity | None = None
    """Sparsity of models whose neurons are never zero."""
    sampling: Sampling = Sampling.default()
    """How tokens are drawn."""
    serve: Serve = Serve.default()
    """Prompts that were read before."""
    pipeline: Pipeline = Pipeline.default()
    """Order of reading and computing."""
    kv: Kv
    """Context."""
