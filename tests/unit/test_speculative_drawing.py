"""From logits to tokens, alone and with guesses."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from pi2.arrays import F32, I32, I64
from pi2.diagnostics import UserError
from pi2.engine.answer import GenerationRequest, Ticket, TokenDecoder
from pi2.engine.opening import Touched
from pi2.engine.sampling import Repeats, Sampler, SamplingOptions
from pi2.engine.scheduler import Scheduler
from pi2.engine.sequences import Sequences
from pi2.engine.speculation import Speculation

CHANCES = np.array(
    [[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]
)
"""Chances of every token after every token."""


class Chain:
    """A model whose next token depends on the last one alone."""

    program = None
    waited_s, touched_bytes = 0.0, 0

    def expect(self, end: int) -> None: ...

    def abandon(self) -> None: ...

    def join(self, given: F32) -> None: ...

    def read_head_input(self, first: int) -> F32:
        raise NotImplementedError

    def observe(self, observer: object) -> None: ...

    def count_work(self) -> dict[str, float | None]:
        return {}

    def prefill(self, tokens: I32, sequence: int, position: int, progress: object) -> None:
        self.piece = tokens.tolist()

    def logits(self, first: int) -> F32:
        return self._look_up(self.piece[first:])

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        return self._look_up(tokens.tolist())

    def _look_up(self, tokens: Sequence[int]) -> F32:
        return np.log(CHANCES[list(tokens)]).astype(np.float32)


class Stubborn:
    """Guesses the same tokens, whatever has come."""

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        return [2, 0, 0][:most]

    def forget(self, place: int) -> None: ...


def draw_texts(count: int) -> Counter[tuple[int, ...]]:
    """Texts of four tokens after token 0, drawn while the same is guessed over and over."""
    scheduler = Scheduler(
        Sequences(Chain(), context=64, piece=64),
        context=64,
        piece_tokens=8,
        make_decoder=lambda request: TokenDecoder(lambda ids: ""),
        speculation=Speculation(
            Stubborn(), tokens=3, step_tokens=4, count_bytes=lambda: Touched(0, 0), always=True
        ),
    )
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        request = GenerationRequest(
            prompt_ids=[0],
            max_tokens=4,
            stop=(),
            stop_ids=frozenset(),
            sampling=SamplingOptions(temperature=1.0, seed=seed),
        )
        ticket = Ticket(request)
        scheduler.submit(ticket)
        while not ticket.ended:
            scheduler.drive()
        assert ticket.result is not None
        found[ticket.result.token_ids] += 1
    assert scheduler.speculation is not None
    assert scheduler.speculation.counters.accepted_tokens > count / 4
    return found


def measure_distance(found: Counter[tuple[int, ...]]) -> float:
    """Chi squared of texts by degrees of freedom: about 1 if chances are the model's."""
    count, total = sum(found.values()), 0.0
    for text in np.ndindex(4, 4, 4, 4):
        chance = float(np.prod([CHANCES[a, b] for a, b in zip((0, *text), text, strict=False)]))
        total += (found[text] - count * chance) ** 2 / (count * chance)
    return total / 255


def test_texts_are_drawn_as_often_as_the_model_says() -> None:
    found = draw_texts(4000)
    # One in a million of right ones is above: the standard deviation is 0.09.
    assert measure_distance(found) < 1.45
    # Were guesses kept a little more often than they are drawn, it would show.
    favoured = Counter(found)
    for text, count in found.items():
        if text[1] != 2 and count > 4:
            moved = count // 4
            favoured[text] -= moved
            favoured[text[0], 2, *text[2:]] += moved
    assert measure_distance(favoured) > 2


LOGITS = np.array([0.0, 3.0, 2.0, 1.0, -5.0], np.float32)
NOTHING = np.array([], np.int64)


def draw(options: SamplingOptions, times: int = 400) -> np.ndarray:
    sampler = Sampler(options)
    return np.bincount([sampler.sample(LOGITS, NOTHING) for _ in range(times)], minlength=5)


def test_temperature_zero_is_greedy() -> None:
    assert draw(SamplingOptions(), 5).tolist() == [0, 5, 0, 0, 0]


def test_a_seed_gives_the_same_tokens_again() -> None:
    options = SamplingOptions(temperature=1.0, seed=7)
    first, second = Sampler(options), Sampler(options)
    draws = [(first.sample(LOGITS, NOTHING), second.sample(LOGITS, NOTHING)) for _ in range(50)]
    assert all(a == b for a, b in draws)
    assert len({a for a, _ in draws}) > 1


