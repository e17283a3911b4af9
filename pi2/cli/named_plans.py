"""Plans by name: `pi2 run demo` means the pulled model or the shipped plan of that name, wherever
one is."""

from __future__ import annotations

import re
from pathlib import Path

from pi2.cli.checkpoint_models import convert_once, is_checkpoint
from pi2.pulled_models import PLAN, find_model

SHIPPED = Path(__file__).resolve().parents[1] / "plans"
MANIFEST = "manifest.json"
_NAME = re.compile(r"[\w.-]+")


def list_shipped_plans() -> dict[str, Path]:
    """Shipped plans whose neuron stores are shipped, too, by name."""
    found = {}
    for path in sorted(SHIPPED.glob("*.plan.toml")):
        found[path.name.removesuffix(".plan.toml")] = path
    return found


def find_plan_path(path: Path) -> Path:
    """The path itself, or the plan of the pulled model, or the shipped plan, that it names if there
    is no such file.

    A store stands for the plan in it.  A checkpoint is converted, once: `convert_once`.
    """
    name = str(path)
    if is_checkpoint(path):
        return convert_once(path)
    if (path / MANIFEST).is_file():
        return path / PLAN
    is_file = path.exists() and not path.is_dir()
    if is_file or not _NAME.fullmatch(name) or name.endswith(".toml"):
        return path
    model = find_model(name)
    return list_shipped_plans().get(name, path) if model is None else model.plan
