"""Write a GGUF file of random weights in the shape of a known model.

    python tools/write_random_mixture.py qwen3-30b-a3b --layers 12 FILE.gguf
    python tools/write_random_mixture.py llama-2-7b --format q8_0 FILE.gguf

For measuring speed in shapes that nobody has at hand: the text means nothing, and routers choose
experts about evenly, which is the worst case for a cache.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from limited.random_gguf import add_tokenizer
from pi2.arrays import U8
from pi2.formats import find_format

POOL_BLOCKS = 1 << 17
"""Different blocks of a tensor, which repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model as its GGUF files describe it."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    """0: the model is dense."""
    active: int
    width: int
    """Neurons of an expert, or of a dense layer."""
    vocab: int
    dense: str = "q4_k"
    """Format of attention's matrices and the embedding."""
    inputs: str = "q4_k"
    """Format of experts' gates and ups."""
    outputs: tuple[str, ...] = ("q6_k", "q4_k")
    """Formats of experts' downs, which alternate with layers."""
    head: str = "q6_k"
    theta: float = 1e6
    norms: str = "head"
    """Whether queries and keys have norms: of a ``head``, of ``all`` heads, or ``none``."""

    @property
    def has_biases(self) -> bool:
        """Whether projections, routers and experts have biases, and attention sinks (gpt-oss)."""
        return self.architecture == "gpt-oss"


SHAPES = {
    "llama-2-7b": Shape(
        architecture="llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        experts=0,
        active=0,
        width=11008,
        vocab=32000,
        theta=1e4,
        norms="none",
    ),
    "qwen3-8b": Shape(
        architecture="qwen3",
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        experts=0,
        active=0,
        width=12288,
        vocab=151936,
    ),
    "qwen3-30b-a3b": Shape(
        architecture="qwen3moe",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        active=8,
        width=768,
        vocab=151936,
    ),
    "olmoe-1b-7b": Shape(
        architecture="olmoe",
        layers=16,
        hidden=2048,
        heads=16,
        kv_heads=16,
        head_dim=128,
        experts=64,
        active=8,
        width=1024,
        vocab=50304,
        theta=1e4,
        norms="all",
    ),
    "gpt-oss-20b": Shape(
        architecture="gpt-oss",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        experts=32,
        active=4,
        width=2880,
        vocab=201088,
        dense="q8_0",
        inputs="mxfp4",
        outputs=("mxfp4",),
        head="q8_0",
        theta=150000.0,
        norms="none",
    ),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    format: str


def list_tensors(own: Shape, layers: int) -> Iterator[Tensor]:
    """Tensors in the order of files."""
    hidden, query, keys = own.hidden, own.heads * own.head_dim, own.kv_heads * own.head_dim
    yield Tensor("token_embd.weight", (own.vocab, hidden), own.dense)
    for layer in range(layers):
        block = f"blk.{layer}"
        norm = "post_attention_norm" if own.has_biases else "ffn_norm"
        for name in ("attn_norm", norm):
            yield Tensor(f"{block}.{name}.weight", (hidden,), "f32")
        for name, rows in (("q", query), ("k", keys), ("v", keys)):
            yield Tensor(f"{block}.attn_{name}.weight", (rows, hidden), own.dense)
            if own.has_biases:
                yield Tensor(f"{block}.attn_{name}.bias", (rows,), "f32")
        if own.norms != "none":
            for name, rows in (("q", query), ("k", keys)):
                size = own.head_dim if own.norms == "head" else rows
                yield Tensor(f"{block}.attn_{name}_norm.weight", (size,), "f32")
        yield Tensor(f"{block}.attn_output.weight", (hidden, query), own.dense)
        if own.experts:
            yield Tensor(f"{block}.ffn_gate_inp.weight", (own.experts, hidden), "f32")
        each, end = ((own.experts,), "_exps") if own.experts else ((), "")
        down = own.outputs[layer % len(own.outputs)]
        for name, shape, kind in (
            ("gate", (*each, own.width, hidden), own.inputs),
            ("up", (*each, own.width, hidden), own.inputs),
            ("down", (*each, hidden, own.width), down),
        ):
            yield Tensor(f"{block}.ffn_{name}{end}.weight", shape, kind)
            if own.has_biases:
                yield Tensor(f"{block}.ffn_{name}_exps.bias", shape[:2], "f32")
        if own.has_biases:
            yield Tensor(f"{block}.attn_sinks.weight", (own.heads,), "f32")
            yield Tensor(f"{block}.attn_output.bias", (hidden,), "f32")
            yield Tensor(f"{block}.ffn_gate_inp.bias", (own.experts,), "f32")
    yield Tensor("output_norm.weight", (hidden,), "f32")
    yield Tensor("output.weight", (own.vocab, hidden), own.head)


def draw_blocks(name: str, length: int, generator: np.random.Generator) -> U8:
    """Random blocks [n, bytes], whose numbers deviate by ``1 / sqrt(length)`` from 0."""
    own, wanted = find_format(name), 1 / math.sqrt(length)
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
    writer.add_context_length(32768)
    writer.add_embedding_length(own.hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(own.width)
    writer.add_head_count(own.heads)
    writer.add_head_count_kv(own.kv_heads)
    writer.add_key_length(own.head_dim)
    writer.add_value_length(own.head_dim)
    writer.add_rope_freq_base(own.theta)
    writer.add_layer_norm_rms_eps(1e-5)
    if own.experts:
        writer.add_expert_feed_forward_length(own.width)
        writer.add_expert_count(own.experts)
        writer.add_expert_used_count(own.active)
    if own.has_biases:
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    add_tokenizer(writer, own.vocab, own.vocab - 1)


def draw_tensor(tensor: Tensor, pools: dict[tuple[str, int], U8], begin: int) -> U8:
    """Bytes of a tensor; ``begin``: the block of its pool that is the first."""
    count = math.prod(tensor.shape)
    if len(tensor.shape) == 1 or tensor.name.endswith("bias"):
        value = 0.0 if "bias" in tensor.name or "sinks" in tensor.name else 1.0
        return np.full(count, value, np.float32).view(np.uint8)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--format", help="one for all matrices, such as q4_0 (those of Q4_K_M)")
    options = parser.parse_args()
    own = SHAPES[options.shape]
    if one := options.format:
        own = replace(own, dense=one, inputs=one, outputs=(one,), head=one)
    layers = options.layers or own.layers
    writer = GGUFWriter(options.file, own.architecture)
    writer.add_name(f"{options.shape}, {layers} layers, random weights")
    write_settings(writer, own, layers)
    tensors = list(list_tensors(own, layers))
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
