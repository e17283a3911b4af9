"""Documents that come with pi2: plans as far as their weights are here, devices and models."""

import importlib.util
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pi2.fitting.completion import resolve_values
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.planning.wish import read_document

PLANS = Path(__file__).parents[2] / "plans"
SCHEMAS: Mapping[str, dict[str, Any]] = {
    path.name: json.loads(path.read_text("utf-8"))
    for path in sorted((PLANS.parent / "schemas").glob("*.json"))
}
"""JSON Schemas by the names of their files, in which a session sees what `pi2 schema` writes."""


def list_plans() -> list[Path]:
    """Files of the plans whose weights no package has that is not installed."""
    return [path for path in sorted(PLANS.rglob("*.plan.toml")) if has_package(path)]


def has_package(path: Path) -> bool:
    """Whether the package that the plan's weights are in, if any, is installed."""
    found = re.search(r'"package:(\w+)/', path.read_text("utf-8"))
    return found is None or importlib.util.find_spec(found[1]) is not None


@cache
def read_device(name: str) -> Device:
    document = read_document(name, "device").document
    assert isinstance(document, Device)
    return document


@cache
def read_model(name: str) -> Model:
    document = read_document(name, "model").document
    assert isinstance(document, Model)
    return document


ORIGIN = {"status": "estimated", "source": "a test"}
BOX: dict[str, Any] = {
    "schema_version": 3,
    "id": "box",
    "units": {
        "cpu": {
            "kind": "cpu",
            "clusters": [{"id": "cores", "cores": 4}],
            "read_bandwidth": {"value": "20 GB/s", **ORIGIN},
        }
    },
}


def make_box(changes: Mapping[str, Any]) -> Device:
    """A device of four cores with tables of its own."""
    return Device.model_validate_json(json.dumps({**BOX, **changes}))


@cache
def read_probed() -> dict[str, Any]:
    """What `pi2 probe` wrote of two cores of a Skylake server."""
    return tomllib.loads((Path(__file__).parents[1] / "unit/probed.device.toml").read_text())


def resolve_probed(
    device: Device, budget: str, sizes: Mapping[str, int], hot: float, **tables: Any
) -> ResolvedPlan:
    """A plan of Bamboo-7B for a probed device, with segments of ``sizes`` MiB."""
    usual = {"runtime": 160, "attention": 1000, "predictor": 420, "workspace": 64}
    values = {
        "schema_version": 3, "device": "probed", "model": "bamboo-7b", "weights": "stores/none",
        "memory": {
            "budget": budget,
            "segments": {key: f"{size} MiB" for key, size in (usual | dict(sizes)).items()},
        },
        "bundle": {"stride": "7168 B"}, "layers": {"split": {"cpu": 1.0}, "hot": hot},
        "kv": {"context": 1024}, **tables,
    }  # fmt: skip
    resolved = resolve_values(values, device, read_model("bamboo-7b"))
    return replace(resolved, path=Path("none/probed.plan.toml"))
