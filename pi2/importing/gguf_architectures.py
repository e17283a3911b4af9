"""Families as GGUF files know them, by ``general.architecture``: names of tensors, and
configurations, with the scaling of positions that tensors tell."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, F64
from pi2.caches import show_path
from pi2.diagnostics import UserError
from pi2.importing.config import ROTATED_SHARE, TURN_FACTOR
from pi2.importing.families import list_families
from pi2.importing.families.interpreter import expand_names
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_tokens import find_marks
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.tensor import match_name
from pi2.plan.documents.family import Architecture
from pi2.plan.toml.expressions import evaluate, is_expression, list_names, parse_expression

Names = Mapping[str, str]
"""Name in a Hugging Face checkpoint by name in a GGUF file; ``{layer}`` stands for a number."""


def list_architectures() -> list[str]:
    return sorted(name for name in list_families().architectures if not name.startswith("_"))


@cache
def find_architecture(name: str) -> Architecture:
    """The known architecture of that name, with whole `names` and with the keys of those it
    extends."""
    family, table = list_families().architectures[name]
    names, keys = dict[str, str](), dict[str, list[Any]]()
    for base in table.get("extends", () if name.startswith("_") else ("_decoder",)):
        own = find_architecture(base)
        names |= own.names
        keys |= own.keys
    layer = table.get("layer", "model.layers.{layer}")
    names |= dict(expand_names(table.get("names", {}), layer, "blk.{layer}"))
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
        yield from list_tables(own) if "read" in own.model_fields_set else ()
        yield own


def list_suited(family: object) -> Iterator[tuple[str, Architecture]]:
    """Architectures of the models of a family, as configurations name it, by their names."""
    for name, (own, table) in list_families().architectures.items():
        families = (own, table.get("model_type"), *table.get("families", ()))
        if not name.startswith("_") and family in families:
            yield name, find_architecture(name)


@dataclass(frozen=True, slots=True)
class Scope:
    """What names mean in an expression: keys of a file, and of the configuration so far."""

    metadata: Metadata
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    """By their names in the original."""
    layer: str
    """How names of a layer's tensors begin there."""

    @property
    def layers(self) -> int:
        layers: int = self.config["num_hidden_layers"]
        return layers

    def find(self, name: str) -> Any:
        start, _, own = name.partition(".")
        if start != "config":
            return self.metadata.find(name)
        found: Any = self.config
        for part in own.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def call(self, name: str, arguments: list[Any]) -> Any:
        return _FUNCTIONS[name](self, *arguments)

    def compute(self, text: str) -> Any:
        """The value of a family's expression; `UserError` P532 where the file lacks a key of it."""
        tree, metadata = parse_expression(text), self.metadata
        try:
            return evaluate(tree, self)
        except (TypeError, ValueError, ArithmeticError, LookupError):
            own = [name for name in list_names(tree) if not name.startswith("config.")]
            values = {name: self.find(name) for name in own}
            stated = (f"{metadata.architecture}.{name} is {values[name]!r}" for name in values)
            missing = (
                f"it does not state {metadata.architecture}.{n}"
                for n in values
                if values[n] is None
            )
            problem = next(missing, f"{' and '.join(stated)}, which makes no {text.strip('= ')}")
            raise metadata.refuse(problem) from None

    def state(self, keys: Mapping[str, list[Any]]) -> None:
        """Put ``keys`` of a family's document into the configuration; one of a table that the
        configuration has not is left out.  Raises as `compute` and `Metadata.read`."""
        for name, (own, *default) in keys.items():
            place, _, key = name.rpartition(".")
            target = self.find(f"config.{place}") if place else self.config
            if target is not None:
                target[key] = self._read(own, *default)

    def _read(self, own: str, default: Any = None) -> Any:
        if is_expression(own):
            return self.compute(own)
        path = f"{{arch}}.{own}"
        if is_expression(default):
            default = self.compute(default)
        if default is None:
            return self.metadata.read_count(path)
        return self.metadata.read(path, type(default), default)


