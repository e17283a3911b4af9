"""A mixture in a GGUF file within less memory than its experts take."""

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.engine.run_report import summarise_run
from pi2.measuring.routing import ROUTING, read_trace
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.models import MIXTURE
from tests.helpers.peers import read_models, write_tiny

SETTINGS: dict[str, Any] = {"kv.context": 256, "prefill.chunk": 32}
KEPT = [f"--set={key}={value}" for key, value in SETTINGS.items()]
TOKENS = list(range(5, 45))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 16 experts of 630 KB, three of which compute a token."""
    shape = {"hidden": 256, "ffn": 768, "layers": 4, "context": 512}
    changes = {**MIXTURE, "moe": {"experts": 16, "active_experts": 3}}
    return write_random_gguf(tmp_path_factory.mktemp("mixture"), shape, changes)


def find_least(file: Path) -> int:
    """MiB of the smallest budget, as the message about a smaller one says."""
    with pytest.raises(UserError) as caught:
        pi2.load(file, memory="10 MiB", set=SETTINGS)
    (item,) = caught.value.diagnostics
    assert item.code == "P026" and item.help is not None
    assert any(note.startswith("experts of a token: ") for note in item.notes)
    found = re.search(r"--memory '(\d+) MiB", item.help)
    assert found is not None
    return int(found[1])


def test_every_budget_gives_the_text_and_the_bits_of_the_run_in_memory(file: Path) -> None:
    least, found, read = find_least(file), [], []
    for memory in (None, f"{least} MiB", f"{least + 4} MiB", f"{least + 16} MiB"):
        with pi2.load(file, memory=memory, set=SETTINGS) as model:
            many = model.logits(TOKENS).copy()
            one_by_one = model.logits(TOKENS, mode="decode").copy()
            read.append(model.stats.flash_read_bytes)
            text = model.generate("hello world", max_tokens=12, temperature=0.0).result.text
            found.append((many.tobytes(), one_by_one.tobytes(), text))
            assert model.plan.file is not None
            assert bool(model.plan.file.expert_bytes) == (memory is not None)
    assert found[1:] == found[:1] * 3
    assert read[0] == 0 < read[3] < read[2] < read[1]


def test_a_dry_run_counts_and_reads_the_experts_of_drawn_routes(file: Path) -> None:
    memory = f"{find_least(file) + 4} MiB"
    with pi2.load(file, memory=memory, set=SETTINGS | {"backends.cpu": "null"}) as model:
        program: Any = model._parts.model.program
        assert not model.logits(TOKENS).any()
        before, begun = model.stats, program.interpreter.instructions
        assert model.logits(TOKENS[:8], mode="decode").shape == (8, model.plan.model.shape.vocab)
        done = model.stats - before
        # Drawn evenly: three of a layer's 16 experts a token, some of which are in slots.
        assert done.cache_hits + done.cache_misses == 8 * 4 * 3 and done.cache_misses > 8
        assert done.flash_read_bytes >= done.cache_misses * 600_000
        assert program.interpreter.instructions - begun >= 8 * 4 * 10
        assert not model.can_embed
        summary = summarise_run(model, model.generate([5], max_tokens=2).result)
        assert "dry run: weights were read" in summary


def test_a_simulated_token_reads_experts_that_are_not_in_memory(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = []
    for memory in ("105 MiB", "110 MiB", "200 MiB"):
        changes = ["--memory", memory, "--set", "kv.context=256", "--set", "device=oneplus-12"]
        assert run(["simulate", str(file), *changes, "--tokens", "64", "--json"]) == 0
        read.append(json.loads(capsys.readouterr().out)["decode"]["read_bytes_per_token"])
    expert_bytes = 38.2 * 2**20 / 64
    assert 12 * expert_bytes > read[0] > read[1] > read[2] == 0


def test_routing_of_a_file_is_recorded_within_any_memory(file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 40)
    found = []
    for number, memory in enumerate((find_least(file) + 8, 300)):
        given = ["--text", str(text), "--routing", "--memory", f"{memory} MiB"]
        folder = tmp_path / str(number)
        assert run(["activations", str(file), *given, "-o", str(folder), *KEPT]) == 0
        found.append(read_trace(folder / ROUTING))
    streamed, whole = found
    assert streamed.chosen.shape[1:] == (4, 3) and streamed.experts == 16
    assert 550_000 < streamed.expert_bytes < 700_000
    assert np.array_equal(streamed.chosen, whole.chosen)
    assert np.allclose(streamed.weights.sum(axis=2), 1.0, atol=1e-5)


def test_a_timeline_of_a_file_shows_how_long_its_experts_were_waited_for(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.json"
    given = ["--memory", f"{find_least(file) + 8} MiB", "-o", str(output), "-n", "3", *KEPT]
    assert run(["trace", str(file), *given]) == 0
    events = json.loads(output.read_text("utf-8"))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"driver", "compute 0", "queue 0"} <= lanes
    assert "route 3" in names and any(name.startswith("wait for ") for name in names)
    assert " 0.0 MB read per token" not in capsys.readouterr().out


def test_the_summary_says_what_experts_were_read(file: Path) -> None:
    with pi2.load(file, memory=f"{find_least(file) + 8} MiB", set=SETTINGS) as model:
        generation = model.generate("hello world", max_tokens=6, temperature=0.0)
        summary = summarise_run(model, generation.result)
        rate = generation.result.statistics.hit_rate
    assert rate is not None and 0 < rate < 1
    assert f"cache hits {rate:.1%} of the experts needed" in summary
    assert re.search(
        r"weights: \d+% of 38.6 MiB in memory, 38.2 MiB are experts, of which memory has ", summary
    )
    assert re.search(r"reads: [\d.]+ MiB from flash since loading, [\d.]+ \w+ a token", summary)
    # Routers that choose among all experts make a guess of several tokens read more.
    assert model.plan.plan.decode.speculation is None


def test_a_dropped_model_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", read_models()["mixtral"])
    before = list_unnamed_libraries()
    gc.collect()
    gc.disable()  # what is part of a circle would stay
    try:
        with pi2.load(file, set={"kv.context": 64}) as model:
            model.logits([1, 2])
            assert list_unnamed_libraries() != before
        forward = weakref.ref(model._parts.forward)
        del model
        assert forward() is None
    finally:
        gc.enable()
    assert list_unnamed_libraries() <= before


def list_unnamed_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if line.endswith(".so (deleted)")}
