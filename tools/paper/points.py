"""Published figures, each with the scenario that simulates it.

Sources: v1 and v3 are versions of PowerInfer-2, arXiv 2406.06282; "bars" were read from a figure
without printed values, by the order of the bars and by the means that the text states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paper.scenarios import MIXTRAL, Scenario

Measure = Literal[
    "decode tokens/s",
    "speed-up",
    "mean ms",
    "prefill tokens/s",
    "P50 ms",
    "P90 ms",
    "P99 ms",
    "J per token",
    "miss rate",
    "P99 miss rate",
    "I/O share",
]
OP12, ACE2 = "oneplus-12", "oneplus-ace-2"
L7, L13 = "prosparse-llama-2-7b", "prosparse-llama-2-13b"
TSM, BAMBOO, QWEN = "turbosparse-mistral-7b", "bamboo-7b", "sparse-qwen2-7b"
SILU = "mistral-7b"
PI2, CPU_ONLY = "PowerInfer-2", "PowerInfer-2, CPU only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published figure."""

    group: str
    scenario: Scenario
    measure: Measure
    published: float
    source: str
    prompt: int = 64
    rival: str = ""
    """System whose speed a speed-up divides by."""
    scored: bool = True
    """Whether it counts for the mean error: not where sources contradict each other."""


def _decode(
    group: str,
    system: str,
    model: str,
    published: float,
    source: str,
    memory: str | float = "half",
    device: str = OP12,
) -> Point:
    scenario = Scenario(system=system, device=device, model=model, memory=memory)
    return Point(
        group=group,
        scenario=scenario,
        measure="decode tokens/s",
        published=published,
        source=source,
    )


def list_points() -> list[Point]:
    """All published figures that the simulator is held against."""
    return [
        *_list_half(),
        *_list_sweep(),
        *_list_in_memory(),
        *_list_ablation(),
        *_list_latencies(),
        *_list_prefill(),
        *_list_energy(),
        *_list_shares(),
    ]


def list_held_out() -> list[Point]:
    """Published figures that nothing was fitted to: they were looked up when all was done.

    Some say again what fitted points say, of the same setting: their group says so.
    """
    return [*_list_tasks(), *_list_best_of(), *_list_other_papers()]


def list_predictions() -> list[Scenario]:
    """Settings of the paper whose published figures nobody used here: others can try them."""
    half = [
        Scenario(system=PI2, device=ACE2, model=model) for model in (L13, QWEN, BAMBOO, MIXTRAL)
    ]
    sweep = [
        Scenario(system=PI2, device=OP12, model=MIXTRAL, memory=float(budget))
        for budget in (8, 9, 11, 12, 14, 15, 17, 18)
    ]
    smooth = [Scenario(system=PI2, device=device, model=SILU) for device in (OP12, ACE2)]
    return [*half, *sweep, *smooth]


def _list_half() -> Iterator[Point]:
    group = "decode, half of the FFN in flash"
    v1, v3 = "v1, bars of the authors' site", "v3, Fig 7, bars"
    for model, value in ((L13, 5.37), (L7, 11.70), (TSM, 10.53), (MIXTRAL, 9.96)):
        yield _decode(group, CPU_ONLY, model, value, v1)
    for model, value in ((L13, 5.4), (QWEN, 9.5), (BAMBOO, 11.07), (MIXTRAL, 10.0)):
        yield _decode(group, PI2, model, value, v3 if model != BAMBOO else "v3, Fig 14")


def _list_sweep() -> Iterator[Point]:
    group = "decode, Mixtral-47B by memory"
    source = "v1, memory-speed figure of the authors' site"
    budgets = (7.0, 10.0, 13.0, 16.0, 19.0)
    ours = (2.13, 3.58, 6.40, 9.65, 11.68)
    for budget, value in zip(budgets, ours, strict=True):
        yield _decode(group, PI2, MIXTRAL, value, source, budget)


def _list_in_memory() -> Iterator[Point]:
    group = "decode in memory"
    yield _decode(group, PI2, BAMBOO, 20.0, "v3, Fig 12", "full")
    yield _decode(group, CPU_ONLY, TSM, 16.4, "v1, figure of the authors' site", "full")


