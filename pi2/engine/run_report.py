"""What a run says of itself at its end, for machines and for people."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from pi2.engine.accounts import name_unit, write_percent
from pi2.engine.answer import SequenceResult
from pi2.engine.generation import BatchResult, GenerationResult
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.statistics import RunStatistics, SpeculationCounters, divide, read_peak_rss_bytes
from pi2.machine import detect_cpu
from pi2.plan.documents.plan import Decode
from pi2.plan.documents.quantities import approximate_bytes


def describe_units(model: LoadedModel) -> dict[str, dict[str, Any]]:
    """The work of each unit since loading, the sparse one first; empty if there is one unit."""
    units, predicted = model.units, model.stats.predicted_neurons
    if not units:
        return {}
    # Without a predictor the sparse unit computes everything that is left, and counts nothing.
    counted = predicted + sum(unit.computed_neurons for unit in units) if predicted else 0
    owned = sum(unit.owned_share for unit in units)
    found: dict[str, dict[str, Any]] = {
        model.plan.sparse_unit: {
            "owned_share": round(1.0 - owned, 4),
            "computed_share": _rounded(divide(predicted, counted)),
            "busy_s": None,
            "lost": None,
            "padding": None,
            "emulated": False,
        }
    }
    for unit in units:
        found[unit.name] = {
            "owned_share": round(unit.owned_share, 4),
            "computed_share": _rounded(divide(unit.computed_neurons, counted)),
            "busy_s": round(unit.busy_s, 4),
            "lost": unit.lost,
            "padding": _rounded(unit.padding),
            "emulated": unit.emulated,
        }
    return found


def summarise_units(units: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What `describe_units` found, in a line, and a line for each unit that was lost."""
    if not units:
        return
    parts = []
    for name, unit in units.items():
        shown = name_unit(name, emulated=bool(unit.get("emulated")))
        text = f"{shown} owns {unit['owned_share']:.0%} of the neurons"
        if unit["computed_share"] is not None:
            text += f" and computed {unit['computed_share']:.0%} of those computed"
        if unit["busy_s"] is not None:
            text += f", busy {unit['busy_s']:.2f} s"
        if unit.get("padding") is not None:
            text += f", {unit['padding']:.0%} of its work was padding"
        parts.append(text)
    yield f"units: {' · '.join(parts)}"
    for name, unit in units.items():
        if unit["lost"] is not None:
            yield f"note: the unit {name} was lost, the run went on without it: {unit['lost']}"


def describe_speculation(
    model: LoadedModel, counters: SpeculationCounters
) -> dict[str, Any] | None:
    """All counters of drafts, for machines; None if the plan has no drafts."""
    if model.scheduler.speculation is None:
        return None
    found = asdict(counters) | {"accepted_by_position": list(counters.accepted_by_position)}
    for kind, part in product(("drafted", "plain"), ("bytes", "flash_bytes")):
        value = _each(found.pop(f"{kind}_{part}"), found[f"{kind}_tokens"])
        found[f"{kind}_{part}_per_token"] = value
    return found


def summarise_speculation(found: dict[str, Any]) -> str:
    drafted, plain = found["drafted_bytes_per_token"], found["plain_bytes_per_token"]
    if not found["draft_tokens"]:
        return "speculation: nothing was drafted"
    share = found["accepted_tokens"] / found["draft_tokens"]
    line = (
        f"speculation: {found['draft_tokens']} tokens drafted, {share:.1%} of them kept · "
        f"{found['drafted_tokens'] / found['drafted_steps']:.2f} tokens a step, "
        f"{approximate_bytes(drafted)} touched for each, "
        f"{approximate_bytes(found['drafted_flash_bytes_per_token'])} of it on flash"
    )
    if plain is not None:
        line += (
            f"; without drafts {approximate_bytes(plain)}, "
            f"{approximate_bytes(found['plain_flash_bytes_per_token'])} of it on flash "
            f"({found['plain_tokens']} tokens)"
        )
    return line


