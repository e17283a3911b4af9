"""Neuron stores as the backends of a plan take them."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from pi2.fitting import (
    count_arrays,
    count_staging,
    count_unit_needs,
    find_backend,
    find_executor_backend,
    find_text_backend,
    find_unit_backend,
    find_whole_backend,
)
from pi2.fitting.budget import count_libraries
from pi2.plan.arithmetic.sizes import (
    LOGIT_ROWS,
    STAGING_BUFFERS,
    TOKENS_TOGETHER,
    count_chunk_tokens,
    count_ffn_bytes,
    count_piece_bytes,
    count_staged_neurons,
    need_attention,
    need_cold,
    need_predictor,
)
from pi2.plan.arithmetic.sources import Source
from pi2.plan.arithmetic.units import Need, Needs
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import align_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan


def find_source(resolved: ResolvedPlan) -> Source:
    """The plan's store, computed layer by layer, or whole by a GPU or an NPU; dry where the backend
    computes nothing."""
    unit = resolved.sparse_unit
    if resolved.find_backend(unit) is None:
        return StoreSource()
    name = resolved.name_backend(unit)
    stays_closed = find_backend(name).VERDICT == "dry run"
    if resolved.device.units[unit].kind != "cpu":
        if find_whole_backend(name) is not None:
            return WholeSource(unit, stays_closed=stays_closed)
        if find_text_backend(name) is not None:
            return TextSource(unit)
    return StoreSource(stays_closed=stays_closed)


class StoreSource(Source):
    """A store whose layers an executor computes."""

    def __init__(self, *, stays_closed: bool = False) -> None:
        """``stays_closed``: whether nothing is computed, and nothing of the store is needed."""
        self._stays_closed = stays_closed

    def wants_file(self, resolved: ResolvedPlan) -> bool:
        return resolved.plan.decode.predictor == "router"

    def count_needs(self, resolved: ResolvedPlan) -> Needs:
        """Bytes needed by every segment of a plan whose model has a packable shape."""
        plan, model, arrays = resolved.plan, resolved.model, count_arrays(resolved)
        copies = 1 if plan.decode.speculation is None else 2  # drafts may have to be taken back
        several = "" if plan.decode.batch == 1 else f"{plan.decode.batch} sequences x "
        states = "nothing, every layer has a KV cache"
        if model.states:
            states = f"{several}{len(model.states)} states" + ", with a copy" * (copies - 1)
        kept = [own for block in model.blocks if (own := block.attention) and own.key_layer is None]
        tokens = f"{several}{plan.kv.context} tokens in {len(kept)} layers"
        staging = count_staging(resolved)
        return Needs(
            attention=need_attention(resolved),
            kv=Need(arrays.get("kv", 0), tokens),
            state=Need(copies * arrays.get("state", 0), states),
            predictor=need_predictor(resolved),
            hot=_need_hot(resolved),
            cold=need_cold(resolved),
            workspace=Need(
                arrays["workspace"] + staging,
                f"arrays of {count_chunk_tokens(plan)} tokens "
                f"{approximate_bytes(arrays['workspace'])}, staging of {STAGING_BUFFERS} x "
                f"{count_staged_neurons(resolved)} neurons {approximate_bytes(staging)}",
            ),
        )

    def count_chunks(self, resolved: ResolvedPlan) -> int:
        """Up to 512 tokens with ``layers-first``, as far as the workspace has room."""
        plan = resolved.plan
        if plan.pipeline.prefill == "chunks-first":
            return 1
        room = plan.memory.segments.workspace - count_staging(resolved)
        most = ceil(TOKENS_TOGETHER / count_chunk_tokens(plan))

        def fits(count: int) -> bool:
            return count_arrays(resolved, chunks=count)["workspace"] <= room

        return next(filter(fits, range(most, 1, -1)), 1)

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
            untouched += count_staging(resolved)
        return untouched

    def count_budget(self, resolved: ResolvedPlan) -> int:
        return 0 if self._stays_closed else super().count_budget(resolved)

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
        return None if has_store or self._stays_closed else "its neuron store is"

    def list_stores(self, resolved: ResolvedPlan) -> tuple[Path, ...]:
        return () if self._stays_closed else (resolved.store_path,)


def _need_hot(resolved: ResolvedPlan) -> Need:
    """Resident neurons that no dense unit owns, their number times the stride S, and what dense
    units need that have no memory of their own."""
    stride, units = resolved.bundle.stride, count_unit_needs(resolved)
    neurons = 0
    for layer in resolved.layers:
        # A unit whose backend is not known yet is taken to need what the store has.
        is_known = layer.dense is not None and layer.dense.unit in units
        neurons += len(layer.own_hot) if is_known else layer.hot_neurons
    total, parts = neurons * stride, [f"{neurons} hot neurons of {stride} bytes"]
    for name, need in units.items():
        if resolved.name_segment(name) == "hot":
            total += need.bytes
            parts.append(f"{name}: {need.explanation}")
    return Need(total, "; ".join(parts))


def _count_kept(resolved: ResolvedPlan) -> int:
    return resolved.needs.hot.bytes + resolved.plan.memory.segments.cold


class WholeSource(StoreSource):
    """A store whose model a unit has as a whole, in its own memory."""

    hot_part, own_part = "the whole model", "the whole model and the KV cache"

    def __init__(self, unit: str, *, stays_closed: bool = False) -> None:
        super().__init__(stays_closed=stays_closed)
        self.whole_units = (unit,)

    def wants_file(self, resolved: ResolvedPlan) -> bool:
        return False

    def count_needs(self, resolved: ResolvedPlan) -> Needs:
        """Staging buffers of min(f, 512) neurons and a piece of a dense tensor, and segments that
        use main memory."""
        name = resolved.sparse_unit
        nothing = hot = grouped = Need(0, f"nothing, `{name}` has it in its memory")
        staging, piece = count_staging(resolved), count_piece_bytes(resolved)
        if resolved.name_segment(name) == "hot":
            hot = count_unit_needs(resolved)[name]
        if resolved.model.moe is not None and resolved.plan.decode.predictor != "none":
            size = resolved.model.shape.layers * align_bytes(4 * resolved.model.layer_neurons)
            grouped = Need(size, "whose neurons are whose")
        return Needs(
            attention=nothing,
            kv=nothing,
            state=nothing,
            predictor=grouped,
            hot=hot,
            cold=nothing,
            workspace=Need(
                staging + piece,
                f"staging of neurons {approximate_bytes(staging)}, "
                f"pieces of dense tensors {approximate_bytes(piece)}",
            ),
        )

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
