"""The plan document: this model on this device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, Document, Identifier, Reference, Sampling, Table
from pi2.plan.documents.plan_units import (
    BackendName,
    Experts,
    Layers,
    Projections,
    Sparsity,
    Threads,
    UnitSettings,
)
from pi2.plan.documents.quantities import Bytes, MemoryBytes


class Segments(Table):
    """Regions of the memory budget; together they may not exceed it."""

    runtime: Bytes
    """Python interpreter, libraries and tokenizer; a server takes 20 MiB more."""
    attention: Bytes
    """Dense weights that stay resident: embedding, attention, norms, head."""
    kv: Bytes
    """KV cache of the context."""
    predictor: Bytes
    """Activation predictors, or all gate rows with ``decode.predictor = "gate"``, those of layers
    with a cutoff alone where some have one; in a mixture also which neurons are whose."""
    hot: Bytes
    """Hot neurons: loaded at start and kept."""
    cold: Bytes
    """Cache of cold neurons, filled on demand."""
    workspace: Bytes
    """Activations, prefill staging buffers, logits."""
    state: Bytes = 0
    """States of the layers that have one instead of keys and values, of every sequence."""


class UnitMemory(Table):
    """What a unit beside the sparse one keeps: its neurons, and what it works with."""

    budget: Bytes
    """Most bytes that it may take."""
    shares_main_memory: Annotated[bool, Field(examples=[True])] | None = None
    """Whether they are main memory, and so count against ``memory.budget`` beside the segments;
    absent means as the device says: a unit without ``memory`` of its own uses main memory."""


class Memory(Table):
    """The budget is a promise: the process, everything included, stays under it."""

    budget: MemoryBytes
    """Maximum resident set size of the whole process: a size, or a share such as `"60 %"` of the
    device's memory (of the machine's, if the device states none), or `"60 % of the file"`."""
    segments: Segments
    """What the budget is spent on."""
    weights: Literal["mapped", "loaded"] = "loaded"
    """Where the resident weights of a GGUF file lie: ``mapped`` leaves them in the system's page
    cache, which starts at once, is shared by processes and counts as file memory; ``loaded`` reads
    them past the cache into memory of the process. Streamed weights are always read past it."""
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


class Cache(Table):
    """The cache of cold neurons: the segment ``cold``."""

    policy: Literal["lfu", "lru"] = "lfu"
    """Eviction policy: ``lfu`` evicts the neuron used least often, with use counts that decay;
    ``lru`` the least recently used one."""
    fill: bool = True
    """Whether loading fills the cache with the neurons that follow the hot ones in stored order."""


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


class Io(Table):
    """How neurons are read."""

    mode: Literal["direct", "buffered"] = "direct"
    """``direct`` bypasses the page cache (O_DIRECT), ``buffered`` uses it."""
    engine: Literal["pread", "io_uring"] = "io_uring"
    """``io_uring`` (Linux) queues many requests per system call, without threads, and falls back
    to ``pread`` where it is not available; ``pread`` reads with threads, one request each."""
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


ActivationType = Literal["int8", "int16", "fp32"]


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
    ReLU family, and for layers whose gates have a cutoff (Gemma 3n), beside which the others
    compute all of theirs; other models need ``[sparsity]``; ``low-rank`` uses trained predictors;
    ``router``, for mixtures of experts, computes the neurons of the experts that the router
    chooses, all of them and no others, so that nothing is lost, and keeps them in the cache.  In a
    mixture ``none`` computes the chosen experts, too, but keeps nothing of what it reads."""
    threshold: float = 0.0
    """Predictor score from which a neuron counts as active; higher is faster and less accurate."""
    missing_threshold: Annotated[float, Field(examples=[1.0])] | None = None
    """Predictor score from which a neuron that is not in memory is read, if higher than
    ``threshold``: fewer reads, at the cost of leaving out some neurons that fire rarely.
    Default: ``threshold``."""
    leave_out: Annotated[float, Field(gt=0.0, le=0.5, examples=[0.02])] | None = None
    """Share of the predictor's scores above ``threshold``, summed over named neurons, that may be
    left out because these are not in memory: instead of ``missing_threshold``, which is found while
    the model runs. Absent reads all that is named."""
    passes: Annotated[Literal[1, 2], Field(examples=[2])] | None = None
    """Passes over the neurons in memory: 1 takes gate, up and down of a few neurons at a time, 2
    the gates of all, then ups where gates are open, then downs where neurons fire.  Both give the
    same bits.  Absent means 2 with ``predictor = "gate"``, where gates are known beforehand, and
    else 1, which was quicker with ReLU, dReLU and SiLU.  Neurons with biases
    or without gates are computed one by one in either case."""
    activations: Literal["int16", "fp32"] = "int16"
    """Precision of matrix inputs in the cpu backend, as in ``prefill``: ``int16`` changes logits
    by a few parts in 10,000 of the largest, ``fp32`` rounds nothing."""
    batch_activations: Literal["int8"] | None = None
    """Precision of matrix inputs in the cpu backend in steps of several tokens, of sequences or of
    guesses that are verified: ``int8`` takes the upper 8 bits of ``int16``, which is quicker from
    three tokens on; a token's logits then depend on whether others are computed with it. Absent
    means the precision of ``activations``, and so does ``int8`` if these are ``fp32``."""
    batch: Annotated[int, Field(ge=1, le=64, examples=[4])] = 1
    """Maximum number of sequences that generate at the same time, each with its own KV cache in
    ``memory.segments.kv``. Weights and neurons are read once for all of them."""
    look_ahead: Literal["none", "attention", "layer"] = "none"
    """When a layer's neurons are predicted: ``none`` after its attention; ``attention`` before
    its attention, which then hides the reads; ``layer`` before the FFN of the previous layer, so
    that storage is never idle. Earlier predictions find slightly fewer active neurons; with
    ``router`` only reads begin early, two layers early while storage is idle, and what they
    miss is read in time."""
    speculation: Annotated[Speculation, Field(examples=[{"drafts": "prompt"}])] | None = None
    """Tokens that are guessed and verified together; absent generates them one by one."""

    @property
    def leaves_out(self) -> bool:
        """Whether neurons that a predictor has named may be left out."""
        return (self.missing_threshold, self.leave_out) != (None, None)

    @property
    def step_tokens(self) -> int:
        """Most tokens that go through the model in a step."""
        drafts = 0 if self.speculation is None else self.speculation.tokens
        return max(self.batch, 1 + drafts)


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
    """How reading and computing go together while a token is generated."""

    phases: Literal[1, 2] = 1
    """Reads for a missing neuron: the whole bundle in 1, or gate first and, only where the gate is
    open, up and down (2); the others do not stay in the cache.  Neighbours in the store, which
    share a request, are read whole in either case, and so are neurons whose gates are known, with
    ``predictor = "gate"``, and those that ``io.verify`` has not compared yet.  2 reads fewer bytes
    in more requests."""
    cluster: Count = 64
    """Minimum number of neurons that are read and computed together; all that a layer misses are
    where ``decode.look_ahead = "layer"``, ``io.engine = "io_uring"`` and ``phases = 1``: the drive
    reads the next layer's meanwhile."""
    prefill: Literal["chunks-first", "layers-first"] = "chunks-first"
    """``chunks-first`` computes one chunk of the prompt through all layers, then the next, and
    reads what is not in memory again for every chunk; ``layers-first`` reads every layer once,
    sequentially, and computes up to 512 tokens with it before the next layer, as many as fit
    into the segment ``workspace``."""


