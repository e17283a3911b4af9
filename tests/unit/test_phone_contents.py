"""What a bundle for phones holds, and what its probe writes."""

import ast
import inspect
import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file, load_plan
from pi2.phone.contents import (
    DENSE_BACKENDS,
    LEFT_OUT,
    REPLACEMENTS,
    SPARSE_BACKENDS,
    STAND_INS,
    find_modules,
    list_code,
)
from pi2.phone.documents import read_resolved, write_resolved
from pi2.phone.runtime import probing
from pi2.phone.runtime.probing import write_toml
from pi2.probing import storage
from tests.helpers.programs import start_python
from tests.helpers.tables import in_table

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"numpy", "pi2", *STAND_INS} | set(sys.stdlib_module_names)
DESCRIBE = """
import json, sys
from pathlib import Path
from pi2.phone.documents import read_resolved
found = read_resolved(Path(sys.argv[1]))
print(repr(found.needs), found.layers, found.bundle, found.dense_units, found.digest)
def unfold(value):
    if hasattr(value, "model_fields_set"):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: unfold(item) for key, item in value.items()}
    return [unfold(item) for item in value] if isinstance(value, tuple) else value
for document in (found.plan, found.device, found.model):
    print(json.dumps(unfold(document), sort_keys=True))
"""


def test_modules_import_nothing_else_when_they_are_loaded() -> None:
    modules = find_modules(SPARSE_BACKENDS | DENSE_BACKENDS)
    assert {"pi2.engine.layer_model", "pi2.memory.flash", "pi2.backends.cpu.executor"} <= set(
        modules
    )
    for name, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [str(node.module)]
            # Chat templates have a process of their own, where there is jinja2.
            allowed = ALLOWED | ({"jinja2"} if name == "pi2.sandbox.template" else set())
            assert {item.partition(".")[0] for item in imported} <= allowed, (name, imported)
            assert not set(imported) & LEFT_OUT, (name, imported)


def test_nothing_that_compiles_plans_or_shares_is_in_a_bundle() -> None:
    names = {path.as_posix() for path in list_code(SPARSE_BACKENDS | DENSE_BACKENDS)}
    for part in ("cli", "planning", "sharing", "lsp", "importing", "simulate"):
        assert not any(f"packages/pi2/{part}/" in name for name in names), part
    assert not any(name.endswith(("compiler/compile.py", "kernels/program.py")) for name in names)


def test_a_bundle_has_the_backends_that_its_plan_names_and_no_other() -> None:
    alone, beside = (
        {path.as_posix() for path in list_code(names)} for names in ({"cpu"}, {"cpu", "hexagon"})
    )
    assert not any("backends/hexagon" in name for name in alone)
    assert any(name.endswith("backends/hexagon/dense_unit.py") for name in beside)


@pytest.mark.parametrize("module", sorted(REPLACEMENTS))
def test_what_stands_in_takes_what_the_original_takes(module: str) -> None:
    original, other = import_module(module), import_module(REPLACEMENTS[module])
    public = {
        "pi2.backends.compiler.cache": ["load_or_compile", "load_or_compile_several"],
        "pi2.backends.compiler.functions": [
            *("CompiledFunctions", "find_obstacles", "refuse_library")
        ],
        "pi2.backends.hexagon.linkers": ["find_obstacles"],
        "pi2.sandbox.tokenizer": ["open_tokenizer"],
        "pi2.weights.gguf_weights": ["FileTexts"],
    }[module]
    for name in public:
        ours = list(inspect.signature(getattr(other, name)).parameters)
        assert ours == list(inspect.signature(getattr(original, name)).parameters), name
    pairs = {
        "functions": ("CompiledFunctions", original),
        "gguf_weights": ("GgufWeights", other),  # what reads metadata is not for bundles
    }
    kind, has_all = pairs.get(module.rpartition(".")[2], (None, original))
    if kind is not None:
        for name, method in vars(getattr(has_all, kind)).items():
            if name[0] != "_" and inspect.isfunction(method):
                of_ours, of_theirs = (
                    list(inspect.signature(getattr(getattr(own, kind), name)).parameters)
                    for own in (other, original)
                )
                assert of_ours == of_theirs, name


@in_table
def test_documents_are_read_as_pydantic_reads_them(plan: str, tmp_path: Path) -> None:
    resolved = load_plan(ROOT / plan)
    file = tmp_path / "plan.json"
    file.write_text(write_resolved(resolved))
    with_pydantic = read_resolved(file)
    assert (with_pydantic.plan, with_pydantic.device) == (resolved.plan, resolved.device)
    assert with_pydantic.model == resolved.model
    found = []
    for paths in ([ROOT / "pi2/phone/stand_ins", ROOT], [ROOT]):
        done = start_python(
            "-c",
            DESCRIBE,
            str(file),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    assert found[0] == found[1]


MIB = 1 << 20


def test_what_is_written_is_a_valid_device_with_rates_of_flash_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ROUND_S", 0.002)
    monkeypatch.setattr(probing, "METER_BYTES", 4 * MIB)
    flash = tmp_path / "store/layers"
    flash.mkdir(parents=True)
    (flash / "ffn-000.arrow").write_bytes(bytes(storage.SAMPLE_BYTES + MIB))
    output = tmp_path / "phone.device.toml"
    probing.write_probe(output, tmp_path / "store", [], rounds=1)
    report = check_file(output)
    assert report.is_sound, report.diagnostics
    values = tomllib.loads(output.read_text())
    assert values["id"] == "phone"
    assert {item["pattern"] for item in values["storage"]["reads"]} == {"sequential", "random"}
    assert "numpy maximum" in values["memory"]["read_bandwidth"]["source"]
    assert "8 MiB" in values["noise"]["source"]
    assert run(["validate", str(output)]) == 0


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    output = tmp_path / "phone.device.toml"
    output.write_text("mine")
    with pytest.raises(UserError, match="P675"):
        probing.write_probe(output, tmp_path, [])
    assert output.read_text() == "mine"


def test_plain_values_come_back_as_they_were_written() -> None:
    values = {
        "id": 'a"b\\c\n\u00e9', "share": 0.25, "whole": 3.0, "count": 3, "truth": True,
        "names": ["x", "y"],
        "units": {"odd name": {"kind": "cpu", "reads": [{"a": 1}, {"a": 2, "deep": {"b": "c"}}]}},
    }  # fmt: skip
    assert tomllib.loads(write_toml({**values, "none": None, "empty": []})) == values
