"""Instructions with random arguments in odd shapes, by library, to compare interpreters with."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.contract import (
    ACTIVATIONS,
    ATTENTION,
    COMMON,
    FIELDS,
    INDEX,
    KV_TYPES,
    NORM_PLACES,
    ROUTERS,
    ROUTING,
    STATES,
    name_attention,
)
from pi2.backends.blocks.room import describe_order, list_offsets
from pi2.backends.blocks.sizes import (
    PARTIAL,
    PARTS,
    count_attention_bytes,
    count_quantized_bytes,
    count_tile_tokens,
)
from pi2.formats import find_format
from pi2.plan.arithmetic.units import find_index_type
from tests.helpers.blocks import Numpy, make_blocks, put_edges
from tests.helpers.kernels import allocate

BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(FIELDS, 5e-7),
    **dict.fromkeys(("keep", "keep_index", "take_rows", "group", "choose"), 0.0),
    **dict.fromkeys(("cap", "gate"), 1e-6),
    **dict.fromkeys(("attend", "attend_chosen", "join", "attend_many", "rank"), 1e-5),
}
"""Most that an element of each kernel's results may differ, of itself and of `Case.sizes`."""
FILL = np.float32(np.nan)
SEQUENCES = np.array([0, 1, 0, 0, 1], np.int32)
POSITIONS = np.array([0, 3, 1, 2, 4], np.int32)
"""Tokens of two sequences: one begins, and one goes on."""
TOKENS = len(SEQUENCES)
HERE = {"sequences": SEQUENCES, "positions": POSITIONS}
KV_COUNTS = {"fp16": (4, 3, 2, 1), "fp32": (4, 1), "int8": (4, 1)}
LIBRARIES: Mapping[str, str] = {
    **{f"{ATTENTION} {kind}": name_attention(kind, own) for kind, own in KV_COUNTS.items()},  # type: ignore[arg-type]
    **{f"{INDEX} {kind}": name_attention(kind, own, INDEX) for kind, own in KV_COUNTS.items()},  # type: ignore[arg-type]
    **{name: name for name in (COMMON, ROUTING, STATES)},
}
"""Libraries of no format, by what tests call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kernel: str
    items: int
    values: dict[str, Any]
    """Arrays, numbers, and floats, by the names of arguments."""
    format: str | None = None
    kv: Any = "fp16"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes by which errors of some arrays are measured, instead of 1."""
    unread: frozenset[str] = field(default=frozenset({"scratch"}))
    """Arrays that mean nothing afterwards."""


