"""Trains the predictors of all layers, choosing ranks, and puts them into a store of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pi2.backends.protocol import BuildRequest, Executor
from pi2.diagnostics import UserError
from pi2.engine.observation import DenseObserver
from pi2.evaluation.evaluation import Evaluation, evaluate_plan
from pi2.orchestrator import load
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.predictors.fitting import Recipe
from pi2.predictors.layers import LayerFit, fit_predictors
from pi2.predictors.publishing import publish_predictors
from pi2.predictors.samples import SampleRecorder
from pi2.progress import Progress, ignore_progress
from pi2.statistics.texts import encode_windows

HELD_OUT = 0.1
"""Share of every text, its end, that nothing is learned from."""
_SMALL_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """New predictors and what they are worth."""

    plan: Path
    """The new plan, whose store has them."""
    fits: tuple[LayerFit, ...]
    """By layer."""
    evaluation: Evaluation
    """Evaluation of the new plan on the ends of the texts."""


def train_predictors(
    plan: Path,
    texts: Sequence[str],
    output: Path,
    *,
    overrides: Mapping[str, object] | None = None,
    recipe: Recipe | None = None,
    rank: int | None = None,
    context: int | None = None,
    windows: int | None = None,
    evaluated: int = 8,
    progress: Progress = ignore_progress,
) -> Training:
    """Train predictors for the model of ``plan`` on what its neurons do in ``texts``.

    ``rank`` is that of every layer; None chooses it for each.  ``output`` is a new folder with a
    store (its neurons shared with the old one), a model document and a plan; ``evaluated`` is the
    number of windows that they are judged on.  Raises `UserError` as loading does, P660-P662 for
    text and backend, P665 for a model whose neurons never rest, P667 if ``output`` exists.
    """
    chosen = recipe or Recipe()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError.of(
            "P667", f"{output} exists already", help="choose a new folder, or remove it"
        )
    learned = [text[: round(len(text) * (1 - HELD_OUT))] for text in texts]
    held_out = [text[round(len(text) * (1 - HELD_OUT)) :] for text in texts]
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pi2-predictors-", dir=parent) as folder:
        recorder = SampleRecorder(Path(folder))

        def observe(executor: Executor, request: BuildRequest) -> DenseObserver:
            if request.model.is_smooth:
                raise UserError.of(
                    "P665",
                    f"the neurons of model {request.model.id!r} ({request.model.ffn.activation}) "
                    "are never exactly zero: there is nothing to predict",
                    help="use a model of the ReLU family",
                )
            return DenseObserver(executor, request, recorder)

        with load(plan, set=overrides, progress=progress, make_observer=observe) as model:
            resolved = model.plan
            cut = encode_windows(model, learned, context=context, stride=None, count=windows)
            samples = recorder.record(model, cut, lambda share: progress("recording", share))
        fits = []
        with ThreadPoolExecutor(count_workers(resolved)) as pool:
            work = partial(fit_predictors, resolved=resolved, recipe=chosen, rank=rank)
            for fit in pool.map(work, samples):
                fits.append(fit)
                progress("training", len(fits) / len(samples))
    new_plan = publish_predictors(resolved, fits, output)
    evaluation = evaluate_plan(
        new_plan, held_out, context=context, windows=evaluated, progress=progress
    )
    return Training(plan=new_plan, fits=tuple(fits), evaluation=evaluation)


def count_workers(resolved: ResolvedPlan) -> int:
    """Layers that are trained side by side: the products of small ones keep one core busy."""
    is_small = resolved.model.stored_neuron_width * resolved.model.shape.ffn <= _SMALL_WEIGHTS
    return max(1, os.cpu_count() or 1) if is_small else 1
