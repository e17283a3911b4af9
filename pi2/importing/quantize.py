"""Quantises a checkpoint into one GGUF file, which runs as it is.

A GGUF file keeps its metadata and names: other programs also read the new file.  Other checkpoints
become files of the architecture ``pi2``, which only pi2 reads: tensors have the names of the
checkpoint, and metadata are the small files of its folder."""

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from pi2.arrays import F32, U8
from pi2.caches import open_stream
from pi2.diagnostics import UserError
from pi2.formats import Format, find_format
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.convert import explain_weight, map_in_order
from pi2.importing.gguf_architectures import (
    choose_names,
    find_architecture,
    list_architectures,
    name_in_file,
)
from pi2.importing.gguf_checkpoint import FILES, OWN, GgufCheckpoint, GgufTensor, make_tensor
from pi2.importing.gguf_file import GgufFile, read_gguf
from pi2.importing.new_model import find_mtp
from pi2.importing.quantizers import ErrorReport, Importance, refuse_imatrix
from pi2.importing.safetensors_file import Shards, SourceTensor
from pi2.model.tensors import MIXTURES, choose_formats, fit_width
from pi2.plan.documents.model import Model
from pi2.progress import ByteProgress, Progress, ignore_progress

_ALIGNMENT = 32
_UINT32, _TEXT = 4, 8
Pieces = Callable[[], Iterable[U8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    name: str
    shape: tuple[int, ...]
    """Rows first."""
    format: Format
    pieces: Pieces
    """Gives its bytes, one after the other."""
    source: Path
    """The file that it is made from."""

    @property
    def size_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.format.count_bytes(self.shape[-1])


def write_number(key: str, value: int) -> bytes:
    """A key with a whole number of 32 bits."""
    return _write_text(key.encode()) + struct.pack("<II", _UINT32, value)


def write_text(key: str, value: bytes) -> bytes:
    return _write_text(key.encode()) + struct.pack("<I", _TEXT) + _write_text(value)


def write_gguf(
    file: Path,
    keys: Mapping[str, bytes],
    tensors: Sequence[NewTensor],
    shards: Shards | None = None,
) -> None:
    """Write ``file``, which appears when it is whole.  ``keys``: each with its value, as bytes.

    ``shards`` bring sources one by one; bytes written before a failure are then kept, for a call
    with the same keys and tensors. Raises `UserError` P523 if it cannot be written, and what pieces
    and shards raise."""
    keys = {"general.alignment": write_number("general.alignment", _ALIGNMENT), **keys}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join([*keys.values(), *_describe(tensors)])
    first = _align(len(head))
    places = dict(zip((tensor.name for tensor in tensors), _place_all(tensors), strict=True))
    part, journal = (file.with_name(f".{file.name}.{end}") for end in ("part", "done.part"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        goes_on = shards is not None and part.exists() and journal.exists()
        done = journal.read_text("utf-8").splitlines() if goes_on else []
        sources = {tensor.source if shards else file: None for tensor in tensors}
        left = [source for source in sources if source.name not in done]
        if shards is not None:
            shards.reserve(left, max(map(shards.measure, left), default=0))
        with part.open("r+b" if done else "wb") as stream:
            stream.write(head)
            for source in left:
                if shards is not None:
                    shards.bring(source)
                for tensor in tensors:
                    if shards is None or tensor.source == source:
                        start = stream.seek(first + places[tensor.name])
                        for piece in tensor.pieces():
                            piece.tofile(stream)
                        assert stream.tell() - start == tensor.size_bytes, tensor.name
                stream.flush()
                os.fsync(stream.fileno())
                if shards is not None:
                    with journal.open("a", encoding="utf-8") as list_of_done:
                        list_of_done.write(f"{source.name}\n")
                    shards.drop(source)
        part.replace(file)
        journal.unlink(missing_ok=True)
    except OSError as error:
        raise UserError.of(
            "P523",
            f"cannot write {file}: {error.strerror}",
            help="choose another file with -o, or free disk space",
        ) from None
    finally:
        if shards is None:
            part.unlink(missing_ok=True)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place_all(tensors: Iterable[NewTensor]) -> Iterator[int]:
    """Yield the place of each tensor after the header."""
    offset = 0
    for tensor in tensors:
        yield offset
        offset += _align(tensor.size_bytes)


def _describe(tensors: Sequence[NewTensor]) -> Iterator[bytes]:
    for tensor, offset in zip(tensors, _place_all(tensors), strict=True):
        sizes = tensor.shape[::-1]
        yield _write_text(tensor.name.encode())
        yield struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        yield struct.pack("<IQ", tensor.format.number, offset)


def _write_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


_PLAIN, _EXACT = "f16", "f32"


TEXTS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "1_Pooling/config.json"),
)
"""Small files that a folder's file keeps."""
_REPLACED = re.compile(r"general\.(alignment|file_type|quantization_version)|split\..*")
_PIECE_WEIGHTS = 2**19
"""Weights that a thread quantises at once."""
_COPY_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The written parts."""

    size_bytes: int
    weighed: int
    """Matrices whose columns an importance matrix has weighed."""
    quantized: int
    """Matrices that were rounded."""


def quantize_checkpoint(
    source: Checkpoint,
    model: Model,
    output: Path,
    mixture: str,
    importance: Importance | None = None,
    *,
    errors: ErrorReport | None = None,
    progress: Progress = ignore_progress,
) -> Quantized:
    """Write ``source`` in the formats of a ``mixture`` to the GGUF file ``output``.

    Matrices that already have as few bits stay as they are; an MTP head is kept. ``errors``
    collects the error of each tensor. Raises `UserError` P539 for weights that cannot be stored,
    P548 for an importance matrix of another model, P523 if the file cannot be written."""
    wanted = MIXTURES[mixture]
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    formats, head = choose_formats(shapes, model, wanted), find_mtp(source, model)
    if head is not None:
        formats |= choose_formats(shapes, head, wanted)
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        shards = source.shards
        sizes = (
            file.stat().st_size if shards is None else shards.measure(file) for file in source.files
        )
        report = ByteProgress(progress, "quantising", sum(sizes))
        work = _Work(source, importance, errors, pool, report)
        if isinstance(source, GgufCheckpoint):
            keys, tensors = work.take_file(source, formats)
        else:
            keys, tensors = work.take_folder(source, formats)
        if importance is not None and not work.weighed:
            raise refuse_imatrix(importance.file, "it names none of its matrices")
        numbers = {"general.file_type": wanted.number, "general.quantization_version": 2}
        keys |= {key: write_number(key, number) for key, number in numbers.items()}
        write_gguf(output, keys, tensors, shards)
    progress("quantising", 1.0)
    return Quantized(
        size_bytes=output.stat().st_size, weighed=work.weighed, quantized=work.quantized
    )


@dataclass(slots=True)
class _Work:
    source: Checkpoint
    importance: Importance | None
    errors: ErrorReport | None
    pool: ThreadPoolExecutor
    progress: ByteProgress
    weighed: int = 0
    quantized: int = 0
    done_bytes: int = 0

    def take_file(
        self, source: GgufCheckpoint, formats: Mapping[str, str]
    ) -> tuple[dict[str, bytes], list[NewTensor]]:
        """Return keys and tensors of a GGUF file, which keep their names and order."""
        own = {
            tensor.name: formats[name]
            for name, tensor in source.tensors.items()
            if isinstance(tensor, GgufTensor) and name in formats
        }
        files = [read_gguf(file) for file in source.files]
        keys, tensors = _copy_keys(files[0]), []
        for file in files:
            for entry in file.entries.values():
                tensor = make_tensor(file, entry)
                wanted = find_format(fit_width(own.get(entry.name, "f32"), entry.shape[-1]))
                bits = 8 * entry.block.block_bytes * wanted.block, 8 * wanted.block_bytes
                if len(entry.shape) < 2 or bits[0] <= bits[1] * entry.block.block:
                    tensors.append(self._keep(tensor))
                    continue
                rows = replace(tensor, shape=(prod(entry.shape[:-1]), entry.shape[-1]))
                experts = entry.shape[0] if len(entry.shape) > 2 else 1
                weights = self._weigh(entry.name, entry.shape[-1], experts)
                tensors.append(self._round(entry.name, entry.shape, rows, wanted, weights))
        return keys, tensors

    def take_folder(
        self, source: Checkpoint, formats: Mapping[str, str]
    ) -> tuple[dict[str, bytes], list[NewTensor]]:
        """Return keys and tensors that only pi2 reads; experts lie side by side."""
        config = {key: v for key, v in source.config.items() if key != "quantization_config"}
        texts = {name: source.read_file(name) for name in TEXTS}
        texts |= {
            "config.json": json.dumps(config).encode(),
            "tokenizer.json": source.read_tokenizer(),
            "chat_template.jinja": source.read_template(),
        }
        keys = {"general.architecture": write_text("general.architecture", OWN.encode())}
        for name, text in texts.items():
            if text is not None:
                keys[name] = write_text(f"{FILES}{name}", text)
        names, tensors = find_names(source), []
        for name in sorted(formats, key=_place):
            tensor, wanted = source.tensors[name], find_format(formats[name])
            weights = None
            if len(tensor.shape) > 1 and not wanted.is_plain:
                weights = self._weigh(name_matrix(names, name, tensor), tensor.shape[-1], 1)
            tensors.append(self._round(name, tensor.shape or (1,), tensor, wanted, weights))
        return keys, tensors

    def _weigh(self, name: str, columns: int, experts: int) -> F32 | None:
        if self.importance is None:
            return None
        found = self.importance.find(name, columns, experts)
        self.weighed += found is not None
        return found

    def _keep(self, tensor: GgufTensor) -> NewTensor:
        def read() -> Iterator[U8]:
            end = tensor.offset + tensor.size_bytes
            for start in range(tensor.offset, end, _COPY_BYTES):
                yield tensor.read_flat(start, min(_COPY_BYTES, end - start), "|u1").view(np.uint8)
            self._advance(tensor)

        return NewTensor(
            name=tensor.name,
            shape=tensor.shape,
            format=tensor.block,
            pieces=read,
            source=tensor.file,
        )

    def _round(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: SourceTensor,
        wanted: Format,
        weights: F32 | None,
    ) -> NewTensor:
        """``rows``: the tensor, of several dimensions as one matrix; ``weights`` float32 [experts,
        columns]: what its columns count."""
        self.quantized += not wanted.is_plain
        width = shape[-1]
        each = max(1, len(weights) if weights is not None else 1)
        count = (rows.shape[0] if rows.shape else 1) // each
        step = max(1, _PIECE_WEIGHTS // prod(rows.shape[1:]))

        def encode(piece: tuple[int, int, int]) -> U8:
            number, start, stop = piece
            values = rows.read(number * count + start, number * count + stop).reshape(-1, width)
            try:
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
            self._advance(rows)

        return NewTensor(name=name, shape=shape, format=wanted, pieces=make, source=rows.file)

    def _advance(self, tensor: SourceTensor) -> None:
        self.done_bytes += tensor.size_bytes
        self.progress(self.done_bytes)


def _copy_keys(file: GgufFile) -> dict[str, bytes]:
    """Return the keys of a file with their values, without the keys about its making."""
    found = {}
    with open_stream(file.path) as stream:
        for key, (first, last) in file.spans.items():
            if not _REPLACED.fullmatch(key):
                stream.seek(first)
                found[key] = stream.read(last - first)
    return found


def find_names(source: Checkpoint) -> dict[str, str]:
    """Return what GGUF files of the same family call tensors; nothing for a family without any."""
    kind = source.config.get("model_type")
    for name in list_architectures():
        found = find_architecture(name)
        if found is not None and found.model_type == kind:
            mixed = any(".experts." in tensor for tensor in source.tensors)
            return choose_names(found, source.tensors, mixed=mixed)
    return {}


def name_matrix(names: Mapping[str, str], name: str, tensor: SourceTensor) -> str:
    """Return what importance matrices call a tensor that a checkpoint has by ``name``."""
    return tensor.name if isinstance(tensor, GgufTensor) else name_in_file(dict(names), name)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _place(name: str) -> tuple[int, str, list[int]]:
    """Order of tensors: by layer, then by name, then by expert."""
    numbers = [int(number) for number in _NUMBER.findall(name)]
    return numbers[0] if numbers else -1, _NUMBER.sub("", name), numbers
