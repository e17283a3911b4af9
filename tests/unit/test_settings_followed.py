"""Each key of the plan language is followed, or refused, by each backend that computes a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import pi2
import pi2.plan.documents.plan as plan_document
import pi2.plan.documents.plan_units as unit_documents
from fuzzing.files import list_keys
from pi2 import orchestrator
from pi2.fitting import read_fixed
from pi2.fitting.check import check_plan
from pi2.plan.documents.common import Sampling, list_backend_names
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.text import KeyPath
from pi2.refit import read_plan
from pi2.weights.file_reading import FileFiller
from tests.helpers.gguf_files import write_random_gguf

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    own
    for module in (plan_document, unit_documents)
    for own in vars(module).values()
    if isinstance(own, type) and issubclass(own, BaseModel)
}
OTHERS: dict[str, Any] = {
    "backends": {"cpu": "cpu"}, "bundle.scales": "resident", "bundle.stride": "8 KiB",
    "cache.fill": False, "decode.activations": "int8", "decode.batch_activations": "int8",
    "decode.leave_out": 0.02, "decode.look_ahead": "attention", "decode.missing_threshold": 1.0,
    "decode.passes": 2, "decode.predictor": "router", "decode.speculation": {"drafts": "prompt"},
    "decode.threshold": 0.5, "io.merge_gap": 1, "io.mode": "buffered",
    "io.verify": "never", "kv.lend": True, "kv.type": "int8",
    "layers.batches": [{"sequences": 2, "split": {"cpu": 1.0}}], "layers.hot": 0.25,
    "layers.overrides": [{"select": "0", "hot": 0.25}], "layers.split": {"cpu": 0.5},
    "memory.embedding": "flash", "memory.lock": "locked",
    "memory.units": {"gpu": {"budget": "1 GiB"}}, "memory.weights": "mapped", "model": "bamboo-7b",
    "pipeline.cluster": 32, "pipeline.phases": 2, "pipeline.prefill": "layers-first",
    "prefill.activations": "int8", "prefill.unit": "cpu", "projections.attention": {"cpu": 1.0},
    "projections.head": {"cpu": 1.0}, "sparsity": {"method": "cats", "target": 0.5},
    "units": {"cpu": {"on_failure": "cpu"}},
}  # fmt: skip
"""Another value of each key that some backend does not follow."""
STATED = ("schema_version", "name", "description", "extends", "inherit", "remove")
"""Keys of the document itself."""
ELSEWHERE = {
    "device": "the kernels' processor, checked against the machine",
    "tokenizer": "what a file's metadata are read with",
    "weights": "the file that is opened",
    "quality": "precision of activations, by which a plan is derived",
    "speed": "what a planner looks for",
    "memory.segments.attention": "part of the budget that checks compare with what is needed",
    "memory.segments.kv": "the same",
    "memory.segments.predictor": "the same",
    "memory.segments.runtime": "the same",
    "memory.segments.state": "the same",
    "memory.segments.workspace": "the same",
    "cache.policy": "which experts leave their slots",
    "io.threads": "readers of the engine `pread`",
    "decode.speculation.plan": "another model that drafts",
    "decode.speculation.when": "whether drafts have to pay",
    "decode.speculation.match": "the same text before",
    **{f"sampling.{name}": "how tokens are drawn" for name in Sampling.model_fields},
    **{f"chat.{name}": "how chats begin and end" for name in ("system", "template", "stop")},
    "memory.pressure": "when a server makes the budget smaller",
    **{f"serve.{name}": "how long a server keeps it" for name in ("idle", "pin", "load")},
}
"""Keys that a run without options does not show, and what they choose."""
ABSENT = (
    *("model", "units.", "memory.units.", "layers.batches.", "layers.overrides."),
    *("experts.", "sparsity."),
)
"""What the demo's plan has not: other units and layers, mixtures, thresholds. The model is read by
its reference."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden": 256, "ffn": 4096, "layers": 4, "context": 512}
    return write_random_gguf(tmp_path_factory.mktemp("gguf"), shape)


