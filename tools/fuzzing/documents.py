"""Spoilt plans, devices and models, given to the commands that read them."""

from __future__ import annotations

import json
import re
import shutil
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


SECRET = "hunter2"
_TEXTS = (
    f"token {SECRET}",
    f'token = "{SECRET}"\n[{SECRET}]\n',
    f"\0{SECRET}",
    f'{{"{SECRET}": 1}}',
)
_NAMES = ("x.plan.toml", "x.device.toml", "x.model.toml", "x.toml", "x", "x.gguf", "pi2.lock")
_PLACES = (
    *("../secret.toml", ".git/config", "..", ".", "x", "x.toml", "missing", "/dev/zero", "/etc"),
    *("x/../../secret.toml", "x/secret.toml", "./x.plan.toml", "p.plan.toml", "..\\secret.toml"),
    *("~/secret.toml", "%2e%2e/secret.toml", "a\0b", "file:../secret.toml", "/proc/self/environ"),
    *("x.plan.toml", "x.device.toml", "x.model.toml", "x.gguf", "//", "../" * 200 + "etc/passwd"),
)
_KEYS = ("extends", "device", "model", "weights", "tokenizer", "thresholds", "draft")


@dataclass
class ReferenceTarget:
    """A repository with links, whose plan names files anywhere: none shows a secret."""

    folder: Path
    name: str = "references"

    def make(self, random: Random) -> bytes:
        """The secret, links by name with their targets, and references by key."""
        names = random.sample(_NAMES, random.randint(0, 4))
        keys = random.sample(_KEYS, random.randint(1, 3))
        links = {name: random.choice(_PLACES) for name in names}
        references = {key: random.choice((*_PLACES, *names)) for key in keys}
        return json.dumps([random.choice(_TEXTS), links, references]).encode()

    def run(self, case: bytes) -> str:
        text, links, references = json.loads(case)
        shutil.rmtree(self.folder, ignore_errors=True)
        place = self.folder / "repository"
        (place / ".git").mkdir(parents=True)
        for secret in (self.folder / "secret.toml", place / ".git/config"):
            secret.write_text(text)
        for link, target in links.items():
            if "\0" not in target:
                (place / link).symlink_to(target)
        values: dict[str, object] = {"schema_version": 3, "extends": ["demo"]}
        for key, reference in references.items():
            tables: dict[str, dict[str, object]] = {
                "extends": {"extends": ["demo", reference]},
                "thresholds": {"sparsity": {"method": "cats", "thresholds": reference}},
                "draft": {"decode": {"speculation": {"drafts": "plan", "plan": reference}}},
            }
            values |= tables.get(key, {key: reference})
        (place / "p.plan.toml").write_text(write_document(values))
        plan, codes, shown = str(place / "p.plan.toml"), [], StringIO()
        for words in (["validate"], ["validate", "--format", "sarif"], ["show", "--origins"]):
            codes.append(run_command(*words, plan, output=shown))
        run_command("validate", str(place), output=shown)
        run_command("migrate", "--check", str(place), output=shown)
        assert SECRET not in shown.getvalue(), "a report shows a secret"
        return "sound" if codes[0] == 0 else "refused"


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


def run_command(*arguments: str, output: StringIO | None = None) -> int:
    """The exit code of a command, which writes to ``output``; what pi2 calls a bug of its own is
    raised."""
    output = output or StringIO()
    with (
        redirect_stdout(output),
        redirect_stderr(output),
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
