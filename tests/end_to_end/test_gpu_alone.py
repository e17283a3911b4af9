"""The demo on a GPU that has the whole model: what the CPU computes, through every API that has a
device here.  PoCL and lavapipe are the processor in disguise: results count, times do not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.backends.gpu.kernels.specification import Api
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from tests.helpers.gpu import require_launcher
from tests.helpers.programs import start_pi2
from tests.helpers.slow import GPU_APIS

ROOT = Path(__file__).parents[2]
CPU = ROOT / "plans" / "demo.plan.toml"
EXACT = {
    "decode.activations": "fp32",
    "prefill.activations": "fp32",
    "kv.type": "fp32",
    "decode.batch": 3,
}
"""Nothing is rounded but weights, on either."""
ROOM = {"memory.segments.kv": "24 MiB", "memory.segments.workspace": "16 MiB"}
TOKENS = 150
"""More than a chunk of the plan."""


def require_plan(api: Api) -> Path:
    require_launcher(api)
    return ROOT / "plans" / f"demo-{api}.plan.toml"


@pytest.fixture(scope="module")
def cpu() -> Iterator[LoadedModel]:
    with pi2.load(CPU, set=EXACT | ROOM | {"memory.budget": "1 GiB"}) as model:
        yield model


@pytest.fixture(scope="module", params=GPU_APIS)
def gpu(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    plan = require_plan(request.param)
    with pi2.load(
        plan, set=EXACT | {"memory.units.gpu.budget": "60 MiB", "memory.budget": "1 GiB"}
    ) as model:
        yield model


def find_error(found: F32, wanted: F32) -> float:
    """Largest norm of a difference in relation to the norm of the logits."""
    difference = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(difference.max())


def list_ids(model: LoadedModel) -> list[int]:
    return model.encode(CPU.read_text("utf-8"))[:TOKENS]


def test_prompts_and_steps_are_those_of_the_cpu(cpu: LoadedModel, gpu: LoadedModel) -> None:
    ids = list_ids(cpu)
    wanted = cpu.logits(ids)
    assert find_error(gpu.logits(ids), wanted) < 1e-4
    # Low-rank scores hardly ever lie so close to the threshold that a neuron is named by one alone.
    steps = ids[:40]
    assert find_error(gpu.logits(steps, mode="decode"), cpu.logits(steps, mode="decode")) < 1e-4
    texts = [
        model.generate("def read_lines(path):\n", max_tokens=24, temperature=0.0).result.text
        for model in (cpu, gpu)
    ]
    assert texts[0] == texts[1]
    assert gpu.stats.predicted_share == pytest.approx(cpu.stats.predicted_share, abs=0.02)
    assert gpu.stats.active_share is None


@pytest.mark.parametrize("api", GPU_APIS[1:])
def test_keys_and_values_may_be_int8(cpu: LoadedModel, api: Api) -> None:
    plan, room = require_plan(api), {"memory.budget": "1 GiB", "memory.units.gpu.budget": "60 MiB"}
    prompt = "def read_lines(path):\n"
    wanted = cpu.generate(prompt, max_tokens=24, temperature=0.0).result.text
    logits = cpu.logits(list_ids(cpu))
    with pi2.load(plan, set=EXACT | room | {"kv.type": "int8"}) as model:
        # What the CPU's own int8 keys and values differ by (docs/reference/exactness.md).
        assert find_error(model.logits(list_ids(model)), logits) < 1e-2
        assert model.generate(prompt, max_tokens=24, temperature=0.0).result.text == wanted


def test_sequences_side_by_side_are_what_each_is_alone(gpu: LoadedModel) -> None:
    prompts = ["def ", "import os\n", "class Reader:\n    ", "x = ["]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    together = gpu.generate_batch(prompts, **options).result
    alone = [gpu.generate(prompt, **options).result.text for prompt in prompts]
    assert [sequence.text for sequence in together.sequences] == alone
    assert together.mean_sequences is not None and together.mean_sequences > 1.5


def test_prompts_go_on_where_sequences_stand(gpu: LoadedModel) -> None:
    ids, forward = np.array(list_ids(gpu)[:60], np.int32), gpu._parts.forward
    forward.reset_all()
    wanted = forward.prefill(ids, all_logits=True, sequence=1)
    forward.reset_all()
    # Another sequence comes in between, and steps between parts of the prompt.
    forward.prefill(ids[20:33], sequence=2)
    parts = [forward.prefill(ids[:11], all_logits=True, sequence=1)]
    forward.step([int(ids[5])], [2])
    parts.append(forward.prefill(ids[11:60], all_logits=True, sequence=1))
    assert find_error(np.concatenate(parts), wanted) < 1e-5


def test_a_token_is_one_submission(gpu: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = gpu._parts.model
    submissions, submit = [], whole._queue.submit

    def count() -> Any:
        submissions.append(1)
        return submit()

    monkeypatch.setattr(whole._queue, "submit", count)
    gpu._parts.forward.reset_all()
    for token in (5, 6, 7):
        gpu._parts.forward.step([token], [0])
    assert len(submissions) == 3
    # 14 kernels in a layer, and embedding, last norm and head.
    layers = gpu.plan.model.shape.layers
    assert len(whole._graph.list_step(whole._graph.choose_shape(1, 1))) == 14 * layers + 3


def test_a_server_reads_every_prompt_from_its_beginning(gpu: LoadedModel) -> None:
    before = gpu._scheduler.prefixes
    gpu.keep_prefixes()
    assert gpu._scheduler.prefixes is before


def test_neurons_cannot_be_observed(gpu: LoadedModel) -> None:
    with pytest.raises(UserError, match="does not show") as caught:
        pi2.orchestrator.load(gpu.plan.path, make_observer=lambda executor, request: None)
    assert caught.value.diagnostics[0].code == "P662"
    # Such as a trace, which begins when the model is loaded.
    with pytest.raises(UserError, match="shows none of its layers") as caught:
        _ = gpu._parts.cache
    assert caught.value.diagnostics[0].code == "P662"


@pytest.mark.parametrize("api", GPU_APIS)
def test_a_run_stays_within_its_budget_and_says_what_is_emulated(api: Api) -> None:
    arguments = ["run", require_plan(api), "--prompt", "def ", "--max-tokens", "8", "--ignore-eos"]
    # The kernels of the tests above: compiling others would take most of the time.
    arguments += ["--set", "kv.type=fp32", "--set", "memory.units.gpu.budget=52MiB"]
    done = start_pi2(*arguments)
    assert done.returncode == 0, done.stderr
    shown = "gpu" if api == "cuda" else "gpu (emulated)"
    assert f"bound by: {shown} (" in done.stderr
    assert "(8 tokens, ended by --max-tokens)" in done.stderr
    assert ", within the budget of" in done.stderr


def test_everything_is_hot_and_fits_the_unit() -> None:
    plan = ROOT / "plans" / "demo-opencl.plan.toml"
    for key, value, code in (
        ("layers.hot", 0.5, "P263"),
        ("memory.units.gpu.budget", "8 MiB", "P264"),
        ("bundle.scales", "resident", "P265"),
    ):
        with pytest.raises(UserError) as caught:
            pi2.load(plan, set={key: value})
        assert code in {item.code for item in caught.value.diagnostics}
