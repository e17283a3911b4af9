"""Compiled kernels of a bundle, which were made and linked where it was built."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pi2.diagnostics import UserError
from pi2.progress import Progress

INDEX = "kernels/index.json"
_OF_THE_MACHINE = ("architecture", "system")
"""What a specification says of the machine that it is made on: how it calls itself may differ."""


class Spec(Protocol):
    """Everything but its sources that the code of a library depends on."""

    @property
    def program(self) -> str:
        """The module that makes the functions."""

    def to_json(self) -> str:
        """Return canonical JSON."""


def describe_spec(spec: Spec) -> dict[str, Any]:
    values = json.loads(spec.to_json())
    kept = {name: value for name, value in values.items() if name not in _OF_THE_MACHINE}
    return {"program": spec.program, **kept}


def load_or_compile(spec: Spec, progress: Progress, suffix: str = "") -> Path:
    """The library of ``spec``; UserError P674 if the bundle was built for another one."""
    del progress, suffix
    folder, wanted = Path(__file__).resolve().parents[5], describe_spec(spec)
    for entry in json.loads((folder / INDEX).read_text(encoding="utf-8")):
        if entry["spec"] == wanted:
            return folder / str(entry["file"])
    raise UserError.of(
        "P674",
        f"the bundle has no {spec.program.split('.')[2]} functions for this machine",
        help="build it again for the features that `python -m pi2_phone --machine` lists",
    )


def load_or_compile_several(
    specs: Sequence[Spec], progress: Progress, suffix: str = "", triple: str | None = None
) -> list[Path]:
    """The libraries of several specs; raises as `load_or_compile`."""
    del suffix, triple
    return [load_or_compile(spec, progress) for spec in specs]


def find_obstacles() -> list[str]:
    """Return nothing: a bundle needs no linker."""
    return []
