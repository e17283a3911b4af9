"""What a GGUF file states, held against the model that was made of it."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pi2.diagnostics import Diagnostic
from pi2.importing.config import ACTIVATIONS
from pi2.importing.gguf_decoders import Metadata
from pi2.model.blocks import list_turns
from pi2.plan.documents.model import Model

_PATTERN = "attention.sliding_window_pattern"
_SHAPES = "shapes of tensors contradict a wrong one"
_LEFT_OUT = "contexts are too short for an index"
_HARMLESS = {
    **dict.fromkeys(("attention.head_count_kv", "attention.key_length"), _SHAPES),
    **dict.fromkeys(("attention.value_length", "attention.value_length_swa"), _SHAPES),
    **dict.fromkeys(("vocab_size", "expert_shared_feed_forward_length"), _SHAPES),
    "expert_shared_count": "tensors tell whether there are shared experts, and their width",
    "full_attention_interval": "tensors tell which layers attend",
    **{
        f"attention.indexer.{name}": _LEFT_OUT
        for name in ("head_count", "key_length", "local_blocks", "types")
    },
    **dict.fromkeys(("deepstack_mapping", "n_deepstack_layers"), "only pictures have deep stacks"),
    "rope.dimension_sections": "texts have one position for all sections",
    "rope.scaling.finetuned": "it says how weights came about",
    "rope.scaling.original_context_length": "only YaRN and LongRoPE have one, which read it",
    "tensor_data_layout": "the architecture tells the order of rows",
}
"""Keys that change nothing, with the reasons."""


def list_idle(metadata: Metadata, model: Model) -> dict[str, str]:
    """Keys after the architecture's name that change nothing in ``model``, with the reasons."""
    idle = dict(_HARMLESS)
    if model.moe is None or model.moe.router == "none":
        keys = (*COMPARED, "expert_feed_forward_length")
        idle |= dict.fromkeys(filter(_is_of_experts, keys), "there are no experts")
    elif not model.moe.dense_layers:
        idle["feed_forward_length"] = "every layer has experts, which have a width of their own"
    attention, latent = model.attention, model.attention.latent
    if attention.sliding_window is None and f"{metadata.architecture}.{_PATTERN}" in metadata.used:
        idle[_PATTERN] = "no layer has a window"
        if _states_no_window(metadata):
            keys = ("attention.sliding_window", "rope.freq_base_swa")
            idle |= dict.fromkeys(keys, "no layer has a window, as the file says")
    if latent is not None and latent.query_rank is None:
        idle["attention.q_lora_rank"] = "tensors tell that queries are projected at once"
    if model.positions is not None:
        idle["context_length"] = "the table of positions tells how many there are"
    if all(rope.kind == "none" for rope, _ in list_turns(model)):
        stated = (key.removeprefix(f"{metadata.architecture}.") for key in metadata.used)
        keys = (*filter(_is_of_positions, stated), *filter(_is_of_positions, COMPARED))
        idle |= dict.fromkeys(keys, "positions turn nothing")
    if metadata.has("{arch}.rope.scaling.factor"):
        idle["rope.scale_linear"] = "rope.scaling.factor counts"
    return idle


def _states_no_window(metadata: Metadata) -> bool:
    width, pattern = (
        metadata.values.get(f"{metadata.architecture}.{key}")
        for key in ("attention.sliding_window", _PATTERN)
    )
    if isinstance(pattern, np.ndarray):
        return width == 0 or not pattern.any()
    return width == 0 or pattern == 1


def _is_of_positions(key: str) -> bool:
    return key.startswith("rope.")


def _is_of_experts(key: str) -> bool:
    return key != "expert_count" and key.startswith(("expert_", "leading_dense_", "interleave_moe"))


NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_scale": (0.0,),
    "attention.value_scale": (0.0, 1.0),
    "expert_group_scale": (0.0, 1.0),
    "moe_every_n_layers": (0, 1),
    "rescale_every_n_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), (0.0,)),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""Values that stand for nothing, of keys that nothing reads."""
