"""Calibrates thresholds on text, and measures what they cost in perplexity."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pi2.backends.protocol import BuildRequest, Executor
from pi2.diagnostics import UserError
from pi2.engine.observation import DenseObserver
from pi2.evaluation.scores import Scores, score_windows
from pi2.orchestrator import load
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.rules.sparsity_fits_model import explain_method
from pi2.plan.documents.model import Model
from pi2.plan.reading.thresholds import Thresholds
from pi2.progress import Progress, ignore_progress
from pi2.sparsity.documents import describe_changes
from pi2.sparsity.goals import Goal, choose_goal
from pi2.sparsity.magnitudes import LayerMagnitudes, MagnitudeObserver, compute_magnitudes
from pi2.statistics.texts import Window, encode_windows

HELD_OUT = 0.1
"""Share of every text, its end, that thresholds are judged on and not made from."""
TRIALS = 6
"""Targets that are tried where the loss is given: the last two are 1/64 apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Thresholds for a target, and what they cost as tokens are generated."""

    thresholds: Thresholds
    perplexity: float
    increase: float
    """Increase of the perplexity, relative to the dense one."""
    error: float
    """Standard error of the mean loss less that of the dense run, in nats, token by token: that of
    ``increase``, to first order."""
    agreement: float
    """Share of tokens for which the same token is most likely as in the dense run."""
    computed: float
    """Share of neurons whose up was read."""
    active: float
    """Share of neurons whose down was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibration's thresholds and the trials that led to them."""

    resolved: ResolvedPlan
    """The plan that was calibrated, dense."""
    goal: Goal
    dense_perplexity: float
    scored: int
    """Number of tokens that perplexities are computed over."""
    trials: tuple[Trial, ...]
    """Trials in the order in which they were made."""
    chosen: Trial


@dataclass(frozen=True, slots=True)
class _Observed:
    """What was observed of the dense model."""

    resolved: ResolvedPlan
    layers: Sequence[LayerMagnitudes]
    tokens: int
    """Number of tokens that ``layers`` count."""
    held_out: list[Window]
    dense: Scores


def calibrate_thresholds(
    plan: Path,
    texts: Sequence[str],
    *,
    goal: Goal | None = None,
    overrides: Mapping[str, object] | None = None,
    context: int | None = None,
    windows: int | None = None,
    evaluated: int = 8,
    progress: Progress = ignore_progress,
) -> Calibration:
    """Calibrate thresholds for the model of ``plan`` on ``texts``; nothing is written.

    Without ``goal``, the plan's ``[sparsity]`` says what is wanted.  Histograms come from the dense
    model over the first nine tenths of every text (``windows`` of them), perplexities from
    generating over ``evaluated`` windows of the rest, token by token, as a run would.  Raises
    `UserError` as loading does, P257 for a model that needs no thresholds, P660-P662 for text and
    backend, P668 if there is no goal, P669 if no target keeps the loss.
    """
    settings = dict(overrides or {})
    learned = [text[: round(len(text) * (1 - HELD_OUT))] for text in texts]
    held_out = [text[round(len(text) * (1 - HELD_OUT)) :] for text in texts]
    dense_settings = {**settings, "decode.predictor": "none", "decode.look_ahead": "none"}
    chosen_goal = choose_goal(plan, dense_settings, goal)
    found = _observe(
        plan, learned, held_out, dense_settings, chosen_goal, context, windows, evaluated, progress
    )
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def attempt(target: float) -> Trial:
        made = make_thresholds(found.resolved.model, found.layers, chosen_goal, target)
        thresholds = made.model_copy(update={"tokens": found.tokens, "text": digest})
        return _measure(plan, settings, chosen_goal, thresholds, found, progress)

    trials = search_target(chosen_goal, attempt)
    kept = [trial for trial in trials if _keeps(trial, chosen_goal)]
    if not kept:
        best = min(trials, key=lambda trial: trial.increase)
        raise UserError.of(
            "P669",
            f"leaving out {best.thresholds.target:.1%} already makes the perplexity "
            f"{best.increase:+.2%}",
            help="allow a greater loss, or run the model densely",
        )
    return Calibration(
        resolved=found.resolved,
        goal=chosen_goal,
        dense_perplexity=found.dense.perplexity,
        scored=len(found.dense.losses),
        trials=tuple(trials),
        chosen=max(kept, key=lambda trial: trial.thresholds.target),
    )


