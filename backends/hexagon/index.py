"""The index of a library of graphs: a JSON document beside it."""

from __future__ import annotations

import dataclasses
import json

from pi2.backends.hexagon.operands import lay_out_scratch
from pi2.backends.hexagon.specification import HexagonSpec


def write_index(spec: HexagonSpec) -> str:
    """Return the document: every graph's number in messages, name, shape and scratch bytes."""
    graphs = [
        {
            "number": number,
            "name": graph.name,
            "scratch_bytes": lay_out_scratch(graph).bytes,
            **dataclasses.asdict(graph),
        }
        for number, graph in enumerate(spec.index)
    ]
    return json.dumps({"version": spec.version, "graphs": graphs}, indent=1)
