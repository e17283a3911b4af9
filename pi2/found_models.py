"""Models that other programs have fetched to this machine (ollama, LM Studio, llama.cpp, the hub's
cache), which run where they are, and ollama's Modelfiles as plans."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.caches import find_cache_folder, find_home, has_gguf_suffix
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan

OLLAMA, LM_STUDIO, LLAMA_CPP, HUB = "ollama:", "lmstudio:", "llama.cpp:", "hf:"
PREFIXES = (OLLAMA, LM_STUDIO, LLAMA_CPP, HUB)
"""Begin the names of models, by the program that has fetched them."""
_REGISTRY, _LIBRARY, _TAG = "registry.ollama.ai", "library", "latest"
_KIND = "application/vnd.ollama.image."


@dataclass(frozen=True, slots=True)
class FoundModel:
    name: str
    """With its prefix: ``ollama:qwen3:4b``."""
    file: Path
    """The GGUF file; of a split model the first part."""
    manifest: Path | None = None
    """What ollama states of it."""

    @property
    def size_bytes(self) -> int:
        return self.file.stat().st_size

    @property
    def plan(self) -> Path:
        """What runs it: the file itself, or a plan in the cache with what ollama states."""
        if self.manifest is None:
            return self.file
        folder = find_cache_folder("found")
        name = self.name.removeprefix(OLLAMA).replace("/", "-").replace(":", "-")
        path = folder / f"{name}.plan.toml"
        stated = read_manifest(self.manifest)
        text, _ = stated.write_plan()
        if not path.is_file() or path.read_text("utf-8") != text:
            from pi2.sharing.fetching import write_atomically

            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        return path


def list_found(environment: Mapping[str, str] | None = None) -> list[FoundModel]:
    """All models, by program and name."""
    values = os.environ if environment is None else environment
    found = {model.name: model for model in _list_all(values, find_home(values))}
    return [found[name] for name in sorted(found)]


def find_found(name: str) -> FoundModel | None:
    """The model of a name with a prefix, of which the ending may be left out where one model has
    it; None for other names.  UserError P735 if there is none."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    known = {model.name: model for model in list_found() if model.name.startswith(prefix)}
    if prefix == OLLAMA and ":" not in name.removeprefix(OLLAMA).rpartition("/")[2]:
        name = f"{name}:{_TAG}"
    near = [model for other, model in known.items() if other.startswith(f"{name}/")]
    if name in known or len(near) == 1:
        return known.get(name) or near[0]
    if prefix == HUB:
        return None
    listed = ", ".join(model.name for model in near) or ", ".join(known) or "none"
    raise UserError.of(
        "P735",
        f"{name} is not on this machine",
        help=f"found are: {listed}; `pi2 list --found` shows all",
    )


def _list_all(values: Mapping[str, str], home: Path) -> Iterator[FoundModel]:
    own = [Path(values["OLLAMA_MODELS"])] if values.get("OLLAMA_MODELS") else []
    for folder in (*own, home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")):
        yield from _list_ollama(folder)
    studio = [home / ".lmstudio", home / ".cache/lm-studio"]
    with suppress(OSError, ValueError):
        studio.append(Path((home / ".lmstudio-home-pointer").read_text("utf-8").strip()))
    for folder in studio:
        yield from _list_files(LM_STUDIO, folder / "models", "*/*")
    cache = Path(values.get("XDG_CACHE_HOME") or home / ".cache")
    yield from _list_files(LLAMA_CPP, Path(values.get("LLAMA_CACHE") or cache / "llama.cpp"), "")
    hub = Path(values.get("HF_HOME") or cache / "huggingface") / "hub"
    for snapshots in _list_folder(Path(values.get("HF_HUB_CACHE") or hub), "models--*/snapshots/*"):
        repository = snapshots.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        yield from _list_files(f"{HUB}{repository}/", snapshots, "")


def _list_files(prefix: str, folder: Path, pattern: str) -> Iterator[FoundModel]:
    """GGUF files of models in the folders of ``pattern``: no projectors, no further parts."""
    for path in _list_folder(folder, f"{pattern}/*" if pattern else "*"):
        is_part = "-of-" in path.stem and "-00001-of-" not in path.stem
        if has_gguf_suffix(path) and path.is_file() and not is_part:
            if not path.name.lower().startswith("mmproj"):
                yield FoundModel(f"{prefix}{path.relative_to(folder)}", path)


def _list_folder(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern)) if folder.is_dir() else []
    except OSError:
        return []


def _list_ollama(folder: Path) -> Iterator[FoundModel]:
    manifests = folder / "manifests"
    for path in _list_folder(manifests, "*/*/*/*"):
        host, space, name, tag = path.relative_to(manifests).parts
        places = [] if (host, space) == (_REGISTRY, _LIBRARY) else [space]
        shown = "/".join([*([] if host == _REGISTRY else [host]), *places, name])
        file = _find_layers(path).get("model")
        if file is not None and file.is_file():
            yield FoundModel(f"{OLLAMA}{shown}:{tag}", file, path)


def _find_layers(manifest: Path) -> dict[str, Path]:
    """Files of the parts that a manifest names, by kind; empty if it cannot be read."""
    blobs = manifest.parents[4] / "blobs"
    try:
        layers = json.loads(manifest.read_text("utf-8"))["layers"]
        return {
            str(layer["mediaType"]).removeprefix(_KIND): blobs
            / str(layer["digest"]).replace(":", "-").replace("/", "-")
            for layer in layers
            if str(layer["mediaType"]).startswith(_KIND)
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def read_manifest(manifest: Path) -> Modelfile:
    """What a manifest of ollama states.  UserError P736 for an adapter, P737 for a part that
    cannot be read."""
    layers = _find_layers(manifest)
    try:
        texts = {
            kind: layers[kind].read_text("utf-8")
            for kind in ("template", "system")
            if kind in layers
        }
        parameters = json.loads(layers["params"].read_text("utf-8")) if "params" in layers else {}
        listed = [
            (str(key), str(item))
            for key, value in parameters.items()
            for item in (value if isinstance(value, list) else [value])
        ]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError.of("P737", f"{manifest}: a part cannot be read: {error}") from None
    adapter = str(layers["adapter"]) if "adapter" in layers else None
    return Modelfile(
        weights=str(layers["model"]),
        parameters=listed,
        template=texts.get("template"),
        system=texts.get("system"),
        adapter=adapter,
        is_manifest=True,
    )


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
    refusal = UserError.of("P739", "ollama runs GGUF files, and this plan has a neuron store")
    file = resolved.source.find_file(refusal)
    sampling = resolved.plan.sampling
    lines = [f"# {resolved.plan.name or resolved.model.id}, from a plan of pi2"]
    lines.append(f"FROM {file.absolute()}")
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