def _each(total: float, count: int) -> int | None:
    value = divide(total, count)
    return None if value is None else round(value)


MANY_FAULTS = 256
"""Pages (1 MiB) from which faults are reported: a run touches pages of libraries for the first
time, and these count as well."""


def describe_run(model: LoadedModel, result: GenerationResult) -> dict[str, Any]:
    tokens = result.prompt_tokens + len(result.token_ids)
    return {**describe_sequence(result), **_describe_model(model, result.statistics, tokens)}


def describe_batch(model: LoadedModel, result: BatchResult) -> dict[str, Any]:
    """Everything that is known of a run with several sequences, for machines."""
    tokens = result.rounds.prompt_tokens + sum(len(x.token_ids) for x in result.sequences)
    return {
        "sequences": [describe_sequence(item) for item in result.sequences],
        "batch": model.plan.plan.decode.batch,
        "mean_sequences": _rounded(result.mean_sequences),
        "phases": [
            {
                "sequences": sequences,
                "steps": phase.steps,
                "tokens": phase.tokens,
                "tokens_s": _rounded(divide(phase.tokens, phase.seconds)),
            }
            for sequences, phase in sorted(result.rounds.phases.items(), reverse=True)
        ],
        "best": result.best,
        "prefill_tokens_s": _rounded(result.prefill_tokens_s),
        "decode_tokens_s": _rounded(result.decode_tokens_s),
        **_describe_model(model, result.statistics, tokens),
    }


def _describe_bound(model: LoadedModel, statistics: RunStatistics, tokens: int) -> dict[str, Any]:
    """What a run of so many tokens read, and what took its time."""
    shares = model.account.split_time(statistics, lambda: model.memory_bytes_s)
    return {
        "read_bytes_per_token": round(divide(statistics.flash_read_bytes, tokens) or 0.0),
        "bound_by": model.account.name_bound(shares),
        "time_shares": {cause: round(share, 4) for cause, share in shares.items()},
        "memory_bytes_s": model.memory_bytes_s and round(model.memory_bytes_s) if shares else None,
    }


def list_features(model: LoadedModel) -> list[str]:
    """The processor's features that kernels are chosen by."""
    stated = model.plan.device.units[model.plan.sparse_unit].features
    return sorted(detect_cpu().features if stated is None else stated)


def list_deviations(model: LoadedModel, statistics: RunStatistics) -> list[str]:
    """How a run computed less, or more coarsely, than the model states; none: it is exact."""
    plan = model.plan.plan
    found = []
    if plan.decode.predictor == "low-rank":
        found.append("low-rank predictors choose the neurons")
    if model.plan.thresholds is not None and plan.decode.predictor in ("gate", "router"):
        found.append("thresholds of [sparsity] leave neurons out")
    for share, what in (
        (statistics.replaced_share, "of the experts' weight replaced"),
        (statistics.left_out_share, "of the experts' weight left out"),
        (statistics.left_out_mass_share, "of the predictor's scores left out"),
    ):
        if share:
            found.append(f"{share:.1%} {what}")
    found += model.account.list_deviations()
    if plan.kv.type == "int8":
        found.append("the KV cache is int8")
    return found


def describe_sequence(result: SequenceResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "ttft_s": round(result.ttft_s, 4),
        "prefill_tokens_s": _rounded(result.prefill_tokens_s),
        "decode_tokens_s": _rounded(result.decode_tokens_s),
        "mean_log_probability": _rounded(result.mean_log_probability),
    }


