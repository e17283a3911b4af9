"""Guessed tokens change nothing but how many steps a text takes."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32, I64
from pi2.engine.answer import Ticket
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.loading import read_tokenizer
from pi2.engine.opening import Touched
from pi2.engine.run_report import describe_run, summarise_run
from pi2.engine.speculation import Speculation
from pi2.engine.statistics import SpeculationCounters
from pi2.fitting.check import load_plan
from pi2.phone.contents import Wish, aim_plan
from tests.helpers.goldens import UNROUNDED, make_golden_plan, read_golden
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.slow import mark_slow

ALWAYS = {"decode.speculation": {"when": "always", "tokens": 4}}


class Prophet:
    """Guesses what will come, with a mistake in every third token."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, wrong_every: int = 3) -> None:
        """``texts``: whole sequences, prompts and answers."""
        self._texts = [list(text) for text in texts]
        self._vocab = vocab
        self._wrong_every = wrong_every

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        known = ids.tolist()
        whole = next(text for text in self._texts if text[: len(known)] == known)
        return [
            (token + 1) % self._vocab if number % self._wrong_every == 0 else token
            for number, token in enumerate(whole[len(known) : len(known) + most], len(known))
        ]

    def forget(self, place: int) -> None: ...


def foretell(model: LoadedModel, texts: Sequence[Sequence[int]], wrong_every: int = 3) -> None:
    decode = model.plan.plan.decode
    assert decode.speculation is not None
    model.scheduler.speculation = Speculation(
        Prophet(texts, model.plan.model.shape.vocab, wrong_every),
        tokens=decode.speculation.tokens,
        step_tokens=decode.step_tokens,
        count_bytes=lambda: Touched(0, 0),
        always=True,
    )


def count_guesses(model: LoadedModel) -> SpeculationCounters:
    return model.stats.speculation


FAMILIES = {
    **dict.fromkeys(("deepseek-v2", "gemma2", "granite-hybrid", "lfm2"), "reference"),
    **dict.fromkeys(("mixtral", "mistral-window", "qwen3-next"), "cpu"),
}
"""Latent attention, windows of some layers and of all, three kinds of state, a mixture."""


@pytest.mark.parametrize(("name", "backend"), FAMILIES.items())
def test_golden_model_says_what_its_reference_says(tmp_path: Path, name: str, backend: str) -> None:
    golden = read_golden(name)
    plan = make_golden_plan(name, tmp_path)
    settings: dict[str, Any] = {"backends.cpu": backend, **UNROUNDED, **ALWAYS}
    with pi2.load(plan, set=settings) as model:
        foretell(model, [[*golden.prompt, *golden.greedy]])
        result = model.generate(
            golden.prompt, max_tokens=32, temperature=0.0, ignore_eos=True
        ).result
        counters = count_guesses(model)
    assert list(result.token_ids) == golden.greedy
    assert 0 < counters.accepted_tokens < counters.draft_tokens


