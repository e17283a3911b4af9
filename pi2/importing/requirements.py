"""The tensors and bits that a model document and its checkpoint demand of each other."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import attrgetter

import numpy as np

from pi2.diagnostics import Diagnostic, UserError
from pi2.formats import find_packing, list_packings, name_packings
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.config import TABLE
from pi2.importing.gguf_file import GgufTensor
from pi2.importing.gguf_metadata import ModelNames
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.ffn import list_neuron_sources
from pi2.model.tensor import Place, Source, fill_name, match_name
from pi2.model.tensors import list_sources, list_tensors
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization

_WIDE, _WIDEST = find_packing("int8"), find_packing("fp16")
_EXACT = {"", "f64", "f32", "bf16", "f16", "q8_0", "q5_0", "q4_0", "iq4_nl"}
"""Formats of rows that no word is said of, such as those whose codes int8 has."""
_WIDE_BITS = _WIDE.bits + 8 * _WIDE.count_scale_bytes(256) / 256


def keep_bits(checkpoint: Checkpoint, model: Model) -> Model:
    """Return ``model`` with a format for each class of tensors that has the bits of all of its
    tensors in a GGUF file; unchanged for other checkpoints, and for formats of stores.

    Gate and up rows of one format are kept block by block, of Q4_0 as int4, which has their codes
    and scales. Other blocks, and down projections whose blocks run across neurons, get 8 bits;
    blocks with more bits get fp16, the widest that stores have."""
    if not checkpoint.has_blocks:
        return model
    own, formats = model.quantization, _list_formats(checkpoint, model)
    kept_as = {find_packing(name).like: name for name in name_packings("gates")}
    is_open = len(formats) == 1 and not find_packing(own.ffn).is_published
    gate_up = kept_as.get(*formats) if is_open else None
    kept = {
        key: _find_widest(checkpoint, model, key, only_across=key == "ffn" and gate_up is not None)
        for key in _CLASSES
        if not find_packing(getattr(own, key)).is_published
    }
    changes: dict[str, str | None] = {key: name for key, name in kept.items() if name is not None}
    changes["gate_up"] = None if gate_up == changes.get("ffn") else gate_up
    return model.model_copy(update={"quantization": own.model_copy(update=changes)})


_CLASSES = tuple(key for key in Quantization.model_fields if key != "gate_up")


def describe_rounded(checkpoint: Checkpoint, model: Model) -> list[str]:
    """Say which gate and up rows of a GGUF file a store rounds, in at most one line."""
    rounded = sorted(_list_formats(checkpoint, model) - _EXACT)
    own = model.quantization
    if own.gate_up is not None or not rounded or find_packing(own.ffn).is_published:
        return []
    return [
        f"gate and up rows ({', '.join(rounded)}) are rounded to {own.ffn}: stores "
        "keep blocks if all have one format"
    ]


def _list_formats(checkpoint: Checkpoint, model: Model) -> set[str]:
    """Return the formats of gate and up rows in a file; "" is what blocks are not kept of."""
    found = set[str]()
    for source in _list_neurons(model):
        tensor = checkpoint.tensors.get(source.name(model.tensors))
        if tensor is None or len(tensor.shape) < 2 or source.key.endswith("down"):
            continue
        is_own = isinstance(tensor, GgufTensor) and not tensor.is_turned and tensor.factor is None
        fits = tensor.shape[-1] == model.stored_neuron_width
        is_own = is_own and fits and not source.is_turned and not source.is_stacked
        found.add(tensor.dtype.lower() if is_own else "")
    return found


def describe_kept(model: Model) -> str:
    """Return the formats of a model's weights, for people."""
    formats = model.quantization.model_dump(exclude_none=True)
    return ", ".join(f"{key} {name}" for key, name in formats.items())


