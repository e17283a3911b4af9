"""Reads the values of a checkpoint's ``config.json`` that all families share."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from pi2.diagnostics import UserError
from pi2.plan.documents.common import Sampling

if TYPE_CHECKING:
    from pi2.importing.checkpoint import Checkpoint

Value = TypeVar("Value", int, float, bool, str)

HUGE = 10**300
"""Whole numbers from here on may not fit into a float."""

_MOST_WHOLE = 2**53

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
ACTIVATIONS: Mapping[str, str] = TABLE["activations"]
"""Activations of the model document by their names in configurations."""


def _is_usable(value: object) -> bool:
    """Whether pi2 can compute with a number: finite, and whole ones exact as floats."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is not int or abs(value) <= _MOST_WHOLE


class Config:
    """A configuration whose values are checked as they are read."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self._values = values

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def change(self, values: Mapping[str, Any]) -> Config:
        return Config(self.file, {**self._values, **values})

    def set_default(self, key: str, value: Any) -> Config:
        """The configuration with ``value`` where ``key`` is not stated, or null."""
        return self if self.has(key) else self.change({key: value})

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def read(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """Value of ``key``; `UserError` P544 if it has another type, or no value and default."""
        value: Any = self._values.get(key)
        if value is None:
            if default is None:
                raise self.refuse(f"it does not state {key}")
            return default
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < HUGE else math.inf
        if type(value) is not kind or not _is_usable(value):
            raise self.refuse(f"{key} is {value!r}, expected {_DESCRIBED[kind]}")
        found: Value = value
        return found

    def read_table(self, key: str) -> Config:
        value = self._values.get(key)
        if not isinstance(value, Mapping):
            if value is not None:
                raise self.refuse(f"{key} is {value!r}, expected a table")
            value = {}
        return Config(self.file, value)

    def read_list(self, key: str) -> list[Any]:
        value = self._values.get(key, [])
        return value if isinstance(value, list) else [] if value is None else [value]

    def demand(self, key: str, wanted: bool | str | int, default: bool | str | int) -> None:
        """`UserError` P544 unless ``key`` has the only value that can be computed."""
        value = self._values.get(key)
        value = default if value is None else value
        if value != wanted:
            raise self.refuse(f"{key} is {value!r}, pi2 computes {wanted!r} only")

    def refuse(self, problem: str, help: str = "") -> UserError:
        return UserError.of(
            "P544",
            f"no model document can be made from {self.file}: {problem}",
            help=help or "write the document by hand, see docs/howto/add-a-model.md",
            file=str(self.file),
        )


_DESCRIBED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


ROTATED_SHARE = "gguf_rotated_share"
"""Key of a configuration that pi2 makes of a GGUF file: it counts for any family."""
TURN_FACTOR = "gguf_turn_factor"
"""Another: factor of sines and cosines, in addition to the scaling of positions."""


# Checkpoints whose layers are single blocks: Nemotron-H has attention, Mamba-2 or an FFN in each.
# Blocks that mix tokens and the FFN that follows them are a layer.  A layer may have no mixer, if
# FFNs follow each other, and no FFN, at the end of the model or if attention comes a second time.
_FIXED = (("backbone.embeddings.", "model.embed_tokens."), ("backbone.norm_f.", "model.norm."))

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks that are a layer together."""

    mixers: tuple[str, ...]
    first: int
    """Number of the first block; the others follow it."""
    ffn: str
    """``mlp`` or ``moe``; nothing where there is none."""


def describe_layers(config: Mapping[str, Any]) -> list[Layer] | str:
    """The layers of a configuration's blocks, or the fault of the blocks."""
    stated = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if not isinstance(stated, list | str) or not stated:
        return "it does not state layers_block_type"
    kinds, kinds_of = list[str](), TABLE["blocks"]["kinds"]
    for item in stated:
        if not isinstance(item, str) or item not in kinds_of:
            return f"{item!r} in layers_block_type is no kind of block"
        kinds.append(kinds_of[item])
    return _group(kinds)


