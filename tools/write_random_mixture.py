"""Write a GGUF file of random weights in the shape of a known model.

    python tools/write_random_mixture.py qwen3-30b-a3b --layers 12 FILE.gguf
    python tools/write_random_mixture.py llama-2-7b --format q8_0 FILE.gguf

For measuring speed in shapes that nobody has at hand: the text means nothing.  Routers choose
experts about evenly, which is the worst case for a cache; with ``--routing published`` they choose
so that a cache hits as often as was published of such mixtures, if tokens follow each other in the
vocabulary's order.  With ``--empty`` the file has zeros that take no room, for `pi2 simulate`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType, GGUFWriter

from limited.random_gguf import OUTPUT_SHARE, add_tokenizer
from limited.shapes import Shape, Tensor, read_shapes
from pi2.arrays import U8
from pi2.formats import find_format
from synthesis.routers import solve_correlation, solve_deviation, spread_popularity
from synthesis.routing import describe_law

POOL_BLOCKS = 1 << 17
"""Different blocks of a tensor, which repeat."""
_EMBEDDING = "token_embd.weight"
_OUTPUTS = (
    "attn_output.weight",
    "ssm_out.weight",
    "out_proj.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
    "ffn_down.weight",
)
"""Ends of names of matrices whose products are added to the residual stream."""
_STREAM = 8.0
"""Deviation of embeddings, next to which layers add little."""
_MARK_SHARE = 0.25
"""Part of a token's vector, as a length, that all tokens have in common: popularity of experts."""
_ROWS = 1 << 14
"""Tokens that are drawn together."""


class Routing:
    """Embedding and routers of a mixture whose choices have published statistics."""

    def __init__(self, own: Shape) -> None:
        popular, self._reuse = describe_law(own.experts, own.active / own.experts)
        sizes = own.experts, own.active
        self._deviation = solve_deviation(*sizes, round(popular, 3))
        self._correlation = solve_correlation(*sizes, self._deviation, round(self._reuse, 3))

    def draw_embedding(self, tensor: Tensor) -> Iterator[U8]:
        """Bytes of rows; each token has as much in common with the one before as is wanted."""
        rows, width = tensor.shape
        generator, encode = np.random.default_rng(0), find_format(tensor.format).encode
        before = generator.standard_normal(width, np.float32)
        fresh = np.float32(math.sqrt(1 - self._correlation**2))
        mark = _STREAM * _MARK_SHARE * math.sqrt(width)
        for first in range(0, rows, _ROWS):
            drawn = generator.standard_normal((min(_ROWS, rows - first), width), np.float32)
            for row in drawn:
                row *= fresh
                row += np.float32(self._correlation) * before
                before = row
            values = drawn * np.float32(_STREAM * math.sqrt(1 - _MARK_SHARE**2))
            values[:, 0] = mark
            yield encode(values).reshape(-1)

    def draw_router(self, tensor: Tensor, layer: int) -> U8:
        """Bytes of a router: scores of deviation 1, and popularity."""
        experts, width = tensor.shape
        generator = np.random.default_rng(layer)
        values = generator.standard_normal((experts, width), np.float32)
        values /= np.float32(math.sqrt(width * (1 - _MARK_SHARE**2)))
        popularity = spread_popularity(experts, self._deviation, layer)
        values[:, 0] = popularity / (_MARK_SHARE * math.sqrt(width))
        return values.view(np.uint8).reshape(-1)


def draw_blocks(name: str, length: int, share: float, generator: np.random.Generator) -> U8:
    """Random blocks [n, bytes], whose numbers deviate by ``share / sqrt(length)`` from 0."""
    own, wanted = find_format(name), share / math.sqrt(length)
    if own.is_plain:
        values = generator.standard_normal((POOL_BLOCKS, own.block), np.float32) * wanted
        return own.encode(values).reshape(POOL_BLOCKS, own.block_bytes)
    raw = generator.integers(0, 256, (POOL_BLOCKS, own.block_bytes), np.uint8)
    if name == "mxfp4":
        raw[:, 0] = 127 + round(math.log2(wanted / 2.9))
        return raw

    def put(scales: list[float]) -> None:
        for place, scale in zip(own.halves, scales, strict=True):
            raw[:, place : place + 2] = np.array([scale], "<f2").view(np.uint8)

    # Minima of 4-bit blocks are taken off: 7.5 scales of the same mean.
    scales = [1.0, 7.5][: len(own.halves)]
    put(scales)
    size = float(np.std(own.decode(raw[:4096])))
    put([wanted / size * scale for scale in scales])
    return raw


