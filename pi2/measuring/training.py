"""Trains the predictors of all layers, choosing ranks, and puts them into a store of their own."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pi2.authoring.writing import write_document
from pi2.backends.executor import Executor
from pi2.backends.protocol import BuildRequest
from pi2.caches import replace_file
from pi2.diagnostics import UserError
from pi2.engine.layer_model import DenseObserver
from pi2.measuring.activations import measure_skew
from pi2.measuring.calibration import enlarge_memory
from pi2.measuring.evaluation import Evaluation, evaluate_plan
from pi2.measuring.predictors import (
    Fit,
    LayerSamples,
    Recipe,
    SampleRecorder,
    Weights,
    fit_layer,
    start_rank,
)
from pi2.measuring.texts import Passages
from pi2.model.tensor import DenseTensor
from pi2.orchestrator import load
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_ffn_bytes
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Predictor
from pi2.plan.weights.layout import GROUP, Precision, matrix_bytes, round_up
from pi2.progress import Progress, ignore_progress
from pi2.store.manifest import DENSE_FILE
from pi2.store.reader import NeuronStore
from pi2.store.writer import StoreWriter, TensorPieces

WORTH = 0.99
"""A larger rank is kept if it brings a token's bytes below this share of the smaller rank's."""
TRIAL = 0.25
"""Share of the passes in which a rank is tried; the one that is kept is then trained in full."""
FLASH_COST = 10.0
"""How much longer a byte from flash takes than one from memory, roughly."""
FEWEST_TOKENS = 64
"""Fewest tokens of an expert to learn anything from; one with fewer names all of its neurons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFit:
    """The fitted predictors of a layer, and how good they are on the tokens that were kept back."""

    experts: tuple[Fit, ...]
    """By expert; one without experts."""
    tokens: tuple[int, ...]
    """That each has learned from and was judged on."""

    @property
    def rank(self) -> int:
        return self.experts[0].weights.rank

    @property
    def active(self) -> float:
        return self._average([fit.active for fit in self.experts])

    @property
    def predicted(self) -> float:
        return self._average([fit.predicted for fit in self.experts])

    @property
    def recall(self) -> float:
        found = self._average([fit.recall * fit.active for fit in self.experts])
        return found / self.active if self.active else 1.0

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        curves = [(fit.curve, n) for fit, n in zip(self.experts, self.tokens, strict=True)]
        known = [(curve, max(1, n)) for curve, n in curves if curve]
        if not known:
            return ()
        total = sum(n for _, n in known)
        return tuple(
            (recall, sum(curve[place][1] * n for curve, n in known) / total)
            for place, (recall, _) in enumerate(known[0][0])
        )

    def _average(self, shares: Sequence[float]) -> float:
        weights = self.tokens if any(self.tokens) else [1] * len(self.tokens)
        pairs = zip(shares, weights, strict=True)
        return sum(share * weight for share, weight in pairs) / sum(weights)


def fit_experts(
    samples: Sequence[LayerSamples], rank: int, recipe: Recipe, precision: Precision
) -> LayerFit:
    """Fit a predictor of ``rank`` (a multiple of 32) to the samples of every expert."""
    fits = [
        fit_layer(item, rank, recipe, precision)
        if len(item) >= FEWEST_TOKENS or len(samples) == 1
        else name_all(item, rank)
        for item in samples
    ]
    return LayerFit(experts=tuple(fits), tokens=tuple(len(item) for item in samples))


def choose_rank(samples: LayerSamples, resolved: ResolvedPlan, recipe: Recipe) -> int:
    """The rank at which a token's bytes weigh least: ranks grow while they become less."""
    hidden, precision = resolved.model.stored_neuron_width, resolved.model.quantization.predictor
    _, active = samples.read(slice(0, min(len(samples), 8192)))
    current = start_rank(float(active.mean()), measure_skew(active.sum(axis=0)), hidden)
    best, fewest = current, math.inf
    while current <= hidden:
        passes = TRIAL * recipe.count_passes(len(samples), current)
        fit = fit_layer(samples, current, replace(recipe, passes=passes), precision)
        taken = count_token_bytes(fit, resolved, precision)
        if taken > WORTH * fewest:
            break
        best, fewest = current, taken
        current = round_up(2 * current, GROUP)
    return best


def count_token_bytes(fit: Fit, resolved: ResolvedPlan, precision: Precision) -> float:
    """Bytes per token of a predictor and the neurons that it names; absent ones weigh more."""
    hidden, neurons = resolved.model.stored_neuron_width, resolved.model.shape.ffn
    rank = fit.weights.rank
    own = matrix_bytes(rank, hidden, precision) + matrix_bytes(neurons, rank, precision)
    segments = resolved.plan.memory.segments
    absent = max(0.0, 1.0 - (segments.hot + segments.cold) / count_ffn_bytes(resolved))
    neuron_bytes = resolved.bundle.neuron_bytes * (1.0 + (FLASH_COST - 1.0) * absent)
    return own + fit.predicted * neurons * neuron_bytes


def name_all(samples: LayerSamples, rank: int) -> Fit:
    """A predictor that names every neuron: of an expert that hardly a token has come to."""
    hidden, neurons = samples.inputs.shape[1], samples.neurons
    weights = Weights(
        np.zeros((rank, hidden), np.float32),
        np.zeros((neurons, rank), np.float32),
        np.ones(neurons, np.float32),
    )
    active = 0.0
    if len(samples):
        _, fired = samples.read(slice(0, len(samples)))
        active = float(fired.mean())
    return Fit(weights=weights, recall=1.0, predicted=1.0, active=active, curve=())


