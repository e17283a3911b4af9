"""Which rows of a checkpoint's tensors become the dense tensors and neurons of a store.

And how the program of files reads them: a matrix has a row for each output, experts are apart, all
queries come first, gates come before ups."""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from pi2.arrays import F32, F64, I32, I64, Raw
from pi2.importing.decoded_tensor import DecodedTensor, compute_alike
from pi2.importing.gguf_tensors import RateLogarithms
from pi2.importing.safetensors_file import SourceTensor, TurnedTensor, ViewTensor
from pi2.model.attention import Attention, list_fused_heads
from pi2.model.ffn import find_factors, find_neurons
from pi2.model.tensor import DenseTensor, Place, Source, split_mixer_kind, split_name
from pi2.plan.documents.model import Model

_KEPT_EXPERTS = 2 * (os.cpu_count() or 1) + 2
"""Experts that pieces which are packed at the same time may need."""


Key = TypeVar("Key")
Made = TypeVar("Made")


class Kept(Generic[Key, Made]):
    """Makes a value when it is first asked for, such as an expert's matrices, and forgets the ones
    not used lately; several threads may ask."""

    def __init__(self, make: Callable[[Key], Made], most: int = _KEPT_EXPERTS) -> None:
        """``most``: values that are kept."""
        self._make, self._most = make, most
        self._kept: OrderedDict[Key, Future[Made]] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, key: Key) -> Made:
        with self._lock:
            found = self._kept.get(key)
            is_mine = found is None
            if found is None:
                found = self._kept[key] = Future()
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        if is_mine:
            try:
                found.set_result(self._make(key))
            except BaseException as error:
                found.set_exception(error)
        return found.result()


def is_by_expert(order: I32, neurons: int) -> bool:
    """Whether the neurons of an expert, ``neurons`` of each, follow each other in ``order``."""
    owners = order // neurons
    return bool((owners[1:] >= owners[:-1]).all())


def take_expert(whole: SourceTensor, expert: int) -> SourceTensor:
    """One expert's part of a tensor of all experts, [experts, ...]."""

    def take(start: int, stop: int) -> F32:
        return whole.read(expert, expert + 1)[0, start:stop]

    size, name = whole.size_bytes // whole.shape[0], f"{whole.name}[{expert}]"
    return replace(compute_alike(whole, whole.shape[1:], take), name=name, size_bytes=size)


def fill_heads(
    stored: SourceTensor, heads: int, size: int, *, by_columns: bool = False
) -> SourceTensor:
    """A tensor of ``heads``, of which each has as many rows, or columns, filled up with zeros to
    ``size`` of them."""
    shape = (stored.shape[0], heads * size) if by_columns else (heads * size, *stored.shape[1:])
    count = stored.shape[by_columns] // heads

    def fill_columns(start: int, stop: int) -> F32:
        filled = np.zeros((stop - start, heads, size), np.float32)
        filled[..., :count] = stored.read(start, stop).reshape((-1, heads, count))
        return filled.reshape((stop - start, -1))

    def fill_rows(start: int, stop: int) -> F32:
        places = np.arange(start, stop)
        found = np.zeros((len(places), *shape[1:]), np.float32)
        is_there = places % size < count
        if is_there.any():
            wanted = places[is_there] // size * count + places[is_there] % size
            first = int(wanted[0])
            found[is_there] = stored.read(first, int(wanted[-1]) + 1)[wanted - first]
        return found

    fill = fill_columns if by_columns else fill_rows
    return DecodedTensor.make(stored.name, shape, fill, stored, kind="stored")


