"""A device document of what was measured on another machine through RPC."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, get_args

from pi2.plan.documents.device import Device, IsaFeature
from pi2.plan.documents.quantities import format_quantity
from pi2.probing.remote import RemoteMachine
from pi2.probing.series import Key, round_digits, summarise
from pi2.probing.timing import StepFacts, choose_times


def make_remote_device(
    name: str,
    machine: RemoteMachine,
    steps: Sequence[StepFacts],
    step_s: Mapping[Key, Sequence[float]],
) -> Device:
    """The device ``name``: its processor and kernels; flash, memory and noise are unknown."""
    times = choose_times(steps, step_s, inf)
    kernels = [
        _describe_step(step, times[step.key], machine) for step in steps if step.key in times
    ]
    cpu: dict[str, Any] = {
        "kind": "cpu",
        "architecture": machine.architecture,
        "features": [item for item in get_args(IsaFeature) if item in machine.features],
        "clusters": [{"id": "cores", "cores": machine.threads}],
        "kernels": kernels,
    }
    best = max((item for item in kernels if item["kernel"] == "dense"), key=lambda i: i["size"])
    keys = ("giga_ops", "status", "source", "samples", "spread")
    cpu["compute"] = [{"precision": "int8", **{key: best[key] for key in keys}}]
    text = f"Kernels measured through RPC with {machine.threads} threads; flash was not measured."
    values = {
        "schema_version": 2,
        "id": name,
        "name": name,
        "description": text,
        "units": {"cpu": cpu},
    }
    return Device.model_validate_json(json.dumps(values))


def _describe_step(
    step: StepFacts, seconds: Sequence[float], machine: RemoteMachine
) -> dict[str, Any]:
    found = summarise(seconds, "less")
    version = importlib.metadata.version("pi2")
    threads = f"{machine.threads} thread" + ("s" if machine.threads > 1 else "")
    values: dict[str, Any] = {
        "kernel": step.kernel,
        "size": step.size,
        "time": format_quantity(round(found.value * 1e9), {"ns": 1, "us": 1000, "ms": 10**6}),
        "width": step.width,
        "status": "measured",
        "source": f"pi2 probe {version} through RPC: cpu backend, {threads}, int4 weights",
        "samples": found.samples,
        "spread": found.spread,
    }
    if step.read_bytes is not None:
        values["bytes"] = f"{step.read_bytes} B"
    if step.operations is not None:
        values["giga_ops"] = round_digits(step.operations / found.value / 1e9)
    return values
