"""`pi2 show` and `pi2 explain KEY`: what a value is, where it comes from, what it costs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tomli

from pi2.authoring.explanation import describe_path, explain_value, list_keys, parse_path
from pi2.fitting.check import check_file, check_plan
from pi2.fitting.sizes import find_needs
from pi2.plan.composing.compose import trace_value
from pi2.plan.reading.references import DOCUMENTS
from pi2.plan.toml.source import Kind
from pi2.plan.toml.text import format_path
from tests.helpers.programs import Ask

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "tests/plans/broken/parts"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, tmp_path)
    path = tmp_path / "my.plan.toml"
    path.write_text(
        'schema_version = 3\nextends = ["base.plan.toml"]\n'
        'inherit.layers.overrides = "append"\n'
        'memory.segments.hot = "17 MiB"\n'
        '[[layers.overrides]]\nselect = "3"\nhot = 0.1\n'
    )
    monkeypatch.chdir(tmp_path)
    return Path("my.plan.toml")


def explain(ask: Ask, *arguments: str) -> str:
    return ask(["explain", *arguments]).out


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_key_is_explained_as_the_reference_spells_it(kind: Kind) -> None:
    for path in list_keys(DOCUMENTS[kind]):
        found = describe_path(format_path(path))
        assert any(item.kind == kind and item.doc is not None for item in found), path


def test_a_key_of_every_item_or_name_is_explained_with_each_value(plan: Path, ask: Ask) -> None:
    text = explain(ask, "layers.overrides[].select", str(plan))
    assert re.findall(r"^layers.overrides(.*)$", text, re.MULTILINE) == [
        '[0].select = "0-1"',
        '[1].select = "7"',
        '[2].select = "3"',
    ]
    text = explain(ask, "device.units.*.kind", str(plan))
    assert set(re.findall(r"^units\.(\w+)\.kind = ", text, re.MULTILINE)) == {"cpu", "npu"}
    text = explain(ask, "layers.overrides[].select")
    assert text.startswith("layers.overrides[].select (of a plan)")


def test_a_key_of_every_item_that_does_not_exist_is_refused(plan: Path, ask: Ask) -> None:
    assert (
        "did you mean `layers.overrides[].select`?"
        in ask(["explain", "layers.overrides[].selcet", str(plan)], 2).err
    )


def test_a_value_has_a_history(plan: Path) -> None:
    report = check_plan(plan, overrides={"io.threads": 2})
    source = report.files["plan"]
    steps = trace_value(source, ("memory", "segments", "hot"))
    assert [(step.place, step.verb, step.value) for step in steps] == [
        ("base.plan.toml:15:7", "sets", "16 MiB"),
        ("my.plan.toml:4:23", "replaces it by", "17 MiB"),
    ]
    assert [step.verb for step in trace_value(source, ("layers", "overrides"))] == [
        "sets",
        "appends",
    ]
    assert [step.place for step in trace_value(source, ("layers", "overrides", 2, "hot"))] == [
        "my.plan.toml:7:7"
    ]
    steps = trace_value(source, ("io", "threads"))
    assert [(step.file, step.value) for step in steps] == [("base.plan.toml", 4), ("--set", 2)]
    assert trace_value(source, ("sampling", "seed")) == ()


def test_set_has_a_history_in_a_plain_plan(plan: Path) -> None:
    report = check_plan(Path("base.plan.toml"), overrides={"kv.context": 900})
    steps = trace_value(report.files["plan"], ("kv", "context"))
    assert [(step.file, step.verb) for step in steps] == [
        ("base.plan.toml", "sets"),
        ("--set", "replaces it by"),
    ]


def test_a_layer_leads_to_what_sets_it(plan: Path) -> None:
    report = check_plan(plan)
    assert explain_value(report, "plan", parse_path("layers.3.hot")).path == (
        "layers",
        "overrides",
        2,
        "hot",
    )
    split = explain_value(report, "plan", parse_path("layers.3.split.npu"))
    assert (split.path, split.value) == (("layers", "split", "npu"), 0.1)
    assert [cost.needed_bytes for cost in split.costs] == [round(0.1 * 2048) * 4096]


def test_what_a_value_costs(plan: Path) -> None:
    report = check_plan(plan)
    assert report.resolved is not None
    needs = dict(find_needs(report.resolved).items())
    for key, segment in [("kv.context", "kv"), ("decode.predictor", "predictor")]:
        costs = explain_value(report, "plan", parse_path(key)).costs
        assert costs[0].needed_bytes == needs[segment].bytes
    assert explain_value(report, "plan", parse_path("sampling.top_k")).costs == ()


def test_the_command_says_all_of_it(plan: Path, ask: Ask) -> None:
    text = explain(ask, "memory.segments.hot", str(plan))
    assert text.splitlines()[0] == 'memory.segments.hot = "17 MiB"'
    assert "  Hot neurons: loaded at start and kept. Derived if it is not stated.\n" in text
    replaced, first = (line for line in text.splitlines() if line.startswith("  from: "))
    assert replaced == '  from: my.plan.toml:4:23: replaces it by "17 MiB"'
    assert first == '  from: base.plan.toml:15:7: sets "16 MiB"'
    assert "  costs: hot: needs " in text
    assert "  from: the default\n" in explain(ask, "sampling.top_k", str(plan))


def test_devices_and_models_are_reached_through_the_plan(plan: Path, ask: Ask) -> None:
    text = explain(ask, "device.memory.capacity", str(plan))
    assert 'memory.capacity = "4 GiB"' in text and "phone.device.toml:15:12" in text
    assert "ffn = 2048" in explain(ask, "model.shape.ffn", str(plan))
    assert "ffn = 2048" in explain(ask, "shape.ffn", "small.model.toml")


def test_without_a_file_it_says_what_the_key_means(ask: Ask) -> None:
    text = explain(ask, "kv.context")
    assert text.startswith(
        "kv.context (of a plan)\n  Context length in tokens, prompt and answer together."
    )
    assert "Derived if it is not stated.\n" in text
    both = explain(ask, "memory")
    assert "memory (of a plan)" in both and "memory (of a device)" in both


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("kv.contxt", "did you mean `kv.context`?"),
        ("kv.context.more", ""),
        ("layers.99.hot", "no layer 99: the model has the layers 0 to 7"),
        ("kv..context", "write names with dots"),
    ],
)
def test_an_unknown_key_is_a_finding(key: str, hint: str, plan: Path, ask: Ask) -> None:
    error = ask(["explain", key, str(plan)], 2).err
    assert "error[P019]" in error
    assert hint in error


def test_plan_with_errors_is_explained_too(plan: Path, ask: Ask) -> None:
    plan.write_text(plan.read_text() + "[kv]\ncontext = 0\n")
    captured = ask(["explain", "kv.context", str(plan)])
    assert "kv.context = 0" in captured.out and "error[P104]" in captured.err


def test_paths_are_written_in_several_ways() -> None:
    assert parse_path("layers.overrides[0].hot") == ("layers", "overrides", 0, "hot")
    assert parse_path("layers.overrides.0.hot") == ("layers", "overrides", 0, "hot")
    assert parse_path('units."npu.v2".kind') == ("units", "npu.v2", "kind")


# show


def test_show_says_where_values_come_from(plan: Path, ask: Ask) -> None:
    lines = ask(["show", "--resolved", "--origins", str(plan)]).out.splitlines()
    assert any(line.startswith('hot = "17 MiB" # my.plan.toml:4:23; needs ') for line in lines)
    assert "threads = 4 # base.plan.toml:35:11" in lines
    assert 'prefill = "chunks-first" # default' in lines


@pytest.mark.parametrize("name", ["phone.device.toml", "small.model.toml"])
def test_show_prints_devices_and_models(name: str, plan: Path, ask: Ask) -> None:
    kind = name.split(".")[1]
    text = ask(["show", name]).out
    Path(name).write_text(text)
    assert check_file(Path(name)).diagnostics == ()
    assert ask(["show", "--document", kind, str(plan)]).out == text
    assert tomli.loads(text)["schema_version"] == 2


def test_show_prints_shipped_devices_as_they_are(ask: Ask) -> None:
    for path in sorted((ROOT / "plans/devices").glob("*.toml")):
        document = check_file(path).document
        assert document is not None
        shown = json.dumps(tomli.loads(ask(["show", str(path)]).out))
        assert type(document).model_validate_json(shown) == document
