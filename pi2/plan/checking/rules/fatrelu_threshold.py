"""FATReLU has a threshold above zero, other activations have none.

Why: FATReLU is zero at or below its threshold, which is a number of the checkpoint; with 0 it is
ReLU.  Other activations would ignore it.

Example: ``activation = "fatrelu"`` without ``threshold``.

Fix: write the checkpoint's threshold, or name the activation that it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P245"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare activation and threshold."""
    ffn = facts.model.ffn
    activation = Origin(
        document="model", path=("ffn", "activation"), text=f'activation = "{ffn.activation}"'
    )
    if ffn.activation == "fatrelu" and ffn.threshold <= 0:
        yield Finding(
            document="model",
            path=("ffn", "threshold"),
            message=f"fatrelu needs a threshold above 0, it is {ffn.threshold:g}",
            help='write the checkpoint\'s threshold, or activation = "relu"',
            origins=(activation,),
        )
    elif ffn.activation != "fatrelu" and ffn.threshold != 0:
        yield Finding(
            document="model",
            path=("ffn", "threshold"),
            message=f"{ffn.activation} has no threshold",
            help='remove it, or write activation = "fatrelu"',
            origins=(activation,),
        )