def _list_ablation() -> Iterator[Point]:
    group = "ablation, Bamboo-7B, half of the FFN in flash"
    yield _decode(group, CPU_ONLY, BAMBOO, 9.60, "v3, Fig 14")


def _list_latencies() -> Iterator[Point]:
    scenario = Scenario(system=PI2, device=OP12, model=MIXTRAL)
    measures: tuple[tuple[Measure, float], ...] = (
        ("P50 ms", 97.42),
        ("P90 ms", 116.16),
        ("P99 ms", 140.56),
    )
    for measure, value in measures:
        yield Point(
            group="times between tokens, Mixtral-47B",
            scenario=scenario,
            measure=measure,
            published=value,
            source="v3, Table 5",
        )


def _list_prefill() -> Iterator[Point]:
    group = "prefill, half of the FFN in flash"
    ours = {
        (OP12, 128): ((L13, 108), (QWEN, 176), (BAMBOO, 161), (MIXTRAL, 20)),
        (OP12, 512): ((L13, 224), (QWEN, 429), (BAMBOO, 405), (MIXTRAL, 79)),
        (ACE2, 128): ((L13, 59), (QWEN, 90), (BAMBOO, 89), (MIXTRAL, 11)),
        (ACE2, 512): ((L13, 98), (QWEN, 174), (BAMBOO, 167), (MIXTRAL, 43)),
    }
    for (device, prompt), rows in ours.items():
        for model, value in rows:
            yield Point(
                group=group,
                scenario=Scenario(system=PI2, device=device, model=model),
                measure="prefill tokens/s",
                published=value,
                source="v3, Fig 8, bars",
                prompt=prompt,
            )
    yield Point(
        group="prefill in memory",
        scenario=Scenario(system=PI2, device=OP12, model=BAMBOO, memory="full"),
        measure="prefill tokens/s",
        published=721.0,
        source="v3, Fig 12",
        prompt=512,
    )


def _list_tasks() -> Iterator[Point]:
    """Means over role play, dialogue, mathematics and code; and what else the text states."""
    group = "restate fitted points: tasks and means"
    source = "v3, Fig 11, mean of four tasks"
    yield _decode(group, PI2, MIXTRAL, 11.6, source, 19.0)
    half = Scenario(system=PI2, device=OP12, model=MIXTRAL)
    yield Point(
        group=group, scenario=half, measure="mean ms", published=99.76, source="v3, Table 5"
    )


def _list_best_of() -> Iterator[Point]:
    """Best-of-4: several sequences at once, in memory."""
    for batch, value in ((1, 1.1), (4, 1.28)):
        yield Point(
            group="held out: Best-of-4, 4 sequences"
            if batch > 1
            else "restate fitted points: Best-of-4, 1 sequence",
            scenario=Scenario(system=PI2, device=OP12, model=BAMBOO, memory="full", batch=batch),
            rival=CPU_ONLY,
            measure="speed-up",
            published=value,
            source="v3, Fig 13",
        )


def _list_other_papers() -> Iterator[Point]:
    group = "restate fitted points: other papers"
    source = "TurboSparse, arXiv 2406.05955v2"
    yield _decode(group, PI2, MIXTRAL, 11.1, source, 19.0)


def _list_energy() -> Iterator[Point]:
    yield Point(
        group="energy, Bamboo-7B in memory",
        scenario=Scenario(system=PI2, device=OP12, model=BAMBOO, memory="full"),
        measure="J per token",
        published=0.257,
        source="v3, Table 8",
        scored=False,
    )


def _list_shares() -> Iterator[Point]:
    group = "shares"
    rows: tuple[tuple[str, str, Measure, float, str], ...] = (
        (PI2, BAMBOO, "miss rate", 0.05, "v3, sec 7.3"),
        (PI2, MIXTRAL, "miss rate", 0.035, "v3, sec 7.2"),
        (PI2, MIXTRAL, "P99 miss rate", 0.189, "v3, sec 7.2"),
        (PI2, BAMBOO, "I/O share", 0.137, "v3, sec 7.2"),
    )
    for system, model, measure, value, source in rows:
        yield Point(
            group=group,
            scenario=Scenario(system=system, device=OP12, model=model),
            measure=measure,
            published=value,
            source=source,
            scored=False,
        )
