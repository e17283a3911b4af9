"""Rules about operators that must agree."""

from collections.abc import Iterator, Mapping

from pi2.formats import find_packing
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Moe
from pi2.plan.weights.layout import GROUP


@rule("P253", "error", "model")
def check_operators_agree(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if not model.ffn.gated and model.ffn.activation == "drelu":
        yield Finding(
            ("ffn", "gated"),
            "drelu is an activation of gate and up, but neurons have no gate",
            'write activation = "relu", or remove gated = false',
            origins=(Origin("model", ("ffn", "activation"), 'activation = "drelu"'),),
        )
    moe = model.moe
    if model.ffn.bias and moe is not None and (moe.shared_experts or moe.dense_layers):
        yield Finding(
            ("ffn", "bias"), "shared experts and dense layers have no biases", "remove bias = true"
        )
    if model.moe is not None and model.moe.shared_gate and not model.moe.shared_experts:
        yield Finding(
            ("moe", "shared_gate"),
            "there are no shared experts to weight",
            "write shared_experts = N, or remove shared_gate = true",
        )
    others = (model.positions, model.layer_embedding, model.altup)
    if model.norm.embedding and any(other is not None for other in others):
        yield Finding(
            ("norm", "embedding"),
            "embeddings have a norm in models with one stream, to which neither learned "
            "positions nor embeddings of layers are added",
            "remove embedding = true",
        )
    if model.norm.outputs and model.norm.bias:
        yield Finding(
            ("norm", "outputs"),
            "norms of outputs have no biases",
            "remove bias = true, or outputs = true",
        )
    if model.other_rope is not None:
        yield from _find_missing(model, ("other_rope", "layers"), model.other_rope.layers)
    yield from _check_other_heads(model)
    yield from _check_shared_keys(model)
    yield from _check_layer_embedding(model)
    yield from _check_altup(model)
    yield from _check_cutoffs(model)
    yield from _check_side_ffn(model)
    yield from _check_latent_experts(model)
    yield from _check_absent(model)
    yield from _check_activation(model)
    yield from _check_mixture(model)
    if model.moe is not None and model.moe.choice_bias_of == "score":
        yield from _check_scores(model.moe)
    precision = model.quantization.ffn
    if find_packing(precision).shares_down_scales and model.shape.ffn % GROUP:
        yield Finding(
            ("quantization", "ffn"),
            f"{GROUP} neurons of {precision} share scales, but there are {model.shape.ffn}",
            'write ffn = "int8"',
        )
    blocks, width = model.quantization.gate_up, model.neuron_width
    if blocks is not None and width % (step := find_packing(blocks).length_step):
        yield Finding(
            ("quantization", "gate_up"),
            f"rows of {width} elements are no whole blocks of {blocks}, which have {step}",
            "remove gate_up",
        )
    if model.ffn.sub_norm and (model.moe is not None or model.ffn.bias):
        what = "biases" if model.moe is None else "experts"
        yield Finding(
            ("ffn", "sub_norm"),
            f"an FFN with {what} has no norm of its activations",
            "remove sub_norm = true",
        )
    yield from _check_latent(model)
    yield from _check_values(model)
    for key in ("head_norm_layers", "growth_layers", "sink_layers"):
        chosen = getattr(model.attention, key)
        yield from _find_missing(model, ("attention", key), chosen or ())
    layers = model.attention.window_layers
    if layers is None:
        return
    if model.attention.sliding_window is None:
        yield Finding(
            ("attention", "window_layers"),
            "layers have a sliding window, but its width is not stated",
            "write sliding_window = N, in tokens",
        )
    yield from _find_missing(model, ("attention", "window_layers"), layers)


def _check_scores(moe: Moe) -> Iterator[Finding]:
    if moe.router != "sigmoid" or not moe.choice_bias or moe.groups > 1:
        yield Finding(
            ("moe", "choice_bias_of"),
            "scores and a bias choose only among sigmoids without groups",
            'write router = "sigmoid" and choice_bias = true, or remove choice_bias_of',
        )


def _check_other_heads(model: Model) -> Iterator[Finding]:
    """Look for layers that there are not, and for what keys that are values do not have."""
    other, attention = model.other_heads, model.attention
    if other is None:
        return
    yield from _find_missing(model, ("other_heads", "layers"), other.layers)
    reasons = {
        "latent attention": attention.latent is not None,
        "biases": other.keys_are_values and attention.qkv_bias,
        "gates": other.keys_are_values and attention.output_gate,
        "one tensor of all": other.keys_are_values and model.tensors.fused_qkv is not None,
    }
    for reason in (reason for reason, is_there in reasons.items() if is_there):
        yield Finding(
            ("other_heads", "keys_are_values" if other.keys_are_values else "kv_heads"),
            f"QKV projections with {reason} have the same heads in all layers",
            "remove [other_heads]",
        )


def _check_shared_keys(model: Model) -> Iterator[Finding]:
    attention, layers = model.attention, model.shape.layers
    if not attention.kv_shared_layers:
        return
    path = ("attention", "kv_shared_layers")
    reasons = {
        "latent attention": attention.latent is not None,
        "gates": attention.output_gate,
        "one tensor of all": model.tensors.fused_qkv is not None,
        "layers that keep a state": bool(model.state_layers),
    }
    for reason in (reason for reason, is_there in reasons.items() if is_there):
        yield Finding(
            path, f"QKV projections with {reason} are each layer's own", "remove kv_shared_layers"
        )
    alone = [
        layer
        for layer in range(max(0, layers - attention.kv_shared_layers), layers)
        if (own := model.blocks[layer].attention) is None or own.has_keys
    ]
    if alone:
        yield Finding(
            path,
            f"no layer before the last {attention.kv_shared_layers} has the window and the "
            f"heads of layer {alone[0]}, whose KV cache it could read",
            "take the number from the checkpoint's configuration",
        )


def _check_layer_embedding(model: Model) -> Iterator[Finding]:
    own = model.layer_embedding
    if own is None:
        return
    reasons = {
        'norms without biases, norm.kind = "rmsnorm"': model.norm.kind == "rmsnorm"
        and not model.norm.bias,
        "a sequential residual with the factor 1": model.residual == "sequential"
        and model.multipliers.residual == 1.0,
        "a smooth activation, such as gelu_tanh": model.is_smooth,
        f"no more rows than the {model.shape.vocab} tokens": (own.vocab or 0) <= model.shape.vocab,
    }
    yield from _list_missing(("layer_embedding",), "embeddings of layers need", reasons)


def _check_altup(model: Model) -> Iterator[Finding]:
    if model.altup is None:
        return
    reasons = {
        "embeddings of layers, a table [layer_embedding]": model.layer_embedding is not None,
        "attention in every layer": not model.state_layers and model.attention.latent is None,
        "no learned positions": model.positions is None,
        "no layer_scale": not model.layer_scale,
        "no dense FFN next to experts": model.side_ffn is None,
    }
    yield from _list_missing(("altup",), "several residual streams need", reasons)


def _check_cutoffs(model: Model) -> Iterator[Finding]:
    shares = model.ffn.gate_sparsity
    if not shares:
        return
    reasons = {
        f"a share for each of the {model.shape.layers} layers": len(shares) == model.shape.layers,
        "neurons with gates and without biases": model.ffn.gated and not model.ffn.bias,
        "one FFN per layer, no [moe]": model.moe is None,
        "a smooth activation, such as gelu_tanh": model.is_smooth,
        "no norm of activations": not model.ffn.sub_norm,
    }
    yield from _list_missing(("ffn", "gate_sparsity"), "cutoffs of gates need", reasons)


def _check_side_ffn(model: Model) -> Iterator[Finding]:
    if model.side_ffn is None:
        return
    reasons = {
        "experts next to it, a table [moe]": model.moe is not None,
        "norms of outputs, norm.outputs = true, or norms = false": model.norm.outputs
        or not model.side_ffn.norms,
        "norms of its own, if norm.outputs = true": model.side_ffn.norms or not model.norm.outputs,
        "experts in every layer, no moe.dense_layers": model.moe is None
        or model.moe.latent is not None
        or not (model.moe.dense_layers or model.moe.router == "none"),
        "neurons without biases": not model.ffn.bias,
        "a sequential residual with the factor 1": model.residual == "sequential"
        and model.multipliers.residual == 1.0,
    }
    yield from _list_missing(("side_ffn",), "a dense FFN next to experts needs", reasons)


def _check_absent(model: Model) -> Iterator[Finding]:
    if not model.ffn.absent_layers:
        return
    yield from _find_missing(model, ("ffn", "absent_layers"), model.ffn.absent_layers)
    reasons = {
        "no norms of outputs": not model.norm.outputs,
        "a sequential residual": model.residual == "sequential",
        "no norm of activations": not model.ffn.sub_norm,
        "no embeddings of layers": model.layer_embedding is None,
        'a router, not moe.router = "none"': model.moe is None or model.moe.router != "none",
    }
    yield from _list_missing(("ffn", "absent_layers"), "layers without FFN need", reasons)


def _check_latent_experts(model: Model) -> Iterator[Finding]:
    moe = model.moe
    if moe is None or moe.latent is None:
        return
    reasons = {
        "a router": moe.router != "none",
        "an FFN next to them in dense layers, a table [side_ffn]": model.side_ffn is not None
        or not moe.dense_layers,
        "shared FFNs in a table [side_ffn], no shared_experts": not moe.shared_experts,
        "neurons without biases": not model.ffn.bias,
        "no norms of outputs": not model.norm.outputs,
        "no embeddings of layers": model.layer_embedding is None,
    }
    yield from _list_missing(("moe", "latent"), "experts of another width need", reasons)


def _check_activation(model: Model) -> Iterator[Finding]:
    ffn = model.ffn
    for key, is_stated in (("slope", ffn.slope != 1.0), ("limit", ffn.limit is not None)):
        if is_stated and ffn.activation != "silu":
            yield Finding(
                ("ffn", key),
                f"{key} is an option of silu, but the activation is {ffn.activation}",
                f'write activation = "silu", or remove {key}',
            )
    if ffn.up_offset and not ffn.gated:
        yield Finding(
            ("ffn", "up_offset"),
            "without gates there is nothing that ups are multiplied with",
            "remove up_offset, or gated = false",
        )


def _check_mixture(model: Model) -> Iterator[Finding]:
    moe = model.moe
    if moe is None:
        return
    if moe.experts % moe.groups or moe.active_groups > moe.groups:
        yield Finding(
            ("moe", "groups"),
            f"{moe.experts} experts in {moe.groups} groups, of which "
            f"{moe.active_groups} may be active",
            "take the numbers from the checkpoint's configuration",
        )
    elif moe.groups > 1 and moe.active_experts > moe.active_groups * (moe.experts // moe.groups):
        yield Finding(
            ("moe", "active_groups"),
            f"{moe.active_groups} groups have fewer than {moe.active_experts} experts",
            "take the numbers from the checkpoint's configuration",
        )
    if moe.weighs == "input" and not (model.is_smooth and model.ffn.gated and not model.ffn.bias):
        yield Finding(
            ("moe", "weighs"),
            "experts that read what their weights have multiplied need a smooth "
            "activation, gates and no biases",
            "take the options from the checkpoint's configuration",
        )
    if moe.router == "none" and moe.active_experts + moe.shared_experts != moe.experts:
        yield Finding(
            ("moe", "router"),
            "without a router all experts compute every token, none of them shared",
            f"write active_experts = {moe.experts}, and no shared_experts",
        )
    if bool(moe.dense_layers) != (moe.dense_ffn is not None):
        yield Finding(
            ("moe", "dense_layers" if moe.dense_layers else "dense_ffn"),
            "dense_layers and dense_ffn are stated together: which layers are dense, "
            "and how many neurons they have",
        )
    yield from _find_missing(model, ("moe", "dense_layers"), moe.dense_layers)


def _check_latent(model: Model) -> Iterator[Finding]:
    attention, shape = model.attention, model.shape
    if attention.latent is None:
        return
    others = ["qkv_bias", "head_norm", "value_norm", "sub_norm", "sinks", "clip"]
    others.append("sliding_window")
    if attention.value_scale != 1.0:
        others.append("value_scale")
    for key in (key for key in others if getattr(attention, key)):
        yield Finding(
            ("attention", key),
            f"latent attention has no {key}",
            f"remove {key}, or the table [attention.latent]",
        )
    of_heads = attention.output_gate_of == "head" and attention.output_gate_function == "sigmoid"
    if attention.output_gate and not of_heads:
        yield Finding(
            ("attention", "output_gate_of"),
            "latent attention has a gate for each head, which goes through a sigmoid",
            'write output_gate_of = "head", and remove output_gate_function',
        )
    if shape.heads != shape.kv_heads:
        yield Finding(
            ("shape", "kv_heads"),
            f"with latent attention every head has its own key: kv_heads is {shape.heads}",
        )


def _check_values(model: Model) -> Iterator[Finding]:
    """Look for values that cannot be narrower than keys, and for layers with sinks of none."""
    attention = model.attention
    sizes = [model.shape.head_dim, *([model.other_heads.head_dim] if model.other_heads else [])]
    if attention.sink_layers is not None and not attention.sinks:
        yield Finding(
            ("attention", "sink_layers"),
            "layers have sinks, but the model has none",
            "write sinks = true, or remove sink_layers",
        )
    if attention.value_width is None:
        return
    if attention.value_width > min(sizes):
        yield Finding(
            ("attention", "value_width"),
            f"values of {attention.value_width} elements are wider than a head of {min(sizes)}",
            "remove value_width where values are as wide as keys",
        )
    reasons = {
        "[attention.latent]": attention.latent is not None,
        "output_gate": attention.output_gate,
        "sub_norm": attention.sub_norm,
        "tensors.fused_qkv": model.tensors.fused_qkv is not None,
        "other_heads.keys_are_values": any(
            block.attention is not None and block.attention.keys_are_values
            for block in model.blocks
        ),
    }
    for name in (name for name, holds in reasons.items() if holds):
        yield Finding(
            ("attention", "value_width"),
            f"values are as wide as keys where there is {name}",
            f"remove value_width, or {name}",
        )


def _find_missing(
    model: Model, path: tuple[str, ...], layers: tuple[int, ...]
) -> Iterator[Finding]:
    beyond = [layer for layer in layers if layer >= model.shape.layers]
    if beyond:
        yield Finding(
            path, f"there is no layer {beyond[0]}: the model has {model.shape.layers}, from 0 on"
        )


def _list_missing(
    path: tuple[str, ...], needing: str, reasons: Mapping[str, bool]
) -> Iterator[Finding]:
    """Report each of the ``reasons``, and whether it holds, that does not; ``needing`` is a
    sentence's beginning."""
    for reason in (reason for reason, holds in reasons.items() if not holds):
        yield Finding(
            path, f"{needing} {reason}", "take the options from the checkpoint's configuration"
        )