@pytest.mark.parametrize("key", sorted(read_fixed("blocks")))
def test_a_setting_that_files_do_not_follow_is_refused(file: Path, key: str) -> None:
    stated = {"bundle.stride": "8 KiB"} if key == "bundle.scales" else {}
    overrides = {"weights": file.name, key: OTHERS[key], **stated}
    report = check_plan(file, overrides=overrides, fill=FileFiller())
    found = [item for item in report.diagnostics if item.path == key]
    assert report.resolved is None and found
    assert any(item.code == "P269" for item in report.diagnostics) or key == "sparsity"


@pytest.mark.parametrize("name", list_backend_names())
def test_what_a_backend_does_not_follow_is_a_key_of_plans(name: str) -> None:
    """Each with a value that it computes, and another one."""
    for key, values in read_fixed(name).items():
        assert tuple(key.split(".")) in list_keys() and values
        assert OTHERS[key] not in values


def list_leaves() -> Iterator[str]:
    keys = list_keys()
    for key in keys:
        if not any(other[: len(key)] == key and other != key for other in keys):
            yield ".".join(map(str, key))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Tables and keys of plans that are read from now on."""
    found = set[tuple[str, str]]()
    plain = BaseModel.__getattribute__

    def note(self: BaseModel, name: str) -> Any:
        if name in type(self).model_fields:
            found.add((type(self).__name__, name))
        return plain(self, name)

    for table in TABLES:
        monkeypatch.setattr(table, "__getattribute__", note)
    return found


def list_silent(backend: str, read: set[tuple[str, str]]) -> list[str]:
    """Keys that a backend does not name as fixed, and that nothing has read."""
    fixed = {tuple(key.split(".")) for key in read_fixed(backend)}
    return [
        key
        for key in list_leaves()
        if key not in ELSEWHERE
        and key not in STATED
        and not any(tuple(key.split("."))[: len(own)] == own for own in fixed)
        and (_find_table(tuple(key.split("."))), key.rpartition(".")[2]) not in read
    ]


def test_a_file_follows_each_other_setting(file: Path, read: set[tuple[str, str]]) -> None:
    """Where a model is made and computes; what checks and derivations read does not count."""
    settings = {"memory.budget": "105 MiB", "kv.context": 256}
    fitted = read_plan(file, overrides=settings, files=FileFiller())
    assert fitted.resolved.file is not None
    read.clear()
    with orchestrator.load(fitted) as model:
        model.keep_prefixes()
        list(model.generate([5, 6, 7] * 9, max_tokens=8, temperature=0.0))
    assert ("Kv", "type") in read and ("Kv", "context") in read
    # Experts, which this file has not, are what dials are about.
    assert [key for key in list_silent("blocks", read) if not key.startswith("experts.")] == []


def test_a_store_follows_each_other_setting(read: set[tuple[str, str]]) -> None:
    settings: dict[str, object] = {"decode.batch": 2, "decode.speculation": {"tokens": 2}}
    settings |= {"memory.budget": "2 GiB", "memory.segments.kv": "64 MiB"}
    settings |= {"memory.segments.workspace": "128 MiB"}
    with pi2.load(ROOT / "plans/demo.plan.toml", set=settings) as model:
        model.keep_prefixes()
        list(model.generate([5, 6, 7] * 9, max_tokens=8, temperature=0.0))
    silent = [key for key in list_silent("cpu", read) if not key.startswith(ABSENT)]
    assert silent == []


def _find_table(path: KeyPath) -> str:
    """Name of the table that has a key."""
    from fuzzing.files import find_tables

    table: type[BaseModel] = Plan
    for part in path[:-1]:
        table = next(find_tables(table.model_fields[str(part)].annotation))
    return table.__name__
