"""Stores and plans of a row."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from limited.rows import Row
from pi2.fitting.budget import PAGE_TABLE_PART, count_libraries, round_segment
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import TOKENS_TOGETHER
from pi2.plan.documents.model import Model
from pi2.plan.reading.references import find_document

CONTEXT = 1024
"""Tokens that the KV caches of all engines hold."""
ROOT = Path(__file__).resolve().parents[2]


def prepare_store(row: Row, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Make the store unless it is there; returns it, and a plan with everything in memory."""
    model = load_model(row)
    routed = is_routed(model)
    kind = row.routing if routed else f"skew-{arguments.skew:g}"
    store: Path = arguments.store or arguments.cache / f"{model.id}-{kind}"
    arguments.cache.mkdir(parents=True, exist_ok=True)
    if not (store / "manifest.json").is_file():
        command = [sys.executable, str(ROOT / "tools" / "synthesize.py"), row.model, str(store)]
        command += ["--skew", str(arguments.skew), "--tokens", "32"]
        if routed:
            command += ["--routing", row.routing, "--order", "expert", "--layers", "1"]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
    return store, write_whole_plan(row, store, arguments.cache)


def is_routed(model: Model) -> bool:
    """Whether experts are computed whole."""
    return model.moe is not None and model.predictor is None


def load_model(row: Row) -> Model:
    """The row's model document."""
    from pi2.fitting.check import check_file

    model = check_file(find_document(row.model, "model", Path())).document
    assert isinstance(model, Model)
    return model


def write_whole_plan(row: Row, store: Path, folder: Path) -> Path:
    """Write a plan for ``store`` with everything in memory into ``folder``."""
    plan = folder / f"{store.name}.plan.toml"
    write_row_plan(row, store, plan, None)
    return plan


def write_row_plan(
    row: Row, store: Path, plan: Path, memory: int | None, runtime_bytes: int | None = None
) -> None:
    """Write a plan for ``memory`` bytes, or with everything in memory."""
    from pi2.fitting.check import check_file
    from pi2.plan.documents.device import Device
    from pi2.store.manifest import read_manifest
    from synthesis.plan_file import PlanWish, write_plan

    model_file = find_document(row.model, "model", Path())
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(device, Device)
    write_plan(
        plan,
        model=load_model(row),
        model_file=model_file,
        device=device,
        store=store,
        bundle=read_manifest(store).bundle.layout,
        store_bytes=count_bytes(store),
        wish=PlanWish(memory=memory, context=CONTEXT, runtime_bytes=runtime_bytes),
    )


def count_bytes(store: Path) -> int:
    """Size of a store."""
    return sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


def find_limit(row: Row, store: Path, whole: Path) -> int:
    """The row's limit in bytes."""
    resolved = load_plan(whole)
    segments = resolved.plan.memory.segments
    if row.limit < 0:
        limit = resolved.plan.memory.budget + int(segments.hot * (-row.limit - 1))
    else:
        limit = int(row.limit * count_bytes(store)) if row.limit < 1 else int(row.limit)
    return limit >> 20 << 20


def write_limited_plan(row: Row, store: Path, whole: Path, limit: int) -> Path:
    """Write a plan with a budget of ``limit`` bytes; ``whole``: the one with all in memory."""
    plan = whole.with_name(f"{store.name}-{limit >> 20}.plan.toml")
    # What this program's libraries take was measured; all else of a margin is for neurons.
    runtime = count_libraries(load_plan(whole).model) + limit // PAGE_TABLE_PART
    write_row_plan(row, store, plan, limit, round_segment(runtime))
    return plan


def fit_step(
    resolved: ResolvedPlan, step: Mapping[str, object], settings: Mapping[str, object]
) -> dict[str, object]:
    """What a step sets.  One without a cache keeps the least that a layer works with; one that
    needs a larger workspace takes it from the cold cache."""
    fitted = dict(step)
    segments = resolved.plan.memory.segments
    if "layers.hot" in step:
        least = resolved.model.layer_neurons * resolved.bundle.stride
        fitted["memory.segments.cold"] = f"{least} B"
    if step.get("pipeline.prefill") == "layers-first":
        chunk = settings.get("prefill.chunk", step.get("prefill.chunk"))
        chunk = resolved.plan.prefill.chunk if chunk is None else chunk
        assert isinstance(chunk, int)
        more = (TOKENS_TOGETHER // chunk - 1) * chunk * 15 * resolved.model.shape.hidden
        now, then = resolved.needs, replace_chunk(resolved, chunk).needs
        workspace = segments.workspace + more + then.workspace.bytes - now.workspace.bytes
        attention = segments.attention + then.attention.bytes - now.attention.bytes
        taken = workspace + attention - segments.workspace - segments.attention
        fitted["memory.segments.workspace"] = f"{workspace} B"
        fitted["memory.segments.attention"] = f"{attention} B"
        fitted["memory.segments.cold"] = f"{segments.cold - taken} B"
    return fitted


def replace_chunk(resolved: ResolvedPlan, chunk: int) -> ResolvedPlan:
    """The plan with another chunk of prompts."""
    prefill = resolved.plan.prefill.model_copy(update={"chunk": chunk})
    return replace(resolved, plan=resolved.plan.model_copy(update={"prefill": prefill}))


def fit_whole(row: Row, settings: Mapping[str, object]) -> dict[str, object]:
    """What the plan with everything in memory takes over from the first step."""
    step = next(iter(row.steps.values()))
    common = {key: value for key, value in step.items() if key == "prefill.activations"}
    absent = ("decode.missing_threshold", "pipeline.prefill")
    return common | {key: value for key, value in settings.items() if key not in absent}
