"""llama-server's presets (``--models-preset``): an INI file with a section for each model."""

from __future__ import annotations

import configparser
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError
from pi2.found_models import HUB, find_found
from pi2.plan.arithmetic.resolved import ResolvedPlan

GLOBAL = "*"
"""The section whose keys count for all models."""
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_CACHE_TYPES: Mapping[str, str] = _TABLE["types"]
_TRUE = ("1", "true", "on", "yes")
_READERS: Mapping[str, Callable[[str], Any]] = {
    "whole": int,
    "number": float,
    "type": _CACHE_TYPES.__getitem__,
    "seconds": lambda text: f"{float(text):g} s",
    "load": lambda text: "start" if text.lower() in _TRUE else "request",
}
KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    key: (own, _READERS[kind]) for key, (own, kind) in _TABLE["keys"].items()
}
"""Keys of plans by llama-server's options, and how their values are read."""


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    path: Path
    overrides: Mapping[str, object]
    ignored: tuple[str, ...]
    """Keys without a counterpart."""


def read_presets(file: Path) -> list[Preset]:
    """The models of an INI file; UserError P744 for its faults."""
    parser = configparser.ConfigParser(
        default_section="", interpolation=None, delimiters=("=",), comment_prefixes=(";", "#")
    )
    parser.optionxform = lambda key: key  # type: ignore[method-assign, assignment]
    try:
        # ``version = 1`` comes before the first section.
        parser.read_string("[version]\n" + file.read_text("utf-8"))
    except (OSError, ValueError, configparser.Error) as error:
        raise UserError.of("P744", f"{error}".partition("\n")[0], file=str(file)) from None
    shared = _read_section(parser, GLOBAL) if parser.has_section(GLOBAL) else {}
    names = [name for name in parser.sections() if name not in ("version", GLOBAL)]
    if not names:
        raise UserError.of(
            "P744", "there is no model", file=str(file), help="write a section [NAME] with model"
        )
    return [_make_preset(file, name, {**shared, **_read_section(parser, name)}) for name in names]


def _read_section(parser: configparser.ConfigParser, name: str) -> dict[str, str]:
    """Values of a section by llama-server's long options."""
    found = {}
    for key, value in parser.items(name):
        plain = key.lstrip("-").removeprefix("LLAMA_ARG_").lower().replace("_", "-")
        found[_TABLE["spellings"].get(plain, plain)] = value.strip().strip('"')
    return found


def _make_preset(file: Path, name: str, values: dict[str, str]) -> Preset:
    overrides: dict[str, object] = {}
    ignored = []
    repository, part = values.pop("hf-repo", None), values.pop("hf-file", None)
    place = values.pop("model", None)
    for key, text in values.items():
        if key not in KEYS:
            ignored.append(key)
        elif text != _TABLE["unset"].get(key):
            own, read = KEYS[key]
            try:
                overrides[own] = read(text)
            except (ValueError, KeyError):
                raise UserError.of(
                    "P744", f"[{name}] has {key} = {text}, which pi2 cannot read", file=str(file)
                ) from None
    if place is not None:
        path = Path(place).expanduser()
    else:
        reference = (repository or name).partition(":")[0]
        model = find_found(f"{HUB}{reference}" + (f"/{part}" if part else ""))
        if model is None:
            raise UserError.of(
                "P744",
                f"[{name}] names no model of this machine",
                file=str(file),
                help="write model = FILE.gguf, or fetch hf-repo into the Hugging Face cache",
            )
        path = model.plan
    return Preset(name, path, overrides, tuple(ignored))


def write_presets(plans: Iterable[tuple[str, ResolvedPlan]]) -> str:
    """An INI file with which llama-server runs the GGUF files of plans; UserError P739."""
    lines = ["version = 1"]
    for name, resolved in plans:
        message = f"llama-server runs GGUF files, and {name} has a neuron store"
        file = resolved.source.find_file(UserError.of("P739", message))
        lines += ["", f"[{name}]", f"model = {file.absolute()}"]
        plan = resolved.plan
        stated = {f"sampling.{key}" for key in plan.sampling.model_fields_set}
        stated |= {f"serve.{key}" for key in plan.serve.model_fields_set} | {"kv.context"}
        types = {own: theirs for theirs, own in _CACHE_TYPES.items()}
        for key, (own, _) in KEYS.items():
            table, _, item = own.partition(".")
            value = getattr(getattr(plan, table), item)
            if own == "serve.load" and own in stated:
                lines.append(f"{key} = {str(value == 'start').lower()}")
            elif own == "kv.type":
                lines += [f"{key} = {types[value]}", f"cache-type-v = {types[value]}"]
            elif own in stated and value is not None:
                text = f"{value:g}" if isinstance(value, float) else str(value)
                lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"
