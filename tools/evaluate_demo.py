"""Measure the demo model from the shipped store: the figures of docs/demo-model.md.

    python tools/evaluate_demo.py             # print the figures
    python tools/evaluate_demo.py --write     # put them into docs/demo-model.md
    python tools/evaluate_demo.py --check     # exit 1 if the card says something else

The text is held out from training: whole files of the Python standard library, in the store's
``heldout.txt``.  Windows of 256 tokens, the first 16 of each not counted.  Dense figures come from
the prefill path, sparse ones from the decode path, token by token, as a user's run does.  All are
deterministic on one machine; other processors may differ in the last digit shown.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import pi2
from pi2.engine.loaded_model import LoadedModel
from pi2.plan.packing import unpack_bundles

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "plans" / "demo.plan.toml"
HELDOUT = ROOT / "plans" / "stores" / "pi2-demo" / "heldout.txt"
CARD = ROOT / "docs" / "demo-model.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
WINDOW, WARM_UP = 256, 16


def cut_windows(model: LoadedModel, text: str, windows: int) -> list[list[int]]:
    """Windows of token ids, spread evenly over the text."""
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    available = len(ids) // WINDOW
    chosen = np.unique(np.linspace(0, available - 1, min(windows, available)).astype(int))
    return [ids[start * WINDOW : (start + 1) * WINDOW] for start in chosen]


def score(logits: npt.NDArray[np.float32], ids: list[int]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of each token after the warm-up, in nats."""
    scores = logits[WARM_UP - 1 : -1].astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    norm = np.log(np.exp(scores).sum(axis=-1))
    return np.asarray(norm - scores[np.arange(len(scores)), ids[WARM_UP:]])


def measure_perplexity(
    backend: str, predictor: str, windows: int
) -> tuple[float, float, pi2.RunStatistics]:
    """Perplexity per token, bits per byte, and the counters of the run."""
    settings = {"backends": {"cpu": backend}, "decode.predictor": predictor}
    with pi2.load(PLAN, set=settings) as model:
        mode = "prefill" if predictor == "none" else "decode"
        before = model.stats
        losses, counted = [], 0
        for ids in cut_windows(model, HELDOUT.read_text("utf-8"), windows):
            losses.append(score(model.logits(ids, mode=mode), ids))  # type: ignore[arg-type]
            counted += len(model.tokenizer.decode(ids[WARM_UP:]).encode())
        loss = np.concatenate(losses)
        bits = float(loss.sum() / np.log(2) / counted)
        return float(np.exp(loss.mean())), bits, model.stats - before


def measure_layers(windows: int) -> Iterator[tuple[float, float, float]]:
    """Per layer: share of active neurons, share predicted, recall (reference backend)."""
    settings = {"backends": {"cpu": "reference"}, "decode.predictor": "low-rank"}
    with pi2.load(PLAN, set=settings) as model:
        from pi2.backends.reference import ReferenceExecutor, activate

        parts = model._parts
        executor = parts.executor
        assert isinstance(executor, ReferenceExecutor)
        assert parts.store is not None
        layout = parts.store.bundle
        bundles = [unpack_bundles(layer.bundles, layout) for layer in parts.store.layers]
        layers, neurons = len(bundles), model.plan.model.shape.ffn
        totals = np.zeros((layers, 3))
        tokens = 0
        threshold = model.plan.plan.decode.threshold
        for ids in cut_windows(model, HELDOUT.read_text("utf-8"), windows):
            executor.embed(np.array(ids, np.int32))
            for layer, (gate, up, down) in enumerate(bundles):
                executor.attend(layer, 0)
                executor.begin_ffn(layer)
                u = executor._u
                inner = np.maximum(u @ executor._layer(layer, "predictor_in").T, 0)
                score = inner @ executor._layer(layer, "predictor_out").T
                named = score + executor._layer(layer, "predictor_bias") >= threshold
                values = activate(executor._model, u @ gate.T, u @ up.T)
                active = values != 0
                totals[layer] += active.sum(), named.sum(), (active & named).sum()
                executor._y = values @ down
                executor.end_ffn(layer)
            tokens += len(ids)
        for active, predicted, found in totals:
            yield active / tokens / neurons, predicted / tokens / neurons, found / active


def describe(windows: int, layer_windows: int) -> str:
    """All figures as Markdown."""
    rows = [
        ("reference", "none", "every neuron, float32 activations"),
        ("cpu", "none", "every neuron, compiled kernels"),
        ("cpu", "gate", "exact, compiled kernels"),
        ("cpu", "low-rank", "predicted neurons only, compiled kernels"),
    ]
    lines = [
        f"Held-out text, {windows} windows of {WINDOW} tokens; int4 weights, int8 embedding:",
        "",
        "| backend | predictor | | perplexity | bits per byte | neurons computed |",
        "|---|---|---|---|---|---|",
    ]
    for backend, predictor, label in rows:
        perplexity, bits, statistics = measure_perplexity(backend, predictor, windows)
        share = statistics.predicted_share
        computed = "100 %" if share is None else f"{share * 100:.1f} %"
        lines.append(
            f"| {backend} | {predictor} | {label} | {perplexity:.2f} | {bits:.3f} | {computed} |"
        )
    layers = list(measure_layers(layer_windows))
    lines += [
        "",
        f"Activations and predictors by layer ({layer_windows} windows, reference backend):",
        "",
        "| layer | active | predicted | recall |",
        "|---|---|---|---|",
    ]
    for number, (active, predicted, recall) in enumerate(layers):
        lines.append(
            f"| {number} | {active * 100:.1f} % | {predicted * 100:.1f} % | {recall * 100:.1f} % |"
        )
    active, predicted, recall = np.mean(layers, axis=0)
    lines.append(
        f"| mean | {active * 100:.1f} % | {predicted * 100:.1f} % | {recall * 100:.1f} % |"
    )
    return "\n".join(lines)


def main() -> int:
    """Print, write or check the figures."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--layer-windows", type=int, default=16)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    figures = describe(arguments.windows, arguments.layer_windows)
    print(figures)
    if not (arguments.write or arguments.check):
        return 0
    card = CARD.read_text("utf-8")
    block = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
    expected = block.sub(lambda _: f"{BEGIN}\n{figures}\n{END}", card)
    if arguments.check:
        if expected != card:
            print("the model card says something else", file=sys.stderr)
        return int(expected != card)
    CARD.write_text(expected, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
