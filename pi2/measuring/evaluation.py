"""How well a plan's model predicts text: perplexity, agreement with the dense model, recall."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, F64
from pi2.backends.executor import Executor
from pi2.backends.protocol import BuildRequest
from pi2.diagnostics import UserError
from pi2.engine.layer_model import DenseObserver
from pi2.engine.loaded_model import LoadedModel
from pi2.measuring.predictors import LayerRecall, RecallCounter, can_compare
from pi2.measuring.texts import (
    Mode,
    Passages,
    Scores,
    Window,
    compute_log_chances,
    compute_losses,
    iterate_scored,
    score_windows,
)
from pi2.orchestrator import load
from pi2.plan.documents.quantities import approximate_bytes, write_table
from pi2.progress import Progress, ignore_progress
from pi2.refit import FittedPlan

_FLOOR_TOKENS = 512
"""Tokens that tell how far another engine is from itself."""

PEER = "llama.cpp"
"""An entry of ``against``: the same file, computed by another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of running over the text."""

    name: str
    """``dense``, the plan's predictor or method of sparsity, or the name of the comparison."""
    backend: str
    predictor: str
    """``none`` is dense."""
    digest: str
    """SHA-256 of the plan as it was run."""
    perplexity: float
    """exp of the mean loss of a token."""
    bits_per_byte: float
    agreement: float
    """Share of tokens for which it finds the same token most likely as the dense run."""
    loss_change: float
    """Mean loss minus the dense run's, in nats."""
    loss_change_error: float
    """Standard error of ``loss_change``, token by token."""
    predicted: float | None = None
    """Share of neurons that were computed; None where all were."""
    active: float | None = None
    """Share of neurons with a non-zero activation among all, if only some were computed."""
    replaced: float | None = None
    """Share of routing weight moved to experts in memory; None if routing is exact."""
    left_out: float | None = None
    """Share whose experts were left out."""
    scores_left_out: float | None = None
    """Share of predictor scores not worth a read; None if the plan reads all."""
    saved_bytes_token: float | None = None
    """Bytes of neurons that were not in memory and not read, because their gates were closed."""
    divergence: float | None = None
    """Mean KL divergence from another engine's distributions on the same file, in nats."""
    floor: tuple[float, float] | None = None
    """That engine's distance from itself, a long step against single tokens: mean KL divergence in
    nats, and share of equal top tokens."""
    read_bytes_token: float | None = None
    """Bytes of neurons read per token, if only some were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All runs of a plan over a text."""

    plan: str
    model: str
    digest: str
    tokens: int
    """Number of scored tokens."""
    bytes: int
    """Number of UTF-8 bytes of their text."""
    windows: int
    context: int
    """Length of the longest window in tokens."""
    runs: tuple[Run, ...]
    layers: tuple[LayerRecall, ...]
    """Predictors by layer, on the inputs of the dense run; empty without low-rank predictors."""


@dataclass(frozen=True, slots=True)
class _Text:
    texts: Sequence[str]
    ids: Sequence[list[int]]
    """Tokens of each text."""
    windows: list[Window]
    scored_bytes: int
    dense: Scores


def evaluate_plan(
    plan: Path | FittedPlan,
    passages: Passages,
    *,
    against: Sequence[str] = (),
    progress: Progress = ignore_progress,
) -> Evaluation:
    """Run ``plan`` densely, and with its predictor, over ``passages``; ``against`` adds
    ``reference``, ``gate``, ``low-rank``, ``llama.cpp`` or another plan with the same tokenizer.
    UserError P660 and P661 for the text, P663 for plans that cannot be compared."""
    path, settings = (plan, {}) if isinstance(plan, Path) else plan.origin
    counter: RecallCounter | None = None

    def observe(executor: Executor, request: BuildRequest) -> DenseObserver | None:
        nonlocal counter
        if not can_compare(request):
            return None
        counter = RecallCounter(request)
        return DenseObserver(executor, request, counter)

    with load(plan, set=settings, progress=progress, make_observer=observe) as model:
        texts, cut = passages.texts, passages.cut(model)
        if counter is not None:
            counter.threshold = model.plan.plan.decode.threshold
        dense = score_windows(model, cut, "prefill", lambda share: progress("dense", share))
        ids = [model.encode_text(text) for text in texts]
        scored = (model.decode(window.tokens[window.first_scored :]) for window in cut)
        size = max(1, sum(len(text.encode()) for text in scored))
        text = _Text(texts, ids, cut, size, dense)
        runs = [_describe(model, "dense", "none", dense, text)]
        if counter is not None:
            model._parts.executor.observe(None)
        if PEER in against:
            scores, distance, floor = score_beside(model, cut, lambda share: progress(PEER, share))
            found = _describe(model, PEER, "none", scores, text)
            runs.append(replace(found, backend=PEER, divergence=distance, floor=floor))
        if _leaves_out(model):
            runs.append(_run(model, _name_run(model), "decode", text, progress))
        digest, model_id = model.plan.digest, model.plan.model.id
        kinds = list(model.plan.plan.backends)
    for item in against:
        if item == PEER:
            continue
        runs += _compare(path, settings, kinds, item, text, progress)
    return Evaluation(
        plan=str(path),
        model=model_id,
        digest=digest,
        tokens=len(dense.losses),
        bytes=text.scored_bytes,
        windows=len(cut),
        context=max(len(window.tokens) for window in cut),
        runs=tuple(runs),
        layers=tuple(counter.describe_layers()) if counter is not None else (),
    )


