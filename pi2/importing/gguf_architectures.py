"""Families as GGUF files know them, by ``general.architecture``, and what files say of families
that differ from Llama in more than names."""

import json
import math
import re
from collections import ChainMap
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.caches import show_path
from pi2.importing.config import list_beginnings, rename_tensors
from pi2.importing.families import list_families
from pi2.importing.gguf_decoders import (
    Metadata,
    complete_laguna,
    complete_latent,
    complete_llama,
    complete_mimo,
    complete_minimax_m3,
    complete_mixtures,
    complete_opt,
    complete_turns,
    compute,
    name_kinds,
    read_decoder,
    read_shared_index,
)
from pi2.importing.gguf_states import (
    Scale,
    complete_kimi,
    complete_kinds,
    complete_ling,
    read_qwen_hybrid,
    scale_llama3,
)
from pi2.importing.gguf_tokens import find_marks
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.family import Architecture as Stated
from pi2.plan.toml.expressions import is_expression


def read_gemma3n(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """The configuration, without facts that only tensors show. `UserError` P532."""
    shares = read_shares(metadata, config["num_hidden_layers"])
    return {"hidden_activation": activation, "activation_sparsity_pattern": shares}


def read_shares(metadata: Metadata, layers: int) -> list[float] | None:
    """Shares of gates that cutoffs close: files state how many standard deviations above the mean
    the cutoffs are, and -infinity where there is none."""
    key = "{arch}.activation_sparsity_scale"
    if not metadata.has(key):
        return None
    scales = metadata.read_list(key, layers, "iuf")
    if scales is None or not all(scale < math.inf for scale in scales):
        raise metadata.refuse(f"{key} has a number that is no cutoff")
    from statistics import NormalDist

    # Files have 32 bits of what people wrote in decimals; below -infinity lies nothing.
    return [round(NormalDist().cdf(scale), 6) for scale in scales]


def complete_gemma3n(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """Add what tensors tell: LAuReL's rank, and how many tokens have embeddings of layers."""
    laurel = tensors.get("model.layers.0.laurel.linear_left.weight")
    if laurel is not None:
        config["laurel_rank"] = laurel.shape[0]
    table = tensors.get("model.embed_tokens_per_layer.weight")
    if table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]


_STILL = 1e20
"""Divisors of frequencies from here on turn nothing."""


def read_gemma4(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """The configuration, without facts that only tensors show. `UserError` P532."""
    read, count, layers = metadata.read, metadata.read_count, config["num_hidden_layers"]
    kinds = _read_kinds(metadata, layers)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    kv_heads = metadata.read_counts("{arch}.attention.head_count_kv", layers)
    wide = count("{arch}.attention.key_length")
    head_dim = count("{arch}.attention.key_length_swa", wide)
    heads = {layer: {"head_dim": wide, "num_key_value_heads": kv_heads[layer]} for layer in full}
    own = next((kv_heads[layer] for layer in range(layers) if layer not in full), kv_heads[0])
    return {
        "hidden_activation": activation,
        "num_key_value_heads": own,
        "head_dim": head_dim,
        "per_layer_config": {str(layer): found for layer, found in heads.items()},
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": read("{arch}.rope.freq_base", float, 1_000_000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": read("{arch}.rope.freq_base_swa", float, 10_000.0),
            },
        },
    }


def _read_kinds(metadata: Metadata, layers: int) -> list[str]:
    """Kinds of attention; here one value counts for each layer, as a list of them does."""
    key = "{arch}.attention.sliding_window_pattern"
    flags = metadata.read_list(key, layers, "biu")
    if flags is None and metadata.has(key):
        flags = [metadata.read(key, int)] * layers
    return metadata.read_layer_types(layers, 6) if flags is None else name_kinds(flags)


