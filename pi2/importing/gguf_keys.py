"""Keys by which llama.cpp's files state a model: the reverse of what families' readers take.

And the keys of its tokenizer, the reverse of `pi2.importing.gguf_tokenizer`. How a tokenizer cuts
text is found by cutting a text of many scripts: names of cuts are llama.cpp's. A tokenizer that
lists cannot state is kept whole, under the key that GGUF has for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.config import GGUF_SAMPLING
from pi2.importing.gguf_architectures import divide_llama3
from pi2.importing.gguf_metadata import ModelNames
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
from pi2.model.attention import Attention
from pi2.plan.documents.family import Architecture
from pi2.plan.documents.model import Model
from pi2.plan.toml.expressions import is_expression
from pi2.sandbox.tokenizer import TokenizerRefused, call_library, open_tokenizer
from pi2.tokens.texts import Texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.importing.checkpoint import Checkpoint
    from pi2.plan.documents.model import Model
    from pi2.tokens.table_tokenizer import Coder


@cache
def read_keys() -> Sequence[Mapping[str, Any]]:
    """Tables of gguf_keys.toml: a test, and expressions by keys after the architecture's name."""
    tables: list[dict[str, Any]] = tomli.loads(
        Path(__file__).with_suffix(".toml").read_text("utf-8")
    )["tables"]
    return tables


def describe_keys(
    model: Model, name: str, stated: Architecture, config: Mapping[str, Any]
) -> dict[str, Value]:
    """Keys of the architecture ``name`` and general ones; ``config``: the checkpoint's."""
    names, own = _name_parts(model, name, config), dict[str, Value]()
    for table in read_keys():
        if names.compute(table.get("test", "true")):
            found = ((key, names.compute(text)) for key, text in table["keys"].items())
            own |= {key: value for key, value in found if value is not None}
    # Further keys of the family stand for one of the configuration.
    for key, listed in stated.keys.items():
        place, *default = listed
        value = config.get(key)
        if is_expression(place) or value is None or isinstance(value, list | dict | str):
            continue
        own[place] = type(default[0])(value) if default else int(value)
    general: dict[str, Value] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": model.name or model.id,
    }
    if model.licence:
        general["general.license"] = model.licence
    if model.sampling is not None:
        for key, field in GGUF_SAMPLING.items():
            if field in model.sampling.model_fields_set:
                general[key] = getattr(model.sampling, field)
    return general | {f"{name}.{key}": value for key, value in own.items()}


def _name_parts(model: Model, name: str, config: Mapping[str, Any]) -> ModelNames:
    """What names mean in gguf_keys.toml: keys of the model document, ``name``, ``config`` and its
    ``scaling`` of positions; ``full`` and ``windowed`` are the attention of a layer without and
    with a window."""
    owns = [own for block in model.blocks if (own := block.attention) is not None]
    whole = (own for own in owns if own.window is None and own.rope.kind != "none")
    full = next(whole, owns[0] if owns else None)
    windowed = next((own for own in owns if own.window is not None), full)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    parts = {"name": name, "config": config, "full": full, "windowed": windowed}
    return ModelNames(model, {**parts, "scaling": scaling}, _FUNCTIONS)


def _slides(names: ModelNames, layer: int) -> bool:
    own = names.model.blocks[layer].attention
    return own is not None and own.window is not None


def _shorten(names: ModelNames, slides: list[bool]) -> int | list[bool] | None:
    """The number of layers of which the last has no window, or flags of all layers; None where all
    layers have one."""
    if all(slides):
        return None
    every = slides.index(False) + 1
    is_cycle = slides == [layer % every < every - 1 for layer in range(len(slides))]
    return every if is_cycle else slides


def _rotate(names: ModelNames, own: Attention | None) -> int | None:
    """Elements of a head that turn."""
    return None if own is None else own.rope.count_rotated(own.turned_width)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "attends": lambda names, layer: names.model.blocks[layer].attention is not None,
    "count_shared": lambda names: names.model.moe.count_shared(names.model.shape.ffn),
    "has_router": lambda names, layer: names.model.blocks[layer].ffn.has_router,
    "rotated": _rotate,
    "shorten": _shorten,
    "slides": _slides,
    "width": lambda names, own: None if own is None else own.turned_width,
}


def list_divisors(model: Model) -> dict[str, F32]:
    """Tensors that scale frequencies: vectors [pairs] by name."""
    for block in model.blocks:
        own = block.attention
        if own is None:
            continue
        rope = own.rope
        if rope.kind == "llama3":
            pairs = np.arange(rope.count_rotated(own.turned_width) // 2)
            wavelengths = 2 * np.pi * rope.theta ** (pairs * 2 / own.turned_width)
            limits = rope.low_frequency_factor, rope.high_frequency_factor
            found = divide_llama3(rope.original_context / wavelengths, rope.factor, *limits)
            return {"rope_freqs.weight": found.astype(np.float32)}
        if rope.kind == "longrope":
            lists = {"long": rope.long_factors, "short": rope.short_factors}
            return {
                f"rope_factors_{key}.weight": np.array(values, np.float32)
                for key, values in lists.items()
            }
    return {}


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
