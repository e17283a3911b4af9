"""Options of a model's operators agree with each other.

Why: dReLU is an activation of gate and up, so that neurons need a gate; layers with a sliding
window need its width; layers that are named must exist; experts with biases cannot be stored, and
norms of outputs have none; what weights shared experts needs some.

Example: ``activation = "drelu"`` with ``gated = false``.

Fix: take the options from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.model import Model

CODE = "P253"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare FFN, norms, attention and mixture."""
    model = facts.model
    if not model.ffn.gated and model.ffn.activation == "drelu":
        yield Finding(
            document="model",
            path=("ffn", "gated"),
            message="drelu is an activation of gate and up, but neurons have no gate",
            help='write activation = "relu", or remove gated = false',
            origins=(
                Origin(document="model", path=("ffn", "activation"), text='activation = "drelu"'),
            ),
        )
    if model.ffn.bias and model.moe is not None:
        yield Finding(
            document="model",
            path=("ffn", "bias"),
            message="experts have no biases",
            help="remove bias = true",
        )
    if model.moe is not None and model.moe.shared_gate and not model.moe.shared_experts:
        yield Finding(
            document="model",
            path=("moe", "shared_gate"),
            message="there are no shared experts to weight",
            help="write shared_experts = N, or remove shared_gate = true",
        )
    if model.norm.outputs and model.norm.bias:
        yield Finding(
            document="model",
            path=("norm", "outputs"),
            message="norms of outputs have no biases",
            help="remove bias = true, or outputs = true",
        )
    if model.other_rope is not None:
        yield from _find_missing(model, ("other_rope", "layers"), model.other_rope.layers)
    layers = model.attention.window_layers
    if layers is None:
        return
    if model.attention.sliding_window is None:
        yield Finding(
            document="model",
            path=("attention", "window_layers"),
            message="layers have a sliding window, but its width is not stated",
            help="write sliding_window = N, in tokens",
        )
    yield from _find_missing(model, ("attention", "window_layers"), layers)


def _find_missing(
    model: Model, path: tuple[str, ...], layers: tuple[int, ...]
) -> Iterator[Finding]:
    beyond = [layer for layer in layers if layer >= model.shape.layers]
    if beyond:
        yield Finding(
            document="model",
            path=path,
            message=f"there is no layer {beyond[0]}: the model has {model.shape.layers}, from 0 on",
        )
