"""The wish that a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Segments
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.reading.references import DOCUMENTS, UnknownName, locate_document
from pi2.plan.reading.thresholds import Thresholds
from pi2.plan.weights.layout import BundleLayout
from pi2.sharing.resolver import LockedReferences

if TYPE_CHECKING:
    from pi2.fitting.check import Report
    from pi2.plan.toml.source import Kind


def read_document(reference: str, kind: Kind) -> Report:
    """A sound device or model by path, short name or locked reference; UserError P014, P015."""
    folder = Path()
    resolver = LockedReferences(folder)
    try:
        found = locate_document(reference, kind, folder, resolver=resolver)
    except UnknownName as error:
        raise UserError.of("P015", str(error), help=error.hint) from None
    report = check_file(found.path, name=found.name, resolver=resolver, reference=found.reference)
    if report.document is not None and not isinstance(report.document, DOCUMENTS[kind]):
        raise UserError.of("P014", f"`{reference}` is no {kind}", help=f"name a *.{kind}.toml")
    if not report.is_sound or report.document is None:
        raise report.make_error()
    return report


def make_plan_values(
    wish: Wish, *, predictor: str, kv: str, chunk: int, bundle: BundleLayout
) -> dict[str, Any]:
    """A plan without sizes; UserError P026 for a device without a CPU."""
    unit = next((name for name, item in wish.device.units.items() if item.kind == "cpu"), None)
    if unit is None:
        raise UserError.of(
            "P026",
            f"the device {wish.device.id} has no CPU",
            help="add a unit of the kind cpu to the device",
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "device": wish.device.id,
        "model": wish.model.id,
        "weights": f"stores/{wish.model.id}",
        "memory": {"budget": "1 B", "segments": dict.fromkeys(Segments.model_fields, "0 B")},
        "bundle": {"stride": format_bytes(bundle.stride)}
        | ({} if bundle.scales == "inline" else {"scales": bundle.scales}),
        "layers": {"split": {unit: 1.0}, "hot": 0.0},
        "prefill": {"chunk": chunk},
        "decode": {"predictor": predictor, "batch": wish.batch},
        "kv": {"type": kv, "context": wish.context},
    }


Objective = Literal["speed", "memory", "energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Limits, what to make the best of within them, and what the plan is for."""

    device: Device
    model: Model
    memory_bytes: int | None = None
    """Maximum resident set size of the process."""
    unit_memory: Mapping[str, int] = field(default_factory=dict)
    """Most bytes of units that have memory of their own, by name; else all that they have."""
    tokens_s: float | None = None
    """Lowest speed of generation, of all sequences together."""
    objective: Objective = "speed"
    context: int = 4096
    """Context length in tokens, prompt and answer together."""
    exact: bool = False
    """Only choices that keep results: all gates, fp16 KV cache, no look-ahead."""
    leave_out: float = 0.0
    """Share of the predictor's scores that a plan may leave out instead of reading neurons."""
    batch: int = 1
    """Sequences that generate at the same time."""
    store: Path | None = None
    """Neuron store whose activations count, if there is one."""
    thresholds: Thresholds | None = None
    """Thresholds for an MoE model's experts, which a plan may use where it is faster with them."""
    thresholds_file: str = ""
    """Their file, as the plan is to name it."""
