"""Watch a server in the terminal."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import click

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from rich.console import Group


@click.command("top")
@click.argument("address", default="http://127.0.0.1:8000")
@click.option("--api-key", metavar="KEY", help="Key of the server.  [default: PI2_API_KEY]")
@click.option("-n", "--count", type=click.IntRange(min=1), help="End after N looks.")
def top_command(address: str, api_key: str | None, count: int | None) -> None:
    """Watch the server at ADDRESS: speed, bound, hits, memory and segments of its models.

    ADDRESS is http://127.0.0.1:8000 by default.  Ctrl-C ends it."""
    from rich.live import Live

    address = address if "://" in address else f"http://{address}"
    key = api_key or os.environ.get("PI2_API_KEY", "")
    before, looks = read_state(address, key), 0
    with Live(make_table(before, before), refresh_per_second=4) as live:
        while count is None or looks < count:
            time.sleep(1.0)
            now = read_state(address, key)
            live.update(make_table(before, now))
            before, looks = now, looks + 1


def read_state(address: str, key: str) -> dict[str, Any]:
    """What the server says of itself, and when; UserError P746 if it does not."""
    request = urllib.request.Request(f"{address.rstrip('/')}/api/state")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return {**json.load(reply), "at": time.monotonic()}
    except (OSError, ValueError) as error:
        raise UserError.of(
            "P746",
            f"no server of pi2 answers at {address}: {getattr(error, 'reason', error)}",
            help="`pi2 serve PLAN` starts one and prints its address; --api-key gives its key",
        ) from None


def make_table(before: dict[str, Any], now: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.table import Table

    from pi2.plan.documents.quantities import approximate_bytes

    old = {model["name"]: model for model in before["models"]}
    table = Table(title=f"pi2 · peak memory {approximate_bytes(now['peak_memory_bytes'])}")
    for name in ("model", "tokens/s", "prompt/s", "requests", "bound by", "hits", "from flash/s"):
        table.add_column(name, justify="left" if name in ("model", "bound by") else "right")
    lines = []
    for model in now["models"]:
        if not model["loaded"]:
            waiting = str(model["waiting"])
            table.add_row(model["name"], "not loaded", "", waiting, "", "", "")
            continue
        last = old.get(model["name"], model)
        last = last if last["loaded"] else model
        passed = max(now["at"] - before["at"], 1e-9)

        def rate(group: str, key: str, m: Any = model, b: Any = last, s: float = passed) -> float:
            return float(max(0.0, (m[group][key] - b[group][key]) / s))

        hits, misses = rate("statistics", "cache_hits"), rate("statistics", "cache_misses")
        sizes = ", ".join(
            f"{name} {approximate_bytes(size)}" for name, size in model["segments"].items() if size
        )
        table.add_row(
            model["name"],
            f"{rate('rounds', 'stepped_tokens'):.1f}",
            f"{rate('rounds', 'prompt_tokens'):.1f}",
            f"{model['running']}/{model['places']} +{model['waiting']}",
            model["bound_by"] or "-",
            f"{hits / (hits + misses):.1%}" if hits + misses else "-",
            approximate_bytes(rate("statistics", "flash_read_bytes")),
        )
        lines.append(f"{model['name']}: {approximate_bytes(model['budget_bytes'])} = {sizes}")
    return Group(table, *lines)
