"""Broken checkpoints and what comes with them: one diagnostic that names file and tensor, and no
store left behind."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.convert import convert_checkpoint
from pi2.importing.safetensors_file import list_safetensors
from pi2.plan.documents.model import Model
from tests.helpers.checkpoints import write_checkpoint, write_counts, write_safetensors
from tests.helpers.models import MIXTURE, draw_weights, make_model, make_tokenizer

GATE = "model.layers.1.mlp.gate_proj.weight"
OUTER = "model.layers.1.mlp.predictor.fc2.weight"
OF_EXPERT = "model.layers.1.block_sparse_moe.experts.2.predictor.fc2.weight"
INDEX = "model.safetensors.index.json"


@dataclass
class Job:
    """A conversion of a small checkpoint that a test spoils before it runs."""

    folder: Path
    model: Model
    weights: dict[str, F32]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def file(self) -> Path:
        return self.checkpoint / "model.safetensors"

    def convert(self) -> None:
        convert_checkpoint(self.checkpoint, self.model, self.folder / "store", **self.options)

    def expect(self, code: str, *words: str) -> None:
        """The conversion fails with ``code``, says ``words``, and leaves nothing behind."""
        with pytest.raises(UserError) as caught:
            self.convert()
        assert [item.code for item in caught.value.diagnostics] == [code], str(caught.value)
        text = str(caught.value)
        assert all(word.format(job=self) in text for word in words), text
        assert caught.value.exit_code == 2
        left = {path.name for path in self.folder.iterdir()}
        assert not left & {"store", ".store.partial", ".store.old"}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A checkpoint of three layers with predictors, not yet spoilt."""
    model = make_model()
    weights = draw_weights(model)
    write_checkpoint(tmp_path / "checkpoint", model, weights)
    return Job(tmp_path, model, weights)


Spoil = Callable[[Job], object]


def edit(change: Callable[[dict[str, F32]], object]) -> Spoil:
    """Change the weights of the checkpoint."""

    def spoil(job: Job) -> None:
        change(job.weights)
        write_safetensors(job.file, job.weights)

    return spoil


def replace(name: str, change: Callable[[F32], F32]) -> Spoil:
    return edit(lambda weights: weights.update({name: change(weights[name])}))


def put(name: str, place: tuple[int, ...], value: float) -> Spoil:
    return edit(lambda weights: weights[name].__setitem__(place, value))


def write(name: str, content: bytes) -> Spoil:
    return lambda job: (job.checkpoint / name).write_bytes(content)


def remove(name: str) -> Spoil:
    return lambda job: (job.checkpoint / name).unlink()


def configure(key: str, value: object) -> Spoil:
    """Another value in config.json; Ellipsis leaves the key out."""

    def spoil(job: Job) -> None:
        file = job.checkpoint / "config.json"
        values = {**json.loads(file.read_text()), key: value}
        file.write_text(json.dumps({key: own for key, own in values.items() if own is not ...}))

    return spoil


def describe(changes: dict[str, Any], **options: str) -> Spoil:
    """Another model, and ``options`` of the conversion, which are files in the job's folder."""

    def spoil(job: Job) -> None:
        job.model = make_model(changes)
        job.options |= {name: job.folder / path for name, path in options.items()}

    return spoil


def count(content: bytes | None = None, **columns: Any) -> Spoil:
    """Counts of activations with other columns, or in a file with this content."""
    table = {"layer": np.repeat(np.arange(3), 96), "neuron": np.tile(np.arange(96), 3)}
    whole = {**table, "count": np.zeros(288, np.int64), **columns}

    def spoil(job: Job) -> None:
        file = job.options["activations"] = job.folder / "counts.parquet"
        kept = {name: values for name, values in whole.items() if values is not None}
        pq.write_table(pa.table(kept), file)
        if content is not None:
            file.write_bytes(content)

    return spoil


def patch_header(job: Job, change: Callable[[dict[str, Any]], object]) -> None:
    content = job.file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    job.file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def state(**values: object) -> Spoil:
    """What the header says of one tensor."""
    return lambda job: patch_header(job, lambda header: header[GATE].update(values))


def write_header(text: str) -> Spoil:
    return write("model.safetensors", struct.pack("<Q", len(text)) + text.encode())


def overlap(job: Job) -> None:
    entries = list_safetensors(job.file)
    up, start = entries[GATE.replace("gate", "up")], min(own.offset for own in entries.values())
    state(data_offsets=[up.offset - start, up.offset - start + up.size_bytes])(job)


def cut_while_reading(job: Job) -> None:
    def cut(label: str, share: float) -> None:
        if share > 0:
            with job.file.open("r+b") as stream:
                stream.truncate(9000)

    job.options["progress"] = cut


def add_counts_of_another_size(job: Job) -> None:
    counts = np.zeros((3, 97), np.int64)
    job.options["activations"] = write_counts(job.folder / "counts.parquet", counts)


def lose_predictor_of_expert(job: Job) -> None:
    job.model = make_model(MIXTURE)
    job.weights = draw_weights(job.model)
    edit(lambda weights: weights.pop(OF_EXPERT))(job)


