"""Families as GGUF files know them, by ``general.architecture``."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pi2.caches import show_path
from pi2.importing.config import SPLIT_EXPERTS
from pi2.importing.gguf_decoders import (
    Metadata,
    complete_latent,
    complete_llama,
    complete_opt,
    read_cohere,
    read_decoder,
    read_falcon,
    read_gpt_oss,
    read_llama,
    read_mixture,
    read_olmo2,
    read_opt,
)
from pi2.importing.gguf_families import (
    complete_gemma3n,
    complete_gemma4,
    join_blocks,
    read_bitnet,
    read_gemma2,
    read_gemma3,
    read_gemma3n,
    read_gemma4,
    read_granite,
    read_granite_hybrid,
    read_llama4,
    read_nemotron_hybrid,
    scale_gemma4,
)
from pi2.importing.gguf_names import (
    BITNET,
    DECODER,
    ERNIE_MIXTURE,
    FALCON,
    FALCON_40B,
    GEMMA2,
    GEMMA3N,
    GEMMA4,
    GLM_MIXTURE,
    GPT_OSS,
    GRANITE,
    GRANITE_HYBRID,
    HUNYUAN,
    HUNYUAN_MIXTURE,
    LATENT,
    LFM2,
    LFM2_MIXTURE,
    LLAMA4,
    MINIMAX,
    MIXTURE,
    NEMOTRON_HYBRID,
    OLMO2,
    OPT,
    PHI3,
    PHI_MIXTURE,
    QWEN2,
    QWEN_HYBRID,
    QWEN_HYBRID_MIXTURE,
    QWEN_MIXTURE,
    SEED_OSS,
    SIGMOID_MIXTURE,
    STARCODER2,
    Names,
)
from pi2.importing.gguf_states import Scale, list_kinds, read_lfm2, read_qwen_hybrid, scale_llama3
from pi2.importing.gguf_tokenizer import find_marks
from pi2.importing.safetensors_file import SourceTensor

Read = Callable[[Metadata, dict[str, Any], str], dict[str, Any]]
"""Returns the keys that a family adds to a configuration, which has those of all families; the text
is the activation of its FFNs.  Raises `UserError` P532 as `Metadata.read`."""
Complete = Callable[[dict[str, Any], dict[str, SourceTensor]], None]
"""Adds to a configuration what the tensors of a file tell, which are there by their names in the
original, and may give them others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family as GGUF files know it."""

    model_type: str
    """The family's name in ``config.json``."""
    names: Names = field(default_factory=lambda: DECODER)
    activation: str = "silu"
    """Activation of the models of this family, which their files do not state."""
    permutes: bool = False
    """Whether rows of queries and keys are in the order of pairs that follow each other."""
    norm_offset: float = 0.0
    """Number that the file has added to the weights of norms."""
    tiles_values: bool = False
    """Whether value heads that share a key head are apart (`pi2.importing.gguf_states`)."""
    settings: dict[str, object] = field(default_factory=dict)
    """Further keys of the configuration, which files of this family do not state."""
    read: Read = read_decoder
    """What reads the configuration of this family."""
    complete: Complete | None = None
    """What adds that of it which tensors tell."""
    scale: Scale = scale_llama3
    """What says how divisors of frequencies scale positions."""


def make_config(
    metadata: Metadata, architecture: Architecture, *, vocab: int, tied: bool, sparse: bool
) -> dict[str, Any]:
    """The configuration.  ``vocab``: rows of the embedding table; ``tied``: there is no head;
    ``sparse``: the file has predictors, so that its model computes ReLU."""
    read, count = metadata.read, metadata.read_count
    layers = count("{arch}.block_count")
    later = read("{arch}.nextn_predict_layers", int, 0)
    if 0 < later < layers:
        layers -= later  # they draft, and are no part of the model
    else:
        later = 0
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
    activation = "relu" if sparse else architecture.activation
    # A setting of the family says what its files do not.
    return config | architecture.read(metadata, config, activation) | architecture.settings


