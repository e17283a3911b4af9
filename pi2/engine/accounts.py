"""A run's account of its weights and of its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pi2.engine.statistics import Cause, RunStatistics, split_time
from pi2.model.tensor import EMBEDDING, HEAD, DenseTensor
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.sizes import find_read_rate
from pi2.plan.arithmetic.units import Verdict, count_kv_token_bytes
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pi2.memory.ring import Expected
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.arithmetic.sources import FileFacts
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import KvType


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Bytes that one token must read from memory, by purpose."""

    attention: float
    """Projections and norms of all layers, and a row of the embedding."""
    head: float = 0.0
    predictor: float = 0.0
    """Bytes of low-rank predictors, or of all gate rows."""
    neurons: float = 0.0
    """Bundles of the active neurons, padding left out."""
    kv: float
    """Bytes of the KV cache of the context."""

    @property
    def total(self) -> float:
        return self.attention + self.head + self.predictor + self.neurons + self.kv


def count_token_bytes(
    resolved: ResolvedPlan,
    *,
    active: float | None,
    position: float,
    shared: float = 1.0,
    sequences: int | None = None,
) -> TokenBytes | None:
    """Bytes per token at ``position``; None in sparse decoding without an ``active`` share.
    ``shared``: different neurons of a step over all that its tokens name; several ``sequences``
    share reads."""
    plan, model = resolved.plan, resolved.model
    dense = plan.decode.predictor in ("none", "router")
    if active is None and not dense:
        return None
    shape, bundle = model.shape, resolved.bundle
    ranks = None if model.predictor is None else [model.predictor.rank] * shape.layers
    sizes = {tensor.name: size_tensor(tensor) for tensor in list_tensors(model, ranks)}
    embedding = sizes.pop(EMBEDDING)
    row = embedding / shape.vocab
    head = embedding if model.tied_head else sizes.pop(HEAD)
    predictors = {name: sizes.pop(name) for name in list(sizes) if ".predictor_" in name}
    neurons = model.token_neurons
    match plan.decode.predictor:
        case "none" | "router":
            predictor, computed = 0.0, float(neurons * bundle.neuron_bytes)
        case "gate":
            assert active is not None
            # Of layers without a cutoff, beside some that have one, every neuron is computed.
            whole = sum(model.blocks[layer].ffn.neurons for layer in resolved.whole_layers)
            predictor = float((neurons - whole) * bundle.gate_bytes)
            part = bundle.gate_bytes + bundle.down_bytes
            computed = (neurons * active - whole) * part + whole * bundle.neuron_bytes
        case _:
            assert active is not None
            predictor, computed = (
                # Those of experts that rest are not asked.
                sum(predictors.values()) * neurons / (shape.layers * model.layer_neurons),
                (neurons * active * bundle.neuron_bytes),
            )
    batch = sequences or plan.decode.batch
    return TokenBytes(
        attention=sum(sizes.values()) / batch + row,
        head=head / batch,
        # Experts have predictors of their own, which are asked for one token after the other.
        predictor=predictor / (batch if model.moe is None else 1),
        neurons=computed * shared,
        kv=count_kv(model, position, plan.kv.type),
    )


def count_kv(model: Model, position: float, kind: KvType) -> float:
    """Bytes of the context that a token after ``position`` others reads."""
    shape, window = model.shape, model.attention.sliding_window
    seen = position if window is None else min(position, window)
    return shape.layers * seen * count_kv_token_bytes(model, kind)


def size_tensor(tensor: DenseTensor) -> int:
    return tensor.rows * (tensor.row_weight_bytes + tensor.row_scale_bytes)