def write_settings(writer: GGUFWriter, own: Shape, layers: int) -> None:
    for name, value in own.list_settings(layers).items():
        key = f"{own.architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            # Hashes of n-grams have 64 bits.
            is_wide = name.startswith("ple.") and name != "ple.layers"
            kind = GGUFValueType.UINT64 if is_wide else None
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kind)
    add_tokenizer(writer, own.vocab, own.vocab - 1)


_ZEROS = ("bias", "sinks", "ssm_a", "ssm_d")
_FALLBACKS = {"q6_k": "q8_0"}


def fit_format(tensor: Tensor) -> str:
    """Return the format of a tensor, or the one that llama.cpp's quantiser takes instead if rows
    are no whole number of its blocks."""
    if tensor.shape[-1] % find_format(tensor.format).block == 0:
        return tensor.format
    return _FALLBACKS.get(tensor.format, "q5_0")


def draw_tensor(
    tensor: Tensor, pools: dict[tuple[str, int, float], U8], begin: int, share: float = 1.0
) -> U8:
    """Bytes of a tensor; ``begin``: the block of its pool that is the first; ``share``: factor of
    its numbers."""
    count = math.prod(tensor.shape)
    if len(tensor.shape) == 1 or tensor.shape[-1] == 1 or "norm" in tensor.name:
        value = 0.0 if any(name in tensor.name for name in _ZEROS) else 1.0
        return np.full(count, -1.0 if "ssm_a" in tensor.name else value, np.float32).view(np.uint8)
    if tensor.format == "f32":
        generator = np.random.default_rng(begin)
        values = generator.standard_normal(count, np.float32) / math.sqrt(tensor.shape[-1])
        return (values * np.float32(2)).view(np.uint8)
    key = tensor.format, tensor.shape[-1], share
    if key not in pools:
        pools[key] = draw_blocks(*key, np.random.default_rng(len(pools)))
    pool = pools[key]
    blocks = count // find_format(tensor.format).block
    places = (np.arange(blocks) * 7 + begin) % len(pool)
    return pool.take(places, axis=0).reshape(-1)


def main() -> None:
    shapes = read_shapes()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--format", help="one for all, such as q4_0; default: as in Q4_K_M")
    parser.add_argument("--routing", choices=("even", "published"), default="even")
    parser.add_argument("--empty", action="store_true", help="write no numbers")
    options = parser.parse_args()
    own = shapes[options.shape]
    if one := options.format:
        own = replace(own, dense=one, inputs=one, outputs=(one,), head=own.head and one)
    layers = options.layers or own.layers
    writer = GGUFWriter(options.file, own.architecture)
    writer.add_name(f"{options.shape}, {layers} layers, random weights")
    write_settings(writer, own, layers)
    tensors = [replace(tensor, format=fit_format(tensor)) for tensor in own.list_tensors(layers)]
    routing = Routing(own) if options.routing == "published" else None
    if routing is not None:
        first = next(tensor for tensor in tensors if tensor.name == _EMBEDDING)
        tensors[tensors.index(first)] = replace(first, format="q8_0")
    for tensor in tensors:
        block, size = find_format(tensor.format), math.prod(tensor.shape)
        # Types that the package does not know.
        GGML_QUANT_SIZES.setdefault(block.number, (block.block, block.block_bytes))
        bytes_ = size // block.block * block.block_bytes
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), bytes_, raw_dtype=block.number
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if options.empty:
        assert writer.fout is not None
        sizes = (part.nbytes for part in writer.tensors[0].values())
        whole = sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes)
        end = writer.ggml_pad(writer.fout[0].tell(), writer.data_alignment)
        writer.fout[0].truncate(end + whole)
        writer.close()
        return
    pools: dict[tuple[str, int, float], U8] = {}
    for number, tensor in enumerate(tensors):
        if routing is not None and tensor.name == _EMBEDDING:
            data = np.concatenate(list(routing.draw_embedding(tensor)))
        elif routing is not None and tensor.name.endswith("ffn_gate_inp.weight"):
            data = routing.draw_router(tensor, number)
        elif routing is not None and tensor.name.endswith(_OUTPUTS):
            data = draw_tensor(tensor, pools, number * 1009, OUTPUT_SHARE)
        else:
            data = draw_tensor(tensor, pools, number * 1009)
        writer.write_tensor_data(data)
    writer.close()


if __name__ == "__main__":
    main()