def add_second_file(job: Job) -> None:
    job.file.rename(job.checkpoint / "a.safetensors")
    (job.checkpoint / "b.safetensors").write_bytes(b"")


def drop_predictors(weights: dict[str, F32]) -> None:
    for name in [name for name in weights if "predictor" in name]:
        del weights[name]


def rename_all(weights: dict[str, F32]) -> None:
    for name in list(weights):
        weights[f"wrong.{name}"] = weights.pop(name)


TWICE = json.dumps({GATE: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
GARBAGE = (
    *(b"", b"1234567", b"\xff" * 100, struct.pack("<Q", 2) + b"[]"),
    *(struct.pack("<Q", 4) + b"null", struct.pack("<Q", 9) + b"{notjson}"),
    struct.pack("<Q", 100_000) + b"[" * 100_000,
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
)
SHAPE, SPAN = [96, 64], [0, 24576]
ENTRIES: tuple[object, ...] = (
    *(5, {}, {"dtype": "F32", "shape": SHAPE}),
    *({"dtype": "F32", "shape": SHAPE, "data_offsets": own} for own in ([0], [0, "9"])),
    *({"dtype": "F32", "shape": own, "data_offsets": SPAN} for own in ([96, 64.0], "96")),
    *({"dtype": "F32", "shape": SHAPE, "data_offsets": own} for own in ([24576, 0], [-24576, 0])),
    {"dtype": "F32", "shape": [-96, -64], "data_offsets": SPAN},
    {"dtype": "F32", "shape": SHAPE, "data_offsets": [0, 24572]},
    {"dtype": None, "shape": SHAPE, "data_offsets": SPAN},
)
CONTRADICTIONS: tuple[tuple[str, object, str], ...] = (
    ("num_hidden_layers", 4, "shape.layers"), ("num_attention_heads", 8, "shape.heads"),
    ("num_key_value_heads", 4, "shape.kv_heads"), ("intermediate_size", 97, "shape.ffn"),
    ("rms_norm_eps", 1e-6, "norm.epsilon"), ("rope_theta", 500000.0, "rope.theta"),
    ("tie_word_embeddings", False, "tied_head"),
    ("rope_parameters", {"rope_theta": 500000.0}, "rope.theta"),
)  # fmt: skip
WRONG_COUNTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"neuron": None}, "neuron"), ({"layer": np.zeros(288, np.int64)}, "listed twice"),
    ({"layer": np.repeat(np.arange(1, 4), 96)}, "outside of 3 x 96"),
    ({"neuron": np.tile(np.arange(-1, 95), 3)}, "outside of 3 x 96"),
    ({"count": np.full(288, -1)}, "negative"), ({"count": np.full(288, "many")}, ""),
    ({"count": pa.array([None] * 288, pa.int64())}, "missing"), ({"count": np.full(288, 0.5)}, ""),
)  # fmt: skip
UNSTORABLE = (
    *(GATE, "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"),
    *("model.layers.0.self_attn.k_proj.weight", OUTER),
)
VECTORS = ("model.norm.weight", "model.layers.2.mlp.predictor.bias")
CASES: list[tuple[Spoil, str, tuple[str, ...]]] = [
    *((configure(key, own), "P537", ("config.json", path)) for key, own, path in CONTRADICTIONS),
    (edit(drop_predictors), "P533", ("no predictors", "--predictors")),
    (edit(lambda weights: weights.pop(OUTER)), "P533", (OUTER,)),
    (replace(OUTER, lambda own: own[:-1]), "P534", (OUTER, "[95, 32]", "[96, 32]")),
    (
        describe({"predictor": {"rank": 64}}),
        *("P534", ("rank 32", "says 64", "predictor.rank = 32")),
    ),
    (
        describe({"predictor": None}, predictors="checkpoint/model.safetensors"),
        *("P542", ("[predictor]",)),
    ),
    (describe({}, predictors="none.safetensors"), "P532", ("none.safetensors",)),
    (lose_predictor_of_expert, "P533", (OF_EXPERT, "--predictors")),
    *((count(**own), "P540", ("counts.parquet", word)) for own, word in WRONG_COUNTS),
    *((count(own), "P540", ("counts.parquet",)) for own in (b"", b"PAR1 garbage PAR1")),
    (describe({}, activations="counts.parquet"), "P540", ("counts.parquet",)),
    (add_counts_of_another_size, "P540", ("291 rows", "3 layers x 96 neurons")),
    (remove("tokenizer.json"), "P543", ("tokenizer.json",)),
    *((write("tokenizer.json", own), "P543", ("tokenizer.json",)) for own in (b"", b"{}", b"\xff")),
    (write("tokenizer.json", make_tokenizer(300)), "P543", ("300 tokens", "288")),
    *(
        (describe({"tokenizer": {"file": name}}), "P543", (name,))
        for name in ("../tokenizer.json", "/etc/passwd", "a/b.json")
    ),
    # Tensors.
    (replace(GATE, lambda own: own[:-1]), "P534", (GATE, "{job.file}", "[95, 64]", "[96, 64]")),
    (
        replace(GATE, lambda own: np.ascontiguousarray(own.T)),
        *("P534", (GATE, "[64, 96]", "[96, 64]")),
    ),
    (edit(rename_all), "P533", ("model.embed_tokens.weight", "; 28 other tensors are like it")),
    *(
        (put(name, (3, 5), own), "P539", (name, "model.safetensors"))
        for name in UNSTORABLE
        for own in (np.nan, np.inf, -np.inf, 1e38)
    ),
    *((put(name, (5,), np.nan), "P539", (name, "not a finite number")) for name in VECTORS),
    (state(dtype="F8_E4M3"), "P535", (GATE, "F8_E4M3", "model.safetensors", "BF16")),
    (state(dtype="I32"), "P535", (GATE, "I32")),
    (overlap, "P532", ("overlap", "mlp.up_proj", GATE)),
    # Files.
    (lambda job: job.checkpoint.rename(job.folder / "elsewhere"), "P530", ("{job.checkpoint}",)),
    (remove("config.json"), "P530", ("config.json", "Hugging Face folder")),
    *(
        (write("config.json", own), "P532", ("config.json",))
        for own in (b"", b"{", b"[1]", b"\xff\x00", b"[" * 100_000)
    ),
    (remove("model.safetensors"), "P531", ("no safetensors files",)),
    (add_second_file, "P531", ("2 weight files", INDEX)),
    (cut_while_reading, "P532", ("model.safetensors", "ends inside tensor")),
    *((write("model.safetensors", own), "P532", ("model.safetensors",)) for own in GARBAGE),
    (write_header(f"{TWICE[:-1]},{TWICE[1:]}"), "P536", (GATE, "twice")),
]


