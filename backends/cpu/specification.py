"""What of a request the kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping

from pi2.backends.kernels.spec import (
    AltUpShape,
    AttentionShape,
    KernelSpec,
    LayerInputShape,
    RouterShape,
)
from pi2.backends.protocol import BuildRequest
from pi2.model.attention import describe_latent
from pi2.model.blocks import Attention, list_attention
from pi2.model.ffn import count_stored_cutoff_rows
from pi2.model.states import describe_state
from pi2.model.tensor import name_layer_tensor
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import ActivationType

PLANES: Mapping[ActivationType, int] = {"int8": 1, "int16": 2, "fp32": 4}
"""Bytes of an activation."""


def make_spec(request: BuildRequest) -> KernelSpec:
    """Return what the kernels for a request depend on."""
    model, shape = request.model, request.model.shape
    first, *others = list_attention_shapes(model)
    ranks = {
        request.tensors[name].rows // model.expert_count
        for layer in range(shape.layers)
        if (name := name_layer_tensor(layer, "predictor_in")) in request.tensors
    }
    return KernelSpec(
        hidden=shape.stored_hidden,
        norm_width=0 if shape.hidden == shape.stored_hidden else shape.hidden,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        vocab=shape.vocab,
        epsilon=model.norm.epsilon,
        activation=model.ffn.activation,
        threshold=model.ffn.threshold if model.ffn.activation == "fatrelu" else 0.0,
        qkv_bias=model.attention.has_bias,
        window=first.window,
        kv=request.kv_type,
        attention=model.quantization.attention,
        embedding=model.quantization.embedding,
        head=model.quantization.embedding if model.tied_head else model.quantization.head,
        ffn=request.bundle.precision,
        gate_rows=request.bundle.precision if _knows_gates(request) else None,
        predictor=model.quantization.predictor if ranks else None,
        ranks=tuple(sorted(ranks)),
        stride=request.bundle.stride,
        threads=request.threads,
        planes=PLANES[request.token_type],
        sequences=request.step_tokens > 1,
        looks_ahead=request.looks_ahead and len(ranks) > 0,
        other_qkv=0 if request.rows is None else request.rows.qkv,
        other_output=0 if request.rows is None else request.rows.output,
        other_head=0 if request.rows is None else request.rows.head,
        chunk_planes=PLANES[request.chunk_type],
        upper_steps=(request.token_type, request.step_type) == ("int16", "int8")
        and request.step_tokens > 1,
        # With gates that are known there is less to read in a row: measured in notes/kernels.md.
        passes=request.passes or (1 if request.gate_rows is None else 2),
        architecture=request.architecture,
        features=tuple(sorted(request.features)),
        norm=model.norm.kind,
        norm_bias=model.norm.bias,
        norm_inputs=model.norm.inputs,
        norm_outputs=model.norm.outputs,
        parallel=model.residual == "parallel",
        keeps_input=model.residual == "parallel"
        or _routes_by_input(model)
        or model.altup is not None,
        weighs_input=model.moe is not None and model.moe.weighs == "input",
        experts=0 if model.moe is None else model.expert_count,
        side_ffn=model.side_width,
        side_norms=model.side_ffn is None or model.side_ffn.norms,
        latent_experts=0 if model.moe is None else model.moe.latent or 0,
        layer_input=_describe_layer_input(model),
        altup=_describe_altup(model),
        cutoff_rows=count_stored_cutoff_rows(model) if model.cut_layers else 0,
        router=_describe_router(model),
        embedding_norm=model.norm.embedding,
        positions=model.positions is not None,
        output_bias=model.attention.output_bias,
        head_norm=first.head_norm,
        head_norm_of=model.attention.head_norm_of,
        head_norm_place=model.attention.head_norm_place,
        qkv_clip=model.attention.clip,
        sinks=model.attention.sinks,
        value_norm=model.attention.value_norm,
        value_scale=model.attention.value_scale,
        growth=model.attention.growth > 0,
        score_scale=model.attention.scale,
        score_cap=model.attention.softcap,
        chunked_windows=model.attention.window_kind == "chunked",
        others=tuple(others),
        layer_scale=model.layer_scale,
        gated=model.ffn.gated,
        slope=model.ffn.slope,
        gate_limit=model.ffn.limit,
        up_offset=model.ffn.up_offset,
        ffn_bias=model.ffn.bias,
        sub_norm=model.layer_neurons if model.ffn.sub_norm else 0,
        attention_sub_norm=model.attention.sub_norm,
        embedding_factor=model.multipliers.embedding,
        residual_factor=model.multipliers.residual,
        logit_factor=model.multipliers.logits,
        logit_cap=model.logit_softcap,
        head_bias=model.head_bias,
        scales=request.bundle.scales,
        output_gate=model.attention.output_gate,
        softplus_gates=model.attention.output_gate_function == "softplus",
        latent=describe_latent(model),
        state=describe_state(model),
    )


def describe_attention(own: Attention) -> AttentionShape:
    """Return what attention of a layer may differ in from that of other layers."""
    return AttentionShape(
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_dim=own.head_dim,
        window=own.window,
        borrows_keys=not own.has_keys,
        head_norm=own.head_norm,
    )


def list_attention_shapes(model: Model) -> list[AttentionShape]:
    """Return the shapes of attention that layers have, each once."""
    # A model without attention needs sizes, too.
    found = [block.attention for block in model.blocks if block.attention is not None]
    return list(dict.fromkeys(map(describe_attention, found or [list_attention(model)[0][0]])))


def _describe_layer_input(model: Model) -> LayerInputShape | None:
    """What layers have of their own; None where they have nothing."""
    own = model.layer_embedding
    if own is None:
        return None
    return LayerInputShape(
        layers=model.shape.layers,
        width=own.width,
        factor=own.factor,
        projection_factor=own.projection_factor,
    )


def _describe_altup(model: Model) -> AltUpShape | None:
    """Several residual streams; None where there is one."""
    altup = model.altup
    if altup is None:
        return None
    return AltUpShape(streams=altup.streams, laurel_rank=altup.laurel_rank, scaled=altup.scaled)


def _describe_router(model: Model) -> RouterShape | None:
    """The router of a mixture; None where there is none, and where it chooses among groups or one
    expert at a time, has a norm of its own, or factors of the experts' weights."""
    moe = model.moe
    if moe is None or moe.router == "mixer" or moe.router == "none" or moe.groups > 1:
        return None
    if moe.router_input == "stream" or moe.expert_scale:
        return None
    if not any(block.ffn.has_router for block in model.blocks):
        return None
    return RouterShape(
        kind=moe.router,
        experts=moe.experts,
        active=moe.active_experts,
        normalise=moe.normalise_weights,
        scaling=moe.scaling,
        has_bias=moe.router_bias,
        has_choice_bias=moe.choice_bias,
        chooses_scores=moe.choice_bias_of == "score",
        shared=moe.shared_experts,
        shared_factor=moe.shared_factor,
        shared_gate=moe.shared_gate,
        reads_layer_input=_routes_by_input(model),
    )


def _routes_by_input(model: Model) -> bool:
    return model.moe is not None and model.moe.router_input == "layer"


def _knows_gates(request: BuildRequest) -> bool:
    return request.gate_rows is not None
