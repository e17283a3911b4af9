"""Generate text from a plan, and say what would help a run most."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.main import is_verbose
from pi2.cli.options import JSON, ChosenPlan, SamplingOptions, option, take_options, take_plan
from pi2.diagnostics import UserError
from pi2.logging import get_logger
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    from pi2.engine.generation import GenerationResult
    from pi2.engine.loaded_model import LoadedModel
    from pi2.plan.arithmetic.resolved import ResolvedPlan


MORE = 1.1
"""Memory that is worth a word: so many times what the plan has."""


def find_hint(model: LoadedModel, bound: str | None) -> str | None:
    """The one setting that would help most; None if nothing is known that helps."""
    from pi2.engine.statistics import read_peak_rss_bytes
    from pi2.machine import detect_machine

    if bound is None or bound in model.plan.source.whole_units:
        return None
    machine = detect_machine()
    room = machine.memory.available_bytes + read_peak_rss_bytes()
    return choose_hint(model.plan, bound, room_bytes=room, cores=machine.cores)


def choose_hint(resolved: ResolvedPlan, bound: str, *, room_bytes: int, cores: int) -> str | None:
    """What shortens the time that ``bound`` takes, on a machine that has ``room_bytes`` for the
    process and so many cores."""
    plan = resolved.plan
    if bound in ("disk", "waiting for reads"):
        return (bound != "disk" and hint_waits(resolved)) or hint_reads(resolved, room_bytes)
    if plan.threads.compute is not None and plan.threads.compute < cores:
        return f"--set threads.compute={cores} uses all {cores} cores"
    can_draft = plan.decode.speculation is None and not resolved.model.state_layers
    if bound == "memory bandwidth" and can_draft:
        return "--set decode.speculation.tokens=4 reads weights once for several tokens of repeats"
    return None


def hint_waits(resolved: ResolvedPlan) -> str | None:
    """What begins reads earlier, or has more of them in flight."""
    plan = resolved.plan
    if plan.decode.predictor == "low-rank" and plan.decode.look_ahead == "none":
        return "--set decode.look_ahead=layer reads before the layer is computed"
    if plan.io.engine == "pread":
        return "--set io.engine=io_uring keeps more reads in flight than threads do"
    return None


def hint_reads(resolved: ResolvedPlan, room_bytes: int) -> str | None:
    """What makes reads fewer on a machine that has ``room_bytes`` for the process."""
    from pi2.plan.documents.quantities import write_least, write_most

    plan, model, source = resolved.plan, resolved.model, resolved.source
    missing = source.count_missing(resolved)
    whole = plan.memory.budget + missing + missing // 32
    if missing and whole <= room_bytes and fits(resolved, whole):
        return f"--memory '{write_least(whole)}' keeps all {source.counted} in memory"
    if missing and room_bytes > MORE * plan.memory.budget:
        more = source.describe_more(resolved, room_bytes - plan.memory.budget)
        return f"--memory '{write_most(room_bytes)}' keeps {more} in memory"
    if model.is_smooth and model.moe is None and resolved.thresholds is None:
        return "`pi2 sparsity calibrate PLAN --text FILE` finds neurons that need not be read"
    return None


def fits(resolved: ResolvedPlan, budget_bytes: int) -> bool:
    from pi2.refit import refit_plan

    try:
        refit_plan(resolved, budget_bytes)
    except UserError:
        return False
    return True


def run_mlc(
    resolved: ResolvedPlan, prompt: str | Sequence[Mapping[str, Any]], given: RunOptions
) -> None:
    """Generate text with the weights of ``--mlc``, or the plan's ``weights`` if the plan names the
    backend; UserError P686-P689."""
    from pi2.backends.mlc.backend import MlcEngine

    if given.ignore_eos:
        raise UserError.of("P687", "MLC-LLM's interface has no --ignore-eos")
    settings, folder = resolved.plan, given.mlc
    unit = resolved.device.units[resolved.sparse_unit]
    with MlcEngine(
        resolved.store_path if folder is None else folder,
        resolved.model,
        context=settings.kv.context,
        chunk=settings.prefill.chunk,
        device=unit.architecture if folder is None else None,
    ) as engine:
        begun, first, pieces = time.monotonic(), None, []
        for piece in engine.generate(
            prompt, settings.sampling, max_tokens=given.max_tokens, stop=given.stop
        ):
            first = time.monotonic() if first is None else first
            pieces.append(piece)
            if not given.as_json:
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
    if given.as_json:
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


def log_plan(model: LoadedModel) -> None:
    log = get_logger(plan_digest=model.plan.digest[:12])
    sizes = dict(model.plan.plan.memory.segments)
    for name, need in model.plan.needs.items():
        log.debug("segment", segment=name, size_bytes=sizes[name], needed_bytes=need.bytes)
    for number, layer in enumerate(model.plan.layers):
        log.debug("layer", layer=number, split=dict(layer.split), hot_neurons=layer.hot_neurons)


def log_counters(model: LoadedModel) -> None:
    log = get_logger(plan_digest=model.plan.digest[:12])
    log.debug("counters", io_engine=model.io_engine, **asdict(model.stats))


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    prompts: tuple[str, ...] = option("-p", "--prompt")
    prompt_file: Path | None = option("-f", "--file")
    list_file: Path | None = option("--prompts", metavar="FILE")
    chat: str | None = option(metavar="TEXT")
    system: str | None = option(metavar="TEXT")
    max_tokens: int = option("-n", "--max-tokens", type=click.IntRange(min=1), default=128)


@dataclass(frozen=True, kw_only=True)
class RunOptions(SamplingOptions, PromptOptions):
    best_of: int | None = option(type=click.IntRange(2, 64))
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    mlc: Path | None = option(metavar="FOLDER")
    as_json: bool = JSON()

    def list_options(self, model: LoadedModel) -> dict[str, Any]:
        """Options of a generation: a message's answer is drawn as in chats."""
        own = {name: getattr(self, name) for name in ("max_tokens", "stop", "ignore_eos")}
        usual = {} if self.chat is None else model.chat_sampling
        if self.ignore_eos:
            usual |= {"end_repeats": False}
        if self.chat is not None:
            own["stop"] = (*self.stop, *model.plan.plan.chat.stop)
        return {**usual, **self.sampling, **own}


