"""An evaluation as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pi2.evaluation.evaluation import Evaluation, Run
from pi2.plan.documents.quantities import approximate_bytes


def describe_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """Everything, for programs; shares are fractions."""
    found = asdict(evaluation)
    found["runs"] = [dict(run) for run in found["runs"]]
    found["layers"] = [dict(layer) for layer in found["layers"]]
    return found


def write_markdown(evaluation: Evaluation) -> str:
    """The evaluation for people: a table of runs and, with predictors, one of layers."""
    lines = [
        f"{evaluation.tokens} tokens ({evaluation.bytes} bytes) in {evaluation.windows} "
        f"window{'s' if evaluation.windows != 1 else ''} of "
        f"at most {evaluation.context}; model {evaluation.model}, plan {evaluation.digest[:12]}",
        "",
        "| run | backend | predictor | perplexity | bits per byte | change | same top token "
        "| neurons computed | active |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_write_run(run) for run in evaluation.runs),
    ]
    lines += _describe_reads(evaluation)
    if evaluation.layers:
        lines += [
            "",
            "Neurons of the dense run, and what the predictors say of them:",
            "",
            "| layer | active | predicted | recall |",
            "|---|---|---|---|",
        ]
        rows = [(layer.active, layer.predicted, layer.recall) for layer in evaluation.layers]
        for number, row in enumerate(rows):
            lines.append(_write_row(str(number), row))
        known = [recall for _, _, recall in rows if recall is not None]
        mean = (
            sum(row[0] for row in rows) / len(rows),
            sum(row[1] for row in rows) / len(rows),
            sum(known) / len(known) if known else None,
        )
        lines.append(_write_row("mean", mean))
    return "\n".join(lines)


def _describe_reads(evaluation: Evaluation) -> list[str]:
    """What runs have left out or replaced so that less is read, and what they have read."""
    lines = []
    for run in evaluation.runs:
        if run.divergence is not None:
            lines.append(f"{run.name}: mean KL divergence {run.divergence:.5f} nats")
        if run.read_bytes_token is None:
            continue
        read = approximate_bytes(round(run.read_bytes_token))
        if run.saved_bytes_token:
            saved = approximate_bytes(round(run.saved_bytes_token))
            lines.append(
                f"{run.name}: {saved} of neurons with closed gates not read, {read} read per token"
            )
        if run.scores_left_out is not None:
            lines.append(
                f"{run.name}: {run.scores_left_out:.2%} of the predictor's scores left out instead "
                f"of read; {read} read per token"
            )
        if run.replaced is None or run.left_out is None:
            continue
        lines.append(
            f"{run.name}: {run.replaced:.1%} of the experts' weight replaced by experts in memory, "
            f"{run.left_out:.1%} left out; {read} read per token"
        )
    return ["", *lines] if lines else []


def _write_run(run: Run) -> str:
    change = "-"
    if run.name != "dense":
        # The change of the mean loss in nats is, to first order, that of the perplexity in percent.
        change = f"{run.loss_change:+z.2%} ± {run.loss_change_error:.2%}"
    computed = "100 %" if run.predicted is None else _percent(run.predicted)
    return (
        f"| {run.name} | {run.backend} | {run.predictor} | {run.perplexity:.3f} | "
        f"{run.bits_per_byte:.4f} | {change} | {_percent(run.agreement)} | {computed} | "
        f"{_percent(run.active)} |"
    )


def _write_row(name: str, row: tuple[float, float, float | None]) -> str:
    return f"| {name} | {' | '.join(_percent(share) for share in row)} |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"