def complete_gemma4(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """Add facts of tensors: whether keys are values, and tokens with embeddings of layers."""
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    kinds = config["layer_types"][:first_shared]
    full = (layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    config["attention_k_eq_v"] = any(
        f"model.layers.{layer}.self_attn.v_proj.weight" not in tensors for layer in full
    )
    table = tensors.get("model.embed_tokens_per_layer.weight")
    if table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]


def scale_gemma4(config: dict[str, Any], divisors: F32) -> bool:
    """State the part of a head that turns, by divisors of its pairs' frequencies; whether they say
    that and nothing else."""
    turning = int(np.count_nonzero(divisors == 1.0))
    is_known = turning > 0 and (divisors[:turning] == 1.0).all()
    if not is_known or not (divisors[turning:] >= _STILL).all():
        return False
    share = turning / len(divisors)
    config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = share
    return True


_OWN = {
    "mamba": ".mamba.in_proj.weight",
    "attention": ".mixer.q_proj.weight",
    "mlp": ".mixer.up_proj.weight",
    "moe": ".mixer.gate.weight",
}
"""Tensors that tell what a block is."""


def complete_blocks(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    """State the kinds of blocks, as their tensors tell them, and biases; give tensors the names of
    the layers that the blocks are."""
    for key, part in (("use_conv_bias", "conv1d"), ("use_bias", "in_proj")):
        config[key] = any(name.endswith(f".{part}.bias") for name in tensors)
    kinds, blocks = [], config["num_hidden_layers"]
    for block in range(blocks):
        start = f"backbone.layers.{block}"
        found = (kind for kind, end in _OWN.items() if f"{start}{end}" in tensors)
        kinds.append(next(found, "block without tensors"))
        dense = tensors.get(f"{start}{_OWN['mlp']}")
        if dense is not None:
            config["intermediate_size"] = dense.shape[0]
    # Blocks are counted in a file, and become fewer layers.
    config |= {"layers_block_type": kinds, "num_hidden_layers": None}
    whole = {name.replace(".mamba.", ".mixer."): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors |= rename_tensors(whole, list_beginnings(config))


Names = dict[str, str]
"""Name in a Hugging Face checkpoint by name in a GGUF file; ``{layer}`` stands for a number."""
Read = Callable[[Metadata, dict[str, Any], str], dict[str, Any]]
"""Returns a family's additional keys of a configuration; the text is the activation of its FFNs.
Raises `UserError` P532 as `Metadata.read`."""
Complete = Callable[[dict[str, Any], dict[str, SourceTensor]], None]
"""Adds to a configuration what the tensors of a file tell, which are there by their names in the
original, and may give them others."""


_READERS: Mapping[str, Read] = {
    "decoder": read_decoder,
    "gemma3n": read_gemma3n,
    "gemma4": read_gemma4,
    "nothing": lambda metadata, config, activation: {},
    "qwen_hybrid": read_qwen_hybrid,
    "shared_index": read_shared_index,
}
_COMPLETED: Mapping[str, Complete] = {
    "blocks": complete_blocks,
    "gemma3n": complete_gemma3n,
    "gemma4": complete_gemma4,
    "kimi": complete_kimi,
    "kinds": complete_kinds,
    "laguna": complete_laguna,
    "latent": complete_latent,
    "ling": complete_ling,
    "llama": complete_llama,
    "mimo": complete_mimo,
    "minimax_m3": complete_minimax_m3,
    "mixtures": complete_mixtures,
    "opt": complete_opt,
    "turns": complete_turns,
}
"""Functions by the names in families' documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family as GGUF files know it."""

    model_type: str
    names: Names
    stated: Stated

    @property
    def read(self) -> Read:
        return _READERS[self.stated.read]

    @property
    def complete(self) -> Complete | None:
        return _COMPLETED.get(self.stated.complete)

    @property
    def scale(self) -> Scale:
        return scale_gemma4 if self.stated.scale == "gemma4" else scale_llama3


def list_architectures() -> list[str]:
    return sorted(name for name in list_families().architectures if not name.startswith("_"))


def find_architecture(name: str) -> Architecture | None:
    """The architecture of that name; None where none is known."""
    if name not in list_families().architectures:
        return None
    family, table = list_families().architectures[name]
    stated = Stated.model_validate_json(json.dumps({**table, "keys": _collect_keys(name)}))
    names = _collect_names(name)
    return Architecture(model_type=stated.model_type or family, names=names, stated=stated)


def list_suited(family: object) -> list[str]:
    """Architectures of the models of a family, as configurations name it."""
    return [
        name
        for name, (own, table) in list_families().architectures.items()
        if not name.startswith("_")
        and family in (own, table.get("model_type"), *table.get("families", ()))
    ]


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
        "num_attention_heads": architecture.stated.settings.get("num_attention_heads")
        or count("{arch}.attention.head_count"),
        "vocab_size": vocab,
        "max_position_embeddings": count("{arch}.context_length"),
        "tie_word_embeddings": tied,
        **_read_tokens(metadata, vocab),
    }
    activation = "relu" if sparse else architecture.stated.activation
    found = config | architecture.read(metadata, config, activation)
    for name, (own, *default) in architecture.stated.keys.items():
        path, (start, _, key) = f"{{arch}}.{own}", name.rpartition(".")
        target = found.get(start) if start else found
        if target is None:
            continue
        if is_expression(own):
            target[key] = compute(own, metadata, found)
        else:
            target[key] = read(path, type(default[0]), default[0]) if default else count(path)
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
