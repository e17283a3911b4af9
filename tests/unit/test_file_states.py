"""States of models whose GGUF files run as they are; `test_whole_files` compares their logits."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.weights.gguf_weights import GgufWeights
from tests.helpers.goldens import measure_error
from tests.helpers.whole_files import NEAR, WholeFile

Open = Callable[[str], WholeFile]


@pytest.fixture(scope="module")
def open_file(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return cache(lambda name: WholeFile(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2-moe", "granite-hybrid", "qwen4exp"])
def test_chunks_of_any_length_lead_to_the_same_state(name: str, open_file: Open) -> None:
    own = open_file(name)
    found = []
    for chunk in (64, 8, 5, 1):
        with own.open(**{"prefill.chunk": chunk}) as model:
            found.append(model.logits(own.prompt))
    for logits in found[1:]:
        assert measure_error(logits, found[0]) <= NEAR


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h-moe"])
def test_a_sequence_begins_with_zeros_and_its_copy_goes_on_alike(
    name: str, open_file: Open
) -> None:
    own, tokens = open_file(name), np.array([5, 9, 33, 60, 12], np.int32)
    with own.open(**{"decode.batch": 2}) as model:
        forward = model._parts.forward
        first: list[F32] = []
        for _ in range(2):
            forward.reset_all()
            first.append(forward.prefill(tokens).copy())
        forward.prefill(tokens[:2], sequence=1)
        forward.copy(0, 1)
        again = [forward.step([11], [place])[0].copy() for place in (0, 1)]
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(again[0], again[1])


@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid", "qwen4exp"])
def test_drafts_that_are_refused_leave_no_trace(name: str, open_file: Open) -> None:
    prompt = [6, 28, 84, 81, 19, 84, 90, 37] * 2
    drafts = {"decode.speculation": {"tokens": 4, "match": 1, "when": "always"}}
    ids = []
    for settings in ({}, drafts):
        with open_file(name).open(**settings) as model:
            result = model.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True).result
            ids.append(result.token_ids)
    assert ids[0] == ids[1]
    counted = result.statistics.speculation
    assert counted is not None and counted.accepted_tokens < counted.draft_tokens


def test_an_answer_is_gone_on_from_by_its_state(open_file: Open) -> None:
    own = open_file("qwen3-next")
    prompt = np.random.default_rng(1).integers(3, 90, 20).tolist()
    ids, read = [], []
    for keeps in (True, False):
        with own.open() as model:
            if keeps:
                model.keep_prefixes()
            known = prompt
            for _ in range(2):
                before = model.scheduler.rounds.prompt_tokens
                answer = model.generate(known, max_tokens=6, temperature=0.0, ignore_eos=True)
                ids.append(answer.result.token_ids)
                read.append(model.scheduler.rounds.prompt_tokens - before)
                known = [*known, *ids[-1], 7]
    assert ids[:2] == ids[2:]
    # The last token of an answer was drawn, and never read.
    assert read == [20, 2, 20, 27]


def test_the_segment_state_is_what_sequences_take(open_file: Open) -> None:
    sizes = []
    for batch in (1, 3):
        with open_file("qwen4exp").open(**{"decode.batch": batch}) as model:
            sizes.append(model.plan.plan.memory.segments.state)
            assert model._parts.budget.used_bytes["state"] == sizes[-1]
    assert sizes[1] == 3 * sizes[0] > 0


def test_matrices_that_have_several_parts_are_counted_once(open_file: Open) -> None:
    with GgufWeights.open(open_file("qwen3-next").file, has_texts=False) as source:
        names = [tensor.name for _, _, tensor in source.list_matrices()]
    assert len(names) == len(set(names))
    assert any("ssm_ba" in name for name in names)
    assert not any("conv" in name or "ssm_a." in name for name in names)