def _group(kinds: Sequence[str]) -> list[Layer]:
    layers, mixers, first = [], list[str](), 0
    for number, kind in enumerate(kinds):
        if kind in ("mlp", "moe"):
            layers.append(Layer(tuple(mixers), first, kind))
            mixers, first = [], number + 1
            continue
        if kind == "attention" and kind in mixers:
            layers.append(Layer(tuple(mixers), first, ""))
            mixers, first = [], number
        mixers.append(kind)
    return [*layers, Layer(tuple(mixers), first, "")] if mixers else layers


def list_beginnings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Beginnings of names in the checkpoint, and those by which pi2 knows the tensors; none where
    the blocks are no layers, which is said later."""
    if config.get("model_type") == "kimi_linear":
        return _list_kimi(config)
    if config.get("model_type") != "nemotron_h":
        return []
    layers = describe_layers(config)
    if isinstance(layers, str):
        return []
    found = list(_FIXED)
    for number, layer in enumerate(layers):
        norms = [
            f"inner_layernorm.{n}" if n else "input_layernorm" for n in range(len(layer.mixers))
        ]
        parts = list(zip(layer.mixers, norms, strict=True))
        if layer.ffn:
            parts.append((layer.ffn, "post_attention_layernorm"))
        for block, (kind, norm) in enumerate(parts, start=layer.first):
            old, new = f"backbone.layers.{block}", f"model.layers.{number}"
            owner = TABLE["blocks"]["owners"][kind].format(mixer=block - layer.first)
            found.append((f"{old}.mixer.", f"{new}.{owner}."))
            found.append((f"{old}.norm.", f"{new}.{norm}."))
    return found


def _list_kimi(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """FFNs of Kimi Linear's layers without experts: transformers names them as an MoE model's."""
    count = config.get("num_hidden_layers")
    layers = [f"model.layers.{n}" for n in range(min(count, 1024) if type(count) is int else 0)]
    return [
        (f"{layer}.block_sparse_moe.{part}_proj.", f"{layer}.mlp.{part}_proj.")
        for layer in layers
        for part in ("gate", "up", "down")
    ]


def rename_tensors(
    tensors: Mapping[str, _Tensor], beginnings: Sequence[tuple[str, str]]
) -> dict[str, _Tensor]:
    """The tensors by the names that pi2 knows them by."""
    new_by_old = dict(beginnings)
    renamed = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        starts = (".".join([*words[:count], ""]) for count in (2, 4, 5))
        old = next((start for start in starts if start in new_by_old), "")
        renamed[new_by_old.get(old, "") + name.removeprefix(old)] = tensor
    return renamed


_SAMPLING = "generation_config.json"
GGUF_SAMPLING: Mapping[str, str] = TABLE["gguf_sampling"]
"""What metadata of GGUF files calls them."""


def read_sampling(checkpoint: Checkpoint) -> Sampling | None:
    """Sampling that the checkpoint recommends; None without one, or with ``do_sample`` false."""
    content = checkpoint.read_file(_SAMPLING)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    is_drawn = found.get("do_sample")
    if is_drawn is not True and (is_drawn is not None or found.get("temperature") is None):
        return None
    given: dict[str, Any] = {"temperature": 1.0}
    given |= {key: found[key] for key in GGUF_SAMPLING.values() if found.get(key) is not None}
    for key in given:
        if key not in ("top_k", "penalty_window") and type(given[key]) is int:
            given[key] = float(given[key])
    if given.get("top_k") == -1:
        given["top_k"] = 0  # how some write that all tokens count
    try:
        return Sampling.model_validate(given)
    except ValidationError:
        return None


def make_generation_config(metadata: Mapping[str, Any]) -> bytes | None:
    """``generation_config.json`` of a GGUF file's metadata; None if they recommend nothing."""
    given = {name: metadata[key] for key, name in GGUF_SAMPLING.items() if key in metadata}
    # Numbers of single precision have more digits than people have written.
    rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in given.items()}
    return json.dumps({"do_sample": True, **rounded}).encode() if rounded else None