class Account:
    """Of a neuron store that an executor computes layer by layer."""

    splits_time = True
    """Whether causes of times are known."""
    remark = "dry run: nothing was computed or read; the times are pi2's own overhead"
    """First line of reports of dry runs."""
    counted = "neurons"
    """Contents of the cache."""
    expected: Expected | None = None
    """Measured rates of weights that stream, and the speed to expect; None where none do."""

    def __init__(self, resolved: ResolvedPlan, verdict: Verdict) -> None:
        self._resolved, self._plan = resolved, resolved.plan
        self.is_timed = verdict == "runs"
        """Whether something is computed, and times mean something."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """First lines of reports."""
        return () if self.is_timed else (self.remark,)

    def split_time(
        self, statistics: RunStatistics, measure: Callable[[], float | None]
    ) -> dict[Cause, float]:
        """Shares of a run's time by cause, if they are known; ``measure`` gives the memory's
        rate."""
        if not (self.is_timed and self.splits_time):
            return {}
        disk_bytes_s = find_read_rate(self._resolved.device)
        if self.expected is not None:
            disk_bytes_s = self.expected.disk_bytes_s
        return split_time(statistics, measure(), disk_bytes_s)

    def name_bound(self, shares: Mapping[Cause, float]) -> str | None:
        return max(shares, key=lambda cause: shares[cause], default=None)

    def describe_bound(self, run: Mapping[str, Any]) -> str:
        shares = sorted(run["time_shares"].items(), key=lambda item: -item[1])
        parts = [f"{share:.0%} {cause}" for cause, share in shares if share >= 0.005]
        rate = run["memory_bytes_s"]
        measured = "" if rate is None else f"; memory gives {rate / 1e9:.1f} GB/s"
        return f"{run['bound_by']} ({', '.join(parts)} of the time{measured})"

    @cached_property
    def step_bytes(self) -> int | None:
        """Bytes of weights that every step reads, neurons excepted; None if another unit has the
        whole model."""
        token = self.count_token_bytes(0.0, 1, 0.0, 1.0)
        return 0 if token is None else int(token.attention + token.head + token.predictor)

    @cached_property
    def context_bytes(self) -> int:
        """Bytes of the KV cache that a token reads for each token that it attends to."""
        model = self._resolved.model
        return model.shape.layers * count_kv_token_bytes(model, self._plan.kv.type)

    def find_hit_rate(self, statistics: RunStatistics) -> float | None:
        # Where every neuron is computed, what is not hot streams by, and no cache is asked.
        return None if self._plan.decode.predictor == "none" else statistics.hit_rate

    def list_deviations(self) -> list[str]:
        """How numbers are rounded that the model's format does not round."""
        return []

    def list_notes(self) -> list[str]:
        if self.is_timed and self._plan.io.verify == "never":
            return ['note: the data read was not verified: the plan says io.verify = "never"']
        return []

    def list_reads(self, run: Mapping[str, Any]) -> list[str]:
        hits = run["cache_hit_rate"]
        return [
            f"reads: {approximate_bytes(run['flash_read_bytes'])} from flash since loading, "
            f"{approximate_bytes(run['read_bytes_per_token'])} a token"
            + (
                ""
                if hits is None
                else f" · cache hits {write_percent(hits)} of the {self.counted} needed"
            )
        ]

    def count_token_bytes(
        self, position: float, sequences: int, active: float | None, shared: float
    ) -> TokenBytes | None:
        """Bytes that a token touches, see `count_token_bytes`; None in a dry run."""
        if not self.is_timed:
            return None
        return count_token_bytes(
            self._resolved, active=active, position=position, shared=shared, sequences=sequences
        )

    def list_weights(self, run: Mapping[str, Any], *, whole: bool) -> list[str]:
        """A line about the weights, if the report is a ``whole`` one or has to have it."""
        return [f"neurons: {self._describe_neurons(run)}"] if whole else []

    def _describe_neurons(self, run: Mapping[str, Any]) -> str:
        computed = f"{write_percent(run['predicted_share'])} computed"
        if self._plan.decode.predictor != "none":
            return f"{computed}, {write_percent(run['active_share'])} active"
        layers = self._resolved.layers
        count = self._resolved.model.layer_neurons * len(layers)
        hot = sum(layer.hot_neurons for layer in layers) / count
        again = "" if hot >= 1 else "; the others are read again for each token"
        return f"{computed}, {hot:.0%} stay in memory{again}"


class FileAccount(Account):
    """Of a GGUF file."""

    counted = "experts"
    remark = "dry run: weights were read, and nothing was computed"

    def __init__(
        self, resolved: ResolvedPlan, verdict: Verdict, facts: FileFacts, expected: Expected | None
    ) -> None:
        super().__init__(resolved, verdict)
        self._facts, self.expected = facts, expected

    def find_hit_rate(self, statistics: RunStatistics) -> float | None:
        return statistics.hit_rate

    def list_deviations(self) -> list[str]:
        rounded = "int8" in (self._plan.prefill.activations, self._plan.decode.activations)
        return ["activations have 8 bits, as in llama.cpp"] if rounded else []

    def count_token_bytes(
        self, position: float, sequences: int, active: float | None, shared: float
    ) -> TokenBytes | None:
        if not self.is_timed:
            return None
        model = self._resolved.model
        return TokenBytes(
            attention=self._facts.token_bytes / sequences,
            kv=model.shape.layers * count_kv_token_bytes(model, "fp16") * position,
        )

    def list_weights(self, run: Mapping[str, Any], *, whole: bool) -> list[str]:
        missing, size = self._facts.missing_bytes, approximate_bytes(self._facts.matrix_bytes)
        if missing:
            share = 1 - missing / self._facts.matrix_bytes
            return [
                f"weights: {share:.0%} of {size} in memory, {self._facts.describe_missing()}; the "
                "text is the same as with all in memory"
            ]
        return [f"weights: {size}, all in memory ({self._plan.memory.weights})"] if whole else []


class WholeAccount(Account):
    """Of a unit that has the whole model."""

    splits_time = False

    @cached_property
    def step_bytes(self) -> int | None:
        return None if self.is_timed else 0

    def name_bound(self, shares: Mapping[Cause, float]) -> str | None:
        return self._resolved.sparse_unit if self.is_timed else None

    def describe_bound(self, run: Mapping[str, Any]) -> str:
        return f"{self._name_unit()} (it has all of the model)"

    def list_reads(self, run: Mapping[str, Any]) -> list[str]:
        return []

    def _describe_neurons(self, run: Mapping[str, Any]) -> str:
        computed = f"{write_percent(run['predicted_share'])} computed"
        return f"{computed}, all of the model on {self._name_unit()}"

    def _name_unit(self) -> str:
        unit = self._resolved.sparse_unit
        return name_unit(unit, emulated=bool(self._resolved.device.units[unit].emulated))


def name_unit(name: str, *, emulated: bool) -> str:
    return f"{name} (emulated)" if emulated else name


def write_percent(value: float | None) -> str:
    return "all" if value is None else f"{value:.1%}"
