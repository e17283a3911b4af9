"""The kernels of a specification."""

from __future__ import annotations

from collections.abc import Iterator

from pi2.backends.gpu.kernels.attention import list_attention_kernels
from pi2.backends.gpu.kernels.code import Kernel
from pi2.backends.gpu.kernels.ffn import list_few_kernels, list_many_kernels, make_join
from pi2.backends.gpu.kernels.gathered import list_gathered_kernels, make_gates, make_select
from pi2.backends.gpu.kernels.products import list_product_kernels
from pi2.backends.gpu.kernels.routing import (
    list_embedding_kernels,
    list_norm_kernels,
    list_router_kernels,
    make_read,
)
from pi2.backends.gpu.kernels.specification import GpuSpec
from pi2.backends.gpu.kernels.states import list_state_kernels


def list_kernels(spec: GpuSpec) -> Iterator[Kernel]:
    if spec.ffn is not None:
        yield from list_few_kernels(spec.ffn, spec.target.fp16)
        yield from list_many_kernels(spec.ffn, spec.target.fp16)
    if spec.gathered is not None:
        yield from list_gathered_kernels(spec.gathered, spec.target.fp16)
        if spec.ffn is None:
            yield make_join(spec.gathered)
    if spec.gates is not None:
        yield make_gates(spec.gates, spec.target.fp16)
    if spec.select is not None:
        yield make_select(spec.select)
    if spec.router is not None:
        yield from list_router_kernels(spec.router)
    for product in spec.products:
        yield from list_product_kernels(product, spec.target.fp16)
    if spec.embedding is not None:
        yield from list_embedding_kernels(spec.embedding, spec.target.fp16)
    if spec.norm is not None:
        yield from list_norm_kernels(spec.norm)
    if spec.attention is not None:
        yield from list_attention_kernels(spec.attention)
    if spec.state is not None:
        yield from list_state_kernels(spec.state)
    if spec.reads:
        yield make_read()
