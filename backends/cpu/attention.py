"""Arguments of the attention kernels: weights of every layer, the KV cache, room to work in."""

from __future__ import annotations

from typing import Any

from pi2.backends.chunk_state import Arguments
from pi2.backends.cpu.arrays import Arrays, count_tiles
from pi2.backends.cpu.workspace import Workspace
from pi2.backends.kernels.spec import KV_DTYPES, SPANS, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.backends.rope import RopeTables
from pi2.plan.weights.tensor_names import name_layer_tensor


def bind_attention(
    request: BuildRequest,
    space: Workspace,
    spec: KernelSpec,
    arrays: Arrays,
    context: int,
    turned: list[RopeTables],
) -> list[list[Arguments]]:
    """Return the arrays of ``attend`` for each sequence and layer; its cache holds ``context``
    tokens."""
    mixed = space.make_activations(
        request.chunk, spec.width, spec.most_planes, tiles=count_tiles(spec)
    )
    qkv = space.wrap(space.make("float32", request.chunk, spec.qkv_rows))
    model = request.model
    ropes = [tuple(space.wrap(array) for array in tables.arrays) for tables in turned]
    spans = tuple(
        space.wrap(space.make("float32", spec.heads, SPANS, *size))
        for size in ((spec.head_dim,), (), ())
    )
    inputs = (arrays.x,) if arrays.kept is None else (arrays.x, arrays.kept)
    before = [
        (
            *inputs,
            *_wrap_weights(space, spec, layer),
            *ropes[model.find_rope(layer) is model.other_rope],
        )
        for layer in range(model.shape.layers)
    ]
    behind = (qkv, *arrays.hidden, *mixed, *spans)
    return [
        [(*given, *_make_cache(space, spec, context), *behind) for given in before]
        for _ in range(request.sequences)
    ]


def make_rope_tables(request: BuildRequest, space: Workspace, spec: KernelSpec) -> list[RopeTables]:
    """Return the tables of positions, and those of other layers if they differ."""
    size = (request.context, spec.head_dim // 2)
    return [
        RopeTables(
            rope, spec.head_dim, (space.make("float32", *size), space.make("float32", *size))
        )
        for rope in (request.model.rope, request.model.other_rope)
        if rope is not None
    ]


def _wrap_weights(space: Workspace, spec: KernelSpec, layer: int) -> Arguments:
    def wrap_if(there: bool, *kinds: str) -> list[Any]:
        names = [name_layer_tensor(layer, kind) for kind in kinds if there]
        return [view for name in names for view in space.wrap_tensor(name)]

    return (
        *space.wrap_norm(name_layer_tensor(layer, "attention_norm"), spec.norm_bias),
        *space.wrap_tensor(name_layer_tensor(layer, "qkv")),
        *wrap_if(spec.qkv_bias, "qkv_bias"),
        *wrap_if(spec.head_norm, "query_norm", "key_norm"),
        *space.wrap_tensor(name_layer_tensor(layer, "output")),
        *wrap_if(spec.output_bias, "output_bias"),
        *wrap_if(spec.norm_outputs, "attention_output_norm"),
    )


def _make_cache(space: Workspace, spec: KernelSpec, context: int) -> Arguments:
    """Return views of a layer's keys and values, and of their scales if they have any."""
    size = context * spec.kv_heads * spec.head_dim
    dtype = KV_DTYPES[spec.kv]
    cache = [space.wrap(space.make(dtype, size, segment="kv")) for _ in range(2)]
    if spec.kv == "int8":
        size = context * spec.kv_heads
        cache += [space.wrap(space.make("float16", size, segment="kv")) for _ in range(2)]
    return tuple(cache)