def test_frequencies_follow_the_softmax() -> None:
    counts = draw(SamplingOptions(temperature=1.0, seed=0), 4000) / 4000
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert np.abs(counts - expected).max() < 0.03


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (SamplingOptions(temperature=5.0, top_k=2, seed=0), {1, 2}),
        (SamplingOptions(temperature=50.0, top_k=4, seed=0), {0, 1, 2, 3}),
        (SamplingOptions(temperature=50.0, top_k=9, seed=0), {0, 1, 2, 3, 4}),
        (SamplingOptions(temperature=1.0, top_p=0.6, seed=0), {1}),
        (SamplingOptions(temperature=1.0, top_p=0.7, seed=0), {1, 2}),
        (SamplingOptions(temperature=1.0, min_p=0.3, seed=0), {1, 2}),
        (SamplingOptions(temperature=1.0, min_p=1.0, seed=0), {1}),
    ],
)
def test_unlikely_tokens_are_cut(options: SamplingOptions, allowed: set[int]) -> None:
    assert set(np.flatnonzero(draw(options))) == allowed


def test_a_repeated_token_becomes_less_likely() -> None:
    assert Sampler(SamplingOptions(repetition_penalty=2.0)).sample(LOGITS, np.array([1, 1])) == 2


@pytest.mark.parametrize(("window", "expected"), [(-1, 2), (0, 1), (1, 1), (2, 2), (9, 2)])
@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_look_back_as_far_as_their_window(
    penalty: dict[str, float], window: int, expected: int
) -> None:
    sampler = Sampler(SamplingOptions(**penalty, penalty_window=window))  # type: ignore[arg-type]
    assert sampler.sample(LOGITS, np.array([0, 1, 3]), prompt=1) == expected


def apply_dry(seen: list[int], breaker: int | None = None, **options: float) -> list[float]:
    """What DRY subtracts from the scores of tokens 0 to 5."""
    sampler = Sampler(
        SamplingOptions(dry_multiplier=1.0, dry_base=2.0, **options),  # type: ignore[arg-type]
        lambda token: "x\n" if token == breaker else "x",
    )
    scores = np.zeros(6)
    sampler._subtract_dry(scores, np.array(seen))
    return (-scores).tolist()


def test_dry_penalises_what_would_lengthen_a_repeated_sequence() -> None:
    """1 2 3 came before: after 1 2, token 3 gets less, and less still after a longer sequence."""
    assert apply_dry([1, 2, 3, 4, 1, 2]) == [0, 0, 0, 1, 0, 0]
    assert apply_dry([0, 1, 2, 3, 4, 0, 1, 2]) == [0, 0, 0, 2, 0, 0]
    # The longest sequence before a token counts: 5 1 2 3, and 1 2 3.
    assert apply_dry([5, 1, 2, 3, 0, 1, 2, 3, 5, 1, 2]) == [0, 0, 0, 2, 0, 0]
    # A sequence of equal tokens overlaps with itself.
    assert apply_dry([1, 1, 1, 1]) == [0, 2, 0, 0, 0, 0]
    assert apply_dry([2, 3, 4, 2]) == [0] * 6
    assert apply_dry([2, 3, 4, 2], dry_allowed_length=1) == [0, 0, 0, 1, 0, 0]
    assert apply_dry([1, 2, 3, 4, 1, 2], dry_penalty_last_n=5) == [0] * 6
    # Token 1 ends a sequence: 2 is shorter than two tokens.
    assert apply_dry([0, 1, 2, 3, 4, 0, 1, 2], breaker=1) == [0] * 6
    assert apply_dry([0, 1, 2, 3, 4, 0, 1, 2], breaker=0) == [0, 0, 0, 1, 0, 0]
    assert apply_dry([1] * 300)[1] == pytest.approx(3.4e38, rel=0.01)


def count_until_repeats(tokens: list[int]) -> int | None:
    repeats, ids = Repeats(), np.array(tokens)
    return next((n for n in range(1, len(ids) + 1) if repeats.note(ids[:n])), None)


def test_an_answer_that_only_repeats_is_found() -> None:
    assert count_until_repeats([7] * 500) == 160
    assert count_until_repeats([9, 9, *list(range(20)) * 20]) == 162
    assert count_until_repeats(list(range(41)) * 20) == 8 * 41
    assert count_until_repeats(list(range(65)) * 20) is None
    assert count_until_repeats([*list(range(20)) * 6, *range(21), *list(range(20)) * 7]) is None


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"top_k": -1}, {"seed": -1}]
    + [{"penalty_window": -2}, {"dry_multiplier": -1.0}, {"dry_base": 0.5}]
    + [{"dry_allowed_length": 0}, {"dry_penalty_last_n": -2}],
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingOptions(**wrong)  # type: ignore[arg-type]