class Draw:
    """Random numbers, the same for a seed."""

    def __init__(self, lanes: int, seed: int = 3) -> None:
        self.lanes, self._generator = lanes, np.random.default_rng(seed)

    def floats(self, *shape: int, gap: int = 0) -> F32:
        """Numbers [..., n]; ``gap`` elements after each vector are none."""
        found = self._generator.standard_normal((*shape[:-1], shape[-1] + gap)).astype(np.float32)
        found[..., shape[-1] :] = FILL
        return found

    def order(self, count: int) -> Any:
        return self._generator.permutation(count).astype(np.int32)

    def choices(self, most: int, count: int) -> Any:
        return self._generator.integers(0, most, count).astype(np.int32)

    def blocks(self, name: str, rows: int, length: int) -> Any:
        """Rows of a format, the first of which have the largest and smallest scales."""
        own = find_format(name)
        raw = make_blocks(own, rows * length // own.block, self._generator).reshape(rows, -1)
        put_edges(own, raw)
        return raw


def empty(*shape: int) -> F32:
    return np.full(shape, FILL, np.float32)


def put(name: str, array: Any) -> dict[str, Any]:
    """Vectors of tokens [T, ..., n] and their stride."""
    return {name: array, f"{name}_stride": array[0].size}


# What has no format


def list_common(draw: Draw) -> Iterator[Case]:
    yield from list_norms(draw)
    yield from list_quantized(draw)
    yield from list_turns(draw)
    yield from list_gates(draw)
    yield from list_streams(draw)
    for case in list_attention("fp16", draw):
        if case.kernel == "attend":
            Numpy(draw.lanes).run(case)
            items = len(case.values["positions"]) * case.values["heads"]
            unread = case.unread | {"partials"}
            yield Case(kernel="join", items=items, values=case.values, unread=unread)


def list_norms(draw: Draw) -> Iterator[Case]:
    length = 77
    for centred, added, weighs, biased in itertools.product((0, 1), repeat=4):
        values = put("x", draw.floats(TOKENS, length, gap=3)) | put("y", draw.floats(TOKENS, 80))
        values |= {"weights": draw.floats(length), "bias": draw.floats(length), "length": length}
        values |= {"has_weights": weighs, "has_bias": biased, "centred": centred, "added": added}
        yield Case(
            kernel="normalize", items=TOKENS, values=values | {"epsilon": 1e-5, "factor": 0.25}
        )


def list_quantized(draw: Draw) -> Iterator[Case]:
    width = 4 * draw.lanes
    for name, more in itertools.product(("", "q4_k", "q2_k", "q6_k", "iq4_xs"), (0, 1)):
        order = np.array(list_offsets(name, width), np.int64)
        yield make_quantized(draw, "q8_k", 768, {"order": order, "has_rest": more})
    names = ("q8_0", "q4_0", "q1_0", "q2_0")
    for name, more, lower in itertools.product(names, (0, 1), (0, 1)):
        own = {"together": describe_order(name, width), "rounds": 1 - lower, "upper": lower}
        yield make_quantized(draw, "q8_0", 1184, own | {"has_rest": more})


def make_quantized(draw: Draw, kind: Any, length: int, values: dict[str, Any]) -> Case:
    x = draw_inputs(draw, length)
    planes = np.zeros((2, len(x), count_quantized_bytes(kind, length)), np.uint8)
    # The plane above, of which scales and sums are there, lies behind.
    planes[1, :, length:].view(np.float32)[:] = np.abs(draw.floats(len(x), 1)) * 100
    y = {"y": planes, "y_stride": planes[0, 0].size}
    if values.get("upper"):
        values = values | {"upper": -planes[0].nbytes}
    values = {**put("x", x), **y, **put("rest", empty(len(x), length + 5))} | values
    items = len(x) * length // (256 if kind == "q8_k" else 32)
    return Case(
        kernel=f"quantize_{kind}",
        items=items,
        values=values | {"length": length},
        sizes={"rest": np.pad(np.abs(x), ((0, 0), (0, 5)))},
    )


def draw_inputs(draw: Draw, length: int) -> F32:
    """Tokens with zeros, large numbers, and codes that are all as large as can be."""
    x = draw.floats(7, length)
    x[1, :256] = 0.0
    x[2] *= 1e4
    x[3], x[4] = 1.0, np.where(np.arange(length) % 3, -2.0, 2.0)
    return x


def list_turns(draw: Draw) -> Iterator[Case]:
    heads, width = 3, 46
    for place, rotated, neighbours, swapped in (
        *((place, 46, 0, 0) for place in NORM_PLACES),
        *(("before", 34, 1, 0), ("none", 34, 0, 1), ("none", 34, 1, 1), ("after", 0, 0, 0)),
    ):
        x = draw.floats(TOKENS, heads * width, gap=2)
        values = put("x", x) | {"weights": draw.floats(width), "positions": POSITIONS}
        values |= {"cos": draw.floats(8, 25), "sin": draw.floats(8, 25), "table_stride": 25}
        values |= {"heads": heads, "head_dim": width, "rotated": rotated, "epsilon": 1e-6}
        values |= {"neighbours": neighbours, "swapped": swapped}
        values["norm_place"] = NORM_PLACES.index(place)
        yield Case(kernel="turn", items=TOKENS * heads, values=values)


def list_gates(draw: Draw) -> Iterator[Case]:
    length = 1061
    for name, ups in itertools.product(ACTIVATIONS, (0, 1)):
        if ups == (name == "xielu") and name in ("swiglu", "cut_silu", "xielu"):
            continue
        gates = draw.floats(TOKENS, length + 3) * np.float32(4)
        values = {"gates": gates, "ups": draw.floats(TOKENS, length + 3), "has_ups": ups}
        values |= put("y", empty(TOKENS, length + 1)) | {"x_stride": length + 3, "slope": 1.7}
        values |= {"length": length, "kind": ACTIVATIONS.index(name), "limit": 1.5}
        # As large as gates and ups are.
        yield Case(
            kernel="gate",
            items=2 * TOKENS,
            values=values | {"up_offset": 0.5 * ups},
            sizes={"y": 4.0},
        )
    for limit in (0.0, 3.0, -0.5):
        values = put("x", draw.floats(TOKENS, length)) | put("y", empty(TOKENS, length + 1))
        values |= {"length": length, "limit": limit, "factor": 2.5}
        yield Case(kernel="cap", items=2 * TOKENS, values=values)
    x = partial(draw.floats, TOKENS, length, gap=2)
    own = {"length": length, "positions": POSITIONS, "factors": draw.floats(8)}
    yield Case(kernel="grow", items=TOKENS, values=put("x", x()) | own)
    for width, block in ((96, 32), (256, 256), (48, 16)):
        values = put("x", draw.floats(TOKENS, 3 * width + 5)) | {"heads": 3, "head_dim": width}
        yield Case(kernel="spread_heads", items=3 * TOKENS, values=values | {"block": block})
    cut = {"length": length, "deviations": 0.3}
    yield Case(kernel="cut", items=TOKENS, values=put("x", x()) | cut)
    for weighs in (0, 1):
        values = put("x", x()) | put("y", x()) | {"has_weights": weighs, "length": length}
        yield Case(kernel="term", items=TOKENS, values=values | {"weights": draw.floats(length)})


def list_streams(draw: Draw) -> Iterator[Case]:
    length, count = 37, 3
    for kernel in ("predict", "correct", "match"):
        values: dict[str, Any] = {
            name: draw.floats(TOKENS, count * length, gap=4) for name in ("x", "y")
        }
        values |= {"stride": count * length + 4, "length": length, "count": count}
        values |= put("factors", draw.floats(TOKENS, count * count))
        if kernel == "match":
            values |= put("x", draw.floats(TOKENS, length + 2))
        yield Case(kernel=kernel, items=TOKENS, values=values)
    for count, rounds in ((3, 20), (4, 1)):
        factors, side = count * (count + 2), (count + 1) ** 2
        values = put("x", draw.floats(TOKENS, factors, gap=3)) | {"bias": draw.floats(factors)}
        values |= put("read", empty(TOKENS, side + 1)) | put("kept", empty(TOKENS, side + 2))
        values |= {"scales": draw.floats(3), "count": count, "epsilon": 1e-3, "rounds": rounds}
        yield Case(kernel="mix", items=TOKENS, values=values)
    for length, count in ((37, 3), (1100, 2)):
        width, sizes = count * length, {"length": length, "count": count}
        streams = partial(draw.floats, TOKENS, width, gap=3)
        values = put("x", streams()) | put("gates", streams()) | put("y", empty(TOKENS, length + 1))
        yield Case(kernel="collapse", items=TOKENS * -(-length // 1024), values=values | sizes)
        values = put("x", draw.floats(TOKENS, length)) | put("y", streams())
        values |= put("weights", draw.floats(TOKENS, count, gap=1)) | sizes
        yield Case(kernel="inject", items=TOKENS, values=values)
        values = put("keys", streams()) | put("queries", streams()) | sizes
        values |= put("values", draw.floats(TOKENS, length)) | put("y", empty(TOKENS, width))
        yield Case(kernel="admit", items=TOKENS * count, values=values)


# Attention


def list_attention(kind: Any, draw: Draw) -> Iterator[Case]:
    yield from list_kept(kind, draw)
    for group, window, chunked, sinks, cap in (
        *((7, 0, 0, 1, 0.0), (3, 300, 0, 0, 2.0), (6, 300, 1, 1, 0.0), (1, 0, 0, 0, 0.0)),
        *((5, 20, 0, 1, 3.0),),
    ):
        own = {"window": window, "is_chunked": chunked, "has_sinks": sinks, "cap": cap}
        own["has_slopes"] = sinks
        positions = np.array([0, 19, 300, 811, 812], np.int32)
        for parts in (PARTS, 1):
            yield make_attention(kind, draw, positions, group, own | {"parts": parts})
        chunk = np.arange(290, 290 + 2 * count_tile_tokens(group) + 1, dtype=np.int32)
        yield make_attention(kind, draw, chunk, group, own | {"parts": 1}, is_many=True)
    own = {"window": 0, "is_chunked": 0, "has_sinks": 0, "cap": 0.0, "parts": PARTS}
    # More heads share keys than a tile has queries.
    chunk = np.arange(290, 292, dtype=np.int32)
    yield make_attention(kind, draw, chunk, 50, own | {"parts": 1}, is_many=True)
    # Tokens from there on attend to chosen keys, and others to all.
    chunk, reach = np.arange(290, 303, dtype=np.int32), {"reach": 295, "parts": 1}
    yield make_attention(kind, draw, chunk, 3, own | reach, is_many=True)
    yield make_attention(kind, draw, np.array([294, 295], np.int32), 3, own | {"reach": 295})
    positions = np.array([0, 400], np.int32)
    yield make_attention(kind, draw, positions, 4, own, is_latent=True)
    chunk = np.arange(40, 71, dtype=np.int32)
    yield make_attention(kind, draw, chunk, 4, own | {"parts": 1}, is_many=True, is_latent=True)


def draw_cache(kind: Any, draw: Draw, heads: int, context: int, width: int) -> tuple[Any, Any]:
    """Vectors [2, heads, context, width], and scales for int8 ones."""
    elements = draw.floats(2, heads, context, width)
    if kind == "int8":
        elements = np.rint(40 * elements).clip(-127, 127)
    scales = np.abs(draw.floats(2, heads, context)) / 40
    return elements.astype(KV_TYPES[kind]), scales.astype(np.float16)


def place_cache(
    name: str, arrays: tuple[Any, Any], width: int, *, is_latent: bool = False
) -> dict[str, Any]:
    elements, scales = arrays
    sequence, head, _, _ = (step // elements.itemsize for step in elements.strides)
    return {
        f"{name}_cache": elements,
        f"{name}_scales": scales,
        f"{name}_width": width,
        f"{name}_sequence_stride": sequence,
        f"{name}_head_stride": 0 if is_latent else head,
    }


def list_kept(kind: Any, draw: Draw) -> Iterator[Case]:
    heads, widths = 3, {"key": 37, "value": 21}
    for has_values in (True, False):
        stride = heads * widths["key"] + 5
        values: dict[str, Any] = {"x_stride": stride, "heads": heads, **HERE}
        for name, width in widths.items():
            own = draw_cache(kind, draw, heads, 48, width)
            used = width if has_values or name == "key" else 0
            values |= place_cache(name, own, used)
            values[f"{name}s"] = draw.floats(TOKENS, stride)
        values["keys"][2] = 0.0
        yield Case(kernel="keep", items=heads * TOKENS, values=values, kv=kind)


def make_attention(
    kind: Any,
    draw: Draw,
    positions: Any,
    group: int,
    values: dict[str, Any],
    *,
    is_many: bool = False,
    is_latent: bool = False,
    widths: tuple[int, int] = (53, 37),
    context: int | None = None,
) -> Case:
    """Attention of two groups of heads; a chunk is of sequence 1, and fills registers."""
    count, kv_heads, heads = len(positions), 1 if is_latent else 2, 2 * group
    key, value = (48, 32) if is_many or is_latent else widths
    # Positions of a window go round.
    context = context or (448 if values["window"] else 832)
    keys = draw_cache(kind, draw, kv_heads, context, key)
    held = keys if is_latent else draw_cache(kind, draw, kv_heads, context, value)
    sequences = np.ones(count, np.int32) if is_many else np.arange(count, dtype=np.int32) % 2
    tile, stride = count_tile_tokens(group), key if is_latent else value
    scratch = allocate("uint8", count_attention_bytes(key, value))
    size = heads, values["parts"], value + PARTIAL
    items = 2 * (-(-count // tile) if is_many else count * values["parts"])
    return Case(
        kernel="attend_many" if is_many else "attend", items=items, kv=kind,
        values={
            "queries": draw.floats(count, heads * key, gap=3), "query_stride": heads * key + 3,
            "heads": heads, "group": group, "value_stride": stride, "scale": 0.2,
            **place_cache("key", keys, key, is_latent=is_latent),
            **place_cache("value", held, value, is_latent=is_latent), "sequences": sequences,
            "positions": positions, "sinks": draw.floats(heads),
            "slopes": np.abs(draw.floats(heads)) / 8, "has_slopes": 0,
            **put("y", empty(count, heads * value + 1)), "tokens": count, "tile": tile,
            "partials": empty(count, *size), **put("scratch", scratch[None]),
            "reach": 0, "chosen": allocate("int32", 512), "lists": 0, "list_stride": 0, **values,
        },
    )  # fmt: skip


def list_pooled(kind: Any, draw: Draw) -> Iterator[Case]:
    sequences, positions = np.array([0, 1, 1], np.int32), np.array([3, 9, 11], np.int32)
    here = {"sequences": sequences, "positions": positions}
    for overlaps, block in ((0, 10), (1, 4), (1, 2)):
        width, ring = 37, 20
        length = 2 * width * (1 + overlaps)
        memory = {"memory": draw.floats(2, ring, length), "sequence_stride": ring * length}
        memory |= {"ring": ring, **here}
        values = memory | put("x", draw.floats(3, length, gap=1)) | {"length": length}
        yield Case(kernel="record", items=3, kv=kind, values=values)
        values = memory | put("y", empty(3, width + 1)) | {"width": width, "block": block}
        values |= {"overlaps": overlaps, "bias": draw.floats(block, length // 2)}
        values |= {name: np.full(3, -1, np.int32) for name in ("starts", "rows")}
        yield Case(kernel="pool", items=3, kv=kind, values=values | {"base": 16, "spare": 24})
        values = {"window": 5, "block": block, "base": 16, "positions": positions}
        values |= {"chosen": allocate("int32", 3, 48), "list_stride": 48}
        yield Case(kernel="see", items=3, kv=kind, values=values)


def list_index(kind: Any, draw: Draw) -> Iterator[Case]:
    own_kind = find_index_type(kind)
    for case in list_kept(own_kind, draw):
        yield replace(case, kernel="keep_index", kv=kind)
    # Ends are whole registers: behind them kernels write scores that nobody reads.
    positions = np.array([15, 47, 303], np.int32)
    for of_tokens, heads, width, block in ((1, 11, 37, 1), (0, 3, 16, 5)):
        lists = 1 if of_tokens else heads
        for kernel, parts in (("rank", PARTS), ("choose", PARTS), ("choose", 1)):
            keys = draw.floats(2, 1, 320, width).astype(KV_TYPES[own_kind])
            scores = empty(3, lists, 320) if kernel == "rank" else draw.floats(3, lists, 320)
            scores = np.round(scores) if parts == 1 else scores  # many are equal
            values = {
                **put("queries", draw.floats(3, heads * width, gap=3)), "heads": heads,
                **put("weights", draw.floats(3, heads)), "has_weights": of_tokens, "width": width,
                "lists": lists, "key_cache": keys, "key_sequence_stride": 320 * width,
                "sequences": np.array([0, 1, 1], np.int32), "positions": positions,
                "scores": scores, "scores_stride": 320, "count": 4,
                "chosen": allocate("int32", 3, lists, 128), "list_stride": 128, "block": block,
                "local": 1 - of_tokens, "reach": 4 * block, "parts": parts,
                **put("scratch", allocate("uint8", 1, 4 * width * draw.lanes)),
            }  # fmt: skip
            values["query_stride"] = values.pop("queries_stride")
            unread = frozenset({"scratch"} | ({"scores"} if kernel == "choose" else set()))
            items = 3 * (PARTS if kernel == "rank" else 1)
            yield Case(kernel=kernel, items=items, values=values, kv=kind, unread=unread)
    yield from list_pooled(kind, draw)
    own = {"window": 0, "is_chunked": 0, "has_sinks": 1, "cap": 2.0, "reach": 300}
    for group, is_latent, lists in ((3, False, 2), (4, True, 1)):
        for parts in (PARTS, 1):
            case = make_attention(
                kind, draw, np.array([20, 700, 811], np.int32), group, own | {"parts": parts},
                is_latent=is_latent,
            )  # fmt: skip
            listing = allocate("int32", 3, lists, 16 + 700 + 64)
            for token, count in ((1, 620), (2, 290)):
                for row in listing[token]:
                    row[0], row[16 : 16 + count] = count, np.sort(draw.order(700)[:count])
            more = {"chosen": listing, "lists": lists, "list_stride": listing.shape[-1]}
            yield replace(case, kernel="attend_chosen", values=case.values | more)


# Experts


def list_routing(draw: Draw) -> Iterator[Case]:
    experts, active = 24, 5
    plain = {"bias_of_score": 0, "groups": 1, "active_groups": 1, "best_two": 0}
    plain |= {"has_choice_bias": 0, "has_expert_scale": 0, "normalise": 0, "has_table": 0}
    for kind, own in (
        *((kind, plain) for kind in ROUTERS),
        ("softmax", plain | {"normalise": 1, "has_expert_scale": 1}),
        ("sigmoid", plain | {"has_choice_bias": 1, "groups": 4, "active_groups": 2}),
        ("sigmoid", plain | {"groups": 6, "active_groups": 2, "best_two": 1, "normalise": 1}),
        ("softmax", plain | {"has_choice_bias": 1, "bias_of_score": 1}),
        ("root_softplus", plain | {"normalise": 1, "has_table": 1}),
    ):
        values = put("scores", draw.floats(TOKENS, experts, gap=1)) | own
        values |= {"chosen": np.full((TOKENS, active), -1, np.int32)}
        values |= {"weights": empty(TOKENS, active), "experts": experts, "active": active}
        values |= {name: draw.floats(experts) for name in ("choice_bias", "expert_scale")}
        values |= {"scaling": 2.5, "tolerance": 0.4, "kind": ROUTERS.index(kind)}
        table = np.argsort(draw.floats(7, experts))[:, :active].astype(np.float32)
        values |= {"numbers": np.arange(TOKENS, dtype=np.int32) % 7, "table": table}
        values |= put("scratch", allocate("uint8", 1, 4 * (2 * experts + own["groups"])))
        yield Case(kernel="route", items=TOKENS, values=values)
    chosen = draw.choices(9, 33)
    values = {"chosen": chosen, "active": 3, "tokens": 11, "experts": 9}
    values |= {"starts": np.full(10, -1, np.int32), "pairs": np.full(33, -1, np.int32)}
    yield Case(kernel="group", items=1, values=values)
    values = put("x", draw.floats(TOKENS, 37, gap=1)) | put("scores", draw.floats(TOKENS, 2))
    yield Case(kernel="weigh", items=TOKENS, values=values | {"length": 37})
    chosen = np.arange(TOKENS)[:, None] + np.arange(3)
    for has_scores in (0, 1):
        values = {"chosen": chosen.astype(np.int32), "weights": draw.floats(TOKENS, 3)}
        values |= {"active": 3, "experts": 9, "shared": 2, "factor": 0.5, "length": 12}
        values |= put("scores", draw.floats(TOKENS, 1)) | put("y", empty(TOKENS, 12))
        yield Case(kernel="spread", items=TOKENS, values=values | {"has_scores": has_scores})
