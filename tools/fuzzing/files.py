"""Plans of GGUF files, and weights with companions that nobody expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

import pi2
from fuzzing.documents import VALUES, run_command, write_document
from fuzzing.gguf import write_gguf
from fuzzing.mutations import NASTY
from fuzzing.seeds import read_gguf_seed
from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.text import KeyPath

ENDS = ("scale", "input_scale", "weight.scale", "bias", "zero_point", "lora_a", "scales", "min")
"""Ends of names of what belongs to a matrix, in some program's files."""


@cache
def list_keys() -> tuple[KeyPath, ...]:
    """Every key of the plan language."""
    return tuple(dict.fromkeys(_walk(Plan, ())))


def _walk(table: type[BaseModel], base: KeyPath) -> Iterator[KeyPath]:
    for name, own in table.model_fields.items():
        key = (*base, own.alias or name)
        yield key
        for inner in find_tables(own.annotation):
            yield from _walk(inner, key)


def find_tables(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from find_tables(inner)


def set_value(values: dict[str, Any], path: KeyPath, value: object) -> None:
    """Put a value at ``path``, with tables on the way."""
    *way, last = path
    table: Any = values
    for part in way:
        inner = table.get(part)
        table[part] = table = inner if isinstance(inner, dict) else {}
    table[last] = value


@dataclass
class FilePlanTarget:
    """A plan whose weights are a GGUF file: any value at any key."""

    folder: Path
    name: str = "file-plan"

    def make(self, random: Random) -> bytes:
        """One to three keys with values of any kind."""
        values: dict[str, Any] = {"schema_version": 3, "weights": "m.gguf"}
        for _ in range(random.randint(1, 3)):
            set_value(values, random.choice(list_keys()), random.choice((*NASTY, *VALUES)))
        return write_document(values).encode("utf-8", "replace")

    def run(self, case: bytes) -> str:
        """Give it to each command that reads plans."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "m.gguf").write_bytes(write_gguf(*read_gguf_seed()))
        path = self.folder / "x.plan.toml"
        path.write_bytes(case)
        plan = str(path)
        code = run_command("validate", plan)
        run_command("show", plan)
        run_command("explain", "memory.budget", plan)
        run_command("diff", plan, plan)
        run_command("simulate", plan, "--tokens", "2", "--prompt", "4")
        run_command("simulate", plan, "--memory", "120 MiB", "--tokens", "2", "--prompt", "4")
        return "sound" if code == 0 else "refused"


@dataclass
class CompanionTarget:
    """A GGUF file with tensors that belong to a matrix, or to none."""

    folder: Path
    name: str = "companions"

    def make(self, random: Random) -> bytes:
        """Names, shapes and a number of one to three tensors."""
        names = [name.removesuffix(".weight") for name in read_gguf_seed()[1]]
        found = {}
        for _ in range(random.randint(1, 3)):
            is_odd = not random.randrange(3)
            name = random.choice((*names, "blk.9.attn_q", "odd") if is_odd else names)
            name += f".{random.choice(ENDS if is_odd else ENDS[:2])}"
            shape = random.choice(([2], [32], [1, 1], [4, 8], [0])) if is_odd else [1]
            number = random.choice((1.0, 0.5, 0.0, -2.0, 1e30, 1e-40, float("nan"), float("inf")))
            found[name] = (shape, number)
        return json.dumps(found).encode()

    def run(self, case: bytes) -> str:
        """Read the file, and compute what it does not refuse."""
        metadata, tensors = read_gguf_seed()
        more: dict[str, F32] = {
            name: np.full(shape, number, np.float32)
            for name, (shape, number) in json.loads(case).items()
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "m.gguf"
        file.write_bytes(write_gguf(metadata, {**tensors, **more}))
        try:
            with pi2.load(file, set={"kv.context": 32, "threads.compute": 1}) as model:
                logits = np.array(model.logits([1, 5, 9]))
        except UserError:
            return "refused"
        assert np.isfinite(logits).all() or max(abs(n) for _, n in json.loads(case).values()) > 9
        return "computed"
