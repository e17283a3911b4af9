"""Prompts that begin like earlier ones go on from what was read of those."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.prefixes import Block, KeptPrefixes, PrefixFiles, name_blocks
from tests.helpers.compiling import share_kernels
from tests.helpers.goldens import make_golden_plan
from tests.helpers.models import make_tiny
from tests.helpers.peers import read_models, write_tiny
from tests.helpers.plans import write_plan
from tests.helpers.slow import mark_slow
from tests.helpers.tables import in_table

OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0, "seed": 5}
LONG = [int(token) for token in np.random.default_rng(1).integers(0, 250, 45)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(share_kernels(tmp_path / "cache")))


def make_plan(folder: Path, **changes: Any) -> Path:
    """A plan of a tiny model whose prompts are read eight tokens at a time, kept sixteen."""
    tiny = make_tiny(folder, {"shape": {"context": 128}})
    return write_plan(folder, tiny, {"decode": {"batch": 2}, **changes})


@contextmanager
def keep(plan: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[LoadedModel]:
    """The model as a server has it: it keeps what it read."""
    with pi2.load(plan, set=dict(settings)) as model:
        model.keep_prefixes()
        yield model


def generate(model: LoadedModel, ids: Sequence[int], **options: Any) -> tuple[tuple[int, ...], int]:
    """A text, and how many tokens of its prompt were read."""
    before = model.scheduler.rounds.prompt_tokens
    result = model.generate(ids, **{**OPTIONS, **options}).result
    return result.token_ids, model.scheduler.rounds.prompt_tokens - before


def run_alone(plan: Path, prompts: Sequence[Sequence[int]], settings: Any) -> list[Any]:
    with pi2.load(plan, set=settings) as model:
        return [generate(model, ids)[0] for ids in prompts]


@pytest.mark.parametrize(
    ("backend", "kind"), [mark_slow(("reference", "fp16")), ("reference", "int8"), ("cpu", "int8")]
)
def test_a_beginning_is_read_once_and_changes_nothing(
    tmp_path: Path, kind: str, backend: str
) -> None:
    settings = {"kv.type": kind, "backends.cpu": backend, "serve.prefixes": "prompts"}
    plan = make_plan(tmp_path)
    prompts = [LONG, LONG, [*LONG[:40], 7, 7], [*LONG[:20], 9], [1, 2], LONG]
    alone = run_alone(plan, prompts, settings)
    with keep(plan, settings) as model:
        found = [generate(model, ids) for ids in prompts]
    assert [tokens for tokens, _ in found] == alone
    # Whole blocks of sixteen are gone on from, also out of a place that others use by now.
    assert [read for _, read in found] == [45, 45 - 32, 42 - 32, 21 - 16, 2, 45 - 16]


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, layers={"hot": 1.0})
    for mode, new in (("answers", 3 + 1), ("prompts", 45 + 8 + 3 - 32), ("none", 45 + 8 + 3)):
        with keep(plan, {"serve.prefixes": mode}) as model:
            answer, _ = generate(model, LONG)
            # The last token that was drawn has not gone through the model.
            _, read = generate(model, [*LONG, *answer, 1, 2, 3])
            assert read == new, mode


def test_what_another_sequence_has_is_copied_while_it_goes_on(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    alone = run_alone(plan, [LONG], {})
    with keep(plan) as model:
        first = model.generate(LONG, **{**OPTIONS, "max_tokens": 30})
        next(first)
        tokens, read = generate(model, LONG)
        assert (tokens, read) == (alone[0], 45 - 32)
        assert first.result.token_ids[:8] == alone[0]


def test_what_was_read_is_there_after_a_restart(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    settings = {"serve.prefix_cache": "1 MiB", "serve.prefixes": "prompts"}
    alone = run_alone(plan, [LONG], {})
    for read_tokens in (45, 45 - 32):
        with keep(plan, settings) as model:
            assert generate(model, LONG) == (alone[0], read_tokens)
    files = sorted((tmp_path / "cache" / "prefixes").glob("*/*.kept"))
    assert len(files) == 2
    # A damaged file is not believed, and another plan has other files.
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with keep(plan, settings) as model:
        assert generate(model, LONG) == (alone[0], 45)
    with keep(plan, {**settings, "kv.type": "int8"}) as model:
        assert generate(model, LONG)[1] == 45


def test_answers_are_kept_in_files_where_the_plan_says_so(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    settings = {"serve.prefix_cache": "1 MiB"}
    with keep(plan, settings) as model:
        answer, _ = generate(model, LONG)
    turn = [*LONG, *answer, 1, 2, 3]
    with keep(plan, settings) as model:
        assert generate(model, turn)[1] == len(turn) - 48
    # Whoever wants nothing but exact ones does not take them.
    with keep(plan, {**settings, "serve.prefixes": "prompts"}) as model:
        assert generate(model, turn) == (run_alone(plan, [turn], {})[0], len(turn) - 32)


def test_a_sequence_that_failed_or_was_given_up_leaves_nothing_wrong(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    alone = run_alone(plan, [LONG], {})
    with keep(plan, {"decode.batch": 1}) as model:
        first = model.generate(LONG, **OPTIONS)
        next(first)
        first.close()
        assert generate(model, LONG) == (alone[0], 45 - 32)
        forward = model._parts.forward
        prefill = forward.prefill

        def fail(*arguments: Any, **options: Any) -> Any:
            prefill(*arguments, **options)
            raise OSError("the disk is gone")

        forward.prefill = fail
        with pytest.raises(OSError, match="gone"):
            generate(model, [3] * 40)
        forward.prefill = prefill
        assert generate(model, LONG) == (alone[0], 45)
        assert list(model.logits([1, 2, 3]).shape) == [3, 288]
        assert generate(model, LONG) == (alone[0], 45)


def test_memory_that_the_context_lends_stays_right(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, kv={"context": 128, "lend": True})
    alone = run_alone(plan, [LONG, [1, 2, 3]], {})
    with keep(plan) as model:
        for _ in range(3):
            assert generate(model, LONG)[0] == alone[0]
            assert generate(model, [1, 2, 3])[0] == alone[1]


def make_block(value: int, size: int = 1000) -> Block:
    return Block(np.full(size, value, np.uint8), np.zeros(0, np.float32), is_exact=True)


def test_files_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    files = PrefixFiles(folder, 3500)
    for number in range(3):
        files.write(f"{number}", make_block(number))
    assert files.read("0") is not None
    files.write("3", make_block(3))
    assert [files.count_known([str(number)]) for number in range(4)] == [1, 0, 1, 1]
    assert files.total_bytes == sum(path.stat().st_size for path in folder.iterdir()) <= 3500
    for age, name in enumerate("302"):
        os.utime(folder / f"{name}.kept", ns=(10**18 - age, 10**18 - age))
    again = PrefixFiles(folder, 2500)
    assert [again.count_known([name]) for name in "302"] == [1, 1, 0]
    assert again.total_bytes <= 2500
    block = again.read("3")
    assert block is not None and block.is_exact and set(block.context.tolist()) == {3}
    assert again.read("1") is None


def test_names_depend_on_all_tokens_before(tmp_path: Path) -> None:
    one, two = name_blocks(b"a", [1, 2, 3, 4, 5], 2), name_blocks(b"a", [9, 2, 3, 4], 2)
    assert len(one) == len(two) == 2
    assert not set(one) & set(two)
    assert name_blocks(b"b", [1, 2], 2) != one[:1]


def test_nobody_keeps_anything_who_does_not_serve(tmp_path: Path) -> None:
    with pi2.load(make_plan(tmp_path)) as model:
        assert not isinstance(model.scheduler.prefixes, KeptPrefixes)
        generate(model, LONG)
        assert generate(model, LONG)[1] == 45
        model.keep_prefixes()
        assert isinstance(model.scheduler.prefixes, KeptPrefixes)


def test_states_are_gone_on_from_where_they_were_kept(tmp_path: Path) -> None:
    plan = make_golden_plan("lfm2", tmp_path)
    ids = np.random.default_rng(2).integers(3, 96, 45).tolist()
    options = {"max_tokens": 4, "temperature": 0}
    settings = {"prefill.chunk": 16, "serve.prefix_cache": "4 MiB", "decode.batch": 2}
    with pi2.load(plan, set=settings) as model:
        alone, _ = generate(model, ids, **options)
        turn = [*ids, *alone, 5, 6]
        after, _ = generate(model, turn, **options)
    with keep(plan, settings) as model:
        assert generate(model, ids, **options) == (alone, 45)
        # The place has the state after its last token, the files those after whole pieces.
        assert generate(model, turn, **options) == (after, 3)
        assert generate(model, ids, **options) == (alone, 45 - 32)


FACTORS = {"short_factors": [1.0, 1.2, 1.5, 2.0], "long_factors": [1.5, 3.0, 6.0, 9.0]}
LONGROPE = {"kind": "longrope", "factor": 4.0, "original_context": 32, **FACTORS}
TURNS = [LONG[:30], LONG, [*LONG[:40], 7], [*LONG[:28], 9], LONG[:30], LONG]
"""Prompts within the original context and beyond it, in turn."""


@in_table
def test_a_longer_prompt_does_not_go_on_from_keys_of_shorter_ones(
    tmp_path: Path, mode: str, is_file: bool
) -> None:
    """LongRoPE turns all keys of a long prompt otherwise; texts are those of models that keep
    nothing, also where an answer goes beyond the original context."""
    tiny = make_tiny(tmp_path, {"shape": {"context": 128, "head_dim": 8}, "rope": LONGROPE})
    plan = write_plan(tmp_path, tiny, {"decode": {"batch": 1}, "kv": {"context": 64}})
    settings: dict[str, Any] = {"serve.prefixes": mode}
    if is_file:
        settings["serve.prefix_cache"] = "1 MiB"
    alone, found = run_alone(plan, TURNS, {}), []
    for turns in (TURNS[:2], TURNS[2:]) if is_file else (TURNS,):
        with keep(plan, settings) as model:
            found += [generate(model, ids) for ids in turns]
    assert [tokens for tokens, _ in found] == alone
    reads = [read for _, read in found]
    # Nothing of the prompt before serves the second; what a file has of each kind does, later on.
    assert reads[:2] == [30, 45]
    if is_file:
        assert reads[2:] == [41 - 32, 29 - 16, 30 - 16, 45 - 32]
    elif mode == "prompts":
        assert reads[2:] == [41 - 32, 29, 30 - 16, 45]


def test_a_longer_prompt_of_a_file_does_not_go_on_from_keys_of_shorter_ones(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", read_models()["phi3-longrope"])
    ids = np.random.default_rng(2).integers(3, 90, 112).tolist()
    settings: dict[str, Any] = {"kv.context": 124, "serve.prefixes": "prompts"}
    options = {"max_tokens": 4, "temperature": 0}
    with pi2.load(file, set=settings) as model:
        alone = [generate(model, ids[:end], **options)[0] for end in (90, 112)]
        logits = np.array(model.logits(ids))
        model.keep_prefixes()
        for _ in range(2):
            assert [generate(model, ids[:end], **options)[0] for end in (90, 112)] == alone
            assert np.array_equal(model.logits(ids), logits)


def test_windows_go_on_from_what_they_have(tmp_path: Path) -> None:
    """They keep 96 tokens: a prompt that parts from an earlier one further back is read from its
    beginning, or from blocks of files that had their tokens."""
    tiny = read_models()["gemma3"]
    longer = replace(tiny, settings={**tiny.settings, ".context_length": 512})
    file = write_tiny(tmp_path / "tiny.gguf", longer)
    ids = np.random.default_rng(2).integers(3, 90, 300).tolist()
    prompts = [ids, [*ids[:290], 5, 6], [*ids[:150], 5, 6], ids[:100]]
    settings: dict[str, Any] = {"kv.context": 320, "prefill.chunk": 32, "decode.batch": 2}
    alone = run_alone(file, prompts, settings)
    for more, third in (({}, 152), ({"serve.prefix_cache": "64 MiB"}, 152 - 144)):
        with pi2.load(file, set=settings | more) as model:
            assert model._parts.forward.ring is not None
            model.keep_prefixes()
            found = [generate(model, own) for own in prompts]
        assert [own for own, _ in found] == alone
        assert [read for _, read in found] == [300, 292 - 288, third, 100 - 96]
