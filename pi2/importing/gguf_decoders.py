"""What GGUF files of decoders state, under configuration names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.config import NORMALISED_EXPERTS, ROTATED_SHARE, TURN_FACTOR
from pi2.importing.decoded_tensor import DecodedTensor, describe_decoded, refuse_shape
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.toml.expressions import evaluate, list_names, parse_expression

_MOST_FLOAT32 = float(np.finfo(np.float32).max)


class Metadata:
    """Metadata whose values are checked as they are read."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values
        self.used = set[str]()
        """Keys whose values were requested."""
        self.architecture = ""
        self.architecture = self.read("general.architecture", str)

    def read(self, key: str, kind: type[object], default: Any = None) -> Any:
        """Value of ``key`` with ``{arch}``; equal numbers of layers as one. `UserError` P532."""
        key = self._complete(key)
        value: Any = self._take(key)
        if isinstance(value, np.ndarray) and kind in (int, float) and len(value):
            if key.endswith((".head_count", ".head_count_kv")):
                # Layers that keep a state have none; shapes contradict other wrong numbers.
                value = value[:1] * 0 + value.max()
            if key.endswith(".feed_forward_length") and value.any():
                # Blocks that mix tokens have no FFN.
                value = value[value != 0]
            if not (value == value[0]).all():
                raise self.refuse(f"{key} differs between layers, which pi2 cannot compute")
            value = value[0].item()
        if value is None:
            if default is None:
                raise self.refuse(f"it does not state {key}")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.refuse(f"{key} is {value!r}, expected {kind.__name__}")
        if isinstance(value, float):
            if not abs(value) <= _MOST_FLOAT32:
                raise self.refuse(f"{key} is {value!r}")
            # Files have 32 bits of what people wrote in decimals: 1e-5 and not 9.99999975e-6.
            value = float(str(np.float32(value)))
        return value

    def read_count(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; raises as `read` does."""
        count: int = self.read(key, int, default)
        if count < 1:
            raise self.refuse(f"{self._complete(key)} is {count}, expected 1 or more")
        return count

    def read_part(self, key: str, parts: int) -> int:
        """What a whole number of 1 or more has for each of ``parts``, which divide it."""
        count = self.read_count(key)
        if count % parts:
            raise self.refuse(f"{self._complete(key)} is {count}, no multiple of {parts}")
        return count // parts

    def read_counts(self, key: str, layers: int) -> list[int]:
        """A whole number of 1 or more for each of ``layers`` layers, of which a file states one or
        all; raises as `read_list` and `read_count` do."""
        counts = self.read_list(key, layers, "iu")
        if counts is None:
            return [self.read_count(key)] * layers
        if min(counts) < 1:
            raise self.refuse(f"{key} is no list of numbers of 1 or more")
        return counts

    def read_list(self, key: str, layers: int, kinds: str) -> list[Any] | None:
        """A value of numpy's ``kinds`` for each layer; None if no list is stated; `UserError` P532
        for a wrong one."""
        value = self._take(self._complete(key))
        if not isinstance(value, np.ndarray | list):
            return None
        found = np.asarray(value)
        if found.ndim != 1 or found.dtype.kind not in kinds or len(found) < layers:
            raise self.refuse(f"{self._complete(key)} is no list of {layers} such values")
        values: list[Any] = found[:layers].tolist()
        return values

    def read_layer(self, key: str, layer: int) -> int:
        """A layer's whole number, of which a file states one or all; 0 where it states none."""
        counts = self.read_list(key, layer + 1, "iu")
        number: int = self.read(key, int, 0) if counts is None else counts[layer]
        return number

    def read_layer_types(self, layers: int, every: int) -> list[str]:
        """Kinds of attention: a file may state them by layers, or that the last of so many layers
        sees all tokens (0: none does); without that, the last of ``every`` does. The first instead
        of the last where ``every`` is negative."""
        key = "{arch}.attention.sliding_window_pattern"
        flags = self.read_list(key, layers, "biu")
        if flags is None:
            period = self.read(key, int, abs(every))
            if period < 0:
                raise self.refuse(f"{self._complete(key)} is {period}")
            whole = 0 if every < 0 else period - 1
            flags = [period == 0 or layer % period != whole for layer in range(layers)]
        return name_kinds(flags)

    def find(self, name: str) -> Any:
        """The value of a key after the architecture's name, of any type; None if not stated."""
        key = f"{{arch}}.{name}"
        value = self.values.get(self._complete(key))
        if isinstance(value, np.ndarray):
            return self.read(key, float if value.dtype.kind == "f" else int)
        return None if value is None else self.read(key, type(value))

    def has(self, key: str) -> bool:
        return self._complete(key) in self.values

    def _complete(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)

    def _take(self, key: str) -> Any:
        self.used.add(key)
        return self.values.get(key)

    def refuse(self, problem: str) -> UserError:
        return UserError.of(
            "P532",
            f"cannot read {self.file}: {problem}",
            help="export the file again, or convert the original checkpoint",
        )


@dataclass(frozen=True, slots=True)
class _Names:
    """What names mean in an expression: keys of a file, and of the configuration so far."""

    metadata: Metadata
    config: Mapping[str, Any]

    @property
    def layers(self) -> int:
        layers: int = self.config["num_hidden_layers"]
        return layers

    def find(self, name: str) -> Any:
        own = name.removeprefix("config.")
        return self.config.get(own) if own != name else self.metadata.find(name)

    def call(self, name: str, arguments: list[Any]) -> Any:
        """``count(WHOLE)``, a number of 1 or more, and ``count(WHOLE, PARTS)``, of each part;
        ``listed(KEY)``, what a key has for every layer; one value counts for all of them;
        ``softplus(NUMBER)``."""
        if name == "listed":
            path = (
                arguments[0] if arguments[0] in self.metadata.values else f"{{arch}}.{arguments[0]}"
            )
            found = self.metadata.read_list(path, self.layers, "biuf")
            one = self.find(arguments[0]) if found is None else None
            return found if one is None else [one] * self.layers
        if name == "softplus":
            return float(np.logaddexp(arguments[0], 0))
        whole, parts = [*arguments, 1][:2]
        if name != "count" or whole < 1 or whole % parts:
            raise ValueError
        return whole // parts


def compute(text: str, metadata: Metadata, config: Mapping[str, Any]) -> Any:
    """The value of a family's expression; `UserError` P532 where the file lacks a key of it."""
    tree, names = parse_expression(text), _Names(metadata, config)
    try:
        return evaluate(tree, names)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        own = [name for name in list_names(tree) if not name.startswith("config.")]
        values = {name: names.find(name) for name in own}
        stated = (f"{metadata.architecture}.{name} is {values[name]!r}" for name in values)
        missing = (
            f"it does not state {metadata.architecture}.{n}" for n in values if values[n] is None
        )
        problem = next(missing, f"{' and '.join(stated)}, which makes no {text.strip('= ')}")
        raise metadata.refuse(problem) from None


def name_kinds(slides: Iterable[object]) -> list[str]:
    """Kinds of attention of layers; whether each has a window."""
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


_NAMES: dict[str, tuple[str, ...]] = {
    "expert_count": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "moe_layer_start_index",
        "num_dense_layers",
    ),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob", NORMALISED_EXPERTS),
}
"""What families call the number that a file states under a key."""
_ABSENT: dict[str, int | float | bool] = {
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
    "interleave_moe_layer_step": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": False,
}
"""What counts where a file does not state a key."""


