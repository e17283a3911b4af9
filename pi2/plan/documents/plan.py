"""The plan document: this model on this device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Document, Identifier, Reference
from pi2.plan.documents.plan_memory import Bundle, Cache, Kv, Memory
from pi2.plan.documents.plan_running import Decode, Io, Pipeline, Prefill, Serve
from pi2.plan.documents.plan_sparsity import Experts, Sparsity
from pi2.plan.documents.plan_units import BackendName, Layers, Projections, Threads, UnitSettings
from pi2.plan.documents.sampling import Sampling


class Plan(Document):
    """A model on a device (``*.plan.toml``): what runs where, and what memory is spent on."""

    device: Reference
    """Device document: relative path or short name."""
    model: Reference
    """Model document: relative path or short name."""
    store: Annotated[Reference, Field(examples=["stores/pi2-demo"])]
    """Neuron store: a folder, relative to the plan file."""
    weights: Annotated[Reference, Field(examples=["model-Q4_K_M.gguf"])] | None = None
    """GGUF file that is run as it is, relative to the plan file; any part of a split one. Then the
    model, the store, the bundle and all segments are derived, and need not be stated."""
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
