"""Bytes of what is kept of tokens: keys and values, and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pi2.plan.arithmetic.mixers import count_state_bytes
from pi2.plan.arithmetic.needs import Need
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import align_bytes, round_up
from pi2.plan.weights.projections import list_kept_vectors

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import Plan
    from pi2.plan.documents.plan_memory import KvType

KV_TOKENS = 16
"""The KV cache holds a multiple of this many tokens."""
KV_ELEMENT_BYTES: Mapping[KvType, int] = {"fp32": 4, "fp16": 2, "int8": 1}
"""Bytes of an element of the KV cache."""
KV_SCALE_BYTES = 2
"""Bytes of the scale that every vector of an int8 cache has."""


def count_kv_token_bytes(model: Model, kind: KvType) -> int:
    """Bytes that a layer keeps of one token; the mean of all layers."""
    scale, total = KV_SCALE_BYTES if kind == "int8" else 0, 0
    for view, layers in model.list_views():
        kinds, count, size = list_kept_vectors(view)
        total += layers * kinds * count * (size * KV_ELEMENT_BYTES[kind] + scale)
    return total // model.shape.layers


def need_kv(plan: Plan, model: Model) -> Need:
    """Keys and values: 2 L tokens k w elements, tokens rounded up to a multiple of 16, for every
    sequence of a batch; with latent attention L tokens times what is kept of each.

    int8 has a scale of 2 bytes besides for every vector of w elements.
    """
    tokens, batch = round_up(plan.kv.context, KV_TOKENS), plan.decode.batch
    element = KV_ELEMENT_BYTES[plan.kv.type]
    total, parts = 0, []
    for view, layers in model.list_views():
        kinds, count, size = list_kept_vectors(view)
        if not kinds:
            continue
        row, scales = count * size, ""
        total += kinds * batch * layers * align_bytes(tokens * row * element)
        if plan.kv.type == "int8":
            total += kinds * batch * layers * align_bytes(tokens * count * KV_SCALE_BYTES)
            scales = f", and {count} scale{'s' if count > 1 else ''}"
        parts.append(
            ("" if batch == 1 else f"{batch} sequences x ")
            + ("2 (keys, values) x " if kinds == 2 else "")
            + f"{layers} layers x {tokens} tokens x {row} elements "
            f"of {element} byte{'s' if element > 1 else ''}{scales}"
        )
    return Need(total, "; ".join(parts))


def need_state(plan: Plan, model: Model) -> Need:
    """States: per state of a layer and sequence, the convolution's earlier tokens and the
    recurrent state, float32; twice where tokens are guessed, which may have to be taken back."""
    states, batch, each = len(model.states), plan.decode.batch, count_state_bytes(model)
    if not states:
        return Need(0, "nothing, every layer keeps keys and values")
    several = "" if batch == 1 else f"{batch} sequences x "
    copies = 1 if plan.decode.speculation is None else 2
    several += "" if copies == 1 else "2 (with a copy) x "
    return Need(
        copies * batch * states * each,
        f"{several}{states} states of {approximate_bytes(each)} each",
    )