def _find_widest(
    checkpoint: Checkpoint, model: Model, key: str, *, only_across: bool
) -> str | None:
    """Return the widest format that tensors of a class need, or of those whose columns are rows of
    stores; None if there is no such tensor."""
    tensors, order = checkpoint.tensors, list(list_packings())
    found = {
        _choose(tensors[name], is_across=is_across)
        for name, is_across in _list_names(model, key)
        if name in tensors and len(tensors[name].shape) > 1 and (is_across or not only_across)
    }
    return max(found, key=order.index, default=None)


def _choose(tensor: SourceTensor, *, is_across: bool) -> str:
    if isinstance(tensor, GgufTensor):
        own = tensor.block.name
        same = next((p for p in list_packings().values() if p.like == own and p.top), None)
        # Blocks lie along the rows of the file.
        if same is not None and tensor.is_turned == is_across and tensor.factor is None:
            return same.name
    bits = 8 * tensor.size_bytes / prod(tensor.shape)
    return _WIDE.name if bits <= _WIDE_BITS else _WIDEST.name


def _list_neurons(model: Model) -> Iterator[Source]:
    for layer, block in enumerate(model.blocks):
        yield from list_neuron_sources(Place(model, layer), block.ffn)


def _list_names(model: Model, key: str) -> Iterator[tuple[str, bool]]:
    """Yield the names of a class of tensors, and whether a store has their columns as rows."""
    names = model.tensors
    if key == "ffn":
        for source in _list_neurons(model):
            yield source.name(names), source.key.endswith("down") != source.is_turned
    elif key == "predictor":
        for layer, expert in product(range(model.shape.layers), range(model.expert_count)):
            for pattern in (names.predictor_in, names.predictor_out):
                yield fill_name(pattern, layer, expert), False
    else:
        wide = dict.fromkeys(_CLASSES, _WIDE.name)
        low, high = (
            list_tensors(model.model_copy(update={"quantization": Quantization(**wide | own)}))
            for own in ({}, {key: _WIDEST.name})
        )
        for tensor, other in zip(low, high, strict=True):
            if tensor.precision != other.precision and tensor.transform != "cutoff":
                yield from ((own.name(names), own.is_turned) for own in tensor.sources if own.key)


_COUNTED = 1000
"""Most findings that are looked for: nonsensical sizes could contradict millions of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A tensor that must be there; ``key`` is where the model document names it."""

    key: str
    name: str
    shape: tuple[int, ...]


def list_requirements(model: Model) -> Iterator[Requirement]:
    """Every tensor but the predictors, with its shape in the checkpoint."""
    asked = set()
    for source in list_sources(model):
        name = source.name(model.tensors)
        if name not in asked:
            asked.add(name)
            yield Requirement(key=source.key, name=name, shape=source.shape)


_DOCUMENT = "the model document says"


def check_checkpoint(checkpoint: Checkpoint, model: Model, says: str = _DOCUMENT) -> None:
    """`UserError` with all P533, P534 and P537; ``says`` names where shapes come from."""
    findings = [*_compare_config(checkpoint, model)]
    for need in list_requirements(model):
        finding = find_tensor_problem(checkpoint, need, says)
        if finding is not None:
            findings.append(finding)
        if len(findings) > _COUNTED:
            break
    raise_findings(findings)


def raise_findings(findings: list[Diagnostic]) -> None:
    """Raise the findings as one `UserError`, if there are any. Of findings about tensors only the
    first is shown, with the number of the others, since one wrong number contradicts all layers."""
    missing = [finding for finding in findings if finding.code == "P533"]
    wrong = [finding for finding in findings if finding.code == "P534"]
    kept = [finding for finding in findings if finding.code not in ("P533", "P534")]
    first, others = (wrong or missing)[:1], len((wrong or missing)[1:])
    if first:
        message = first[0].message
        if others:
            message += f"; {others} other tensors are" if others > 1 else "; another is"
            message += " like it"
        if wrong and missing:
            message += f"; {len(missing)} are missing"
        kept = [replace(first[0], message=message), *kept]
    if kept:
        raise UserError(kept, exit_code=2)


