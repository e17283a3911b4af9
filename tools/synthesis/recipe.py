"""What a synthetic model shall look like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pi2.diagnostics import Diagnostic, UserError
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import GROUP
from synthesis.routing import Routing

VERSION = 1
"""Raise it when the same recipe gives other bytes."""

SKEW_SHARE = 0.8
"""``skew`` is the share of neurons that makes this share of the activations."""


MOST_SKEW = 0.79
"""Largest skew: at 0.8 all neurons are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Statistics to aim at; shares are of a layer's neurons, in a mixture of one expert's."""

    active: float = 0.10
    """Mean share that a token activates."""
    skew: float = 0.26
    """Share of the neurons that makes 80 % of the activations (PowerInfer, SOSP '24: 0.26 in
    OPT-30B, 0.43 in LLaMA2-70B with ReGLU)."""
    variation: float = 0.15
    """Deviation of a token's share, relative to the mean.  A low rank has a floor of its own."""
    correlation: float = 0.0
    """Correlation of what tokens t and t + 1 of the vocabulary add to the residual stream."""
    recall: float = 0.98
    """Share of the active neurons that a predictor finds at threshold 0."""
    agreement: float = 0.8
    """dReLU: share of the neurons with a positive gate whose up is positive too (PowerInfer-2,
    arXiv 2406.06282v3, section 4.4: 80 %)."""
    seed: int = 0
    """Random seed."""
    routing: Routing | None = None
    """How the routers of a mixture choose; None: every expert as often as any other, whatever the
    token before has chosen."""

    def describe(self, model: Model) -> dict[str, object]:
        """Everything that decides the bytes of the store, but for the shape of ``model``."""
        values = asdict(self)
        if self.routing is None:
            del values["routing"]
        else:
            values["routing"]["popular"] = list(self.routing.popular)
        return {"synthesis": VERSION, "model": model.id, **values}

    def describe_job(self, model: Model, stride: int) -> str:
        """A key that equal work shares, for `pi2.store.writer.StoreWriter`."""
        shape = model.model_dump(mode="json")
        return json.dumps({**self.describe(model), "document": shape, "stride": stride})


def check_recipe(recipe: Recipe, model: Model) -> None:
    """`UserError` P550 with everything that cannot be had, P541 for a shape that cannot be
    stored."""
    findings = [
        Diagnostic(code="P550", message=message, help=advice)
        for message, advice in _find_contradictions(recipe)
    ]
    shape = model.shape
    sizes = {"shape.hidden": shape.hidden, "heads * head_dim": shape.heads * shape.head_dim}
    findings += [
        Diagnostic(code="P541", message=f"{key} is {size}: weights are packed in groups of {GROUP}")
        for key, size in sizes.items()
        if size % GROUP
    ]
    kind = model.quantization.ffn
    if kind in ("mxfp4", "ternary") and model.ffn.activation == "drelu":
        message = f"quantization.ffn is {kind}: its scales are too coarse for ups that follow gates"
        findings.append(Diagnostic(code="P541", message=message, help='write ffn = "int4"'))
    if findings:
        raise UserError(findings, exit_code=2)


def _find_contradictions(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    ranges = {
        "active": (recipe.active, 0.005, 0.9),
        "skew": (recipe.skew, 0.01, MOST_SKEW),
        "variation": (recipe.variation, 0.0, 1.0),
        "correlation": (recipe.correlation, 0.0, 0.99),
        "recall": (recipe.recall, 0.5, 0.9999),
        "agreement": (recipe.agreement, 0.5, 1.0),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            yield f"{name} is {value}, it must lie between {low} and {high}", None
    if recipe.seed < 0:
        yield f"the seed is {recipe.seed}, it may not be negative", None
    least = find_least_skew(recipe.active)
    if recipe.skew < least <= MOST_SKEW:
        yield (
            f"with {recipe.active:.0%} active, {recipe.skew:.0%} of the neurons cannot make "
            f"{SKEW_SHARE:.0%} of the activations",
            f"ask for a skew of {least + 0.005:.2f} or more",
        )


def find_least_skew(active: float) -> float:
    """Smallest skew at this mean share: no neuron fires more often than at every token."""
    return SKEW_SHARE * active * 1.02
