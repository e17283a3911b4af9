"""Calibrates thresholds on text, and measures their cost in perplexity."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pi2.backends.executor import Executor
from pi2.backends.protocol import BuildRequest
from pi2.costs.hotness import halve
from pi2.diagnostics import UserError
from pi2.engine.layer_model import DenseObserver
from pi2.engine.loaded_model import LoadedModel
from pi2.measuring.magnitudes import (
    KeptFindings,
    LayerMagnitudes,
    MagnitudeObserver,
    compute_magnitudes,
    list_arrays,
)
from pi2.measuring.texts import Passages, Scores, Window, join_scores, run_windows, score_windows
from pi2.orchestrator import load
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.rules.stated import explain_method
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Memory
from pi2.plan.documents.plan_units import Sparsity, SparsityMethod
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.reading.thresholds import Thresholds
from pi2.progress import Progress, ignore_progress
from pi2.refit import read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One of ``target`` and ``max_increase``."""

    method: SparsityMethod
    target: float | None = None
    """Share of up and down that is not read."""
    max_increase: float | None = None
    """Largest share by which the perplexity may grow."""
    max_error: float | None = None
    """Largest error of that growth; by default half of the growth."""


def choose_goal(
    plan: Path, settings: Mapping[str, object], goal: Goal | None, max_error: float | None
) -> Goal:
    """``goal``, or what the plan says, with ``max_error``; UserError P668 if there is none."""
    sparsity = read_plan(plan, overrides=settings, thresholds="none").resolved.plan.sparsity
    if goal is not None:
        return replace(goal, max_error=max_error)
    if sparsity is None:
        raise UserError.of(
            "P668",
            f"{plan} has no [sparsity]: how much may be left out?",
            help="use --target 0.5, or --loss 2% for the increase in perplexity",
        )
    return Goal(
        method=sparsity.method,
        target=sparsity.target,
        max_increase=sparsity.max_perplexity_increase,
        max_error=max_error,
    )


_KIB = 1024


def describe_changes(
    resolved: ResolvedPlan, thresholds: Thresholds, file: str
) -> dict[str, object]:
    """Changes of the plan for ``thresholds`` in ``file``: gates first, and room for them."""
    sparsity = thresholds.describe_use(file)
    plan = resolved.plan.model_copy(
        update={
            "decode": resolved.plan.decode.model_copy(update={"predictor": "gate"}),
            "sparsity": Sparsity.model_validate(sparsity),
        }
    )
    memory = enlarge_memory(replace(resolved, plan=plan, thresholds=thresholds))
    changes: dict[str, object] = {
        "decode.predictor": "gate",
        "decode.look_ahead": "none",
        "sparsity": sparsity,
    }
    stated = dict(plan.memory.segments)
    for name, size in memory.segments:
        if size != stated[name]:
            changes[f"memory.segments.{name}"] = format_bytes(size)
    if memory.budget != plan.memory.budget:
        changes["memory.budget"] = format_bytes(memory.budget)
    return changes


