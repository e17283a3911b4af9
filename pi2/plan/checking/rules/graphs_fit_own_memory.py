"""What a graph keeps while it runs fits into the NPU's own memory.

Why: an NPU reads its own memory (VTCM) many times as fast as main memory.  A graph keeps the values
of its neurons for all of its tokens; where they do not fit, main memory holds them, and every tile
of the second product waits for it.

Example: graphs of 128 tokens and all of 14,336 neurons, 8.8 MiB, where ``own_memory = "8 MiB"``.

Fix: name smaller ``shares`` or ``tokens``: a job that is larger runs several graphs.  Without
``shares``, sizes that fit are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.units import describe_unit
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.backends import find_graph_backend
from pi2.plan.documents.quantities import approximate_bytes

CODE = "P277"
SEVERITY = "warning"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the largest graph of every unit whose plan names graphs."""
    resolved = facts.resolved
    for name in resolved.dense_units:
        settings, hexagon = resolved.plan.units.get(name), resolved.device.units[name].hexagon
        own = None if hexagon is None else hexagon.own_memory
        backend = find_graph_backend(resolved.name_backend(name))
        if own is None or settings is None or settings.graphs is None:
            continue
        if backend is None:
            continue
        largest = max(
            backend.list_graphs(describe_unit(resolved, name)), key=lambda graph: graph.own_bytes
        )
        if largest.own_bytes > own:
            yield Finding(
                path=("units", name, "graphs"),
                at="key",
                message=f"a graph of {largest.tokens} tokens and {largest.neurons} neurons keeps "
                f"{approximate_bytes(largest.own_bytes)}, and `{name}` has "
                f"{approximate_bytes(own)} of its own",
                help="name smaller shares or fewer tokens: larger jobs run several graphs",
            )
