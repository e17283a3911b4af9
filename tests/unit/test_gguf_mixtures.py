"""Memory that a mixture in a GGUF file gives back; `test_peers` compares logits of mixtures."""

import gc
import weakref
from pathlib import Path

import pi2
from tests.helpers.peers import read_models, write_tiny


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
