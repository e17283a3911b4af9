"""``python -m pi2_phone [DIR]``: generate, verify, look at the machine; exit codes of pi2."""

import argparse
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError, texts
from pi2.logging import configure_logging
from pi2.phone.documents import PLAN, STORE, TABLE, check_bundle, read_bundle, read_resolved
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sources import FileFacts

CANNOT_RUN, BUG, INTERRUPTED = 2, 3, 130
SAMPLING: Mapping[str, type[float | int]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "seed"), int),
}
"""How tokens are drawn: options, and types of their values."""


def main(arguments: Sequence[str]) -> int:
    try:
        return run(make_parser().parse_args(arguments))
    except UserError as error:
        sys.stderr.write(texts.render_full(error.diagnostics))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return CANNOT_RUN
    except MemoryError:
        print("error[P690]: this machine has not enough free memory", file=sys.stderr)
        return CANNOT_RUN
    except Exception as error:
        reason = traceback.format_exception_only(error)[-1].strip()
        print(f"error[P900]: pi2 has a bug: {reason}", file=sys.stderr)
        traceback.print_exc()
        return BUG


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pi2_phone", description="Generate text with the model of this bundle."
    )
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the bundle")
    parser.add_argument("--prompt", action="append", default=[], help="prompt; repeatable")
    parser.add_argument("-f", "--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--chat", metavar="TEXT", help="user message (needs jinja2)")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    for name, kind in SAMPLING.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, metavar="N" if kind is int else "X")
    parser.add_argument("--stop", action="append", default=[], help="stop at this text")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the last token")
    parser.add_argument("--store", type=Path, help="neuron store, if it is not in the bundle")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--verify", action="store_true", help="compare all files with their hashes")
    parser.add_argument("--machine", action="store_true", help="show what this machine is")
    parser.add_argument("--probe", action="store_true", help="measure this machine")
    parser.add_argument("-o", "--output", type=Path, help="NAME.device.toml, with --probe")
    parser.add_argument("--disk", type=Path, help="folder to measure, with --probe")
    parser.add_argument("-v", "--verbose", action="count", default=0)
    return parser


def run(options: argparse.Namespace) -> int:
    configure_logging(options.verbose)
    if options.machine:
        return show_machine()
    folder = find_folder(options.folder)
    check_bundle(folder, read_bundle(folder), hashed=options.verify)
    resolved = read_plan(folder)
    if options.probe:
        return probe(resolved, options)
    resolved = find_weights(resolved, folder, options.store)
    offer_programs(folder)
    if options.verify:
        return verify_store(resolved)
    return generate(resolved, options)


def find_folder(given: Path | None) -> Path:
    """The folder of the bundle that this code is in; UserError P671 if another is ``given``."""
    own = Path(__file__).resolve().parents[5]
    if given is not None and given.resolve() != own:
        raise UserError.of(
            "P671",
            f"{given} is not the bundle that this program belongs to, {own}",
            help=f"start the other one with {given / 'run.sh'}",
        )
    return own


def offer_programs(folder: Path) -> None:
    """Let programs of an NPU be found that were built in the bundle (``hexagon/UNIT/build.sh``)."""
    own = [str(path) for path in sorted((folder / "hexagon").glob("*/"))]
    os.environ["PATH"] = os.pathsep.join([*own, os.environ.get("PATH", os.defpath)])


def read_plan(folder: Path) -> ResolvedPlan:
    """Read the bundle's plan; UserError P671 if it is damaged."""
    try:
        return read_resolved(folder / PLAN)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError.of("P671", f"{folder / PLAN} cannot be read: {error}") from None


def find_weights(resolved: ResolvedPlan, folder: Path, store: Path | None) -> ResolvedPlan:
    """The plan with its weights, which may be in another ``store``; UserError P676 without."""
    if isinstance(resolved.source, FileFacts):
        missing = [file for file in resolved.source.weights.files if not file.is_file()]
        if missing:
            raise UserError.of(
                "P676",
                f"there is no {missing[0]}",
                help=f"copy the GGUF file of {resolved.model.id} to {folder / STORE}",
            )
        return resolved
    if store is not None:
        plan = resolved.plan.model_copy(update={"weights": str(store.resolve())})
        own = resolved.__dict__["digest"]
        resolved = replace(resolved, plan=plan)
        resolved.__dict__["digest"] = own
    if not (resolved.store_path / "manifest.json").is_file():
        raise UserError.of(
            "P676",
            f"there is no neuron store in {resolved.store_path}",
            help=f"copy the store of {resolved.model.id} to {folder / STORE}, or give --store",
        )
    return resolved


