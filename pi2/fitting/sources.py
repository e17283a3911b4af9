"""Neuron stores as the backends of a plan take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import TYPE_CHECKING

from pi2.fitting import (
    find_backend,
    find_executor_backend,
    find_text_backend,
    find_unit_backend,
    find_whole_backend,
)
from pi2.fitting.budget import count_libraries
from pi2.fitting.sizes import compute_needs, count_store_chunks, need_beside_whole
from pi2.plan.arithmetic.sizes import (
    LOGIT_ROWS,
    STAGING_BUFFERS,
    count_chunk_tokens,
    count_ffn_bytes,
    count_staged_neurons,
)
from pi2.plan.arithmetic.sources import Source
from pi2.plan.arithmetic.units import Verdict
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
    from pi2.plan.arithmetic.units import Needs


def find_source(resolved: ResolvedPlan) -> Source:
    """The plan's store, computed layer by layer, or whole by a GPU or an NPU; dry where the backend
    computes nothing."""
    unit = resolved.sparse_unit
    if not resolved.has_backend(unit):
        return StoreSource()
    name = resolved.name_backend(unit)
    in_layers, whole = _SOURCES[find_backend(name).VERDICT]
    if resolved.device.units[unit].kind != "cpu":
        if find_whole_backend(name) is not None:
            return whole(unit)
        if find_text_backend(name) is not None:
            return TextSource(unit)
    return in_layers()


class StoreSource(Source):
    """A store whose layers an executor computes."""

    def wants_file(self, resolved: ResolvedPlan) -> bool:
        return resolved.plan.decode.predictor == "router"

    def count_needs(self, resolved: ResolvedPlan) -> Needs:
        return compute_needs(resolved)

    def count_chunks(self, resolved: ResolvedPlan) -> int:
        return count_store_chunks(resolved)

    def count_memory(self, resolved: ResolvedPlan, tokens: int, lent: int) -> int:
        segments = resolved.plan.memory.segments
        needs = dict(resolved.needs.items())
        names = ("attention", "kv", "state", "predictor", "hot", "workspace")
        fixed = sum(needs[name].bytes for name in names) - self._count_untouched(resolved)
        absent = sum(
            resolved.model.layer_neurons - resolved.layers[number].hot_neurons
            for number in resolved.named_layers
        )
        # Nothing is put there of layers that stream by.
        cold = min(segments.cold + lent, absent * resolved.bundle.stride)
        untouched = needs["kv"].bytes * (1.0 - min(1.0, tokens / resolved.plan.kv.context))
        return ceil(self._count_libraries(resolved) + fixed + cold - untouched)

    def _count_libraries(self, resolved: ResolvedPlan) -> int:
        try:
            size = (resolved.store_path / resolved.model.tokenizer.file).stat().st_size
        except OSError:  # the store is not here
            return count_libraries(resolved.model)
        return count_libraries(resolved.model, size)

    def _count_untouched(self, resolved: ResolvedPlan) -> int:
        """Bytes of the workspace that generating does not touch."""
        plan, model = resolved.plan, resolved.model
        rows = min(count_chunk_tokens(plan), LOGIT_ROWS) - min(plan.decode.batch, LOGIT_ROWS)
        untouched = 4 * rows * model.shape.vocab
        if all(layer.hot_neurons == model.layer_neurons for layer in resolved.layers):
            untouched += STAGING_BUFFERS * count_staged_neurons(resolved) * resolved.bundle.stride
        return untouched

    def count_wasted(self, resolved: ResolvedPlan) -> int:
        if resolved.plan.decode.predictor != "none":
            return 0
        return resolved.plan.memory.segments.cold - resolved.needs.cold.bytes

    def count_missing(self, resolved: ResolvedPlan) -> int:
        return max(0, count_ffn_bytes(resolved) - _count_kept(resolved))

    def describe_more(self, resolved: ResolvedPlan, more_bytes: int) -> str:
        share = min(1.0, (_count_kept(resolved) + more_bytes) / count_ffn_bytes(resolved))
        return f"{share:.0%} of the neurons"

    def describe(self, resolved: ResolvedPlan) -> Iterator[str]:
        ffn_bytes = count_ffn_bytes(resolved)
        hot_bytes = resolved.needs.hot.bytes
        cold_bytes = min(resolved.plan.memory.segments.cold, ffn_bytes - hot_bytes)
        yield (
            f"neurons: {approximate_bytes(ffn_bytes)} in the store, "
            f"{approximate_bytes(hot_bytes)} hot, {approximate_bytes(cold_bytes)} of cold cache"
        )

    def can_compute(self, resolved: ResolvedPlan, unit: str) -> bool:
        find = find_executor_backend if unit == resolved.sparse_unit else find_unit_backend
        return find(resolved.name_backend(unit)) is not None

    def find_absent(self, resolved: ResolvedPlan) -> str | None:
        has_store = (resolved.store_path / "manifest.json").is_file()
        return None if has_store else "its neuron store is"

    def list_stores(self, resolved: ResolvedPlan) -> tuple[Path, ...]:
        return (resolved.store_path,)


def _count_kept(resolved: ResolvedPlan) -> int:
    return resolved.needs.hot.bytes + resolved.plan.memory.segments.cold


class WholeSource(StoreSource):
    """A store whose model a unit has as a whole, in its own memory."""

    hot_part, own_part = "the whole model", "the whole model and the KV cache"

    def __init__(self, unit: str) -> None:
        self.whole_units = (unit,)

    def wants_file(self, resolved: ResolvedPlan) -> bool:
        return False

    def count_needs(self, resolved: ResolvedPlan) -> Needs:
        return need_beside_whole(resolved)

    def count_chunks(self, resolved: ResolvedPlan) -> int:
        return 1

    def find_hot(self, resolved: ResolvedPlan, layer: ResolvedLayer, alone: bool) -> range:
        return range(layer.hot_neurons, layer.hot_neurons)

    def _count_libraries(self, resolved: ResolvedPlan) -> int:
        return resolved.plan.memory.segments.runtime  # the driver's part is as the plan states it

    def _count_untouched(self, resolved: ResolvedPlan) -> int:
        return 0

    def describe_all(self, ffn_bytes: int) -> str:
        return "The CPU chooses tokens, and computes nothing of the model."

    def can_compute(self, resolved: ResolvedPlan, unit: str) -> bool:
        return unit in self.whole_units or super().can_compute(resolved, unit)


class TextSource(WholeSource):
    """Weights in the layout of a program that writes text."""

    gives_text = True

    def find_absent(self, resolved: ResolvedPlan) -> str | None:
        backend = find_text_backend(resolved.name_backend(resolved.sparse_unit))
        assert backend is not None, self.whole_units
        has_weights = (resolved.store_path / backend.WEIGHTS).is_file()
        return None if has_weights else "its weights are"


class _Dry(Source):
    """A source that stays closed."""

    def count_budget(self, resolved: ResolvedPlan) -> int:
        return 0

    def find_absent(self, resolved: ResolvedPlan) -> str | None:
        return None

    def list_stores(self, resolved: ResolvedPlan) -> tuple[Path, ...]:
        return ()


class DryStore(_Dry, StoreSource):
    """A store whose layers nothing computes."""


class DryWhole(_Dry, WholeSource):
    """A store of which a unit would have all."""


_SOURCES: Mapping[Verdict, tuple[type[StoreSource], type[WholeSource]]] = {
    "runs": (StoreSource, WholeSource),
    "dry run": (DryStore, DryWhole),
}
