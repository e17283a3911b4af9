"""Opens a neuron store as the checkpoint that it was made from, with the numbers that it has."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, I64, Raw
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.formats import find_packing, list_published
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.decoded_tensor import DecodedTensor
from pi2.importing.gguf_tensors import JoinedHeads
from pi2.importing.rows import Kept, make_plain
from pi2.importing.safetensors_file import Kind, SourceTensor, Taken
from pi2.model.ffn import find_factors, find_neurons
from pi2.model.tensor import DenseTensor, Place, Source, split_mixer_kind, split_name
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import slice_bias, slice_factors, slice_part, unpack_part
from pi2.plan.weights.layout import Precision, Tensor
from pi2.store.manifest import MANIFEST
from pi2.store.reader import NeuronStore, StoredLayer

_KEPT_EXPERTS = 2
"""Experts whose down vectors are in memory, as a store has no rows of outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFolder(Checkpoint):
    """A neuron store; predictors are left out."""

    model: Model

    @property
    def document(self) -> bytes:
        return self.model.model_dump_json(exclude_defaults=True).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows(SourceTensor):
    """Rows of dense tensors of a store; `read_raw` gives their numbers [n, 1]."""

    stored: list[Tensor]
    places: I64
    """Of each row, the number of a tensor and the row in it [rows, 2]."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return np.arange(self.shape[0])[start:stop, None]

    def widen(self, raw: Raw) -> F32:
        columns = self.shape[1]
        values = np.zeros((len(raw), columns), np.float32)
        places = self.places[raw[:, 0]]
        for number, stored in enumerate(self.stored):
            own = places[:, 0] == number
            values[own] = _widen(stored, places[own, 1])[:, :columns]
        return values

    @property
    def kind(self) -> Kind:
        return "stored" if self.stored[0].precision in (None, "fp16") else "computed"

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        places = self.places[raw[:, 0]]
        stored = self.stored[int(places[0, 0])]
        is_same = stored.precision == precision and stored.length == self.shape[1]
        if not is_same or (places[:, 0] != places[0, 0]).any():
            return None
        assert stored.scales is not None
        rows = places[:, 1]
        return stored.weights.view(np.uint8)[rows], stored.scales[rows].view(np.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNeurons(SourceTensor):
    """Gate or up rows of neurons; `read_raw` gives their places in the layer [n, 1]."""

    layer: StoredLayer
    part: int
    places: I64

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.places[start:stop, None]

    def widen(self, raw: Raw) -> F32:
        bundles = self.layer.read_inline(raw[:, 0].astype(np.int64))
        values = unpack_part(bundles, self.layer.layout.inline, self.part)
        return np.ascontiguousarray(values[:, : self.shape[1]])

    @property
    def kind(self) -> Kind:
        precision = self.layer.layout.parts[self.part].precision
        is_plain = find_packing(precision).is_plain
        return "stored" if is_plain else precision if precision in list_published() else "computed"

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        layout = self.layer.layout.inline
        if layout.parts[self.part].precision != precision or layout.hidden != self.shape[1]:
            return None
        bundles = self.layer.read_inline(raw[:, 0].astype(np.int64))
        weights, scales = slice_part(bundles, layout, self.part)
        return None if scales is None else (np.ascontiguousarray(weights), scales.view(np.float16))


def _widen(stored: Tensor, rows: I64 | slice = slice(None)) -> F32:
    """Numbers of rows of a dense tensor."""
    if stored.precision is None:
        return np.array(stored.weights[rows], np.float32)
    packing = find_packing(stored.precision)
    scales = None if stored.scales is None else stored.scales[rows]
    return packing.dequantize(stored.weights.view(np.uint8)[rows], scales, stored.length)


class _Store:
    """An open store and its model, whose norms have their offsets in them."""

    def __init__(self, store: NeuronStore, model: Model) -> None:
        self.store, self.model = store, model
        self._parts: dict[str, tuple[list[Tensor], I64]] = {}
        """Tensors of the store, and rows, by names of the checkpoint's, which may come in parts."""
        self._known: dict[str, F32] = {}
        self._downs = Kept(self._read_downs, _KEPT_EXPERTS)

    def _take_downs(self, place: tuple[int, int, int], start: int, stop: int) -> F32:
        return self._downs[place][start:stop]

    def _read_downs(self, place: tuple[int, int, int]) -> F32:
        """The down vectors as columns [width, neurons] of a layer's neurons, from the first on."""
        layer, first, count = place
        own = self.store.layers[layer]
        places = self.find_places(layer)[first : first + count]
        bundles = own.read_inline(places)
        values = unpack_part(bundles, own.layout.inline, len(own.layout.parts) - 1)
        return np.ascontiguousarray(values[:, : self.model.neuron_width].T)

    @lru_cache(4)  # noqa: B019 - it lives as long as the conversion
    def find_places(self, layer: int) -> I64:
        """Stored place of each neuron of the checkpoint."""
        return np.argsort(self.store.layers[layer].original, kind="stable").astype(np.int64)

    @cached_property
    def tensors(self) -> dict[str, SourceTensor]:
        found: dict[str, SourceTensor] = {}
        for tensor in list_tensors(self.model):
            if tensor.transform != "cutoff":
                found |= dict(self._list_dense(tensor))
        for layer in range(self.model.shape.layers):
            found |= dict(self._list_neurons(layer))
        return found

    def _name(self, source: Source) -> str:
        return source.name(self.model.tensors)

    def _describe(self, source: Source, columns: tuple[int, ...], dtype: str) -> dict[str, Any]:
        # Groups along other dimensions are rounded anew, to 8 bits.
        size = int(np.prod(columns))
        file, name = self.store.path, self._name(source)
        return {
            "file": file, "name": name, "dtype": dtype, "shape": columns, "offset": 0,
            "size_bytes": size,
        }  # fmt: skip

    def _list_dense(self, tensor: DenseTensor) -> Iterator[tuple[str, SourceTensor]]:
        """Tensors of the checkpoint, or parts of several of the store as numbers."""
        stored = self.store.tensors[tensor.name]
        if tensor.transform == "state":
            yield from self._list_state(tensor, stored)
            return
        first = 0
        for source in tensor.sources:
            count = len(source.rows()) if source.rows is not None else source.shape[0]
            if tensor.transform == "turned keys":
                yield self._name(source), self._join_heads(tensor, source)
                return
            if source.key == "latent_out":
                return
            if source.heads is not None:
                raise self.refuse(f"heads of {tensor.name} are filled up with zeros")
            is_vector = len(source.shape) == 1
            if not source.key:
                first += count + source.missing
                continue
            name = self._name(source)
            if source.is_stacked:
                yield name, self._give(source, _widen(stored)[:, : source.shape[1]])
                continue
            if is_vector:
                values = np.array(stored.weights, np.float32)
                is_stack = tensor.transform == "stack"
                row = values[source.expert] if is_stack else values[0, first:]
                first += 0 if is_stack else count + source.missing
                yield name, self._give(source, self._take_vector(source, row[:count]))
                continue
            rows = np.arange(first, first + count)
            first += count + source.missing
            yield name, self._take_rows(source, stored, rows)

    def _join_heads(self, tensor: DenseTensor, source: Source) -> SourceTensor:
        """Keys and values of each head, of which the store has the keys turned."""
        latent, heads = self.model.attention.latent, self.model.shape.heads
        assert latent is not None
        value = self.store.tensors[tensor.name.replace("latent_key", "latent_value")]
        keys = self._view(source, self.store.tensors[tensor.name], latent.plain)
        values = self._view(source, value, latent.rank)
        is_half = value.precision == "fp16"
        own: dict[str, Any] = {"dtype": "F16", "kind": "stored"} if is_half else {}
        return JoinedHeads.of(self._name(source), heads, keys, values, **own)

    def _view(self, source: Source, stored: Tensor, columns: int) -> SourceTensor:
        """The first ``columns`` of a dense tensor."""
        rows = np.arange(stored.rows)
        places = np.stack([np.zeros_like(rows), rows], axis=1)
        described = self._describe(source, (stored.rows, columns), "F32")
        return StoredRows(**described, stored=[stored], places=places)

    def _take_rows(self, source: Source, stored: Tensor, rows: I64) -> SourceTensor:
        name = self._name(source)
        known, places = self._parts.setdefault(name, ([], np.zeros((source.shape[0], 2), np.int64)))
        if not any(own is stored for own in known):
            known.append(stored)
        wanted = source.rows() if source.rows is not None else slice(None)
        places[wanted, 0], places[wanted, 1] = (
            next(n for n, own in enumerate(known) if own is stored),
            rows,
        )
        dtype = "F32" if stored.precision is None else "F16"
        described = self._describe(source, source.shape, dtype)
        return StoredRows(**described, stored=known, places=places)

    def _take_vector(self, source: Source, row: F32) -> F32:
        """The numbers of a vector, of which a tensor may have parts."""
        values = self._known.setdefault(self._name(source), np.zeros(source.shape[0], np.float32))
        values[source.rows() if source.rows is not None else slice(None)] = row
        return values

    def _make(
        self, source: Source, compute: Callable[[int, int], F32], *, is_half: bool = False
    ) -> SourceTensor:
        """Numbers that are made of several parts of a store."""
        own = self._describe(source, source.shape, "F16" if is_half else "F32")
        kind: Kind = "stored" if is_half else "computed"
        return DecodedTensor(**own, parts=(), compute=compute, kind=kind)

    def _give(self, source: Source, values: F32) -> SourceTensor:
        own = self._describe(source, values.shape, "F32")
        return DecodedTensor(**own, parts=(), compute=lambda start, stop: values[start:stop])

    def _list_state(
        self, tensor: DenseTensor, stored: Tensor
    ) -> Iterator[tuple[str, SourceTensor]]:
        """The reverse of `pi2.importing.rows.read_state_vector`."""
        values = np.array(stored.weights, np.float32)
        kind = split_mixer_kind(split_name(tensor.name)[1])[0]
        if kind == "state_convolution":
            values = np.ascontiguousarray(values.T)  # [channels, kernel]
        elif kind == "state_decay":
            values = np.log(-values)
            values = values.T if len(tensor.sources[0].shape) == 2 else values.reshape(-1)
        else:
            values = values.reshape(-1)
        first = 0
        is_apart = kind in ("state_convolution", "state_part_norm")
        # A sum is in the first of its sources; the others have zeros there.
        for source in tensor.sources if is_apart else tensor.sources[:1]:
            size = source.shape[0]
            rows = np.arange(size) if source.rows is None else np.asarray(source.rows())
            own = values[first if is_apart else 0 :][: len(rows)]
            first += len(rows)
            name = self._name(source)
            whole = self._known.setdefault(name, np.zeros(source.shape, np.float32))
            whole.reshape(size, -1)[rows] = own.reshape(len(rows), -1)[:, : whole[0].size]
            yield name, self._give(source, whole)

    def _list_neurons(self, layer: int) -> Iterator[tuple[str, SourceTensor]]:
        model, own = self.model, self.model.blocks[layer].ffn
        stored, at = self.store.layers[layer], Place(model, layer)
        layout, ffn = stored.layout, model.shape.ffn
        places = self.find_places(layer)
        names = [part.name for part in layout.parts]
        bundles = None
        if layout.biases or layout.factor_offset is not None:
            bundles = stored.read_inline(places)
        rows: dict[str, list[tuple[Source, I64, int]]] = {}
        for expert in range(model.expert_count if own.kind != "none" else 0):
            for number, part in enumerate(names):
                source = find_neurons(at, own, part, expert)
                if source.key:
                    count = ffn if source.rows is None else len(source.rows())
                    first = expert * ffn
                    rows.setdefault(self._name(source), []).append(
                        (source, places[first : first + count], number)
                    )
            for number, bias in enumerate(layout.biases):
                source = find_neurons(at, own, f"{bias.name}_bias", expert)
                if source.key and bundles is not None:
                    values = slice_bias(bundles, layout.inline, number)
                    yield (
                        self._name(source),
                        self._give(source, values[expert * ffn : (expert + 1) * ffn]),
                    )
        if layout.factor_offset is not None and bundles is not None and own.kind != "none":
            source = find_factors(at)
            yield self._name(source), self._give(source, slice_factors(bundles, layout.inline))
        for name, parts in rows.items():
            source, _, number = parts[0]
            if source.key.endswith("down"):
                # Neurons of shared experts and of dense layers follow each other.
                first = int(np.flatnonzero(places == parts[0][1][0])[0])
                count = sum(len(own_places) for _, own_places, _ in parts)
                is_half = layout.parts[number].precision == "fp16"
                made = partial(self._take_downs, (layer, first, count))
                yield name, self._make(source, made, is_half=is_half)
                continue
            described = self._describe(source, source.shape, "F16")
            joined = np.concatenate([own_places for _, own_places, _ in parts])
            yield name, StoredNeurons(**described, layer=stored, part=number, places=joined)

    def refuse(self, problem: str) -> UserError:
        return UserError.of(
            "P707",
            f"the store {self.store.path} cannot become a GGUF file: {problem}",
            help="convert the original checkpoint with -o FILE.gguf",
        )


