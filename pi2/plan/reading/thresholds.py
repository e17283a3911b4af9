"""Files of thresholds (``*.thresholds.toml``), from `pi2 sparsity`, named in ``[sparsity]``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pi2.diagnostics import Diagnostic, UserError
from pi2.plan.documents.common import Count, Document, Identifier, Share, Table
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Activation
from pi2.plan.documents.plan_units import SparsityMethod

Magnitude = Annotated[float, Field(ge=0.0)]


class LayerThresholds(Table):
    """A layer's thresholds, and their effect on the text that they were calibrated on."""

    gate: Magnitude
    """Neurons whose act(gate) is smaller count as zero."""
    experts: tuple[Magnitude, ...] = ()
    """In an MoE model, the thresholds of the gates of each expert's neurons, expert 0 first;
    ``gate`` is for all together then."""
    down: Magnitude = 0.0
    """Remaining neurons with a smaller act(gate) * up count as zero: their down is not read."""
    computed: Share
    """Share of neurons (in an MoE model, of a token's experts) whose up is read."""
    active: Share
    """Share of neurons (in an MoE model, of a token's experts) whose down is read."""


class Thresholds(Document):
    model: Identifier
    """The model's short name."""
    activation: Activation
    """The model's activation."""
    hidden: Count
    """Width of its residual stream."""
    neurons: Count
    """FFN neurons of a layer."""
    method: SparsityMethod
    """The value that is compared with a threshold."""
    target: Share
    """Share of up and down (in an MoE model, of a token's experts) that is not read."""
    max_perplexity_increase: float | None = Field(default=None, gt=0.0)
    """The increase of perplexity that the target was searched for, if it was."""
    tokens: Count
    """Tokens of text that the thresholds were made from."""
    text: str
    """SHA-256 of the text."""
    perplexity_before: float | None = None
    """Perplexity of the dense model, measured on text that the thresholds were not made from."""
    perplexity_after: float | None = None
    """Perplexity on the same text as tokens are generated with these thresholds."""
    layers: Annotated[tuple[LayerThresholds, ...], Field(min_length=1, max_length=1024)]

    def describe_use(self, file: str) -> dict[str, object]:
        """Values of a plan's table ``[sparsity]`` with these thresholds, which ``file`` has."""
        goal = {"target": self.target}
        if self.max_perplexity_increase is not None:
            goal = {"max_perplexity_increase": self.max_perplexity_increase}
        return {"method": self.method, **goal, "thresholds": file}

    """The first layer first."""

    @property
    def limits(self) -> tuple[tuple[float, float], ...]:
        """Per layer: threshold of gates, threshold of down's inputs."""
        return tuple((layer.gate, layer.down) for layer in self.layers)

    @property
    def expert_limits(self) -> tuple[tuple[float, ...], ...] | None:
        """Per layer, the threshold of gates of each expert; None without experts."""
        return tuple(layer.experts for layer in self.layers) if self.layers[0].experts else None

    @property
    def computed(self) -> float:
        """Mean share of neurons whose up is read."""
        return sum(layer.computed for layer in self.layers) / len(self.layers)

    def fits(self, model: Model) -> bool:
        """Whether they can belong to ``model``."""
        experts = 0 if model.moe is None else model.expert_count
        if any(len(layer.experts) != experts for layer in self.layers):
            return False
        return (self.model, self.activation, self.hidden, self.neurons, len(self.layers)) == (
            model.id,
            model.ffn.activation,
            model.shape.hidden,
            model.layer_neurons,
            model.shape.layers,
        )


GivenThresholds = Thresholds | Literal["none"] | None
"""What counts instead of a plan's thresholds; ``none``: there are none yet; None: the plan's do."""


def read_thresholds(path: Path, root: Path | None = None) -> Thresholds:
    """Read thresholds; UserError P028 if unreadable, P0xx and P1xx with places.

    ``root``: folder of the document that the user named."""
    # A bundle has thresholds without their text.
    from pi2.plan.reading.references import read_document
    from pi2.plan.reading.schema_check import check_schema
    from pi2.plan.toml.source import display_path

    name = display_path(path)
    source = read_document(path, name, ".thresholds.toml", root)
    if isinstance(source, list):
        raise UserError(tuple(_explain_unread(item, name) for item in source))
    found, findings = check_schema(source, Thresholds)
    if found is None or findings:
        raise UserError(tuple(findings), sources={name: source.text})
    return found


def _explain_unread(item: Diagnostic, name: str) -> Diagnostic:
    from pi2.plan.toml.source import CANNOT_READ

    if item.code not in CANNOT_READ:
        return item
    return replace(
        item,
        code="P028",
        message=f"no thresholds: {name}: {item.message}",
        help="make them with `pi2 sparsity calibrate PLAN --text FILE`",
    )
