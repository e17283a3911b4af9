"""Write a store of random weights that behaves like a trained model, for measuring speed.

    python tools/synthesize.py plans/models/bamboo-7b.model.toml /data/bamboo-7b \\
        --plan /data/bamboo-7b.plan.toml

Neurons fire as rarely as asked for, some much more often than others, and predictors predict them;
the text that such a model makes means nothing.  The store says that it is synthetic.  What was
asked for is then measured on the store itself, printed, and kept in it: statistics.json, and
activations.parquet with the activations of every neuron (with --layers, only the former).

Experts of a mixture compute as many tokens each, unless --routing says otherwise; shares are of the
neurons of one expert.

A job that was killed goes on where it was when started again; a store that is already there is
only measured.  The same options give the same bytes.  Memory: below 1 GiB for a 7B model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pi2.diagnostics import UserError, texts
from pi2.fitting.check import check_file, load_plan
from pi2.importing.conversion_job import check_experts, note_identity
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    QuantityError,
    approximate_bytes,
    parse_quantity,
)
from pi2.plan.reading.references import find_document
from pi2.planning.wish import read_document
from pi2.progress import ProgressBar
from pi2.store.manifest import read_manifest
from pi2.store.reader import NeuronStore
from synthesis.additions import add_files
from synthesis.blueprint import Blueprint
from synthesis.calibration import tune_blueprint
from synthesis.generation import RECIPE_FILE, write_synthetic_store
from synthesis.measurement import Measurement, measure_store
from synthesis.plan_file import PlanWish, write_plan
from synthesis.recipe import Recipe, check_recipe
from synthesis.routing import read_routing
from synthesis.statistics import average_layers, describe_layers, round_values, write_counts

STATISTICS_FILE = "statistics.json"
COUNTS_FILE = "activations.parquet"


def main() -> int:
    """Make, measure, and write a plan; exit codes as those of ``pi2``."""
    arguments = parse_arguments()
    try:
        synthesize(arguments)
    except UserError as error:
        sys.stderr.write(texts.render_full(error.diagnostics, colour=False, sources=error.sources))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Recipe()
    parser.add_argument("model", help="a model file, or the short name of a shipped one")
    parser.add_argument("output", type=Path, help="folder of the store")
    parser.add_argument(
        "--active",
        type=float,
        help=f"mean share of active neurons (the model file's, else {defaults.active})",
    )
    for name, text in (
        ("skew", "share of the neurons that makes 80 %% of the activations"),
        ("variation", "deviation of a token's share of active neurons, relative to the mean"),
        ("correlation", "of successive tokens of the vocabulary"),
        ("recall", "share of the active neurons that predictors find"),
        ("agreement", "dReLU: share of positive gates whose up is positive too"),
    ):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{text} ({value})")
    parser.add_argument("--seed", type=int, default=0, help="start of the random numbers (0)")
    parser.add_argument("--stride", help='bytes from neuron to neuron, such as "8 KiB"')
    parser.add_argument(
        "--scales",
        choices=("inline", "resident"),
        default="inline",
        help="where scales lie: in the bundles, or in files of their own",
    )
    parser.add_argument(
        "--order",
        choices=("hotness", "expert"),
        default="hotness",
        help="of the neurons: most active first, or so in bands, by expert within each",
    )
    parser.add_argument(
        "--routing",
        default="uniform",
        metavar="FILE",
        help="mixtures: uniform (every expert as often as any other), published (caches hit as "
        "often as was published of such mixtures), a JSON file with such statistics, or "
        "routing.parquet of pi2 activations --routing",
    )
    parser.add_argument("--replace", action="store_true", help="replace a store that is there")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to measure with (256)")
    parser.add_argument("--layers", type=int, help="layers to measure, from the first on (all)")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--plan", type=Path, help="write a plan for this machine to this file")
    plan.add_argument(
        "--memory", help='its budget: "60%%" of the store, or "4 GiB"; all resident if not given'
    )
    plan.add_argument("--predictor", choices=("none", "gate", "low-rank"))
    plan.add_argument("--context", type=int, help="tokens of the KV cache (2048)")
    plan.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    return parser.parse_args()


def synthesize(arguments: argparse.Namespace) -> None:
    """Make the store, its statistics and its plan."""
    model = read_document(arguments.model, "model").document
    assert isinstance(model, Model)
    model_file = find_document(arguments.model, "model", Path())
    recipe = make_recipe(arguments, model)
    check_recipe(recipe, model)
    if arguments.order == "expert":
        check_experts(model)
    output: Path = arguments.output
    with ProgressBar() as progress:
        start = time.perf_counter()
        blueprint = tune_blueprint(model, recipe)
        finished = is_finished(output, blueprint, arguments.order, arguments.scales)
        if arguments.replace or not finished:
            write_synthetic_store(
                output,
                blueprint,
                stride=None if arguments.stride is None else parse_bytes(arguments.stride),
                scales=arguments.scales,
                order=arguments.order,
                replace=arguments.replace,
                progress=progress,
            )
        made_s = time.perf_counter() - start
        measurement = measure_store(
            output, model, tokens=arguments.tokens, most_layers=arguments.layers, progress=progress
        )
    statistics = describe(blueprint, measurement)
    files = {STATISTICS_FILE: json.dumps(statistics, indent=1).encode() + b"\n"}
    if len(measurement.layers) == model.shape.layers:
        with NeuronStore.open(output) as store:
            identity = note_identity(store)
        files[COUNTS_FILE] = write_counts(measurement.counts, measurement.tokens, identity)
    manifest = add_files(output, files)
    size = sum(entry.bytes for entry in manifest.files)
    print(f"{output}: {approximate_bytes(size)}, synthetic, made in {made_s:.0f} s")
    print(report(blueprint, measurement))
    if arguments.plan is not None:
        write_plan(
            arguments.plan,
            model=model,
            model_file=model_file,
            device=load_host(),
            store=output,
            bundle=manifest.bundle.layout,
            store_bytes=size,
            wish=make_wish(arguments),
        )
        resolved = load_plan(arguments.plan)
        budget = approximate_bytes(resolved.plan.memory.budget)
        print(f"{arguments.plan}: budget {budget}, digest {resolved.digest[:12]}")


def parse_bytes(text: str) -> int:
    """Bytes that ``text`` means; `UserError` P552 if it has no unit, or a wrong one."""
    try:
        return int(parse_quantity(text, BYTE_UNITS))
    except QuantityError as error:
        raise UserError.of("P552", str(error), help='for example "4 GiB"') from None


def load_host() -> Device:
    """The shipped device that stands for whatever machine this is."""
    found = check_file(find_document("host", "device", Path()))
    assert isinstance(found.document, Device)
    return found.document


def make_recipe(arguments: argparse.Namespace, model: Model) -> Recipe:
    """What is asked for; the active share may come from the model file."""
    moe, active = model.moe, arguments.active
    chosen = 0 if moe is None else moe.active_experts
    if active is None:
        active = Recipe().active if model.sparsity is None else model.sparsity.active
    return Recipe(
        active=active,
        skew=arguments.skew,
        variation=arguments.variation,
        correlation=arguments.correlation,
        recall=arguments.recall,
        agreement=arguments.agreement,
        routing=None if moe is None else read_routing(arguments.routing, moe.experts, chosen),
        seed=arguments.seed,
    )


def make_wish(arguments: argparse.Namespace) -> PlanWish:
    """What the plan shall be like."""
    memory: float | int | None = None
    if arguments.memory is not None:
        text = arguments.memory.strip()
        memory = float(text[:-1]) / 100 if text.endswith("%") else parse_bytes(text)
    return PlanWish(
        memory=memory,
        predictor=arguments.predictor,
        context=arguments.context,
        backend=arguments.backend,
    )


def is_finished(output: Path, blueprint: Blueprint, order: str, scales: str) -> bool:
    """Whether the store that would be made is there already."""
    if not (output / "manifest.json").is_file():
        return False
    manifest = read_manifest(output)
    entry = manifest.find_file(RECIPE_FILE)
    if not manifest.synthetic or entry is None:
        return False
    if (manifest.order, manifest.bundle.scales) != (order, scales):
        return False
    made = json.loads((output / RECIPE_FILE).read_text("utf-8"))
    return bool(made == blueprint.recipe.describe(blueprint.model))


def describe(blueprint: Blueprint, measurement: Measurement) -> dict[str, object]:
    """Contents of statistics.json."""
    shares, layers = measurement.token_shares, describe_layers(measurement.layers)
    mean = round_values(average_layers(measurement.layers))
    return {
        "synthetic": True,
        "tokens": measurement.tokens,
        "asked": blueprint.recipe.describe(blueprint.model),
        "mean": mean,
        "token_active": round_values(
            {
                "mean": float(shares.mean()),
                "deviation": float(shares.std()),
                "least": float(shares.min()),
                "most": float(shares.max()),
            }
        ),
        # Layers that were not measured are made like the others.
        "layers": layers + [mean] * (blueprint.model.shape.layers - len(layers)),
    }


def report(blueprint: Blueprint, measurement: Measurement) -> str:
    """Report for people: asked and measured."""
    recipe, layers = blueprint.recipe, measurement.layers
    mean = average_layers(layers)
    shares = measurement.token_shares
    variation = float(shares.std() / shares.mean())

    def span(name: str) -> str:
        values = [getattr(layer, name) for layer in layers]
        return f"{min(values):.4f} .. {max(values):.4f}"

    rows = [
        ("active share", f"{recipe.active:.4f}", f"{mean['active']:.4f}", span("active")),
        ("skew", f"{recipe.skew:.4f}", f"{mean['skew']:.4f}", span("skew")),
        ("variation over tokens", f"{recipe.variation:.4f}", f"{variation:.4f}", ""),
        ("made by the first half", "", f"{mean['first_half']:.4f}", span("first_half")),
        ("positive gates", "", f"{mean['gate_positive']:.4f}", span("gate_positive")),
        ("overlap of next tokens", "", f"{mean['overlap']:.4f}", span("overlap")),
        ("overlap by chance", "", f"{mean['overlap_by_chance']:.4f}", span("overlap_by_chance")),
    ]
    if mean["recall"] is not None:
        rows.insert(3, ("recall", f"{recipe.recall:.4f}", f"{mean['recall']:.4f}", span("recall")))
        rows.insert(4, ("predicted share", "", f"{mean['predicted']:.4f}", span("predicted")))
    of_what = "a layer's neurons"
    if blueprint.model.moe is not None:
        of_what = "the neurons of a token's active experts"
        asked = f"{blueprint.model.moe.active_experts / blueprint.model.moe.experts:.4f}"
        for name, value in (("least busy expert", "least_load"), ("busiest expert", "most_load")):
            rows.append((name, asked, f"{mean[value]:.4f}", span(value)))
    lines = [
        f"measured with {measurement.tokens} tokens in {len(layers)} layers; shares of {of_what}"
    ]
    lines.append(f"{'':24}{'asked':>8}{'mean':>9}   layers")
    lines += [f"{name:24}{asked:>8}{found:>9}   {spread}" for name, asked, found, spread in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
