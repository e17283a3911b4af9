"""`pi2 run --mlc` drives mlc_llm by the interface that it documents.

The package here has the signatures of MLC-LLM 0.20 (`MLCEngine`, its ``completions`` and
``chat.completions``, `EngineConfig`) and records what it is asked; the real one is asked where it
is installed (``PI2_MLC_PYTHON``).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from pi2.backends.mlc.backend import PYTHON, MlcEngine
from pi2.checkup import find_obstacles, judge_plan
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.machine import detect_machine
from pi2.plan.documents.common import Sampling

Capture = pytest.CaptureFixture[str]
PLAN = Path(__file__).resolve().parents[2] / "plans/demo.plan.toml"
FAKE = """
import json, os
from dataclasses import dataclass
from types import SimpleNamespace

print("a line that libraries print")
SAID = open(os.environ["SAID"], "a")

def note(**facts):
    SAID.write(json.dumps(facts) + "\\n")
    SAID.flush()

class _Create:
    def __init__(self, chat):
        self.chat = chat
    def _stream(self, given):
        if given == "fail":
            raise ValueError("BadRequestError: too long")
        for place, text in enumerate(("Hel", "lo", None)):
            reason = "stop" if text is None else None
            delta = SimpleNamespace(content=text)
            choice = SimpleNamespace(finish_reason=reason, index=0)
            setattr(choice, "delta" if self.chat else "text", delta if self.chat else text or "")
            yield SimpleNamespace(choices=[choice], usage=None)
        usage = SimpleNamespace(prompt_tokens=3, completion_tokens=2)
        yield SimpleNamespace(choices=[], usage=usage)

class Completion(_Create):
    def create(self, *, prompt, model=None, best_of=1, echo=False, frequency_penalty=None,
               presence_penalty=None, logprobs=None, logit_bias=None, max_tokens=None, n=1,
               seed=None, stop=None, stream=False, stream_options=None, suffix=None,
               temperature=None, top_p=None, user=None, response_format=None, request_id=None,
               extra_body=None):
        note(prompt=prompt, max_tokens=max_tokens, seed=seed, stop=stop, temperature=temperature,
             top_p=top_p, stream=stream)
        return self._stream(prompt)

class ChatCompletion(_Create):
    def create(self, *, messages, model=None, frequency_penalty=None, presence_penalty=None,
               logprobs=False, top_logprobs=0, logit_bias=None, max_tokens=None, n=1, seed=None,
               stop=None, stream=False, stream_options=None, temperature=None, top_p=None,
               tools=None, tool_choice=None, user=None, response_format=None, request_id=None,
               extra_body=None):
        note(messages=messages, max_tokens=max_tokens, temperature=temperature)
        return self._stream(messages)

class MLCEngine:
    def __init__(self, model, device="auto", *, model_lib=None, mode="local", engine_config=None,
                 enable_tracing=False):
        note(model=model, device=device, mode=mode, **vars(engine_config))
        self.completions = Completion(False)
        self.chat = SimpleNamespace(completions=ChatCompletion(True))
    def terminate(self):
        note(terminated=True)
