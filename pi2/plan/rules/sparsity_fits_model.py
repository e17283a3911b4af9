"""``[sparsity]`` is for activations that are zero nowhere, and its method for the model's neurons.

Why: neurons of the ReLU family rest by themselves, and ``predictor = "gate"`` leaves them out
without loss; thresholds would only add an error.  In a mixture, most experts rest anyway, and
nothing is calibrated for them.  ``cats-teal`` skips down behind a gate: neurons without gates have
nothing else to skip, and the kernel for biases reads a neuron as a whole.

Example: ``[sparsity]`` for a model with ``activation = "relu"``.

Fix: remove the table, or write ``method = "cats"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.findings import Facts, Finding, Origin

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
            message=f"neurons with {name} rest by themselves: thresholds would only add an error",
            help='remove [sparsity]: predictor = "gate" loses nothing',
            at="key",
            origins=(
                Origin(document="model", path=("ffn", "activation"), text=f'activation = "{name}"'),
            ),
        )
    elif model.moe is not None:
        yield Finding(
            path=("sparsity",),
            message=f"`{model.id}` is a mixture of experts, for which nothing is calibrated",
            help="remove [sparsity]",
            at="key",
        )
    elif sparsity.method == "cats-teal" and (not model.ffn.gated or model.ffn.bias):
        yield Finding(
            path=("sparsity", "method"),
            message=f"cats-teal needs gates without biases: not `{model.id}`",
            help='write method = "cats"',
        )