ANSWER: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
PROMPTS = ([5, 6, 7, 8, 9], [250], [3, 1, 4, 1, 5, 9, 2, 6], [17, 99])
SPARSE: dict[str, dict[str, Any]] = {
    "dense": {"decode.predictor": "none"},
    "gates": {"decode.predictor": "gate"},
    "predictors": {},
    "ahead, from flash": {
        "decode.look_ahead": "layer",
        "layers.hot": 0.1,
        "memory.segments.cold": "1 MiB",
        "cache.fill": False,
    },
    "lent by the context": {"kv.lend": True},
}
DRAWN: dict[str, Any] = {
    "temperature": 1.3, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("drawing", [mark_slow({"temperature": 0.0}), DRAWN])
def test_the_text_is_the_same_however_neurons_are_found(
    plan: Path, name: str, drawing: dict[str, Any]
) -> None:
    with pi2.load(plan, set=SPARSE[name]) as model:
        alone = model.generate(PROMPTS[0], **ANSWER, **drawing).result
        plain_steps = model.scheduler.rounds.whole.steps
    with pi2.load(plan, set={**SPARSE[name], **ALWAYS}) as model:
        foretell(model, [[*PROMPTS[0], *alone.token_ids]])
        result = model.generate(PROMPTS[0], **ANSWER, **drawing).result
        assert model.scheduler.rounds.whole.steps < plain_steps
        cache = model._parts.cache
        assert cache.free_capacity == cache.cold_capacity, "nothing is held in the end"
    assert (result.token_ids, result.text) == (alone.token_ids, alone.text)


@pytest.mark.parametrize("kind", ["neurons", "gates, ahead"])
def test_the_model_guesses_with_what_is_in_memory_and_reads_nothing_for_it(
    tmp_path: Path, kind: str
) -> None:
    settings: dict[str, Any] = {"layers.hot": 0.2, "cache.fill": False}
    plan = write_plan(tmp_path, make_tiny(tmp_path))
    settings["decode.predictor"] = "gate" if kind == "gates, ahead" else "low-rank"
    with pi2.load(plan, set=settings) as model:
        alone = model.generate([5, 6, 7], **ANSWER, temperature=0.0).result
    guessing = {"drafts": "resident", "when": "always", "tokens": 3}
    with pi2.load(plan, set={**settings, "decode.speculation": guessing}) as model:
        speculation, forward = model.scheduler.speculation, model._parts.forward
        assert speculation is not None
        propose, places = speculation._drafter.propose, []

        def watch(place: int, ids: I64, most: int) -> list[int]:
            read = model.stats.flash_read_bytes
            found = propose(place, ids, most)
            assert model.stats.flash_read_bytes == read
            places.append(forward.positions[place])
            assert len(found) == most
            return found

        speculation._drafter.propose = watch
        result = model.generate([5, 6, 7], **ANSWER, temperature=0.0).result
        counters = count_guesses(model)
        cache = model._parts.cache
        assert cache.free_capacity == cache.cold_capacity, "nothing is held in the end"
    assert result.token_ids == alone.token_ids
    assert places == sorted(set(places)), "what was guessed is taken back"
    assert counters.accepted_tokens > 0 and counters.drafted_bytes > 0


def write_draft(folder: Path, name: str = "draft", **changes: Any) -> Path:
    """Write a plan of a model of one layer with the same tokens."""
    own = folder / name
    own.mkdir()
    smaller = {"shape": {"layers": 1, **changes.pop("shape", {})}, **changes}
    segments = {
        "runtime": "300 MiB",
        **dict.fromkeys(("attention", "kv", "predictor", "hot", "workspace"), "8 MiB"),
        "cold": "1 MiB",
    }
    memory = {"budget": "400 MiB", "segments": segments}
    return write_plan(own, make_tiny(own, smaller), {"memory": memory, "decode": {"batch": 2}})


def test_another_model_guesses_what_is_verified(tmp_path: Path, plan: Path) -> None:
    write_draft(tmp_path)
    with pi2.load(plan, set={"decode.batch": 3}) as model:
        alone = model.generate_batch(PROMPTS, **ANSWER, temperature=0.0).result.sequences
    guessing = {"drafts": "plan", "plan": "draft/tiny.plan.toml", "when": "always", "tokens": 3}
    with pi2.load(plan, set={"decode.batch": 3, "decode.speculation": guessing}) as model:
        draft = model._parts.draft
        assert draft is not None and len(draft.forward.positions) == 2
        result = model.generate_batch(PROMPTS, **ANSWER, temperature=0.0).result
        assert count_guesses(model).draft_tokens > 0
        assert draft.forward.positions[0] == 0, "it forgets what has ended"
    assert [item.token_ids for item in result.sequences] == [item.token_ids for item in alone]


def test_a_model_that_is_the_same_guesses_everything(tmp_path: Path, plan: Path) -> None:
    (tmp_path / "same.plan.toml").write_text(plan.read_text())
    guessing = {"drafts": "plan", "plan": "./same.plan.toml", "when": "always", "tokens": 3}
    with pi2.load(plan, set={"decode.speculation": guessing, "memory.budget": "4 GiB"}) as model:
        result = model.generate(PROMPTS[0], **ANSWER, temperature=0.0).result
        counters = result.statistics.speculation
    assert counters.accepted_tokens == counters.draft_tokens > 12


def find_codes(guessed: Path, **speculation: Any) -> list[str]:
    with pytest.raises(pi2.UserError) as caught:
        pi2.load(guessed, set={"decode.speculation": {"drafts": "plan", **speculation}})
    return [item.code for item in caught.value.diagnostics]


def test_a_plan_that_cannot_guess_is_refused(tmp_path: Path, plan: Path) -> None:
    assert find_codes(plan) == ["P284"]
    assert find_codes(plan, plan="./nowhere.plan.toml") == ["P015"]
    assert find_codes(plan, drafts="prompt", plan="./nowhere.plan.toml") == ["P015", "P284"]
    write_draft(tmp_path, "other", shape={"vocab": 300})
    assert find_codes(plan, plan="other/tiny.plan.toml") == ["P284"]
    guessing = {"drafts": "plan", "plan": "./tiny.plan.toml"}
    with pytest.raises(pi2.UserError, match=r"memory\.budget leaves"):
        pi2.load(plan, set={"decode.speculation": guessing, "memory.budget": "800 MiB"})


def test_both_models_have_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, read = write_plan(tmp_path, make_tiny(tmp_path)), read_tokenizer
    write_draft(tmp_path)

    def read_other(path: Path) -> Any:
        tokenizer = read(path)
        if "draft" in path.parts:
            tokenizer.add_tokens(["another"])
        return tokenizer

    monkeypatch.setattr("pi2.engine.loading.read_tokenizer", read_other)
    guessing = {"drafts": "plan", "plan": "draft/tiny.plan.toml"}
    with pytest.raises(pi2.UserError, match="P618"):
        pi2.load(plan, set={"decode.speculation": guessing})


def test_bundles_have_one_model(tmp_path: Path, plan: Path) -> None:
    write_draft(tmp_path)
    guessing = {"drafts": "plan", "plan": "draft/tiny.plan.toml"}
    resolved = load_plan(plan, overrides={"decode.speculation": guessing, "backends.cpu": "cpu"})
    with pytest.raises(pi2.UserError, match="P673"):
        aim_plan(resolved, Wish(triple="aarch64-linux-android"))


def test_a_plan_that_speculates_itself_does_not_guess(tmp_path: Path) -> None:
    speculation = {"drafts": "plan", "plan": "./tiny.plan.toml"}
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"decode": {"speculation": speculation}})
    with pytest.raises(pi2.UserError) as caught:
        pi2.load(plan)
    messages = [item.message for item in caught.value.diagnostics if item.code == "P284"]
    assert "it speculates itself" in messages


