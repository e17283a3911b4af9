"""One loaded model, used by several at the same time."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.diagnostics import UserError
from pi2.engine.answer import GenerationRequest, Line, Ticket
from pi2.engine.sampling import SamplingOptions
from tests.helpers.models import make_tiny
from tests.helpers.patience import PATIENCE_S
from tests.helpers.plans import write_plan

OPTIONS: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "ignore_eos": True}
PROMPTS = [[5 + number, 6, 7, 8][: 1 + number % 4] for number in range(16)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Tokens of each prompt, by a model that does nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    with pi2.load(write_plan(folder, make_tiny(folder))) as model:
        return [
            model.generate(ids, seed=number, **OPTIONS).result.token_ids
            for number, ids in enumerate(PROMPTS)
        ]


@pytest.mark.parametrize("batch", [1, 3])
def test_threads_that_share_model_get_what_each_would_get_alone(
    plan: Path, alone: list[tuple[int, ...]], batch: int
) -> None:
    with pi2.load(plan, set={"decode.batch": batch}) as model:
        logits = model.logits(PROMPTS[3], mode="decode")

        def run(number: int) -> tuple[int, ...]:
            if number % 8 == 7:
                assert np.allclose(model.logits(PROMPTS[3], mode="decode"), logits, atol=1e-5)
            return model.generate(PROMPTS[number], seed=number, **OPTIONS).result.token_ids

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(run, range(len(PROMPTS))))
        assert found == alone
        assert model._scheduler.running == model._scheduler.waiting == 0
        assert model._scheduler.rounds.whole.steps < sum(map(len, alone)) or batch == 1


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_generators_of_one_thread_may_take_turns(
    plan: Path, alone: list[tuple[int, ...]], batch: int
) -> None:
    with pi2.load(plan, set={"decode.batch": batch}) as model:
        generations = [
            model.generate(ids, seed=number, **OPTIONS) for number, ids in enumerate(PROMPTS[:5])
        ]
        texts = [""] * 5
        going = set(range(5))
        while going:
            for number in sorted(going):
                piece = next(generations[number], None)
                if piece is None:
                    going.discard(number)
                else:
                    texts[number] += piece
        assert [item.result.token_ids for item in generations] == alone[:5]
        assert texts == [item.result.text for item in generations]
        batched = model.generate_batch(PROMPTS[:3], seed=0, **OPTIONS)
        next(batched)
        assert model.generate(PROMPTS[4], seed=4, **OPTIONS).result.token_ids == alone[4]
        assert [item.token_ids for item in batched.result.sequences] == alone[:3]


def test_generation_that_nobody_wants_any_more_gives_its_place_to_the_next(plan: Path) -> None:
    with pi2.load(plan) as model:
        first = model.generate(PROMPTS[0], **{**OPTIONS, "max_tokens": 50})
        next(first)
        del first
        gc.collect()
        before = model._scheduler.rounds
        result = model.generate(PROMPTS[1], seed=1, **OPTIONS).result
        rounds = model._scheduler.rounds - before
        assert rounds.whole.tokens == len(result.token_ids) - 1
        closed = model.generate(PROMPTS[0], **OPTIONS)
        next(closed)
        closed.close()
        with pytest.raises(StopIteration):
            next(closed)


def test_logits_that_are_read_piece_by_piece_keep_a_place(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"prefill": {"chunk": 2}})
    ids = [9, 8, 7, 6, 5]
    with pi2.load(plan) as model:
        whole = model.logits(ids)
        pieces = model.iterate_logits(ids)
        next(pieces)
        with pytest.raises(pi2.UserError, match="P613"):
            _ = model.generate("b", **OPTIONS).result
        pieces.close()
        assert model.generate("b", **OPTIONS).result.text
    with pi2.load(plan, set={"decode.batch": 2}) as model:
        pieces = model.iterate_logits(ids)
        found = [next(pieces)]
        assert model.generate("b", **OPTIONS).result.text
        found += pieces
        assert np.allclose(np.concatenate(found), whole, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_embeddings_are_what_the_head_reads(tmp_path: Path, backend: str) -> None:
    tiny = make_tiny(tmp_path)
    plan = write_plan(tmp_path, tiny)
    names = tiny.model.tensors
    head = tiny.weights[names.embedding if tiny.model.tied_head else names.head]
    ids = list(range(5, 25))  # more than a chunk
    with pi2.load(plan, set={"backends.cpu": backend}) as model:
        logits = model.logits(ids)
        last, mean = model.embed(ids, pooling="last"), model.embed(ids)
        apart = [model.embed(ids[: n + 1], pooling="last") for n in range(len(ids))]
        with pytest.raises(UserError, match="P603"):
            model.embed([])
    assert np.corrcoef(head @ last, logits[-1])[0, 1] > 0.999
    assert np.linalg.norm(mean) == pytest.approx(1, abs=1e-6)
    # Norms of what the head reads differ little: the mean of directions is near.
    assert np.dot(mean, np.sum(apart, axis=0)) / np.linalg.norm(np.sum(apart, axis=0)) > 0.99
    with pi2.load(plan, set={"backends.cpu": "null"}) as dry:
        assert not dry.can_embed
        with pytest.raises(UserError, match="P617"):
            dry.embed([5])


def test_a_closed_model_says_so(plan: Path) -> None:
    with pi2.load(plan) as model:
        going = model.generate("a", **OPTIONS)
        next(going)
    with pytest.raises(pi2.UserError, match="P615"):
        list(going)
    with pytest.raises(pi2.UserError, match="P615"):
        model.generate("a")
    with pytest.raises(pi2.UserError, match="P615"):
        model.generate_batch(["a"])
    with pytest.raises(pi2.UserError, match="P615"):
        model.logits([1, 2])
    model.close()


def test_closing_tells_those_who_wait_in_other_threads(plan: Path) -> None:
    begun = threading.Event()
    with pi2.load(plan) as model, ThreadPoolExecutor(4) as threads:

        def run(number: int) -> None:
            for _ in model.generate([number], **{**OPTIONS, "max_tokens": 60}):
                begun.set()

        waiting = [threads.submit(run, number) for number in range(4)]
        assert begun.wait(PATIENCE_S)
        model.close()
        errors = [item.exception() for item in waiting]
    assert any(isinstance(error, pi2.UserError) for error in errors)
    for error in errors:
        assert error is None or "P615" in str(error)


def test_tasks_of_an_event_loop_share_a_model(plan: Path, alone: list[tuple[int, ...]]) -> None:
    async def run(model: pi2.LoadedModel, number: int) -> tuple[str, tuple[int, ...]]:
        generation = model.generate_async(PROMPTS[number], seed=number, **OPTIONS)
        text = "".join([piece async for piece in generation])
        assert text == generation.result.text
        return text, generation.result.token_ids

    async def run_all(model: pi2.LoadedModel) -> list[tuple[str, tuple[int, ...]]]:
        found = await asyncio.gather(*(run(model, number) for number in range(len(PROMPTS))))
        # One that is cancelled frees its place within a token.
        task = asyncio.create_task(run_long(model))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await run(model, 3) == found[3]
        async with asyncio.timeout(PATIENCE_S):
            while model._scheduler.running:
                await asyncio.sleep(0.01)
        return found

    async def run_long(model: pi2.LoadedModel) -> None:
        async for _ in model.generate_async([1], **{**OPTIONS, "max_tokens": 10**9}):
            pass

    with pi2.load(plan, set={"decode.batch": 3}) as model:
        found = asyncio.run(run_all(model))
    assert [ids for _, ids in found] == alone


def test_a_long_prompt_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"prefill": {"chunk": 4}})
    with pi2.load(plan, set={"decode.batch": 2}) as model:
        short = model.generate([5], **{**OPTIONS, "max_tokens": 20})
        next(short)
        long = model.generate(list(range(40)), **OPTIONS)
        order = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: order.append(next(long, None)))
            if not order:
                thread.start()
            while thread.is_alive():
                thread.join(0.01)
        ticket = short._tickets[0]
        # The ten pieces of the long prompt went along with ten tokens of the short one.
        assert ticket.answer is not None and ticket.answer.made_tokens >= 10


def test_clients_take_turns() -> None:
    def make(client: str) -> Ticket:
        request = GenerationRequest(
            prompt_ids=[1], max_tokens=1, stop=[], stop_ids=frozenset(), sampling=SamplingOptions()
        )
        return Ticket(request, client=client)

    line = Line()
    tickets = [make(client) for client in "aaaabbc"]
    for ticket in tickets:
        line.push(ticket)
    tickets[4].cancel()
    assert line.drop_cancelled() == [tickets[4]] and len(line) == 6
    assert [line.pop().client for _ in range(6)] == ["a", "b", "c", "a", "a", "a"]
