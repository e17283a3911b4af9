"""Spoilt plans, devices and models, given to the commands that read them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import tomli

from fuzzing.mutations import spoil_bytes, spoil_document, spoil_text
from fuzzing.seeds import ROOT
from pi2.cli.main import BUG, run
from pi2.plan.toml.text import write_key, write_value

PLANS = (
    "demo",
    "oneplus-12/turbosparse-mixtral-47b",
    "pc-rtx-4090/bamboo-7b",
    "cloud-vm-zen5/mistral-7b",
)
PIECES = (
    "[",
    "]",
    "{",
    "}",
    '"',
    "=",
    "\n",
    "#",
    '"""',
    "[[layers.overrides]]\n",
    'extends = ["demo"]\n',
    "0x",
    "1e999",
    "-",
    "nan",
    "'4 MiB'",
    "_",
    "\\u0000",
    "\ufeff",
)
"""Text that means something in TOML."""
VALUES = (
    "4 MiB",
    "0 B",
    "1e30 GiB",
    "-1 MB/s",
    "0-3,2-9",
    "0-99999999999",
    "cpu",
    "npu",
    "none",
    "low-rank",
    {"cpu": 1.0},
    {"npu": 0.5, "cpu": 0.5},
    1e-300,
    1e18,
    10**18,
)
"""Values of the kinds that documents have."""

_NUMBER = re.compile(r"(?<![\w.-])[0-9]+(\.[0-9]+)?(?![\w.-])")
_FACTORS = (0, 1e-6, 0.1, 0.5, 0.9, 1.1, 2, 3, 10, 1e3, 1e9)


@dataclass
class DocumentTarget:
    """A plan, its device or its model."""

    folder: Path
    name: str = "document"

    def make(self, random: Random) -> bytes:
        """The name of a shipped plan, the kind of document that is spoilt, and what stands in
        it."""
        name = random.choice(PLANS)
        kind = random.choice(("plan", "device", "model"))
        _, text = read_documents(name)[kind]
        way = random.randrange(8)
        if way < 4:
            data = change_numbers(random, text).encode()
        elif way == 4:
            data = spoil_bytes(random, text.encode())
        elif way == 5:
            data = spoil_text(random, text, PIECES).encode("utf-8", "replace")
        else:
            values = spoil_document(random, tomli.loads(text), VALUES)
            data = write_document(values).encode("utf-8", "replace")
        return json.dumps([name, kind]).encode() + b"\n" + data

    def run(self, case: bytes) -> str:
        """Give it to each command that reads such documents."""
        head, _, data = case.partition(b"\n")
        name, kind = json.loads(head)
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for each, (file, text) in read_documents(name).items():
            files[each] = str(self.folder / file)
            (self.folder / file).write_bytes(data if each == kind else text.encode())
        plan, spoilt = files["plan"], files[kind]
        code = run_command("validate", plan)
        run_command("validate", "--output-format", "sarif", spoilt)
        run_command("show", spoilt)
        run_command("explain", "layers.0.hot", plan)
        run_command("explain", "--cost", plan)
        run_command("diff", plan, str(ROOT / "plans/demo.plan.toml"))
        run_command("simulate", plan, "--tokens", "4", "--prompt", "8")
        run_command("migrate", spoilt)
        return "sound" if code == 0 else "refused"


def change_numbers(random: Random, text: str) -> str:
    """``text`` in which one to three numbers are others, their units as they were."""
    for _ in range(random.randint(1, 3)):
        match = random.choice(list(_NUMBER.finditer(text)))
        number = float(match[0]) * random.choice(_FACTORS)
        written = str(int(number)) if match[0].isdigit() else format(number, ".6f")
        text = text[: match.start()] + written + text[match.end() :]
    return text


@cache
def read_documents(name: str) -> Mapping[str, tuple[str, str]]:
    """A shipped plan, its device and its model: name and text of a file, by kind.  The three lie
    in one folder."""
    plan = tomli.loads((ROOT / f"plans/{name}.plan.toml").read_text())
    plan["weights"] = "store"
    documents = {}
    for kind in ("device", "model"):
        file = f"{plan[kind]}.{kind}.toml"
        documents[kind] = (file, (ROOT / f"plans/{kind}s/{file}").read_text())
        plan[kind] = file
    return {"plan": ("x.plan.toml", write_document(plan)), **documents}


def write_document(values: Mapping[str, object]) -> str:
    """``values`` as TOML, a line each."""
    return "".join(f"{write_key(key)} = {write_value(item)}\n" for key, item in values.items())


def run_command(*arguments: str) -> int:
    """The exit code of a command; what pi2 calls a bug of its own is raised."""
    with (
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        warnings.catch_warnings(),
        np.errstate(all="raise", under="ignore"),
        patch("pi2.cli.main.report_crash", side_effect=_raise),
    ):
        warnings.simplefilter("error")
        code = run(arguments)
    assert code in (0, 1, 2), f"exit code {code} of {arguments[0]}, {BUG} is a bug"
    return code


def _raise(error: BaseException, command: str) -> None:
    raise error
