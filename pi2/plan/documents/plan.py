"""The plan document: this model on this device."""

from typing import Annotated, ClassVar, Literal

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
from pi2.plan.documents.quantities import Bytes, LongSeconds, MemoryBytes, TokensPerSecond


class Segments(Table):
    """Regions of the memory budget; together they may not exceed it."""

    runtime: Bytes
    """Python interpreter, libraries and tokenizer; a server takes 20 MiB more."""
    attention: Bytes
    """Dense weights that stay resident: embedding, attention, norms, head."""
    kv: Bytes
    """KV cache of the context."""
    predictor: Bytes
    """Activation predictors; with ``decode.predictor = "gate"``, the gate rows of all layers, or
    only of layers with a cutoff. MoE: also the experts' neurons."""
    hot: Bytes
    """Hot neurons: loaded at start and kept."""
    cold: Bytes
    """Cache of cold neurons, filled on demand."""
    workspace: Bytes
    """Activations, prefill staging buffers, logits."""
    state: Bytes = 0
    """States of recurrent layers, for every sequence."""


class UnitMemory(Table):
    """Memory of a unit other than the sparse one: its neurons and working memory."""

    budget: Bytes
    """Most bytes that it may take."""
    shares_main_memory: Annotated[bool, Field(examples=[True])] | None = None
    """Whether they are main memory, and count against ``memory.budget``; default: the device's
    statement: a unit without ``memory`` uses main memory."""


class Memory(Table):
    """The budget is a promise: the process, everything included, stays under it."""

    budget: MemoryBytes
    """Maximum resident set size of the whole process: a size, or a share. `"60 %"` is a share of
    the device's memory (of the machine's, if the device states none); `"60 % of the file"` of the
    file."""
    segments: Segments
    """What the budget is spent on."""
    weights: Literal["mapped", "loaded"] = "loaded"
    """Place of the resident weights of a GGUF file: ``mapped`` leaves them in the system's page
    cache, which starts at once, is shared by processes and counts as file memory; ``loaded`` reads
    them past the cache into memory of the process. Streamed weights are always read past it."""
    units: Annotated[
        dict[Identifier, UnitMemory], Field(examples=[{"gpu": {"budget": "8 GiB"}}])
    ] = {}
    """Memory of each dense unit, by the unit's name. A unit without an entry that uses main memory
    counts in ``segments.hot``."""
    embedding: Literal["resident", "flash"] = "resident"
    """Source of embedding rows: ``flash`` reads a few KiB for each token and leaves the memory to
    neurons. A tied embedding (shared with the head) is always resident, because every token needs
    all of it."""
    pressure: Literal["ignore", "yield"] = "ignore"
    """What a server does when programs of this machine wait for memory: ``yield`` makes the budget
    smaller, to a fifth at least, and larger again later. Linux tells it (PSI)."""
    lock: Literal["none", "locked", "re-read"] = "none"
    """Reaction to memory pressure, as on phones: ``none`` lets the system compress or swap idle
    pages; ``locked`` locks all segments within ``ulimit -l`` and reports a refusal; ``re-read``
    maps dense weights, of the store or of a copy in the cache. The system drops their pages instead
    of swapping them. The store must not change meanwhile."""


class Bundle(Table):
    """Layout of a neuron in the store."""

    stride: Bytes
    """Distance between two neurons in a layer's file; a multiple of the device's block size."""
    scales: Literal["inline", "resident"] = "inline"
    """Place of the scales of quantised weights: ``inline`` in the bundles, read with the weights;
    ``resident`` in a separate file for each layer, loaded into the segment ``attention``: smaller
    bundles, fewer bytes per read. Must match the store; ``pi2 store repack`` changes it."""


class Cache(Table):
    """The cache of cold neurons: the segment ``cold``."""

    policy: Literal["lfu", "lru"] = "lfu"
    """Eviction policy: ``lfu`` evicts the neuron used least often, with use counts that decay;
    ``lru`` the least recently used one."""
    fill: bool = True
    """Whether loading fills the cache with the neurons that follow the hot ones in stored order."""


