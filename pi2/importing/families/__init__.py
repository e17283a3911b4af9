"""Families of models from ``config.json``: ``MODEL_TYPE.family.toml``, of the checkpoint or pi2."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from pi2.diagnostics import UserError
from pi2.importing.config import Config
from pi2.importing.families import functions
from pi2.importing.families.interpreter import Description, Tables, read_family
from pi2.plan.documents.family import Family, MtpHead
from pi2.plan.reading.references import list_shipped

SUFFIX = ".family.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1024),
    "hidden_size": 2**20,
    "max_position_embeddings": 2**40,
}
"""No model document states more; families may count through layers, and take roots of sizes."""
_SIMILAR = 0.7
"""Likeness of similar names."""
_FLAT = ("qwen2_5_vl", "qwen2_vl")
"""Families whose configurations have no ``text_config`` where older transformers wrote them: the
text's keys are next to ``vision_config``."""
_LISTED = ("aliases", "gguf", "refused", "wrappers")
"""Keys that a listing tells; of a document with none it tells the name."""
_OUTER = ("bos_token_id", "eos_token_id", "_name_or_path")
"""Keys of the whole model that count where the text's configuration does not state them."""


@dataclass(frozen=True)
class Listing:
    """What the shipped documents are called, and call themselves."""

    families: dict[str, Path] = field(default_factory=dict)
    """Documents by ``model_type``, aliases among them."""
    refused: dict[str, str] = field(default_factory=dict)
    """What no model document states of a family."""
    refused_files: dict[str, str] = field(default_factory=dict)
    """The same of architectures of GGUF files."""
    wrappers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Families of models that read pictures, sound or video too, with what their configurations
    leave out of the text's: its family at least."""
    architectures: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Architectures of GGUF files: the family, and what its document states."""


@cache
def list_families() -> Listing:
    found = Listing()
    for name, file in list_shipped("family").items():
        text = file.read_text("utf-8")
        values = tomli.loads(text) if any(word in text for word in _LISTED) else {}
        names, files = (name, *values.get("aliases", ())), values.get("gguf", {})
        if "refused" in values:
            found.refused.update(dict.fromkeys(names, values["refused"]))
            found.refused_files.update(dict.fromkeys(files, values["refused"]))
            continue
        for architecture, table in files.items():
            if "refused" in table:
                found.refused_files[architecture] = table["refused"]
            else:
                found.architectures[architecture] = (name, table)
        if not _NAME.fullmatch(name):
            continue
        found.families.update(dict.fromkeys(names, file))
        for wrapper, defaults in values.get("wrappers", {}).items():
            found.wrappers[wrapper] = {"model_type": name, **defaults}
    return Listing(*(dict(sorted(part.items())) for part in vars(found).values()))


def find_nearest(kind: str) -> str:
    """Say which known family has the most similar name, as the end of a sentence: its description
    is the one to begin with.  Nothing if none is similar."""

    from difflib import get_close_matches

    nearest = next(iter(get_close_matches(kind, list_families().families, 1, _SIMILAR)), None)
    if nearest is None:
        return ""
    return (
        f"; the nearest known one is {nearest!r}: {kind}{SUFFIX} in that folder with "
        f'`extends = ["{nearest}"]` and what differs describes it'
    )


def _find_documents(kind: str, folder: Path) -> Iterator[Path]:
    if _NAME.fullmatch(kind):
        yield folder / f"{kind}{SUFFIX}"
    # Names of families that only GGUF files have begin with a line.
    shipped = list_shipped("family") if kind.startswith("_") else list_families().families
    if kind in shipped:
        yield shipped[kind]


def describe_family(config: Config) -> Tables:
    """Tables of the model document; `UserError` P544 for an unknown family or option."""
    return Description(config, find_family(config), functions).describe()


def find_family(config: Config) -> Family:
    """The family's document; `UserError` P544 for an unknown one."""
    kind = config.read("model_type", str)
    file = next(
        (file for file in _find_documents(kind, config.file.parent) if file.is_file()), None
    )
    refused = list_families().refused.get(kind)
    if file is None and refused is not None:
        raise UserError.of(
            "P544",
            f"{config.file} is of the family {kind!r}, which has what no model document states: "
            f"{refused}",
            help="docs/reference/models.md lists the families that are known",
            file=str(config.file),
        )
    if file is None:
        raise config.refuse(f"the family {kind!r} (model_type) is unknown{find_nearest(kind)}")
    for key, most in _LIMITS.items():
        if config.has(key) and not 1 <= config.read(key, int) <= most:
            raise config.refuse(f"{key} is {config.read(key, int)}, not in 1..{most}")
    return read_family(file)


def list_heads(config: Config) -> Iterator[MtpHead]:
    """How checkpoints of a family may name their MTP head: as its document says, or as llama.cpp's
    files of all families do, which is DeepSeek's way."""
    own = find_family(config).mtp
    usual = read_family(list_shipped("family")["_deep_experts"]).mtp
    yield from (head for head in (own, usual) if head is not None)


def unwrap_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the part that reads text; ``config`` itself of text-only models."""
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in list_families().wrappers:
        return config
    own = list_families().wrappers[kind]
    if isinstance(text, dict):
        shared = {key: config[key] for key in _OUTER if key in config}
        # The head is the whole model's: what the text's part says of it, transformers leaves alone.
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        return {**own, **shared, **text, **tied}
    return {**config, **own} if kind in _FLAT else config
