"""Keys by which llama.cpp's files state a model: the reverse of what families' readers take.

And the keys of its tokenizer, the reverse of `pi2.importing.gguf_tokenizer`. How a tokenizer cuts
text is found by cutting a text of many scripts: names of cuts are llama.cpp's. A tokenizer that
lists cannot state is kept whole, under the key that GGUF has for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.gguf_tokenizer import make_table, make_tokenizer, parse_config
from pi2.importing.gguf_tokens import (
    BYTE,
    CONTROL,
    CUTS,
    ORDINARY,
    OWN,
    TABLE,
    UNKNOWN,
    UNUSED,
    WHOLE,
    write_expression,
)
from pi2.importing.gguf_writer import Value
from pi2.model.blocks import find_attention
from pi2.plan.documents.family import Architecture as Stated
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.toml.expressions import is_expression
from pi2.sandbox.tokenizer import TokenizerRefused, call_library, open_tokenizer
from pi2.tokens.texts import Texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.importing.checkpoint import Checkpoint
    from pi2.plan.documents.model import Model
    from pi2.tokens.table_tokenizer import Coder


_GATING = {"softmax": 1, "sigmoid": 2, "root_softplus": 4}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "penalty_window",
}


def describe_keys(
    model: Model, name: str, stated: Stated, config: Mapping[str, Any]
) -> dict[str, Value]:
    """Keys of the architecture ``name`` and general ones; ``config``: the checkpoint's."""
    own = {
        **_describe_sizes(model, name, config),
        **_describe_attention(model),
        **_describe_positions(model, name),
        **_describe_experts(model, name),
        **_describe_states(model),
        **_describe_factors(model, name, stated, config),
    }
    general: dict[str, Value] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": model.name or model.id,
    }
    if model.licence:
        general["general.license"] = model.licence
    if model.sampling is not None:
        for key, field in _SAMPLING.items():
            if field in model.sampling.model_fields_set:
                general[f"general.sampling.{key}"] = getattr(model.sampling, field)
    return general | {f"{name}.{key}": value for key, value in own.items()}


def _describe_sizes(model: Model, name: str, config: Mapping[str, Any]) -> dict[str, Value]:
    shape, moe, norm = model.shape, model.moe, model.norm
    width = shape.ffn
    if moe is not None and moe.dense_layers and moe.dense_ffn:
        width = moe.dense_ffn
    kind = "rms_" if norm.kind == "rmsnorm" or "rms_norm_eps" in config else ""
    found: dict[str, Value] = {
        "vocab_size": shape.vocab,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": width,
        f"attention.layer_norm_{kind}epsilon": norm.epsilon,
    }
    if name == "stablelm":
        found["use_parallel_residual"] = model.residual == "parallel"
    return found


def _describe_attention(model: Model) -> dict[str, Value]:
    shape, own = model.shape, model.attention
    count = shape.kv_heads if own.latent is None else 1
    kv_heads: Value = count
    attends = [block.attention is not None for block in model.blocks]
    # Files of Qwen state every how many layers attend.
    is_qwen = any(kind == "delta" for kind in model.layers.kinds) if model.layers else False
    if not all(attends) and not (is_qwen and own.output_gate):
        kv_heads = [count * has for has in attends]
    found: dict[str, Value] = {"attention.head_count": shape.heads}
    if own.latent is not None:
        latent = own.latent
        found |= {
            "attention.head_count_kv": kv_heads,
            "attention.kv_lora_rank": latent.rank,
            "attention.key_length": latent.kept,
            "attention.value_length": latent.rank,
            "attention.key_length_mla": latent.key,
            "attention.value_length_mla": shape.head_dim,
        }
        if latent.query_rank is not None:
            found["attention.q_lora_rank"] = latent.query_rank
    else:
        found |= {
            "attention.head_count_kv": kv_heads,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
        }
    optional: dict[str, float | None] = {
        "attention.clamp_kqv": own.clip,
        "attn_logit_softcapping": own.softcap,
        "final_logit_softcapping": model.logit_softcap,
    }
    found |= {key: value for key, value in optional.items() if value is not None}
    if own.sliding_window is not None:
        found["attention.sliding_window"] = own.sliding_window
        slides = [
            block.attention is not None and block.attention.window is not None
            for block in model.blocks
        ]
        found["attention.sliding_window_pattern"] = slides
        every = len(slides) if all(slides) else slides.index(False) + 1
        if slides == [layer % every < every - 1 for layer in range(len(slides))]:
            found["attention.sliding_window_pattern"] = every
        if all(slides):
            del found["attention.sliding_window_pattern"]
    return found