KvType = Literal["fp16", "int8", "fp32"]


class Kv(Table):
    """The KV cache."""

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
    """Maximum number of ``io_uring`` requests in flight. If it exceeds the system's queue for the
    drive (on Linux often 256, shared with other programs), the computing thread waits for room."""
    merge_gap: Annotated[int, Field(ge=0, le=15)] = 0
    """Number of unneeded neurons that may be read and discarded between two needed ones, to make
    one request of both. Adjacent neurons are always one request."""
    verify: Literal["never", "first-read"] = "first-read"
    """``first-read`` verifies each neuron's checksum at its first read, and the hashes of other
    files at loading. ``never`` verifies nothing: a damaged byte changes the text without notice."""


ActivationType = Literal["int8", "int16", "fp32"]


class Prefill(Table):
    """How a prompt is processed: dense, in chunks."""

    unit: Annotated[Identifier, Field(examples=["npu"])] | None = None
    """Unit that computes prompts. FFN neurons outside its memory are sent to it from memory or
    flash. Absent leaves them to the sparse unit."""

    chunk: Annotated[int, Field(ge=1, le=1024)] = 128
    """Number of prompt tokens that go through a layer together."""
    activations: ActivationType = "int16"
    """Precision of inputs of quantised matrices on the processor. ``int8`` halves the arithmetic
    and changes logits by up to 1 % of the largest; ``fp32`` rounds nothing and is slower. Stores
    have one scale for 32 inputs. GGUF files run with ``int8`` unless the plan says otherwise:
    groups of 32 or 256, with scales and rounding as in llama.cpp for the matrix's type."""


PredictorMode = Literal["none", "gate", "low-rank", "router"]


class Speculation(Table):
    """Draft tokens that are verified together, with shared reads.

    Every token is still drawn from the model's own logits, with the random number that it has
    without speculation; a draft token is kept if the same token is drawn.  The text is the same,
    except for rounding."""

    drafts: Literal["prompt", "resident", "plan", "mtp"] = "prompt"
    """Source of drafts: ``prompt`` copies the continuation of an earlier occurrence of the last
    tokens; ``resident`` uses the model itself with the neurons in memory, without reads; ``plan``
    uses a smaller model with the same tokens, or a store's MTP head; ``mtp`` uses the MTP head in
    the plan's own GGUF file, which is the default where that streams and has one."""
    plan: Annotated[Reference, Field(examples=["./draft.plan.toml"])] | None = None
    """Plan or GGUF file of that model, with ``drafts = "plan"``: a path relative to this file, or
    a short name; both plans run GGUF files, or both stores. Its segments except ``runtime`` use the
    part of ``memory.budget`` that this plan leaves. With ``mtp``, another GGUF file of the head."""
    tokens: Annotated[int, Field(ge=1, le=32)] = 4
    """Maximum number of drafts in a step. A step has at most one token more, or ``decode.batch``:
    more sequences leave less room for drafts."""
    match: Annotated[int, Field(ge=1, le=16)] = 3
    """Number of last tokens that must have come before, in this order, with ``prompt``."""
    when: Literal["pays", "always"] = "pays"
    """``pays`` drafts as long as this saves bytes and time per accepted token, and tries again
    later if it does not; ``always`` drafts at every step."""


