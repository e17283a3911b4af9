"""What `pi2.backends.protocol.Backend` asks of the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import OF_STORES

# It stands in for the cpu backend, to compare with: a plan has the same room for both.
from pi2.backends.cpu.arrays import count_segments as count_segments
from pi2.formats import find_packing
from pi2.model.options import find_unknown
from pi2.plan.arithmetic.units import Need, UnitFacts, Verdict, list_undivided, list_unknown_weights
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import ALIGNMENT, Precision, round_up, scale_bytes, weight_bytes

if TYPE_CHECKING:
    from pi2.backends.blocks.interpreter import Interpreter
    from pi2.backends.executor import Executor
    from pi2.backends.protocol import BuildRequest, ProgramRequest
    from pi2.backends.units import DenseUnit, UnitRequest
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import KvType


PAGE_BYTES = 4096


VERDICT: Verdict = "runs"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return nothing: numpy runs everywhere."""
    return []


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return nothing: it emulates every unit itself."""
    return []


def find_limits(facts: UnitFacts) -> list[str]:
    """Return the parts of a plan that it cannot compute."""
    model = facts.resolved.model
    limits, unknown = list_undivided(facts), find_unknown(model, OF_STORES)
    files_only = ("ffn.", "gated_streams", "ngrams")
    limits += [f"does not know {key}" for key in unknown if key.startswith(files_only)]
    if facts.share is not None:
        limits += list_unknown_weights(model)
    has_gates = facts.resolved.plan.decode.predictor == "gate"
    if has_gates and find_packing(model.quantization.ffn).shares_down_scales:
        limits.append(
            f"keeps no gates of {model.quantization.ffn}: no `gate` predictor, no [sparsity]"
        )
    return limits


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return the bytes of the neurons with their scales."""
    share = facts.share
    assert share is not None, facts.unit
    matrices, counts, stride = share.matrices, share.neurons, share.bundle.stride
    rows = sum(_count_matrix(*sizes) for sizes in matrices.values())
    besides = f", {len(matrices)} matrices of {approximate_bytes(rows)}" if rows else ""
    kept = sum(round_up(count * stride, PAGE_BYTES) for count in counts)
    return Need(
        kept + rows, f"{sum(counts)} neurons of {stride} bytes, by layers in whole pages{besides}"
    )


def _count_matrix(rows: int, length: int, precision: Precision) -> int:
    """Bytes of packed weights and of scales, each at a multiple of 64 bytes."""
    weights = round_up(rows * weight_bytes(length, precision), ALIGNMENT)
    return weights + round_up(rows * scale_bytes(length, precision), ALIGNMENT)


def build(request: BuildRequest) -> Executor:
    """Make the executor; nothing is compiled."""
    from pi2.backends.reference.executor import ReferenceExecutor

    return ReferenceExecutor(request)


def build_unit(request: UnitRequest) -> DenseUnit:
    """Make a unit that works in a thread."""
    from pi2.backends.reference.neurons import ThreadUnit

    return ThreadUnit(request)


def interpret(request: ProgramRequest, model: Model, formats: list[str], kv: KvType) -> Interpreter:
    """Make a program's interpreter; nothing is compiled."""
    from pi2.backends.reference.executor import NumpyInterpreter

    return NumpyInterpreter(model, formats, kv)