_KINDS = ("model",)
"""What ``general.type`` may be."""
_OTHERS = ("adapter.", "xielu.")
"""Prefixes of keys, outside of the architecture's, that belong to its computation."""
_GATING = {1: "softmax", 2: "sigmoid", 3: "softmax"}
"""Functions of routers by their numbers; the third takes the softmax of chosen experts, which
equals the softmax of all with weights that add up to 1."""

_POOLING = {1: "mean", 3: "last"}
"""Ways to make embeddings by their numbers."""


def _factor(model: Model, value: object) -> bool:
    return isinstance(value, int | float) and math.isclose(
        model.multipliers.logits * value, 1.0, rel_tol=1e-5
    )


def _has_width(model: Model, value: object) -> bool:
    window = model.attention.sliding_window
    if window is None and isinstance(value, int):
        return value >= model.shape.context
    return window == value


def _has_scale(model: Model, value: float) -> bool:
    widths = {model.shape.head_dim} | {width for _, width in list_turns(model)}
    plain = model.attention.scale is None
    return _is_same(model.attention.scale, value) or (
        plain and any(_is_same(width**-0.5, value) for width in widths)
    )


def _turns(model: Model, value: int) -> bool:
    latent = model.attention.latent
    if latent is not None:
        return value == latent.rotated
    return value in {rope.count_rotated(width) for rope, width in list_turns(model)}


def _has_router(model: Model, value: int) -> bool:
    assert model.moe is not None
    wanted, router = _GATING.get(value), model.moe.router
    is_softmax = router in ("mixer", "none") and wanted == "softmax"
    return (router == wanted or is_softmax) and (value != 3 or model.moe.normalise_weights)


def _has_experts(model: Model, value: object) -> bool:
    moe = model.moe
    return moe is not None and moe.router != "none" and moe.experts == value


def _list_dense(model: Model) -> list[bool]:
    return [not block.ffn.has_router for block in model.blocks]


def _has_dense(model: Model, value: object) -> bool:
    """Whether so many layers are dense before the first with experts; a step may skip more."""
    dense = _list_dense(model)
    count = dense.index(False) if False in dense else len(dense)
    return value == count or (isinstance(value, int) and value < count and True in dense[count:])


def _has_step(model: Model, value: object) -> bool:
    """Whether each ``value``-th layer has experts, from the first such on."""
    if not isinstance(value, int) or value < 1:
        return False
    dense = _list_dense(model)
    first = dense.index(False) if False in dense else len(dense)
    return all(
        own == ((layer + 1) % value != 0) for layer, own in enumerate(dense) if layer >= first
    )


def _turns_around(model: Model, value: float) -> bool:
    # Of the model's own positions no layer may be left.
    ropes = [model.rope, *(rope for rope, _ in list_turns(model))]
    return any(_is_same(rope.theta, value) for rope in ropes)