class Decode(Table):
    """How tokens are generated."""

    predictor: PredictorMode = "low-rank"
    """``none`` computes every neuron. ``gate`` computes all gates first; it is lossless for the
    ReLU family and for layers with a cutoff (Gemma 3n), and other models need ``[sparsity]``.
    ``low-rank`` uses trained predictors. ``router``, for MoE models, computes exactly the chosen
    experts and caches them: such a plan is simulated, or run by a unit that has the whole model.
    GGUF files do the same without it. ``none`` computes chosen experts and caches nothing."""
    threshold: float = 0.0
    """Predictor score from which a neuron counts as active; higher is faster and less accurate."""
    missing_threshold: Annotated[float, Field(examples=[1.0])] | None = None
    """Predictor score from which a missing neuron is read, if higher than ``threshold``: fewer
    reads, but rarely firing neurons are skipped. Default: ``threshold``."""
    leave_out: Annotated[float, Field(gt=0.0, le=0.5, examples=[0.02])] | None = None
    """Fraction of the total predictor score above ``threshold`` that may be skipped instead of read
    from flash, such as 0.02. Replaces ``missing_threshold``. Absent reads all predicted neurons."""
    passes: Annotated[Literal[1, 2], Field(examples=[2])] | None = None
    """Passes over the neurons in memory: 1 takes gate, up and down of a few neurons at a time; 2
    takes all gates, then open ups, then downs. Both give the same bits. Absent means 2 with
    ``predictor = "gate"`` and 1 otherwise. Neurons with biases or without gates are computed one by
    one."""
    activations: ActivationType = "int16"
    """Precision of matrix inputs in steps, as in ``prefill``: ``int16`` changes logits by a few
    parts in 10,000 of the largest."""
    batch_activations: Literal["int8"] | None = None
    """Precision of matrix inputs in the cpu backend in steps of several tokens (sequences or
    drafts). ``int8`` takes the upper 8 bits of ``int16``, and is quicker from three tokens on; a
    token's logits then depend on its batch. Absent means the precision of ``activations``; with
    ``fp32`` there, ``int8`` has no effect."""
    batch: Annotated[int, Field(ge=1, le=64, examples=[4])] = 1
    """Maximum number of sequences that generate at the same time, each with its own KV cache in
    ``memory.segments.kv``. Weights and neurons are read once for all of them."""
    look_ahead: Literal["none", "attention", "layer"] = "none"
    """Time at which a layer's neurons are predicted: ``none`` after its attention; ``attention``
    before it, which hides reads behind attention; ``layer`` before the previous layer's FFN, which
    keeps storage busy. Earlier predictions find slightly fewer active neurons. With ``router`` only
    reads begin early, and missed experts are read in time."""
    speculation: Annotated[Speculation, Field(examples=[{"drafts": "prompt"}])] | None = None
    """Draft tokens that are verified together; absent generates tokens one by one."""

    @property
    def names_all(self) -> bool:
        """Whether no neuron is predicted: a token computes all of its experts, or of the layer."""
        return self.predictor in ("none", "router")

    @property
    def leaves_out(self) -> bool:
        """Whether neurons that a predictor has named may be left out."""
        return (self.missing_threshold, self.leave_out) != (None, None)

    @property
    def step_tokens(self) -> int:
        """Most tokens that go through the model in a step."""
        drafts = 0 if self.speculation is None else self.speculation.tokens
        return max(self.batch, 1 + drafts)


