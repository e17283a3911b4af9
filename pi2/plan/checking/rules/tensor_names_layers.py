"""Names of tensors contain ``{layer}``, and ``{expert}``, exactly where there are several.

Why: ``{layer}`` stands for the layer's number and ``{expert}`` for the expert's; without them,
all layers would get the same tensor, and all experts the same predictor.  A part of an FFN without
``{expert}`` is a tensor of all experts.  Names of tensors that belong to states may have
``{mixer}``, the number of the mixer in its layer, and must where a layer has two states; so does
that of the norms between mixers where there are several.

Example: ``gate = "model.layers.0.mlp.gate_proj.weight"``.

Fix: put ``{layer}`` where the number is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_tensors import TENSOR_OPTIONS
from pi2.plan.weights.states import describe_state, list_state_tensors

CODE = "P247"
SEVERITY = "error"
NEEDS = ("model",)

_ONCE = frozenset(
    {
        *("embedding", "positions", "final_norm", "final_norm_bias", "head", "head_bias"),
        *("layer_embedding", "layer_projection", "layer_projection_norm"),
        *("stream_in", "stream_out"),
    }
)
_BIASES = frozenset({"gate_bias", "up_bias", "down_bias"})
_PER_EXPERT = frozenset({"predictor_in", "predictor_out", "predictor_bias"})
_MAYBE_PER_EXPERT = _BIASES | {"gate", "up", "down", "fused_gate_up", "fused_gate_up_bias"}
"""Parts of an FFN, which a checkpoint may have for all experts in one tensor."""
_PLACEHOLDER = re.compile(r"\{[^{}]*\}|[{}]")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the placeholders of every name."""
    model = facts.model
    numbered = _list_numbered(model)
    for key, name in model.tensors:
        if key in TENSOR_OPTIONS or name is None or (key in _BIASES and not model.ffn.bias):
            continue
        if key in ("gate", "up") and model.tensors.fused_gate_up is not None:
            continue
        wanted = {"{layer}"} if key not in _ONCE else set()
        if key in ("stream_in", "stream_out"):
            wanted.add("{stream}")
        if model.moe is not None and key in _PER_EXPERT:
            wanted.add("{expert}")
        if key in numbered:
            wanted.add("{mixer}")
        if model.predictor is None and key.startswith("predictor"):
            continue
        found = set(_PLACEHOLDER.findall(name))
        if model.moe is not None and key in _MAYBE_PER_EXPERT:
            wanted |= found & {"{expert}"}
        if key.startswith("state_") or key == "inner_norm":
            wanted |= found & {"{mixer}"}
        for placeholder in sorted(found - wanted):
            yield Finding(
                document="model",
                path=("tensors", key),
                message=f"`{placeholder}` stands for nothing in the name of {key}",
                help=f"its placeholders: {', '.join(sorted(wanted)) or 'none'}",
            )
        for placeholder in sorted(wanted - found):
            subject = placeholder.strip("{}")
            yield Finding(
                document="model",
                path=("tensors", key),
                message=f"the name of {key} is the same for every {subject}",
                help=f"put {placeholder} where the {subject}'s number is",
            )


def _list_numbered(model: Model) -> frozenset[str]:
    """Keys of the names that mixers of a layer must not share: norms, and what belongs to the state
    that each of them has."""
    shape, found = describe_state(model), set[str]()
    if any(len(model.list_mixers(layer)) > 2 for layer in model.uneven_layers):
        found.add("inner_norm")
    if shape is not None and len(model.states) > len(model.state_layers):
        found |= {tensor.kind for tensor in list_state_tensors(model, shape)}
    return frozenset(found)
