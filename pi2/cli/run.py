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
from pi2.plan.overrides import parse_assignments

if TYPE_CHECKING:
    from pi2.engine.generation import GenerationResult
    from pi2.engine.loaded_model import LoadedModel


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue.")
@click.option(
    "-f", "--file", "prompt_file", type=click.Path(path_type=Path), help="File with the prompt."
)
@click.option("--chat", metavar="TEXT", help="Question to answer, by the model's chat template.")
@click.option("--system", metavar="TEXT", help="What the model is told before the question.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option("--temperature", type=float, help="0 is greedy; default: the plan's.")
@click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, help="Keep the smallest set that reaches this probability.")
@click.option("--min-p", type=float, help="Keep tokens this likely beside the likeliest.")
@click.option("--repetition-penalty", type=float, help="Above 1 avoids tokens already seen.")
@click.option("--seed", type=int, help="Start of the random numbers.")
@click.option("--stop", multiple=True, help="End at this text; may be given again.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end token.")
@click.option("--memory", metavar="SIZE", help="Another budget, such as 3GiB; segments follow.")
@add_set_option
@click.option("--locked", is_flag=True, help="Fail where pi2.lock is out of date.")
@click.option("--offline", is_flag=True, help="Use no network; running never does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    plan: Path,
    prompt: str | None,
    prompt_file: Path | None,
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

    The prompt is --prompt, a file, or standard input; --chat puts a question into the words that
    the model was trained to answer.  Text goes to standard output as it is made, a summary to
    standard error.
    """
    from pi2.cli.progress import ProgressBar
    from pi2.orchestrator import load

    del offline  # a promise that is kept without it
    overrides = parse_assignments(settings)
    messages = list_messages(chat, system, alone=prompt is None and prompt_file is None)
    text = "" if messages else read_prompt(prompt, prompt_file)
    with ProgressBar() as progress, ExitStack() as cleanup:
        model = cleanup.enter_context(
            load(plan, set=overrides, locked=locked, memory=memory, progress=progress)
        )
        generation = model.generate(
            model.encode_chat(messages) if messages else text,
            progress=lambda share: progress("reading the prompt", share),
            **options,
        )
        # The bar is gone before the first piece is shown.
        pieces = chain(list(islice(generation, 1)), generation)
        cleanup.pop_all()
    for change in model.changes:
        click.echo(f"memory: {change}", err=True)
    with model:
        for piece in pieces:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if as_json:
            click.echo(json.dumps(describe_run(model, generation.result), indent=2))
        else:
            sys.stdout.write("\n")
            click.echo(summarise_run(model, generation.result), err=True)


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


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt; UserError P603 or P607 if there is none, or it cannot be read."""
    if prompt is not None and file is not None:
        raise click.UsageError("give --prompt or --file, not both")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        raise UserError.of(
            "P603", "there is no prompt", help="give --prompt TEXT, -f FILE, or standard input"
        )
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError.of("P607", f"cannot read the prompt {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of(
            "P607",
            f"the prompt is not UTF-8: byte {error.start} of {place}",
            help="save the text as UTF-8",
        ) from None


def describe_run(model: LoadedModel, result: GenerationResult) -> dict[str, Any]:
    """Everything that is known of a run, for machines."""
    from pi2.engine.statistics import read_peak_rss_bytes

    statistics = result.statistics
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "dry_run": model.is_dry,
        "load_s": round(model.load_s, 4),
        "ttft_s": round(result.ttft_s, 4),
        "prefill_tokens_s": _rounded(result.prefill_tokens_s),
        "decode_tokens_s": _rounded(result.decode_tokens_s),
        "active_share": _rounded(statistics.active_share),
        "predicted_share": _rounded(statistics.predicted_share),
        "cache_hit_rate": _rounded(statistics.hit_rate),
        "flash_read_bytes": model.stats.flash_read_bytes,
        "flash_read_generation_bytes": statistics.flash_read_bytes,
        "flash_saved_generation_bytes": statistics.flash_saved_bytes,
        "hot_grown": statistics.hot_grown,
        "hot_shrunk": statistics.hot_shrunk,
        "io_engine": model.io_engine,
        "io_engine_refused": model.engine_fallback,
        "direct_reads_refused": model.fallback,
        "peak_rss_bytes": read_peak_rss_bytes(),
        "budget_changes": list(model.changes),
        "budget_bytes": model.plan.plan.memory.budget,
        "plan_digest": model.plan.digest,
    }


def summarise_run(model: LoadedModel, result: GenerationResult) -> str:
    """The same for people, in a few lines."""
    from pi2.plan.quantities import approximate_bytes

    run = describe_run(model, result)
    peak, budget = run["peak_rss_bytes"], run["budget_bytes"]
    verdict = "within" if peak <= budget else "ABOVE"
    decoded = len(result.token_ids)
    lines = [
        f"load {run['load_s']:.2f} s · first token {run['ttft_s'] * 1e3:.0f} ms · "
        f"prefill {_rate(run['prefill_tokens_s'])} ({result.prompt_tokens} tokens) · "
        f"decode {_rate(run['decode_tokens_s'])} ({decoded} tokens, {result.finish_reason})",
        f"neurons computed {_percent(run['predicted_share'])}, active "
        f"{_percent(run['active_share'])} · cache hits {_percent(run['cache_hit_rate'])} · "
        f"read from flash {approximate_bytes(run['flash_read_bytes'])}",
        f"peak memory {approximate_bytes(peak)}, {verdict} the budget of "
        f"{approximate_bytes(budget)} · plan {model.plan.digest[:12]}",
    ]
    if model.is_dry:
        lines.insert(0, "dry run: nothing was computed or read; the times are pi2's own overhead")
    if run["direct_reads_refused"]:
        lines.append(f"note: reads go through the page cache: {run['direct_reads_refused']}")
    return "\n".join(lines)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"


def _percent(value: float | None) -> str:
    return "all" if value is None else f"{value:.1%}"