def _leaves_out(model: LoadedModel) -> bool:
    """Whether a generated token may compute less than a prompt's."""
    plan = model.plan.plan
    return not plan.decode.names_all or plan.experts.is_lossy


def _name_run(model: LoadedModel) -> str:
    plan = model.plan.plan
    if plan.decode.names_all:
        return "experts"
    cut = model.plan.thresholds is not None and plan.decode.predictor == "gate"
    return plan.sparsity.method if cut and plan.sparsity is not None else plan.decode.predictor


def _compare(
    plan: Path,
    settings: Mapping[str, object],
    kinds: Sequence[str],
    item: str,
    text: _Text,
    progress: Progress,
) -> list[Run]:
    """The runs of one entry of ``against``."""
    if item == "reference":
        backends = {f"backends.{kind}": "reference" for kind in kinds}
        with load(plan, set={**settings, **backends}, progress=progress) as model:
            return [_run(model, "reference", "prefill", text, progress)]
    if item in ("gate", "low-rank"):
        with load(plan, set={**settings, "decode.predictor": item}, progress=progress) as model:
            return [_run(model, item, "decode", text, progress)]
    other = Path(item)
    if not other.exists():
        raise UserError.of(
            "P663",
            f"cannot compare with {item!r}",
            help="use reference, gate, low-rank, or the path of another plan",
        )
    with load(other, progress=progress) as model:
        _check_tokens(model, text, other)
        runs = [_run(model, other.name, "prefill", text, progress)]
        if _leaves_out(model):
            name = f"{other.name}, {_name_run(model)}"
            runs.append(_run(model, name, "decode", text, progress))
        return runs


def _check_tokens(model: LoadedModel, text: _Text, path: Path) -> None:
    context = max(len(window.tokens) for window in text.windows)
    same = model.plan.plan.kv.context >= context and all(
        model.encode_text(piece) == ids for piece, ids in zip(text.texts, text.ids, strict=True)
    )
    if not same:
        raise UserError.of(
            "P663",
            f"{path} cuts the text into other tokens, or holds fewer than {context} of them",
            help="compare plans of models with the same tokenizer, and give a smaller --context",
        )


def _run(model: LoadedModel, name: str, mode: Mode, text: _Text, progress: Progress) -> Run:
    before = model.stats
    scores = score_windows(model, text.windows, mode, lambda share: progress(name, share))
    counted = model.stats - before
    predictor = model.plan.plan.decode.predictor if mode == "decode" else "none"
    found = _describe(model, name, predictor, scores, text)
    found = replace(found, predicted=counted.predicted_share, active=counted.active_share)
    if mode == "prefill":
        return found
    tokens = sum(len(window.tokens) - 1 for window in text.windows)
    return replace(
        found,
        replaced=counted.replaced_share,
        left_out=counted.left_out_share,
        scores_left_out=counted.left_out_mass_share,
        saved_bytes_token=counted.flash_saved_bytes / tokens,
        read_bytes_token=counted.flash_read_bytes / tokens,
    )


def _describe(model: LoadedModel, name: str, predictor: str, scores: Scores, text: _Text) -> Run:
    change = scores.losses - text.dense.losses
    return Run(
        name=name,
        backend=", ".join(dict.fromkeys(model.plan.plan.backends.values())),
        predictor=predictor,
        digest=model.plan.digest,
        perplexity=scores.perplexity,
        bits_per_byte=float(scores.losses.sum() / np.log(2) / text.scored_bytes),
        agreement=float((scores.choices == text.dense.choices).mean()),
        loss_change=float(change.mean()),
        loss_change_error=float(change.std() / np.sqrt(len(change))),
    )