def read_experts(metadata: Metadata, ffn: int) -> dict[str, Any]:
    """Numbers and sizes of experts; ``ffn``: size of dense layers."""
    read = metadata.read
    config: dict[str, Any] = {}
    for key, names in _NAMES.items():
        default = _ABSENT.get(key)
        kind = int if default is None else type(default)
        value = read(f"{{arch}}.{key}", kind, default)
        config |= dict.fromkeys(names, value)
    shared = read("{arch}.expert_shared_feed_forward_length", int, 0)
    return config | {
        "moe_intermediate_size": read("{arch}.expert_feed_forward_length", int, ffn),
        "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
    }


_KEYS, _VALUES, _JOINED = (f".{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


def read_latent(metadata: Metadata, rotated: int) -> dict[str, Any]:
    """Sizes of latent attention; ``rotated``: rotated elements of a key."""
    read = metadata.read
    # Where keys are kept as a whole, the newer keys are not there.
    key = read("{arch}.attention.key_length_mla", int, 0)
    key = key or metadata.read_count("{arch}.attention.key_length")
    value = read("{arch}.attention.value_length_mla", int, 0)
    value = value or metadata.read_count("{arch}.attention.value_length")
    rank = read("{arch}.attention.q_lora_rank", int, 0)
    return {
        "kv_lora_rank": metadata.read_count("{arch}.attention.kv_lora_rank"),
        "q_lora_rank": rank or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }


def read_score_factor(metadata: Metadata) -> dict[str, Any]:
    """What scaled positions multiply scores with; files have a tenth of it, and not what sines and
    cosines are multiplied with, which DeepSeek's configurations make 1."""
    if not metadata.has("{arch}.rope.scaling.yarn_log_multiplier"):
        return {}
    tenth = metadata.read("{arch}.rope.scaling.yarn_log_multiplier", float)
    return dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHeads(DecodedTensor):
    """The KV matrix [heads (plain + value), rank]."""

    keys: SourceTensor
    """Keys of one head after the other, turned [heads rank, plain]."""
    values: SourceTensor
    """Values of one head after the other [heads value, rank]."""

    def decode(self, start: int, stop: int) -> F32:
        plain, rank = self.keys.shape[1], self.shape[1]
        heads = self.keys.shape[0] // rank
        each, value = self.shape[0] // heads, self.values.shape[0] // heads
        first, last = start // each, -(-stop // each)
        joined = np.empty((last - first, each, rank), np.float32)
        turned = self.keys.read(first * rank, last * rank).reshape(-1, rank, plain)
        joined[:, :plain] = turned.swapaxes(1, 2)
        joined[:, plain:] = self.values.read(first * value, last * value).reshape(-1, value, rank)
        return joined.reshape(-1, rank)[start - first * each : stop - first * each]


def join_heads(tensors: dict[str, SourceTensor]) -> None:
    """Join separate key and value matrices; `UserError` P534 for shapes that do not fit."""
    for name in [name for name in tensors if name.endswith(_KEYS)]:
        keys, values = tensors[name], tensors.get(name.replace(_KEYS, _VALUES))
        if values is None:
            continue
        if len(keys.shape) != 3:
            raise refuse_shape(keys, (0, *values.shape[1:]))
        heads, rank, plain = keys.shape
        value = values.shape[1] if len(values.shape) == 3 else 0
        if values.shape != (heads, value, rank):
            raise refuse_shape(values, (heads, value, rank))
        del tensors[name], tensors[name.replace(_KEYS, _VALUES)]
        joined = name.replace(_KEYS, _JOINED)
        tensors[joined] = JoinedHeads(
            **describe_decoded(joined, (heads * (plain + value), rank), keys, values),
            keys=replace(keys, shape=(heads * rank, plain)),
            values=replace(values, shape=(heads * value, rank)),
        )


def complete_latent(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    """Put matrices together, and state how experts are chosen.  Raises as `join_heads`."""
    join_heads(tensors)
    if config["model_type"] != "deepseek_v2":
        return
    if config.get("rope_scaling", {}).get("llama_4_scaling_beta"):
        config["model_type"] = "mistral4"  # so files of Mistral Large 3 are called
    # Files of GLM 4.7 Flash do not say how they route; only sigmoids have this bias.
    elif any(name.endswith(".e_score_correction_bias") for name in tensors):
        config["model_type"] = "deepseek_v3"
    elif config.get("n_group", 1) > 1:
        config["topk_method"] = "group_limited_greedy"


def read_decoder(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Sizes, positions, norms, windows and experts, as most families state them."""
    read, count = metadata.read, metadata.read_count
    heads = config["num_attention_heads"]
    head_dim = count("{arch}.attention.key_length", max(1, config["hidden_size"] // heads))
    expert = read("{arch}.expert_feed_forward_length", int, 0)
    ffn = count("{arch}.feed_forward_length", expert or None)
    found: dict[str, Any] = {
        "intermediate_size": ffn,
        "num_key_value_heads": count("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": activation,
        "rope_theta": read("{arch}.rope.freq_base", float, 10000.0),
    }
    is_latent = metadata.has("{arch}.attention.kv_lora_rank")
    rotated = read("{arch}.rope.dimension_count", int, head_dim)
    if is_latent:
        found |= read_latent(metadata, rotated)
    else:
        found[ROTATED_SHARE] = rotated / head_dim
    if metadata.has("{arch}.attention.layer_norm_rms_epsilon"):
        found["rms_norm_eps"] = read("{arch}.attention.layer_norm_rms_epsilon", float)
    else:
        epsilon = read("{arch}.attention.layer_norm_epsilon", float, 1e-5)
        found |= dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), epsilon)
    if read("{arch}.expert_count", int, 0):
        found |= read_experts(metadata, ffn)
    if metadata.has("{arch}.attention.clamp_kqv"):
        found["clip_qkv"] = read("{arch}.attention.clamp_kqv", float)
    if metadata.has("{arch}.attention.sliding_window"):
        found["sliding_window"] = read("{arch}.attention.sliding_window", int) or None
    if metadata.has("{arch}.use_parallel_residual"):
        found["use_parallel_residual"] = read("{arch}.use_parallel_residual", bool)
    found[TURN_FACTOR] = read("{arch}.rope.scaling.attn_factor", float, 1.0)
    scaling = _read_scaling(metadata, config["max_position_embeddings"])
    if scaling and is_latent:
        scaling |= read_score_factor(metadata)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _read_scaling(metadata: Metadata, context: int) -> dict[str, Any]:
    kind = metadata.read("{arch}.rope.scaling.type", str, "linear")
    factor = metadata.read("{arch}.rope.scale_linear", float, 0.0)
    # 0 stands for nothing, and so does a factor of positions that are not scaled.
    factor = metadata.read("{arch}.rope.scaling.factor", float, factor) or 1.0
    if kind in ("none", "") or (kind == "linear" and factor == 1.0):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.read(
            "{arch}.rope.scaling.original_context_length", int, context
        )
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"{{arch}}.rope.scaling.yarn_{name}"):
                scaling[name] = metadata.read(f"{{arch}}.rope.scaling.yarn_{name}", float)
    if metadata.has("{arch}.attention.temperature_scale"):
        growth = metadata.read("{arch}.attention.temperature_scale", float)
        scaling["llama_4_scaling_beta"] = growth
    return scaling


def complete_llama(config: dict[str, Any], tensors: Iterable[str]) -> None:
    """Llama with biases only in QKV is Qwen 2, exactly."""
    ends = ("q_proj.bias", "o_proj.bias")
    has_qkv, has_output = (
        any(name.endswith(f".self_attn.{end}") for name in tensors) for end in ends
    )
    if config["model_type"] == "llama" and has_qkv and not has_output:
        config["model_type"] = "qwen2"


def complete_turns(config: dict[str, Any], tensors: Iterable[str]) -> None:
    """State positions of layers without a window and with one as configurations have them: what
    scales the first is not stated for the others."""
    scaling = config.pop("rope_scaling", {})
    share, theta = config.pop(ROTATED_SHARE), config["rope_theta"]
    full = {"rope_type": "default", **scaling, "rope_theta": theta, "partial_rotary_factor": share}
    local = {
        "rope_type": "default",
        "rope_theta": config["swa_rope_theta"],
        "partial_rotary_factor": config.get("swa_rotary_factor", share),
    }
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def complete_mixtures(config: dict[str, Any], tensors: Iterable[str]) -> None:
    """State which layers have experts, as routers tell."""
    routers = (".block_sparse_moe.gate.weight", ".mlp.gate.weight", ".feed_forward.router.weight")
    config["mlp_layer_types"] = [
        "sparse" if any(f"model.layers.{n}{end}" in tensors for end in routers) else "dense"
        for n in range(config["num_hidden_layers"])
    ]


def complete_mimo(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    complete_turns(config, tensors)
    complete_mixtures(config, tensors)


def complete_laguna(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """State what positions turn, and whether heads or their elements have gates."""
    complete_turns(config, tensors)
    gates = tensors.get("model.layers.0.self_attn.g_proj.weight")
    heads = config["num_attention_heads_per_layer"] or [config["num_attention_heads"]]
    config["gating"] = gates is None or gates.shape[0] == heads[0]
    config["gating"] = "per-head" if config["gating"] else "per-element"


def complete_minimax_m3(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """State the kinds of layers, and the widths of FFNs, which tensors tell."""
    starts = [f"model.layers.{layer}" for layer in range(config["num_hidden_layers"])]
    indexes = [f"{start}.self_attn.index_q_proj.weight" in tensors for start in starts]
    config["layer_types"] = [("full_attention", "minimax_m3_sparse")[own] for own in indexes]
    complete_mixtures(config, tensors)
    for start in starts:
        shared = tensors.get(f"{start}.block_sparse_moe.shared_experts.gate_proj.weight")
        if shared is not None:
            config["shared_intermediate_size"] = shared.shape[0]


_LONG_INDEX = 1 << 20
"""Context from which on layers of GLM 5 share indexes where a file names none: the first layers
have one each, then one of four (GLM 5.2)."""


def read_shared_index(
    metadata: Metadata, config: dict[str, Any], activation: str
) -> dict[str, Any]:
    """Families whose layers share the choice of an index."""
    found, layers = read_decoder(metadata, config, activation), config["num_hidden_layers"]
    flags = metadata.read_list(key := "{arch}.attention.indexer.types", layers, "biu")
    if metadata.has(key) and not set(flags or [2]) <= {0, 1}:
        raise metadata.refuse("attention.indexer.types is no list of flags 0 and 1")
    if flags is not None:
        found["indexer_types"] = ["full" if flag else "shared" for flag in flags]
    elif config["max_position_embeddings"] >= _LONG_INDEX:
        found |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    return found


def complete_opt(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    positions = tensors.get("model.decoder.embed_positions.weight")
    if positions is not None:
        # PowerInfer counts the two rows before position 0 too.
        config["max_position_embeddings"] = positions.shape[0] - 2
