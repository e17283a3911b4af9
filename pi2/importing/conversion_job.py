"""What a conversion writes, in which order, and the key by which its files are known again; tables
of how often neurons fire, which say the order."""

import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from pi2.arrays import I32, I64
from pi2.caches import check_regular, read_regular
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import Checkpoint, read_given
from pi2.importing.quantizers import Quantizer
from pi2.importing.safetensors_file import Shards
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import ScalesPlace
from pi2.sandbox.tokenizer import TokenizerRefused, try_tokenizer
from pi2.store.identity import describe_weights, identify_weights
from pi2.store.manifest import Order
from pi2.store.reader import NeuronStore
from pi2.store.writer import keep_groups
from pi2.tokens import CHAT_TEMPLATE, TOKENIZER_CONFIG


@dataclass(frozen=True, slots=True)
class Task:
    """A part of the output."""

    find: Callable[[], set[Path]]
    """Gives the files that it is made of."""
    run: Callable[[], None]


def run_tasks(
    tasks: Sequence[Task], files: Sequence[Path], shards: Shards | None, settle: Callable[[], None]
) -> None:
    """Run ``tasks`` in order.  If ``shards`` bring the ``files``, each stays only as long as it is
    needed, and tasks are settled before it goes."""
    if shards is None:
        for task in tasks:
            task.run()
        return
    place = {file: number for number, file in enumerate(files)}
    waiting: dict[int, list[Task]] = defaultdict(list)
    last_use: dict[Path, int] = {}
    for task in tasks:
        needed = [file for file in task.find() if file in place]
        last = max((place[file] for file in needed), default=-1)
        waiting[last].append(task)
        for file in needed:
            last_use[file] = max(last_use.get(file, 0), last)
    sizes = {file: shards.measure(file) for file in last_use}
    held = (
        sum(size for file, size in sizes.items() if place[file] <= number <= last_use[file])
        for number in range(len(files))
    )
    shards.reserve(sizes, max(held, default=0))
    for number, arriving in enumerate([None, *files], -1):
        if arriving is not None and arriving in last_use:
            shards.bring(arriving)
        for task in waiting[number]:
            task.run()
        settle()
        for other, last in last_use.items():
            if last == number:
                shards.drop(other)


MODEL_NOTE, WEIGHTS_NOTE = "pi2.model", "pi2.weights"
"""Keys in addition to the columns of counts: the model's name, and the identity of its weights."""
EXPERT_BANDS = 32
"""Bands of a layer within which the neurons of an expert lie together."""


def note_identity(store: NeuronStore) -> dict[str, str]:
    """What files of counts say of the store that they were counted with."""
    return {MODEL_NOTE: store.manifest.model.id, WEIGHTS_NOTE: identify_weights(store.tensors)}


SUMMARY = "statistics.json"
ACTIVATIONS = "activations.parquet"
COACTIVATIONS = "coactivations.parquet"

Summary = TypeVar("Summary")


def read_summary(folder: Path, kind: type[Summary]) -> Summary | None:
    """``statistics.json`` as the dataclass ``kind``; None if there is none that can be read."""
    try:
        return TypeAdapter(kind).validate_json(read_regular(folder / SUMMARY))
    except (OSError, ValueError):
        return None


