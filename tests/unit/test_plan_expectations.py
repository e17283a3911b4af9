"""Rules that estimate: what a token reads, whether attention hides it, which overrides count."""

from pathlib import Path
from typing import Any

import pytest

from pi2.fitting.check import check_plan, load_plan

PARTS = Path(__file__).parents[2] / "tests/plans/broken/parts"
BASE = PARTS / "base.plan.toml"
SLOW = {"device": "slow.device.toml", "decode.look_ahead": "attention"}


def find_codes(**changes: Any) -> list[str]:
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return [item.code for item in check_plan(BASE, overrides=overrides).diagnostics]


def test_a_cache_that_keeps_what_is_used_often_may_be_smaller() -> None:
    small: dict[str, Any] = {"memory__segments__cold": "4 MiB"}
    assert find_codes(**small, cache__policy="lru") == ["P204"]
    assert find_codes(**small, cache__policy="lfu") == []
    assert find_codes(memory__segments__cold="2 MiB", cache__policy="lfu") == ["P204"]
    everything: dict[str, Any] = {"layers__hot": 1.0, "layers__overrides": []}
    more: dict[str, Any] = {"memory__segments__hot": "64 MiB", "memory__segments__cold": "0 B"}
    more["memory__budget"] = "1 GiB"
    assert find_codes(**everything, **more) == []


def test_reads_hide_behind_attention_where_they_are_few() -> None:
    assert [i.code for i in check_plan(BASE, overrides=SLOW).diagnostics] == ["P237"]
    later = {**SLOW, "decode.look_ahead": "layer"}
    assert [i.code for i in check_plan(BASE, overrides=later).diagnostics] == []
    cached = {**SLOW, "memory.segments.cold": "64 MiB", "memory.budget": "1 GiB"}
    assert [i.code for i in check_plan(BASE, overrides=cached).diagnostics] == []


def test_without_figures_nothing_is_said_of_times() -> None:
    assert find_codes(decode__look_ahead="attention") == []


def override(select: str, **settings: Any) -> dict[str, Any]:
    return {"select": select, **settings}


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ([override("0-3", hot=0.1), override("2-5", hot=0.15)], []),
        ([override("0-7", hot=0.1), override("2-5", hot=0.15)], []),
        ([override("2-5", hot=0.1), override("0-7", hot=0.15)], ["P213"]),
        ([override("2-5", hot=0.1), override("0-7", split={"cpu": 1.0})], []),
        ([override("0-3", hot=0.1), override("0-1", hot=0.1), override("2-3", hot=0.1)], ["P213"]),
        ([override("0-3", hot=0.1), override("0-1", hot=0.1), override("3", hot=0.1)], []),
        ([override("0", hot=0.1, split={"cpu": 1.0}), override("0", hot=0.15)], []),
        ([override("3,3", hot=0.1)], ["P213"]),
    ],
)
def test_an_override_that_has_no_effect_is_reported(
    overrides: list[dict[str, Any]], codes: list[str]
) -> None:
    assert find_codes(layers__overrides=overrides) == codes


def test_the_later_override_counts() -> None:
    overrides = [override("0-7", hot=0.1), override("2", hot=0.15)]
    resolved = load_plan(BASE, overrides={"layers.overrides": overrides})
    assert [layer.hot for layer in resolved.layers] == [0.1, 0.1, 0.15] + [0.1] * 5
