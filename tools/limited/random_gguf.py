"""GGUF files of random weights in the shape and precisions of a model document."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import U8, Raw
from pi2.diagnostics import UserError
from pi2.formats import Format, Packing, find_format, find_packing
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import FfnPrecision
from pi2.plan.weights.layout import GROUP, Tensor
from pi2.progress import Progress, ignore_progress
from pi2.store.manifest import DENSE_FILE
from pi2.store.reader import NeuronStore

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter


_ZEROS = ("_exps.bias", "inp.bias", "output.bias", "sinks.weight")
"""Ends of the names of what random weights need not have."""

FORMAT = 5
"""Version of the files that are written; raise it when they change."""
OUTPUT_SHARE = 0.08
"""Deviation of what a layer adds to the residual stream, where words are a store's: synthetic
stores have a stream of 8, to which each layer adds a hundredth (tools/synthesis/blueprint.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor as GGUF names it."""

    name: str
    rows: int
    length: int
    precision: FfnPrecision | None
    """Precision of the weights; None is float32."""
    stored: str | None = None
    """Name in a neuron store, where a file like one takes the numbers from it."""
    writes_stream: bool = False
    """Whether products are added to the residual stream."""
    experts: int | None = None
    """Matrices of this size, one after the other, where every expert of a layer has one."""

    @property
    def packing(self) -> Packing:
        return find_packing(self.precision or "fp32")

    @property
    def block(self) -> Format:
        """The format of the same numbers in a file."""
        assert self.packing.like is not None
        return find_format(self.packing.like)

    @property
    def all_rows(self) -> int:
        """Rows of all matrices."""
        return self.rows * (self.experts or 1)

    @property
    def values_deviation(self) -> float:
        """Deviation of random weights at which products keep their magnitude."""
        return 1.0 / math.sqrt(self.length)


def list_gguf_tensors(model: Model) -> list[GgufTensor]:
    """The tensors of a LLaMA-like model, in the order of a file."""
    shape, kinds = model.shape, model.quantization
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden = shape.hidden

    def make(
        name: str, rows: int, length: int, precision: FfnPrecision | None, stored: str | None = None
    ) -> GgufTensor:
        adds = name.endswith("attn_output.weight") or "ffn_down" in name
        return GgufTensor(
            name=name,
            rows=rows,
            length=length,
            precision=precision,
            stored=stored,
            writes_stream=adds,
        )

    norm = "post_attention_norm" if model.attention.sinks else "ffn_norm"
    tensors = [make("token_embd.weight", shape.vocab, hidden, kinds.embedding, "embedding")]
    for layer in range(shape.layers):
        block, own = f"blk.{layer}", f"layers.{layer}"
        tensors += [
            make(f"{block}.attn_norm.weight", 1, hidden, None, f"{own}.attention_norm"),
            make(f"{block}.attn_q.weight", queries, hidden, kinds.attention),
            make(f"{block}.attn_k.weight", keys, hidden, kinds.attention),
            make(f"{block}.attn_v.weight", keys, hidden, kinds.attention),
            make(f"{block}.attn_output.weight", hidden, queries, kinds.attention),
            make(f"{block}.{norm}.weight", 1, hidden, None, f"{own}.ffn_norm"),
        ]
        wide = (shape.ffn, hidden)
        sizes = {"gate": wide, "up": wide, "down": (hidden, shape.ffn)}
        if model.moe is None:
            tensors += [
                make(f"{block}.ffn_{part}.weight", *size, kinds.ffn) for part, size in sizes.items()
            ]
        else:
            experts = model.moe.experts
            router = f"{own}.router"
            tensors.append(make(f"{block}.ffn_gate_inp.weight", experts, hidden, None, router))
            tensors += [
                replace(make(f"{block}.ffn_{part}_exps.weight", *size, kinds.ffn), experts=experts)
                for part, size in sizes.items()
            ]
        if model.attention.sinks:
            tensors.append(make(f"{block}.attn_sinks.weight", 1, shape.heads, None))
            tensors.append(make(f"{block}.attn_output.bias", 1, hidden, None))
        if model.ffn.bias and model.moe is not None:
            tensors.append(make(f"{block}.ffn_gate_inp.bias", 1, model.moe.experts, None))
            tensors += [
                make(f"{block}.ffn_{part}_exps.bias", model.moe.experts, size[0], None)
                for part, size in sizes.items()
            ]
        if model.attention.qkv_bias:
            for kind, rows in (("q", queries), ("k", keys), ("v", keys)):
                tensors.append(make(f"{block}.attn_{kind}.bias", 1, rows, None))
    tensors.append(make("output_norm.weight", 1, hidden, None, "final_norm"))
    if not model.tied_head:
        tensors.append(make("output.weight", shape.vocab, hidden, kinds.head))
    return tensors


def find_gguf(model: Model, folder: Path, like: NeuronStore | None = None) -> Path:
    """Path of the file for ``model`` in the cache ``folder``; ``like``: see `write_gguf`."""
    described = model.model_dump(mode="json", include={"shape", "quantization", "attention"})
    described |= {"format": FORMAT, "tied_head": model.tied_head, "norm": model.norm.epsilon}
    if model.moe is not None:
        described["experts"] = [model.moe.experts, model.moe.active_experts]
    if like is not None:
        described["like"] = [file.sha256 for file in like.manifest.files if file.path == DENSE_FILE]
    if model.attention.sinks:
        described["architecture"] = "gpt-oss"
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return folder / f"{model.id}-{digest[:12]}.gguf"


def write_gguf(
    model: Model, path: Path, progress: Progress = ignore_progress, like: NeuronStore | None = None
) -> None:
    """Write random weights for ``model``, a tensor at a time; appears when it is complete.

    Words, norms and routers are those of ``like``, a store of ``model``.  int4 becomes Q4_0, int8
    Q8_0, fp16 F16, mxfp4 MXFP4: the same bits per weight as a neuron store.  Raises `UserError`
    P654 for what GGUF's plain LLaMA cannot express.
    """
    moe = model.moe
    if moe is not None and (moe.shared_experts or moe.router != "softmax"):
        raise UserError.of(
            "P654", "mixtures with shared experts or other routers than softmax cannot be compared"
        )
    if model.other_heads is not None:
        raise UserError.of("P654", "models whose layers differ in their heads cannot be compared")
    shape = model.shape
    if any(width % GROUP for width in (shape.hidden, shape.query)):
        raise UserError.of(
            "P654",
            f"GGUF packs weights in groups of {GROUP}: widths of {shape.hidden} and {shape.query} "
            "cannot be compared",
        )
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    architecture = "qwen2" if model.attention.qkv_bias else "llama"
    if model.attention.sinks:
        architecture = "gpt-oss"
    writer = gguf.GGUFWriter(temporary, architecture)
    try:
        _add_settings(writer, model)
        tensors = list_gguf_tensors(model)
        for tensor in tensors:
            _add_tensor(writer, tensor, gguf.GGMLQuantizationType(tensor.block.number))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, data in enumerate(_draw_tensors(tensors, like)):
            writer.write_tensor_data(data)
            progress("writing a GGUF file", (number + 1) / len(tensors))
        writer.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _add_settings(writer: GGUFWriter, model: Model) -> None:
    from gguf import RopeScalingType

    shape = model.shape
    writer.add_name(f"{model.id}, random weights")
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_layer_norm_rms_eps(model.norm.epsilon)
    add_tokenizer(writer, model.shape.vocab, next(iter(model.tokenizer.eos), None))
    if model.moe is not None:
        writer.add_expert_count(model.moe.experts)
        writer.add_expert_used_count(model.moe.active_experts)
    if model.attention.sinks:
        writer.add_expert_feed_forward_length(shape.ffn)
        writer.add_sliding_window(model.attention.sliding_window or shape.context)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(model.rope.factor or 1.0)
        writer.add_rope_scaling_orig_ctx_len(model.rope.original_context or shape.context)


def add_tokenizer(writer: GGUFWriter, vocab: int, end: int | None) -> None:
    """A token for each byte, numbers for the rest: llama.cpp's server takes and gives texts."""
    from tokenizers.pre_tokenizers import ByteLevel

    signs = [*sorted(ByteLevel.alphabet()), "ab"]
    if vocab < len(signs):
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*signs, *(f"<{number}>" for number in range(len(signs), vocab))])
    writer.add_token_types([1] * vocab)  # ordinary tokens
    writer.add_token_merges(["a b"])  # llama.cpp wants one at least
    if end is not None:
        writer.add_eos_token_id(end)