"""
CONFIG = """
from dataclasses import dataclass
from typing import Optional
@dataclass
class EngineConfig:
    max_num_sequence: Optional[int] = None
    max_total_sequence_length: Optional[int] = None
    prefill_chunk_size: Optional[int] = None
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package; returns the file in which it says what it was asked."""
    package = tmp_path / "site/mlc_llm"
    (package / "serve").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "serve/__init__.py").write_text("")
    (package / "serve/config.py").write_text(CONFIG)
    file = tmp_path / "said"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("SAID", str(file))
    monkeypatch.delenv(PYTHON, raising=False)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = load_plan(PLAN).model.shape
    config = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers}
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights/mlc-chat-config.json"
    file.write_text(json.dumps({"model_config": config}))
    return file.parent


@pytest.fixture
def plan(tmp_path: Path, folder: Path) -> Path:
    file = tmp_path / "mlc.plan.toml"
    file.write_text(
        f'extends = ["{os.path.relpath(PLAN.with_name("demo-opencl.plan.toml"), tmp_path)}"]\n'
        'schema_version = 3\nname = "Demo in MLC-LLM"\ndevice = "host-opencl"\n'
        f'model = "pi2-demo"\nweights = "{folder.name}"\nbackends = {{ gpu = "mlc" }}\n'
        'decode.predictor = "none"\nsampling.repetition_penalty = 1.0\n'
    )
    return file


def read(said: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in said.read_text().splitlines()]


def test_run_takes_context_and_sampling_from_plan(said: Path, folder: Path, capfd: Capture) -> None:
    arguments = ["run", str(PLAN), "--mlc", str(folder), "--max-tokens", "7", "--prompt", "def "]
    usual = ["--set", "sampling.repetition_penalty=1.0", "--stop", "\n\n"]
    assert run([*arguments, *usual]) == 0
    out, err = capfd.readouterr()
    assert out == "Hello\n"
    assert "MLC-LLM: load" in err and "2 tokens, stop" in err
    loaded, asked, ended = read(said)
    assert loaded == {
        "model": str(folder.resolve()), "device": "auto", "mode": "interactive",
        "max_num_sequence": 1, "max_total_sequence_length": 1024, "prefill_chunk_size": 128,
    }  # fmt: skip
    assert asked == {
        "prompt": "def ", "max_tokens": 7, "seed": 1, "stop": ["\n\n"], "temperature": 0.7,
        "top_p": 0.9, "stream": True,
    }  # fmt: skip
    assert ended == {"terminated": True}


def test_a_plan_that_names_the_backend_runs_with_the_weights_that_it_names(
    said: Path, folder: Path, plan: Path, capfd: Capture
) -> None:
    assert run(["validate", str(plan)]) == 0
    assert run(["run", str(plan), "--max-tokens", "7", "--prompt", "def "]) == 0
    out, err = capfd.readouterr()
    assert out.endswith("Hello\n") and "MLC-LLM: load" in err
    loaded, asked, _ = read(said)
    assert (loaded["model"], loaded["device"]) == (str(folder.resolve()), "opencl")
    assert (asked["max_tokens"], asked["temperature"]) == (7, 0.7)


def test_what_needs_logits_of_such_a_plan_is_a_finding(plan: Path, capfd: Capture) -> None:
    for arguments in (["evaluate", str(plan), "--text", str(PLAN)], ["bench", str(plan)]):
        assert run(arguments) == 2
        assert "P678" in capfd.readouterr().err


def test_it_says_what_it_cannot_compute_of_a_plan(plan: Path, capfd: Capture) -> None:
    plan.write_text(plan.read_text().replace('predictor = "none"', 'predictor = "low-rank"'))
    assert run(["validate", str(plan)]) == 1
    out, err = capfd.readouterr()
    assert "P265" in out + err and 'decode.predictor must be "none"' in out + err


def test_doctor_says_of_such_a_plan_what_is_missing(
    plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    (folder / "mlc-chat-config.json").unlink()
    machine = detect_machine()
    verdict = judge_plan(plan, plan.name, machine, {"mlc": find_obstacles("mlc", machine)})
    assert verdict.verdict == "cannot run"
    text = " ".join(finding.message for finding in verdict.findings)
    assert "has no mlc_llm" in text and "its weights are not on this machine" in text


def test_conversations_are_rendered_by_mlc_llm(said: Path, folder: Path) -> None:
    model = load_plan(PLAN).model
    messages = [{"role": "user", "content": "Hi"}]
    with MlcEngine(folder, model, context=64) as engine:
        text = "".join(engine.generate(messages, Sampling(temperature=0.5), max_tokens=3))
        assert engine.finished is not None and engine.finished.prompt_tokens == 3
    assert text == "Hello"
    assert read(said)[1] == {"messages": messages, "max_tokens": 3, "temperature": 0.5}


def test_what_mlc_llm_refuses_is_a_finding_and_next_text_works(said: Path, folder: Path) -> None:
    del said
    with MlcEngine(folder, load_plan(PLAN).model, context=64) as engine:
        with pytest.raises(UserError, match=r"P688.*too long"):
            list(engine.generate("fail", Sampling(), max_tokens=3))
        assert list(engine.generate("x", Sampling(), max_tokens=3)) == ["Hel", "lo"]


def test_sampling_that_it_cannot_be_told_is_refused(said: Path, folder: Path) -> None:
    del said
    arguments = ["run", str(PLAN), "--mlc", str(folder), "--prompt", "x"]
    assert run(arguments) == 2  # the demo's plan has a repetition penalty
    assert run([*arguments, "--set", "sampling.repetition_penalty=1.0", "--top-k", "4"]) == 2


def test_its_absence_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    arguments = ["run", str(PLAN), "--mlc", str(folder), "--prompt", "x"]
    arguments += ["--set", "sampling.repetition_penalty=1.0"]
    assert run(arguments) == 2
    err = capfd.readouterr().err
    assert "P686" in err and PYTHON in err
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    assert run(arguments) == 2
    assert "/nowhere/python" in capfd.readouterr().err


def test_another_models_folder_is_refused(said: Path, folder: Path) -> None:
    file = folder / "mlc-chat-config.json"
    file.write_text(json.dumps({"model_config": {"hidden_size": 4096}}))
    with pytest.raises(UserError, match=r"P689.*4096"):
        MlcEngine(folder, load_plan(PLAN).model, context=64)
    file.unlink()
    with pytest.raises(UserError, match="P689"):
        MlcEngine(folder, load_plan(PLAN).model, context=64)
    assert not said.exists()


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"needs MLC-LLM, named by {PYTHON}")
def test_the_real_package_has_the_interface() -> None:
    code = (
        "import inspect; from mlc_llm import MLCEngine;"
        "from mlc_llm.serve.config import EngineConfig;"
        "EngineConfig(max_num_sequence=1, max_total_sequence_length=8, prefill_chunk_size=8);"
        "print(sorted(inspect.signature(MLCEngine.__init__).parameters))"
    )
    done = subprocess.run(
        [os.environ[PYTHON], "-c", code], capture_output=True, text=True, check=True
    )
    for name in ("model", "device", "mode", "engine_config"):
        assert f"'{name}'" in done.stdout
