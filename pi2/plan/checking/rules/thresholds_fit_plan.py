"""The thresholds that ``[sparsity]`` names were calibrated for this model and this target.

Why: the magnitudes of activations differ from model to model and from layer to layer; thresholds
of another model leave out other neurons than they were measured with, and the perplexity that the
file states says nothing.

Example: ``thresholds = "llama.thresholds.toml"`` in a plan for Mistral; or ``target = 0.7`` with
thresholds that were made for 0.5.

Fix: calibrate again with `pi2 sparsity calibrate PLAN --text FILE`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P258"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the file with the plan and the model."""
    resolved = facts.resolved
    sparsity, found = resolved.plan.sparsity, resolved.thresholds
    if sparsity is None or found is None or not resolved.model.is_smooth:
        return
    again = "calibrate again: `pi2 sparsity calibrate PLAN --text FILE`"
    path = ("sparsity", "thresholds")
    if not found.fits(resolved.model):
        shape = f"{len(found.layers)} layers of {found.neurons} neurons, {found.activation}"
        message = f"these thresholds are of the model `{found.model}` ({shape})"
        yield Finding(path=path, message=message, help=again)
    elif found.method != sparsity.method:
        message = f"these thresholds were made for method = {found.method!r}"
        yield Finding(path=path, message=message, help=again)
    elif found.max_perplexity_increase != sparsity.max_perplexity_increase or (
        sparsity.target is not None and found.target != sparsity.target
    ):
        wish = f"target = {found.target:g}"
        if found.max_perplexity_increase is not None:
            wish = f"max_perplexity_increase = {found.max_perplexity_increase:g}"
        message = f"these thresholds were made for {wish}"
        yield Finding(path=path, message=message, help=again)