def _add_tensor(writer: GGUFWriter, tensor: GgufTensor, kind: GGMLQuantizationType) -> None:
    shape: tuple[int, ...] = (tensor.rows, tensor.length)
    if tensor.experts is not None:
        shape = (tensor.experts, *shape)
    elif tensor.rows == 1:
        shape = (tensor.length,)
    dtype = np.dtype(tensor.packing.plain_type or np.float32)
    size = tensor.all_rows * tensor.block.count_bytes(tensor.length)
    writer.add_tensor_info(tensor.name, shape, dtype, size, raw_dtype=kind)


def _draw_tensors(tensors: list[GgufTensor], like: NeuronStore | None) -> Iterator[Raw]:
    """Weights of each: those of a store, or random codes with one scale that keeps activations
    finite."""
    bits = np.random.SFC64(0)
    for tensor in tensors:
        count = tensor.all_rows * tensor.length
        deviation = tensor.values_deviation
        if like is not None and tensor.writes_stream:
            deviation *= OUTPUT_SHARE
        if like is not None and tensor.stored is not None:
            yield _copy_tensor(tensor, like.tensors[tensor.stored])
        elif tensor.name.endswith(_ZEROS):
            yield np.zeros((tensor.rows, tensor.length), np.float32)
        elif tensor.precision is None and tensor.rows == 1:
            yield np.ones(count, np.float32)
        elif tensor.precision is None:
            # Of a router: it shall not send every token to the same experts.
            spread = _draw_bytes(bits, count).astype(np.float32)
            yield (spread - 127.5) / np.float32(74.0) * np.float32(deviation)
        elif tensor.packing.is_plain:
            raw = _draw_bytes(bits, count)
            values = (raw.astype(np.float32) - 127.5) / 74.0 * deviation
            yield values.astype(np.float16)
        elif tensor.packing.top == 0:
            # A group is an exponent, then 32 codes; a random one is 2.9 on average.
            width = tensor.block.block_bytes
            blocks = _draw_bytes(bits, count // 32 * width).reshape(count // 32, width)
            blocks[:, 0] = 127 + round(math.log2(deviation / 2.9))
            yield blocks
        else:
            # A group is a scale, then the codes: 32 of 4 bits around 8, or of 8 bits around 0.
            width, steps = tensor.block.block_bytes, 4.6 if tensor.packing.bits == 4 else 74.0
            groups = count // 32
            blocks = _draw_bytes(bits, groups * width).reshape(groups, width)
            if tensor.packing.bits == 4:
                _take_mean_out(blocks)
            scale = np.array([deviation / steps], "<f2")
            blocks[:, :2] = scale.view(np.uint8)
            yield blocks


def _copy_tensor(tensor: GgufTensor, stored: Tensor) -> Raw:
    assert (tensor.rows, tensor.length, tensor.precision) == (
        stored.rows,
        stored.length,
        stored.precision,
    ), tensor
    if stored.precision is None:
        return np.array(stored.weights, np.float32)
    packed = stored.weights.view(np.uint8)
    packing = tensor.packing
    if packing.is_plain:
        return packed.view(np.float16)
    assert stored.scales is not None
    return packing.join_blocks(packed, stored.scales, tensor.length)


def _take_mean_out(codes: U8) -> None:
    """Make codes of 4 bits, -8 to 7, no smaller than -7.

    With a mean that is not 0, each layer lets the mean of the residual stream grow by a third. All
    tokens come to be alike then, and routers send them to the same experts.
    """
    for smallest, middle in ((15, 8), (240, 128)):
        codes |= np.where(codes & smallest == 0, np.uint8(middle), np.uint8(0))


def _draw_bytes(bits: np.random.SFC64, count: int) -> U8:
    return np.asarray(bits.random_raw(-(-count // 8))).view(np.uint8)[:count]
