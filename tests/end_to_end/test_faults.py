"""What goes wrong on disks: a clear error and exit code, or the right tokens; never others."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pi2
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.importing.convert import convert_checkpoint
from pi2.store.manifest import MANIFEST
from pi2.store.reader import NeuronStore
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, make_model
from tests.helpers.programs import Ask, start_pi2, start_python

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]
PLANS = ROOT / "plans"
PROMPT = "def read_lines(path):\n"
LAYER = "layers/ffn-003.arrow"


def write_plan(folder: Path) -> Path:
    """The demo plan for numpy, with a store of its own, nothing cached at first."""
    shutil.copytree(PLANS / "stores" / "pi2-demo", folder / "stores" / "pi2-demo")
    text = (PLANS / "demo.plan.toml").read_text("utf-8").replace('cpu = "cpu"', 'cpu = "reference"')
    path = folder / "demo.plan.toml"
    path.write_text(f"{text}\n[cache]\nfill = false\n", "utf-8")
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    """What the model says where nothing goes wrong."""
    with pi2.load(write_plan(tmp_path_factory.mktemp("whole"))) as model:
        return generate(model)


def store_of(plan: Path) -> Path:
    return plan.parent / "stores" / "pi2-demo"


def generate(model: LoadedModel, tokens: int = 6) -> tuple[int, ...]:
    generation = model.generate(PROMPT, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return generation.result.token_ids


def expect_code(error: pytest.ExceptionInfo[UserError], code: str) -> None:
    assert [item.code for item in error.value.diagnostics] == [code]
    assert error.value.diagnostics[0].help


@pytest.mark.parametrize("engine", ["pread", "io_uring"])
def test_a_store_cut_while_it_runs_ends_the_generation(plan: Path, engine: str) -> None:
    with pi2.load(plan, set={"io.engine": engine}) as model:
        generate(model, 2)
        os.truncate(store_of(plan) / LAYER, 8192)
        with pytest.raises(UserError) as caught:
            generate(model)
        expect_code(caught, "P620")


def test_dense_tensors_cut_while_it_runs_do_no_harm(plan: Path, expected: tuple[int, ...]) -> None:
    with pi2.load(plan) as model:
        os.truncate(store_of(plan) / "dense.arrow", 100)
        assert generate(model) == expected


def test_a_store_replaced_while_it_runs_does_no_harm(plan: Path, expected: tuple[int, ...]) -> None:
    store = store_of(plan)
    with pi2.load(plan) as model:
        old = store.with_name("old")
        store.rename(old)
        shutil.copytree(old, store)
        for file in (store / "layers").iterdir():
            file.write_bytes(bytes(file.stat().st_size))
        shutil.rmtree(old)
        assert generate(model) == expected


def test_a_store_replaced_while_it_is_opened_is_an_error(plan: Path, monkeypatch: Patch) -> None:
    manifest = store_of(plan) / MANIFEST

    check = NeuronStore.check_unchanged

    def replace_meanwhile(store: NeuronStore) -> None:
        text = manifest.read_text("utf-8").replace('"created_by": "', '"created_by": "other ')
        manifest.write_text(text, "utf-8")
        check(store)

    monkeypatch.setattr(NeuronStore, "check_unchanged", replace_meanwhile)
    with pytest.raises(UserError) as caught:
        pi2.load(plan)
    expect_code(caught, "P509")


def test_a_reader_that_fails_once_costs_nothing_but_time(
    plan: Path, expected: tuple[int, ...], monkeypatch: Patch
) -> None:
    with pi2.load(plan, set={"io.engine": "pread"}) as model:
        engine: Any = model._parts.reader._engine  # type: ignore[union-attr]
        read_runs, count = engine._read_runs, 0

        def fail_often(*arguments: Any) -> None:
            nonlocal count
            count += 1
            if count % 3:
                read_runs(*arguments)
            else:
                arguments[5][:] = -1 if count % 2 else 100

        monkeypatch.setattr(engine, "_read_runs", fail_often)
        assert generate(model) == expected
        assert count > 10


def test_after_error_next_generation_is_right(
    plan: Path, expected: tuple[int, ...], monkeypatch: Patch
) -> None:
    with pi2.load(plan, set={"io.engine": "pread"}) as model:
        reader = model._parts.reader

        def fail(*arguments: Any) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(reader._engine, "_read_runs", lambda *a: a[5].fill(-1))  # type: ignore[union-attr]
            broken.setattr("os.preadv", fail)
            with pytest.raises(UserError) as caught:
                generate(model)
            expect_code(caught, "P620")
            assert "Input/output error" in caught.value.diagnostics[0].message
        assert generate(model) == expected


def run(ask: Ask, plan: Path, code: int = 0, *arguments: str) -> str:
    """What a run of the plan writes about itself; it ends with ``code``."""
    words = ["run", str(plan), "--prompt", PROMPT, "--max-tokens", "2", *arguments]
    return ask(words, code).err


def test_damage_is_told_with_an_exit_code(plan: Path) -> None:
    with (store_of(plan) / LAYER).open("r+b") as file:
        file.seek(4096 + 700 * 512)
        file.write(b"\xff\xfe\xfd\xfc")
    done = start_pi2("run", str(plan), "--prompt", PROMPT, "--max-tokens", "4")
    assert done.returncode == 2 and "error[P511]: the neuron at place 700 of" in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_dense_tensors_and_cut_layers_are_told_of(plan: Path, ask: Ask) -> None:
    dense, layer = store_of(plan) / "dense.arrow", store_of(plan) / LAYER
    with dense.open("r+b") as file:
        file.seek(dense.stat().st_size // 2)
        file.write(b"\xff\xfe\xfd\xfc")
    assert "error[P507]: dense.arrow" in run(ask, plan, 2)
    os.truncate(layer, layer.stat().st_size - 512)
    assert "error[P506]" in run(ask, plan, 2)


def test_a_run_that_checks_nothing_says_so(plan: Path, ask: Ask) -> None:
    unchecked = "--set=io.verify=never"
    assert "not verified" not in run(ask, plan)
    said = run(ask, plan, 0, unchecked)
    assert 'note: the data read was not verified: the plan says io.verify = "never"' in said
    with (store_of(plan) / LAYER).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(512 * 96))
    # Wrong text without a word: why this is not the default.
    run(ask, plan, 0, unchecked)
    assert "error[P511]" in run(ask, plan, 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "pi2-test", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_conversion_to_a_full_disk_leaves_no_store(tmp_path: Path, small_disk: Path) -> None:
    model = make_model()
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    (small_disk / "other").write_bytes(bytes(90_000))
    with pytest.raises(UserError) as caught:
        convert_checkpoint(checkpoint, model, small_disk / "store")
    expect_code(caught, "P523")
    assert "No space left" in caught.value.diagnostics[0].message
    assert [file.name for file in small_disk.iterdir()] == ["other"]


def test_a_synthesis_to_a_full_disk_leaves_no_store(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(90_000))
    done = start_python(
        str(ROOT / "tools" / "synthesize.py"),
        str(PLANS / "models" / "pi2-demo.model.toml"),
        str(small_disk / "store"),
        "--tokens",
        "8",
    )
    assert done.returncode == 2, done.stderr
    assert "error[P523]" in done.stderr and "No space left" in done.stderr
    assert [file.name for file in small_disk.iterdir()] == ["other"]