def make_same(*shape: int, number: float) -> SourceTensor:
    """A tensor of one number, which no file has."""

    def fill(start: int, stop: int) -> F32:
        return np.full((stop - start, *shape[1:]), number, np.float32)

    return DecodedTensor.make("same", shape, fill, kind="stored")


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedTensor(ViewTensor):
    """Rows of another tensor, or, if they are asked for turned, columns; nothing is in memory."""

    index: I64
    """Numbers of the rows, in their order here."""
    missing: int = 0
    """Rows of zeros that follow them."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        wanted = self.index[start:stop]
        absent = len(range(self.shape[0])[start:stop]) - len(wanted)
        if not len(wanted):
            return _fill(self.stored.read_raw(0, 1)[:0], absent)
        # Neighbours in the store are near each other in the checkpoint.
        first, last = int(wanted.min()), int(wanted.max())
        raw = self.stored.read_raw(first, last + 1)
        is_all = len(wanted) == len(raw) and (np.diff(wanted) == 1).all()
        return _fill(raw if is_all else raw[wanted - first], absent)

    def read_turned(self) -> Raw:
        return _fill(self.stored.read_turned()[self.index], self.missing)


def _fill(raw: Raw, missing: int) -> Raw:
    if not missing:
        return raw
    return np.concatenate([raw, np.zeros((missing, *raw.shape[1:]), raw.dtype)])


def pick_rows(tensor: SourceTensor, index: I64, missing: int = 0) -> SourceTensor:
    """Rows ``index`` of a tensor, and ``missing`` ones of zeros."""
    count = len(index) + missing
    size = tensor.size_bytes * count // max(1, tensor.shape[0])
    shape = (count, *tensor.shape[1:])
    return PickedTensor.of(tensor, shape=shape, size_bytes=size, index=index, missing=missing)


def find_rows(tensors: Mapping[str, SourceTensor], model: Model, source: Source) -> SourceTensor:
    """What ``source`` takes of a checkpoint that was checked."""
    if not source.key:
        return make_same(*source.shape, number=source.value)
    tensor = tensors[source.name(model.tensors)]
    if source.is_stacked:
        tensor = take_expert(tensor, source.expert)
    if source.is_turned:
        tensor = TurnedTensor.of(tensor, shape=tensor.shape[::-1])
    if source.heads is not None:
        heads, size, by_columns = source.heads
        tensor = fill_heads(tensor, heads, size, by_columns=by_columns)
    if source.rows is None:
        return tensor
    return pick_rows(tensor, np.asarray(source.rows(), np.int64), source.missing)


def find_dense_rows(
    tensors: Mapping[str, SourceTensor], model: Model, tensor: DenseTensor
) -> list[SourceTensor]:
    """Neighbouring rows of ``tensor``; of vectors of states, as `read_state_vector` has them."""
    found = [find_rows(tensors, model, source) for source in tensor.sources]
    first = found[0]
    if tensor.transform == "stack":

        def stack(start: int, stop: int) -> F32:
            return np.stack([part.read() for part in found[start:stop]])

        return [DecodedTensor.make(first.name, (tensor.rows, *first.shape), stack, *found)]
    if tensor.transform == "turned keys":
        latent, heads = model.attention.latent, model.shape.heads
        assert latent is not None
        return [take_heads(first, heads, (latent.plain, model.shape.head_dim))]
    if tensor.transform == "cutoff":
        layer = tensor.layer
        assert layer is not None
        deviations = model.blocks[layer].ffn.cutoff
        assert deviations is not None
        made = Kept(partial(make_cutoff, first, deviations), 1)

        def cut(start: int, stop: int) -> F32:
            return made[tensor.packing.is_plain][start:stop]

        return [DecodedTensor.make(first.name, (tensor.rows, model.shape.hidden), cut, first)]
    return found


def read_state_vector(
    tensors: Mapping[str, SourceTensor], model: Model, tensor: DenseTensor
) -> tuple[F32, SourceTensor]:
    """A float32 tensor [rows, length] of a layer with a state, and where it comes from."""
    found = find_dense_rows(tensors, model, tensor)
    kind, first = split_mixer_kind(split_name(tensor.name)[1])[0], found[0]
    is_rate = isinstance(first, RateLogarithms)
    read = [own.read_rates() if isinstance(own, RateLogarithms) else own.read() for own in found]
    if kind == "state_part_norm":
        values = np.concatenate([each.reshape(-1) for each in read])[None]
    elif kind == "state_convolution":
        values = np.concatenate([each.reshape(-1, tensor.rows) for each in read]).T
    elif kind == "state_decay":
        values = read[0].T if len(tensor.sources[0].shape) == 2 else read[0].reshape(1, -1)
        values = values if is_rate else -np.exp(values)
    else:
        values = read[0].reshape(1, -1)
        for bias in read[1:]:
            values = values + bias
    return np.ascontiguousarray(values), first


def find_ffn_rows(
    tensors: Mapping[str, SourceTensor], model: Model, part: str, layer: int, expert: int
) -> SourceTensor:
    """Rows of a part of the neurons of an FFN; of ``down`` the columns."""
    own = model.blocks[layer].ffn
    return find_rows(tensors, model, find_neurons(Place(model, layer), own, part, expert))


def read_factors(tensors: Mapping[str, SourceTensor], model: Model, layer: int) -> F32:
    """Weights of the norm of a layer's activations, float32 [neurons]."""
    factors = find_rows(tensors, model, find_factors(Place(model, layer)))
    return factors.read() + np.float32(model.norm.weight_offset)


_BLOCK = 4096
"""Gates that are in memory at once."""


def make_cutoff(gates: SourceTensor, deviations: float, has_remainders: bool) -> F32:
    """The mean row of ``gates``, and rows whose products with an input are, as a vector, as long as
    ``deviations`` from that mean.  They are float32 [1 + min(n, hidden), hidden]; with
    ``has_remainders``, as many rows follow that have what fp16 leaves of the first."""
    mean, factor = _factor_products(gates)
    scale = abs(deviations) / math.sqrt(gates.shape[0])
    matrix = np.concatenate([mean[None], scale * factor])
    if has_remainders:
        matrix = np.concatenate([matrix, matrix - matrix.astype(np.float16)])
    return matrix.astype(np.float32)