def _describe_model(model: LoadedModel, statistics: RunStatistics, tokens: int) -> dict[str, Any]:
    """What the model did in a run of so many tokens."""
    pressure = model.pressure
    return {
        "dry_run": not model.account.is_timed,
        "load_s": round(model.load_s, 4),
        "loaded_bytes": model.loaded_bytes,
        "expected_tokens_s": model.expected and _rounded(model.expected.tokens_s),
        "active_share": _rounded(statistics.active_share),
        "predicted_share": _rounded(statistics.predicted_share),
        "cache_hit_rate": _rounded(model.account.find_hit_rate(statistics)),
        "expert_weight_replaced": _rounded(statistics.replaced_share),
        "expert_weight_left_out": _rounded(statistics.left_out_share),
        "score_mass_left_out": _rounded(statistics.left_out_mass_share),
        "exact": not (deviations := list_deviations(model, statistics)),
        "deviations": deviations,
        "foreseen_share": _rounded(statistics.routing_recall),
        "tokens_without_ahead": statistics.tokens_without_ahead,
        "speculation": describe_speculation(model, statistics.speculation),
        "flash_read_bytes": model.stats.flash_read_bytes,
        "flash_read_generation_bytes": statistics.flash_read_bytes,
        "flash_saved_generation_bytes": statistics.flash_saved_bytes,
        "units": describe_units(model),
        "io_verify": model.plan.plan.io.verify,
        "io_engine": model.io_engine,
        "io_engine_refused": model.engine_fallback,
        "direct_reads_refused": model.fallback,
        "peak_rss_bytes": read_peak_rss_bytes(),
        "segments": {name: asdict(use) for name, use in model.measure_segments().items()},
        "major_faults": pressure.major_faults,
        "swapped_bytes": pressure.swapped_bytes,
        "locked_bytes": pressure.locked_bytes,
        "memory_lock": model.plan.plan.memory.lock,
        "memory_lock_refused": model.lock_fallback,
        "budget_changes": list(model.changes),
        "budget_bytes": model.plan.plan.memory.budget,
        "plan_digest": model.plan.digest,
        "cpu_features": list_features(model),
        **_describe_bound(model, statistics, tokens),
    }


def describe_expected(tokens_s: str, bound: str) -> str:
    """A line for people before a run, and about a plan."""
    return f"expected: {tokens_s} tokens/s without drafts, bound by {bound}"


def _describe_load(run: Mapping[str, Any]) -> str:
    seconds, size = run["load_s"], run["loaded_bytes"]
    return f"{seconds:.2f} s" + (f" ({size / seconds / 1e9:.1f} GB/s)" if size >= 1e8 else "")


_ENDS = {
    "eos": "complete",
    "stop": "ended by --stop",
    "length": "ended by --max-tokens",
    "context": "ended by kv.context",
    "repeats": "ended because it only repeats, sampling.end_repeats = false lets it",
}


def summarise_run(model: LoadedModel, result: GenerationResult, *, whole: bool = True) -> str:
    """A summary of a run for people, in a few lines, or ``whole``."""
    run = describe_run(model, result)
    decoded = len(result.token_ids)
    end = _ENDS[result.finish_reason]
    first = (
        f"load {_describe_load(run)} · first token {run['ttft_s'] * 1e3:.0f} ms · "
        f"prefill {_rate(run['prefill_tokens_s'])} ({result.prompt_tokens} tokens) · "
        f"decode {_rate(run['decode_tokens_s'])} ({decoded} tokens, {end})"
    )
    return _summarise(model, run, first, whole)


def summarise_batch(model: LoadedModel, result: BatchResult, *, whole: bool = True) -> str:
    """A summary of a run with several sequences for people, in a few lines, or ``whole``."""
    run = describe_batch(model, result)
    prompts = result.rounds.prompt_tokens
    decoded = sum(len(item.token_ids) for item in result.sequences)
    speed, mean = result.decode_tokens_s, result.mean_sequences
    each = "" if speed is None or mean is None else f", {_rate(speed / mean)} each"
    first = (
        f"load {_describe_load(run)} · {len(result.sequences)} sequences, "
        f"{'-' if mean is None else f'{mean:.1f}'} at a time · "
        f"prefill {_rate(run['prefill_tokens_s'])} ({prompts} tokens) · "
        f"decode {_rate(speed)}{each} ({decoded} tokens)"
    )
    lines = [first, *_list_phases(run)]
    if result.best is not None:
        lines.append(_describe_best(result, result.best))
    return _summarise(model, run, "\n".join(lines), whole)


