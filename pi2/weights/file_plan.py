"""Derives what a plan that runs a GGUF file leaves out: model, device, segments and the rest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pi2.diagnostics import UserError
from pi2.fitting.budget import count_file_runtime
from pi2.fitting.completion import (
    FAST_PREFERENCE,
    MEMORY_SHARE,
    SEGMENT_REASONS,
    USUAL_CONTEXT,
    read_size,
)
from pi2.memory.weight_stream import BLOCK
from pi2.plan.arithmetic.sources import FileFacts, FilledPlan
from pi2.plan.arithmetic.units import Need, Needs
from pi2.plan.checking.rules.stated import find_other_choice
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Segments
from pi2.plan.documents.quantities import approximate_bytes, format_bytes, read_percent, write_least
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import round_up
from pi2.weights.file_tensor import PIECE_BYTES, FileTensor, describe_experts
from pi2.weights.gguf_weights import GgufWeights

LEAST_THREADS = 4
"""Compute threads that the workspace has room for at least: another machine may have more cores
than the one on which a plan was derived."""
CONTEXTS = (USUAL_CONTEXT, 2048, 1024, 512)
"""Tokens of a context that no plan states: the most for which there is room."""
CHUNKS = (256, 128, 64, 32)
"""Tokens of a prompt that go through the layers together: the most for which there is room."""
DRAFT_TOKENS = {"prompt": 6, "mtp": 3}
"""Tokens that are drafted at once where weights are streamed.  With the token before them, seven
are the most that have the bits of one by one; an MTP head knows the first ones best."""
MIXTURE_CHUNKS = (1024, 512)
"""The same of MoE models, whose experts every chunk reads once, if the workspace stays small."""
WORKSPACE_SHARE = 0.02
"""Of the budget, or of the weights, which that may take."""
LEAST_RING, USUAL_RING = (count * (PIECE_BYTES + 2 * BLOCK) for count in (6, 48))
"""Bytes of a streaming run's ring: room for so many pieces, at least and usually."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """Tables of a plan on which its needs depend, and compute threads."""

    kv: dict[str, Any]
    prefill: dict[str, Any]
    decode: dict[str, Any]
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNeeds:
    """Bytes of a run with any resident weights."""

    vectors: int
    """Norms, biases and tables."""
    kv: int
    state: int
    workspace: int
    runtime: int
    matrices: int
    """All matrices that may be resident or streamed."""
    looked_up: int
    """Matrices of which a token reads a row, included in ``matrices``."""
    experts: int
    """Matrices of experts that routers choose, included in ``matrices``."""
    slots: int
    """The fewest slots that experts can do with."""
    draft: int = 0
    """What the model that drafts takes."""
    shared: int = 0
    """Dense matrices that are read more than once for a token: they are resident."""

    @property
    def fixed(self) -> int:
        """Bytes that no choice makes smaller."""
        return self.vectors + self.kv + self.state + self.workspace + self.runtime + self.draft

    @property
    def least(self) -> int:
        """Bytes with which a run can stream, or has everything."""
        return self.fixed + self.least_weights

    @property
    def least_weights(self) -> int:
        return min(self.matrices, LEAST_RING + self.slots + self.shared)

    @property
    def streamable(self) -> int:
        """Dense matrices that every token reads whole."""
        return self.matrices - self.looked_up - self.experts


