"""Generate text from a plan."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.commands import in_help, write_text
from pi2.cli.hints import find_hint
from pi2.cli.options import ChosenPlan, take_plan
from pi2.diagnostics import UserError
from pi2.logging import get_logger

if TYPE_CHECKING:
    from pi2.engine.generation import GenerationResult
    from pi2.engine.loaded_model import LoadedModel
    from pi2.plan.arithmetic.resolved import ResolvedPlan


PASSED_ON = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def run_mlc(
    resolved: ResolvedPlan,
    folder: Path | None,
    prompt: str | Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Generate text with the folder's weights, or those that the plan's ``store`` names where it
    names the backend; UserError P686-P689."""
    from pi2.backends.mlc.backend import open_text
    from pi2.backends.units import TextRequest

    if options["ignore_eos"]:
        raise UserError.of("P687", "MLC-LLM's interface has no --ignore-eos")
    settings = resolved.plan
    request = TextRequest(
        folder=resolved.store_path if folder is None else folder,
        model=resolved.model,
        unit=resolved.device.units[resolved.sparse_unit] if folder is None else None,
        context=settings.kv.context,
        chunk=settings.prefill.chunk,
    )
    with closing(open_text(request)) as engine:
        begun, first, pieces = time.monotonic(), None, []
        for piece in engine.generate(
            prompt, settings.sampling, max_tokens=options["max_tokens"], stop=options["stop"]
        ):
            first = time.monotonic() if first is None else first
            pieces.append(piece)
            if not as_json:
                write_text(piece)
        ended, finished = time.monotonic(), engine.finished
    assert finished is not None
    rate = None
    if first is not None and finished.tokens and finished.tokens > 1 and ended > first:
        rate = (finished.tokens - 1) / (ended - first)
    facts = {
        "engine": "mlc_llm",
        "text": "".join(pieces),
        "finish_reason": finished.reason,
        "prompt_tokens": finished.prompt_tokens,
        "tokens": finished.tokens,
        "load_s": round(engine.load_s, 4),
        "ttft_s": None if first is None else round(first - begun, 4),
        "decode_tokens_s": None if rate is None else round(rate, 4),
        "plan_digest": resolved.digest,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    waited = "-" if first is None else f"{(first - begun) * 1e3:.0f} ms"
    speed = "-" if rate is None else f"{rate:.1f} tokens/s"
    click.echo()
    click.echo(
        f"MLC-LLM: load {engine.load_s:.2f} s · first token {waited} · decode {speed}"
        f" ({finished.tokens} tokens, {finished.reason}) · its memory is its own, no budget of the"
        f" plan's holds · plan {resolved.digest[:12]}",
        err=True,
    )


def choose_sampling(options: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of the plan that a run's options replace."""
    return {f"sampling.{name}": options[name] for name in PASSED_ON if options[name] is not None}


def log_plan(model: LoadedModel) -> None:
    """Say how memory and neurons are divided."""
    log = get_logger(plan_digest=model.plan.digest[:12])
    sizes = dict(model.plan.plan.memory.segments)
    for name, need in model.plan.needs.items():
        log.debug("segment", segment=name, size_bytes=sizes[name], needed_bytes=need.bytes)
    for number, layer in enumerate(model.plan.layers):
        log.debug("layer", layer=number, split=dict(layer.split), hot_neurons=layer.hot_neurons)


def log_counters(model: LoadedModel) -> None:
    """Say what the neuron cache and the reads did since the model was loaded."""
    log = get_logger(plan_digest=model.plan.digest[:12])
    log.debug("counters", io_engine=model.io_engine, **asdict(model.stats))


@in_help("Run", "Generate text from a plan.")
@click.command("run")
@click.option(
    "-p", "--prompt", "prompts", multiple=True, help="Prompt; repeat for several sequences."
)
@click.option(
    "-f",
    "--file",
    "prompt_file",
    type=click.Path(path_type=Path),
    help=("Read the prompt from a file."),
)
@click.option(
    "--prompts",
    "list_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read one prompt per line from a file.",
)
@click.option(
    "--chat", metavar="TEXT", help=("User message, sent using the model's chat template.")
)
@click.option("--system", metavar="TEXT", help="System message, with --chat.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Maximum number of tokens to generate.",
)
@click.option(
    "--temperature", type=float, help=("Sampling temperature; 0 is greedy.  [default: the plan's]")
)
@click.option("--top-k", type=int, help="Sample from the k most likely tokens; 0 for all.")
@click.option(
    "--top-p",
    type=float,
    help=("Sample from the smallest set of tokens with at least this total probability."),
)
@click.option(
    "--min-p",
    type=float,
    help=("Sample from tokens with at least this fraction of the top probability."),
)
@click.option(
    "--repetition-penalty",
    type=float,
    help=("Penalty for tokens that were already used; above 1 avoids them."),
)
@click.option("--seed", type=int, help="Random seed.")
@click.option(
    "--best-of",
    type=click.IntRange(min=2, max=64),
    metavar="N",
    help="Draw N texts at the same time; print the likeliest.",
)
@click.option("--stop", multiple=True, help="Stop at this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-sequence token.")
@click.option(
    "--mlc",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Let an installed MLC-LLM compute a dense model, with the weights of FOLDER.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@take_plan(locked=True, tokenizer=True, has_files=True)
def run_command(
    plan: ChosenPlan,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    list_file: Path | None,
    chat: str | None,
    system: str | None,
    mlc: Path | None,
    as_json: bool,
    best_of: int | None,
    **options: Any,
) -> None:
    """Generate text from PLAN.

    The prompt comes from --prompt, a file, or standard input; --chat sends a message using the
    model's chat template.  Text is streamed to standard output, a summary goes to standard error.

    Several prompts (--prompts, or --prompt repeated) run up to the plan's decode.batch at a time;
    the others are queued.  Each text is printed when it is complete, in the order of the prompts.

    --best-of draws several texts after one prompt, which is read once for those that have a place,
    and prints the one whose tokens have the highest mean log probability.
    """
    from pi2.cli.commands import ProgressBar
    from pi2.engine.run_report import describe_run, summarise_run

    alone = not prompts and prompt_file is None and list_file is None
    messages = list_messages(chat, system, alone=alone)
    texts = [] if messages else read_prompts(prompts, prompt_file, list_file)
    if mlc is not None or plan.resolved.gives_text:
        if plan.memory_bytes is not None or len(texts) > 1 or list_file is not None or best_of:
            raise click.UsageError("MLC-LLM takes one prompt, and neither --memory nor --best-of")
        resolved = plan.change(choose_sampling(options)).resolved
        run_mlc(resolved, mlc, messages or texts[0], options, as_json=as_json)
        return
    if best_of is not None:
        if list_file is not None or len(texts) > 1:
            raise click.UsageError("--best-of takes one prompt")
        given = messages or texts[0]
        run_best_of(plan, given, best_of, as_json, options)
        return
    if list_file is not None or len(texts) > 1:
        run_batch(plan, texts, as_json, options)
        return
    with ProgressBar() as progress, ExitStack() as cleanup:
        model = cleanup.enter_context(plan.load(progress))
        generation = model.generate(
            model.encode_chat(messages) if messages else texts[0],
            progress=lambda share: progress("reading the prompt", share),
            **options,
        )
        # The bar is gone before the first piece is shown.
        pieces = chain(list(islice(generation, 1)), generation)
        cleanup.pop_all()
    log_plan(model)
    with model:
        for piece in pieces:
            if not as_json:
                write_text(piece)
        log_counters(model)
        if as_json:
            click.echo(json.dumps(describe_run(model, generation.result), indent=2))
        else:
            write_text("\n")
            click.echo(summarise_run(model, generation.result), err=True)
            bound = describe_run(model, generation.result)["bound_by"]
            if (hint := find_hint(model, bound)) is not None:
                click.echo(f"hint: {hint}", err=True)
            compare_promise(model, generation.result)


def compare_promise(model: LoadedModel, result: GenerationResult) -> None:
    """Say how the run's speed compares with what its probed device promises."""
    from pi2.planning.comparison import LEAST_TOKENS, describe_promise, find_promise

    tokens, speed = len(result.token_ids), result.decode_tokens_s
    if model.is_dry or tokens < LEAST_TOKENS or speed is None:
        return
    cost = find_promise(model.plan, result.prompt_tokens + tokens // 2)
    if cost is not None:
        click.echo(describe_promise(cost, speed), err=True)


def run_batch(plan: ChosenPlan, texts: list[str], as_json: bool, options: dict[str, Any]) -> None:
    """Continue several prompts."""
    from pi2.cli.commands import ProgressBar
    from pi2.engine.run_report import describe_batch, summarise_batch

    with ProgressBar() as progress:
        model = plan.load(progress)
    log_plan(model)
    with model:
        generation = model.generate_batch(texts, **options)
        shown = 0
        for _ in generation:
            while not as_json and shown in generation.finished:
                write_text(f"--- {shown + 1}\n{generation.finished[shown].text}\n")
                shown += 1
        result = generation.result
        log_counters(model)
        if as_json:
            click.echo(json.dumps(describe_batch(model, result), indent=2))
            return
        for number in range(shown, len(texts)):
            write_text(f"--- {number + 1}\n{generation.finished[number].text}\n")
        click.echo(summarise_batch(model, result), err=True)


def run_best_of(
    plan: ChosenPlan,
    given: str | list[dict[str, str]],
    count: int,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Draw several texts after one prompt, and print the best; UserError P604 where all of them
    would be the same."""
    from pi2.cli.commands import ProgressBar
    from pi2.engine.run_report import describe_batch, summarise_batch

    with ProgressBar() as progress:
        model = plan.load(progress)
    log_plan(model)
    with model:
        temperature = options["temperature"]
        if not (model.plan.plan.sampling.temperature if temperature is None else temperature):
            raise UserError.of(
                "P604",
                "all texts would be the same: the temperature is 0",
                help="give --temperature 0.8, or leave --best-of out",
            )
        ids = model.encode(given) if isinstance(given, str) else model.encode_chat(given)
        result = model.generate_batch([ids] * count, scores=True, **options).result
        assert result.best is not None
        log_counters(model)
        if as_json:
            click.echo(json.dumps(describe_batch(model, result), indent=2))
            return
        write_text(f"{result.sequences[result.best].text}\n")
        click.echo(summarise_batch(model, result), err=True)
        if count > (batch := model.plan.plan.decode.batch):
            click.echo(
                f"note: {batch} at a time, as decode.batch says; --set decode.batch={count} reads "
                "once for all",
                err=True,
            )


def list_messages(chat: str | None, system: str | None, *, alone: bool) -> list[dict[str, str]]:
    """The conversation that the options state, empty if they state none."""
    if chat is None:
        if system is not None:
            raise click.UsageError("--system goes with --chat")
        return []
    if not alone:
        raise click.UsageError("give --chat or a prompt, not both")
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": chat}]


def read_prompts(prompts: tuple[str, ...], file: Path | None, list_file: Path | None) -> list[str]:
    """Return the prompts; UserError P603 or P607 if there is none, or they cannot be read."""
    if bool(prompts) + (file is not None) + (list_file is not None) > 1:
        raise click.UsageError("give one of --prompt, --file and --prompts")
    if prompts:
        return list(prompts)
    if list_file is None:
        return [read_text(file)]
    lines = [line for line in read_text(list_file).splitlines() if line.strip()]
    if not lines:
        raise UserError.of("P603", f"there is no prompt in {list_file}", help="write one per line")
    return lines


def read_text(file: Path | None) -> str:
    """Return the text of a file, or of standard input; UserError P603 or P607."""
    try:
        if file is not None:
            data = file.read_bytes()
        elif sys.stdin.isatty() or not (data := sys.stdin.buffer.read()):
            raise UserError.of(
                "P603", "there is no prompt", help="give --prompt TEXT, -f FILE, or standard input"
            )
        return data.decode("utf-8")
    except OSError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of("P607", f"cannot read the prompt {place}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of(
            "P607",
            f"the prompt is not UTF-8: byte {error.start} of {place}",
            help="save the text as UTF-8",
        ) from None
