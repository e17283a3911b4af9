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

_HARMLESS = frozenset(
    {
        "attention.head_count_kv",
        "attention.indexer.head_count",
        "attention.indexer.key_length",
        "attention.indexer.local_blocks",
        "attention.indexer.types",
        "attention.key_length",
        "attention.value_length",
        "attention.value_length_swa",
        "deepstack_mapping",
        "full_attention_interval",
        "n_deepstack_layers",
        "rope.dimension_sections",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",
    }
)
"""Keys that change nothing, or nothing that the shapes of tensors would not contradict: texts have
one position for three sections, only pictures have deep stacks, and contexts are too short for an
index."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
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


def _factor(model: Model, value: float) -> bool:
    return math.isclose(model.multipliers.logits * value, 1.0, rel_tol=1e-5)


def _has_width(model: Model, value: int) -> bool:
    window = model.attention.sliding_window
    return window == value or (window is None and value >= model.shape.context)


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
    turns = list_turns(model)
    counts = {rope.count_rotated(width) for rope, width in turns}
    return value in counts or all(rope.kind == "none" for rope, _ in turns)


def _has_router(model: Model, value: int) -> bool:
    router = "softmax" if model.moe is None else model.moe.router
    wanted = _GATING.get(value)
    normalises = model.moe is not None and model.moe.normalise_weights
    return router in (wanted, "mixer", "none") and (value != 3 or normalises)


def _turns_around(model: Model, value: float) -> bool:
    return any(_is_same(rope.theta, value) for rope, _ in list_turns(model))


_COMPARED: dict[str, tuple[str, Callable[[Model, Any], bool]]] = {
    "attention.clamp_kqv": ("attention.clip", lambda m, v: _is_same(m.attention.clip, v)),
    **dict.fromkeys(
        ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        ("norm.epsilon", lambda m, v: _is_same(m.norm.epsilon, v)),
    ),
    "attention.scale": ("attention.scale", _has_scale),
    "attention.sliding_window": ("attention.sliding_window", _has_width),
    "attn_logit_softcapping": ("attention.softcap", lambda m, v: _is_same(m.attention.softcap, v)),
    "embedding_scale": ("multipliers.embedding", lambda m, v: _is_same(m.multipliers.embedding, v)),
    "expert_gating_func": ("moe.router", _has_router),
    "expert_group_count": ("moe.groups", lambda m, v: m.moe is None or m.moe.groups == v),
    "expert_group_used_count": (
        "moe.active_groups",
        lambda m, v: m.moe is None or m.moe.groups == 1 or m.moe.active_groups == v,
    ),
    "expert_used_count": (
        "moe.active_experts",
        lambda m, v: m.moe is None or m.moe.active_experts == v,
    ),
    "expert_weights_norm": (
        "moe.normalise_weights",
        lambda m, v: m.moe is None or m.moe.normalise_weights == v,
    ),
    "expert_weights_scale": (
        "moe.scaling",
        lambda m, v: m.moe is None or _is_same(m.moe.scaling, v),
    ),
    "final_logit_softcapping": ("logit_softcap", lambda m, v: _is_same(m.logit_softcap, v)),
    "hidden_activation": ("ffn.activation", lambda m, v: ACTIVATIONS.get(v) == m.ffn.activation),
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
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{metadata.architecture}.")
        if own == key:
            if key.startswith(_OTHERS):
                yield _refuse(metadata, key, value)
            continue
        if own in _COMPARED and not _is_nothing(value):
            path, has = _COMPARED[own]
            if not all(has(model, item) for item in _list_values(value)):
                yield _contradict(metadata, model, key, value, path)
        elif own in _COMPARED or own in _HARMLESS or key in metadata.used:
            continue
        elif not all(
            any(_is_same(item, n) for n in _NEUTRAL.get(own, ())) for item in _list_values(value)
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