def find_tensor_problem(
    checkpoint: Checkpoint, need: Requirement, says: str = _DOCUMENT
) -> Diagnostic | None:
    tensor = checkpoint.tensors.get(need.name)
    if tensor is None:
        place = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.folder
        return Diagnostic(
            code="P533",
            message=f"{place} has no tensor {checkpoint.describe_name(need.name)!r}",
            help=f"check tensors.{need.key} and the shape in the model document",
        )
    if drop_ones(tensor.shape) != drop_ones(need.shape):
        return describe_shape_problem(tensor, need.shape, says)
    return None


def drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of 1 at its ends, by which vectors are written in several ways."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def describe_shape_problem(
    tensor: SourceTensor, shape: tuple[int, ...], says: str = _DOCUMENT
) -> Diagnostic:
    """A P534 that names file, tensor and both shapes."""
    return Diagnostic(
        code="P534",
        message=(
            f"tensor {tensor.name!r} in {tensor.file} has the shape {list(tensor.shape)}, "
            f"{says} {list(shape)}"
        ),
        help="correct the shape there, or give another checkpoint",
    )


def _compare_config(checkpoint: Checkpoint, model: Model) -> Iterator[Diagnostic]:
    """Compare ``config.json`` with the document where it states a value."""
    stated = dict(checkpoint.config)
    for table in ("rope_scaling", "rope_parameters"):  # as it was written before transformers 5
        rope = checkpoint.config.get(table)
        stated |= rope if isinstance(rope, Mapping) else {}
    functions = {"states": lambda names, key: key in stated}
    names = ModelNames(
        model,
        {"config": stated, "sizes": isinstance(stated.get("intermediate_size"), list)},
        functions,
    )
    left = {key for own in TABLE["left"] if names.compute(own["test"]) for key in own["keys"]}
    paths: Mapping[str, str] = TABLE["compared"]
    for key, path in paths.items():
        value = attrgetter(path)(model)
        if key not in left and stated.get(key) is not None and stated[key] != value:
            yield Diagnostic(
                code="P537",
                message=(
                    f"{key} is {stated[key]!r} in {checkpoint.config_file}, "
                    f"but {path} is {value!r} in the model document"
                ),
                help=f"correct {path}, or give another checkpoint",
                path=path,
            )


_NAMED = 8
"""Tensors that a message names."""
_COMPARED_ROWS = 64
"""Rows by which matrices are known to be the same: trained ones differ in every row."""


def find_leftovers(checkpoint: Checkpoint, model: Model, says: str) -> Iterator[Diagnostic]:
    """P537 for tensors that ``model`` leaves out; ``says`` names the configuration."""
    left = _list_unused(checkpoint, model)
    layers = model.shape.layers
    later = [name for name in left if _find_layer(name, model) >= layers]
    if later:
        norm = fill_name(model.tensors.attention_norm, layers)
        named = [norm] if norm in later else later
        yield _deny(checkpoint, named[:1], f"{says} that the model has {layers} layers")
    left = [name for name in left if _find_layer(name, model) < layers]
    if left:
        source = says.removesuffix(" says")
        yield _deny(checkpoint, left, f"no operator of the model that {source} describes reads it")
    head = model.tensors.head
    has_own = model.tied_head and head in checkpoint.tensors
    if has_own and not repeats(checkpoint, head, model.tensors.embedding):
        yield _deny(
            checkpoint, [head], f"{says} that the head is the embedding, which has other weights"
        )


_OTHER_PARTS = {does: re.compile(text) for does, text in TABLE["other_parts"].items()}
"""Parts of checkpoints that no model document states, by their purpose."""