def enlarge_memory(resolved: ResolvedPlan) -> Memory:
    """The plan's memory with room for all that its segments need, in whole KiB."""
    memory = resolved.plan.memory
    stated = dict(memory.segments)
    needs = resolved.needs.items()
    sizes = {name: max(stated[name], -(-need.bytes // _KIB) * _KIB) for name, need in needs}
    total = sum({**stated, **sizes}.values())
    update = {"segments": memory.segments.model_copy(update=sizes)}
    return memory.model_copy(update=update | {"budget": max(memory.budget, total)})


FINEST = 0.005
"""Perplexity error that is always small enough."""
TIMED, WARM = 32, 8
"""Tokens that are generated to measure a plan's speed, and the first ones, which do not count."""
FEWEST_SCORED = 1024
"""Tokens that a perplexity is computed over, if there are as many: fewer say too little."""
TRIALS = 6
"""Targets that are tried where the loss is given: the last two are 1/64 apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Thresholds for a target, and their cost in generated tokens."""

    thresholds: Thresholds
    perplexity: float
    increase: float
    """Increase of the perplexity, relative to the dense one."""
    error: float
    """Standard error of the mean change of the loss, in nats."""
    agreement: float
    """Share of tokens for which the same token is most likely as in the dense run."""
    computed: float
    """Share of neurons whose up was read."""
    active: float
    """Share of neurons whose down was read."""
    scored: int
    """Tokens that perplexities are computed over: enough that the error is small, if there are."""
    dense_perplexity: float
    """The perplexity of the same tokens without thresholds."""
    tokens_per_s: float
    """Tokens generated in a second, with the memory that the plan with thresholds has."""

    def find_needed_error(self, goal: Goal) -> float:
        """Largest error of a usable statement: the goal's, else half of the stated growth."""
        if goal.max_error is not None:
            return goal.max_error
        return max(FINEST, abs(self.increase) / 2, (goal.max_increase or 0.0) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibration's thresholds and the trials that led to them."""

    resolved: ResolvedPlan
    """The plan that was calibrated, dense."""
    goal: Goal
    dense_tokens_per_s: float
    """Tokens that the plan generates in a second without thresholds."""
    trials: tuple[Trial, ...]
    """Trials in the order in which they were made."""
    chosen: Trial


@dataclass(frozen=True, slots=True)
class _Observed:
    resolved: ResolvedPlan
    layers: Sequence[LayerMagnitudes]
    tokens: int
    """Number of tokens that ``layers`` count."""
    held_out: list[Window]
    dense: Scores


def calibrate_thresholds(
    plan: Path,
    passages: Passages,
    *,
    goal: Goal | None = None,
    overrides: Mapping[str, object] | None = None,
    max_error: float | None = None,
    unfinished: Path | None = None,
    progress: Progress = ignore_progress,
) -> Calibration:
    """Calibrate thresholds on nine tenths of every text, judge them by generating over windows of
    the rest until the error is small; ``unfinished`` keeps findings for a resumed call. UserError
    P257, P660-P662, P668 without a goal, P669 if no target keeps the loss, P679 for too little
    text."""
    settings = dict(overrides or {})
    dense_settings = {**settings, "decode.predictor": "none", "decode.look_ahead": "none"}
    chosen_goal = choose_goal(plan, dense_settings, goal, max_error)
    digest = hashlib.sha256("\0".join(passages.texts).encode()).hexdigest()
    judged = passages.hold_out(16)
    asked = (digest, chosen_goal.method, passages.context, passages.count, judged.count, max_error)
    kept = KeptFindings(unfinished, asked)
    job = _Job(plan, settings, chosen_goal, kept, progress)
    found = job.observe(dense_settings, passages.learned, judged)
    numbers = itertools.count(1)
    total = TRIALS if chosen_goal.target is None else 1

    def attempt(target: float) -> Trial:
        made = make_thresholds(found.resolved.model, found.layers, chosen_goal, target)
        thresholds = made.model_copy(update={"tokens": found.tokens, "text": digest})
        label = f"trial {next(numbers)} of {total} ({target:.1%} left out)"
        return job.measure(thresholds, found, label)

    trials = search_target(chosen_goal, attempt)
    within = [trial for trial in trials if _keeps(trial, chosen_goal)]
    if not within:
        best = min(trials, key=lambda trial: trial.increase)
        raise UserError.of(
            "P669",
            f"leaving out {best.thresholds.target:.1%} already makes the perplexity "
            f"{best.increase:+.2%}",
            help="allow a greater loss, or run the model densely",
        )
    chosen = max(within, key=lambda trial: trial.thresholds.target)
    _check_error(chosen, chosen_goal)
    progress("timing both plans", 0.0)
    # One after the other: the machine may have had other work during the trials.
    changes = describe_changes(found.resolved, chosen.thresholds, "not-yet.thresholds.toml")
    with load(plan, set={**settings, **changes}, thresholds=chosen.thresholds) as model:
        tokens_per_s = _time_tokens(model, found.held_out[0])
    with load(plan, set=dense_settings, thresholds="none") as model:
        dense_tokens_per_s = _time_tokens(model, found.held_out[0])
    kept.drop()
    return Calibration(
        resolved=found.resolved,
        goal=chosen_goal,
        dense_tokens_per_s=dense_tokens_per_s,
        trials=tuple(trials),
        chosen=replace(chosen, tokens_per_s=tokens_per_s),
    )


def _check_error(chosen: Trial, goal: Goal) -> None:
    """UserError P679 where the tokens are too few for what would be stated."""
    needed = chosen.find_needed_error(goal)
    if chosen.error <= needed:
        return
    tokens = math.ceil(chosen.scored * (chosen.error / needed) ** 2)
    raise UserError.of(
        "P679",
        f"the perplexity is {chosen.increase:+.2%} with an error of {chosen.error:.2%} over "
        f"{chosen.scored} tokens, which says too little",
        help=f"about {tokens} tokens are needed: give {tokens / chosen.scored:.0f} times as much "
        "text, of which a tenth is held out, with a higher --evaluated if it has more windows; or "
        f"take the error: --error {chosen.error:.1%}",
    )


@dataclass(frozen=True, slots=True)
class _Job:
    plan: Path
    settings: Mapping[str, object]
    goal: Goal
    kept: KeptFindings
    progress: Progress

    def observe(
        self, settings: Mapping[str, object], learned: Passages, judged: Passages
    ) -> _Observed:
        """Run the dense model, with ``settings``, over both parts of the texts."""
        observer = MagnitudeObserver(self.goal.method)

        def observe(executor: Executor, request: BuildRequest) -> DenseObserver:
            _check_model(request.model, self.goal)
            return DenseObserver(executor, request, observer, compute_magnitudes)

        with load(
            self.plan,
            set=settings,
            thresholds="none",
            progress=self.progress,
            make_observer=observe,
        ) as model:
            cut, layers = learned.cut(model), observer.layers
            first = self.kept.restore(model.plan.digest, layers)
            for done in run_windows(model, cut, partial(self.progress, "counting"), first=first):
                find = partial(list_arrays, layers)
                self.kept.keep_windows(done, find, is_last=done == len(cut))
            model._parts.executor.observe(None)
            windows = judged.cut(model)
            if kept := self.kept.find_scores("dense"):
                dense, _ = kept
            else:
                dense = score_windows(model, windows, "prefill", partial(self.progress, "dense"))
                self.kept.note_scores("dense", dense)
            tokens = sum(len(window.tokens) for window in cut)
            found = [layers[number] for number in sorted(layers)]
            return _Observed(model.plan, found, tokens, windows, dense)

    def measure(self, thresholds: Thresholds, found: _Observed, label: str) -> Trial:
        """Generate over held-out windows with ``thresholds``, until the error is small."""
        name = f"{thresholds.target:.6g}@{self.goal.max_error or self.goal.max_increase or 0:.6g}"
        if kept := self.kept.find_scores(name):
            scores, figures = kept
            return _describe(thresholds, scores, found.dense, figures)
        changes = describe_changes(found.resolved, thresholds, "not-yet.thresholds.toml")
        pieces: list[Scores] = []
        with load(
            self.plan,
            set={**self.settings, **changes},
            thresholds=thresholds,
            progress=self.progress,
        ) as model:
            speed = _time_tokens(model, found.held_out[0])
            before = model.stats
            for number, window in enumerate(found.held_out):
                pieces.append(score_windows(model, [window], "decode"))
                self.progress(label, (number + 1) / len(found.held_out))
                joined = join_scores(pieces)
                counted = model.stats - before
                figures = (counted.predicted_share or 0.0, counted.active_share or 0.0, speed)
                trial = _describe(thresholds, joined, found.dense, figures)
                if trial.scored >= FEWEST_SCORED and trial.error <= trial.find_needed_error(
                    self.goal
                ):
                    break
        self.kept.note_scores(name, joined, figures)
        return trial


def search_target(goal: Goal, attempt: Callable[[float], Trial]) -> list[Trial]:
    """Try the goal's target or, for a loss, halve the range that holds the largest target."""
    if goal.target is not None:
        return [attempt(goal.target)]
    trials: list[Trial] = []

    def keeps(target: float) -> bool:
        trials.append(attempt(target))
        return _keeps(trials[-1], goal)

    halve(0.0, 1.0, keeps, TRIALS)
    return trials


def _keeps(trial: Trial, goal: Goal) -> bool:
    """Whether the loss is within the goal; a share is wanted at any cost."""
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


def _describe(
    thresholds: Thresholds, scores: Scores, dense: Scores, figures: tuple[float, ...]
) -> Trial:
    count = len(scores.losses)
    dense = Scores(dense.losses[:count], dense.choices[:count])
    change = scores.losses - dense.losses
    computed, active, speed = figures
    rounded = {
        "perplexity_before": float(f"{dense.perplexity:.6g}"),
        "perplexity_after": float(f"{scores.perplexity:.6g}"),
    }
    return Trial(
        thresholds=thresholds.model_copy(update=rounded),
        perplexity=scores.perplexity,
        increase=math.exp(change.mean()) - 1,
        error=float(change.std() / math.sqrt(count)),
        agreement=float((scores.choices == dense.choices).mean()),
        computed=computed,
        active=active,
        scored=count,
        dense_perplexity=dense.perplexity,
        tokens_per_s=speed,
    )


def _time_tokens(model: LoadedModel, window: Window) -> float:
    """Tokens per second of generation, once the first ones have filled the cache."""
    tokens = window.tokens[:TIMED]
    warm = min(WARM, len(tokens) // 2)
    start = time.perf_counter()
    for number, _ in enumerate(model.iterate_logits(tokens, mode="decode"), start=1):
        if number == warm:
            start = time.perf_counter()
    return (len(tokens) - warm) / max(1e-9, time.perf_counter() - start)


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