COMPARED: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "attention.clamp_kqv": ("attention.clip", lambda m, v: _is_same(m.attention.clip, v)),
    **dict.fromkeys(
        ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        ("norm.epsilon", lambda m, v: _is_same(m.norm.epsilon, v)),
    ),
    "attention.scale": ("attention.scale", _has_scale),
    "attention.sliding_window": ("attention.sliding_window", _has_width),
    "attn_logit_softcapping": ("attention.softcap", lambda m, v: _is_same(m.attention.softcap, v)),
    "embedding_scale": ("multipliers.embedding", lambda m, v: _is_same(m.multipliers.embedding, v)),
    "expert_count": ("moe.experts", _has_experts),
    "expert_gating_func": ("moe.router", _has_router),
    "expert_group_count": ("moe.groups", lambda m, v: m.moe.groups == v),
    "expert_group_used_count": (
        "moe.active_groups",
        lambda m, v: v == (1 if m.moe.groups == 1 else m.moe.active_groups),
    ),
    "expert_used_count": ("moe.active_experts", lambda m, v: m.moe.active_experts == v),
    "expert_weights_norm": ("moe.normalise_weights", lambda m, v: m.moe.normalise_weights == v),
    "expert_weights_scale": ("moe.scaling", lambda m, v: _is_same(m.moe.scaling, v)),
    "final_logit_softcapping": ("logit_softcap", lambda m, v: _is_same(m.logit_softcap, v)),
    "hidden_activation": ("ffn.activation", lambda m, v: ACTIVATIONS.get(v) == m.ffn.activation),
    "interleave_moe_layer_step": ("moe.dense_layers", _has_step),
    "leading_dense_block_count": ("moe.dense_layers", _has_dense),
    "logit_scale": (
        "multipliers.logits",
        # Granite's logits are divided by it.
        lambda m, v: _is_same(m.multipliers.logits, v) or _factor(m, v),
    ),
    "residual_scale": ("multipliers.residual", lambda m, v: _is_same(m.multipliers.residual, v)),
    "pooling_type": ("pooling", lambda m, v: _POOLING.get(v) == m.pooling),
    "rope.dimension_count": ("rope.share", _turns),
    "rope.dimension_count_swa": ("rope.share", _turns),
    "rope.freq_base": ("rope.theta", _turns_around),
    "rope.freq_base_swa": ("other_rope.theta", _turns_around),
    "use_parallel_residual": ("residual", lambda m, v: (m.residual == "parallel") == v),
}
"""Keys with their names in model documents, and whether a model has a value; 0 means none, and
nothing is compared."""


def find_unread(metadata: Metadata, model: Model) -> Iterator[Diagnostic]:
    """P537 for every key whose value ``model`` does not have, and P544 for every key that is not
    read and may change results."""
    kind = metadata.values.get("general.type", "model")
    if kind not in _KINDS:
        yield _refuse(metadata, "general.type", kind)
    idle = list_idle(metadata, model)
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{metadata.architecture}.")
        if own == key:
            if key.startswith(_OTHERS):
                yield _refuse(metadata, key, value)
            continue
        if own in idle:
            continue
        if own in COMPARED and not _is_nothing(value):
            path, has = COMPARED[own]
            if not all(has(model, item) for item in _list_values(value)):
                yield _contradict(metadata, model, key, value, path)
        elif own in COMPARED or key in metadata.used:
            continue
        elif not all(
            any(_is_same(item, n) for n in NEUTRAL.get(own, ())) for item in _list_values(value)
        ):
            yield _refuse(metadata, key, value)


def _contradict(metadata: Metadata, model: Model, key: str, value: Any, path: str) -> Diagnostic:
    has: Any = model
    for part in path.split("."):
        has = getattr(has, part, None)
    return Diagnostic(
        code="P537",
        message=(
            f"{key} is {_show(value)} in {metadata.file}, but {path} is {has!r} in the model that "
            "pi2 knows by this architecture"
        ),
        help="convert the original checkpoint, or write the model document by hand and give "
        "--model",
    )


def _refuse(metadata: Metadata, key: str, value: Any) -> Diagnostic:
    return Diagnostic(
        code="P544",
        message=(
            f"{metadata.file} states {key} = {_show(value)}, which pi2 does not compute for the "
            f"architecture {metadata.architecture!r}"
        ),
        help="convert the original checkpoint, or write the model document by hand and give "
        "--model: the key is then left out",
    )


def _list_values(value: Any) -> list[Any]:
    """The values of all layers; one where it is no list."""
    return value.tolist() if isinstance(value, np.ndarray) else [value]


def _is_nothing(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _is_same(found: object, stated: object) -> bool:
    """Whether two values are the same, but for what 32 bits leave of a number."""
    if isinstance(found, bool) or isinstance(stated, bool):
        return found is stated
    if isinstance(found, int | float) and isinstance(stated, int | float):
        return math.isclose(found, stated, rel_tol=1e-5, abs_tol=1e-12)
    return bool(np.array_equal(np.asarray(found), np.asarray(stated)))


def _show(value: Any) -> str:
    values: Mapping[str, Any] | str = repr(
        value.tolist()[:8] if isinstance(value, np.ndarray) else value
    )
    return str(values)[:80]