def describe_other_parts(checkpoint: Checkpoint, *, keeps_head: bool = False) -> list[str]:
    """What of a checkpoint is left out because a model document has no word for it, a line each;
    ``keeps_head``: its MTP head is not."""
    names = checkpoint.tensors
    counts = {
        f"to {does}": sum(pattern.search(name) is not None for name in names)
        for does, pattern in _OTHER_PARTS.items()
    }
    layers = checkpoint.config.get("num_hidden_layers")
    if _count_drafting(checkpoint) and type(layers) is int:
        numbers = (re.search(r"\.layers\.(\d{1,9})\.", name) for name in names)
        later = sum(match is not None and int(match[1]) >= layers for match in numbers)
        counts["of layers to draft tokens"] = later
    return [
        f"left out: {count} tensor{'s' if count > 1 else ''} {does}"
        for does, count in counts.items()
        if count and not (keeps_head and does.endswith("draft tokens"))
    ]


def _count_drafting(checkpoint: Checkpoint) -> int:
    """Layers after the model's own that predict further tokens, as DeepSeek V3 has them."""
    stated = checkpoint.config.get("num_nextn_predict_layers")
    return stated if type(stated) is int and 0 < stated <= 16 else 0


_HARMLESS = re.compile("|".join(TABLE["harmless"]))
"""Tensors that change nothing."""


def _list_unused(checkpoint: Checkpoint, model: Model) -> list[str]:
    """Names of tensors that the model has no place for; without harmless ones, and without parts
    that are left out with a message."""
    used = {need.name for need in list_requirements(model)}
    used |= {model.tensors.head, *_list_unread(model)}
    patterns, names = [*_OTHER_PARTS.values(), _HARMLESS], model.tensors
    predictors = (names.predictor_in, names.predictor_out, names.predictor_bias)
    first, drafting = model.shape.layers, _count_drafting(checkpoint)
    return [
        name
        for name in sorted(checkpoint.tensors)
        if name not in used
        and not first <= _find_layer(name, model) < first + drafting
        and not any(pattern.search(name) for pattern in patterns)
        and not any(match_name(pattern).fullmatch(name) for pattern in predictors)
    ]


def _list_unread(model: Model) -> Iterator[str]:
    """Names that some checkpoints have and no code reads: KV projections of layers that use another
    layer's cache, and a factor that is not applied."""
    layers = model.shape.layers
    if model.altup is not None and not model.altup.scaled:
        yield from (fill_name(model.tensors.altup_scale, layer) for layer in range(layers))
    for layer in range(layers - min(layers, model.attention.kv_shared_layers), layers):
        for pattern in (model.tensors.key, model.tensors.value, model.tensors.key_norm):
            yield fill_name(pattern, layer)


def _find_layer(name: str, model: Model) -> int:
    start = model.tensors.attention_norm.partition("{layer}")[0]
    found = re.match(r"(\d{1,9})\.", name[len(start) :]) if name.startswith(start) else None
    return -1 if found is None else int(found[1])


def _deny(checkpoint: Checkpoint, names: Sequence[str], statement: str) -> Diagnostic:
    kinds = {re.sub(r"\.\d+(?=\.)", ".N", name): name for name in reversed(names)}
    tensors = [checkpoint.tensors[name] for name in sorted(kinds.values())]
    listed = ", ".join(repr(tensor.name) for tensor in tensors[:_NAMED])
    others = len(names) - len(tensors[:_NAMED])
    return Diagnostic(
        code="P537",
        message=(
            f"{tensors[0].file} has the tensor{'s' * (len(tensors) > 1)} {listed}"
            f"{f' and {others} more' if others else ''}, but {statement}"
        ),
        help="correct the configuration, or write the model document by hand and give --model",
    )


def repeats(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether a matrix repeats another one, as tied heads and MTP heads do in some files."""
    one, two = (checkpoint.tensors.get(key) for key in (name, other))
    if one is None or two is None or one.shape != two.shape:
        return False
    rows = min(_COMPARED_ROWS, one.shape[0])
    return np.array_equal(one.read(0, rows), two.read(0, rows))