def encode_table(columns: Mapping[str, object], notes: Mapping[str, str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    table = pa.table(columns).replace_schema_metadata(notes)
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


Columns = dict[str, npt.NDArray[Any]]


def read_table(
    path: Path, types: Mapping[str, str], refuse: Callable[[str], UserError]
) -> tuple[Columns, dict[str, str]]:
    """Columns of a Parquet file by name, as Arrow's ``types``, and its notes. FileNotFoundError;
    `UserError` of ``refuse`` with the reason if it has none such."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(path)
        table = pq.read_table(path, columns=list(types))
        if any(table.column(name).null_count for name in types):
            raise ValueError("a value is missing")
        found = {
            name: table.column(name).cast(pa.type_for_alias(kind)).to_numpy()
            for name, kind in types.items()
        }
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse(reason) from None
    notes = (table.schema.metadata or {}).items()
    return found, {x.decode("utf-8", "replace"): y.decode("utf-8", "replace") for x, y in notes}


def read_counts(path: Path, layers: int, neurons: int | None = None) -> tuple[I64, dict[str, str]]:
    """Counts of a Parquet file, int64 [layers, neurons], and its notes; `UserError` P540 for
    another model's. None: as many neurons as it has."""
    try:
        columns, notes = read_table(
            path, dict.fromkeys(("layer", "neuron", "count"), "int64"), lambda x: _refuse(path, x)
        )
    except FileNotFoundError:
        raise UserError.of(
            "P540",
            f"no activation counts at {path}",
            help="record them: `pi2 activations PLAN --text FILE -o STATS`",
        ) from None
    layer, neuron, count = columns.values()
    neurons = len(layer) // layers if neurons is None else neurons
    if len(layer) != layers * neurons:
        problem = f"{len(layer)} rows, not one for each of {layers} layers x {neurons} neurons"
        raise _refuse(path, problem)
    inside = (layer >= 0) & (layer < layers) & (neuron >= 0) & (neuron < neurons)
    if not inside.all():
        raise _refuse(path, f"a layer or neuron outside of {layers} x {neurons}")
    place = layer * neurons + neuron
    if len(np.unique(place)) != len(place):
        raise _refuse(path, "a neuron that is listed twice")
    if (count < 0).any():
        raise _refuse(path, "a negative count")
    counts = np.empty(layers * neurons, np.int64)
    counts[place] = count
    return counts.reshape(layers, neurons), notes


def _refuse(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P540",
        f"{path} does not have the activation counts of this model: {problem}",
        help="give a Parquet file with the columns layer, neuron and count",
    )


def order_neurons(counts: I64) -> I32:
    """Stored order int32 [layers, neurons]: most active first, equals as in the checkpoint."""
    return np.argsort(-counts, axis=1, kind="stable").astype(np.int32)


def check_experts(model: Model) -> None:
    """`UserError` P524 if there is no order by expert of the neurons of ``model``."""
    if model.moe is None:
        raise UserError.of(
            "P524",
            f"{model.id!r} is not an MoE model: it has no order by expert",
            help="leave the neurons in the order of hotness",
        )


def count_bands(model: Model) -> int:
    """Bands of hotness in the order by expert: without predictors experts are needed as a whole,
    and each is contiguous."""
    return EXPERT_BANDS if model.predictor is not None else 1


def group_experts(order: I32, ffn: int, bands: int = EXPERT_BANDS) -> I32:
    """Stored order [neurons] by expert from the order by hotness: within each of equal ``bands`` an
    expert's neurons lie together, most active first."""
    owners = order // ffn
    if bands == 1:
        places = np.bincount(owners, weights=np.arange(len(order)))
        rank = np.argsort(np.argsort(places, kind="stable"), kind="stable")
        return order[np.argsort(rank[owners], kind="stable")]
    band = np.arange(len(order), dtype=np.int64) * bands // len(order)
    return order[np.lexsort((owners, band))]


def read_extra_files(
    source: Checkpoint, model: Model, activations: Path | None, extras: Mapping[str, Path]
) -> dict[str, bytes]:
    """Contents of the small files that go into the store, by their path in it."""
    name = model.tokenizer.file
    if name != Path(name).name:
        raise UserError.of(
            "P543",
            f"tokenizer.file is {name!r}: the tokenizer is in the store's own folder",
            help='set tokenizer.file = "tokenizer.json" in the model document',
        )
    optional = {
        TOKENIZER_CONFIG: source.read_file(TOKENIZER_CONFIG),
        CHAT_TEMPLATE: source.read_template(),
    }
    contents = {path: content for path, content in optional.items() if content is not None}
    for label, template in source.list_templates().items():
        contents[f"chat_template.{label}.jinja"] = template
    paths = dict(extras)
    if activations is not None:
        paths[ACTIVATIONS] = activations
    for path, file in paths.items():
        contents[path] = read_given(file)
    if name not in contents:
        found = source.read_tokenizer()
        if found is None:
            raise UserError.of(
                "P543",
                f"there is no {source.folder / name}",
                help="put the model's tokenizer.json or tokenizer.model there, or give it with "
                "--tokenizer",
            )
        contents[name] = found
    file = source.folder / name if source.given_tokenizer is None else source.given_tokenizer[0]
    _check_tokenizer(file, contents[name], model)
    return contents


def keep_old_notes(output: Path, notes: Mapping[str, bytes]) -> dict[str, bytes]:
    """The notes, and different older ones under another name."""
    kept = dict(notes)
    for path, content in notes.items():
        try:
            old = read_regular(output / path)
        except OSError:
            continue
        if old != content:
            kept[f"{path}.old"] = old
    return kept


def _check_tokenizer(file: Path, content: bytes, model: Model) -> None:
    try:
        size = try_tokenizer(content).size
    except TokenizerRefused as error:
        raise UserError.of(
            "P543",
            f"cannot use the tokenizer {file}: {error}",
            help="give another tokenizer.json with --tokenizer",
        ) from None
    if size > model.shape.vocab:
        raise UserError.of(
            "P543",
            f"the tokenizer {file} has {size} tokens, the model only {model.shape.vocab}",
            help="give the tokenizer that belongs to the model",
        )


def choose_order(model: Model, activations: Path | None) -> I32:
    """Original neuron at every stored place, int32 [layers, neurons]; the neurons of an MoE model
    are numbered through its experts."""
    layers, neurons = model.shape.layers, model.layer_neurons
    if activations is None:
        return np.tile(np.arange(neurons, dtype=np.int32), (layers, 1))
    orders = order_neurons(read_counts(activations, layers, neurons)[0])
    if name_order(model, activations) != "hotness":
        bands = count_bands(model)
        orders = np.stack([group_experts(order, model.shape.ffn, bands) for order in orders])
    return keep_groups(model, orders)


def name_order(model: Model, activations: Path | None) -> Order:
    """Order of the store.  The checkpoint's is expert by expert; without predictors experts are
    read as a whole, and stay so."""
    if activations is None:
        return "index"
    is_routed = model.moe is not None and model.predictor is None
    return "expert" if is_routed else "hotness"


def describe_files(source: Checkpoint) -> list[list[str | int]]:
    describe = describe_file if source.shards is None else source.shards.describe
    return [describe(file) for file in source.files]


def describe_file(file: Path) -> list[str | int]:
    """Values that identify a file's contents: its place, its bytes and its time of change."""
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


def describe_job(
    model: Model,
    order: I32,
    inputs: Sequence[Sequence[str | int]],
    stride: int | None,
    scales: ScalesPlace,
    quantizer: Quantizer,
) -> str:
    """A key that is equal where the same call would write the same files."""
    from importlib.metadata import version

    fields: dict[str, Any] = {
        "version": version("pi2"),
        "model": describe_weights(model),
        "tensors": model.tensors.model_dump(mode="json"),
        "inputs": inputs,
        "order": hashlib.sha256(order.tobytes()).hexdigest(),
        "stride": stride,
        "scales": scales,
        "quantizer": quantizer.describe(),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
