"""Runs a plan over text and records the activations of its neurons; resumes after an interruption.

In the folder, all written under other names and renamed, ``statistics.json`` last:

- ``activations.parquet``: layer, neuron (of the checkpoint), count, count_2, count_3, count_4: the
  tokens, and the batches of that many tokens, in which the neuron fired.  `pi2 convert
  --activations` stores neurons in this order.
- ``coactivations.parquet``: layer, first, second, count: tokens in which two sampled neurons of the
  checkpoint fired both.
- ``moments/layer-000.npy``, if wanted: E[u u^T] of the FFN's inputs, float32 [hidden, hidden],
  for the quantisers of `pi2 convert`.
- ``statistics.json``: the run, and a summary by layer."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32, I32, I64, Bits
from pi2.backends.executor import Executor
from pi2.backends.protocol import BuildRequest
from pi2.caches import replace_file
from pi2.diagnostics import UserError
from pi2.engine.layer_model import DenseObserver, Routing
from pi2.importing.conversion_job import (
    ACTIVATIONS,
    COACTIVATIONS,
    SUMMARY,
    encode_table,
    note_identity,
    read_counts,
    read_summary,
)
from pi2.importing.quantizers import MOMENTS, name_moments
from pi2.measuring.texts import Passages, Unfinished, run_windows
from pi2.orchestrator import load
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.tracing import add_legend, make_figure, pick_colours, pick_styles, save_figure

BATCHES = (1, 2, 3, 4)
"""Sizes of batches whose unions of active neurons are counted."""


@dataclass(slots=True)
class Counts:
    """Sums over the tokens so far, neurons in stored order; an observer of FFNs
    (`pi2.engine.layer_model`) that adds to them."""

    largest: float | None
    """Share of a token's neurons that counts as active; None counts all but zeros."""

    fired: I64
    """Batches in which a neuron fired at least once [layers, batch sizes, neurons]."""
    groups: I64
    """Batches [layers, batch sizes]; of size 1 these are the tokens."""
    together: I64
    """Tokens in which two sampled neurons fired both [layers, samples, samples]."""
    samples: I32
    """Stored indices of the sampled neurons [samples], the same in every layer."""
    moments: F32
    """Sums of u u^T over the FFN's inputs [layers, hidden, hidden]; [0, 0, 0] if not wanted."""

    @classmethod
    def make(cls, request: BuildRequest, options: RecordingOptions) -> Counts:
        """Empty counts; the sampled neurons are spread over a layer."""
        layers, neurons = request.model.shape.layers, request.neurons
        width = request.model.stored_neuron_width if options.moments else 0
        spread = np.linspace(0, neurons - 1, min(options.samples, neurons))
        chosen = np.unique(spread.astype(np.int32))
        return cls(
            largest=options.largest,
            fired=np.zeros((layers, len(BATCHES), neurons), np.int64),
            groups=np.zeros((layers, len(BATCHES)), np.int64),
            together=np.zeros((layers, len(chosen), len(chosen)), np.int64),
            samples=chosen,
            moments=np.zeros((layers if width else 0, width, width), np.float32),
        )

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        active = find_active(activations, self.largest)
        if routing is not None and self.largest is not None:
            # The share is of the neurons that compute: of those of its experts.
            computing = routing.computes[:, routing.owners]
            share = self.largest * float(computing.mean())
            active = find_active(activations, share) & computing
        for place, batch in enumerate(BATCHES):
            groups = len(active) // batch
            # Tokens of a batch stand far apart, as those of different sequences do.
            united = active[: groups * batch].reshape(batch, groups, -1).any(axis=0)
            self.fired[layer, place] += united.sum(axis=0)
            self.groups[layer, place] += groups
        sampled = active[:, self.samples].astype(np.float32)
        self.together[layer] += (sampled.T @ sampled).astype(np.int64)
        if len(self.moments):
            self.moments[layer] += inputs.T @ inputs

    def list_sums(self) -> dict[str, npt.NDArray[Any]]:
        names = ("fired", "groups", "together", "moments")
        return {name: getattr(self, name) for name in names}

    def restore(self, windows: int, found: Mapping[str, npt.NDArray[Any]]) -> int:
        """Go on from the sums of ``windows``; return their number."""
        for name, array in self.list_sums().items() if windows else ():
            array[...] = found[name]
        return windows


def find_active(activations: F32, largest: float | None) -> Bits:
    """Which of ``activations`` [T, neurons] count as active."""
    if largest is None:
        return np.asarray(activations != 0)
    magnitudes = np.abs(activations)
    neurons = activations.shape[1]
    place = neurons - max(1, round(largest * neurons))
    cuts = np.partition(magnitudes, place, axis=1)[:, place]
    return np.asarray(magnitudes >= cuts[:, None])