@click.command("run")
@take_options(RunOptions)
@take_plan(locked=True, tokenizer=True)
def run_command(plan: ChosenPlan, given: RunOptions) -> None:
    """Generate text from PLAN.

    The prompt comes from --prompt, a file, or standard input; --chat sends a message using the
    model's chat template.  Text is streamed to standard output, a summary goes to standard error.

    Several prompts (--prompts, or --prompt repeated) run up to the plan's decode.batch at a time;
    the others are queued.  Each text is printed when it is complete, in the order of the prompts.

    --best-of N samples N completions of one prompt and prints the most likely: the highest mean log
    probability of its tokens."""
    from pi2.engine.run_report import describe_expected, describe_run, summarise_run

    messages = list_messages(given)
    texts = [] if messages else read_prompts(given)
    is_one = given.list_file is None and len(texts) < 2
    if given.mlc is not None or plan.resolved.source.gives_text:
        if plan.memory_bytes is not None or not is_one or given.best_of:
            raise click.UsageError("MLC-LLM takes one prompt, and neither --memory nor --best-of")
        changes = {f"sampling.{name}": value for name, value in given.sampling.items()}
        run_mlc(plan.change(changes).resolved, messages or texts[0], given)
        return
    if given.best_of is not None and not is_one:
        raise click.UsageError("--best-of takes one prompt")
    if given.best_of is not None or not is_one:
        run_batch(plan, texts or [messages], given)
        return
    with ProgressBar() as progress, ExitStack() as cleanup:
        model = cleanup.enter_context(plan.load(progress))
        generation = model.generate(
            model.encode_chat(messages) if messages else texts[0],
            progress=lambda share: progress("reading the prompt", share),
            **given.list_options(model),
        )
        # The bar is gone before the first piece is shown.
        pieces = chain(list(islice(generation, 1)), generation)
        cleanup.pop_all()
    log_plan(model)
    with model:
        if (own := model.expected) is not None:
            from pi2.costs.constants import Constants

            bound = "the disk" if own.is_disk else "computing"
            found = Constants().find_label_spread("probed").stretch(own.tokens_s)
            click.echo(describe_expected(found.write(), bound), err=True)
        for piece in pieces:
            if not given.as_json:
                write_text(piece)
        log_counters(model)
        if given.as_json:
            click.echo(json.dumps(describe_run(model, generation.result), indent=2))
        else:
            write_text("\n")
            click.echo(summarise_run(model, generation.result, whole=is_verbose()), err=True)
            bound = describe_run(model, generation.result)["bound_by"]
            if (hint := find_hint(model, bound)) is not None:
                click.echo(f"hint: {hint}", err=True)
            compare_promise(model, generation.result)


