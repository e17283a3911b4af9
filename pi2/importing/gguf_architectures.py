"""Families as GGUF files know them, by ``general.architecture``."""

import json
import re
from collections import ChainMap
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi2.caches import show_path
from pi2.importing import gguf_decoders, gguf_families, gguf_states
from pi2.importing.families import list_families
from pi2.importing.gguf_decoders import Metadata
from pi2.importing.gguf_states import Scale
from pi2.importing.gguf_tokens import find_marks
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.family import Architecture as Stated

Names = dict[str, str]
"""Name in a Hugging Face checkpoint by name in a GGUF file; ``{layer}`` stands for a number."""
Read = Callable[[Metadata, dict[str, Any], str], dict[str, Any]]
"""Returns a family's additional keys of a configuration; the text is the activation of its FFNs.
Raises `UserError` P532 as `Metadata.read`."""
Complete = Callable[[dict[str, Any], dict[str, SourceTensor]], None]
"""Adds to a configuration what the tensors of a file tell, which are there by their names in the
original, and may give them others."""


_MODULES = (gguf_decoders, gguf_families, gguf_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family as GGUF files know it."""

    model_type: str
    names: Names
    stated: Stated

    @property
    def read(self) -> Read:
        read: Read = _find_function(f"read_{self.stated.read}")
        return read

    @property
    def complete(self) -> Complete | None:
        name = self.stated.complete
        return _find_function(f"complete_{name}") if name else None

    @property
    def scale(self) -> Scale:
        scale: Scale = _find_function(f"scale_{self.stated.scale}")
        return scale


def _find_function(name: str) -> Any:
    return next(vars(module)[name] for module in _MODULES if name in vars(module))


def list_architectures() -> list[str]:
    """What ``general.architecture`` may be."""
    return sorted(name for name in list_families().architectures if not name.startswith("_"))


def find_architecture(name: str) -> Architecture | None:
    """The architecture of that name; None where none is known."""
    if name not in list_families().architectures:
        return None
    family, table = list_families().architectures[name]
    stated = Stated.model_validate_json(json.dumps({**table, "keys": _collect_keys(name)}))
    names = _collect_names(name)
    return Architecture(model_type=stated.model_type or family, names=names, stated=stated)


def _collect_keys(name: str) -> dict[str, list[Any]]:
    _, table = list_families().architectures[name]
    bases = (_collect_keys(base) for base in table.get("extends", ()))
    return dict(ChainMap(table.get("keys", {}), *reversed([*bases])))


def _collect_names(name: str) -> Names:
    _, table = list_families().architectures[name]
    found: Names = {}
    for base in table.get("extends", () if name.startswith("_") else ("_decoder",)):
        found |= _collect_names(base)
    layer = table.get("layer", "model.layers.{layer}")
    for own, original in table.get("names", {}).items():
        own = f"blk.{{layer}}{own}" if own.startswith(".") else own
        original = f"{layer}{original}" if original.startswith(".") else original
        for part in ("gate", "up", "down") if "{part}" in own else ("",):
            for end in ("weight", "bias") if own.endswith(".*") else ("",):
                key, value = (
                    text.replace("{part}", part).replace(".*", f".{end}")
                    for text in (own, original)
                )
                found[key] = value
    return found


def make_config(
    metadata: Metadata, architecture: Architecture, *, vocab: int, tied: bool, sparse: bool
) -> dict[str, Any]:
    """The configuration. ``vocab``: rows of the embedding table; ``tied``: there is no head;
    ``sparse``: the file has predictors, and its model computes ReLU."""
    read, count = metadata.read, metadata.read_count
    layers = count("{arch}.block_count")
    later = read("{arch}.nextn_predict_layers", int, 0)
    if not 0 <= later < layers:
        raise metadata.refuse(f"{later} of {layers} layers draft tokens")
    layers -= later  # they are no part of the model
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "_name_or_path": read("general.name", str, show_path(Path(metadata.file.stem))),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": later,
        "hidden_size": count("{arch}.embedding_length"),
        "num_attention_heads": count("{arch}.attention.head_count"),
        "vocab_size": vocab,
        "max_position_embeddings": count("{arch}.context_length"),
        "tie_word_embeddings": tied,
        **_read_tokens(metadata, vocab),
    }
    activation = "relu" if sparse else architecture.stated.activation
    found = config | architecture.read(metadata, config, activation)
    for key, (own, *default) in architecture.stated.keys.items():
        path = f"{{arch}}.{own}"
        found[key] = read(path, type(default[0]), default[0]) if default else count(path)
    if architecture.stated.sliding_every:
        found["layer_types"] = metadata.read_layer_types(layers, architecture.stated.sliding_every)
    # A setting of the family says what its files do not.
    return found | architecture.stated.settings


def _read_tokens(metadata: Metadata, vocab: int) -> dict[str, Any]:
    marks = find_marks(metadata.file, metadata.values, vocab)
    begin = {} if marks.begin is None else {"bos_token_id": marks.begin}
    return {"eos_token_id": list(marks.ends), **begin}


_NUMBERED = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)\.weight")


def choose_names(architecture: Architecture, tensors: Container[str], *, mixed: bool) -> Names:
    """Names of a file's family; ``mixed``: it has experts."""
    if architecture.model_type == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return _collect_names("_falcon_40b")
    return (
        _collect_names("_mixture")
        if mixed and architecture.model_type == "llama"
        else (architecture.names)
    )


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file's tensor in a Hugging Face checkpoint."""

    pattern: str
    """The tensor's name in a Hugging Face checkpoint, perhaps with ``{expert}`` in it."""
    kind: str
    """The tensor's name in the file without the layer's number: ``attn_q.weight``."""
    layer: int


def find_place(names: Names, name: str) -> Place | None:
    """The place of the tensor ``name`` of a file; None if it has none."""
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        pattern = names.get(name)
        return None if pattern is None else Place(pattern, name, 0)
    layer, kind = int(numbered[1]), numbered[2]
    expert = _EXPERT.fullmatch(kind)
    key = f"blk.{{layer}}.{kind}"
    if expert is not None:
        key = f"blk.{{layer}}.{expert[1]}.{{expert}}.weight"
    pattern = names.get(key)
    if pattern is None:
        return None
    pattern = pattern.replace("{layer}", str(layer))
    if expert is not None:
        pattern = pattern.replace("{expert}", expert[2])
    return Place(pattern, kind, layer)


def name_in_file(names: Names, wanted: str) -> str:
    """A file's name of the Hugging Face tensor ``wanted``; ``wanted`` itself if there is none."""
    for name, pattern in names.items():
        parts = re.split(r"\{(\w+)\}", pattern)
        expression = "".join(
            re.escape(part) if index % 2 == 0 else rf"(?P<{part}>\d+)"
            for index, part in enumerate(parts)
        )
        found = re.fullmatch(expression, wanted)
        if found is not None:
            for key, number in found.groupdict().items():
                name = name.replace(f"{{{key}}}", number)
            return name
    return wanted
