"""Engines as programs that print their figures: pi2, llama.cpp and ik_llama.cpp on one file."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from real.results import Quality, Steps

HERE = Path(__file__).parent
TEXT = HERE / "text.txt"
"""Prose, code and three languages; the figures are of its first tokens."""
PROMPTS = HERE / "prompts.txt"
"""Twenty prompts that are answered greedily, a line each."""
QUALITY_TOKENS = 512


@dataclass(frozen=True)
class Workload:
    """Prompts and tokens that every run has."""

    prompts: list[int]
    """Tokens of each prompt; the prompts have no token in common."""
    tokens: int
    """Tokens generated greedily after a prompt of 16."""


@dataclass(frozen=True)
class Engine:
    """A program in an interpreter of its own."""

    python: str

    name = ""
    program = ""
    variants: tuple[str, ...] = ("",)
    """How it may be run; the first holds no copy of the file, and is the one within limits."""

    def make_command(
        self, file: Path, work: Workload, limit: int | None, variant: str = ""
    ) -> list[str]:
        """The command of one run; ``limit``: the memory that it may use, in bytes."""
        lengths = json.dumps(work.prompts)
        memory = "" if limit is None else f"{limit} B"
        return [
            *(
                self.python,
                os.fspath(HERE / f"run_{self.program}.py"),
                os.fspath(file),
                os.fspath(TEXT),
            ),
            *(lengths, str(work.tokens), memory, variant),
        ]

    def find_version(self) -> str:
        return self.ask("-c", f"import {self.name}; print({self.name}.__version__)")

    def read_figures(self, run: subprocess.CompletedProcess[str]) -> dict[str, float]:
        """Figures that a run printed; `ValueError` says why there are none."""
        if run.returncode < 0:
            raise ValueError("killed for memory")
        if run.returncode:
            lines = run.stderr.strip().splitlines()
            raise ValueError(lines[-1][:200] if lines else f"exit {run.returncode}")
        found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
        return found

    def ask(self, *arguments: str) -> str:
        """Output of the interpreter with ``arguments``."""
        command = [self.python, *arguments]
        own = os.environ | {"PYTHONPATH": os.fspath(HERE.parent)}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
        return run.stdout.strip()


class Pi2(Engine):
    """pi2, through its Python interface."""

    name = "pi2"
    program = "pi2"


class LlamaCpp(Engine):
    """llama.cpp, through llama-cpp-python, with a thread for each core and its defaults else."""

    name = "llama.cpp"
    program = "llama_cpp"
    variants = ("mapped", "repacked")

    def find_version(self) -> str:
        """Its version, and the CPU features that it was built for."""
        return self.ask(os.fspath(HERE / f"run_{self.program}.py"))


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp, through ik-llama-cpp-python."""

    name = "ik_llama.cpp"
    program = "ik_llama_cpp"


def measure_quality(
    file: Path,
    engines: tuple[Pi2, LlamaCpp],
    peer_file: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> Quality:
    """Both engines' losses on the same `QUALITY_TOKENS` tokens, and how far they are apart.

    ``peer_file``: the same weights as llama.cpp reads them; ``settings``: of pi2's plan.
    """
    ours, peer = engines
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "logits.npz")
        text, scorer = os.fspath(TEXT), os.fspath(HERE / "score_llama_cpp.py")
        peer.ask(
            scorer, os.fspath(peer_file or file), text, str(QUALITY_TOKENS), os.fspath(PROMPTS), out
        )
        own = json.dumps(settings or {})
        found = json.loads(ours.ask(os.fspath(HERE / "score_pi2.py"), os.fspath(file), out, own))
    return Quality(**(found | {"peer_steps": Steps(**found["peer_steps"])}))