def _observe(
    plan: Path,
    learned: Sequence[str],
    held_out: Sequence[str],
    settings: Mapping[str, object],
    goal: Goal,
    context: int | None,
    windows: int | None,
    evaluated: int,
    progress: Progress,
) -> _Observed:
    """Run the dense model over both parts of the texts.  It is gone before the next is loaded."""
    observer = MagnitudeObserver(goal.method)

    def observe(executor: Executor, request: BuildRequest) -> DenseObserver:
        _check_model(request.model, goal)
        return DenseObserver(executor, request, observer, compute_magnitudes)

    with load(
        plan, set=settings, thresholds="none", progress=progress, make_observer=observe
    ) as model:
        cut = encode_windows(model, learned, context=context, stride=None, count=windows)
        for number, window in enumerate(cut):
            for _ in model.iterate_logits(window.tokens):
                pass
            progress("counting", (number + 1) / len(cut))
        model._parts.executor.observe(None)
        judged = encode_windows(model, held_out, context=context, stride=None, count=evaluated)
        dense = score_windows(model, judged, "prefill", lambda share: progress("dense", share))
        tokens = sum(len(window.tokens) for window in cut)
        return _Observed(model.plan, observer.list_layers(), tokens, judged, dense)


def search_target(goal: Goal, attempt: Callable[[float], Trial]) -> list[Trial]:
    """Try the goal's target or, for a loss, halve the range that holds the largest target."""
    if goal.target is not None:
        return [attempt(goal.target)]
    trials, low, high = [], 0.0, 1.0
    for _ in range(TRIALS):
        trial = attempt((low + high) / 2)
        trials.append(trial)
        if _keeps(trial, goal):
            low = trial.thresholds.target
        else:
            high = trial.thresholds.target
    return trials


def _keeps(trial: Trial, goal: Goal) -> bool:
    """Whether the loss is within the goal; a share is asked for whatever it costs."""
    return goal.max_increase is None or trial.increase <= goal.max_increase


def make_thresholds(
    model: Model, layers: Sequence[LayerMagnitudes], goal: Goal, target: float
) -> Thresholds:
    """Thresholds of all layers that leave out ``target``, the same share in every layer."""
    return Thresholds(
        schema_version=2,
        name=f"{model.id}, {goal.method} {target:g}",
        description="Made by `pi2 sparsity calibrate`.",
        model=model.id,
        activation=model.ffn.activation,
        hidden=model.shape.hidden,
        neurons=model.layer_neurons,
        method=goal.method,
        target=target,
        max_perplexity_increase=goal.max_increase,
        tokens=1,
        text="",
        layers=tuple(layer.choose(target) for layer in layers),
    )


def _measure(
    plan: Path,
    settings: Mapping[str, object],
    goal: Goal,
    thresholds: Thresholds,
    found: _Observed,
    progress: Progress,
) -> Trial:
    """Generate over the held-out windows with ``thresholds``."""
    changes = describe_changes(found.resolved, thresholds, goal, "not-yet.thresholds.toml")
    label = f"{goal.method} {thresholds.target:.3g}"
    with load(plan, set={**settings, **changes}, thresholds=thresholds) as model:
        before = model.stats
        scores = score_windows(
            model, found.held_out, "decode", lambda share: progress(label, share)
        )
        counted = model.stats - before
    change = scores.losses - found.dense.losses
    rounded = {
        "perplexity_before": float(f"{found.dense.perplexity:.6g}"),
        "perplexity_after": float(f"{scores.perplexity:.6g}"),
    }
    return Trial(
        thresholds=thresholds.model_copy(update=rounded),
        perplexity=scores.perplexity,
        increase=math.exp(change.mean()) - 1,
        error=float(change.std() / math.sqrt(len(change))),
        agreement=float((scores.choices == found.dense.choices).mean()),
        computed=counted.predicted_share or 0.0,
        active=counted.active_share or 0.0,
    )


def _check_model(model: Model, goal: Goal) -> None:
    """UserError P257 for neurons that rest by themselves, and for what a method cannot cut."""
    if not model.is_smooth:
        raise UserError.of(
            "P257",
            f"neurons of model {model.id!r} ({model.ffn.activation}) are zero when inactive",
            help='predictor = "gate" leaves them out without loss',
        )
    problem = explain_method(goal.method, model)
    if problem is not None:
        raise UserError.of("P257", problem, help="use --method cats")