@pytest.mark.parametrize(("spoil", "code", "words"), CASES)
def test_what_is_broken_is_one_finding(
    job: Job, spoil: Spoil, code: str, words: tuple[str, ...]
) -> None:
    spoil(job)
    job.expect(code, *words)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_malformed_entry_is_named(job: Job, entry: object) -> None:
    patch_header(job, lambda header: header.update({GATE: entry}))
    job.expect("P532", "model.safetensors", GATE)


@pytest.mark.parametrize("value", [None, ...])
def test_what_the_config_does_not_state_is_not_compared(job: Job, value: object) -> None:
    configure("num_key_value_heads", value)(job)
    job.convert()


def test_an_output_that_exists(job: Job) -> None:
    (job.folder / "store").mkdir()
    (job.folder / "store/file").write_text("x")
    with pytest.raises(UserError, match="P521"):
        job.convert()
    assert (job.folder / "store/file").read_text() == "x"


def test_a_missing_tensor_names_the_file_or_the_folder_of_shards(job: Job) -> None:
    edit(lambda weights: weights.pop(GATE))(job)
    job.expect("P533", GATE, "tensors.gate", "{job.file} has no tensor")
    shard(job)
    job.expect("P533", GATE, "{job.checkpoint} has no tensor")


def test_a_cut_file_names_the_first_tensor_that_is_gone(job: Job) -> None:
    last = max(list_safetensors(job.file).values(), key=lambda tensor: tensor.offset)
    with job.file.open("r+b") as stream:
        stream.truncate(job.file.stat().st_size - 4)
    job.expect("P532", "model.safetensors", "cut", last.name)


# Shards
def shard(job: Job) -> dict[str, str]:
    """Cut the weights into two files; return the index's weight map."""
    names = sorted(job.weights)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        name = f"part-{number}.safetensors"
        write_safetensors(job.checkpoint / name, {key: job.weights[key] for key in part})
        weight_map |= dict.fromkeys(part, name)
    job.file.unlink()
    write_index(job, weight_map)
    return weight_map


def write_index(job: Job, weight_map: object) -> None:
    (job.checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_shard_is_missing(job: Job) -> None:
    shard(job)
    (job.checkpoint / "part-1.safetensors").unlink()
    job.expect("P532", "part-1.safetensors", "No such file")


@pytest.mark.parametrize(
    "target",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b", "\ud800", 5],
)
def test_an_index_cannot_name_files_elsewhere(job: Job, target: object) -> None:
    write_index(job, {**shard(job), GATE: target})
    job.expect("P538", GATE, repr(target))


@pytest.mark.parametrize("weight_map", [None, {}, [], "text"])
def test_an_index_without_files(job: Job, weight_map: object) -> None:
    shard(job)
    write_index(job, weight_map)
    job.expect("P532", "weight_map")


def test_an_index_that_names_the_wrong_file_and_a_tensor_in_two(job: Job) -> None:
    weight_map = shard(job)
    other = "part-0.safetensors" if weight_map[GATE][5] == "1" else "part-1.safetensors"
    write_index(job, {**weight_map, GATE: other})
    job.expect("P533", GATE, other, "index.json")
    write_index(job, weight_map)
    names = [name for name, file in weight_map.items() if file == other]
    write_safetensors(job.checkpoint / other, {name: job.weights[name] for name in [*names, GATE]})
    job.expect("P536", GATE, "part-0", "part-1")
