"""What memory is spent on: segments, bundles, cold neurons, the context."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, Identifier, Table
from pi2.plan.documents.quantities import Bytes


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

    budget: Bytes
    """Maximum resident set size of the whole process."""
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