def _count(scope: Scope, whole: int, parts: int = 1) -> int:
    """A number of 1 or more, of each of ``parts``."""
    if whole < 1 or whole % parts:
        raise ValueError
    return whole // parts


def _list(scope: Scope, key: str, count: int | None = None) -> list[Any] | None:
    """What a key has for every layer, or ``count`` values; one counts for all layers."""
    path = key if key in scope.metadata.values else f"{{arch}}.{key}"
    found = scope.metadata.read_list(path, scope.layers if count is None else count, "biuf")
    one = scope.metadata.find(key) if found is None else None
    return found if one is None else [one] * scope.layers


def _has(scope: Scope, end: str, layer: int | None = None) -> bool:
    """Whether the name of a tensor ends so, or a ``layer`` has one of that name."""
    if layer is None:
        return any(name.endswith(end) for name in scope.tensors)
    return scope.layer.replace("{layer}", str(layer)) + end in scope.tensors


def _count_rows(scope: Scope, end: str) -> int | None:
    """Rows of the first tensor whose name ends so."""
    found = (own.shape[0] for name, own in scope.tensors.items() if name.endswith(end))
    return next(found, None)


def _find_share(scope: Scope, deviations: float) -> float:
    """The share of a normal distribution below so many standard deviations above its mean."""
    from statistics import NormalDist

    if not deviations < math.inf:
        raise ValueError
    # Files have 32 bits of what people wrote in decimals; below -infinity lies nothing.
    return round(NormalDist().cdf(deviations), 6)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "count": _count,
    "first": lambda scope, *values: next((own for own in values if own is not None), None),
    "has": _has,
    "listed": _list,
    "rows": _count_rows,
    "share_below": _find_share,
    "softplus": lambda scope, number: float(np.logaddexp(number, 0)),
}
"""What expressions of `gguf` tables may call."""


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
    marks = find_marks(metadata.file, metadata.values, vocab)
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
        "eos_token_id": list(marks.ends),
    }
    if marks.begin is not None:
        config["bos_token_id"] = marks.begin
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


_NUMBERED = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)\.weight")


def choose_names(architecture: Architecture, *, has_two: bool) -> Names:
    """Names of tensors; ``has_two``: whether layers have two norms, as some models of Falcon do."""
    is_large = has_two and architecture.model_type == "falcon"
    return find_architecture("_falcon_40b").names if is_large else architecture.names


def find_place(names: Names, name: str) -> tuple[str, str] | None:
    """What a Hugging Face checkpoint calls the tensor ``name`` of a file, perhaps with ``{expert}``
    in it; and the file's name without the layer's number, such as ``attn_q.weight``.  None if it
    has no place there."""
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        return (names[name], name) if name in names else None
    layer, kind = numbered.groups()
    expert = _EXPERT.fullmatch(kind)
    own = kind if expert is None else f"{expert[1]}.{{expert}}.weight"
    pattern = names.get(f"blk.{{layer}}.{own}")
    if pattern is None:
        return None
    # Only a file's tensor of one expert has its number.
    number = "{expert}" if expert is None else expert[2]
    return pattern.replace("{layer}", layer).replace("{expert}", number), kind


def name_in_file(names: Names, wanted: str) -> str:
    """A file's name of the Hugging Face tensor ``wanted``; ``wanted`` itself if there is none."""
    for name, pattern in names.items():
        found = match_name(pattern).fullmatch(wanted)
        if found is not None:
            for key, number in found.groupdict().items():
                name = name.replace(f"{{{key}}}", number)
            return name
    return wanted


_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LONG_FAMILIES = ("granite", "minicpm3", "phi3", "phimoe")
"""Families with LongRoPE; as Granite pi2 reads MiniCPM."""
POSITIONS = (_FREQUENCIES, _LONG, _SHORT)
"""Tensors that `scale_positions` reads."""


