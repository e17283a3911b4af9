"""`pi2 evaluate`: windows, perplexity, agreement and recall are what they say."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.diagnostics import UserError
from pi2.measuring.evaluation import evaluate_plan, write_markdown
from pi2.measuring.predictors import compute_scores
from pi2.measuring.texts import Passages, cut_windows
from pi2.refit import read_plan
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.programs import Ask

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs.\n"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_plan(folder, make_tiny(folder))


def score_plainly(model: pi2.LoadedModel, ids: list[int], mode: Any) -> np.ndarray:
    """Losses of every token but the first."""
    logits = model.logits(ids, mode=mode)[:-1].astype(np.float64)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    return -np.log(chances[np.arange(len(chances)), ids[1:]])


@pytest.mark.parametrize("begin", [None, 7])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 4), (8, 1), (5, 3)])
def test_every_token_is_scored_once_with_the_context_that_the_stride_leaves(
    begin: int | None, context: int, stride: int
) -> None:
    ids = list(range(100, 150))
    windows = cut_windows(ids, begin=begin, context=context, stride=stride)
    scored: list[int] = []
    for number, window in enumerate(windows):
        assert len(window.tokens) == context
        if begin is not None:
            assert window.tokens[0] == begin
        head = len(window.tokens) - window.first_scored
        assert number == 0 or head <= stride
        scored += window.tokens[window.first_scored :]
    assert len(set(scored)) == len(scored)
    if stride < context - (begin is not None):
        expected = ids[: scored[-1] - 99]
        assert scored == (expected[1:] if begin is None else expected)


def test_perplexity_is_that_of_the_models_logits(plan: Path) -> None:
    text = TEXT[:48]
    found = evaluate_plan(plan, Passages([text], context=32, stride=16))
    with pi2.load(plan) as model:
        ids = [256, *model.tokenizer.encode(text, add_special_tokens=False).ids]
        windows = cut_windows(ids[1:], begin=256, context=32, stride=16)
        for run_, mode in zip(found.runs, ("prefill", "decode"), strict=True):
            losses = np.concatenate(
                [
                    score_plainly(model, list(item.tokens), mode)[item.first_scored - 1 :]
                    for item in windows
                ]
            )
            assert run_.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-6)
            bits = losses.sum() / np.log(2) / found.bytes
            assert run_.bits_per_byte == pytest.approx(bits, rel=1e-6)
    assert [item.name for item in found.runs] == ["dense", "low-rank"]
    assert found.runs[0].agreement == 1.0 and found.runs[0].predicted is None
    assert 0 < found.runs[1].agreement < 1
    assert found.tokens == found.bytes == len(losses)  # this tokenizer has a token for every byte


def test_gate_prediction_loses_nothing(plan: Path) -> None:
    found = evaluate_plan(
        plan, Passages([TEXT], context=32, count=2), against=["gate", "reference"]
    )
    dense, _, gate, reference = found.runs
    assert (gate.name, gate.predictor) == ("gate", "gate")
    assert gate.agreement == reference.agreement == 1.0
    assert gate.perplexity == pytest.approx(dense.perplexity, rel=1e-5)
    assert gate.predicted is not None and 0.3 < gate.predicted < 0.7


def test_recall_is_counted_layer_by_layer(plan: Path) -> None:
    found = evaluate_plan(plan, Passages([TEXT], context=32, count=1))
    counts = np.zeros((3, 3))
    with pi2.load(plan, set={"prefill.chunk": 32}) as model:
        parts = model._parts
        ids = model.tokenizer.encode(TEXT, add_special_tokens=False).ids[:31]
        executor: Any = parts.executor
        executor.embed(np.array([256, *ids][:-1], np.int32))
        for layer in range(3):
            executor.attend(layer, 0)
            executor.begin_ffn(layer)
            bundles = parts.texts.store.layers[layer].bundles
            active = executor._activate(bundles, slice(None)) != 0
            named = compute_scores(executor._request, layer, executor.now.read) >= 0
            counts[layer] = active.mean(), named.mean(), (active & named).sum() / active.sum()
            executor.add_dense(layer, bundles)
            executor.end_ffn(layer)
    for counted, (active, named, recall) in zip(found.layers, counts, strict=True):
        assert counted.active == pytest.approx(active)
        assert counted.predicted == pytest.approx(named)
        assert counted.recall == pytest.approx(recall)


def test_another_plan_is_compared_token_by_token(plan: Path, tmp_path: Path) -> None:
    halves = dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), "fp16")
    other = write_plan(tmp_path, make_tiny(tmp_path, {"quantization": halves}))
    found = evaluate_plan(plan, Passages([TEXT], context=32, count=2), against=[str(other)])
    assert [item.name for item in found.runs[2:]] == ["tiny.plan.toml", "tiny.plan.toml, low-rank"]
    assert found.runs[2].digest != found.digest
    assert 0.3 < found.runs[2].agreement < 1  # int4 against fp16 of the same weights


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"against": ["nothing.plan.toml"]}, "P663"),
        ({"passages": Passages([TEXT], context=65)}, "P661"),
        ({"passages": Passages([TEXT], context=8, stride=9)}, "P661"),
        ({"plan": {"backends.cpu": "null"}}, "P662"),
    ],
)
def test_what_cannot_be_measured_is_said(plan: Path, arguments: Any, code: str) -> None:
    found = read_plan(plan, overrides=arguments.pop("plan", {}))
    with pytest.raises(UserError) as caught:
        evaluate_plan(found, **{"passages": Passages([TEXT]), **arguments})
    assert [item.code for item in caught.value.diagnostics] == [code]


def test_the_command_prints_a_table_or_one_object(plan: Path, tmp_path: Path, ask: Ask) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    command = ["evaluate", str(plan), "--text", str(file), "--windows", "1", "--context", "16"]
    text = ask(command).out
    assert "| dense | reference | none |" in text and "| mean |" in text
    found = json.loads(ask([*command, "--json"]).out)
    assert found["tokens"] == 15
    assert [item["name"] for item in found["runs"]] == ["dense", "low-rank"]
    assert len(found["layers"]) == 3


class Peer:
    """Stands for llama.cpp: pi2's logits, but single tokens find one logit larger."""

    def __init__(self, file: str, *, n_ctx: int, **others: Any) -> None:
        self.model = pi2.load(file, set={"kv.context": n_ctx})
        self.ids: list[int] = []
        self.scores: list[np.ndarray] = []

    def reset(self) -> None:
        self.ids, self.scores = [], []

    def eval(self, tokens: list[int]) -> None:
        self.ids += tokens
        found = self.model.logits(self.ids)[-len(tokens) :]
        found[:, 7] += 100.0 if len(tokens) == 1 else 0.0
        self.scores += list(found)

    def close(self) -> None:
        self.model.close()


