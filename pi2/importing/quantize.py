"""Makes one GGUF file, which runs as it is, of a checkpoint.

A GGUF file keeps its metadata and names: other programs also read the new file.  Other checkpoints
become files as llama.cpp's converter writes them, or, if none of its architectures states them,
files of the architecture ``pi2``, which only pi2 reads: tensors have the names of the
checkpoint, metadata are the model's document and the small files of the folder."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from pi2.arrays import F32, U8, Raw
from pi2.caches import open_stream
from pi2.formats import Format, find_format, list_formats, list_packings
from pi2.importing.checkpoint import TEMPLATES, Checkpoint
from pi2.importing.convert import explain_weight, map_in_order
from pi2.importing.gguf_architectures import list_suited, name_in_file
from pi2.importing.gguf_checkpoint import DOCUMENT, FILES, OWN
from pi2.importing.gguf_file import GgufFile, GgufTensor, read_gguf
from pi2.importing.gguf_writer import (
    NewTensor,
    Part,
    Pieces,
    count_bytes,
    make_vector,
    write_gguf,
    write_key,
)
from pi2.importing.llama_layout import arrange_for_llama
from pi2.importing.new_model import find_mtp
from pi2.importing.quantizers import ErrorReport, Importance, refuse_imatrix
from pi2.importing.rows import Arrangement, Laid, find_plain, make_plain
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.tensors import MIXTURES, Mixture, choose_formats, fit_width, list_sources
from pi2.plan.documents.model import Model
from pi2.progress import ByteProgress, Progress, ignore_progress

TEXTS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "1_Pooling/config.json"),
)
"""Small files that a folder's file keeps."""
_REPLACED = re.compile(r"general\.(alignment|file_type|quantization_version)|split\..*")
_PIECE_WEIGHTS = 2**19
"""Weights that a thread quantises at once."""
_COPY_BYTES = 2**24
_PLAIN_TYPES = {"F64": "f32", "F32": "f32", "F16": "f16", "BF16": "bf16"}
_FEW_BITS = 5.0
"""Of a weight, scales included, in checkpoints of 4 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The written parts."""

    size_bytes: int
    weighed: int
    """Matrices whose columns an importance matrix has weighed."""
    quantized: int
    """Matrices that were rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a new file stores weights; by default in the precisions of the model's document."""

    mixture: str | None = None
    """Name of a mix of formats instead."""
    importance: Importance | None = None
    keeps: bool = False
    """Whether weights keep the precision that they have."""
    arranges: bool = False
    """Whether tensors of a GGUF file, which is not run as it is, are laid out as a folder's."""

    def describe(self, model: Model) -> str:
        """The precision in a few words."""
        if self.keeps:
            return "precision of the checkpoint"
        return self.mixture or model.quantization.ffn


def quantize_checkpoint(
    source: Checkpoint,
    model: Model,
    output: Path,
    wish: Wish,
    *,
    errors: ErrorReport | None = None,
    progress: Progress = ignore_progress,
) -> Quantized:
    """Write ``source`` to the GGUF file ``output``.

    Matrices of a GGUF file that already have as few bits as a type asks for stay as they are; an
    MTP head is kept. ``errors`` collects the error of each tensor.

    Raises `UserError` P539 for weights that no file stores, P548 for an importance matrix of
    another model, P523 if the file cannot be written."""
    importance = wish.importance
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        shards = source.shards
        sizes = (
            file.stat().st_size if shards is None else shards.measure(file) for file in source.files
        )
        report = ByteProgress(progress, "quantising", sum(sizes))
        report(0)
        work = _Work(source, importance, errors, pool, report)
        wanted = None if wish.mixture is None else MIXTURES[wish.mixture]
        models = _list_models(source, model)
        if source.has_blocks and not wish.arranges:
            formats = dict[str, str]()
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            for own in models if not wish.keeps else ():
                formats |= choose_formats(shapes, own, wanted)
            files = [read_gguf(file) for file in source.files]
            formats = {
                tensor.name: formats[name]
                for name, tensor in source.tensors.items()
                if isinstance(tensor, GgufTensor) and name in formats
            }
            keys, tensors = _copy_keys(files[0]), work.take_file(files, formats)
        else:
            made = _arrange(source, models, output)
            keys = dict(made.keys)
            formats = choose_all(made, wanted, keeps=wish.keeps)
            tensors = [
                work.round(own, find_format(formats[own.name]), len(own.tensors))
                for own in made.laid
            ]
            tensors += [make_vector(*each) for each in made.vectors.items()]
        if importance is not None and not work.weighed:
            raise refuse_imatrix(importance.file, "it names none of its matrices")
        number = _number_type(tensors) if wanted is None else wanted.number
        numbers = {"general.file_type": number, "general.quantization_version": 2}
        keys |= {key: write_key(key, number) for key, number in numbers.items()}
        write_gguf(output, keys, tensors, source.files, shards)
    progress("quantising", 1.0)
    return Quantized(
        size_bytes=output.stat().st_size, weighed=work.weighed, quantized=work.quantized
    )


