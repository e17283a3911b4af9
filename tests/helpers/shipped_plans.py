"""Documents that come with pi2: plans as far as their weights are here, devices and models."""

import importlib.util
import re
from functools import cache
from pathlib import Path

from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.planning.wish import read_document

PLANS = Path(__file__).parents[2] / "plans"


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
