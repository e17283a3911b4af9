"""``[sparsity]`` is for activations that are zero nowhere, and its method for the model's neurons.

Why: inactive neurons of the ReLU family are exactly zero, and ``predictor = "gate"`` leaves them
out without loss; thresholds would only add an error. ``cats-teal`` skips down behind a gate:
neurons without gates have nothing else to skip, the kernel for biases reads a neuron as a
whole, and the neurons of a mixture are computed together, for which its experts' second
thresholds would differ.

Example: ``[sparsity]`` for a model with ``activation = "relu"``.

Fix: remove the table, or write ``method = "cats"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_sparsity import SparsityMethod

CODE = "P257"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the method with the model's FFN."""
    sparsity, model = facts.plan.sparsity, facts.model
    if sparsity is None:
        return
    name = model.ffn.activation
    if not model.is_smooth:
        yield Finding(
            path=("sparsity",),
            message=f"neurons with {name} are zero when inactive: thresholds only add an error",
            help='remove [sparsity]: predictor = "gate" loses nothing',
            at="key",
            origins=(
                Origin(document="model", path=("ffn", "activation"), text=f'activation = "{name}"'),
            ),
        )
    elif (problem := explain_method(sparsity.method, model)) is not None:
        yield Finding(path=("sparsity", "method"), message=problem, help='write method = "cats"')


def explain_method(method: SparsityMethod, model: Model) -> str | None:
    """Why neurons of ``model`` cannot be cut by ``method``; None if they can."""
    if method == "cats":
        return None
    if model.moe is not None:
        return f"{method} is not for mixtures of experts: not for `{model.id}`"
    if not model.ffn.gated or model.ffn.bias:
        return f"{method} needs gates without biases: not `{model.id}`"
    return None
