"""Opens GGUF files as the Hugging Face checkpoint that they were made from."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, I64
from pi2.diagnostics import Diagnostic, UserError
from pi2.importing.checkpoint import TEMPLATES, Checkpoint, check_weights, parse_json
from pi2.importing.config import list_beginnings, make_generation_config, rename_tensors
from pi2.importing.decoded_tensor import refuse_shape, unfold_norm
from pi2.importing.families import list_families
from pi2.importing.gguf_architectures import (
    POSITIONS,
    Names,
    choose_names,
    find_architecture,
    find_place,
    list_architectures,
    make_config,
    name_in_file,
    scale_positions,
)
from pi2.importing.gguf_file import GgufFile, GgufTensor, read_gguf
from pi2.importing.gguf_metadata import Metadata, find_unread
from pi2.importing.gguf_tensors import join_heads, read_delta_heads, restore_plain, restore_state
from pi2.importing.gguf_tokenizer import make_table, make_tokenizer, may_have_table
from pi2.importing.gguf_tokens import WHOLE, GgufTokens, read_chat_files, read_named_templates
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.family import Architecture
from pi2.plan.documents.model import Model
from pi2.tokens.table_tokenizer import Coder

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_LAST = 3
"""Number that means embeddings of last tokens."""
_UNSCALED = ("token_embd",)
"""Matrices that may be two things, of which llama.cpp multiplies neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCheckpoint(Checkpoint):
    """GGUF files; the tokenizer is made from their metadata."""

    statements: Metadata
    names: Names

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.statements.values

    @property
    def takes_last(self) -> bool:
        return bool(self.statements.read("{arch}.pooling_type", int, 0) == _LAST)

    def find_unread(self, model: Model) -> Iterator[Diagnostic]:
        return find_unread(self.statements, model)

    def read_file(self, name: str) -> bytes | None:
        if name == "tokenizer.json":
            whole = self.metadata.get(WHOLE)
            if isinstance(whole, str):
                return whole.encode()
            return make_tokenizer(self.folder, self.metadata)
        if name == "generation_config.json":
            return make_generation_config(self.metadata)
        return read_chat_files(self.metadata).get(name)

    def find_mark(self, text: str) -> int | None:
        if not self.has_lists:
            return Checkpoint.find_mark(self, text)
        return GgufTokens.read(self.folder, self.metadata).find_mark(text)

    def find_begin(self) -> int | None:
        if not self.has_lists:
            return Checkpoint.find_begin(self)
        return GgufTokens.read(self.folder, self.metadata).frame()[0]

    @property
    def has_lists(self) -> bool:
        return self.given_tokenizer is None and WHOLE not in self.metadata

    @property
    def may_have_table(self) -> bool:
        return self.has_lists and may_have_table(self.metadata)

    def open_tokenizer(self) -> Coder:
        table = make_table(self.folder, self.metadata) if self.has_lists else None
        return table or Checkpoint.open_tokenizer(self)

    def list_templates(self) -> dict[str, bytes]:
        return read_named_templates(self.metadata)

    def describe_name(self, name: str) -> str:
        return name_in_file(self.names, name)


