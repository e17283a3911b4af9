"""A GGUF file as a source of weights: the place of each tensor of the model in it, unconverted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2 import pause_collection
from pi2.arrays import F32
from pi2.backends.blocks.instructions import Weight
from pi2.backends.blocks.layers import count_program
from pi2.backends.blocks.operands import Extent
from pi2.caches import find_cache_folder, replace_file
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import Checkpoint, use_tokenizer
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_file import GgufTensor
from pi2.importing.gguf_tensors import JoinedHeads, OrderedColumns, RateLogarithms
from pi2.importing.new_model import describe_checkpoint, describe_mtp
from pi2.model.blocks import State
from pi2.model.states import list_state_tensors
from pi2.model.tensor import DenseTensor, Place, fill_name, name_state_tensor
from pi2.model.tensors import list_sources
from pi2.plan.documents.model import Model
from pi2.progress import ByteProgress, Progress, ignore_progress
from pi2.reads import read_weights
from pi2.tokens.table_tokenizer import Coder
from pi2.weights.file_tensor import EXPERTS, PIECE_BYTES, FileTensor, TensorFiles

if TYPE_CHECKING:
    from pi2.importing.safetensors_file import SourceTensor

HEADS = ("latent_keys", "latent_values")
"""Keys of the parts of ``latent_out`` that files have apart: matrices of each head."""


class GgufWeights(TensorFiles):
    """The tensors of a GGUF model, which may be split into several files; nothing is copied."""

    def __init__(self, checkpoint: Checkpoint, model: Model) -> None:
        """``model``: what the metadata say of it."""
        super().__init__(checkpoint.files, model)
        self.checkpoint = checkpoint
        self._found: dict[tuple[str, int, int], FileTensor | None] = {}
        self._counted: dict[Extent, Mapping[str, int]] = {}

    @classmethod
    @pause_collection()
    def open(
        cls, path: Path, *, has_texts: bool = True, tokenizer: Path | None = None
    ) -> GgufWeights:
        """Read the headers of ``path`` and its other parts, with another ``tokenizer`` than theirs,
        as `pi2.importing.checkpoint.use_tokenizer` takes it; without ``has_texts``, nothing is said
        of the tokenizer.

        Raises `UserError` as `pi2.importing.gguf_checkpoint.open_gguf` and
        `pi2.importing.new_model.describe_checkpoint` do."""
        checkpoint = use_tokenizer(open_gguf(path), tokenizer)
        return cls(checkpoint, describe_checkpoint(checkpoint, has_texts=has_texts).model)

    def open_head(self, file: Path | None = None) -> GgufWeights:
        """The MTP head in the same files, or in another one, which reads some of this model's
        matrices.

        Raises `UserError`: P544 without one that can be computed, P533 or P534 where it is not
        whole."""
        checkpoint = self.checkpoint if file is None else open_gguf(self.path, file)
        head = GgufWeights(checkpoint, describe_mtp(checkpoint, self.model))
        obstacles = head.find_obstacles()
        if obstacles:
            raise UserError.of(
                "P544",
                f"the MTP head of {file or self.path} cannot run as it is: {', '.join(obstacles)}",
                help='write decode.speculation.drafts = "prompt"',
            )
        own = {tensor.name for _, _, tensor in self.list_matrices()}
        found = {tensor.name: tensor.size_bytes for _, _, tensor in head.list_matrices()}
        head.shared = {name: size for name, size in found.items() if name in own}
        return head

    @property
    def path(self) -> Path:
        return self.checkpoint.folder

    @cached_property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        """Name, bytes and time of change (ns) of each file, which differ if one is another."""
        stats = [(file.name, file.stat()) for file in self.files]
        return tuple((name, found.st_size, found.st_mtime_ns) for name, found in stats)

    def find(self, key: str, layer: int = 0, mixer: int = 0) -> FileTensor | None:
        place = key, layer, mixer
        if place not in self._found:
            self._found[place] = self._find(*place)
        return self._found[place]

    def _find(self, key: str, layer: int, mixer: int) -> FileTensor | None:
        name = "latent_out" if key in HEADS else key
        pattern = getattr(self.model.tensors, name, name)
        if pattern is None:
            return None
        heads = 1
        tensor = self.checkpoint.tensors.get(fill_name(pattern, layer, mixer=mixer))
        if isinstance(tensor, JoinedHeads) and key in HEADS:
            heads = self.model.shape.heads
            tensor = tensor.keys if key == HEADS[0] else tensor.values
        elif key in HEADS:
            return None
        elif key == "output_group" and self.model.attention.pooled is not None:
            heads = self.model.attention.pooled.groups
        columns = tensor.columns if isinstance(tensor, OrderedColumns) else None
        tensor = tensor.source if isinstance(tensor, OrderedColumns) else tensor
        if not isinstance(tensor, GgufTensor) or tensor.is_turned:
            return None
        has_pairs, has_order = key in ("query", "key"), key.startswith("state_")
        if tensor.order is not None and not (has_pairs or has_order):
            return None
        experts = self._list_experts(pattern, layer, tensor)
        if not experts:
            return None
        # The file may have other rows in the same matrix.
        rows = tensor.size_bytes // tensor.block.count_bytes(tensor.shape[-1])
        count, together = 1, rows // heads if heads > 1 else 1
        if key in EXPERTS and len(tensor.shape) == 3:
            count = tensor.shape[0]
        elif "{expert}" in pattern:
            count = len(experts)
        elif len(experts) > 1:  # streams, each of which has a matrix
            together = rows
        return FileTensor(
            name=tensor.name,
            file=self.files.index(tensor.file),
            offset=tensor.offset,
            format=tensor.block.name,
            rows=rows * len(experts) // count,
            length=tensor.shape[-1],
            together=together,
            experts=count,
            scales=tuple(float(own.factor) for own in experts if own.factor is not None),
            neighbours=has_pairs and tensor.order is not None,
            order=tensor.order if has_order else None,
            columns=columns,
        )

    def _list_experts(self, pattern: str, layer: int, first: GgufTensor) -> list[GgufTensor]:
        """Matrices of experts or streams that lie one after the other; none if they lie apart."""
        experts, count = [first], 1
        if "{expert}" in pattern and self.model.moe is not None:
            count = self.model.moe.experts
        elif "{stream}" in pattern and self.model.altup is not None:
            count = self.model.altup.others
        for expert in range(1, count):
            name = fill_name(pattern, layer, expert, stream=expert)
            found = self.checkpoint.tensors.get(name)
            place = first.offset + expert * first.size_bytes
            if not isinstance(found, GgufTensor) or found.file != first.file:
                return []
            if (found.offset, found.block) != (place, first.block):
                return []
            experts.append(found)
        return experts

    def read_vector(self, key: str, layer: int = 0, mixer: int = 0) -> F32 | None:
        """The numbers of a small tensor, as in the model's original, all experts one after the
        other; of a layer with a state, as `list_state_tensors` has them; biases of queries and
        keys in the order of the file's rows. None if there is none.

        Raises `UserError` P532 or P535 as `SourceTensor.read`."""
        own = self._find_state_vector(key, layer, mixer)
        if own is not None:
            from pi2.importing.rows import read_state_vector

            return read_state_vector(self.checkpoint.tensors, self.model, own)[0].reshape(-1)
        found = self._list_parts(key, layer, mixer)
        if key in ("query_bias", "key_bias"):
            found = [
                replace(own, order=None) if isinstance(own, GgufTensor) else own for own in found
            ]
        read = [tensor.read().reshape(-1) for tensor in found]
        return np.concatenate(read).astype(np.float32) if read else None

    def _find_state_vector(self, key: str, layer: int, mixer: int) -> DenseTensor | None:
        own = self._vectors.get((layer, mixer), {})
        return own.get(name_state_tensor(layer, mixer, key))

    def _list_parts(self, key: str, layer: int, mixer: int) -> list[SourceTensor]:
        """A small tensor, of experts each."""
        pattern = getattr(self.model.tensors, key, key)
        if pattern is None:
            return []
        count = self.model.expert_count if "{expert}" in pattern else 1
        names = (fill_name(pattern, layer, expert, mixer=mixer) for expert in range(count))
        return [own for name in names if (own := self.checkpoint.tensors.get(name)) is not None]

    def _describe(self, key: str, layer: int, mixer: int = 0) -> Weight | None:
        """A matrix or a vector without its bytes."""
        matrix = self.describe(key, layer, mixer)
        if matrix is not None:
            return matrix
        own, parts = self._find_state_vector(key, layer, mixer), self._list_parts(key, layer, mixer)
        if key in EXPERTS and any(len(part.shape) > 1 for part in parts):
            raise UserError.of(
                "P544",
                f"experts of layer {layer} do not lie side by side in {self.path}",
                help="write one tensor for all experts of a layer, or 32-byte multiples of each",
            )
        size = sum(math.prod(part.shape) for part in parts)
        size = size if own is None else own.rows * own.length
        return Weight(format="f32", rows=1, length=size) if size else None

    def count_arrays(self, extent: Extent) -> Mapping[str, int]:
        """Bytes of a program's arrays by segment (`pi2.backends.blocks.layers`)."""
        if extent not in self._counted:
            self._counted[extent] = count_program(self.model, self._describe, extent).segments
        return self._counted[extent]

    def check_once(self, progress: Progress = ignore_progress) -> None:
        """Check every scale, and every number that stands for itself, unless that was done before.
        `UserError` P539 names the first tensor that has one that is not finite."""
        files = [str(file.absolute()) for file in self.files]
        key = hashlib.sha256(repr((files, self.identity)).encode()).hexdigest()
        mark = find_cache_folder("checked") / key
        if not mark.exists():
            self._check_numbers(progress)
            with suppress(OSError):
                replace_file(mark, b"")

    def _check_numbers(self, progress: Progress) -> None:
        tensors = [t for t in self.checkpoint.tensors.values() if isinstance(t, GgufTensor)]
        report = ByteProgress(progress, "checking weights", sum(t.size_bytes for t in tensors))
        for tensor in tensors:
            own = tensor.block
            # Read and not mapped: mapped pages would count as this process's memory.
            piece = PIECE_BYTES // own.block_bytes * own.block_bytes
            for done in range(0, tensor.size_bytes, piece):
                raw = np.empty(min(piece, tensor.size_bytes - done), np.uint8)
                read_weights(tensor.file, raw, tensor.offset + done, f"tensor {tensor.name!r}")
                if own.find_faults(raw).any():
                    raise UserError.of(
                        "P539",
                        f"tensor {tensor.name!r} in {tensor.file} has a scale or a weight that "
                        "is not a finite number",
                        help="download or export the file again",
                        file=str(tensor.file),
                    )
                report.add(len(raw))

    def find_obstacles(self) -> list[str]:
        """Why the file cannot be run as it is; empty if it can."""
        from pi2.backends.blocks.contract import find_unknown

        found = find_unknown(self.model)
        if self.model.predictor is not None:
            found.append("predictor")
        for name, tensor in self.checkpoint.tensors.items():
            own = tensor.source if isinstance(tensor, OrderedColumns | RateLogarithms) else tensor
            is_known = isinstance(own, GgufTensor | JoinedHeads)
            if not is_known or (isinstance(own, GgufTensor) and own.is_turned):
                found.append(name)
        routed = (layer for layer, own in enumerate(self.model.blocks) if own.ffn.has_router)
        found += [f"experts of layer {own} apart" for own in routed if not self.find("down", own)]
        return found

    @cached_property
    def _vectors(self) -> Mapping[tuple[int, int], Mapping[str, DenseTensor]]:
        """By layer and mixer, small tensors of layers with a state, by their names in stores."""
        found = {}
        for layer, number in self.model.states:
            mixer, at = self.model.blocks[layer].mixers[number], Place(self.model, layer, number)
            assert isinstance(mixer, State) and mixer.shape is not None
            own = [t for t in list_state_tensors(at, mixer.shape) if t.transform == "state"]
            found[layer, number] = {tensor.name: tensor for tensor in own}
        return found

    @cached_property
    def vectors(self) -> frozenset[str]:
        """Keys of ``model.tensors`` that name vectors, or small tensors of any shape."""
        states = (tensor for own in self._vectors.values() for tensor in own.values())
        found = {source.key for tensor in states for source in tensor.sources}
        keys = {own.key for own in list_sources(self.model)}
        ends = ("_bias", "_convolution")
        return frozenset(found | {key for key in keys if key.endswith(ends)} | {"choice_table"})

    def list_places(self) -> list[tuple[str, int, int]]:
        """Key of ``model.tensors``, layer and mixer of every tensor that the model may have."""
        places = ((own.key, own.layer, own.mixer) for own in list_sources(self.model))
        split = {"latent_out": ("latent_out", *HEADS)}
        return [
            (own, layer, mixer)
            for key, layer, mixer in dict.fromkeys(places)
            for own in split.get(key, (key,))
        ]

    def list_matrices(self) -> Iterator[tuple[str, int, FileTensor]]:
        """Every own matrix once, by a key of ``model.tensors`` that names it and its layer."""
        names = set(self.shared)
        for key, layer, mixer in self.list_places():
            found = None if key in self.vectors else self.find(key, layer, mixer)
            if found is not None and found.all_rows > 1 and found.name not in names:
                names.add(found.name)
                yield key, layer, found

    def list_resident(self) -> dict[str, int]:
        """Bytes of the matrices that must be resident, by name: they are read twice for a token,
        keys of heads and then values."""
        found = [self.find("latent_out", layer) for layer in range(self.model.shape.layers)]
        return {own.name: own.size_bytes for own in found if own is not None}

    def count_bytes(self) -> int:
        return sum(tensor.size_bytes for _, _, tensor in self.list_matrices())


class FileTexts:
    """What a file's metadata say of chats, as a folder that its template is read from."""

    is_synthetic = False

    def __init__(self, weights: GgufWeights, cleanup: ExitStack) -> None:
        self.identity = repr(weights.identity).encode()
        """Bytes that change if another file has replaced this one."""
        self._checkpoint = weights.checkpoint
        self._made = cleanup.enter_context(ExitStack())

    @cached_property
    def path(self) -> Path:
        from tempfile import TemporaryDirectory

        folder = Path(self._made.enter_context(TemporaryDirectory(prefix="pi2-")))
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            content = self._checkpoint.read_file(name)
            if content is not None:
                (folder / name).write_bytes(content)
        return folder

    def open_tokenizer(self) -> Coder:
        """The file's tokenizer; `UserError` P543 or P605."""
        return self._checkpoint.open_tokenizer()
