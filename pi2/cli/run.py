"""Generate text from a plan."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.options import add_set_option
from pi2.diagnostics import UserError
from pi2.plan.composing.overrides import parse_assignments

if TYPE_CHECKING:
    from pi2.engine.answer import SequenceResult
    from pi2.engine.batch import BatchResult
    from pi2.engine.generation import GenerationResult
    from pi2.engine.loaded_model import LoadedModel
    from pi2.engine.statistics import RunStatistics

GROUP = "Run"


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="Prompt; repeat for several sequences.")
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
@click.option("--stop", multiple=True, help="Stop at this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-sequence token.")
@click.option(
    "--memory", metavar="SIZE", help=("Override the budget, such as 3GiB; segments are refitted.")
)
@add_set_option
@click.option("--locked", is_flag=True, help="Fail if pi2.lock is out of date.")
@click.option("--offline", is_flag=True, help="Do not use the network; running never does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    plan: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    list_file: Path | None,
    chat: str | None,
    system: str | None,
    memory: str | None,
    settings: tuple[str, ...],
    locked: bool,
    offline: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from PLAN.

    The prompt comes from --prompt, a file, or standard input; --chat sends a message using the
    model's chat template.  Text is streamed to standard output, a summary goes to standard error.

    Several prompts (--prompts, or --prompt repeated) run up to the plan's decode.batch at a time;
    the others are queued.  Each text is printed when it is complete, in the order of the prompts.
    """
    from pi2.cli.details import log_counters, log_plan
    from pi2.cli.progress import ProgressBar
    from pi2.orchestrator import load

    del offline  # a promise that is kept without it
    overrides = parse_assignments(settings)
    alone = not prompts and prompt_file is None and list_file is None
    messages = list_messages(chat, system, alone=alone)
    texts = [] if messages else read_prompts(prompts, prompt_file, list_file)
    if list_file is not None or len(texts) > 1:
        run_batch(plan, overrides, locked, memory, texts, as_json, options)
        return
    with ProgressBar() as progress, ExitStack() as cleanup:
        model = cleanup.enter_context(
            load(plan, set=overrides, locked=locked, memory=memory, progress=progress)
        )
        generation = model.generate(
            model.encode_chat(messages) if messages else texts[0],
            progress=lambda share: progress("reading the prompt", share),
            **options,
        )
        # The bar is gone before the first piece is shown.
        pieces = chain(list(islice(generation, 1)), generation)
        cleanup.pop_all()
    for change in model.changes:
        click.echo(f"memory: {change}", err=True)
    log_plan(model)
    with model:
        for piece in pieces:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        log_counters(model)
        if as_json:
            click.echo(json.dumps(describe_run(model, generation.result), indent=2))
        else:
            sys.stdout.write("\n")
            click.echo(summarise_run(model, generation.result), err=True)