def test_llama_cpp_is_as_far_from_pi2_as_it_is_and_its_own_distance_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_random_gguf(tmp_path, {"hidden": 64, "layers": 1, "context": 64})
    monkeypatch.setattr("pi2.measuring.evaluation.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Peer))
    found = evaluate_plan(file, Passages([TEXT], context=32, count=1), against=["llama.cpp"])
    dense, peer = found.runs
    assert peer.perplexity == pytest.approx(dense.perplexity, rel=1e-3)
    assert peer.divergence == pytest.approx(0, abs=1e-4) and peer.agreement == 1
    assert peer.floor is not None and peer.floor[0] > 1 > peer.floor[1]
    text = write_markdown(found)
    assert "llama.cpp from itself, token by token" in text and "| llama.cpp |" in text


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_text_that_cannot_be_read_is_one_finding(
    plan: Path, tmp_path: Path, ask: Ask, content: bytes | None
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert "P660" in ask(["evaluate", str(plan), "--text", str(file)], 2).err


def test_a_dense_plan_has_one_run(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"predictor": None, "ffn": {"activation": "silu"}})
    plan = write_plan(tmp_path, tiny, {"decode": {"predictor": "none"}})
    found = evaluate_plan(plan, Passages([TEXT], context=16, count=1))
    assert [item.name for item in found.runs] == ["dense"]
    assert found.layers == ()
    assert write_markdown(found).count("\n") == 4
