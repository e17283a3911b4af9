"""Plans by name: `pi2 run demo` means the pulled model or the shipped plan of that name, wherever
one is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pi2.cli.checkpoint_models import convert_once, is_checkpoint
from pi2.diagnostics import UserError
from pi2.pulled_models import PLAN, find_model, list_models

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
    """What `find_named_plan` finds; a checkpoint is converted, once: `convert_once`."""
    return convert_once(path) if is_checkpoint(path) else find_named_plan(path)


def find_named_plan(path: Path) -> Path:
    """The path itself, or the plan of the pulled model, or the shipped plan, that it names if there
    is no such file.

    A store stands for the plan in it.  UserError P001 for a name that nothing has.
    """
    name = str(path)
    if (path / MANIFEST).is_file():
        return path / PLAN
    is_file = path.exists() and not path.is_dir()
    if is_file or not _NAME.fullmatch(name) or name.endswith((".toml", ".gguf")):
        return path
    model = find_model(name)
    if model is not None:
        return model.plan
    shipped = list_shipped_plans()
    if name in shipped or path.is_dir():
        return shipped.get(name, path)
    raise UserError.of(
        "P001",
        "no file, plan or model has this name",
        file=name,
        help=suggest_names(name, [*(found.name for found in list_models()), *shipped]),
    )


def suggest_names(name: str, known: Sequence[str]) -> str:
    """What to give instead of ``name``: names that are near, or else those of shipped plans."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=3, cutoff=0.5)
    first = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)};"
    return f"{first} `pi2 list` shows the models that were pulled or converted"
