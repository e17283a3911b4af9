"""Opens folders of MLC-LLM as the Hugging Face checkpoint that they were made from."""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F16, F32, I8, U8, Raw
from pi2.caches import open_stream
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import MLC_CONFIG, Checkpoint, check_place, read_json
from pi2.importing.decoded_tensor import PackedTensor
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.weights.layout import GROUP, Precision

STORAGE = {
    "float16": "<f2",
    "float32": "<f4",
    "bfloat16": "<u2",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "int8": "|i1",
    "int32": "<i4",
}
"""Names that numpy has for the list's types."""
_READ_BYTES = 2**22


class Shard:
    """A file of tensors; it is compared with its MD5 sum when it is first read."""

    def __init__(self, file: Path, size_bytes: int, md5: str | None) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self._md5 = md5
        self._lock = threading.Lock()

    def check(self, tensor: str) -> None:
        """`UserError` P532, naming ``tensor``, if the file is not what the list says."""
        with self._lock:
            if self._md5 is None:
                return
            digest = hashlib.md5(usedforsecurity=False)
            try:
                with open_stream(self.file) as file:
                    while piece := file.read(_READ_BYTES):
                        digest.update(piece)
            except OSError as error:
                raise _bad_file(self.file, error.strerror or str(error)) from None
            if digest.hexdigest() != self._md5:
                raise _bad_file(
                    self.file, f"its MD5 sum is not the listed one; it holds tensor {tensor!r}"
                )
            self._md5 = None


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor of the list and the place of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Type of the tensor as the list states it."""
    storage: str
    """The type that is in the file: ``bfloat16`` where float32 was shortened."""
    shard: Shard
    offset: int
    size_bytes: int


def list_records(folder: Path, index: Path) -> dict[str, Record]:
    """Tensors of all shards by name; raises as `pi2.importing.mlc_checkpoint.open_mlc`."""
    shards = read_json(index).get("records")
    if not isinstance(shards, list) or not shards:
        raise _bad_file(index, "it has no records")
    found: dict[str, Record] = {}
    for number, entry in enumerate(shards):
        shard = _open_shard(folder, index, number, entry)
        end, before = 0, ""
        records = [_read_record(index, shard, record) for record in entry["records"]]
        for record in sorted(records, key=lambda record: record.offset):
            if record.name in found:
                raise UserError.of("P536", f"{index} has tensor {record.name!r} twice")
            if record.offset < end:
                raise _bad_file(
                    index, f"the tensors {before!r} and {record.name!r} overlap in {shard.file}"
                )
            end, before = record.offset + record.size_bytes, record.name
            if end > shard.size_bytes:
                raise _bad_file(
                    shard.file,
                    f"it is cut: {shard.size_bytes} bytes, but tensor {before!r} ends at {end}",
                )
            found[record.name] = record
    return found


def _open_shard(folder: Path, index: Path, number: int, entry: Any) -> Shard:
    try:
        name, size, inner = entry["dataPath"], entry["nbytes"], entry["records"]
        kind, md5 = entry.get("format", "raw-shard"), entry.get("md5sum")
        fits = isinstance(name, str) and type(size) is int and isinstance(inner, list)
        if not fits or kind != "raw-shard" or not isinstance(md5, str | None):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise _bad_file(index, f"the entry of shard {number} is malformed") from None
    if name != Path(name).name or name in ("", ".", ".."):
        raise UserError.of(
            "P538",
            f"the list puts tensors into {name!r}, which is not a file name",
            help="shards must be in the folder itself",
            file=str(index),
        )
    tensor = _name_first(inner)
    file = folder / name
    try:
        found = check_place(folder, file).st_size
    except FileNotFoundError:
        raise UserError.of(
            "P533",
            f"there is no {file}, which should hold tensor {tensor!r}",
            help="download the folder again",
        ) from None
    except OSError as error:
        raise _bad_file(file, error.strerror or str(error)) from None
    if found != size:
        problem = "it is cut" if found < size else "it is not the listed file"
        raise _bad_file(file, f"{problem}: {found} bytes, not {size}; it holds tensor {tensor!r}")
    return Shard(file, size, md5)


def _read_record(index: Path, shard: Shard, entry: Any) -> Record:
    try:
        name, shape, dtype = entry["name"], entry["shape"], entry["dtype"]
        size, offset, kind = entry["nbytes"], entry["byteOffset"], entry.get("format", "raw")
        numbers = [*shape, size, offset]
        if not isinstance(name, str) or not all(type(number) is int for number in numbers):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        label = _name_first([entry])
        problem = f"the entry of tensor {label!r} in {shard.file.name} is malformed"
        raise _bad_file(index, problem) from None
    storage = "bfloat16" if kind == "f32-to-bf16" and dtype == "float32" else dtype
    if storage not in STORAGE:
        raise UserError.of(
            "P535",
            f"tensor {name!r} in {shard.file} has the type {dtype}",
            help=f"convert it to one of {', '.join(STORAGE)}",
        )
    if not shape or min(numbers) < 0:
        raise _bad_file(index, f"tensor {name!r} has a negative size, or none")
    if math.prod(shape) * np.dtype(STORAGE[storage]).itemsize != size:
        raise _bad_file(index, f"tensor {name!r} has not the bytes that its shape needs")
    return Record(name, tuple(shape), dtype, storage, shard, offset, size)


def _name_first(records: list[Any]) -> str:
    first = records[0] if records else None
    return str(first.get("name", "?")) if isinstance(first, dict) else "?"


def _bad_file(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P532", f"cannot read {path}: {problem}", help="download or export the folder again"
    )


PLAIN = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}
"""What safetensors files call the types."""
_ZERO = 7
"""The nibble that stands for 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlcTensor(PackedTensor):
    """A tensor; ``name`` is MLC-LLM's, of the nibbles if it is quantised."""

    shard: Shard
    scales: Record | None
    scales_skip: int = 0
    """Bytes of scales before the first row's."""

    def take_rows(self, first: int, count: int) -> MlcTensor:
        """The tensor that ``count`` rows from ``first`` on make."""
        weights, scales = self._row_bytes
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + first * weights,
            scales_skip=self.scales_skip + first * scales,
            size_bytes=self.size_bytes * count // max(1, self.shape[0]),
        )

    @property
    def _row_bytes(self) -> tuple[int, int]:
        """Bytes of a row's weights, and of its scales."""
        columns = math.prod(self.shape[1:])
        if self.scales is None:
            return columns * np.dtype(self.check_type()).itemsize, 0
        return columns // 2, columns // GROUP * np.dtype(STORAGE[self.scales.dtype]).itemsize

    def check_type(self) -> str:
        return SourceTensor.check_type(self) if self.scales is None else "|u1"

    def _read_stored(self, start: int, stop: int) -> Raw:
        self.shard.check(self.name)
        count, (weight_bytes, scale_bytes) = stop - start, self._row_bytes
        if self.scales is None:
            shape = count, *self.shape[1:]
            place = self.offset + start * weight_bytes
            return self.read_flat(place, math.prod(shape), self.check_type()).reshape(shape)
        self.scales.shard.check(self.scales.name)
        rows = np.empty((count, weight_bytes + scale_bytes), np.uint8)
        words = self.read_flat(self.offset + start * weight_bytes, count * weight_bytes, "|u1")
        rows[:, :weight_bytes] = words.reshape(count, weight_bytes)
        beside = replace(self, file=self.scales.shard.file, name=self.scales.name)
        skip = self.scales.offset + self.scales_skip + start * scale_bytes
        scales = beside.read_flat(skip, count * scale_bytes, "|u1")
        rows[:, weight_bytes:] = scales.reshape(count, scale_bytes)
        return rows

    def _decode(self, raw: U8) -> F32:
        codes, scales = self._split(raw)
        count, length = codes.shape
        values = codes.reshape(count, length // GROUP, GROUP).astype(np.float32)
        values *= scales.astype(np.float32)[:, :, None]
        if scales.dtype == np.float16:
            # A product of two fp16 numbers is exact in fp32: rounded once, as in fp16.
            with np.errstate(over="ignore"):
                values = values.astype(np.float16).astype(np.float32)
        return values.reshape(count, length)

    def take_codes(self, raw: Raw, precision: Precision) -> tuple[U8, F16 | None] | None:
        if self.scales is None or find_packing(precision).like != "q4_0" or raw.dtype != np.uint8:
            return None
        codes, scales = self._split(raw.view(np.uint8))
        if scales.dtype != np.float16 or codes.max() > _ZERO or not np.isfinite(scales).all():
            return None
        return find_packing(precision).pack(codes), scales.astype(np.float16, copy=False)

    def _split(self, raw: U8) -> tuple[I8, npt.NDArray[np.float16 | np.float32]]:
        """Codes int8 [n, length] and scales [n, length / 32] of rows of bytes."""
        assert self.scales is not None
        weight_bytes, _ = self._row_bytes
        nibbles = raw[:, :weight_bytes]
        codes = np.empty((len(raw), weight_bytes, 2), np.int8)
        codes[:, :, 0] = nibbles & np.uint8(15)
        codes[:, :, 1] = nibbles >> np.uint8(4)
        codes -= np.int8(_ZERO)
        scales = np.ascontiguousarray(raw[:, weight_bytes:]).view(STORAGE[self.scales.dtype])
        return codes.reshape(len(raw), -1), scales


INDEXES = ("tensor-cache.json", "ndarray-cache.json")
QUANTIZED = frozenset({"q4f16_1", "q4f32_1"})
"""Four bits in groups of 32 along the rows, with one scale each."""
UNQUANTIZED = frozenset({"q0f16", "q0f32", "q0bf16"})

_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh"}
"""Activations of families whose configuration does not say; the others have SiLU."""
_RENAMED = (
    (re.compile(r"transformer\.embd\."), "model.embed_tokens."),
    (re.compile(r"transformer\.norm\."), "model.norm."),
    (re.compile(r"transformer\.h\.(\d+)\.ln\."), r"model.layers.\1.input_layernorm."),
    (re.compile(r"transformer\.h\.(\d+)\.mixer\.out_proj\."), r"model.layers.\1.self_attn.o_proj."),
    (re.compile(r"transformer\.h\.(\d+)\.mixer\."), r"model.layers.\1.self_attn."),
    (re.compile(r"transformer\.h\."), "model.layers."),
    (re.compile(r"\.moe\.gate\."), ".block_sparse_moe.gate."),
)
"""Names of MLC-LLM, and the corresponding ones in a Hugging Face checkpoint."""
_QKV = re.compile(r"(.+\.self_attn)\.(?:qkv_proj|c_attn)\.(weight|bias)")
_GATE_UP = re.compile(r"(.+\.mlp)\.gate_up_proj\.weight")
_EXPERTS = re.compile(r"(.+)\.moe\.(e1_e3|e2)\.weight")


def open_mlc(folder: Path) -> Checkpoint:
    """Open a folder of MLC-LLM; `UserError` P530 to P536, or P538 for a shard outside of it."""
    chat = read_json(folder / MLC_CONFIG)
    index = next((folder / name for name in INDEXES if (folder / name).exists()), None)
    if index is None:
        raise UserError.of(
            "P531",
            f"{folder} has no {INDEXES[0]}",
            help="give the folder that `mlc_llm convert_weight` wrote",
        )
    quantization = chat.get("quantization")
    if quantization not in QUANTIZED | UNQUANTIZED:
        known = ", ".join(sorted(QUANTIZED | UNQUANTIZED))
        raise UserError.of(
            "P535",
            f"{folder / MLC_CONFIG} says that weights are {quantization!r}, which cannot be read",
            help=f"convert the original checkpoint, or one in {known}",
            file=str(folder / MLC_CONFIG),
        )
    records = list_records(folder, index)
    config = _make_config(folder, chat)
    tensors: dict[str, SourceTensor] = {}
    for tensor in _join_records(index, records):
        for name, part in _split_tensor(tensor, config):
            tensors[name] = part
    if (embedding := tensors.get("model.embed_tokens.weight")) is not None:
        config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return Checkpoint(
        folder=folder,
        config=config,
        config_file=folder / MLC_CONFIG,
        tensors=tensors,
        files=tuple(sorted({record.shard.file for record in records.values()})),
    )


def _join_records(index: Path, records: Mapping[str, Record]) -> Iterator[MlcTensor]:
    """Tensors by what the original code calls them; weights and scales are one tensor."""
    for name, record in records.items():
        stem, _, kind = name.rpartition(".")
        if kind == "q_scale":
            if f"{stem}.q_weight" not in records:
                raise _miss(index, f"{stem}.q_weight", name)
            continue
        scale = None
        shape = record.shape
        if kind == "q_weight":
            scale = records.get(f"{stem}.q_scale")
            if scale is None:
                raise _miss(index, f"{stem}.q_scale", name)
            shape = (*shape[:-1], shape[-1] * 8)
            wanted = (*shape[:-1], shape[-1] // 32)
            if record.dtype != "uint32" or len(shape) < 2 or shape[-1] % 32:
                raise _bad_shape(record, "rows of groups of 32 in uint32")
            if scale.shape != wanted or scale.dtype not in ("float16", "float32"):
                raise _bad_shape(scale, f"{list(wanted)} in float16")
        yield MlcTensor(
            file=record.shard.file,
            name=name,
            dtype=PLAIN.get(record.storage, record.storage) if scale is None else "q4",
            shape=shape,
            offset=record.offset,
            size_bytes=record.size_bytes + (0 if scale is None else scale.size_bytes),
            shard=record.shard,
            scales=scale,
        )


def _split_tensor(
    tensor: MlcTensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, SourceTensor]]:
    """The tensors of a Hugging Face checkpoint that ``tensor`` holds, by name."""
    name = tensor.name.replace(".q_weight", ".weight")
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    if config.get("model_type") == "gemma" and name.endswith("norm.weight"):
        yield name, replace(tensor, added=1.0)
        return
    experts = _EXPERTS.fullmatch(name)
    if experts is not None and len(tensor.shape) == 3:
        yield from _split_experts(tensor, experts[1], experts[2])
        return
    qkv, gate_up = _QKV.fullmatch(name), _GATE_UP.fullmatch(name)
    if config.get("model_type") == "phi3" or (qkv is None and gate_up is None):
        yield name, tensor
        return
    rows = tensor.shape[0]
    if gate_up is not None:
        stem, kind = gate_up[1], "weight"
        parts = {"gate_proj": rows // 2, "up_proj": rows - rows // 2}
    else:
        assert qkv is not None
        stem, kind = qkv[1], qkv[2]
        heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
        if type(heads) is not int or type(kv_heads) is not int or heads < 1 or kv_heads < 1:
            yield name, tensor
            return
        head = rows // (heads + 2 * kv_heads)
        parts = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
    first = 0
    for part, count in parts.items():
        yield f"{stem}.{part}.{kind}", tensor.take_rows(first, count)
        first += count


def _split_experts(tensor: MlcTensor, stem: str, kind: str) -> Iterator[tuple[str, SourceTensor]]:
    experts, rows, columns = tensor.shape
    flat = replace(tensor, shape=(experts * rows, columns))
    for expert in range(experts):
        prefix = f"{stem}.block_sparse_moe.experts.{expert}"
        if kind == "e2":
            yield f"{prefix}.w2.weight", flat.take_rows(expert * rows, rows)
            continue
        half = rows // 2
        yield f"{prefix}.w1.weight", flat.take_rows(expert * rows, half)
        yield f"{prefix}.w3.weight", flat.take_rows(expert * rows + half, rows - half)


def _make_config(folder: Path, chat: Mapping[str, Any]) -> dict[str, Any]:
    """The values that ``config.json`` would have."""
    stated = chat.get("model_config")
    if not isinstance(stated, dict):
        raise UserError.of("P532", f"{folder / MLC_CONFIG} has no model_config")
    others = stated.get("kwargs")
    config: dict[str, Any] = {**(others if isinstance(others, dict) else {}), **stated}
    family = chat.get("model_type", config.get("model_type"))
    config["model_type"] = family
    config.setdefault("hidden_act", _ACTIVATIONS.get(str(family), "silu"))
    for key, name in (
        ("position_embedding_base", "rope_theta"),
        ("context_window_size", "max_position_embeddings"),
        ("sliding_window_size", "sliding_window"),
    ):
        value = config.pop(key, None)
        if isinstance(value, int | float) and value > 0:
            config[name] = value
    for key in ("num_key_value_heads", "head_dim"):
        if config.get(key) == 0:
            del config[key]
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    for key in ("bos_token_id", "eos_token_id"):
        if key in chat:
            config[key] = chat[key]
    return config


def _miss(index: Path, name: str, beside: str) -> UserError:
    return UserError.of(
        "P533",
        f"{index} lists no tensor {name!r}, although it lists {beside!r}",
        help="convert the original checkpoint with MLC-LLM again",
        file=str(index),
    )


def _bad_shape(record: Record, expected: str) -> UserError:
    return UserError.of(
        "P534",
        f"tensor {record.name!r} in {record.shard.file} is {list(record.shape)} in {record.dtype}, "
        f"expected {expected}",
        help="convert the original checkpoint with MLC-LLM again",
    )
