"""A device's id is its file's name.

Why: plans name shipped devices by file name, reports and benches by id; the two must not differ.

Example: ``id = "acme12"`` in ``acme-12.device.toml``.

Fix: change the id, or rename the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P244"
SEVERITY = "error"
NEEDS = ("device",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the id with the file's name."""
    name = facts.files["device"].name.removesuffix(".device.toml")
    if facts.device.id != name:
        yield Finding(
            document="device",
            path=("id",),
            message=f"the id is `{facts.device.id}`, the file is called `{name}`",
            help=f'write id = "{name}", or rename the file to {facts.device.id}.device.toml',
        )