class Plan(Document):
    """A model on a device (``*.plan.toml``): what runs where, and what memory is spent on."""

    device: Reference
    """Device document: relative path or short name."""
    model: Reference
    """Model document: relative path or short name."""
    store: Annotated[Reference, Field(examples=["stores/pi2-demo"])]
    """Neuron store: a folder, relative to the plan file."""
    weights: Annotated[Reference, Field(examples=["model-Q4_K_M.gguf"])] | None = None
    """GGUF file that is run as it is: a path from the plan file to it, or to any part of a split
    one, or ``package:NAME/FILE``, a file of an installed Python package. Then the model, the store
    and the bundle are derived, and need not be stated."""
    tokenizer: Annotated[Reference, Field(examples=["tokenizer.json"])] | None = None
    """Tokenizer instead of that of the GGUF file `weights`, relative to the plan file: a
    ``tokenizer.json``, a ``tokenizer.model``, or a folder that has one."""
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


DERIVED = frozenset(
    {
        *("device", "memory", "memory.budget", "memory.segments", "bundle", "bundle.stride"),
        *(f"memory.segments.{name}" for name in Segments.model_fields),
        *("layers", "layers.split", "layers.hot", "kv", "kv.context"),
    }
)
"""Keys that are derived where a plan does not state them."""