def _list_phases(run: dict[str, Any]) -> list[str]:
    parts = [
        f"{phase['sequences']} at a time {_rate(phase['tokens_s'])} ({phase['tokens']} tokens)"
        for phase in run["phases"]
    ]
    return [" · ".join(parts)] if len(parts) > 1 else []


def _describe_best(result: BatchResult, best: int) -> str:
    values = ", ".join(f"{item.mean_log_probability:.3f}" for item in result.sequences)
    return (
        f"number {best + 1} of {len(result.sequences)} is the best: its tokens have the highest "
        f"mean log probability ({values})"
    )


def _summarise(model: LoadedModel, run: dict[str, Any], first: str, whole: bool) -> str:
    """The labelled lines of a summary; the first one is about speed."""
    peak, budget = run["peak_rss_bytes"], run["budget_bytes"]
    verdict = "within" if peak <= budget else "ABOVE"
    lines = [
        *model.account.remarks,
        f"speed: {first}",
        f"memory: peak memory {approximate_bytes(peak)}, {verdict} the budget of "
        f"{approximate_bytes(budget)}",
        *model.account.list_reads(run),
        "exact: " + ("yes" if run["exact"] else f"no, {'; '.join(run['deviations'])}"),
    ]
    if run["bound_by"] is not None:
        lines.append(f"bound by: {model.account.describe_bound(run)}")
    if whole:
        lines.append(f"segments: {_describe_segments(run['segments'])}")
    lines += model.account.list_weights(run, whole=whole)
    if whole:
        lines.append(f"plan: digest {model.plan.digest[:12]}")
        lines.append(f"processor: {' '.join(run['cpu_features']) or 'no features that count'}")
    if run["expert_weight_replaced"] is not None:
        replaced, gone = run["expert_weight_replaced"], run["expert_weight_left_out"]
        lines.append(
            f"experts: {write_percent(replaced)} of their weight replaced by experts in memory, "
            f"{write_percent(gone)} left out"
        )
    if run["score_mass_left_out"] is not None:
        lines.append(_describe_left_out(model.plan.plan.decode, run["score_mass_left_out"]))
    if whole and run["foreseen_share"] is not None:
        stopped = run["tokens_without_ahead"]
        rest = f"; off for {stopped} tokens, because it did not pay" if stopped else ""
        named = write_percent(run["foreseen_share"])
        lines.append(f"prefetching: named {named} of the experts that computed{rest}")
    if run["speculation"] is not None and (whole or run["speculation"]["draft_tokens"]):
        lines.append(summarise_speculation(run["speculation"]))
    lines += summarise_units(run["units"])
    lines += model.account.list_notes()
    lines += summarise_pressure(run)
    if run["memory_lock_refused"]:
        lines.append(f"note: memory is not locked: {run['memory_lock_refused']}")
    if run["direct_reads_refused"]:
        lines.append(f"note: reads go through the page cache: {run['direct_reads_refused']}")
    return "\n".join(lines)


def _describe_segments(segments: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for name, use in segments.items():
        taken = use["taken_bytes"]
        shown = "unknown" if taken is None else approximate_bytes(taken)
        parts.append(f"{name} {shown} of {approximate_bytes(use['stated_bytes'])}")
    return " · ".join(parts)


def _describe_left_out(decode: Decode, share: float) -> str:
    stated = decode.leave_out
    allowed = "" if stated is None else f" (decode.leave_out = {stated:g})"
    return f"left out: {write_percent(share)} of the predictor's scores, instead of read{allowed}"


def summarise_pressure(run: Mapping[str, Any]) -> list[str]:
    """A line about memory that the system has taken away, if it has."""
    taken = []
    if (run["major_faults"] or 0) >= MANY_FAULTS:
        taken.append(f"{run['major_faults']} pages were read again after loading (major faults)")
    if run["swapped_bytes"]:
        taken.append(f"{approximate_bytes(run['swapped_bytes'])} are swapped or compressed")
    return [f"memory pressure: {', '.join(taken)}"] if taken else []


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"