def _list_models(source: Checkpoint, model: Model) -> list[Model]:
    """The model, and its MTP head if there is one."""
    return [model, *(own for own in [find_mtp(source, model)] if own is not None)]


def _arrange(source: Checkpoint, models: Sequence[Model], output: Path) -> Arrangement:
    made = None if len(models) > 1 else arrange_for_llama(source, models[0], output)
    return made or arrange(source, models)


def name_matrices(source: Checkpoint, model: Model, output: Path, wish: Wish) -> Mapping[str, str]:
    """What importance matrices call tensors of the file that ``wish`` makes, by their names in it;
    equal names are left out."""
    if source.has_blocks and not wish.arranges:
        return {}
    made = _arrange(source, _list_models(source, model), output)
    return {own.name: own.matrix for own in made.laid}


def choose_all(made: Arrangement, wanted: Mixture | None, *, keeps: bool) -> dict[str, str]:
    """Formats of all tensors by their names in the file."""
    shapes = {own.key: own.shape[-2:] for own in made.laid}
    formats: dict[str, str] = {}
    for model in made.models:
        # Which of them a store has in float32, any type tells.
        formats |= choose_formats(shapes, model, MIXTURES["q8_0"] if keeps else wanted)
    chosen = {own.name: formats[own.key] for own in made.laid}
    return {own.name: keep_format(own, chosen[own.name]) for own in made.laid} if keeps else chosen


def _number_type(tensors: Sequence[NewTensor]) -> int:
    sizes = Counter[Format]()
    for tensor in tensors:
        sizes[tensor.format] += tensor.size_bytes
    return max(sizes, key=sizes.__getitem__).file_type


def arrange(source: Checkpoint, models: Sequence[Model]) -> Arrangement:
    """Tensors that only pi2 reads, of a model and of its MTP head; experts lie side by side."""
    suited = next((own for _, own in list_suited(source.config.get("model_type"))), None)
    names = {} if suited is None else suited.names
    found = dict[str, tuple[int, Laid]]()
    for model in models:
        plain = make_plain(model)
        for own in list_sources(plain):
            name = own.name(plain.tensors)
            tensor = None if name in found else find_plain(source.tensors, model, own)
            if tensor is not None:
                is_own = isinstance(tensor, GgufTensor)
                matrix = tensor.name if is_own else name_in_file(names, name)
                matrix = matrix.replace("_exps.weight", f".{own.expert}.weight")
                # A vector of four dimensions (Kimi's rates of decay) is one.
                own_shape = tuple(size for size in tensor.shape if size > 1)
                shape = (own_shape if len(tensor.shape) > 3 else tensor.shape) or (1,)
                laid = Laid(name=name, shape=shape, tensors=(tensor,), matrix=matrix, key=name)
                is_whole = "{layer}" not in getattr(plain.tensors, own.key, own.key)
                found[name] = (-1 if is_whole else own.layer), laid
    # Experts of a layer, and streams, follow each other.
    ordered = sorted(found.values(), key=lambda own: own[0])
    return Arrangement(
        laid=[laid for _, laid in ordered],
        keys=describe_folder(source, models[0]),
        models=[make_plain(model) for model in models],
        vectors={},
    )


def keep_format(own: Laid, other: str) -> str:
    """The format with the bits of a tensor in its checkpoint; ``other`` of vectors, and of weights
    of few bits that are none of GGUF's."""
    tensor = own.tensors[0]
    if len(own.shape) < 2 or other == "f32":
        return "f32"
    kept: str | None = None
    if isinstance(tensor, GgufTensor):
        kept = tensor.block.name
    elif tensor.kind == "stored":
        kept = _PLAIN_TYPES.get(tensor.dtype)
    elif tensor.kind in list_formats() and find_format(tensor.kind).can_encode:
        kept = tensor.kind
    if kept is None:
        raw = tensor.read_raw(0, 1)
        codes = (each for each in list_packings().values() if each.has_group_codes)
        kept = next((each.like for each in codes if tensor.take_codes(raw, each.name)), None)
    if kept is None:
        bits = 8 * tensor.size_bytes / prod(own.shape)
        kept = "q4_k" if bits <= _FEW_BITS else "q8_0" if bits <= 2 * _FEW_BITS else "bf16"
    return fit_width(kept, own.shape[-1])


def describe_folder(source: Checkpoint, model: Model) -> dict[str, bytes]:
    """Keys of a file that only pi2 reads."""
    config = {key: v for key, v in source.config.items() if key != "quantization_config"}
    texts = {name: source.read_file(name) for name in TEXTS}
    texts |= {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": source.read_tokenizer(),
        "chat_template.jinja": source.read_template(),
    }
    named = source.list_templates()
    texts |= {f"{TEMPLATES}/{name}.jinja": text for name, text in named.items()}
    # Files have all neurons, and no predictors.
    plain = make_plain(model).model_copy(update={"predictor": None})
    document = plain.model_dump_json(exclude_defaults=True)
    values = {"general.architecture": OWN.encode(), DOCUMENT: document.encode()}
    values |= {f"{FILES}{name}": text for name, text in texts.items() if text is not None}
    return {key: write_key(key, value) for key, value in values.items()}


