"""Loading a plan: references, overrides, layers, digest."""

import shutil
from pathlib import Path

import pytest

from pi2.diagnostics import UserError
from pi2.fitting.check import check_plan, load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.reading.references import find_document, list_shipped
from pi2.plan.toml.source import parse_assignments

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "plans/demo.plan.toml"
PARTS = ROOT / "tests/plans/broken/parts"

PLAN = """\
schema_version = 3
device = "./phone.device.toml"
model = "small.model.toml"
weights = "../store"
backends = { cpu = "cpu", npu = "reference" }
memory.budget = "256 MiB"

[memory.segments]
runtime = "150 MiB"
attention = "10 MiB"
kv = "8 MiB"
predictor = "5 MiB"
hot = "64 MiB"
cold = "4 MiB"
workspace = "8 MiB"

[bundle]
stride = "4 KiB"

[layers]
split = { cpu = 0.9, npu = 0.1 }
hot = 0.25

[[layers.overrides]]
select = "0, 6-7"
split = { cpu = 1.0 }

[[layers.overrides]]
select = "0-1"
hot = 1.0

[prefill]
chunk = 16

[kv]
context = 1000
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    for name in ("phone.device.toml", "small.model.toml"):
        shutil.copy(PARTS / name, tmp_path)
    path = tmp_path / "my.plan.toml"
    path.write_text(PLAN)
    return path


def load_text(plan: Path, old: str, new: str) -> ResolvedPlan:
    assert old in PLAN
    plan.write_text(PLAN.replace(old, new))
    return load_plan(plan)


def find_errors(plan: Path, **overrides: object) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as caught:
        load_plan(plan, overrides={key.replace("__", "."): v for key, v in overrides.items()})
    return [(item.code, str(item.span)) for item in caught.value.diagnostics]


def test_layers_are_resolved_one_by_one(plan: Path) -> None:
    layers = load_plan(plan).layers
    assert len(layers) == 8
    assert [layer.hot_neurons for layer in layers] == [2048, 2048] + [512] * 6
    both = {"cpu": 0.9, "npu": 0.1}
    assert [dict(layer.split) for layer in layers] == [{"cpu": 1.0}] + [both] * 5 + [
        {"cpu": 1.0}
    ] * 2
    assert layers[0].hot_path == ("layers", "overrides", 1, "hot")
    assert layers[2].split_path == ("layers", "split")


def test_paths_are_relative_to_the_plan(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = load_plan(plan)
    assert resolved.store_path == plan.parent / "../store"
    assert (resolved.device.id, resolved.model.id) == ("phone", "small")
    monkeypatch.chdir("/")
    assert load_plan(plan).digest == resolved.digest


def test_short_names_are_shipped_documents() -> None:
    resolved = load_plan(DEMO)
    assert (resolved.device.id, resolved.model.id) == ("host", "pi2-demo")
    shipped = list_shipped("device")
    assert find_document("host", "device", Path("/nowhere")) == shipped["host"]


def test_the_digest_is_of_the_content_and_not_of_the_spelling(plan: Path, tmp_path: Path) -> None:
    digest = load_plan(plan).digest
    assert len(digest) == 64
    assert load_text(plan, "kv]", "kv] # the same").digest == digest
    assert load_text(plan, '"0, 6-7"', '"0,6,7"').digest == digest
    assert load_text(plan, "./phone", "phone").digest == digest
    assert load_text(plan, "context = 1000", "context = 999").digest != digest
    plan.write_text(PLAN)
    device = tmp_path / "phone.device.toml"
    device.write_text(device.read_text().replace("cores = 3", "cores = 4"))
    assert load_plan(plan).digest != digest


def test_overrides_replace_values(plan: Path) -> None:
    resolved = load_plan(
        plan,
        overrides={
            "decode.predictor": "gate",
            "layers.split": {"cpu": 1},
            "layers.overrides.0.select": "3",
            "io.threads": 2,
            "weights": Path("elsewhere"),
        },
    )
    assert (resolved.plan.decode.predictor, resolved.plan.io.threads) == ("gate", 2)
    assert [dict(layer.split) for layer in resolved.layers] == [{"cpu": 1.0}] * 8
    assert resolved.store_path == plan.parent / "elsewhere"


def test_a_bad_override_is_located_in_itself(plan: Path) -> None:
    assert find_errors(plan, io__threads=0) == [("P104", "--set:1:14")]
    assert find_errors(plan, io__treads=1) == [("P017", "--set:1:1")]
    assert find_errors(plan, layers__overrides__7__hot=0.5) == [("P017", "--set:1:1")]
    assert find_errors(plan, io__threads=object()) == [("P016", "--set:1:14")]
    assert find_errors(plan, backends__tpu="cpu") == [("P017", "--set:1:1")]


def test_findings_of_plan_device_and_model_come_together(plan: Path, tmp_path: Path) -> None:
    plan.write_text(PLAN.replace("chunk = 16", "chunk = 0"))
    device, model = tmp_path / "phone.device.toml", tmp_path / "small.model.toml"
    device.write_text(device.read_text().replace("cores = 3", "cores = 0"))
    model.write_text(model.read_text().replace("heads = 8", "heads = true"))
    findings = find_errors(plan)
    assert [code for code, _ in findings] == ["P104", "P104", "P103"]
    files = [Path(place.split(":")[0]).name for _, place in findings]
    assert files == ["my.plan.toml", "phone.device.toml", "small.model.toml"]


def test_an_unknown_key_does_not_hide_what_the_rules_find(plan: Path) -> None:
    text = plan.read_text().replace("cpu = 0.9, npu = 0.1", "cpu = 0.9, npu = 0.2")
    plan.write_text(text + "\n[io]\nthread = 4\n")
    with pytest.raises(UserError) as caught:
        load_plan(plan)
    assert [item.code for item in caught.value.diagnostics] == ["P210", "P101"]


def test_a_document_may_lie_behind_a_link(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "phone.device.toml").rename(tmp_path / "real.device.toml")
    (tmp_path / "phone.device.toml").symlink_to("real.device.toml")
    assert load_plan(plan).device.id == "phone"


def test_warnings_do_not_keep_a_plan_from_running(plan: Path) -> None:
    assert load_text(plan, "context = 1000", "context = 8").plan.kv.context == 8
    assert [item.code for item in check_plan(plan).diagnostics] == ["P235"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a = 1.5", 1.5), ("a=true", True), ('a="x y"', "x y"),
        ("a=low-rank", "low-rank"), ("a=64 MiB", "64 MiB"), ("a={cpu = 1.0}", {"cpu": 1.0}),
        ("a=[1, 2]", [1, 2]), ("a=b=c", "b=c"),
    ],
)  # fmt: skip
def test_assignments_are_toml_or_text(text: str, value: object) -> None:
    assert parse_assignments((text,)) == {"a": value}


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=[1", 'a="x', "a={", "a=1\nb=2"])
def test_broken_assignments_are_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_assignments((text,))
    assert (caught.value.diagnostics[0].code, caught.value.exit_code) == ("P016", 2)