class Chat(Table):
    """Conversations: `pi2 run --chat`, `pi2 chat` and `pi2 serve`."""

    system: Annotated[str, Field(max_length=1 << 16, examples=["Answer briefly."])] | None = None
    """System message of conversations that have none."""
    template: (
        Annotated[str, Field(max_length=1 << 20, examples=["{{ messages[-1].content }}"])] | None
    ) = None
    """Chat template in Jinja that replaces the model's."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
        Field(examples=[["<|im_end|>"]]),
    ] = ()
    """Texts that end an answer."""


class Serve(Table):
    """How `pi2 serve` and `pi2 chat` go on from prompts that were read before, and how long a
    server keeps a model."""

    prefixes: Literal["answers", "prompts", "none"] = "answers"
    """Cached prefixes that a new prompt may reuse. ``prompts``: whole chunks of prompts, bit-equal
    to reading them again. ``answers``: also generated tokens, as computed by the plan's predictors;
    the next turn of a conversation then reads new tokens only. ``none`` reads every prompt from its
    beginning."""
    prefix_cache: Annotated[Bytes, Field(examples=["4 GiB"])] | None = None
    """Maximum bytes of files with KV caches of prompts, which outlive the server; the least
    recently used go first. Absent keeps them in ``memory.segments.kv`` only, until another sequence
    needs the room."""
    idle: Annotated[LongSeconds, Field(examples=["10 min"])] | None = None
    """Time without a request after which the server unloads the model; the next request loads it
    again. Absent keeps it until another model needs the memory."""
    pin: bool = False
    """Whether the model stays: it makes no room for others, and ``idle`` does not count."""
    load: Literal["room", "start", "request"] = "room"
    """When a server loads the model: ``start`` at its start, ``request`` at the first request;
    ``room`` at the start if the memory has room for it."""


class Pipeline(Table):
    """How reading and computing go together while a token is generated."""

    phases: Literal[1, 2] = 1
    """Reads for a missing neuron: 1 reads the whole bundle; 2 reads the gate first, and up and down
    only of an open gate. 2 reads fewer bytes in more requests. Neighbours in one request, neurons
    with known gates, and neurons that ``io.verify`` has not compared yet are read whole."""
    cluster: Count = 64
    """Minimum batch of neurons that are read, then computed, together. Ignored with
    ``decode.look_ahead = "layer"``, ``io.engine = "io_uring"`` and ``phases = 1``."""
    prefill: Literal["chunks-first", "layers-first"] = "chunks-first"
    """``chunks-first`` computes one chunk of the prompt through all layers, then the next, and
    reads missing weights for each chunk. ``layers-first`` reads every layer once and computes up to
    512 tokens with it, as many as fit into the segment ``workspace``."""


Quality = Literal["exact", "near", "fast"]


class Plan(Document):
    """A model on a device (``*.plan.toml``): what runs where, and what memory is spent on."""

    VERSION: ClassVar[int] = 3
    schema_version: Literal[3]
    """Version of the plan language that the file is written in."""
    weights: Annotated[Reference, Field(examples=["model-Q4_K_M.gguf", "stores/pi2-demo"])]
    """Weights: a GGUF file (any part of a split one) or the folder of a neuron store, relative to
    the plan file; ``package:NAME/FILE.gguf``, a file of an installed Python package; or
    ``hf:ORG/NAME/FILE.gguf``, a file of the hub, with ``@REVISION`` after NAME if wanted."""
    quality: Quality | None = None
    """Settings that trade quality for speed, under one name; stated settings win.
    ``exact`` skips nothing and rounds activations to 16 bits or more; ``near`` is what a plan does
    without this key; ``fast`` skips 2 % of predictor scores, prefers experts in memory, and rounds
    prompts' activations and the KV cache of wide heads to 8 bits."""
    speed: TokensPerSecond | None = None
    """Lowest decode speed of all sequences together. `pi2 plan FILE` finds a plan that reaches it,
    or says which speed can be reached; `pi2 validate` reports a plan that is predicted slower."""
    device: Reference
    """Device document: relative path or short name. Absent means this machine, ``host``."""
    model: Annotated[Reference, Field(examples=["bamboo-7b"])]
    """Model document: relative path or short name. Absent means the model that the weights state;
    a store that is not on this machine needs it."""
    tokenizer: Annotated[Reference, Field(examples=["tokenizer.json"])] | None = None
    """Tokenizer that replaces the one of the GGUF file ``weights``, relative to the plan file: a
    ``tokenizer.json``, a ``tokenizer.model``, or a folder with one."""
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
    """Deviations from an MoE model's routing."""
    sparsity: Sparsity | None = None
    """Sparsity of models whose neurons are never zero."""
    sampling: Sampling = Sampling.default()
    """How tokens are drawn."""
    chat: Chat = Chat.default()
    """Conversations."""
    serve: Serve = Serve.default()
    """Prompts that were read before, and how long a server keeps the model."""
    pipeline: Pipeline = Pipeline.default()
    """Order of reading and computing."""
    kv: Kv
    """Context."""


DERIVED = frozenset(
    {
        *(
            "device",
            "model",
            "memory",
            "memory.budget",
            "memory.segments",
            "bundle",
            "bundle.stride",
        ),
        *(f"memory.segments.{name}" for name in Segments.model_fields),
        *("layers", "layers.split", "layers.hot", "kv", "kv.context"),
    }
)
"""Keys that are derived where a plan does not state them."""
