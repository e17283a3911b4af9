"""Write a GGUF file of random weights in the shape of a known model.

    python tools/write_random_mixture.py qwen3-30b-a3b --layers 12 FILE.gguf
    python tools/write_random_mixture.py llama-2-7b --format q8_0 FILE.gguf

For measuring speed in shapes that nobody has at hand: the text means nothing, and routers choose
experts about evenly, which is the worst case for a cache.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from limited.random_gguf import add_tokenizer
from limited.shapes import Shape, Tensor, read_shapes
from pi2.arrays import U8
from pi2.formats import find_format

POOL_BLOCKS = 1 << 17
"""Different blocks of a tensor, which repeat."""


def draw_blocks(name: str, length: int, generator: np.random.Generator) -> U8:
    """Random blocks [n, bytes], whose numbers deviate by ``1 / sqrt(length)`` from 0."""
    own, wanted = find_format(name), 1 / math.sqrt(length)
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
            writer.add_array(key, value)
    add_tokenizer(writer, own.vocab, own.vocab - 1)


_ZEROS = ("bias", "sinks", "ssm_a", "ssm_d")
_FALLBACKS = {"q6_k": "q8_0"}


def fit_format(tensor: Tensor) -> str:
    """Return the format of a tensor, or the one that llama.cpp's quantiser takes instead if rows
    are no whole number of its blocks."""
    if tensor.shape[-1] % find_format(tensor.format).block == 0:
        return tensor.format
    return _FALLBACKS.get(tensor.format, "q5_0")


def draw_tensor(tensor: Tensor, pools: dict[tuple[str, int], U8], begin: int) -> U8:
    """Bytes of a tensor; ``begin``: the block of its pool that is the first."""
    count = math.prod(tensor.shape)
    if len(tensor.shape) == 1 or tensor.shape[-1] == 1 or "norm" in tensor.name:
        value = 0.0 if any(name in tensor.name for name in _ZEROS) else 1.0
        return np.full(count, -1.0 if "ssm_a" in tensor.name else value, np.float32).view(np.uint8)
    if tensor.format == "f32":
        generator = np.random.default_rng(begin)
        values = generator.standard_normal(count, np.float32) / math.sqrt(tensor.shape[-1])
        return (values * np.float32(2)).view(np.uint8)
    key = tensor.format, tensor.shape[-1]
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
    options = parser.parse_args()
    own = shapes[options.shape]
    if one := options.format:
        own = replace(own, dense=one, inputs=one, outputs=(one,), head=own.head and one)
    layers = options.layers or own.layers
    writer = GGUFWriter(options.file, own.architecture)
    writer.add_name(f"{options.shape}, {layers} layers, random weights")
    write_settings(writer, own, layers)
    tensors = [replace(tensor, format=fit_format(tensor)) for tensor in own.list_tensors(layers)]
    for tensor in tensors:
        kind, size = GGMLQuantizationType[tensor.format.upper()], math.prod(tensor.shape)
        block = find_format(tensor.format)
        bytes_ = size // block.block * block.block_bytes
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), bytes_, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools: dict[tuple[str, int], U8] = {}
    for number, tensor in enumerate(tensors):
        writer.write_tensor_data(draw_tensor(tensor, pools, number * 1009))
    writer.close()


if __name__ == "__main__":
    main()
