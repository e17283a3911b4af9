"""What a model on a GPU is to do, and the kernels that it needs for that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pi2.backends.gpu.kernels.specification import (
    AttentionKernels,
    EmbeddingKernels,
    FfnKernels,
    GpuSpec,
    NormKernels,
    ProductKernels,
    RouterKernels,
    SelectKernels,
    StateKernels,
    Target,
)
from pi2.backends.gpu.sizes import count_experts, describe_model_ffn
from pi2.model.blocks import list_attention
from pi2.model.states import describe_state
from pi2.model.tensor import EMBEDDING, POSITIONS, DenseTensor, split_name
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.units import name_head
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType, PredictorMode
from pi2.plan.weights.layout import BundleLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """A model, and how plans may use it."""

    model: Model
    layout: BundleLayout
    """Bundles with their scales in them."""
    chunk: int
    """Most tokens that are computed together."""
    sequences: int
    context: int
    kv: KvType
    predictor: PredictorMode

    @property
    def is_sparse(self) -> bool:
        """Whether steps compute some neurons alone."""
        return self.predictor != "none"

    @property
    def adds_to_stream(self) -> bool:
        """Whether what attention gives is added to the residual stream as it is."""
        return self.model.multipliers.residual == 1.0 and not self.model.norm.outputs

    @property
    def ffn_adds_to_stream(self) -> bool:
        """The same of the FFN."""
        return self.adds_to_stream and not self.model.ffn.bias

    @property
    def ffn(self) -> FfnKernels:
        """Kernels of all neurons."""
        found = describe_model_ffn(self.layout, self.model)
        return dataclasses.replace(found, in_rows=self.is_sparse)

    def list_tensors(self) -> list[DenseTensor]:
        """Dense tensors of the store that the device has."""
        ranks = None
        if self.predictor == "low-rank" and self.model.predictor is not None:
            ranks = [self.model.predictor.rank] * self.model.shape.layers
        return list_tensors(self.model, ranks)

    @property
    def products(self) -> Mapping[str, ProductKernels]:
        """Kernels of products, by the kind of tensor; the head's is ``head``."""
        model, shape = self.model, self.model.shape
        pitch = None if shape.query == shape.stored_query else shape.stored_query
        options: dict[str, dict[str, Any]] = {
            **{key: {"adds": self.adds_to_stream} for key in ("output", "state_output")},
            "latent_key": {"blocks": shape.heads},
            "latent_value": {"blocks": shape.heads, "pitch": pitch},
            "predictor_in": {"relu": True},
            "predictor_out": {"bias": True, "blocks": model.expert_count},
        }
        tensors = {split_name(own.name)[1]: own for own in self.list_tensors()}
        tensors["head"] = tensors[name_head(model)]
        found = {}
        for kind, own in tensors.items():
            if own.packing.is_float32 or kind in (EMBEDDING, POSITIONS):
                continue
            wanted = {"bias": f"{kind}_bias" in tensors} | options.get(kind, {})
            found[kind] = ProductKernels(length=own.length, precision=own.precision, **wanted)
        return found

    @property
    def state(self) -> StateKernels | None:
        """Kernels of layers that keep a state."""
        shape = describe_state(self.model)
        return None if shape is None else StateKernels(shape=shape, epsilon=self.model.norm.epsilon)

    @property
    def attention(self) -> AttentionKernels:
        shape, attention = self.model.shape, self.model.attention
        latent = attention.latent
        _, kv_heads, size = list_attention(self.model)[0][0].kept
        attended = [block.attention for block in self.model.blocks if block.attention is not None]
        windows = {own.window for own in attended}
        return AttentionKernels(
            heads=shape.heads,
            kv_heads=kv_heads,
            head_dim=size,
            scale=attention.scale or 1 / math.sqrt(latent.key if latent else shape.head_dim),
            kv=self.kv,
            head_norm=attention.head_norm,
            some_plain=attention.head_norm_layers is not None,
            norm_after=attention.head_norm_place == "after",
            growth=attention.growth > 0,
            epsilon=self.model.norm.epsilon,
            score_cap=attention.softcap,
            window=max((window for window in windows if window is not None), default=None),
            chunked=attention.window_kind == "chunked",
            some_full=None in windows,
            sinks=attention.sinks,
            output_gate=attention.output_gate,
            latent=latent,
        )

    @property
    def router(self) -> RouterKernels | None:
        """Kernels of a mixture's router."""
        moe = self.model.moe
        if moe is None:
            return None
        return RouterKernels(
            length=self.model.shape.stored_hidden,
            moe=moe.model_copy(update={"dense_layers": (), "dense_ffn": None}),
            others=self.model.expert_count - moe.experts - moe.shared_experts,
            some_dense=bool(moe.dense_layers),
        )

    def describe_kernels(self, target: Target) -> GpuSpec:
        """Everything that is compiled for the model."""
        model, shape, norm = self.model, self.model.shape, self.model.norm
        ffn, experts = self.ffn, count_experts(model)
        return GpuSpec(
            target=target,
            ffn=ffn,
            gathered=ffn if self.is_sparse else None,
            gates=ffn if self.predictor == "gate" else None,
            select=SelectKernels(
                scored=self.predictor != "router",
                experts=experts,
                expert_neurons=shape.ffn if experts else 0,
            )
            if self.is_sparse
            else None,
            router=self.router,
            products=tuple(dict.fromkeys(self.products.values())),
            embedding=EmbeddingKernels(
                length=shape.stored_hidden,
                precision=model.quantization.embedding,
                factor=model.multipliers.embedding,
                positions=model.positions is not None,
            ),
            norm=NormKernels(
                length=shape.stored_hidden,
                width=shape.hidden,
                norm=norm,
                residual_factor=model.multipliers.residual,
                spreads=model.ffn.bias,
                experts=experts if model.ffn.bias else 0,
            ),
            attention=self.attention,
            state=self.state,
        )
