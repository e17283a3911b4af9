"""Run models in memory groups of exactly their budgets: Linux, as root, control groups 1 or 2.

    python tools/check_budgets.py ~/models/*.gguf
    python tools/check_budgets.py FILE.gguf --budgets 0 0.5 --contexts 2048 --prompts 300
    python tools/check_budgets.py FILE.gguf --ways serve bench chat load --batches 4
    python tools/check_budgets.py STORE.plan.toml --contexts 2048 --prompts 6

Prints a row for each run, and fails where one was killed, had a peak above its budget, or was
slower than a tenth of what was expected.  Budgets are shares of the way from the least that a file
or a store needs to all of it.  The setting of huge pages is the system's: it is put back at the
end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from limited.memory_group import MemoryGroup
from pi2.diagnostics import UserError
from pi2.fitting.completion import fill_gaps
from pi2.machine.cpu import detect_cpu
from pi2.plan.documents.plan import Plan
from pi2.refit import read_plan
from pi2.weights.file_plan import count_needs
from pi2.weights.gguf_weights import GgufWeights

MIB = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BUDGETS = (0.0, 0.15, 0.4, 0.7, 1.0)
CONTEXTS, PROMPTS, BATCHES = (512, 2048, 8192), (6, 300, 1500), (1, 4)
WAYS = ("run", "load", "bench", "chat", "serve")
NEW_TOKENS = 8
LEAST_SPEED = 0.1
"""Share of the expected speed below which a run counts as stuck."""
SENTENCE = "The sky is blue and the sea is wide. "
"""Nine or ten tokens."""
_PATIENCE_S = 20.0
"""Start of a process on a busy machine, which belongs to no speed."""
_LOAD = """
import json, sys, pi2
from pi2.engine.statistics import read_peak_rss_bytes
path, memory, sets, prompt, count = json.loads(sys.argv[1])
with pi2.load(path, memory=memory, set=sets) as model:
    result = model.generate(prompt, max_tokens=count, ignore_eos=True).result
    print(json.dumps({"decode_tokens_s": result.decode_tokens_s, "prompt": result.prompt_tokens,
                      "peak_rss_bytes": read_peak_rss_bytes()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    file: Path
    share: float
    context: int
    prompt: int
    """Tokens, about."""
    drafts: int
    batch: int
    huge: str
    way: str = "run"

    @property
    def text(self) -> str:
        letters = 4 if self.file.suffix == ".gguf" else 1  # stores of random weights read bytes
        return (SENTENCE * (self.prompt // 9 + 1))[: max(6, self.prompt * letters)]

    @property
    def sets(self) -> dict[str, Any]:
        drafts = {"drafts": "prompt", "tokens": self.drafts, "when": "always"}
        return {
            "kv.context": self.context,
            "decode.batch": self.batch,
            **{f"decode.speculation.{key}": value for key, value in drafts.items()},
        }

    def count_budget(self) -> int:
        count = count_range if self.file.suffix == ".gguf" else find_range
        least, whole = count(self.file, self.context, self.batch, self.drafts)
        return round(least + self.share * (whole - least)) // MIB * MIB + MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int | None
    """None: it was ended because it went on for too long."""
    kills: int
    peak_bytes: int | None
    tokens_s: float | None
    expected_s: float | None
    seconds: float
    note: str = ""

    def list_faults(self, budget: int) -> list[str]:
        found = []
        if self.kills or self.code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            found.append("KILLED")
        elif self.code is None:
            found.append("NO END")
        elif self.code:
            found.append(f"EXIT {self.code}")
        if self.peak_bytes is not None and self.peak_bytes > budget:
            found.append("ABOVE")
        speeds = self.tokens_s, self.expected_s
        if None not in speeds and speeds[0] < LEAST_SPEED * speeds[1]:  # type: ignore[operator]
            found.append("SLOW")
        return found


@cache
def open_weights(file: Path) -> GgufWeights:
    return GgufWeights.open(file)


@cache
def count_range(file: Path, context: int, batch: int, drafts: int) -> tuple[int, int]:
    """Bytes of the least budget with the shortest chunk, and of one that holds everything."""
    threads = max(4, detect_cpu().cores)

    def count(chunk: int) -> Any:
        values = {
            "schema_version": 3,
            "weights": file.name,
            "device": "host",
            "model": "any",
            "kv": {"context": context},
            "prefill": {"chunk": min(chunk, context), "activations": "int8"},
            "decode": {"batch": batch, "activations": "int8", "speculation": {"tokens": drafts}},
        }
        plan = Plan.model_validate_json(json.dumps(fill_gaps(values)))
        return count_needs(open_weights(file), plan, threads)

    needs, most = count(32), count(1024 if open_weights(file).model.moe is not None else 256)
    return needs.least, most.fixed + most.matrices


@cache
def find_range(plan: Path, context: int, batch: int, drafts: int) -> tuple[int, int]:
    """As `count_range`, of a plan of a neuron store: its own sizes say the least, and refuse less.

    A plan that holds all is taken as it is written."""
    given = {
        "kv.context": context,
        "decode.batch": batch,
        "decode.speculation": {"drafts": "prompt", "tokens": drafts, "when": "always"},
    }
    most = read_plan(plan, overrides=given).resolved.plan.memory.budget
    least = 0
    while most - least > MIB:
        tried = (least + most) // 2
        try:
            read_plan(plan, overrides=given, memory_bytes=tried).resolved  # noqa: B018
        except UserError:
            least = tried
        else:
            most = tried
    whole = read_plan(plan, overrides=given, memory_bytes=most).resolved
    return most, most + whole.source.count_missing(whole)


def write_command(trial: Trial, budget: int, folder: Path) -> list[str]:
    """The command of every way but ``serve``, whose requests come later."""
    own = [sys.executable, "-B", "-m", "pi2", trial.way, str(trial.file)]
    given = ["--memory", f"{budget} B"]
    given += [f"--set={key}={value}" for key, value in trial.sets.items()]
    if trial.way == "run":
        prompts = [part for _ in range(trial.batch) for part in ("--prompt", trial.text)]
        return [*own, *given, "--json", "--ignore-eos", f"-n{NEW_TOKENS}", *prompts]
    if trial.way == "bench":
        tokens = [f"--prompt-tokens={trial.prompt}", f"-n{NEW_TOKENS}", "--repetitions=1"]
        several = [f"--sequences={trial.batch}"] if trial.batch > 1 else []
        return [*own, *given, *tokens, *several, "--format=json"]
    if trial.way == "chat":
        return [*own, *given, f"-n{NEW_TOKENS}", "--prompt", trial.text]
    if trial.way == "load":
        path, memory = str(trial.file), f"{budget} B"
        values = json.dumps([path, memory, trial.sets, trial.text, NEW_TOKENS])
        return [sys.executable, "-B", "-c", _LOAD, values]
    return [*own, *given, "--port=0"]


def run_trial(trial: Trial, group: MemoryGroup | None, budget: int, limit_s: float) -> Outcome:
    """Run it in ``group``, or anywhere to find its speed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, open(Path(name) / "err", "w+") as errors:
        command = write_command(trial, budget, Path(name))
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors}
        options["stdin"] = subprocess.DEVNULL
        if group is None:
            process = subprocess.Popen(command, text=True, **options)
        else:
            process = group.start(command, **options)
        peak, found = None, dict[str, Any]()
        code: int | None = None
        try:
            if trial.way == "serve":
                found = ask_server(process, trial, limit_s, Path(name) / "err")
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=limit_s)
            code = process.returncode
            if trial.way == "serve":
                code = 0 if found.get("answers") == trial.batch else code or 1
            elif code == 0 and trial.way != "chat":
                found = json.loads(out)
        except (subprocess.TimeoutExpired, TimeoutError):
            process.kill()
            process.communicate()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    peak = find_value(found, "peak_rss_bytes")
    return Outcome(
        code=code,
        kills=0 if group is None else group.kills,
        peak_bytes=peak,
        tokens_s=find_value(found, "decode_tokens_s"),
        expected_s=find_value(found, "expected_tokens_s"),
        seconds=time.monotonic() - start,
        note=next((line for line in lines if line.startswith("error")), "") if code else "",
    )


def find_value(found: Any, name: str) -> Any:
    """The first value of a name in JSON; None without one."""
    if isinstance(found, dict):
        if found.get(name) is not None:
            return found[name]
        found = list(found.values())
    if isinstance(found, list):
        values = (find_value(item, name) for item in found if isinstance(item, dict | list))
        return next((value for value in values if value is not None), None)
    return None


def ask_server(
    process: subprocess.Popen[str], trial: Trial, limit_s: float, errors: Path
) -> dict[str, Any]:
    """Send as many requests at once as there are sequences; how many were answered."""
    import re
    import threading
    import urllib.request

    end, address = time.monotonic() + limit_s, None
    while address is None:
        if process.poll() is not None:
            return {}
        if time.monotonic() > end:
            raise TimeoutError
        address = re.search(r"http://[\w.]+:\d+", errors.read_text())
        time.sleep(0.1)
    base, answers = address[0], []
    body = {"model": "", "prompt": trial.text, "max_tokens": NEW_TOKENS, "ignore_eos": True}

    def get(path: str, given: dict[str, Any] | None = None) -> Any:
        data = None if given is None else json.dumps(given).encode()
        request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return json.load(answer)

    def ask() -> None:
        with suppress(OSError, ValueError):
            answers.append(get("/v1/completions", body))

    body["model"] = get("/v1/models")["data"][0]["id"]
    threads = [threading.Thread(target=ask) for _ in range(trial.batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return {"answers": len(answers), "peak_rss_bytes": int(peak.split()[1]) * 1024}


@contextmanager
def set_huge_pages(wanted: str) -> Iterator[None]:
    """Change the system's setting for a while; ``as is`` leaves it."""
    if wanted == "as is":
        yield
        return
    before = HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    try:
        HUGE_PAGES.write_text(wanted)
        yield
    finally:
        HUGE_PAGES.write_text(before)


@cache
def find_speed(trial: Trial) -> float | None:
    """Tokens per second where all is in memory and nothing limits it."""
    whole = replace(trial, share=1.0)
    return run_trial(whole, None, whole.count_budget() + 64 * MIB, 600).tokens_s


def list_trials(options: argparse.Namespace) -> Iterator[Trial]:
    for values in itertools.product(
        options.files,
        options.huge,
        options.contexts,
        options.budgets,
        options.prompts,
        options.drafts,
        options.batches,
        options.ways,
    ):
        names = ("file", "huge", "context", "share", "prompt", "drafts", "batch", "way")
        trial = Trial(**dict(zip(names, values, strict=True)))
        if trial.prompt + NEW_TOKENS < trial.context <= find_longest(trial.file):
            yield trial


@cache
def find_longest(file: Path) -> int:
    """Tokens of the longest context."""
    if file.suffix == ".gguf":
        return open_weights(file).model.shape.context
    return read_plan(file).resolved.model.shape.context


def check(trial: Trial, limit_s: float) -> tuple[list[str], str]:
    """Faults of a trial, and its row."""
    budget = trial.count_budget()
    with set_huge_pages(trial.huge):
        with MemoryGroup(budget, name="pi2-check") as group:
            found = run_trial(trial, group, budget, limit_s)
            charged = group.peak_bytes
    if found.tokens_s is not None and found.expected_s is None and trial.way == "run":
        fastest = find_speed(replace(trial, share=1.0, huge="as is"))
        found = replace(found, expected_s=fastest)
    faults = found.list_faults(budget)
    cells = [
        trial.file.name[:12],
        trial.way,
        trial.huge,
        budget // MIB,
        trial.context,
        trial.prompt,
        trial.drafts,
        trial.batch,
        _show(found.peak_bytes, MIB),
        _show(charged, MIB),
        _show(found.tokens_s),
        _show(found.expected_s),
        f"{found.seconds:.0f}",
        " ".join([*faults, found.note[:90]]) or "ok",
    ]
    return faults, "| " + " | ".join(map(str, cells)) + " |"


def _show(value: float | None, unit: float = 1) -> str:
    return "" if value is None else f"{value / unit:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--drafts", type=int, nargs="+", default=(1, 6), help="tokens at once")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    choices = ("as is", "always", "madvise", "never")
    parser.add_argument("--huge", choices=choices, nargs="+", default=choices[1:])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS[:1])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a run")
    options = parser.parse_args(arguments)
    # The setting of huge pages is put back then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = "file,way,huge pages,budget MiB,context,prompt,drafts,batch,peak MiB,group MiB"
    heads = [*names.split(","), "tokens/s", "expected", "seconds", "found"]
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    failed = count = 0
    for trial in list_trials(options):
        faults, row = check(trial, options.limit)
        count, failed = count + 1, failed + bool(faults)
        print(row, flush=True)
    print(f"\n{count} runs, {failed} failed")
    return int(failed > 0 or count == 0)


if __name__ == "__main__":
    if os.name != "posix":
        sys.exit("control groups exist on Linux only")
    sys.exit(main())