@dataclass(slots=True)
class _Work:
    source: Checkpoint
    importance: Importance | None
    errors: ErrorReport | None
    pool: ThreadPoolExecutor
    progress: ByteProgress
    weighed: int = 0
    quantized: int = 0

    def take_file(self, files: Sequence[GgufFile], formats: Mapping[str, str]) -> list[NewTensor]:
        """Tensors of GGUF files, which keep names and order, and bytes that are few enough."""
        tensors = []
        for file in files:
            for name, tensor in file.entries.items():
                shape = tensor.shape
                wanted = find_format(fit_width(formats.get(name, "f32"), shape[-1]))
                bits = 8 * tensor.block.block_bytes * wanted.block, 8 * wanted.block_bytes
                if len(shape) < 2 or bits[0] <= bits[1] * tensor.block.block:
                    parts = (Part(tensor, tensor.size_bytes, self._keep(tensor)),)
                    own = NewTensor(name=name, shape=shape, format=tensor.block, parts=parts)
                    tensors.append(own)
                    continue
                rows = (replace(tensor, shape=(prod(shape[:-1]), shape[-1])),)
                laid = Laid(name=name, shape=shape, tensors=rows, matrix=name, key=name)
                tensors.append(self.round(laid, wanted, shape[0] if len(shape) > 2 else 1))
        return tensors

    def round(self, own: Laid, wanted: Format, experts: int) -> NewTensor:
        """A tensor in the format ``wanted``; ``experts``: its matrices."""
        weights, count = None, len(own.tensors)
        if len(own.shape) > 1 and not wanted.is_plain:
            weights = self._weigh(own.matrix, own.shape[-1], experts)
        self.quantized += not wanted.is_plain
        shape = own.shape[1:] if count > 1 else own.shape
        parts = []
        for number, tensor in enumerate(own.tensors):
            each = weights if count == 1 or weights is None else weights[number : number + 1]
            parts.append(self._round(own.name, shape, tensor, wanted, each))
        return NewTensor(name=own.name, shape=own.shape, format=wanted, parts=tuple(parts))

    def _weigh(self, name: str, columns: int, experts: int) -> F32 | None:
        if self.importance is None:
            return None
        found = self.importance.find(name, columns, experts)
        self.weighed += found is not None
        return found

    def _keep(self, tensor: GgufTensor) -> Pieces:
        def read() -> Iterator[U8]:
            end = tensor.offset + tensor.size_bytes
            for start in range(tensor.offset, end, _COPY_BYTES):
                yield tensor.read_flat(start, min(_COPY_BYTES, end - start), "|u1").view(np.uint8)
            self.progress.add(tensor.size_bytes)

        return read

    def _round(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: SourceTensor,
        wanted: Format,
        weights: F32 | None,
    ) -> Part:
        """``rows``: the tensor, of several dimensions as one matrix; ``weights`` float32 [experts,
        columns]: what its columns count."""
        width = shape[-1]
        each = max(1, len(weights) if weights is not None else 1)
        count = (rows.shape[0] if rows.shape else 1) // each
        step = max(1, _PIECE_WEIGHTS // prod(rows.shape[1:]))

        def encode(piece: tuple[int, int, int]) -> U8:
            number, start, stop = piece
            raw = rows.read_raw(number * count + start, number * count + stop)
            blocks = take_blocks_of(rows, raw, wanted)
            if blocks is not None and self.errors is None:
                return blocks
            values = rows.widen(raw).reshape(-1, width)
            try:
                found = blocks
                if found is None:
                    found = wanted.encode(values, None if weights is None else weights[number])
            except ValueError as error:
                raise explain_weight(rows, error) from None
            if self.errors is not None and not wanted.is_plain:
                self.errors.add(name, values, wanted.decode(found), wanted.name)
            return found

        def make() -> Iterator[U8]:
            pieces = [
                (number, start, min(start + step, count))
                for number in range(each)
                for start in range(0, count, step)
            ]
            yield from map_in_order(self.pool, encode, pieces)
            self.progress.add(rows.size_bytes)

        return Part(rows, count_bytes(shape, wanted), make)


def take_blocks_of(rows: SourceTensor, raw: Raw, wanted: Format) -> U8 | None:
    """Rows in the format ``wanted`` if their checkpoint has the same codes; None if not."""
    if isinstance(rows, GgufTensor):
        is_same = rows.block.name == wanted.name and raw.dtype == np.uint8
        return raw.view(np.uint8) if is_same and not rows.added and rows.factor is None else None
    like = next((own for own in list_packings().values() if own.like == wanted.name), None)
    if like is None or not like.has_group_codes or raw.ndim != 2:
        return None
    taken = rows.take_codes(raw, like.name)
    if taken is None or taken[1] is None:
        return None
    return like.join_blocks(*taken, rows.shape[-1])


def _copy_keys(file: GgufFile) -> dict[str, bytes]:
    """Return the keys of a file with their values, without the keys about its making."""
    found = {}
    with open_stream(file.path) as stream:
        for key, (first, last) in file.spans.items():
            if not _REPLACED.fullmatch(key):
                stream.seek(first)
                found[key] = stream.read(last - first)
    return found