def scale_positions(
    config: dict[str, Any], metadata: Metadata, read: Callable[[str], F32 | None]
) -> None:
    """State the scaling in ``config``; ``read`` gives a tensor [pairs] or None. P544, P532."""
    divisors = read(_FREQUENCIES)
    stated = config.get("rope_scaling")
    if divisors is not None and not _scale(config, divisors):
        raise _refuse_tensor(metadata.file, _FREQUENCIES)
    if stated is not None and config["rope_scaling"] is not stated:
        raise _refuse_both(metadata, _FREQUENCIES)
    long, short = read(_LONG), read(_SHORT)
    if long is None and short is None:
        return
    if long is None or short is None or config["model_type"] not in _LONG_FAMILIES:
        raise _refuse_tensor(metadata.file, _SHORT if long is None else _LONG)
    if stated is not None and (stated["rope_type"], stated["factor"]) != ("longrope", 1.0):
        raise _refuse_both(metadata, _LONG)
    context = metadata.read_count("{arch}.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": context,
        # Files have 32 bits of what people wrote in decimals.
        "long_factor": [float(str(number)) for number in long],
        "short_factor": [float(str(number)) for number in short],
    }
    if metadata.has("{arch}.rope.scaling.attn_factor"):
        # It is all that they are multiplied by.
        scaling["attention_factor"] = config.pop(TURN_FACTOR)
    config |= {"rope_scaling": scaling, "original_max_position_embeddings": context}


def _refuse_both(metadata: Metadata, name: str) -> UserError:
    return metadata.refuse(
        f"{metadata.architecture}.rope.scaling scales positions, and so does tensor {name!r}"
    )


_STILL = 1e20
"""Divisors of frequencies from here on turn nothing."""


def _scale(config: dict[str, Any], divisors: F32) -> bool:
    """State in a configuration what divisors of frequencies [pairs] say; whether that is known."""
    full = config.get("rope_parameters", {}).get("full_attention", {})
    if full.get("rope_type") != "proportional":
        return scale_llama3(config, divisors)
    turning = int(np.count_nonzero(divisors == 1.0))
    is_known = turning > 0 and bool((divisors[:turning] == 1.0).all())
    full["partial_rotary_factor"] = turning / len(divisors)
    return is_known and bool((divisors[turning:] >= _STILL).all())


def scale_llama3(config: dict[str, Any], divisors: F32) -> bool:
    """State the llama3 scaling; whether it is one."""
    theta, size = config.get("rope_theta", 10000.0), config.get("head_dim", 1)
    full = config.get("rope_parameters", {}).get("full_attention", {})
    size = int(size * full.get("partial_rotary_factor", config.get(ROTATED_SHARE, 1.0)))
    # Elements that do not turn may have ones; what scales positions otherwise is no part of it.
    is_known = full.get("rope_type", "default") == "default"
    is_known &= bool((divisors[size // 2 :] == 1.0).all())
    scaling = _recover_llama3(divisors[: size // 2], theta, size) if is_known else None
    if scaling:
        config["rope_scaling"] = scaling
        full.update(scaling)
    return scaling is not None


def divide_llama3(turns: F64, factor: float, low: float, high: float) -> F64:
    """Divisors of the frequencies of pairs that turn so often within the original context."""
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= low
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _recover_llama3(factors: F32, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling with divisors ``factors`` [head_dim / 2] (``rope_freqs.weight``); {} for
    none, None if unknown."""
    if (factors == 1.0).all():
        return {}
    if theta <= 1.0 or not (np.isfinite(factors) & (factors >= 1.0)).all():
        return None
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) * 2 / head_dim)
    low = 1.0
    # Llama 4 has nothing between the two.
    for original, high in product((2**power for power in range(4, 20)), (4.0, 1.0, 32.0)):
        expected = divide_llama3(original / wavelengths, factor, low, high)
        if np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _refuse_tensor(file: Path, name: str) -> UserError:
    return UserError.of(
        "P544",
        f"tensor {name!r} in {file} scales positions in a way that is unknown",
        help="convert the original checkpoint",
        file=str(file),
    )