def test_several_sequences_share_the_room_of_a_step(plan: Path) -> None:
    options = {**ANSWER, "temperature": 1.0, "seed": 3}
    with pi2.load(plan, set={"decode.batch": 3}) as model:
        alone = model.generate_batch(PROMPTS, **options).result.sequences
    with pi2.load(plan, set={"decode.batch": 3, **ALWAYS}) as model:
        foretell(model, [[*ids, *item.token_ids] for ids, item in zip(PROMPTS, alone, strict=True)])
        most, step = 0, model._parts.forward.step

        def watch(tokens: Sequence[int], sequences: Sequence[int]) -> F32:
            nonlocal most
            most = max(most, len(tokens))
            return step(tokens, sequences)

        model._parts.forward.step = watch
        result = model.generate_batch(PROMPTS, **options).result
        assert count_guesses(model).accepted_tokens > 0
    assert most == 5, "a token each, and guesses of some of them"
    assert [item.token_ids for item in result.sequences] == [item.token_ids for item in alone]


class OnlyEven:
    """A grammar of even tokens, which ends with the tenth."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def find_bias(self) -> F32:
        bias = np.full(288, -np.inf, np.float32)
        bias[::2] = 0.0
        return bias

    def accept(self, token: int) -> None:
        self.taken.append(token)


def test_grammars_scores_stops_and_limits_see_only_tokens_that_were_drawn(plan: Path) -> None:
    made: list[OnlyEven] = []

    def make() -> OnlyEven:
        made.append(OnlyEven())
        return made[-1]

    def ask(model: LoadedModel, stop: Sequence[str], most: int) -> Ticket:
        request = model.describe_request(
            PROMPTS[0], max_tokens=most, stop=stop, alternatives=2, make_constraint=make,
            ignore_eos=True, frequency_penalty=0.5, temperature=0.8, seed=5,
        )  # fmt: skip
        ticket = Ticket(request)
        model.scheduler.submit(ticket)
        while not ticket.ended:
            model.scheduler.drive()
        assert ticket.error is None
        return ticket

    with pi2.load(plan) as model:
        whole = ask(model, (), 24)
        assert whole.result is not None
        ids, text = whole.result.token_ids, whole.result.text
        cases = [((), 24), ((), 7), ((text[6:8],), 24)]
        plain = [ask(model, stop, most) for stop, most in cases]
    made.clear()
    with pi2.load(plan, set=ALWAYS) as model:
        foretell(model, [[*PROMPTS[0], *ids]])
        guessed = [ask(model, stop, most) for stop, most in cases]
        assert count_guesses(model).accepted_tokens > 5
    for one, other, grammar in zip(plain, guessed, made, strict=True):
        assert one.result is not None and other.result is not None
        assert one.result.token_ids == other.result.token_ids
        assert grammar.taken == list(other.result.token_ids)
        assert one.result.finish_reason == other.result.finish_reason
        assert one.result.text == other.result.text
        scores = [
            [score for piece in ticket.pieces for score in piece.scores] for ticket in (one, other)
        ]
        assert [score.token for score in scores[0]] == [score.token for score in scores[1]]
        assert np.allclose(
            [score.log_probability for score in scores[0]],
            [score.log_probability for score in scores[1]],
            atol=1e-4,
        )


def test_an_answer_may_fill_the_context_to_its_last_token(plan: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "temperature": 0.0}
    with pi2.load(plan) as model:
        alone = model.generate(PROMPTS[0], **options).result
    with pi2.load(plan, set=ALWAYS) as model:
        foretell(model, [[*PROMPTS[0], *alone.token_ids]], wrong_every=1000)
        result = model.generate(PROMPTS[0], **options).result
    assert result.finish_reason == alone.finish_reason == "context"
    assert result.token_ids == alone.token_ids


def test_a_plan_that_lets_it_pay_guesses_what_the_prompt_has(plan: Path) -> None:
    with pi2.load(plan, set={"decode.speculation": {"match": 1, "when": "always"}}) as model:
        result = model.generate([5, 6, 7, 8] * 4, **ANSWER, temperature=0.0).result
        counters = result.statistics.speculation
    assert counters.drafted_bytes > 0 and counters.drafted_tokens >= counters.drafted_steps
    assert counters.draft_tokens >= counters.accepted_tokens
    assert sum(counters.accepted_by_position) == counters.accepted_tokens
    assert counters.drafted_tokens + counters.plain_tokens == len(result.token_ids) - 1


def test_summaries_and_metrics_say_what_it_brought(plan: Path) -> None:
    pytest.importorskip("prometheus_client")
    from pi2.serving.metrics import Metrics

    with pi2.load(plan) as model:
        alone = model.generate(PROMPTS[0], **ANSWER, temperature=0.0).result
        assert "speculation" not in summarise_run(model, alone)
    with pi2.load(plan, set=ALWAYS) as model:
        foretell(model, [[*PROMPTS[0], *alone.token_ids]])
        result = model.generate(PROMPTS[0], **ANSWER, temperature=0.0).result
        counts = result.statistics.speculation
        assert f"speculation: {counts.draft_tokens} tokens" in summarise_run(model, result)
        found = describe_run(model, result)["speculation"]
        assert found["accepted_tokens"] == counts.accepted_tokens
        served = SimpleNamespace(name="tiny")
        host: Any = SimpleNamespace(plan=served, model=model, is_loaded=True, waiting=0)
        lines = Metrics([host]).write().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = {"num_drafts": "drafts", "num_draft_tokens": "draft_tokens"}
    for name, field in {**names, "num_accepted_tokens": "accepted_tokens"}.items():
        key = f'vllm:spec_decode_{name}_total{{model_name="tiny"}}'
        assert float(shown[key]) == getattr(counts, field)
    first = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"}'
    assert float(shown[first]) == counts.accepted_by_position[0]