def _describe_positions(model: Model, name: str) -> dict[str, Value]:
    layers = [layer for layer, block in enumerate(model.blocks) if block.attention is not None]
    if not layers:
        return {}
    owns = [find_attention(model, layer) for layer in layers]
    whole = next((own for own in owns if own.window is None and own.rope.kind != "none"), owns[0])
    found: dict[str, Value] = {
        "rope.freq_base": whole.rope.theta,
        "rope.dimension_count": whole.rope.count_rotated(whole.turned_width) or whole.turned_width,
    }
    slides = next((own for own in owns if own.window is not None), whole)
    if slides.rope.theta != whole.rope.theta:
        found["rope.freq_base_swa"] = slides.rope.theta
    rope = whole.rope
    if rope.kind in ("linear", "yarn", "longrope"):
        found["rope.scaling.type"] = rope.kind
    if rope.kind in ("linear", "yarn"):
        found["rope.scaling.factor"] = rope.factor
    if rope.kind == "longrope":
        found.pop("rope.scaling.type")
        if rope.attention_factor is not None:
            found["rope.scaling.attn_factor"] = rope.attention_factor
    if rope.kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope.original_context
    if rope.kind == "yarn":
        found["rope.scaling.yarn_beta_fast"] = rope.fast_rotations
        found["rope.scaling.yarn_beta_slow"] = rope.slow_rotations
    if name == "granitehybrid":
        found["rope.scaling.finetuned"] = rope.kind != "none"
    if name.startswith("qwen35"):
        pairs = rope.count_rotated(whole.turned_width) // 2
        found["rope.dimension_sections"] = [pairs - pairs // 3 * 2, pairs // 3, pairs // 3, 0]
    return found


def _describe_experts(model: Model, name: str) -> dict[str, Value]:
    moe, ffn = model.moe, model.shape.ffn
    if moe is None or moe.router == "none":
        return {}
    found: dict[str, Value] = {
        "expert_count": moe.experts,
        "expert_used_count": moe.active_experts,
        "expert_feed_forward_length": ffn,
        "expert_weights_norm": moe.normalise_weights,
        "expert_weights_scale": moe.scaling,
    }
    if moe.router in _GATING:
        found["expert_gating_func"] = _GATING[moe.router]
    if moe.shared_experts:
        found["expert_shared_count"] = moe.shared_experts
        found["expert_shared_feed_forward_length"] = moe.count_shared(ffn)
    first = next((n for n, block in enumerate(model.blocks) if block.ffn.has_router), 0)
    if first:
        found["leading_dense_block_count"] = first
    if moe.groups > 1:
        found["expert_group_count"] = moe.groups
        found["expert_group_used_count"] = moe.active_groups
    if name == "ernie4_5-moe":
        routed = [n for n, block in enumerate(model.blocks) if block.ffn.has_router]
        found["interleave_moe_layer_step"] = routed[1] - routed[0] if len(routed) > 1 else 1
    return found


def _describe_states(model: Model) -> dict[str, Value]:
    own = model.recurrence
    if model.convolution is not None:
        return {"shortconv.l_cache": model.convolution.kernel}
    if own is None:
        return {}
    return {
        "ssm.conv_kernel": own.kernel,
        "ssm.state_size": own.key_dim,
        "ssm.group_count": own.key_heads,
        "ssm.time_step_rank": own.value_heads,
        "ssm.inner_size": own.width,
    }


def _describe_factors(
    model: Model, name: str, stated: Stated, config: Mapping[str, Any]
) -> dict[str, Value]:
    """Constant factors, and further keys of the family that stand for one of the configuration."""
    found: dict[str, Value] = {}
    if name in ("command-r", "cohere2"):
        found["logit_scale"] = model.multipliers.logits
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if model.attention.latent is not None and "mscale_all_dim" in scaling:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    for key, listed in stated.keys.items():
        own, *default = listed
        value = config.get(key)
        if is_expression(own) or value is None or isinstance(value, list | dict | str):
            continue
        found[own] = type(default[0])(value) if default else int(value)
    return found


def list_divisors(model: Model) -> dict[str, F32]:
    """Tensors that scale frequencies: vectors [pairs] by name."""
    for block in model.blocks:
        own = block.attention
        if own is None:
            continue
        rope = own.rope
        if rope.kind == "llama3":
            return {"rope_freqs.weight": _divide_llama3(rope, own.turned_width)}
        if rope.kind == "longrope":
            lists = {"long": rope.long_factors, "short": rope.short_factors}
            return {
                f"rope_factors_{key}.weight": np.array(values, np.float32)
                for key, values in lists.items()
            }
    return {}


def _divide_llama3(rope: Rope, width: int) -> F32:
    pairs = np.arange(rope.count_rotated(width) // 2)
    wavelengths = 2 * np.pi * rope.theta ** (pairs * 2 / width)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    turns = rope.original_context / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns >= low
    return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)


_SPACE = "\u2581"
_TEXT: str = TABLE["sample"]["text"]
"""Text that tokenizers which differ divide in different ways."""


def describe_vocabulary(source: Checkpoint, model: Model) -> dict[str, Value | list[str]]:
    """Keys about the tokenizer of a checkpoint and its chat templates.

    Raises `UserError` P543 if the checkpoint has no tokenizer."""
    content = source.read_tokenizer()
    if content is None:
        raise UserError.of("P543", f"{source.folder} has no tokenizer")
    ids = model.tokenizer
    keys: dict[str, Any] = {}
    named = {"bos": ids.bos, "eos": next(iter(ids.eos), None), "eot": next(iter(ids.eos[1:]), None)}
    config = parse_config(source.read_file("tokenizer_config.json"))
    tokens = json.loads(content)
    named |= {
        key: _find_number(tokens, config.get(f"{name}_token"))
        for key, name in (("unknown", "unk"), ("padding", "pad"))
    }
    keys |= {f"{key}_token_id": number for key, number in named.items() if number is not None}
    keys["add_bos_token"] = ids.add_bos
    stated = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    lists = _describe_lists(content, tokens, model.shape.vocab, stated)
    if lists is None:
        lists = {"tokenizer.ggml.model": "no_vocab", WHOLE: content}
    template = source.read_template() or config.get("chat_template")
    if isinstance(template, str | bytes):
        lists["tokenizer.chat_template"] = template
    others = source.list_templates()
    if others:
        lists["tokenizer.chat_templates"] = list(others)
        lists |= {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    return stated | lists


def _find_number(tokens: Mapping[str, Any], stated: object) -> int | None:
    text = stated.get("content") if isinstance(stated, dict) else stated
    for own in tokens.get("added_tokens", []):
        if own["content"] == text:
            return int(own["id"])
    found = tokens["model"].get("vocab") if text is not None else None
    return found.get(text) if isinstance(found, dict) else None


def _describe_lists(
    content: bytes, tokens: Mapping[str, Any], vocab: int, stated: Mapping[str, Value]
) -> dict[str, Any] | None:
    """Lists that stand for the tokenizer; None if none is known that does."""
    kind = tokens["model"].get("type")
    if kind != "BPE" or not isinstance(tokens["model"].get("vocab"), dict):
        return None
    try:
        own = open_tokenizer(content)
        for keys in _list_candidates(tokens, vocab, own):
            if call_library(partial(_divides_alike, own, _open_lists({**stated, **keys}))):
                return keys
    except (TokenizerRefused, UserError):
        return None
    return None


def _open_lists(metadata: Mapping[str, Any]) -> Coder:
    """The tokenizer of lists, with a compact table where that can be."""
    kept = dict(metadata)
    for key in ("tokens", "merges"):
        if f"tokenizer.ggml.{key}" in kept:
            kept[f"tokenizer.ggml.{key}"] = Texts.join(kept[f"tokenizer.ggml.{key}"])
    file = Path("tokenizer")
    return make_table(file, kept) or open_tokenizer(make_tokenizer(file, kept))


def _divides_alike(one: Coder, other: Coder) -> bool:
    texts = [_TEXT, *_TEXT.split("\n"), "a", " a", "<s>", ""]
    divide = [[own.encode(text).ids for text in texts] for own in (one, other)]
    return divide[0] == divide[1]


def _list_candidates(
    tokens: Mapping[str, Any], vocab: int, own: Tokenizer
) -> Iterator[dict[str, Any]]:
    names, kinds = _list_tokens(tokens, vocab)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": kinds}
    merges = [
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair)
        for pair in tokens["model"].get("merges", [])
    ]
    if BYTE in kinds:
        first: dict[str, float] = {}
        for rank, (left, right) in enumerate(merges):
            first.setdefault(left + right, -1.0 - rank)
        scores = [
            first.get(name, -1e9 if kind == ORDINARY else 0.0)
            for name, kind in zip(names, kinds, strict=True)
        ]
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        for leads in (True, False):
            yield keys | {"tokenizer.ggml.add_space_prefix": leads}
        keys.pop("tokenizer.ggml.scores")
        keys |= {"tokenizer.ggml.model": "gemma4"}
        keys["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
        yield keys
        return
    keys |= {"tokenizer.ggml.model": "gpt2"}
    keys["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    whole = bool(tokens["model"].get("ignore_merges"))
    for name, cut in CUTS.items():
        if (
            name
            and cut.bytes_as_letters
            and cut.whole_words == whole
            and _cuts_alike(own, cut.expressions)
        ):
            yield keys | {"tokenizer.ggml.pre": name}


def _cuts_alike(own: Tokenizer, expressions: Sequence[str]) -> bool:
    """Whether a tokenizer divides the text into the words that expressions find."""
    from tokenizers import Regex, pre_tokenizers

    splits = [
        pre_tokenizers.Split(Regex(write_expression(each)), "isolated") for each in expressions
    ]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Sequence([*splits, letters])
    if own.pre_tokenizer is None:
        return False
    text = _TEXT if own.normalizer is None else own.normalizer.normalize_str(_TEXT)
    found: bool = cut.pre_tokenize_str(text) == own.pre_tokenizer.pre_tokenize_str(text)
    return found


def _list_tokens(tokens: Mapping[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens; numbers without a text have one that is unused."""
    own = tokens["model"]
    names = [f"[PAD{number}]" for number in range(vocab)]
    kinds = [UNUSED] * vocab
    bytes_of = {f"<0x{byte:02X}>" for byte in range(256)} if own.get("byte_fallback") else set()
    for text, number in own["vocab"].items():
        names[number] = text
        kinds[number] = BYTE if text in bytes_of else ORDINARY
        if text == own.get("unk_token"):
            kinds[number] = UNKNOWN
    for added in tokens.get("added_tokens", []):
        names[added["id"]] = added["content"]
        if kinds[added["id"]] != UNKNOWN:
            kinds[added["id"]] = CONTROL if added["special"] else OWN
    return names, kinds
