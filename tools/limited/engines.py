"""One engine, once, in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from limited.plans import CONTEXT, is_routed
from limited.random_gguf import find_gguf
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.progress import ignore_progress
from pi2.store.reader import NeuronStore

PROMPT_TOKENS = 16


def run_child(job: Mapping[str, Any]) -> int:
    """Run an engine and print its figures as JSON."""
    result = run_peer(job) if job["kind"] == "llama.cpp" else run_pi2(job)
    print(json.dumps(result))
    return 0


def run_pi2(job: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt, then tokens one by one."""
    import pi2.orchestrator
    from pi2.engine.statistics import read_peak_rss_bytes
    from pi2.measuring.report import TokenSource

    model = pi2.orchestrator.load(job["plan"], set=job["set"])
    parts, shape = model._parts, model.plan.model.shape
    source = TokenSource.walk_vocabulary(shape.vocab, model.plan.model.tokenizer.eos)
    if job["prefill"]:
        parts.forward.reset()
        loaded = model.stats.flash_read_bytes
        start = time.perf_counter()
        parts.forward.prefill(source.take(job["prefill"]))
        seconds = time.perf_counter() - start
        return {
            "tokens_s": job["prefill"] / seconds,
            "flash_bytes_token": (model.stats.flash_read_bytes - loaded) / job["prefill"],
            "peak_rss_bytes": read_peak_rss_bytes(),
        }
    parts.forward.reset()
    parts.forward.prefill(source.take(PROMPT_TOKENS))
    before, times = model.stats, []
    for token in source.take(job["tokens"]).tolist():
        start = time.perf_counter()
        parts.forward.decode(token)
        times.append(time.perf_counter() - start)
    counters = model.stats - before
    result = {
        "tokens_s": len(times) / sum(times),
        "p99_over_mean": float(np.quantile(times, 0.99) / np.mean(times)),
        "wait_share": counters.waited_s / sum(times),
        "active": counters.active_share,
        "predicted": counters.predicted_share,
        "hits": counters.hit_rate,
        "skips": counters.cache_skips / max(1, counters.predicted_neurons + counters.cache_skips),
        "scores_left_out": counters.left_out_mass_share,
        "flash_bytes_token": counters.flash_read_bytes / len(times),
        "saved_bytes_token": counters.flash_saved_bytes / len(times),
        "gate_reads_token": counters.gate_reads / len(times),
        "misses_token": counters.cache_misses / len(times),
        "routing": counters.routing_recall,
        "peak_rss_bytes": read_peak_rss_bytes(),
        "load_s": model.load_s,
    }
    model.close()
    return result


def open_likeness(resolved: ResolvedPlan, closing: ExitStack) -> NeuronStore | None:
    """The store whose words and routers llama.cpp's file has: a mixture's choices decide what is
    read.  A dense model needs none."""
    if not is_routed(resolved.model):
        return None
    return closing.enter_context(NeuronStore.open(resolved.store_path))


def run_peer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run llama.cpp; it has its own count of tokens, which may be smaller."""
    from limited.llama_cpp import LlamaRecipe
    from pi2.engine.statistics import read_peak_rss_bytes
    from pi2.measuring.report import Workload

    resolved = load_plan(job["plan"])
    with ExitStack() as closing:
        recipe = LlamaRecipe(
            model=resolved.model,
            context=CONTEXT,
            threads=2,
            file=find_gguf(resolved.model, Path(job["folder"]), open_likeness(resolved, closing)),
            repack=bool(job.get("repack")),
            synthetic=True,
        )
        peer = recipe(ignore_progress)
    if job["prefill"]:
        sample = peer.run(Workload("pp", job["prefill"], 0))
    else:
        sample = peer.run(Workload("tg", job["tokens"], PROMPT_TOKENS))
    return {"tokens_s": sample.tokens_s, "peak_rss_bytes": read_peak_rss_bytes()}