def read_digests(resolved: ResolvedPlan) -> dict[Path, str]:
    """The SHA-256 of each file of the weights that the bundle was built with."""
    if isinstance(resolved.source, FileFacts):
        files = resolved.source.weights.files
        table = json.loads((files[0].parent / TABLE).read_text(encoding="utf-8"))
        return {file: table["sha256"][file.name] for file in files}
    from pi2.store.manifest import read_manifest

    folder = resolved.store_path
    return {folder / entry.path: entry.sha256 for entry in read_manifest(folder).files}


def verify_store(resolved: ResolvedPlan) -> int:
    """Read all weights; UserError P507 if they differ from the ones that were built in."""
    from pi2.store.files import hash_file

    for file, digest in read_digests(resolved).items():
        if hash_file(file) != digest:
            raise UserError.of(
                "P507",
                f"{file.name}: its contents have changed: the SHA-256 differs",
                help="copy the weights again as a whole",
            )
    print(f"all files are as they were built: plan {resolved.digest[:12]}")
    return 0


def show_machine() -> int:
    from pi2.machine import detect_machine, list_allowed_cores
    from pi2.plan.documents.quantities import approximate_bytes

    machine = detect_machine()
    print(f"architecture {machine.architecture}")
    print(f"features {','.join(sorted(machine.features)) or 'none known'}")
    print(f"cores {machine.cores}: {','.join(map(str, list_allowed_cores())) or 'not bound'}")
    print(f"memory {approximate_bytes(machine.memory.limit_bytes)}")
    return 0


def probe(resolved: ResolvedPlan, options: argparse.Namespace) -> int:
    """Write a device file; UserError P301 and P302 where the bundle's kernels cannot run."""
    from pi2.fitting.misfits import find_processor_misfits
    from pi2.machine import detect_machine
    from pi2.phone.runtime.probing import has_kernels, list_recipes, write_probe

    if options.output is None:
        raise UserError.of("P675", "--probe needs -o NAME.device.toml", help="name a new file")
    if misfits := find_processor_misfits(resolved, detect_machine()):
        raise UserError(tuple(misfits), exit_code=2)
    place = options.disk or options.output.absolute().parent
    recipes = list_recipes(resolved)
    if not has_kernels(recipes):
        recipes = []
        print("kernels are not timed: the bundle was built --without-probe", file=sys.stderr)
    print("measuring takes some minutes; run nothing else meanwhile", file=sys.stderr)
    write_probe(options.output, place, recipes)
    print(options.output)
    return 0


def generate(resolved: ResolvedPlan, options: argparse.Namespace) -> int:
    from pi2.engine.opening import Wish
    from pi2.engine.run_report import describe_run, summarise_run
    from pi2.orchestrator import build

    prompt = None if options.chat is not None else choose_prompt(options)
    chosen = {name: getattr(options, name) for name in SAMPLING}
    with build(resolved, Wish()) as model:
        generation = model.generate(
            model.encode_chat(list_messages(options)) if prompt is None else prompt,
            max_tokens=options.max_tokens,
            stop=tuple(options.stop),
            ignore_eos=options.ignore_eos,
            **chosen,
        )
        for piece in generation:
            if not options.json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if options.json:
            print(json.dumps(describe_run(model, generation.result), indent=2))
        else:
            sys.stdout.write("\n")
            print(summarise_run(model, generation.result), file=sys.stderr)
    return 0


def choose_prompt(options: argparse.Namespace) -> str:
    """Return the prompt; UserError P603 or P607 if there is none, or it cannot be read."""
    if len(options.prompt) + (options.file is not None) > 1:
        raise UserError.of("P603", "a bundle takes one prompt", help="give --prompt once, or -f")
    from pi2.engine.generation import read_prompt

    return str(options.prompt[0]) if options.prompt else read_prompt(options.file)


def list_messages(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the conversation; UserError P677 where templates cannot be rendered."""
    if importlib.util.find_spec("jinja2") is None:
        raise UserError.of(
            "P677",
            "chat templates need jinja2, which is not installed here",
            help="`pip install jinja2`, or give the text of the conversation with --prompt",
        )
    before = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*before, {"role": "user", "content": options.chat}]
