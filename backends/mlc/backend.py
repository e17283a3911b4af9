"""MLC-LLM as a backend: a GPU has the whole model and gives text; ``weights``: its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.units import Need, UnitFacts, Verdict
from pi2.plan.documents.common import Sampling
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.model import Model

PYTHON = "PI2_MLC_PYTHON"
"""Variable that names the Python that has mlc_llm."""
_INSTALL = (
    f"install MLC-LLM into a virtual environment of its own, as its documentation says, and let"
    f" {PYTHON} name that environment's Python; it must not share one with apache-tvm"
)
_MODEL_KEYS = {
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
}
"""Sizes of MLC-LLM's configuration, and what the model document calls them."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a text ended."""

    reason: str
    prompt_tokens: int | None
    tokens: int | None


class MlcEngine:
    """A model of an MLC-LLM folder.  Use it as a context manager."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        *,
        context: int,
        chunk: int = 128,
        device: str | None = None,
    ) -> None:
        """Load ``folder``; without ``device`` MLC-LLM chooses one. P686 without mlc_llm, P688 on
        failure, P689 on another model."""
        check_weights(folder, model)
        self.load_s = -time.monotonic()
        self.finished: Finished | None = None
        """How the last text ended, once all of its pieces were taken."""
        here, there = os.pipe()
        python = os.environ.get(PYTHON) or sys.executable
        worker = Path(__file__).with_name("worker.py")
        try:
            self._process = subprocess.Popen(
                [python, str(worker), str(there)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                text=True,
                pass_fds=[there],
            )
        except OSError as error:
            os.close(here)
            raise _miss(f"{python} cannot be started: {error.strerror}") from None
        finally:
            os.close(there)
        self._answers = os.fdopen(here, encoding="utf-8")
        try:
            self._send(
                {
                    "model": str(folder.resolve()),
                    "device": device or "auto",
                    "context": context,
                    "chunk": chunk,
                }
            )
            self._receive()
        except BaseException:
            self.close()
            raise
        self.load_s += time.monotonic()

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield pieces of a text, then set ``finished``; P687 for unknown sampling, P688."""
        check_sampling(sampling)
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        options = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop": list(stop) or None,
        }
        self.finished = None
        self._send({**given, **options})
        while True:
            answer = self._receive()
            if "finish" in answer:
                self.finished = Finished(
                    answer["finish"], answer["prompt_tokens"], answer["tokens"]
                )
                return
            yield str(answer["text"])

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say why

    def _receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            raise UserError.of("P688", f"MLC-LLM's process ended (exit status {status})")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise _miss(str(answer["missing"]))
        if "error" in answer:
            raise UserError.of("P688", f"MLC-LLM fails: {answer['error']}")
        return answer

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_missing() -> str | None:
    """Return why MLC-LLM cannot be started, and what to do; None where its Python has it."""
    python = os.environ.get(PYTHON) or sys.executable
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('mlc_llm') is None)"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, check=False)
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}: {_INSTALL}"
    return None if done.returncode == 0 else f"{python} has no mlc_llm: {_INSTALL}"


def _has_descriptor(stream: IO[str]) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError):
        return False
    return True


def _miss(problem: str) -> UserError:
    return UserError.of("P686", f"there is no MLC-LLM: {problem}", help=_INSTALL)


def check_sampling(sampling: Sampling) -> None:
    """UserError P687 for what MLC-LLM's interface cannot be told."""
    usual = Sampling.default()
    others = [
        name
        for name in ("top_k", "min_p", "repetition_penalty")
        if getattr(sampling, name) != getattr(usual, name)
    ]
    if others:
        raise UserError.of(
            "P687",
            f"MLC-LLM's interface has no {', '.join(others)}, which the plan states",
            help=" ".join(f"--set sampling.{name}={getattr(usual, name):g}" for name in others),
        )


def check_weights(folder: Path, model: Model) -> None:
    """UserError P689 unless the folder's configuration fits ``model``."""
    file = folder / "mlc-chat-config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))["model_config"]
        stated = {name: config[name] for name in _MODEL_KEYS if name in config}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError.of(
            "P689",
            f"{folder} is no folder of MLC-LLM: {error}",
            help="make one with `mlc_llm convert_weight`",
        ) from None
    if model.moe is not None:
        raise UserError.of(
            "P689", f"{model.id} is an MoE model: MLC-LLM runs only dense models here"
        )
    for name, value in stated.items():
        own = getattr(model.shape, _MODEL_KEYS[name])
        if value != own:
            raise UserError.of(
                "P689",
                f"{folder} is of another model: {name} is {value}, {model.id} has {own}",
                help="convert the plan's own model with `mlc_llm convert_weight`",
            )


VERDICT: Verdict = "runs"
NATIVE = False
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False
WEIGHTS = "mlc-chat-config.json"
"""The file by which its folders are known."""


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return why MLC-LLM cannot be started here; it is looked for in its own Python."""

    missing = find_missing()
    return [] if missing is None else [missing]


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return nothing: MLC-LLM looks for the GPU itself, when it starts."""
    return []


def find_limits(facts: UnitFacts) -> list[str]:
    plan, model = facts.resolved.plan, facts.resolved.model
    limits = []
    if facts.resolved.dense_units:
        limits.append("takes only whole models, without another unit")
    if model.moe is not None:
        limits.append("computes no MoE models")
    if plan.decode.predictor != "none":
        limits.append('computes every neuron: decode.predictor must be "none"')
    if plan.decode.batch > 1:
        limits.append("computes one sequence at a time: decode.batch must be 1")
    return limits


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return 0: MLC-LLM takes the GPU's memory that it needs, outside of any budget."""
    return Need(0, "nothing that a budget holds: MLC-LLM's memory is its own")