def open_store_folder(folder: Path, model: Model | None = None) -> StoreFolder:
    """Open the store at ``folder``, of ``model`` or of the model document in it.

    Raises `UserError`: P501 to P508 as `NeuronStore.open`, P707 for one that has none, or whose
    layout has no reverse."""
    model = model or _read_model(folder)
    store = NeuronStore.open(folder, model=model)
    norm = model.norm.model_copy(update={"weight_offset": 0.0})
    apart: dict[str, object] = {"fused_shared": None, "fused_dense": None}
    if model.tensors.fused_gate_up is not None:
        apart["gate_up_order"] = "neighbours"
    names = model.tensors.model_copy(update=apart)
    plain = make_plain(model.model_copy(update={"norm": norm, "predictor": None, "tensors": names}))
    tensors: Mapping[str, SourceTensor] = _Store(store, plain).tensors
    return StoreFolder(
        folder=folder,
        config={"model_type": "llama"},
        config_file=folder / MANIFEST,
        tensors=tensors,
        files=tuple(layer.path for layer in store.layers),
        model=plain,
    )


def _read_model(folder: Path) -> Model:
    files = sorted(folder.glob("*.model.toml"))
    if not files:
        raise UserError.of(
            "P707",
            f"the store {folder} cannot become a GGUF file: it has no model document",
            help="name the one of the plan that runs it: --model NAME.model.toml",
        )
    report = check_file(files[0])
    if not report.is_sound:
        raise report.make_error()
    assert isinstance(report.document, Model)
    return report.document
