"""The source of a plan's weights, which answers for everything that depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.toml.text import look_up

if TYPE_CHECKING:
    from pi2.diagnostics import UserError
    from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
    from pi2.plan.arithmetic.units import Needs
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import PredictorMode
    from pi2.plan.toml.text import KeyPath
    from pi2.progress import Progress


class Source:
    """Common answers; each kind of source replaces some."""

    whole_units: tuple[str, ...] = ()
    """Units with the whole model in their own memory."""
    gives_text = False
    """Whether a program computes that gives text, not logits."""
    said: Mapping[str, object] = MappingProxyType({})
    """Values of keys that the weights settle; a plan may state the same."""
    draft: Completion | None = None
    """The plan of the weights' own MTP head, if that drafts."""
    shared: Mapping[str, int] = MappingProxyType({})
    """Bytes of the matrices that an MTP head reads whole as well, by name."""
    counted = "neurons"
    """Parts that are in memory or missing, in words."""
    hot_part, own_part = "its hot neurons", "neurons"
    """Contents of a unit's memory, in words."""
    reads_experts_by: ClassVar[PredictorMode] = "router"
    """``decode.predictor`` of plans that read the chosen experts only."""
    kind = "a neuron store"
    may_have_head = False
    """Whether the weights of an MTP head may be among them."""

    def count_streamed(self, model: Model) -> int:
        """Bytes that pass by in a step as if they were neurons."""
        return 0

    def list_set(self, layers: Sequence[ResolvedLayer]) -> Sequence[ResolvedLayer]:
        """The layers whose settings choose resident weights."""
        return layers

    def see_experts(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """The plan as one of a store whose chosen experts are read, if it has experts."""
        return resolved

    def wants_file(self, resolved: ResolvedPlan) -> bool:
        """Whether the model only runs as a GGUF file: its router chooses whole experts."""
        return False

    def count_needs(self, resolved: ResolvedPlan) -> Needs:
        """Bytes that each segment needs."""
        raise NotImplementedError

    def count_memory(self, resolved: ResolvedPlan, tokens: int, lent: int) -> int:
        """Resident bytes after ``tokens`` of context, which lends ``lent``."""
        raise NotImplementedError

    def count_budget(self, resolved: ResolvedPlan) -> int:
        """Bytes that the machine has to have."""
        return resolved.plan.memory.budget

    def count_chunks(self, resolved: ResolvedPlan) -> int:
        """Chunks of a prompt that pass a layer together."""
        return 1

    def count_cut(self, resolved: ResolvedPlan) -> int:
        """Tokens of a prompt that have to stay together for the same numbers."""
        return resolved.plan.prefill.chunk

    def find_hot(self, resolved: ResolvedPlan, layer: ResolvedLayer, alone: bool) -> range:
        """Stored indices of the neurons in main memory; with ``alone``, for every unit that
        uses it."""
        if alone and layer.dense is not None and resolved.name_segment(layer.dense.unit) == "hot":
            return range(layer.hot_neurons)
        return layer.own_hot

    def count_wasted(self, resolved: ResolvedPlan) -> int:
        """Bytes of the segment ``cold`` that nothing is put into."""
        return 0

    def count_missing(self, resolved: ResolvedPlan) -> int:
        """Bytes of weights that memory has no room for."""
        raise NotImplementedError

    def describe_more(self, resolved: ResolvedPlan, more_bytes: int) -> str:
        """Weights that ``more_bytes`` of memory would keep, in words."""
        raise NotImplementedError

    def describe(self, resolved: ResolvedPlan) -> Iterator[str]:
        """Places of the weights, a line each."""
        raise NotImplementedError

    def describe_all(self, ffn_bytes: int) -> str:
        """The place of neurons that all stay in memory, in words."""
        return f"All neurons stay in memory: {approximate_bytes(ffn_bytes)}."

    def choose_judge(self, name: str) -> str:
        """The backend that knows the limits of backend ``name``."""
        return name

    def can_compute(self, resolved: ResolvedPlan, unit: str) -> bool:
        """Whether the unit's backend can compute the unit's part of the plan."""
        raise NotImplementedError

    def find_file(self, refusal: UserError) -> Path:
        """The GGUF file; raises ``refusal`` for other sources."""
        raise refusal

    def find_absent(self, resolved: ResolvedPlan) -> str | None:
        """Weights that this machine lacks, in words; None if it has all."""
        return None

    def list_stores(self, resolved: ResolvedPlan) -> tuple[Path, ...]:
        """Neuron stores that a run opens."""
        return ()

    def check_once(self, progress: Progress) -> None:
        """Raises `UserError` for weights that are no numbers."""


@dataclass(frozen=True, kw_only=True)
class FileFacts(Source):
    """A GGUF file: what its metadata and the list of its tensors say."""

    counted = "weights"
    reads_experts_by: ClassVar[PredictorMode] = "none"
    kind = "a GGUF file"
    may_have_head = True

    path: Path
    said: Mapping[str, object] = field()
    """Values of keys that the file settles; a plan may state the same."""
    matrices: int
    """Matrices; the experts of a layer count as one."""
    matrix_bytes: int
    token_bytes: int
    """Bytes that a token reads of them: the embedding is looked up where it is not the head, and of
    experts some are chosen."""
    streamed_bytes: int
    """Bytes of dense ones that are not resident: what each step reads."""
    expert_bytes: int = 0
    """Bytes of experts that come into slots when they are chosen; 0 where all are resident."""
    slot_bytes: int = 0
    """Bytes of these slots."""
    needs: Needs
    """Bytes that the segments need at least."""
    threads: int
    """Compute threads that the workspace has room for."""
    weights: Any = field(default=None, compare=False, repr=False)
    """The open file (`pi2.weights.file_tensor.TensorFiles`), for what runs the plan."""
    draft: Completion | None = field(default=None, compare=False, repr=False)
    """The plan of the file's MTP head, if that drafts."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the dense matrices that both read whole, by name."""

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that memory has no room for."""
        return self.streamed_bytes + max(0, self.expert_bytes - self.slot_bytes)

    def describe_missing(self) -> str:
        """The parts that come from disk, if any do."""
        parts = []
        if self.streamed_bytes:
            parts.append(f"{approximate_bytes(self.streamed_bytes)} are read for every step")
        if self.expert_bytes:
            experts, slots = map(approximate_bytes, (self.expert_bytes, self.slot_bytes))
            parts.append(f"{experts} are experts, of which memory has {slots} at a time")
        return ", ".join(parts)

    def count_streamed(self, model: Model) -> int:
        moe = model.moe
        if moe is None:
            return self.streamed_bytes
        # With the chosen experts of a token comes all of what streams.
        return self.expert_bytes + self.streamed_bytes * moe.experts // moe.active_experts

    def list_set(self, layers: Sequence[ResolvedLayer]) -> Sequence[ResolvedLayer]:
        return ()

    def see_experts(self, resolved: ResolvedPlan) -> ResolvedPlan:
        if resolved.model.moe is None:
            return resolved
        plan = resolved.plan
        layers = plan.layers.model_copy(update={"hot": 0.0 if self.expert_bytes else 1.0})
        decode = plan.decode.model_copy(update={"predictor": "router"})
        return replace(resolved, plan=plan.model_copy(update={"layers": layers, "decode": decode}))

    def count_needs(self, resolved: ResolvedPlan) -> Needs:
        return self.needs

    def count_memory(self, resolved: ResolvedPlan, tokens: int, lent: int) -> int:
        segments = resolved.plan.memory.segments
        share = min(1.0, tokens / resolved.plan.kv.context)
        used: int = sum(size for _, size in segments)
        return used - int(segments.kv * (1.0 - share))

    def count_missing(self, resolved: ResolvedPlan) -> int:
        return self.missing_bytes

    def describe_more(self, resolved: ResolvedPlan, more_bytes: int) -> str:
        return "more weights"

    def describe(self, resolved: ResolvedPlan) -> Iterator[str]:
        yield f"weights: {approximate_bytes(self.matrix_bytes)} in {self.matrices} matrices"
        if self.missing_bytes:
            yield f"{self.describe_missing()}: the disk's rate bounds the speed"
        else:
            yield "all of them are in memory"

    def count_cut(self, resolved: ResolvedPlan) -> int:
        return 1  # tokens are rounded otherwise where a prompt is cut, as in llama.cpp

    def choose_judge(self, name: str) -> str:
        return "blocks"

    def can_compute(self, resolved: ResolvedPlan, unit: str) -> bool:
        return True

    def find_file(self, refusal: UserError) -> Path:
        return self.path

    def check_once(self, progress: Progress) -> None:
        self.weights.check_once(progress)


@dataclass
class Completion:
    """The values of a plan, and the reasons for derived ones."""

    values: dict[str, Any]
    reasons: dict[KeyPath, str] = field(default_factory=dict)
    is_sound: bool = True
    """Whether the stated values have the right form; else nothing was derived."""
    model: Model | None = None
    facts: FileFacts | None = None
    """The facts of a GGUF file that is run as it is."""

    def read(self, *path: str) -> Any:
        """The value at ``path``; None if there is none."""
        return look_up(self.values, path)

    def derive(self, path: KeyPath, value: object, reason: str) -> None:
        if self.read(*map(str, path)) is not None:
            return
        table = self.values
        for part in path[:-1]:
            table = table.setdefault(str(part), {})
        table[str(path[-1])] = value
        self.reasons[path] = reason
