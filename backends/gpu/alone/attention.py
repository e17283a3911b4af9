"""Kernels of a layer's attention, from what it reads to what the output's projection reads."""

from __future__ import annotations

from pi2.backends.gpu.alone.use import ModelUse
from pi2.backends.gpu.alone.work_list import WorkList
from pi2.backends.gpu.launchers.interface import DeviceArray
from pi2.plan.arithmetic.rows import count_qkv_rows
from pi2.plan.weights.tensor_names import name_layer_tensor


def list_attention(work: WorkList, use: ModelUse, layer: int, tokens: int, spans: int) -> None:
    """Add the kernels that turn u into ``mixed``, contexts in ``spans`` parts."""
    model, state = use.model, work.state
    rows = count_qkv_rows(model)
    qkv, bias = name_layer_tensor(layer, "qkv"), name_layer_tensor(layer, "qkv_bias")
    work.multiply(use.products["qkv"], qkv, rows, tokens, state["u"], state["qkv"], bias)
    rope = 0 if model.find_rope(layer) is not model.other_rope else 1
    arrays = {
        **work.arrays.kept[layer],
        "qkv": state["qkv"],
        "places": state["places"],
        "cosines": state[f"cosines_{rope}"],
        "sines": state[f"sines_{rope}"],
        "partials": state["span_sums"],
        "tops": state["span_tops"],
        "mixed": state["mixed"],
    }
    if model.has_head_norm(layer):
        arrays["norms"] = state[f"head_norms_{layer}"]
    growing = model.attention.growth_layers
    if use.attention.growth:
        grows = growing is None or layer in growing
        arrays["growth"] = state["growth" if grows else "no_growth"]
    if model.attention.sinks:
        arrays["sinks"] = work.find_vector(name_layer_tensor(layer, "sinks"))
    numbers = {"context": use.context, "tokens": tokens, "spans": spans}
    if model.attention.latent is not None:
        _list_latent_queries(work, use, layer, tokens, arrays)
        arrays["mixed"] = state["mixed_latent"]
    else:
        is_plain = use.attention.head_norm and not model.has_head_norm(layer)
        work.add("keep_plain" if is_plain else "keep", arrays, numbers)
    sees_all = model.find_window(layer) is None and use.attention.window is not None
    for name in ("attend_all" if sees_all else "attend", "mix"):
        work.add(name, arrays, numbers)
    if model.attention.latent is not None:
        work.multiply(
            use.products["latent_value"],
            name_layer_tensor(layer, "latent_value"),
            model.shape.query,
            tokens,
            state["mixed_latent"],
            state["mixed"],
        )


def _list_latent_queries(
    work: WorkList, use: ModelUse, layer: int, tokens: int, arrays: dict[str, DeviceArray]
) -> None:
    """Add what keeps the token's vector, and makes queries of it out of the heads' queries."""
    model, state = use.model, work.state
    latent = model.attention.latent
    assert latent is not None
    arrays |= {name: state[name] for name in ("plain", "turned", "absorbed")}
    if latent.query_rank is not None:
        weights = work.find_vector(name_layer_tensor(layer, "latent_query_norm"))
        norm = {"qkv": state["qkv"], "weights": weights, "made": state["made"]}
        work.add("latent_norm", norm, {"tokens": tokens})
        work.multiply(
            use.products["latent_query_out"],
            name_layer_tensor(layer, "latent_query_out"),
            model.shape.heads * latent.key,
            tokens,
            state["made"],
            state["queries"],
        )
        arrays["queries"] = state["queries"]
    arrays["weights"] = work.find_vector(name_layer_tensor(layer, "latent_norm"))
    work.add("keep", arrays, {"context": use.context, "tokens": tokens})
    work.multiply(
        use.products["latent_key"],
        name_layer_tensor(layer, "latent_key"),
        model.shape.heads * latent.rank,
        tokens,
        state["plain"],
        state["absorbed"],
    )
