"""How a GGUF file answers the derivation of a plan that runs it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from pi2.fitting.budget import MIB, Shortage, count_file_runtime
from pi2.fitting.completion import (
    FAST_PREFERENCE,
    SEGMENT_REASONS,
    Fit,
    Origin,
    Setting,
    Weighed,
    complete_plan,
)
from pi2.memory.direct_files import BLOCK
from pi2.plan.arithmetic.sources import Completion, FileFacts
from pi2.plan.arithmetic.units import Need, Needs
from pi2.plan.checking.rules.stated import find_other_choice
from pi2.plan.documents.device import Device
from pi2.plan.documents.plan import Plan, Segments
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import round_up
from pi2.weights.file_tensor import PIECE_BYTES, describe_experts
from pi2.weights.gguf_weights import GgufWeights

LEAST_THREADS = 4
"""Compute threads that the workspace has room for at least: another machine may have more cores
than the one on which a plan was derived."""
CHUNKS = (256, 128, 64, 32)
"""Tokens of a prompt that go through the layers together: the most for which there is room."""
MIXTURE_CHUNKS = (1024, 512)
"""The same of MoE models, whose experts every chunk reads once, if the workspace stays small."""
DRAFT_TOKENS = {"prompt": 6, "mtp": 3}
"""Tokens that are drafted at once where weights are streamed.  With the token before them, seven
are the most that have the bits of one by one; an MTP head knows the first ones best."""
LEAST_PIECES = 6
"""Pieces for which a streaming run's ring has room at least."""
LEAST_RING, USUAL_RING = (n * (PIECE_BYTES + 2 * BLOCK) for n in (LEAST_PIECES, 48))
"""Bytes of the ring, at least and usually."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNeeds:
    """Bytes of a run with any resident weights."""

    segments: Mapping[str, int]
    """What does not depend on resident weights: norms and biases are in ``attention``."""
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
    largest: int = PIECE_BYTES
    """The largest matrix that may be streamed."""

    @property
    def least_ring(self) -> int:
        return min(LEAST_RING, LEAST_PIECES * (self.largest + 2 * BLOCK))

    @property
    def fixed(self) -> int:
        """Bytes that no choice makes smaller."""
        return sum(self.segments.values()) + self.draft

    @property
    def least(self) -> int:
        """Bytes with which a run can stream, or has everything."""
        return self.fixed + self.least_weights

    @property
    def least_weights(self) -> int:
        return min(self.matrices, self.least_ring + self.slots + self.shared)

    @property
    def streamable(self) -> int:
        """Dense matrices that every token reads whole."""
        return self.matrices - self.looked_up - self.experts

    def divide(self, budget: int) -> tuple[int, int, int]:
        """Bytes of resident matrices, of the ring that other dense ones pass through, and of slots
        for experts: these have what dense matrices leave.  Raises `Shortage`."""
        if budget < self.least:
            more = {"experts of a token": self.slots, "the model that drafts": self.draft}
            raise Shortage({**self.segments, **more}, self.least)
        room = budget - self.fixed
        if room >= self.matrices:
            return self.matrices, 0, 0
        if self.experts and room >= self.streamable + self.slots:
            return self.streamable, 0, room - self.streamable
        room -= self.slots
        ring = max(self.least_ring, min(USUAL_RING, room // 8, room - self.shared))
        return max(0, min(room - ring, self.streamable)), ring, self.slots

    def follow(self, budget: int, stated: Mapping[str, int]) -> tuple[int, int, int]:
        """`divide`, with the sizes of ``hot`` and ``cold`` that a plan states."""
        found = self.divide(budget)
        if not stated:
            return found
        hot = stated.get("hot", found[0])
        if hot >= self.matrices:
            return self.matrices, 0, 0
        rest = budget - self.fixed - hot
        if hot >= self.streamable:
            return self.streamable, 0, max(self.slots, stated.get("cold", rest))
        cold = stated.get("cold", rest if self.experts else min(rest, USUAL_RING))
        ring = max(self.least_ring, cold - self.slots)
        if self.experts:
            ring = min(ring, USUAL_RING)
        return hot, ring, max(self.slots, cold - ring) if self.experts else 0


class FileOrigin(Origin):
    """An open GGUF file.

    The model that drafts takes ``draft_bytes`` of the budget.  ``head`` is the MTP head that the
    plan wants, or that drafts where it says nothing of drafts and weights stream.  The machine has
    so many ``cores``."""

    usual_chunk = CHUNKS[0]
    why_hot, why_whole = "share of the weights that fits", "all weights fit"
    reasons = {
        **SEGMENT_REASONS,
        "attention": "norms, biases and tables",
        "hot": "matrices that stay in memory",
        "cold": "buffers of reads",
    }

    def __init__(
        self,
        weights: GgufWeights,
        head: GgufWeights | None = None,
        draft_bytes: int = 0,
        cores: int = 1,
    ) -> None:
        super().__init__(weights.model)
        self.path = weights.path
        self.weights, self.head, self.draft_bytes, self.cores = weights, head, draft_bytes, cores

    @property
    def stride(self) -> int:
        return round_up(self.model.lay_out_bundle().used_bytes, 4096)

    def list_settings(self, found: Completion, device: Device) -> Iterator[Setting]:
        yield ("backends",), {"cpu": "blocks"}, "the backend that computes files as they are"
        why = "a neuron's bytes, which lie apart in a file"
        yield ("bundle", "stride"), f"{self.stride} B", why
        yield ("decode", "predictor"), "none", "a file names no neurons"
        why = 'as llama.cpp has them, or 16 bits with quality = "exact"'
        bits = "int16" if found.read("quality") == "exact" else "int8"
        yield ("prefill", "activations"), bits, why
        yield ("decode", "activations"), bits, why

    def list_chunks(self, context: int) -> Iterable[int]:
        larger = MIXTURE_CHUNKS if self.model.moe is not None else ()
        return dict.fromkeys(min(chunk, context) for chunk in (*larger, *CHUNKS))

    def count_bytes(self, found: Completion) -> int:
        return self.weights.count_bytes()

    def weigh(self, plan: Plan, device: Device, found: Completion) -> Weighed:
        return _WeighedFile(self, plan, device, found.read("memory", "segments") or {})

    def count_threads(self, stated: int | None) -> int:
        return max(self.cores, LEAST_THREADS) if stated is None else stated


class _WeighedFile(Weighed):
    def __init__(
        self, origin: FileOrigin, plan: Plan, device: Device, stated: Container[str]
    ) -> None:
        """``stated``: the segments that the plan states."""
        self._origin, self._plan, self._device = origin, plan, device
        self._stated = {k: getattr(plan.memory.segments, k) for k in ("hot", "cold") if k in stated}
        self._threads = origin.count_threads(plan.threads.compute)
        self._count = partial(count_needs, plan=plan, threads=self._threads)
        self._own = replace(self._count(origin.weights), draft=origin.draft_bytes)
        self.workspace = self._own.segments["workspace"]
        self.weights = self._own.matrices

    @property
    def whole(self) -> int:
        needs = self._add_head(None)
        return round_up(needs.fixed + needs.matrices, MIB)

    def _add_head(self, budget: int | None, always: bool = False) -> FileNeeds:
        """Needs with a head that drafts: the two share the room that streaming leaves, by their
        sizes."""
        needs, head = self._own, self._origin.head
        if head is None or not (always or self._plan.decode.speculation):
            return needs
        own = self._count(head)
        least = own.least - own.segments["runtime"]
        shared = needs.shared + sum(find_shared(head).values())
        needs = replace(needs, draft=least, shared=shared)
        rest, more = needs.matrices - needs.least_weights, own.matrices - own.least_weights
        if budget is not None:
            more = more * max(0, min(budget - needs.least, rest + more)) // max(1, rest + more)
        return replace(needs, draft=least + more)

    def fit(self, budget: int) -> Fit:
        origin, plan, needs = self._origin, self._plan, self._add_head(budget)
        hot, ring, slots = needs.follow(budget, self._stated)
        head = origin.head if plan.decode.speculation else None
        follows: list[Setting] = []
        if needs.streamable > hot and not plan.decode.speculation and not origin.model.is_mtp:
            # A step that verifies drafts reads the file once.
            both = self._add_head(budget, always=True)
            if origin.head is not None and both.least <= budget:
                head, needs = origin.head, both
                hot, ring, slots = needs.follow(budget, self._stated)
            drafts = "prompt" if head is None else "mtp"
            why = "the file's MTP head, or text that came before"
            follows.append((("decode", "speculation", "drafts"), drafts, why))
            streamed = approximate_bytes(max(0, needs.streamable - hot))
            why = f"{streamed} are read for every step, which verifies these"
            follows.append((("decode", "speculation", "tokens"), DRAFT_TOKENS[drafts], why))
        is_whole, moe = hot == needs.matrices, origin.model.moe
        kept = "mapped" if is_whole else "loaded"
        follows.append((("memory", "weights"), kept, "mapped if all of the file fits"))
        if plan.quality == "fast" and not is_whole and moe and find_other_choice(moe) is None:
            why = 'quality = "fast"'
            follows.append((("experts", "prefer_cached"), FAST_PREFERENCE, why))
        own = {**needs.segments, "hot": hot, "cold": ring + slots}
        share = round(hot / needs.matrices, 4)
        return Fit(
            budget=budget,
            hot=share,
            sizes=dict.fromkeys(Segments.model_fields, 0) | own,
            follows=follows,
            facts=self._describe(needs, share, (hot, ring, slots), head),
        )

    def _describe(
        self, needs: FileNeeds, share: float, sizes: tuple[int, int, int], head: GgufWeights | None
    ) -> FileFacts:
        origin, plan, (hot, ring, slots) = self._origin, self._plan, sizes
        weights, model = origin.weights, origin.model
        active = 1.0 if model.moe is None else model.moe.active_experts / model.moe.experts
        least = {**needs.segments, "cold": min(ring, needs.least_ring) + min(slots, needs.slots)}
        if ring:
            least["hot"] = needs.shared
        texts = {
            **origin.reasons,
            "kv": f"{plan.kv.context} tokens",
            "workspace": f"{plan.prefill.chunk} tokens of a prompt, and logits",
            "hot": "matrices that are read more than once" if least.get("hot") else "nothing",
            "predictor": "nothing",
        }
        own = {name: Need(least.get(name, 0), texts[name]) for name in texts if name != "runtime"}
        token_bytes = needs.streamable + round(active * needs.experts)
        return FileFacts(
            path=origin.path,
            said={"model": model.id, "bundle.stride": origin.stride, "layers.hot": share},
            matrices=sum(1 for _ in weights.list_matrices()),
            matrix_bytes=needs.matrices,
            token_bytes=token_bytes + sum(find_shared(weights).values()),
            streamed_bytes=max(0, needs.streamable - hot),
            expert_bytes=0 if hot == needs.matrices else needs.experts,
            slot_bytes=slots,
            needs=Needs(**own),
            threads=self._threads,
            weights=weights,
            draft=None if head is None else self._derive_head(head, needs.draft),
            shared=weights.list_resident() | ({} if head is None else find_shared(head)),
        )

    def _derive_head(self, head: GgufWeights, size: int) -> Completion:
        """The plan by which an MTP head drafts within its part of the budget."""
        own = {"memory", "layers", "bundle"}
        values = self._plan.model_dump(mode="json", exclude_unset=True, exclude=own)
        values["decode"].pop("speculation", None)
        budget = f"{size + count_runtime(head)} B"
        values |= {"memory": {"budget": budget}, "model": head.model.id}
        return complete_plan(values, self._device, FileOrigin(head, cores=self._origin.cores))


def find_shared(head: GgufWeights) -> dict[str, int]:
    """Bytes of the matrices of its model that an MTP head reads whole, by name."""
    table = None if head.model.tied_head else head.find("embedding")
    return {key: own for key, own in head.shared.items() if table is None or key != table.name}


def count_runtime(weights: GgufWeights) -> int:
    has_table = weights.checkpoint.may_have_table
    return round_up(count_file_runtime(weights.model, has_table=has_table), MIB)


def count_needs(weights: GgufWeights, plan: Plan, threads: int) -> FileNeeds:
    """Count by building the file's program for a plan, which may come to draft."""
    from pi2.backends.blocks.operands import Extent

    model = weights.model
    # Routers choose early if experts are not all resident.
    extent = Extent.of_file(plan, threads, predicts=model.moe is not None)
    if plan.decode.speculation is None:
        drafted = 1 + max(DRAFT_TOKENS.values())
        extent = replace(extent, step_tokens=max(extent.step_tokens, drafted))
    arrays = weights.count_arrays(extent)
    slots, experts = 0, weights.list_experts()
    if model.moe is not None and experts:
        from pi2.memory.expert_slots import count_least_bytes

        layers = {layer: describe_experts(own) for layer, own in experts.items()}
        slots = count_least_bytes(layers, model.moe.active_experts)
    return FileNeeds(
        segments={"runtime": count_runtime(weights), **arrays},
        matrices=weights.count_bytes(),
        looked_up=sum(weights.list_looked_up().values()),
        experts=sum(tensor.size_bytes for own in experts.values() for tensor in own),
        slots=slots,
        shared=sum(weights.list_resident().values()),
        largest=max(own.size_bytes for _, _, own in weights.list_matrices()),
    )
