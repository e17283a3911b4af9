"""Models that other programs have fetched, and ollama's Modelfiles."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.engine.model_texts import ChatTemplate
from pi2.found_models import Modelfile, find_found, list_found, translate_template
from tests.helpers.programs import Ask

pytest.importorskip("gguf")
CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
    "{{ .Response }}<|im_end|>\n"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.test_checkpoint_models import write_model

    return write_model(tmp_path_factory.mktemp("gguf"), "tiny", kind="Q4_1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "XDG_CACHE_HOME", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_into_ollama(models: Path, name: str, file: Path, **texts: str) -> None:
    """What `ollama pull` leaves: a manifest, and a blob for each part."""
    layers = []
    parts = {"model": file.read_bytes(), **{kind: text.encode() for kind, text in texts.items()}}
    for kind, data in parts.items():
        digest = hashlib.sha256(data).hexdigest()
        blob = models / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        media = f"application/vnd.ollama.image.{kind}"
        layers.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)})
    manifest = models / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))


def copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(file)


def test_models_of_all_programs_are_found(home: Path, file: Path, ask: Ask) -> None:
    models = home / ".ollama/models"
    put_into_ollama(models, "registry.ollama.ai/library/qwen3/4b", file)
    put_into_ollama(models, "registry.ollama.ai/me/own/latest", file)
    put_into_ollama(models, "hf.co/org/name/Q4_K_M", file)
    (models / "manifests/registry.ollama.ai/library/qwen3/broken").write_text("{")
    copy(file, home / ".lmstudio/models/org/repository/tiny.gguf")
    copy(file, home / ".lmstudio/models/org/repository/mmproj-tiny.gguf")
    copy(file, home / ".cache/llama.cpp/org_name_tiny-00001-of-00002.gguf")
    copy(file, home / ".cache/llama.cpp/org_name_tiny-00002-of-00002.gguf")
    copy(file, home / ".cache/huggingface/hub/models--org--hub-name/snapshots/0a/tiny.gguf")
    assert [model.name for model in list_found()] == [
        "hf:org/hub-name/tiny.gguf",
        "llama.cpp:org_name_tiny-00001-of-00002.gguf",
        "lmstudio:org/repository/tiny.gguf",
        "ollama:hf.co/org/name:Q4_K_M",
        "ollama:me/own:latest",
        "ollama:qwen3:4b",
    ]
    for name, place in {
        "ollama:me/own": "ollama:me/own:latest",
        "lmstudio:org/repository": "lmstudio:org/repository/tiny.gguf",
        "hf:org/hub-name": "hf:org/hub-name/tiny.gguf",
    }.items():
        found = find_found(name)
        assert found is not None and found.name == place
    shown = ask(["list", "--found"]).out
    assert shown.count("MiB") == 6 and "ollama:qwen3:4b" in shown
    assert run(["run", "ollama:qwen3:8b", "--prompt", "a"]) == 2
    with pytest.raises(UserError, match="not on this machine"):
        find_found("ollama:qwen3")


def test_a_model_of_ollama_runs_where_it_is(
    home: Path, file: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    parameters: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "num_ctx": 48, "mirostat": 2}
    parameters["stop"] = ["<|im_end|>", "\n\n"]
    name = "registry.ollama.ai/library/tiny/1b"
    put_into_ollama(
        *(home / "elsewhere", name, file),
        params=json.dumps(parameters), template="{{ .System }}{{ .Prompt }}>", system="Be brief.",
    )  # fmt: skip
    before = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
    done = ask(["run", "ollama:tiny:1b", "--chat", "Hello", "-n", "3", "--json"])
    assert json.loads(done.out)["finish_reason"] in ("length", "eos", "stop")
    after = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
    assert after - before < file.stat().st_size // 4
    plan = tomllib.loads(ask(["show", "ollama:tiny:1b"]).out)
    assert plan["sampling"]["temperature"] == 0.6 and plan["sampling"]["top_k"] == 20
    assert plan["kv"]["context"] == 48
    assert plan["chat"]["system"] == "Be brief." and plan["chat"]["stop"] == parameters["stop"]
    put_into_ollama(home / "elsewhere", f"{name}-lora", file, adapter="x")
    assert run(["show", "ollama:tiny:1b-lora"]) == 2


def test_a_modelfile_becomes_a_plan_and_a_plan_a_modelfile(
    home: Path, file: Path, ask: Ask
) -> None:
    copy(file, home / "tiny.gguf")
    (home / "Modelfile").write_text(
        '# mine\nFROM ./tiny.gguf\nPARAMETER temperature 0.5\nparameter stop "<end>"\n'
        'PARAMETER seed 7\nPARAMETER num_gpu 9\nSYSTEM """Be\nbrief."""\n'
        f'TEMPLATE """{CHATML}"""\nPARAMETER num_ctx 32\n'
    )
    done = ask(["new", "plan", "--modelfile", "Modelfile", "-o", "mine.plan.toml"])
    assert "PARAMETER num_gpu" in done.err
    plan = tomllib.loads(Path("mine.plan.toml").read_text())
    assert plan["weights"] == "tiny.gguf" and plan["kv"]["context"] == 32
    assert plan["sampling"] == {"temperature": 0.5, "seed": 7}
    assert plan["chat"]["system"] == "Be\nbrief." and plan["chat"]["stop"] == ["<end>"]
    back = Modelfile.parse(ask(["new", "modelfile", "mine.plan.toml"]).out, "back")
    assert Path(back.weights) == home / "tiny.gguf" and back.system == "Be\nbrief."
    assert dict(back.parameters) == {
        "temperature": "0.5", "seed": "7", "num_ctx": "32", "stop": "<end>"
    }  # fmt: skip
    entry = yaml.safe_load(ask(["new", "llama-swap", "mine.plan.toml"]).out)["models"]["mine"]
    assert entry["cmd"].endswith("mine.plan.toml --port ${PORT}") and "${PORT}" in entry["proxy"]
    for text, code in (
        ("FROM ./tiny.gguf\nADAPTER ./lora.gguf\n", "P736"),
        ("FROM ./tiny.gguf\nPARAMETER top_k many\n", "P737"),
        ("FRAM ./tiny.gguf\n", "P737"),
        ("PARAMETER top_k 1\n", "P737"),
        ("FROM ./tiny.gguf\nTEMPLATE {{ range .Messages }}{{ end }}\n", "P738"),
        ("FROM nothing:1b\n", "P735"),
    ):
        (home / "Modelfile").write_text(text)
        made = ask(["new", "plan", "--modelfile", "Modelfile", "-o", "other.plan.toml"], 2)
        assert f"error[{code}]" in made.err, text
    assert run(["new", "modelfile", "demo"]) == 2


def test_a_template_renders_turns_as_ollama_does() -> None:
    def render(template: str, *contents: str) -> str:
        roles = ["system", "user", "assistant", "user"]
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
        ]
        return ChatTemplate(Path("x"), translate_template(template), {}).render(messages)

    assert render(CHATML, "S", "U1", "A1", "U2") == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n"
        "A1<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n"
    )
    llama = "{{- if .System }}<<SYS>>{{ .System }}<</SYS>>{{ end -}}  [INST] {{ .Prompt }} [/INST]"
    assert render(llama, "it's", "\\U") == "<<SYS>>it's<</SYS>>[INST] \\U [/INST]"
    other = "{{ if .System }}{{ .System }}{{ else }}none{{ end }}: {{ .Prompt }} >{{ .Response }}."
    assert render(other, "", "U1", "A1", "U2") == "none: U1 >A1.none: U2 >"
