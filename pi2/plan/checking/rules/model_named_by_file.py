"""A model's id is its file's name.

Why: plans name shipped models by file name, stores remember them by id; the two must not differ.

Example: ``id = "bamboo"`` in ``bamboo-7b.model.toml``.

Fix: change the id, or rename the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P243"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the id with the file's name."""
    name = facts.files["model"].name.removesuffix(".model.toml")
    if facts.model.id != name:
        yield Finding(
            document="model",
            path=("id",),
            message=f"the id is `{facts.model.id}`, the file is called `{name}`",
            help=f'write id = "{name}", or rename the file to {facts.model.id}.model.toml',
        )
