"""Texts are drawn as often as the model says, whatever is guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.engine.answer import GenerationRequest, SamplingOptions
from pi2.engine.forward import Sequences
from pi2.engine.scheduler import Scheduler, Ticket
from pi2.engine.speculation import Speculation, Touched
from pi2.engine.text import TokenDecoder

CHANCES = np.array(
    [[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]
)
"""Chances of every token after every token."""


class Chain(Sequences):
    """A model whose next token depends on the last one alone."""

    def __init__(self) -> None:
        super().__init__(context=64, sequences=1)

    def abandon(self) -> None: ...

    def prefill(
        self,
        tokens: I32,
        *,
        all_logits: bool = False,
        take: Callable[[F32], None] | None = None,
        progress: Callable[[float], None] = lambda share: None,
        end: int = 0,
        sequence: int = 0,
    ) -> F32:
        self.positions[sequence] += len(tokens)
        return self._look_up(tokens[-1:].tolist())

    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        for sequence in sequences:
            self.positions[sequence] += 1
        return self._look_up(tokens)

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
        Chain(),
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
    """Chi squared of texts, divided by their degrees of freedom: about 1 where chances are those
    of the model."""
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