def _factor_products(gates: SourceTensor) -> tuple[F64, F64]:
    """The mean [hidden] of ``gates``, and a matrix F [min(n, hidden), hidden]: F^T F equals the
    product of the gates without their mean.

    The Cholesky factor of that product, summed up in float64, takes a small part of the time of a
    QR decomposition. It is no less exact for the length of F u. The error of the product is some
    1e-13 of its norm, and F is stored as float32 at best (docs/howto/convert-a-model.md)."""
    blocks = _list_blocks(gates.shape[0])
    shift = gates.read(*blocks[0]).mean(axis=0, dtype=np.float64)
    if gates.shape[0] <= len(shift):
        return _factor_rows(gates)
    # About a point near the mean, products lose nothing when the mean is taken off.
    sums = np.zeros(len(shift))
    products = np.zeros((len(shift), len(shift)))
    for block in blocks:
        rows = gates.read(*block) - shift
        sums += rows.sum(axis=0)
        products += rows.T @ rows
    rest = sums / gates.shape[0]
    products -= gates.shape[0] * np.outer(rest, rest)
    try:
        factor: F64 = np.linalg.cholesky(products).astype(np.float64, copy=False)
        return shift + rest, factor.T
    except np.linalg.LinAlgError:
        # Some input adds nothing to any gate, or the same to all.
        return _factor_rows(gates)


def _factor_rows(gates: SourceTensor) -> tuple[F64, F64]:
    blocks = _list_blocks(gates.shape[0])
    sums = [gates.read(*block).sum(axis=0, dtype=np.float64) for block in blocks]
    mean: F64 = np.sum(sums, axis=0) / gates.shape[0]
    factor = np.zeros((0, len(mean)))
    for block in blocks:
        # The triangle of all blocks so far, and the next block, have the triangle of both.
        both = np.concatenate([factor, gates.read(*block) - mean])
        # Types know results with both factors only.
        triangle: Any = np.linalg.qr(both, "r")
        factor = triangle
    return mean, factor


def _list_blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


def take_heads(
    whole: SourceTensor, heads: int, sizes: tuple[int, int], *, is_value: bool = False
) -> SourceTensor:
    """Keys of the KV matrix of latent attention [heads (plain + value), rank], turned [heads rank,
    plain]: queries times these meet latent vectors.  Or its values [heads value, rank].
    ``sizes``: rows of both in a head."""
    count, rank = sizes[is_value], whole.shape[1]
    width = count if is_value else rank

    def take(start: int, stop: int) -> F32:
        first, found = start // width, []
        for head in range(first, -(-stop // width)):
            place = head * sum(sizes) + is_value * sizes[0]
            rows = whole.read(place, place + count)
            found.append(rows if is_value else np.ascontiguousarray(rows.T))
        return np.concatenate(found)[start - first * width : stop - first * width]

    shape = (heads * width, rank if is_value else count)
    return compute_alike(whole, shape, take)


PARTS = ("gate", "up", "down", "gate_bias", "up_bias")
"""Keys of the parts of neurons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A tensor of a new file."""

    name: str
    shape: tuple[int, ...]
    tensors: tuple[SourceTensor, ...]
    """Its parts, one after the other."""
    matrix: str
    """What importance matrices call it."""
    key: str
    """Name in the checkpoint, by which its format is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Tensors and keys of a new file."""

    laid: Sequence[Laid]
    keys: Mapping[str, bytes]
    models: Sequence[Model]
    """The model, and its MTP head if the file has it, with the names of `Laid.key`."""
    vectors: Mapping[str, F32]
    """Tensors that no checkpoint has."""


def make_plain(model: Model) -> Model:
    """The same model in that layout; names of all other tensors stay."""
    names = model.tensors
    changes: dict[str, object] = {}
    if names.fused_qkv is not None and names.fused_order != "stacked":
        changes["fused_order"] = "stacked"
    is_mixed = names.fused_gate_up is not None and names.gate_up_order != "stacked"
    if is_mixed or (model.moe is not None and names.experts_turned):
        start = names.ffn_norm.partition("{layer}")[0] + "{layer}.pi2."
        start += "" if model.moe is None else "experts.{expert}."
        changes |= {key: start + key for key in PARTS}
        changes |= {"fused_gate_up": None, "fused_gate_up_bias": None}
        changes |= {"gate_up_order": "stacked", "experts_turned": False}
    return model.model_copy(update={"tensors": names.model_copy(update=changes)})


def find_plain(
    tensors: Mapping[str, SourceTensor], model: Model, source: Source
) -> SourceTensor | None:
    """What `make_plain` of ``model`` calls ``source``, out of the tensors of its checkpoint; None
    if the checkpoint has it not."""
    names, key = model.tensors, source.key
    if key in PARTS and model.blocks[source.layer].ffn.kind != "none":
        return find_ffn_rows(tensors, model, key, source.layer, source.expert)
    tensor = tensors.get(source.name(names))
    if tensor is None or not key.startswith("fused_qkv") or names.fused_order == "stacked":
        return tensor
    own = next(own for own in model.blocks[source.layer].mixers if isinstance(own, Attention))
    parts = (list_fused_heads(own, part, "grouped") for part in ("query", "key", "value"))
    heads: I64 = np.concatenate([np.array(part, np.int64) for part in parts])
    index = heads[:, None] * own.head_dim + np.arange(own.head_dim)
    return pick_rows(tensor, index.reshape(-1))