def _read_tokens(metadata: Metadata, vocab: int) -> dict[str, Any]:
    marks = find_marks(metadata.file, metadata.values, vocab)
    begin = {} if marks.begin is None else {"bos_token_id": marks.begin}
    return {"eos_token_id": list(marks.ends), **begin}


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama", permutes=True, read=read_llama, complete=complete_llama
    ),
    "llama4": Architecture(
        model_type="llama4_text", names=LLAMA4, settings={SPLIT_EXPERTS: True}, read=read_llama4
    ),
    "bitnet": Architecture(model_type="bitnet", names=BITNET, read=read_bitnet),
    "bamboo": Architecture(model_type="bamboo", permutes=True, activation="relu"),
    "qwen2": Architecture(model_type="qwen2", names=QWEN2),
    "qwen3": Architecture(model_type="qwen3"),
    "gemma": Architecture(model_type="gemma", activation="gelu_pytorch_tanh", norm_offset=1.0),
    "phi3": Architecture(model_type="phi3", names=PHI3),
    "phimoe": Architecture(model_type="phimoe", names=PHI_MIXTURE),
    "stablelm": Architecture(model_type="stablelm"),
    "starcoder2": Architecture(
        model_type="starcoder2", names=STARCODER2, activation="gelu_pytorch_tanh"
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        names=GEMMA2,
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        read=read_gemma2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        names=GEMMA2,
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        read=read_gemma3,
    ),
    "gemma3n": Architecture(
        model_type="gemma3n_text",
        names=GEMMA3N,
        activation="gelu_pytorch_tanh",
        read=read_gemma3n,
        complete=complete_gemma3n,
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        names=GEMMA4,
        activation="gelu_pytorch_tanh",
        read=read_gemma4,
        complete=complete_gemma4,
        scale=scale_gemma4,
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", names=QWEN_MIXTURE, settings={"norm_topk_prob": False}
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", names=QWEN_MIXTURE, settings={"norm_topk_prob": True}
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        names=QWEN_HYBRID,
        norm_offset=1.0,
        tiles_values=True,
        read=read_qwen_hybrid,
        complete=list_kinds,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        names=QWEN_HYBRID_MIXTURE,
        norm_offset=1.0,
        tiles_values=True,
        read=read_qwen_hybrid,
        complete=list_kinds,
    ),
    # Its projections are apart in a file, as those of Qwen3.5 are; nothing else differs.
    "qwen3next": Architecture(
        model_type="qwen3_5_moe_text",
        names=QWEN_HYBRID_MIXTURE,
        norm_offset=1.0,
        read=read_qwen_hybrid,
        complete=list_kinds,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        names=LFM2,
        settings={"block_auto_adjust_ff_dim": False},
        read=read_lfm2,
        complete=list_kinds,
    ),
    "arcee": Architecture(model_type="arcee", permutes=True, activation="relu2"),
    "seed_oss": Architecture(model_type="seed_oss", names=SEED_OSS),
    "smollm3": Architecture(model_type="smollm3", permutes=True),
    "granite": Architecture(model_type="granite", permutes=True, read=read_granite),
    "granitemoe": Architecture(
        model_type="granitemoeshared",
        names=GRANITE,
        permutes=True,
        settings={SPLIT_EXPERTS: True},
        read=read_granite,
    ),
    "olmo2": Architecture(model_type="olmo2", names=OLMO2, read=read_olmo2),
    "deepseek2": Architecture(model_type="deepseek_v2", names=LATENT, complete=complete_latent),
    "glm4moe": Architecture(model_type="glm4_moe", names=GLM_MIXTURE),
    "dots1": Architecture(model_type="dots1", names=SIGMOID_MIXTURE),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "ernie4_5-moe": Architecture(model_type="ernie4_5_moe", names=ERNIE_MIXTURE),
    "minimax-m2": Architecture(model_type="minimax_m2", names=MINIMAX, read=read_mixture),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense", names=HUNYUAN),
    "hunyuan-moe": Architecture(
        model_type="hunyuan_v1_moe", names=HUNYUAN_MIXTURE, read=read_mixture
    ),
    "command-r": Architecture(model_type="cohere", read=read_cohere),
    "cohere2": Architecture(model_type="cohere2", read=read_cohere),
    "nemotron": Architecture(model_type="nemotron", activation="relu2", norm_offset=1.0),
    "nemotron_h": Architecture(
        model_type="nemotron_h",
        names=NEMOTRON_HYBRID,
        activation="relu2",
        permutes=True,
        read=read_nemotron_hybrid,
        complete=join_blocks,
    ),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h",
        names=NEMOTRON_HYBRID,
        activation="relu2",
        permutes=True,
        read=read_nemotron_hybrid,
        complete=join_blocks,
    ),
    "olmoe": Architecture(
        model_type="olmoe", names=QWEN_MIXTURE, settings={"norm_topk_prob": False}
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        names=LFM2_MIXTURE,
        settings={"norm_topk_prob": True},
        read=read_lfm2,
        complete=list_kinds,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss", names=GPT_OSS, settings={SPLIT_EXPERTS: True}, read=read_gpt_oss
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        names=GRANITE_HYBRID,
        permutes=True,
        settings={SPLIT_EXPERTS: True},
        read=read_granite_hybrid,
        complete=list_kinds,
    ),
    "falcon": Architecture(model_type="falcon", names=FALCON, activation="gelu", read=read_falcon),
    "opt": Architecture(
        model_type="opt", names=OPT, activation="relu", read=read_opt, complete=complete_opt
    ),
}
"""Families by ``general.architecture``."""

_NUMBERED = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)\.weight")


def choose_names(architecture: Architecture, tensors: Container[str], *, mixed: bool) -> Names:
    """Names of a file's family; ``mixed``: it has experts."""
    if architecture.model_type == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return FALCON_40B
    return MIXTURE if mixed and architecture.model_type == "llama" else architecture.names


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
    """What a file calls the tensor ``wanted`` of a Hugging Face checkpoint; ``wanted`` itself if
    no file has it."""
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