def measure_skew(fired: I64) -> float:
    """Smallest share of neurons that makes 80% of all activations ``fired`` [neurons]."""
    total = int(fired.sum())
    if total == 0:
        return 0.0
    sums = np.cumsum(np.sort(fired)[::-1])
    return float(np.searchsorted(sums, 0.8 * total) + 1) / len(fired)


UNFINISHED = "unfinished.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics:
    active: float
    """Mean share of neurons that a token activates; in an MoE model, of its experts' neurons."""
    skew: float
    """Smallest share of neurons that makes 80 % of the activations."""
    never: float
    """Share of neurons that never fired."""
    batches: tuple[float, ...]
    """Mean share of a layer's neurons that some token of a batch of 1, 2, 3, 4 tokens activates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Summary of a finished recording: ``statistics.json``."""

    model: str
    job: str
    """Digest of plan, text and options, which is the same for the same call."""
    tokens: int
    active: float
    """Means over layers."""
    skew: float
    layers: tuple[LayerStatistics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    largest: float | None = None
    """Share of a token's neurons that counts as active; None counts activations other than zero."""
    samples: int = 256
    """Neurons of a layer whose pairs are counted."""
    moments: bool = False
    """Whether the second moments of the FFN's inputs are kept, for quantisers."""


def record_activations(
    plan: Path,
    passages: Passages,
    folder: Path,
    *,
    overrides: Mapping[str, object] | None = None,
    options: RecordingOptions | None = None,
    replace: bool = False,
    progress: Progress = ignore_progress,
) -> Statistics:
    """Run ``plan`` over ``passages`` and write statistics into ``folder``; UserError P660-P662 for
    text and backend, P664 for a foreign folder, P665 for smooth activations, P666 if writing
    fails."""
    chosen = options or RecordingOptions()
    counts: Counts | None = None

    def observe(executor: Executor, request: BuildRequest) -> DenseObserver:
        nonlocal counts
        if request.model.is_smooth and chosen.largest is None:
            experts = "; --routing records its experts" if request.model.moe is not None else ""
            raise UserError.of(
                "P665",
                f"the neurons of model {request.model.id!r} ({request.model.ffn.activation}) are "
                "never exactly zero",
                help="use --largest 0.5 to count the larger half of a token's neurons as active"
                + experts,
            )
        counts = Counts.make(request, chosen)
        return DenseObserver(executor, request, counts)

    with load(plan, set=overrides, progress=progress, make_observer=observe) as model:
        assert counts is not None
        windows = passages.cut(model)
        texts = [hashlib.sha256(text.encode()).hexdigest() for text in passages.texts]
        counted = {"context": passages.context, "windows": passages.count, **asdict(chosen)}
        asked = json.dumps([model.plan.digest, counted, texts], sort_keys=True)
        job = hashlib.sha256(asked.encode()).hexdigest()
        known = _prepare_folder(folder, job, replace=replace)
        if known is not None:
            return known
        kept = Unfinished(folder / UNFINISHED, _write, compresses=False)
        first = counts.restore(kept.begin(job), kept.arrays)
        for done in run_windows(model, windows, partial(progress, "recording"), first=first):
            kept.keep_windows(done, counts.list_sums)
        original = np.stack([layer.original for layer in model.store.layers])
        summary = summarise_counts(counts, model.plan.model, job)
        notes = note_identity(model.store)
        _write(folder / ACTIVATIONS, encode_activations(counts, original, notes))
        _write(folder / COACTIVATIONS, encode_coactivations(counts, original, notes))
        for layer, moments in enumerate(counts.moments):
            path = folder / name_moments(layer)
            path.parent.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.save(buffer, moments / summary.tokens)
            _write(path, buffer.getvalue())
        _write(folder / SUMMARY, json.dumps(asdict(summary), indent=1).encode() + b"\n")
        kept.drop()
    return summary


def summarise_counts(counts: Counts, model: Model, job: str) -> Statistics:
    neurons = counts.fired.shape[2]
    chosen = 1.0 if model.moe is None else model.moe.active_experts / model.moe.experts
    layers = tuple(
        LayerStatistics(
            active=float(fired[0].sum() / (groups[0] * neurons * chosen)),
            skew=measure_skew(fired[0]),
            never=float((fired[0] == 0).mean()),
            batches=tuple(
                float(fired[place].sum() / (groups[place] * neurons)) if groups[place] else 0.0
                for place in range(len(BATCHES))
            ),
        )
        for fired, groups in zip(counts.fired, counts.groups, strict=True)
    )
    return Statistics(
        model=model.id,
        job=job,
        tokens=int(counts.groups[0, 0]),
        active=float(np.mean([layer.active for layer in layers])),
        skew=float(np.mean([layer.skew for layer in layers])),
        layers=layers,
    )


def encode_activations(counts: Counts, original: I32, identity: Mapping[str, str]) -> bytes:
    """Parquet of the counts by layer and neuron of the checkpoint; ``identity``: of which model."""
    layers, _, neurons = counts.fired.shape
    sorted_counts = np.empty_like(counts.fired)
    for layer in range(layers):
        sorted_counts[layer][:, original[layer]] = counts.fired[layer]
    columns = {
        "layer": np.repeat(np.arange(layers, dtype=np.int16), neurons),
        "neuron": np.tile(np.arange(neurons, dtype=np.int32), layers),
        "count": sorted_counts[:, 0].reshape(-1),
    }
    notes = {**identity, "tokens": str(int(counts.groups[0, 0]))}
    for place, batch in enumerate(BATCHES[1:], 1):
        columns[f"count_{batch}"] = sorted_counts[:, place].reshape(-1)
        notes[f"batches_{batch}"] = str(int(counts.groups[0, place]))
    return encode_table(columns, notes)


def encode_coactivations(counts: Counts, original: I32, identity: Mapping[str, str]) -> bytes:
    """Parquet of the pairs of sampled neurons, ``first`` below ``second``."""
    left, right = np.triu_indices(len(counts.samples), 1)
    layers = len(counts.together)
    pairs = np.stack([original[:, counts.samples[left]], original[:, counts.samples[right]]])
    columns = {
        "layer": np.repeat(np.arange(layers, dtype=np.int16), len(left)),
        "first": pairs.min(axis=0).reshape(-1),
        "second": pairs.max(axis=0).reshape(-1),
        "count": counts.together[:, left, right].reshape(-1),
    }
    notes = {**identity, "tokens": str(int(counts.groups[0, 0]))}
    return encode_table(columns, notes)


def _prepare_folder(folder: Path, job: str, *, replace: bool) -> Statistics | None:
    """Make the folder; returns the statistics if this very job has finished before."""
    known = read_summary(folder, Statistics)
    if known is not None and not replace:
        if known.job == job:
            return known
        raise UserError.of(
            "P664",
            f"{folder} has the statistics of another run",
            help="choose another folder, or use --force",
        )
    try:
        if folder.is_dir() and any(
            path.name not in (SUMMARY, ACTIVATIONS, COACTIVATIONS, UNFINISHED, MOMENTS)
            and not path.name.startswith(".")
            for path in folder.iterdir()
        ):
            raise UserError.of(
                "P664", f"{folder} holds other files", help="choose a new or empty folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explain(folder, error) from None
    return None


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; UserError P666 if the system refuses."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise _explain(path, error) from None


def _explain(path: Path, error: OSError) -> UserError:
    return UserError.of(
        "P666",
        f"cannot write {path}: {error.strerror}",
        help="free disk space, or choose a folder that can be written",
    )


def draw_activations(folder: Path, statistics: Statistics, file_format: str) -> bytes:
    """Draw hotness curves and skew of all layers; UserError P632, P633, P540."""
    layers = len(statistics.layers)
    counts, _ = read_counts(folder / ACTIVATIONS, layers)
    figure = make_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    colours = pick_colours(layers)
    for layer, fired in enumerate(counts):
        chances = np.sort(fired)[::-1] / statistics.tokens
        shares = np.arange(1, len(chances) + 1) / len(chances)
        label = str(layer) if layer in (0, layers - 1) else None
        left.plot(shares * 100, chances * 100, color=colours[layer], linewidth=0.8, label=label)
    left.set_xlabel("% of the layer's neurons, hottest first")
    left.set_ylabel("% of tokens that activate them")
    add_legend(left, title="layer")
    middle.bar(np.arange(layers), [layer.skew * 100 for layer in statistics.layers], color=colours)
    middle.set_xlabel("layer")
    middle.set_ylabel("% of neurons for 80 % of activations")
    for batch, style in enumerate(pick_styles(4)):
        shares = np.array([layer.batches[batch] * 100 for layer in statistics.layers])
        right.plot(np.arange(layers), shares, markersize=4, label=str(batch + 1), **style)
    right.set_xlabel("layer")
    right.set_ylabel("% of neurons active")
    add_legend(right, title="tokens in\na batch")
    figure.suptitle(f"{statistics.model}: {statistics.tokens} tokens")
    return save_figure(figure, file_format)
