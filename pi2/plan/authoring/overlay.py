"""A plan that extends another one and states what it changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pi2.plan.toml.text import write_key, write_value


def write_overlay(
    base: str,
    changes: Mapping[str, object],
    remarks: Sequence[str] = (),
    key: Literal["extends", "weights"] = "extends",
) -> str:
    """Text of a plan that extends ``base``, or runs this file of weights; a value of None drops
    what is inherited."""
    lines = [f"# {remark}" for remark in remarks]
    value = base if key == "weights" else [base]
    lines += ["schema_version = 2", f"{key} = {write_value(value)}"]
    dropped = [key for key, value in changes.items() if value is None]
    if dropped:
        lines.append(f"remove = {write_value(dropped)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    return "\n".join([*lines, "", write_tables(stated)])


def write_tables(changes: Mapping[str, object]) -> str:
    """Values by dotted key as TOML tables."""
    plain: list[str] = []
    tables: dict[str, list[str]] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            rows = [f"{write_key(str(name))} = {write_value(item)}" for name, item in value.items()]
            tables.setdefault(key, []).extend(rows)
            continue
        table, _, name = key.rpartition(".")
        rows = tables.setdefault(table, []) if table else plain
        rows.append(f"{write_key(name)} = {write_value(value)}")
    parts = ["\n".join([*plain, ""])] if plain else []
    parts += ["\n".join([f"[{name}]", *rows, ""]) for name, rows in sorted(tables.items())]
    return "\n".join(parts)


def refer_from(file: Path, target: Path) -> str:
    """The file as an ``extends`` of the document ``target`` names it."""
    reference = os.path.relpath(file.resolve(), target.resolve().parent)
    return reference if reference.startswith(".") else f"./{reference}"