def publish_predictors(resolved: ResolvedPlan, fits: Sequence[LayerFit], output: Path) -> Path:
    """Write ``output``: ``store``, ``ID.model.toml``, ``default.plan.toml``; returns the plan."""
    model = describe_model(resolved.model, fits)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_predictors(resolved, model, fits, output / "store")
        replace_file(output / f"{model.id}.model.toml", write_document(model).encode())
        plan = output / "default.plan.toml"
        device = resolved.plan.device
        if "/" in device or device.endswith(".toml"):
            device = "./machine.device.toml"
            replace_file(output / "machine.device.toml", write_document(resolved.device).encode())
        replace_file(plan, write_plan_text(resolved, model, device).encode())
    except OSError as error:
        raise UserError.of(
            "P523",
            f"cannot write {error.filename or output}: {error.strerror or error}",
            help="free disk space, or choose an output folder that can be written",
        ) from None
    return plan


def describe_model(model: Model, fits: Sequence[LayerFit]) -> Model:
    found = [fit for fit in fits if fit.active > 0] or list(fits)
    predictor = Predictor(
        rank=max(fit.rank for fit in fits),
        recall=round(float(np.mean([fit.recall for fit in found])), 4),
        active=round(float(np.mean([fit.predicted for fit in fits])), 4),
    )
    changes: dict[str, object] = {"predictor": predictor}
    if model.moe is not None and "{expert}" not in model.tensors.predictor_in:
        # The names of a document without predictors know nothing of experts.
        place = model.tensors.gate.rpartition("{expert}")[0] + "{expert}.predictor"
        names = {
            "predictor_in": f"{place}.fc1.weight",
            "predictor_out": f"{place}.fc2.weight",
            "predictor_bias": f"{place}.bias",
        }
        changes["tensors"] = model.tensors.model_copy(update=names)
    return model.model_copy(update=changes)


def write_predictors(
    resolved: ResolvedPlan, model: Model, fits: Sequence[LayerFit], target: Path
) -> None:
    """Write the store ``target``: the store of ``resolved`` with other predictors."""
    with NeuronStore.open(resolved.store_path, model=resolved.model) as old:
        manifest = old.manifest
        with StoreWriter(
            target,
            model,
            ranks=[fit.rank for fit in fits],
            order=manifest.order,
            synthetic=manifest.synthetic,
            stride=manifest.bundle.stride,
            scales=manifest.bundle.scales,
        ) as writer:
            for entry in manifest.files:
                if entry.path != DENSE_FILE:
                    writer.adopt_file(old.path / entry.path, entry)
            writer.write_dense(lambda tensor: _read_tensor(old, fits, tensor))
            writer.finish()


_ARRAYS = {"predictor_in": "inner", "predictor_out": "outer", "predictor_bias": "bias"}


def _read_tensor(old: NeuronStore, fits: Sequence[LayerFit], tensor: DenseTensor) -> TensorPieces:
    kind = tensor.name.rpartition(".")[2]
    if kind not in _ARRAYS:
        known = old.tensors[tensor.name]
        return [(known.weights, known.scales)]
    experts = fits[int(tensor.name.split(".")[1])].experts
    joined = np.concatenate([getattr(fit.weights, _ARRAYS[kind]) for fit in experts])
    if kind == "predictor_bias":
        return [(joined[None].astype(np.float32), None)]
    return [tensor.packing.quantize(np.ascontiguousarray(joined))]


def write_plan_text(resolved: ResolvedPlan, model: Model, device: str) -> str:
    """The plan with the new store and model; ``memory`` has room for the predictors."""
    old = resolved.plan
    decode = old.decode.model_copy(update={"predictor": "low-rank", "threshold": 0.0})
    plan = old.model_copy(update={"decode": decode})
    # Predictors need room, and so do the neurons that they name.
    memory = enlarge_memory(replace(resolved, plan=plan, model=model, thresholds=None))
    return write_document(
        plan.model_copy(
            update={
                "memory": memory,
                "weights": "store",
                "model": f"./{model.id}.model.toml",
                "device": device,
            }
        )
    )


_SMALL_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    plan: Path
    """The new plan, whose store has them."""
    fits: tuple[LayerFit, ...]
    evaluation: Evaluation
    """Evaluation of the new plan on the ends of the texts."""


def train_predictors(
    plan: Path,
    passages: Passages,
    output: Path,
    *,
    overrides: Mapping[str, object] | None = None,
    recipe: Recipe | None = None,
    rank: int | None = None,
    progress: Progress = ignore_progress,
) -> Training:
    """Train predictors on ``passages`` into ``output``: a store that shares the neurons, a model
    and a plan, judged on held-out text. UserError P660-P662, P665 for smooth activations, P667 if
    ``output`` exists."""
    chosen = recipe or Recipe()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError.of(
            "P667", f"{output} exists already", help="choose a new folder, or remove it"
        )
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
            cut = passages.learned.cut(model)
            samples = recorder.record(model, cut, lambda share: progress("recording", share))
        fits = []
        # Products of small layers keep one core busy: they are trained side by side.
        is_small = resolved.model.stored_neuron_width * resolved.model.shape.ffn <= _SMALL_WEIGHTS
        with ThreadPoolExecutor((os.cpu_count() or 1) if is_small else 1) as pool:

            def fit_layers(own: Sequence[LayerSamples]) -> LayerFit:
                wanted = rank or choose_rank(max(own, key=len), resolved, chosen)
                precision = resolved.model.quantization.predictor
                return fit_experts(own, round_up(wanted, GROUP), chosen, precision)

            for fit in pool.map(fit_layers, samples):
                fits.append(fit)
                progress("training", len(fits) / len(samples))
    new_plan = publish_predictors(resolved, fits, output)
    evaluation = evaluate_plan(new_plan, passages.hold_out(8), progress=progress)
    return Training(plan=new_plan, fits=tuple(fits), evaluation=evaluation)