def derive_plan(
    values: Mapping[str, Any],
    weights: GgufWeights,
    installed_bytes: int,
    available_bytes: int,
    draft_bytes: int = 0,
    head: GgufWeights | None = None,
    cores: int = 1,
) -> FilledPlan:
    """Complete the values of a plan for open ``weights``.

    The machine has so many ``cores`` and so much memory, of which so much is free.  The model that
    drafts takes ``draft_bytes`` of the budget.  ``head`` is the MTP head that the plan wants, or
    that drafts where it says nothing of drafts and weights stream.

    Raises `UserError` P026 where the budget is not enough."""
    model = weights.model
    kv = dict(values.get("kv") or {})
    longest = min(model.shape.context, USUAL_CONTEXT)
    contexts = [kv["context"]] if "context" in kv else [min(longest, most) for most in CONTEXTS]
    prefill, decode = dict(values.get("prefill") or {}), dict(values.get("decode") or {})
    decode.setdefault("predictor", "none")
    for part in (prefill, decode):
        part.setdefault("activations", "int16" if values.get("quality") == "exact" else "int8")
    memory = dict(values.get("memory") or {})
    share = read_percent(memory.get("budget"))
    if share is not None:
        size = weights.count_bytes() if share[1] else installed_bytes
        memory["budget"] = format_bytes(int(size * share[0]) // _MIB * _MIB)
    stated = memory.get("budget")
    budget = stated if isinstance(stated, int) else read_size(stated)
    larger = MIXTURE_CHUNKS if model.moe is not None else ()
    chunks = (prefill["chunk"],) if "chunk" in prefill else (*larger, *CHUNKS)
    wanted = head if "speculation" in decode else None
    parts = Parts(kv, prefill, decode, _count_threads(values, cores))
    limit = budget
    if limit is None and available_bytes:
        limit = int(available_bytes * MEMORY_SHARE)
    for kv["context"], chunk in itertools.product(contexts, chunks):
        prefill["chunk"] = min(chunk, _read_count(kv["context"]))
        needs = _count_both(weights, wanted, parts, limit, draft_bytes)
        most = WORKSPACE_SHARE * min(needs.matrices, limit or needs.matrices)
        if chunk in larger and len(chunks) > 1 and needs.workspace > most:
            continue
        if limit is None or needs.least <= limit:
            break
    if budget is None:
        whole = round_up(needs.fixed + needs.matrices, _MIB)
        budget = whole if limit is None else min(whole, limit)
        if needs.least <= available_bytes:
            budget = max(budget, needs.least)
        needs = _count_both(weights, wanted, parts, budget, draft_bytes)
    if budget < needs.least:
        raise _refuse(budget, needs)
    hot, ring, slots = divide(budget, needs)
    if needs.streamable > hot and "speculation" not in decode and not model.is_mtp:
        # A step that verifies drafts reads the file once.
        both = _count_both(weights, head, parts, budget, draft_bytes)
        wanted = head if both.least <= budget else None
        drafts = "prompt" if wanted is None else "mtp"
        decode["speculation"] = {"drafts": drafts, "tokens": DRAFT_TOKENS[drafts]}
        needs = needs if wanted is None else both
        hot, ring, slots = divide(budget, needs)
    is_whole = hot == needs.matrices
    streamed = max(0, needs.streamable - hot)
    memory.setdefault("budget", f"{budget} B")
    memory.setdefault("weights", "mapped" if is_whole else "loaded")
    sizes = dict.fromkeys(Segments.model_fields, 0) | {
        "runtime": needs.runtime,
        "attention": needs.vectors,
        "kv": needs.kv,
        "state": needs.state,
        "hot": hot,
        "cold": ring + slots,
        "workspace": needs.workspace,
    }
    segments = {name: f"{size} B" for name, size in sizes.items()}
    memory["segments"] = segments | dict(memory.get("segments") or {})
    layers = dict(values.get("layers") or {})
    layers.setdefault("split", {"cpu": 1.0})
    stride = round_up(model.lay_out_bundle().used_bytes, 4096)
    said = {
        "model": model.id,
        "bundle.stride": stride,
        "layers.hot": round(hot / needs.matrices, 4),
    }
    layers.setdefault("hot", said["layers.hot"])
    filled = {
        "device": "host",
        "model": model.id,
        "backends": {"cpu": "blocks"},
        "bundle": {"stride": f"{stride} B"},
        **values,
        "memory": memory,
        "layers": layers,
        "prefill": prefill,
        "decode": decode,
        "kv": kv,
    }
    is_fast = values.get("quality") == "fast" and not is_whole
    if is_fast and model.moe is not None and find_other_choice(model.moe) is None:
        filled["experts"] = {"prefer_cached": FAST_PREFERENCE, **(values.get("experts") or {})}
    nothing = Need(0, "nothing")
    active = 1.0 if model.moe is None else model.moe.active_experts / model.moe.experts
    facts = FileFacts(
        path=weights.path,
        said=said,
        matrices=sum(1 for _ in weights.list_matrices()),
        matrix_bytes=needs.matrices,
        token_bytes=needs.streamable
        + round(active * needs.experts)
        + sum(find_shared(weights).values()),
        streamed_bytes=streamed,
        expert_bytes=0 if is_whole else needs.experts,
        slot_bytes=slots,
        needs=Needs(
            attention=Need(needs.vectors, "norms, biases and tables"),
            kv=Need(needs.kv, f"{kv['context']} tokens"),
            state=Need(needs.state, "states of sequences"),
            predictor=nothing,
            hot=nothing,
            cold=Need(min(ring, LEAST_RING) + min(slots, needs.slots), "buffers of reads"),
            workspace=Need(needs.workspace, f"{prefill['chunk']} tokens of a prompt, and logits"),
        ),
        threads=parts.threads,
        weights=weights,
        draft=None if wanted is None else _derive_head(filled, wanted, needs.draft, cores),
        shared=weights.list_resident() | ({} if wanted is None else find_shared(wanted)),
    )
    reasons = {
        path: reason.format(budget=approximate_bytes(budget), streamed=approximate_bytes(streamed))
        for path, reason in REASONS.items()
        if _is_left_out(values, path)
    }
    return FilledPlan(values=filled, model=model, facts=facts, reasons=reasons)


REASONS: Mapping[KeyPath, str] = {
    ("device",): "this machine",
    ("model",): "what the file's metadata say",
    ("backends",): "the backend that computes files as they are",
    ("bundle", "stride"): "a neuron's bytes, which lie apart in a file",
    ("memory", "budget"): "the whole file, or the free memory",
    ("memory", "weights"): "mapped if all of the file fits",
    ("layers", "hot"): "share of the weights that fits into {budget}",
    ("kv", "context"): f"the model's, at most {USUAL_CONTEXT}, or shorter if memory is short",
    ("prefill", "chunk"): "the most tokens that there is room for",
    ("prefill", "activations"): 'as llama.cpp has them, or 16 bits with quality = "exact"',
    ("decode", "activations"): 'as llama.cpp has them, or 16 bits with quality = "exact"',
    ("decode", "speculation", "drafts"): "the file's MTP head, or text that came before",
    ("decode", "speculation", "tokens"): "{streamed} are read for every step, which verifies these",
    **{("memory", "segments", name): reason for name, reason in SEGMENT_REASONS.items()},
    ("memory", "segments", "attention"): "norms, biases and tables",
    ("memory", "segments", "hot"): "matrices that stay in memory",
    ("memory", "segments", "cold"): "buffers of reads",
}


def _is_left_out(values: Mapping[str, Any], path: KeyPath) -> bool:
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found is None


def _count_both(
    weights: GgufWeights,
    head: GgufWeights | None,
    parts: Parts,
    budget: int | None,
    draft_bytes: int,
) -> FileNeeds:
    """Needs of a model with the other one that drafts.  With a ``head`` of its own it shares the
    room that streaming leaves, by their sizes."""
    needs = replace(count_needs(weights, parts), draft=draft_bytes)
    if head is None:
        return needs
    own = count_needs(head, parts)
    least = own.least - own.runtime
    shared = needs.shared + sum(find_shared(head).values())
    needs = replace(needs, draft=least, shared=shared)
    rest, more = needs.matrices - needs.least_weights, own.matrices - own.least_weights
    if budget is not None:
        more = more * max(0, min(budget - needs.least, rest + more)) // max(1, rest + more)
    return replace(needs, draft=least + more)


def find_shared(head: GgufWeights) -> dict[str, int]:
    """Bytes of the matrices of its model that an MTP head reads whole, by name."""
    table = None if head.model.tied_head else head.find("embedding")
    return {key: own for key, own in head.shared.items() if table is None or key != table.name}


def _derive_head(values: Mapping[str, Any], head: GgufWeights, size: int, cores: int) -> FilledPlan:
    """The plan by which an MTP head drafts within ``size`` bytes for the plan of ``values``."""
    memory, decode = dict(values["memory"]), dict(values["decode"])
    decode.pop("speculation")
    for key in ("segments", "weights"):
        memory.pop(key)
    needs = count_needs(
        head, Parts(values["kv"], values["prefill"], decode, _count_threads(values, cores))
    )
    memory["budget"] = f"{size + needs.runtime} B"
    left = {key: own for key, own in values.items() if key not in ("layers", "model", "bundle")}
    return derive_plan({**left, "memory": memory, "decode": decode}, head, 0, 0, cores=cores)


def divide(budget: int, needs: FileNeeds) -> tuple[int, int, int]:
    """Bytes of resident matrices, of the ring that other dense ones pass through, and of slots for
    experts: these have what dense matrices leave."""
    room = budget - needs.fixed
    if room >= needs.matrices:
        return needs.matrices, 0, 0
    if needs.experts and room >= needs.streamable + needs.slots:
        return needs.streamable, 0, room - needs.streamable
    room -= needs.slots
    ring = max(LEAST_RING, min(USUAL_RING, room // 8, room - needs.shared))
    return max(0, min(room - ring, needs.streamable)), ring, needs.slots


def count_needs(weights: GgufWeights, parts: Parts) -> FileNeeds:
    from pi2.backends.blocks.contract import PLANES
    from pi2.backends.blocks.instructions import Planes
    from pi2.backends.blocks.operands import Extent

    model, context = weights.model, _read_count(parts.kv["context"])
    sequences = _read_count(parts.decode.get("batch", 1))
    matrices = weights.count_bytes()
    chunk = _read_count(parts.prefill["chunk"])
    one, many = (PLANES.get(own["activations"], 1) for own in (parts.decode, parts.prefill))
    step_tokens = max(sequences, 1 + _read_drafts(parts.decode))
    # Routers choose early if experts are not all resident.
    extent = Extent(
        chunk=chunk,
        step_tokens=step_tokens,
        sequences=sequences,
        kv=parts.kv.get("type", "fp16"),
        context=context,
        threads=parts.threads,
        planes=Planes(one, one, many),
        predicts=model.moe is not None,
    )
    arrays = weights.count_arrays(extent)
    experts = weights.list_experts()
    return FileNeeds(
        vectors=arrays.get("attention", 0),
        kv=arrays.get("kv", 0),
        state=arrays["state"],
        workspace=arrays["workspace"],
        runtime=round_up(
            count_file_runtime(model, has_table=weights.checkpoint.may_have_table), _MIB
        ),
        matrices=matrices,
        looked_up=sum(weights.list_looked_up().values()),
        experts=sum(tensor.size_bytes for own in experts.values() for tensor in own),
        slots=_count_slots(model, experts),
        shared=sum(weights.list_resident().values()),
    )


def _count_slots(model: Model, experts: Mapping[int, Sequence[FileTensor]]) -> int:
    if model.moe is None or not experts:
        return 0
    layers = {layer: describe_experts(own) for layer, own in experts.items()}
    from pi2.memory.expert_slots import count_least_bytes

    return count_least_bytes(layers, model.moe.active_experts)


def _read_count(value: object) -> int:
    """A number of tokens or sequences; 1 for what the schema will refuse."""
    return value if type(value) is int and value > 0 else 1


def _count_threads(values: Mapping[str, Any], cores: int) -> int:
    stated = values.get("threads")
    compute = stated.get("compute") if isinstance(stated, Mapping) else None
    return max(cores, LEAST_THREADS) if compute is None else _read_count(compute)


def _read_drafts(decode: Mapping[str, Any]) -> int:
    """Tokens that are drafted at once; the usual number where the plan may come to draft."""
    stated = decode.get("speculation")
    if isinstance(stated, Mapping) and "tokens" in stated:
        return _read_count(stated["tokens"])
    return max(DRAFT_TOKENS.values())


def _refuse(budget: int, needs: FileNeeds) -> UserError:
    parts = {
        "Python, libraries and tokenizer": needs.runtime,
        "KV cache": needs.kv,
        "states": needs.state,
        "activations and logits": needs.workspace,
        "norms and biases": needs.vectors,
        "experts of a token": needs.slots,
        "the model that drafts": needs.draft,
    }
    shorter = ", or a smaller kv.context" if needs.least - needs.kv <= budget else ""
    return UserError.of(
        "P026",
        f"{approximate_bytes(budget)} is not enough: this file needs at least "
        f"{write_least(needs.least)}",
        help=f"--memory {-(-needs.least // _MIB)}MiB{shorter}",
        notes=[f"{name}: {approximate_bytes(size)}" for name, size in parts.items() if size],
    )