OWN = "pi2"
"""Architecture of files that `pi2.importing.quantize` makes of a folder."""
FILES = "pi2.file."
"""Begins the keys of the small files of the folder."""
DOCUMENT = "pi2.model"
"""Key of the model's document, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFile(Checkpoint):
    """A file that holds a Hugging Face folder: its tensors by its names, and its small files."""

    metadata: Mapping[str, Any]

    def read_file(self, name: str) -> bytes | None:
        text = self.metadata.get(f"{FILES}{name}")
        return text.encode() if isinstance(text, str) else None

    def list_templates(self) -> dict[str, bytes]:
        start, end = f"{FILES}{TEMPLATES}/", ".jinja"
        return {
            key.removeprefix(start).removesuffix(end): str(text).encode()
            for key, text in self.metadata.items()
            if key.startswith(start)
        }

    @property
    def document(self) -> bytes | None:
        text = self.metadata.get(DOCUMENT)
        return text.encode() if isinstance(text, str) else None


def _open_folder_file(path: Path, files: list[GgufFile], metadata: Metadata) -> FolderFile:
    return FolderFile(
        folder=path,
        config=parse_json(path, metadata.read(f"{FILES}config.json", str).encode()),
        config_file=path,
        tensors={name: own for file in files for name, own in file.entries.items()},
        files=tuple(file.path for file in files),
        has_blocks=True,
        metadata=metadata.values,
    )


def open_gguf(path: Path, head: Path | None = None) -> Checkpoint:
    """Open the GGUF file ``path``, or all files of a split one of which it is; ``head``: file of
    the MTP head that counts.

    Raises `UserError`: P530-P536 as `read_gguf`, P533 a file of a split is missing, P544 an
    architecture or scaling of positions that is not known, or no head."""
    files = [read_gguf(part) for part in find_parts(path)]
    _check_split(files)
    if head is not None:
        files = _replace_head(files, head)
    metadata = Metadata(files[0].path, files[0].metadata)
    if metadata.architecture == OWN:
        return _open_folder_file(path, files, metadata)
    if metadata.architecture not in list_families().architectures:
        raise _refuse_architecture(path, metadata.architecture)
    architecture = find_architecture(metadata.architecture)
    has_two = any("blk.0.attn_norm_2.weight" in file.entries for file in files)
    names = choose_names(architecture, has_two=has_two)
    tensors: dict[str, SourceTensor] = {}
    scales = _list_scales(files, names)
    for file in files:
        for entry in file.entries.values():
            if entry.name in scales or entry.name in POSITIONS:
                continue
            scale = scales.get(f"{entry.name.removesuffix('.weight')}.scale")
            placed = _place_tensor(entry, names, architecture, metadata, scale)
            for name, tensor in placed.items():
                if name in tensors:
                    raise UserError.of(
                        "P536",
                        f"{tensors[name].file} has tensor {tensors[name].name!r}, and {file.path} "
                        f"has {tensor.name!r}, which is the same",
                        help="download or export the file again",
                    )
                tensors[name] = tensor
    embedding = tensors.get(names["token_embd.weight"])
    if embedding is None:
        raise UserError.of("P533", f"{path} has no tensor 'token_embd.weight'")
    sparse = any(file.is_powerinfer or "blk.0.fc1.weight" in file.entries for file in files)
    join_heads(tensors)
    config = make_config(
        metadata,
        architecture,
        tensors,
        vocab=embedding.shape[0],
        tied=names["output.weight"] not in tensors,
        sparse=sparse,
    )
    scale_positions(config, metadata, partial(_read_vector, files))
    beginnings = list_beginnings(config)
    if beginnings:  # blocks of a file are fewer layers
        whole = {name.replace(".mamba.", ".mixer."): own for name, own in tensors.items()}
        tensors = rename_tensors(whole, beginnings)
    for name in [name for name in tensors if name.endswith(".mlp.predictor.fc1.weight")]:
        norm = tensors.get(name.replace("mlp.predictor.fc1", "post_attention_layernorm"))
        tensors[name] = unfold_norm(tensors[name], norm, 0.0)
    return GgufCheckpoint(
        folder=path,
        config=config,
        config_file=path,
        tensors=tensors,
        files=tuple(file.path for file in files),
        has_blocks=True,
        statements=metadata,
        names=names,
    )


def _refuse_architecture(path: Path, name: str) -> UserError:
    from difflib import get_close_matches

    near = ", ".join(get_close_matches(name, list_architectures(), cutoff=0.5))
    says = "is a name that pi2 does not know" + (f"; names like it: {near}" if near else "")
    help = "convert the original checkpoint, with a model document written by hand"
    missing = list_families().refused_files.get(name)
    if missing is not None:
        says = f"has what no model document states: {missing}"
        help = "take a model of another architecture: docs/reference/models.md lists those that run"
    return UserError.of(
        "P544",
        f"{path} holds a model of the architecture {name!r}, which {says}",
        help=help,
        file=str(path),
    )


_HEAD = re.compile(r"blk\.\d+\.(?=nextn\.)")
"""Begins the names of a layer that drafts."""


def _list_heads(files: list[GgufFile]) -> tuple[str, ...]:
    names = [name for file in files for name in file.entries]
    return tuple({found[0] for name in names if (found := _HEAD.match(name))})


def _replace_head(files: list[GgufFile], path: Path) -> list[GgufFile]:
    others = [read_gguf(part) for part in find_parts(path)]
    heads = _list_heads(others)
    if not heads:
        raise UserError.of(
            "P544",
            f"{path} has no MTP head",
            help='a smaller model drafts with drafts = "plan"',
            file=str(path),
        )

    def choose(file: GgufFile, *, is_head: bool) -> GgufFile:
        own = file.entries.items()
        return replace(file, entries={k: e for k, e in own if k.startswith(heads) == is_head})

    return [choose(file, is_head=False) for file in files] + [
        choose(file, is_head=True) for file in others
    ]


def is_head(path: Path) -> bool:
    """Whether a GGUF file has an MTP head, and no model for which it drafts."""
    files = [read_gguf(part) for part in find_parts(path)]
    is_model = any(name.startswith("blk.0.") for file in files for name in file.entries)
    return bool(_list_heads(files)) and not is_model


def find_parts(path: Path) -> list[Path]:
    """The files of the split that ``path`` belongs to; only ``path`` if it belongs to none."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    if not 1 <= int(split[2]) <= count <= 4096:
        raise UserError.of("P532", f"cannot read {path}: there is no part {split[2]} of {count}")
    parts = [
        path.with_name(f"{split[1]}-{number:05d}-of-{count:05d}{split[4]}")
        for number in range(1, count + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise UserError.of(
                "P533",
                f"there is no {part}, although {path.name} is one of {count} files",
                help="put all files of the split into one folder",
            )
        if part != path:
            check_weights(path.parent, part)
    return parts


def _check_split(files: list[GgufFile]) -> None:
    for number, file in enumerate(files):
        for key, value in (("split.count", len(files)), ("split.no", number)):
            # A file that was never split may say that it is none of no files.
            stated = file.metadata.get(key, value)
            if type(stated) is not int or stated not in {value, 0 if len(files) == 1 else value}:
                raise UserError.of(
                    "P532",
                    f"cannot read {file.path}: {key} is {stated}, expected {value}",
                    help="put all files of the split into one folder, with their own names",
                )
    stated = files[0].metadata.get("split.tensors.count")
    found = sum(len(file.entries) for file in files)
    if type(stated) is int and stated != found:
        raise UserError.of(
            "P533",
            f"{files[0].path} says that the files hold {stated} tensors, but they hold {found}",
            help="download the files again",
        )


def _place_tensor(
    entry: GgufTensor,
    names: Names,
    architecture: Architecture,
    metadata: Metadata,
    scale: F32 | None,
) -> dict[str, SourceTensor]:
    """A tensor of the file as Hugging Face tensors, by name; by its own name if there is no other.
    ``scale``: factor of its numbers, one number or one for each expert."""
    place = find_place(names, entry.name)
    if place is None:
        found: dict[str, SourceTensor] = {}
        for part in _split_qkv(entry, names, metadata):
            found |= _place_tensor(part, names, architecture, metadata, scale)
        return found or {entry.name: entry}
    pattern, kind = place
    if not pattern:
        return {}
    is_turned = kind == "ffn_down_t.weight"
    shape = entry.shape[::-1] if is_turned else entry.shape
    if kind == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        shape = (1, *shape)  # a router of one expert
    norm = kind.endswith("norm.weight") and kind != "ssm_norm.weight"
    if kind == "shortconv.conv.weight" and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    tensor = replace(
        entry,
        shape=shape,
        is_turned=is_turned,
        added=architecture.norm_offset if norm else 0.0,
        order=_restore_order(kind, entry, architecture, metadata),
        factor=scale[0] if scale is not None and len(scale) == 1 else None,
    )
    if kind.startswith("ssm_") and ".linear_attn." not in pattern:
        is_negated = not architecture.positive_rates
        return {pattern: restore_plain(pattern, tensor, is_negated=is_negated)}
    heads = read_delta_heads(metadata, architecture.tiles_values)
    if heads is not None and ".linear_attn." in pattern:
        restored = restore_state(pattern, tensor, heads)
        if restored is not None:
            return restored
    if "{expert}" not in pattern:
        return {pattern: tensor}
    if len(entry.shape) != 3:
        raise UserError.of(
            "P534",
            f"tensor {entry.name!r} in {entry.file} has the shape {list(entry.shape)}, expected a "
            "matrix for every expert",
        )
    factors = [None] * entry.shape[0] if scale is None else scale
    return {
        pattern.replace("{expert}", str(expert)): tensor.cut(
            expert, shape=entry.shape[1:], factor=factor
        )
        for expert, factor in enumerate(factors)
    }


_FUSED = re.compile(r"(blk\.(\d+)\.attn_)qkv(\.\w+)")


def _split_qkv(entry: GgufTensor, names: Names, metadata: Metadata) -> Iterator[GgufTensor]:
    """Queries, keys and values that a file has in one tensor, and the family apart."""
    fused = _FUSED.fullmatch(entry.name)
    if fused is None or find_place(names, f"{fused[1]}q{fused[3]}") is None:
        return
    layer = int(fused[2])
    heads, kv_heads = (
        metadata.read_layer(f"{{arch}}.attention.{key}", layer)
        for key in ("head_count", "head_count_kv")
    )
    width = metadata.read_count("{arch}.embedding_length") // max(1, heads)
    width = metadata.read("{arch}.attention.key_length", int, width)
    kv_heads = kv_heads or heads
    value = kv_heads * metadata.read("{arch}.attention.value_length", int, width)
    rows = heads * width, kv_heads * width, value
    if sum(rows) != entry.shape[0]:
        return  # the shapes are wrong, which is said later
    start, each = entry.offset, entry.size_bytes // entry.shape[0]
    for part, count in zip("qkv", rows, strict=True):
        shape, size = (count, *entry.shape[1:]), count * each
        name = f"{fused[1]}{part}{fused[3]}"
        yield replace(entry, name=name, shape=shape, offset=start, size_bytes=size)
        start += size


def _restore_order(
    kind: str, entry: GgufTensor, architecture: Architecture, metadata: Metadata
) -> I64 | None:
    """Stored row at every row of a query or key projection that the converter permuted."""
    part, _, _ = kind.partition(".")
    if not architecture.permutes or part not in ("attn_q", "attn_k"):
        return None
    heads = metadata.read("{arch}.attention.head_count", int)
    if part == "attn_k":
        heads = metadata.read("{arch}.attention.head_count_kv", int, heads)
    rows = entry.shape[0]
    if heads < 1 or rows % (2 * heads):
        return None  # the shapes are wrong, which is said later
    # The file has pairs as neighbours; the original has the first of all pairs, then the second.
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _read_vector(files: list[GgufFile], name: str) -> F32 | None:
    """The numbers of a tensor that is no part of a checkpoint; None if no file has it."""
    found = (file.entries[name] for file in files if name in file.entries)
    return next((own.read() for own in found), None)


def _list_scales(files: list[GgufFile], names: Names) -> dict[str, F32]:
    """Factors of matrices, by the names of their tensors: ``attn_q.scale`` belongs to
    ``attn_q.weight``.

    Raises `UserError`: P534 for more numbers than one, or than one for each expert, P539 for one
    that is not finite."""
    entries = {name: entry for file in files for name, entry in file.entries.items()}
    scales = {}
    for name, entry in entries.items():
        base, _, end = name.rpartition(".")
        matrix = entries.get(f"{base}.weight")
        if end != "scale" or find_place(names, name) is not None:
            continue
        is_matrix = matrix is not None and len(matrix.shape) > 1 and base not in _UNSCALED
        if not is_matrix or find_place(names, f"{base}.weight") is None:
            continue  # said later
        assert matrix is not None
        experts = matrix.shape[0] if base.endswith("_exps") else 1
        count = math.prod(entry.shape)
        if count not in (1, experts):
            raise refuse_shape(entry, (experts,))
        numbers = entry.read().reshape(-1)
        if not np.isfinite(numbers).all():
            raise UserError.of(
                "P539",
                f"tensor {name!r} in {entry.file} has a scale that is not a finite number",
                help="download or export the file again",
            )
        scales[name] = numbers if count == experts else np.repeat(numbers, experts)
    return scales