def write_markdown(evaluation: Evaluation) -> str:
    """The evaluation for people: a table of runs and, with predictors, one of layers."""
    rows: list[tuple[object, ...]] = []
    for run in evaluation.runs:
        # The change of the mean loss in nats is, to first order, that of the perplexity in percent.
        change = f"{run.loss_change:+z.2%} ± {run.loss_change_error:.2%}"
        figures = f"{run.perplexity:.3f}", f"{run.bits_per_byte:.4f}"
        agrees = "-" if run.name == "dense" else change, _percent(run.agreement)
        computed = "100 %" if run.predicted is None else _percent(run.predicted)
        names = run.name, run.backend, run.predictor
        rows.append((*names, *figures, *agrees, computed, _percent(run.active)))
    lines = [
        f"{evaluation.tokens} tokens ({evaluation.bytes} bytes) in {evaluation.windows} "
        f"window{'s' if evaluation.windows != 1 else ''} of "
        f"at most {evaluation.context}; model {evaluation.model}, plan {evaluation.digest[:12]}",
        "",
        *write_table(
            "run | backend | predictor | perplexity | bits per byte | change | same top token | "
            "neurons computed | active",
            rows,
        ),
    ]
    lines += _describe_reads(evaluation)
    if evaluation.layers:
        shares = [(layer.active, layer.predicted, layer.recall) for layer in evaluation.layers]
        columns = ([x for x in column if x is not None] for column in zip(*shares, strict=True))
        mean = [sum(column) / len(column) if column else None for column in columns]
        shown = [(name, *map(_percent, row)) for name, row in (*enumerate(shares), ("mean", mean))]
        lines += ["", "Neurons of the dense run, and what the predictors say of them:", ""]
        lines += write_table("layer | active | predicted | recall", shown)
    return "\n".join(lines)


def _describe_reads(evaluation: Evaluation) -> list[str]:
    """Neurons and experts that runs have left out or replaced to read less, and their reads."""
    lines = []
    for run in evaluation.runs:
        if run.divergence is not None:
            lines.append(f"{run.name}: mean KL divergence {run.divergence:.5f} nats")
        if run.floor is not None:
            divergence, agreement = run.floor
            lines.append(
                f"{run.name} from itself, token by token: mean KL divergence {divergence:.5f} nats,"
                f" same top token {_percent(agreement)}"
            )
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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def score_beside(
    model: LoadedModel,
    windows: Sequence[Window],
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Scores, float, tuple[float, float]]:
    """llama.cpp's scores on the file of ``model``, and its distances from pi2 and from itself, as
    `Run` has both. UserError P663 without a GGUF file or llama-cpp-python."""
    refusal = UserError.of(
        "P663",
        "llama.cpp is compared on the same file, and this plan runs a store",
        help="name a GGUF file: `pi2 evaluate FILE.gguf --against llama.cpp --text TEXT`",
    )
    file = model.plan.source.find_file(refusal)
    context = max(len(window.tokens) for window in windows)
    peer = _open_peer(file, context)
    losses, choices, divergences = [], [], []
    floor = 0.0, 1.0
    for number, window in enumerate(windows):
        given = list(window.tokens[:-1])
        theirs = _ask_peer(peer, given, len(given))
        if number == 0:
            again = _ask_peer(peer, given[:_FLOOR_TOKENS], 1)
            same = again.argmax(-1) == theirs[: len(again)].argmax(-1)
            floor = float(_diverge(theirs[: len(again)], again).mean()), float(same.mean())
        scored = theirs[window.first_scored - 1 :]
        for logits, targets in iterate_scored(model, window, "prefill"):
            rows, scored = np.split(scored, [len(logits)])
            losses.append(compute_losses(rows, targets))
            choices.append(rows.argmax(-1))
            divergences.append(_diverge(rows, logits[:, : rows.shape[1]]))
        progress((number + 1) / len(windows))
    peer.close()
    scores = Scores(np.concatenate(losses), np.concatenate(choices))
    return scores, float(np.concatenate(divergences).mean()), floor


def _ask_peer(peer: Any, tokens: Sequence[int], step: int) -> F32:
    """Logits [tokens, vocab] of steps of so many tokens."""
    peer.reset()
    for first in range(0, len(tokens), step):
        peer.eval(tokens[first : first + step])
    return np.array(peer.scores[: len(tokens)], np.float32)


def _open_peer(file: Path, context: int) -> Any:
    if find_spec("llama_cpp") is None:
        raise UserError.of(
            "P663",
            "llama-cpp-python is not installed",
            help="pip install 'pi2[bench]' compiles it, which takes about ten minutes",
        )
    import llama_cpp

    return llama_cpp.Llama(
        os.fspath(file),
        n_ctx=context,
        n_batch=context,
        n_threads=os.cpu_count() or 1,
        logits_all=True,
        verbose=False,
    )


def _diverge(theirs: F32, ours: F32) -> F64:
    """KL divergences [n] from distributions of logits ``theirs`` to ``ours`` [n, vocab]."""
    found = []
    for pair in zip(theirs, ours, strict=True):
        first, second = compute_log_chances(np.stack(pair))
        found.append(float((np.exp(first) * (first - second)).sum()))
    return np.array(found)
