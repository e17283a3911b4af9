"""The rows: model, limit, goal, and the settings of the plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_CACHE = {"layers.hot": 0.0, "memory.segments.hot": "0 B", "cache.fill": False}
ALONE = {"pipeline.cluster": 1 << 20, "decode.look_ahead": "none"}
LEND = {"kv.lend": True}
AHEAD = {**LEND, "decode.look_ahead": "layer"}
FEWER = {**AHEAD, "decode.missing_threshold": 0.5}
FEWEST = {**AHEAD, "decode.missing_threshold": 1.0}
SHARE = {**AHEAD, "decode.leave_out": 0.02}
ROUTER: Mapping[str, object] = {}
DIAL = {"experts.prefer_cached": 0.2}
PROMPT = {"pipeline.prefill": "layers-first", "prefill.activations": "int8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table of goals."""

    model: str
    """Short name of a model document."""
    limit: float
    """Share of the store (below 1), share of the FFN in memory (negative), or bytes."""
    goal: str
    routing: str = "uniform"
    """How the routers of a mixture choose (`tools/synthesize.py --routing`)."""
    prefill: int = 0
    """Tokens of a prompt to time instead of generating."""
    steps: Mapping[str, Mapping[str, object]] = field(
        default_factory=lambda: {
            "pi2": AHEAD,
            "pi2, fewer reads": FEWER,
            "pi2, fewest reads": FEWEST,
            "pi2, 2 % left out": SHARE,
        }
    )
    """Settings to compare, by name."""


ROWS: Mapping[str, Row] = {
    "7b-60": Row(model="bamboo-7b", limit=0.6, goal=">= 75 % of in memory with 2 % left out"),
    "7b-40": Row(
        model="bamboo-7b", limit=0.4, goal=">= 15 x llama.cpp, >= 90 % of the firing neurons"
    ),
    "7b-50": Row(model="bamboo-7b", limit=-0.5, goal="I/O wait <= 15 %, P99/mean <= 1.8"),
    "llama2-7b-50": Row(model="relullama-7b", limit=-0.5, goal=">= 20 x llama.cpp"),
    "47b-19": Row(
        model="turbosparse-mixtral-47b", limit=19e9, goal=">= 11.68 tokens/s, >= 20 x llama.cpp"
    ),
    "47b-10.5": Row(model="turbosparse-mixtral-47b", limit=10.5e9, goal=">= 7 tokens/s"),
    "47b-7": Row(model="turbosparse-mixtral-47b", limit=7e9, goal=">= 4.5 tokens/s"),
    "30b-50": Row(
        model="qwen3-30b-a3b",
        limit=0.5,
        goal=">= 2.5 tokens/s, >= 4 x llama.cpp, reads at >= 85 % of the disk's rate",
        steps={"pi2": ROUTER},
    ),
    "30b-35": Row(
        model="qwen3-30b-a3b",
        limit=0.35,
        goal=">= 2.2 tokens/s, >= 4 x llama.cpp, reads at >= 85 % of the disk's rate",
        steps={"pi2": ROUTER},
    ),
    "30b-50-published": Row(
        model="qwen3-30b-a3b",
        limit=0.5,
        routing="published",
        goal=">= 8.5 tokens/s, >= 50 % of in memory; with a dial >= 1.5 x exact",
        steps={"pi2": ROUTER, "pi2, dial": DIAL},
    ),
    "30b-35-published": Row(
        model="qwen3-30b-a3b",
        limit=0.35,
        routing="published",
        goal=">= 5.5 tokens/s, >= 30 % of in memory; with a dial >= 1.5 x exact",
        steps={"pi2": ROUTER, "pi2, dial": DIAL},
    ),
    "8x7b-50": Row(
        model="mixtral-8x7b",
        limit=0.5,
        goal=">= 85 % of the disk's sequential rate",
        steps={"pi2": ROUTER},
    ),
    "gpt-oss-60": Row(
        model="gpt-oss-20b", limit=0.6, goal=">= 4 x llama.cpp at its best", steps={"pi2": ROUTER}
    ),
    "prefill-30b-50": Row(
        model="qwen3-30b-a3b",
        limit=0.5,
        goal=">= 3 x llama.cpp with prompts of 512",
        prefill=512,
        steps={"pi2": {"prefill.chunk": 512}},  # each expert has 32 tokens of them
    ),
    "prefill-7b-50": Row(
        model="bamboo-7b",
        limit=-0.5,
        goal=">= 70 % of the prefill in memory",
        prefill=512,
        steps={"pi2": PROMPT},
    ),
    "phases-7b-50": Row(
        model="bamboo-7b",
        limit=-0.5,
        goal="two phases read fewer bytes in more requests",
        steps={"one phase": AHEAD, "two phases": {**AHEAD, "pipeline.phases": 2}},
    ),
    "scales-7b-50": Row(
        model="bamboo-7b",
        limit=-0.5,
        goal="resident scales read fewer bytes (--beside a store that has them)",
        steps={"pi2": AHEAD},
    ),
    "ablation-7b-50": Row(
        model="bamboo-7b",
        limit=-0.5,
        goal="each step faster than the one before",
        steps={
            "bundles": {**NO_CACHE, **ALONE, "io.engine": "pread", "cache.policy": "lru"},
            "cache": {**LEND, **ALONE, "io.engine": "pread"},
            "pipeline": AHEAD,
            "fewer reads": FEWER,
        },
    ),
}
