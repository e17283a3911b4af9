"""Families as GGUF files know them, by ``general.architecture``: names of tensors, and
configurations."""

import json
import re
from collections.abc import Container, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pi2.caches import show_path
from pi2.importing.families import list_families
from pi2.importing.gguf_metadata import Metadata, Scope
from pi2.importing.gguf_tokens import find_marks
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.family import Architecture

Names = Mapping[str, str]
"""Name in a Hugging Face checkpoint by name in a GGUF file; ``{layer}`` stands for a number."""


def list_architectures() -> list[str]:
    return sorted(name for name in list_families().architectures if not name.startswith("_"))


@cache
def find_architecture(name: str) -> Architecture | None:
    """The architecture of that name, with whole `names` and with the keys of those it extends; None
    where none is known."""
    if name not in list_families().architectures:
        return None
    family, table = list_families().architectures[name]
    names, keys = dict[str, str](), dict[str, list[Any]]()
    for base in table.get("extends", () if name.startswith("_") else ("_decoder",)):
        own = find_architecture(base)
        assert own is not None
        names |= own.names
        keys |= own.keys
    names |= _write_names(table.get("names", {}), table.get("layer", "model.layers.{layer}"))
    whole = {
        "model_type": family,
        **table,
        "names": names,
        "keys": {**keys, **table.get("keys", {})},
    }
    return Architecture.model_validate_json(json.dumps(whole))


def list_tables(stated: Architecture) -> Iterator[Architecture]:
    """Tables whose keys count before its own, weakest first."""
    for name in stated.read:
        own = find_architecture(name)
        assert own is not None
        yield from list_tables(own) if "read" in own.model_fields_set else ()
        yield own


def list_suited(family: object) -> list[str]:
    """Architectures of the models of a family, as configurations name it."""
    return [
        name
        for name, (own, table) in list_families().architectures.items()
        if not name.startswith("_")
        and family in (own, table.get("model_type"), *table.get("families", ()))
    ]


def _write_names(stated: Names, layer: str) -> Names:
    """The names that a document's ``names`` stand for."""
    found = {}
    for own, original in stated.items():
        pair = [
            f"{start}{text}" if text.startswith(".") else text
            for start, text in (("blk.{layer}", own), (layer, original))
        ]
        for part in ("gate", "up", "down") if "{part}" in own else ("",):
            for end in ("weight", "bias") if own.endswith(".*") else ("",):
                key, value = (t.replace("{part}", part).replace(".*", f".{end}") for t in pair)
                found[key] = value
    return found


def make_config(
    metadata: Metadata,
    stated: Architecture,
    tensors: Mapping[str, SourceTensor],
    *,
    vocab: int,
    tied: bool,
    sparse: bool,
) -> dict[str, Any]:
    """The configuration. ``tensors``: by their names in the original; ``vocab``: rows of the
    embedding table; ``tied``: there is no head; ``sparse``: the file has predictors, and its model
    computes ReLU."""
    read, count = metadata.read, metadata.read_count
    layers = count("{arch}.block_count")
    later = read("{arch}.nextn_predict_layers", int, 0)
    if not 0 <= later < layers:
        raise metadata.refuse(f"{later} of {layers} layers draft tokens")
    layers -= later  # they are no part of the model
    config: dict[str, Any] = {
        "model_type": stated.model_type,
        "_name_or_path": read("general.name", str, show_path(Path(metadata.file.stem))),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": later,
        "hidden_size": count("{arch}.embedding_length"),
        "num_attention_heads": stated.settings.get("num_attention_heads")
        or count("{arch}.attention.head_count"),
        "vocab_size": vocab,
        "max_position_embeddings": count("{arch}.context_length"),
        "tie_word_embeddings": tied,
        "hidden_act": "relu" if sparse else stated.activation,
        **_read_tokens(metadata, vocab),
    }
    scope = Scope(metadata, config, tensors, stated.layer)
    for table in list_tables(stated):
        if not table.test or scope.compute(table.test):
            config |= deepcopy(table.settings)
            scope.state(table.keys)
    scope.state(stated.keys)
    if stated.sliding_every:
        config["layer_types"] = metadata.read_layer_types(layers, stated.sliding_every)
    # A setting of the family says what its files do not.
    config |= deepcopy(stated.settings)
    return config


def _read_tokens(metadata: Metadata, vocab: int) -> dict[str, Any]:
    marks = find_marks(metadata.file, metadata.values, vocab)
    begin = {} if marks.begin is None else {"bos_token_id": marks.begin}
    return {"eos_token_id": list(marks.ends), **begin}


_NUMBERED = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)\.weight")


def choose_names(architecture: Architecture, tensors: Container[str]) -> Names:
    two = find_architecture("_falcon_40b")
    has_two = architecture.model_type == "falcon" and "blk.0.attn_norm_2.weight" in tensors
    return two.names if has_two and two is not None else architecture.names


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