def compare_promise(model: LoadedModel, result: GenerationResult) -> None:
    from pi2.costs.cost import LEAST_TOKENS, describe_promise, find_promise

    tokens, speed = len(result.token_ids), result.decode_tokens_s
    if not model.account.is_timed or tokens < LEAST_TOKENS or speed is None:
        return
    cost = find_promise(model.plan, result.prompt_tokens + tokens // 2)
    if cost is not None:
        click.echo(describe_promise(cost, speed), err=True)


def run_batch(plan: ChosenPlan, prompts: Sequence[Any], given: RunOptions) -> None:
    """Print a text after each prompt, or the best of several after one (--best-of); UserError P604
    where all of them would be the same."""
    from pi2.engine.run_report import describe_batch, summarise_batch

    with ProgressBar() as progress:
        model = plan.load(progress)
    log_plan(model)
    with model:
        settings, options, count = model.plan.plan, given.list_options(model), given.best_of or 1
        if given.best_of is not None:
            if not options.get("temperature", settings.sampling.temperature):
                raise UserError.of(
                    "P604",
                    "all texts would be the same: the temperature is 0",
                    help="give --temperature 0.8, or leave --best-of out",
                )
            (prompt,) = prompts
            ids = model.encode(prompt) if isinstance(prompt, str) else model.encode_chat(prompt)
            prompts = [ids] * count
        generation = model.generate_batch(prompts, scores=given.best_of is not None, **options)
        is_shown, shown = not (given.as_json or given.best_of), 0
        for _ in generation:
            while is_shown and shown in generation.finished:
                write_text(f"--- {shown + 1}\n{generation.finished[shown].text}\n")
                shown += 1
        result = generation.result
        log_counters(model)
        if given.as_json:
            click.echo(json.dumps(describe_batch(model, result), indent=2))
            return
        for number in range(shown, len(prompts)) if is_shown else ():
            write_text(f"--- {number + 1}\n{generation.finished[number].text}\n")
        if given.best_of is not None:
            assert result.best is not None
            write_text(f"{result.sequences[result.best].text}\n")
        click.echo(summarise_batch(model, result, whole=is_verbose()), err=True)
        if count > settings.decode.batch:
            click.echo(
                f"note: {settings.decode.batch} at a time, as decode.batch says; --set "
                f"decode.batch={count} reads once for all",
                err=True,
            )


def list_messages(given: PromptOptions) -> list[dict[str, str]]:
    """The conversation that the options state, empty if they state none."""
    if given.chat is None:
        if given.system is not None:
            raise click.UsageError("--system goes with --chat")
        return []
    if given.prompts or given.prompt_file is not None or given.list_file is not None:
        raise click.UsageError("give --chat or a prompt, not both")
    before = [] if given.system is None else [{"role": "system", "content": given.system}]
    return [*before, {"role": "user", "content": given.chat}]


def read_prompts(given: PromptOptions) -> list[str]:
    """Return the prompts; UserError P603 or P607 if there is none, or they cannot be read."""
    from pi2.engine.generation import read_prompt

    file = given.list_file
    if bool(given.prompts) + (given.prompt_file is not None) + (file is not None) > 1:
        raise click.UsageError("give one of --prompt, --file and --prompts")
    if given.prompts:
        return list(given.prompts)
    if file is None:
        return [read_prompt(given.prompt_file)]
    lines = [line for line in read_prompt(file).splitlines() if line.strip()]
    if not lines:
        raise UserError.of("P603", f"there is no prompt in {file}", help="write one per line")
    return lines


def write_text(text: str) -> None:
    """Write generated text at once, without control characters if standard output is a terminal."""
    sys.stdout.write(show_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_controls(text: str) -> str:
    """Text without control characters, which a model may write to command a terminal."""
    return "".join("\ufffd" if is_control(letter) else letter for letter in text)


def is_control(letter: str) -> bool:
    """Whether a terminal obeys it: C0 and C1 but new lines and tabs, and text direction marks."""
    code = ord(letter)
    is_turning = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return (code < 32 and letter not in "\n\t") or 127 <= code < 160 or is_turning
