"""Measure a GPU: the contract suite, its read rate, and whole models of random weights on it.

    python tools/bench_gpu.py --api cuda --tests -o gpu-h200.md
    python tools/bench_gpu.py --api cuda --compile sm_90 --cache DIR    kernels, without a GPU

Prints a Markdown page: the device with its driver and clocks, the suite's result, and in one run
the rate at which the device reads its memory, tokens of dense and sparse models as shares of it,
what handing a token over costs, and prompts.  Weights are random and are made on the device: their
times are those of the shape.  --plans adds what tools/bench_against.py says of plans,
such as of one that gives the GPU a third of the weights.

Where the processor plays the GPU, every table says so: its times are nobody's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_rows.random_model import RandomModel, describe_random_use, shape_model
from gpu_rows.read_rate import measure_read_rate
from limited.random_gguf import write_gguf
from pi2.backends.gpu.arrays import Memory
from pi2.backends.gpu.devices import APIS, open_device
from pi2.backends.gpu.instructions import Translator
from pi2.backends.gpu.kernels.specification import GpuSpec, Target
from pi2.backends.gpu.launchers.interface import DeviceFacts, Launcher
from pi2.backends.gpu.launches import load_image
from pi2.backends.gpu.model_arrays import ModelArrays
from pi2.diagnostics import UserError, texts
from pi2.fitting.check import load_plan
from pi2.plan.documents.model import Model
from pi2.planning.wish import read_document
from pi2.progress import ProgressBar

ROOT = Path(__file__).resolve().parents[1]
AGAINST = ROOT / "tools/bench_against.py"
SUITE = (
    "tests/backend",
    "tests/end_to_end/test_gpu_alone.py",
    "tests/end_to_end/test_gpu_beside.py",
)
_CLOCKS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw"
_MIB = 1 << 20


def main() -> int:
    """Measure; exit codes as those of ``pi2``, 1 also where the suite fails."""
    arguments = parse_arguments()
    if arguments.cache is not None:
        os.environ["PI2_CACHE_DIR"] = str(arguments.cache.resolve())
    try:
        if arguments.compile is not None:
            compile_kernels(arguments)
            return 0
        lines, status = list(describe(arguments)), 0
        if arguments.tests:
            text, status = run_suite()
            lines += ["", f"Contract suite: {text}"]
        lines += ["", *measure(arguments)]
        for plan in arguments.plans:
            lines += ["", *bench_plan(plan)]
    except UserError as error:
        sys.stderr.write(texts.render_full(error.diagnostics, colour=False, sources=error.sources))
        return error.exit_code
    page = "\n".join(lines) + "\n"
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page, "utf-8")
    return status


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--api", choices=APIS, default="cuda")
    parser.add_argument("--dense", default="llama-2-7b", help="model of the dense row")
    parser.add_argument("--sparse", default="bamboo-7b", help="model of the sparse row")
    parser.add_argument("--active", type=float, default=0.1, help="share of neurons named (0.1)")
    parser.add_argument("--layers", type=int, help="take fewer layers, to try this out")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a row (64)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--read-mib", type=int, default=2048, help="what is read (2048 MiB)")
    parser.add_argument("--tests", action="store_true", help="run the contract suite first")
    parser.add_argument("--plans", nargs="*", default=(), type=Path, help="plans to bench, too")
    parser.add_argument("--compile", metavar="ARCH", help="only compile kernels for sm_NN")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    parser.add_argument("-o", "--output", type=Path, help="file to write")
    return parser.parse_args()


def find_model(arguments: argparse.Namespace, name: str) -> Model:
    """The model of a row."""
    document = read_document(name, "model").document
    assert isinstance(document, Model)
    return shape_model(document, arguments.layers)


def list_rows(arguments: argparse.Namespace) -> Iterator[tuple[str, Model, float | None]]:
    """Name, model and share of named neurons of each row."""
    yield f"{arguments.dense}, dense", find_model(arguments, arguments.dense), None
    sparse = find_model(arguments, arguments.sparse)
    yield f"{arguments.sparse}, dense", sparse, None
    yield f"{arguments.sparse}, {arguments.active:.0%} named", sparse, arguments.active


def compile_kernels(arguments: argparse.Namespace) -> None:
    """Put the kernels of all rows into the cache, for a machine that has no compiler."""
    target = Target(api="cuda", fp16=True, arch=arguments.compile)
    specs = [GpuSpec(target=target, reads=True)]
    for _, model, active in list_rows(arguments):
        use = describe_random_use(model, active, arguments.prompt, count_context(arguments), "fp16")
        steps = Translator(use, ModelArrays(Memory(), use)).translate()
        specs.append(steps.describe(use, target))
    for spec in specs:
        load_image(spec, ProgressBar())
    print(f"{len(specs)} sets of kernels for {arguments.compile} are in the cache")


def count_context(arguments: argparse.Namespace) -> int:
    """Tokens that there is room for."""
    return int(arguments.prompt + arguments.tokens)


def describe(arguments: argparse.Namespace) -> Iterator[str]:
    """The device, its driver and its clocks as they are now."""
    launcher = open_device(arguments.api)
    facts = launcher.facts
    launcher.close()
    yield f"# {facts.name}{mark(facts)}"
    yield ""
    yield f"{arguments.api}, driver {facts.driver}, {facts.compute_units} compute units."
    yield f"Clocks before: {read_clocks()}."


def mark(facts: DeviceFacts) -> str:
    """What stands behind the name of a device that is none."""
    return " (*emulated*: times say nothing of a GPU)" if facts.is_emulated else ""


def read_clocks() -> str:
    """What NVIDIA's program says of driver and clocks, if it is there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "nvidia-smi is not here"
    command = [program, f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def run_suite() -> tuple[str, int]:
    """The suite's last line, and 1 where it fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "gpu", *SUITE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    return lines[-1], int(done.returncode != 0)


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """The table of all rows, and the device's clocks after them."""
    launcher = open_device(arguments.api)
    facts, progress = launcher.facts, ProgressBar()
    rate = measure_read_rate(launcher, arguments.read_mib * _MIB, progress)
    yield f"Read rate{mark(facts)}: {rate / 1e9:.1f} GB/s."
    yield ""
    heads = ("model", "ms a token", "tokens/s", "read for it", "of the read rate", "handed over in")
    yield f"| {' | '.join(heads)} | prompt of {arguments.prompt} |"
    yield "|---|---|---|---|---|---|---|"
    for name, model, active in list_rows(arguments):
        yield measure_row(launcher, arguments, rate, name, model, active)
    yield ""
    yield f"Clocks after: {read_clocks()}."
    launcher.close()


def measure_row(
    launcher: Launcher,
    arguments: argparse.Namespace,
    rate: float,
    name: str,
    model: Model,
    active: float | None,
) -> str:
    """A row: medians of all tokens, and of prompts."""
    prompt, tokens = arguments.prompt, arguments.tokens
    use = describe_random_use(model, active, prompt, count_context(arguments), "fp16")
    on_device = RandomModel(launcher, use, active, ProgressBar())
    prompts, steps = [], []
    for _ in range(arguments.repetitions + 1):
        prompts.append(on_device.prefill(prompt))
        steps.append([on_device.step(prompt + turn) for turn in range(tokens)])
    assert on_device.is_finite(), "the model's weights are too large"
    read_bytes = on_device.count_step_bytes(prompt + tokens // 2)
    on_device.close()
    # The first round warms up.
    timed = [step for some in steps[1:] for step in some]
    total_s = statistics.median(step.total_s for step in timed)
    launch_s = statistics.median(step.launch_s for step in timed)
    prompt_s = statistics.median(prompts[1:])
    cells = (
        name,
        f"{total_s * 1e3:.2f}",
        f"{1 / total_s:.1f}",
        f"{read_bytes / 1e6:.0f} MB",
        f"{read_bytes / total_s / rate:.1%}",
        f"{launch_s * 1e3:.3f} ms",
        f"{prompt / prompt_s:.0f} tokens/s",
    )
    return f"| {' | '.join(cells)} |"


def bench_plan(plan: Path) -> Iterator[str]:
    """What tools/bench_against.py says of a plan."""
    command: Sequence[str] = [sys.executable, str(AGAINST), str(plan), "-p", "512"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        write_gguf(load_plan(plan).model, file)
        done = subprocess.run(
            [*command, "--file", str(file)], capture_output=True, text=True, check=False
        )
    yield f"## {plan.name}"
    yield ""
    yield done.stdout.strip() or done.stderr.strip()


if __name__ == "__main__":
    sys.exit(main())
