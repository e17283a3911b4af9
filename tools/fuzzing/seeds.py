"""Sound files to begin with: golden models, templates of tests, tokenizers of all kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from pi2.arrays import F32

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And twice that?"},
]

TEMPLATE_PIECES = (
    "{% for a in range(99999) %}",
    "{% endfor %}",
    "{% if messages %}",
    "{% else %}",
    "{% endif %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(9) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ 'a' * 10**7 }}",
    "{{ messages }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ '%999999999d'|format(1) }}",
    "{% set ns = namespace(x=messages) %}",
    "{{ [1, 2, 3]|batch(10**9, 0)|list }}",
    "{{ self }}",
    "{{ loop }}",
    "{{ 1 / 0 }}",
    "{{ 2 ** 99999999 }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% break %}",
    "{% raw %}",
    "{# ",
    " #}",
    "{{ ",
    " }}",
    "{%- ",
    " -%}",
    "|list",
    "|wordwrap(1)",
    "|join('x'*10**6)",
    "|sort",
    "|map(attribute='x')",
    ".content",
    "[0]",
    "[::-1]",
    "strftime_now('%Y')",
    "raise_exception('no')",
    "\0",
    "\ud800",
    "\u202e",
)


@cache
def list_configs() -> list[tuple[Path, dict[str, Any]]]:
    """Folders of the golden models, and their configurations."""
    files = sorted((GOLDEN / "models").glob("*/config.json"))
    return [(file.parent, json.loads(file.read_text())) for file in files]


@cache
def list_templates() -> list[str]:
    """Chat templates."""
    own = [file.read_text("utf-8") for file in sorted((GOLDEN / "chat").glob("*.jinja"))]
    return [*own, "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}"]


def write_tokenizer(vocab: int) -> bytes:
    """A ``tokenizer.json`` of ``vocab`` words."""
    words = {f"w{index}": index for index in range(vocab)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    cut = {"type": "WhitespaceSplit"}
    document = {"version": "1.0", "added_tokens": [], "pre_tokenizer": cut, "model": model}
    return json.dumps(parts | document).encode()


RULES: Mapping[str, list[dict[str, Any]]] = {
    "normalizer": [
        {"type": "Lowercase"},
        {"type": "NFC"},
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "ByteLevel"},
        {"type": "Nmt"},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"},
    ],
    "pre_tokenizer": [
        {"type": "Whitespace"},
        {"type": "WhitespaceSplit"},
        {"type": "BertPreTokenizer"},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": True},
        {"type": "UnicodeScripts"},
        {"type": "FixedLength", "length": 3},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        {
            "type": "Split",
            "pattern": {"Regex": "\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)"},
            "behavior": "Isolated",
            "invert": False,
        },
    ],
    "post_processor": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]},
        {
            "type": "RobertaProcessing",
            "sep": ["</s>", 1],
            "cls": ["<s>", 0],
            "trim_offsets": True,
            "add_prefix_space": False,
        },
    ],
    "decoder": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    ],
}
"""Rules of every kind that the tokenizer library knows."""


@cache
def list_tokenizers() -> list[bytes]:
    """A small tokenizer of every kind of model."""
    letters = ["<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,\u2581"]
    letters += ["ab", "the", "##a", "<0x41>"]
    numbers = {token: number for number, token in enumerate(letters)}
    models: list[dict[str, Any]] = [
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": numbers,
            "merges": [["a", "b"]],
        },
        {
            "type": "WordPiece",
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": numbers,
        },
        {"type": "WordLevel", "unk_token": "<unk>", "vocab": numbers},
        {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [[token, -float(number)] for number, token in enumerate(letters)],
            "byte_fallback": True,
        },
    ]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    marks = [
        {"id": number, "content": letters[number], **added, "special": True} for number in (0, 1)
    ]
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    return [
        json.dumps(
            {
                "version": "1.0",
                "truncation": truncation if number % 2 else None,
                "padding": padding if number % 2 else None,
                "added_tokens": marks,
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": model,
            }
        ).encode()
        for number, model in enumerate(models)
    ]


@cache
def read_gguf_seed() -> tuple[dict[str, Any], dict[str, F32]]:
    """Metadata and tensors of a GGUF file of a tiny Llama, with a tokenizer of pieces."""
    folder = GOLDEN / "models/llama"
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(config["num_hidden_layers"]):
        for old, new in parts.items():
            names[f"model.layers.{layer}.{old}.weight"] = f"blk.{layer}.{new}.weight"
    tensors = {names[name]: values.astype("float32") for name, values in weights.items()}
    vocab = config["vocab_size"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*tokens, *(f"\u2581w{index}" for index in range(vocab))][:vocab]
    kinds = [2, 3, 3, *([6] * 256), *([1] * vocab)][:vocab]
    heads = config["num_attention_heads"]
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.context_length": 64,
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config.get("num_key_value_heads", heads),
        "llama.attention.key_length": config.get("head_dim", config["hidden_size"] // heads),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.sliding_window": 0,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config.get("head_dim", config["hidden_size"] // heads),
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.expert_count": 0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(vocab)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": False,
        "tokenizer.chat_template": "{{ messages }}",
        "general.alignment": 32,
    }, tensors
