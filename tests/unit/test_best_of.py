"""Several texts after one prompt: it is read once, and each text is the one it would be alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pi2
from pi2.arrays import F32, I32
from pi2.cli.run import run_command as command
from pi2.engine.answer import Ticket
from pi2.engine.loaded_model import LoadedModel
from tests.helpers.goldens import UNROUNDED, make_golden_plan
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.slow import keep_quick

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "predictors": {},
    "lent by the context": {"kv.lend": True},
    "int8 keys and values": {"kv.type": "int8", "decode.predictor": "none"},
    "cpu": {"backends.cpu": "cpu", "decode.predictor": "gate", **UNROUNDED},
}


def check_together(plan: Path, settings: dict[str, Any], places: int = 4) -> None:
    with pi2.load(plan, set=settings) as model:
        alone = [model.generate(PROMPT, seed=5 + n, **DRAWN).result for n in range(4)]
    with pi2.load(plan, set={**settings, "decode.batch": places}) as model:
        result = model.generate_batch([PROMPT] * 4, seed=5, **DRAWN).result
    assert [item.token_ids for item in result.sequences] == [item.token_ids for item in alone]
    assert len({item.token_ids for item in alone}) > 1
    readers = 1 if places == 4 else 4 - places + 1
    assert result.rounds.prompt_tokens == readers * len(PROMPT)


@pytest.mark.parametrize("name", keep_quick(CASES, {*CASES} - {"cpu"}))
def test_each_text_is_the_one_that_its_seed_gives_alone(plan: Path, name: str) -> None:
    check_together(plan, CASES[name])


def test_those_that_wait_for_a_place_read_the_prompt_again(plan: Path) -> None:
    check_together(plan, {}, places=3)


@pytest.mark.parametrize("name", ["lfm2", "mixtral"])
def test_states_and_mixtures_share_prompts_too(tmp_path: Path, name: str) -> None:
    check_together(make_golden_plan(name, tmp_path), UNROUNDED)


def submit(model: LoadedModel, count: int, **changes: Any) -> list[Ticket]:
    """Ask for texts of growing length after the same prompt."""
    tickets = [
        Ticket(
            model.describe_request(
                PROMPT, max_tokens=2 + 2 * n, ignore_eos=True, seed=n, temperature=1.0, **changes
            )
        )
        for n in range(count)
    ]
    model.scheduler.submit(*tickets)
    return tickets


def finish(model: LoadedModel, tickets: list[Ticket]) -> list[Any]:
    while model.scheduler.drive():
        pass
    assert all(ticket.ended for ticket in tickets)
    return tickets


def test_a_step_has_fewer_sequences_when_some_have_ended(plan: Path) -> None:
    with pi2.load(plan, set={"decode.batch": 4}) as model:
        finish(model, submit(model, 4))
        steps = {key: (own.steps, own.tokens) for key, own in model.scheduler.rounds.phases.items()}
        assert steps == {4: (1, 4), 3: (2, 6), 2: (2, 4), 1: (2, 2)}


def test_each_gets_the_scores_of_the_prompt_that_it_asked_for(plan: Path) -> None:
    asked: list[dict[str, Any]] = [{"scores_prompt": True, "alternatives": n} for n in (3, 1, 1)]
    with pi2.load(plan, set={"decode.batch": 4}) as model:
        tickets = finish(model, [submit(model, 1, **own)[0] for own in (*asked, {})])
        told = [[len(score.alternatives) for score in own.prompt_scores] for own in tickets]
        assert told == [[3] * 17, [1] * 17, [1] * 17, []]
        assert [own.shared_tokens for own in tickets] == [0, 0, len(PROMPT), 0]


@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept", "prefixes kept"])
def test_others_read_prompt_where_nobody_wants_first_text_any_more(plan: Path, kept: bool) -> None:
    with pi2.load(plan, set={"decode.batch": 3}) as model:
        alone = [item.result.token_ids for item in finish(model, submit(model, 3))]
    with pi2.load(plan, set={"decode.batch": 3}) as model:
        if kept:
            model.keep_prefixes()
        tickets = submit(model, 3)
        model.scheduler.drive()
        assert model.scheduler.running == 3
        assert not tickets[0].pieces, "the prompt takes several rounds"
        tickets[0].cancel()
        finish(model, tickets)
        assert tickets[0].result is None
        assert [item.result.token_ids for item in tickets[1:] if item.result] == alone[1:]
        again = finish(model, submit(model, 3))
        assert [item.result.token_ids for item in again if item.result] == alone
        assert model.scheduler.running == 0


def test_a_prompt_that_fails_for_one_is_read_for_the_others(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pi2.load(plan, set={"decode.batch": 3}) as model:
        forward = model._parts.forward
        prefill, failed = forward.prefill, list[bool]()

        def fail_once(tokens: I32, **options: Any) -> F32:
            if not failed:
                failed.append(True)
                raise OSError("the drive is gone")
            return prefill(tokens, **options)

        monkeypatch.setattr(forward, "prefill", fail_once)
        tickets = finish(model, submit(model, 3))
        assert isinstance(tickets[0].error, OSError)
        assert all(ticket.result is not None for ticket in tickets[1:])


def test_the_best_text_has_the_highest_mean_log_probability(plan: Path) -> None:
    # Every neuron is computed, so that prompts have the logits of answers.
    with pi2.load(plan, set={"decode.batch": 4, "decode.predictor": "none"}) as model:
        result = model.generate_batch([PROMPT] * 4, seed=5, scores=True, **DRAWN).result
        expected = []
        for item in result.sequences:
            logits = model.logits([*PROMPT, *item.token_ids[:-1]])[len(PROMPT) - 1 :]
            scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            expected.append(float(np.mean(scores[np.arange(8), list(item.token_ids)])))
        values = [item.mean_log_probability for item in result.sequences]
        assert values == pytest.approx(expected, abs=1e-4)
        assert result.best == int(np.argmax(expected))
        assert model.generate_batch([PROMPT] * 4, seed=5, **DRAWN).result.best is None


def test_the_command_prints_the_best(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"decode": {"batch": 4}})
    asked = [str(plan), "--prompt", "abc", "--best-of", "4", "--max-tokens", "6", "--seed", "1"]
    drawn = [*asked, "--temperature", "1.0", "--ignore-eos"]
    found = json.loads(CliRunner().invoke(command, [*drawn, "--json"]).stdout)
    values = [item["mean_log_probability"] for item in found["sequences"]]
    best = found["best"]
    assert values[best] == max(values)
    shown = CliRunner().invoke(command, drawn)
    assert shown.stdout == found["sequences"][best]["text"] + "\n"
    assert f"number {best + 1} of 4 is the best" in shown.stderr
    refused = CliRunner().invoke(command, asked)
    assert isinstance(refused.exception, pi2.UserError)
    assert refused.exception.diagnostics[0].code == "P604"