def run_batch(
    plan: Path,
    overrides: dict[str, object],
    locked: bool,
    memory: str | None,
    texts: list[str],
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Continue several prompts."""
    from pi2.cli.details import log_counters, log_plan
    from pi2.cli.progress import ProgressBar
    from pi2.orchestrator import load

    with ProgressBar() as progress:
        model = load(plan, set=overrides, locked=locked, memory=memory, progress=progress)
    log_plan(model)
    with model:
        for change in model.changes:
            click.echo(f"memory: {change}", err=True)
        generation = model.generate_batch(texts, **options)
        shown = 0
        for _ in generation:
            while not as_json and shown in generation.finished:
                click.echo(f"--- {shown + 1}\n{generation.finished[shown].text}")
                shown += 1
        result = generation.result
        log_counters(model)
        if as_json:
            click.echo(json.dumps(describe_batch(model, result), indent=2))
            return
        for number in range(shown, len(texts)):
            click.echo(f"--- {number + 1}\n{generation.finished[number].text}")
        click.echo(summarise_batch(model, result), err=True)


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


def describe_run(model: LoadedModel, result: GenerationResult) -> dict[str, Any]:
    """Everything that is known of a run, for machines."""
    return {**describe_sequence(result), **describe_model(model, result.statistics)}


def describe_batch(model: LoadedModel, result: BatchResult) -> dict[str, Any]:
    """Everything that is known of a run with several sequences, for machines."""
    return {
        "sequences": [describe_sequence(item) for item in result.sequences],
        "batch": model.plan.plan.decode.batch,
        "mean_sequences": _rounded(result.mean_sequences),
        "prefill_tokens_s": _rounded(result.prefill_tokens_s),
        "decode_tokens_s": _rounded(result.decode_tokens_s),
        **describe_model(model, result.statistics),
    }


def describe_sequence(result: SequenceResult) -> dict[str, Any]:
    """What is known of a sequence alone."""
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "ttft_s": round(result.ttft_s, 4),
        "prefill_tokens_s": _rounded(result.prefill_tokens_s),
        "decode_tokens_s": _rounded(result.decode_tokens_s),
    }


def describe_model(model: LoadedModel, statistics: RunStatistics) -> dict[str, Any]:
    """What is known of the model that has run, and of what it did."""
    from pi2.cli.unit_report import describe_units
    from pi2.engine.statistics import read_peak_rss_bytes

    return {
        "dry_run": model.is_dry,
        "load_s": round(model.load_s, 4),
        "active_share": _rounded(statistics.active_share),
        "predicted_share": _rounded(statistics.predicted_share),
        "cache_hit_rate": _rounded(statistics.hit_rate),
        "foreseen_share": _rounded(statistics.routing_recall),
        "tokens_without_ahead": statistics.tokens_without_ahead,
        "flash_read_bytes": model.stats.flash_read_bytes,
        "flash_read_generation_bytes": statistics.flash_read_bytes,
        "flash_saved_generation_bytes": statistics.flash_saved_bytes,
        "units": describe_units(model),
        "hot_grown": statistics.hot_grown,
        "hot_shrunk": statistics.hot_shrunk,
        "io_verify": model.plan.plan.io.verify,
        "io_engine": model.io_engine,
        "io_engine_refused": model.engine_fallback,
        "direct_reads_refused": model.fallback,
        "peak_rss_bytes": read_peak_rss_bytes(),
        "budget_changes": list(model.changes),
        "budget_bytes": model.plan.plan.memory.budget,
        "plan_digest": model.plan.digest,
    }


def summarise_run(model: LoadedModel, result: GenerationResult) -> str:
    """A summary of a run for people, in a few lines."""
    run = describe_run(model, result)
    decoded = len(result.token_ids)
    first = (
        f"load {run['load_s']:.2f} s · first token {run['ttft_s'] * 1e3:.0f} ms · "
        f"prefill {_rate(run['prefill_tokens_s'])} ({result.prompt_tokens} tokens) · "
        f"decode {_rate(run['decode_tokens_s'])} ({decoded} tokens, {result.finish_reason})"
    )
    return _summarise(model, run, first)


def summarise_batch(model: LoadedModel, result: BatchResult) -> str:
    """A summary of a run with several sequences for people, in a few lines."""
    run = describe_batch(model, result)
    prompts = sum(item.prompt_tokens for item in result.sequences)
    decoded = sum(len(item.token_ids) for item in result.sequences)
    speed, mean = result.decode_tokens_s, result.mean_sequences
    each = "" if speed is None or mean is None else f", {_rate(speed / mean)} each"
    first = (
        f"load {run['load_s']:.2f} s · {len(result.sequences)} sequences, "
        f"{'-' if mean is None else f'{mean:.1f}'} at a time · "
        f"prefill {_rate(run['prefill_tokens_s'])} ({prompts} tokens) · "
        f"decode {_rate(speed)}{each} ({decoded} tokens)"
    )
    return _summarise(model, run, first)


def _summarise(model: LoadedModel, run: dict[str, Any], first: str) -> str:
    from pi2.cli.unit_report import summarise_units
    from pi2.plan.documents.quantities import approximate_bytes

    peak, budget = run["peak_rss_bytes"], run["budget_bytes"]
    verdict = "within" if peak <= budget else "ABOVE"
    lines = [
        first,
        f"neurons computed {_percent(run['predicted_share'])}, active "
        f"{_percent(run['active_share'])} · cache hits {_percent(run['cache_hit_rate'])} · "
        f"read from flash {approximate_bytes(run['flash_read_bytes'])}",
        f"peak memory {approximate_bytes(peak)}, {verdict} the budget of "
        f"{approximate_bytes(budget)} · plan {model.plan.digest[:12]}",
    ]
    if run["foreseen_share"] is not None:
        stopped = run["tokens_without_ahead"]
        rest = f", and did not pay in {stopped} tokens" if stopped else ""
        named = _percent(run["foreseen_share"])
        lines.append(f"looking ahead named {named} of the experts that computed{rest}")
    lines += summarise_units(run["units"])
    if model.is_dry:
        lines.insert(0, "dry run: nothing was computed or read; the times are pi2's own overhead")
    elif run["io_verify"] == "never":
        lines.append(
            'note: nothing was compared with its checks: the plan says io.verify = "never"'
        )
    if run["direct_reads_refused"]:
        lines.append(f"note: reads go through the page cache: {run['direct_reads_refused']}")
    return "\n".join(lines)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"


def _percent(value: float | None) -> str:
    return "all" if value is None else f"{value:.1%}"
