"""Modelfiles of ollama as plans, and plans as Modelfiles and as entries of llama-swap."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan

PARAMETERS: Mapping[str, str] = {
    **{name: f"sampling.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
    **{f"{name}_penalty": f"sampling.{name}_penalty" for name in ("presence", "frequency")},
    "repeat_penalty": "sampling.repetition_penalty",
    "repeat_last_n": "sampling.penalty_window",
    "num_ctx": "kv.context",
    "stop": "chat.stop",
}
"""Keys of plans by ollama's names of parameters."""
_WHOLE = frozenset({"top_k", "seed", "repeat_last_n", "num_ctx"})
_WORDS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES")
_WORD, _KEY = re.compile(r"([A-Za-z]+)[ \t]+"), re.compile(r"(\w+)[ \t]+")
_TEXT = re.compile(r'"""(.*?)"""|"([^"\n]*)"[ \t]*$|([^\n]*)', re.DOTALL | re.MULTILINE)
_ACTION = re.compile(r"(\s*)\{\{(-?)(.*?)(-?)\}\}(\s*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Modelfile:
    weights: str
    """A path, or ollama's name of another model."""
    parameters: Sequence[tuple[str, str]] = ()
    template: str | None = None
    """In the language of Go's templates."""
    system: str | None = None
    adapter: str | None = None
    is_manifest: bool = False
    """Whether ollama wrote it: then the file's own chat template takes the place of one that
    cannot be translated."""

    @classmethod
    def parse(cls, text: str, file: str) -> Modelfile:
        """Read a Modelfile; UserError P737 for other texts."""
        found: dict[str, str] = {}
        parameters: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            if blank := re.compile(r"\s+|#[^\n]*").match(text, place):
                place = blank.end()
                continue
            match = _WORD.match(text, place)
            word = "" if match is None else match[1].upper()
            key = _KEY.match(text, match.end()) if match and word == "PARAMETER" else match
            if key is None or word not in _WORDS:
                line = text[place:].partition("\n")[0]
                raise UserError.of(
                    "P737",
                    f"{line!r} in line {text.count(chr(10), 0, place) + 1} is no instruction",
                    file=file,
                    help=f"known are {', '.join(_WORDS)}",
                )
            value = _TEXT.match(text, key.end())
            assert value is not None, "it may be empty"
            place = value.end()
            quoted = next((part for part in value.groups()[:2] if part is not None), None)
            said = value[3].strip() if quoted is None else quoted
            if word == "PARAMETER":
                parameters.append((key[1], said))
            else:
                found[word] = said
        if "FROM" not in found:
            raise UserError.of("P737", "FROM is missing", file=file, help="write FROM ./model.gguf")
        return cls(
            weights=found["FROM"],
            parameters=parameters,
            template=found.get("TEMPLATE"),
            system=found.get("SYSTEM"),
            adapter=found.get("ADAPTER"),
        )

    def list_values(self) -> tuple[dict[str, Any], list[str]]:
        """A plan's values but the weights, by key, and instructions that are left out.

        UserError P736 for an adapter, P737 for a wrong number, P738 for a foreign template."""
        if self.adapter is not None:
            raise UserError.of(
                "P736",
                f"the model has the adapter {self.adapter}, which pi2 does not run",
                help="merge it into the weights, and convert the merged checkpoint",
            )
        values: dict[str, Any] = {}
        left: list[str] = []
        for name, text in self.parameters:
            key = PARAMETERS.get(name)
            if key is None:
                left.append(f"PARAMETER {name}")
            elif key == "chat.stop":
                values[key] = [*values.get(key, ()), text]
            else:
                try:
                    values[key] = int(float(text)) if name in _WHOLE else float(text)
                except (ValueError, OverflowError):
                    raise UserError.of("P737", f"{name} is a number, not {text!r}") from None
        if values.get("sampling.seed", 0) < 0:
            del values["sampling.seed"]
        if self.system:
            values["chat.system"] = self.system
        if self.template:
            try:
                values["chat.template"] = translate_template(self.template)
            except UserError:
                if not self.is_manifest:
                    raise
                left.append("TEMPLATE: the file's own chat template is used")
        return values, left

    def write_plan(self, weights: str | None = None) -> tuple[str, list[str]]:
        """The text of a plan with the ``weights``, and instructions that are left out."""
        from pi2.authoring.drafting import write_overlay

        values, left = self.list_values()
        remarks = [f"{item}: left out" for item in left]
        return write_overlay(weights or self.weights, values, remarks, "weights"), left


_FIELDS = {
    ".System": "turn.system",
    ".Prompt": "turn.prompt",
    ".Response": "('\ue000' if turn.response is none else turn.response)",
    "or .System .Prompt": "(turn.system or turn.prompt)",
}
_TURNS = Path(__file__).with_name("ollama.jinja")


def translate_template(text: str) -> str:
    """A Jinja template that renders conversations as ollama renders ``text`` turn by turn.  Known
    are .System, .Prompt, .Response, if, else and end; UserError P738 for more."""
    parts: list[str] = []
    place = 0
    for match in _ACTION.finditer(text):
        parts.append(_quote(text[place : match.start()] + ("" if match[2] else match[1])))
        words = " ".join(match[3].split())
        place = match.end() if match[4] else match.end() - len(match[5])
        if words.startswith("if ") and words[3:] in _FIELDS:
            parts.append(f"{{% if {_FIELDS[words[3:]]} %}}")
        elif words in ("else", "end"):
            parts.append("{% else %}" if words == "else" else "{% endif %}")
        elif words in _FIELDS:
            parts.append(f"{{{{ {_FIELDS[words]} }}}}")
        elif not words.startswith("/*"):
            raise UserError.of(
                "P738",
                f"the template has {{{{ {words} }}}}, which pi2 cannot translate",
                help="leave TEMPLATE out: the file's own chat template is used",
            )
    parts.append(_quote(text[place:]))
    response = f"{{{{ {_FIELDS['.Response']} }}}}"
    if response not in parts:
        parts.append(response)
    return _TURNS.read_text("utf-8").replace("TURN{", "".join(parts) + "{").strip()


def _quote(text: str) -> str:
    """Text as Jinja writes it unchanged."""
    if not text:
        return ""
    quoted = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return "{{ '" + quoted + "' }}"


def write_modelfile(resolved: ResolvedPlan) -> str:
    """A Modelfile that has ollama run a plan's GGUF file as chats of the plan.  UserError P739 for
    a plan of a neuron store."""
    if resolved.file is None:
        raise UserError.of("P739", "ollama runs GGUF files, and this plan has a neuron store")
    sampling = resolved.plan.sampling
    lines = [f"# {resolved.plan.name or resolved.model.id}, from a plan of pi2"]
    lines.append(f"FROM {Path(resolved.file.path).absolute()}")
    values = {f"sampling.{key}": getattr(sampling, key) for key in sampling.model_fields_set}
    if ("kv", "context") not in resolved.derived:
        values["kv.context"] = resolved.plan.kv.context
    for name, key in PARAMETERS.items():
        if values.get(key) is not None:
            lines.append(f"PARAMETER {name} {values[key]}")
    lines += [f'PARAMETER stop "{stop}"' for stop in resolved.plan.chat.stop]
    if resolved.plan.chat.system:
        lines.append(f'SYSTEM """{resolved.plan.chat.system}"""')
    return "\n".join(lines) + "\n"


def write_llama_swap(resolved: ResolvedPlan, name: str) -> str:
    """An entry of llama-swap's ``config.yaml`` that serves a plan."""
    idle = resolved.plan.serve.idle
    command = f"pi2 serve {shlex.quote(str(resolved.path.absolute()))} --port ${{PORT}}"
    lines = [
        "models:",
        f"  {json.dumps(name)}:",
        f"    cmd: {json.dumps(command)}",
        "    proxy: http://127.0.0.1:${PORT}",
        "    checkEndpoint: /health",
    ]
    return "\n".join([*lines, *([] if idle is None else [f"    ttl: {round(idle)}"])]) + "\n"
