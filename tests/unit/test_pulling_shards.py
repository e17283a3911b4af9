"""A checkpoint of the hub is converted file by file: it never lies whole on the disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

from pi2.diagnostics import UserError
from pi2.importing.checkpoint import Checkpoint, open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.hub import HubShards, Repository, open_repository
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.quantize import Wish, quantize_checkpoint
from pi2.plan.documents.model import Model
from pi2.store.manifest import MANIFEST
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.hub import COMMIT, Hub, serve_repository
from tests.helpers.models import MIXTURE, draw_weights, make_model


@contextmanager
def publish(folder: Path, model: Model, *, shards: int, in_order: bool) -> Iterator[Hub]:
    """A hub that has a checkpoint of ``model``, in the float16 that real ones have."""
    weights = draw_weights(model, 0)
    write_checkpoint(folder, model, weights, dtype="float16", shards=shards, in_order=in_order)
    file = folder / "config.json"
    further = {"hidden_act": "silu", "max_position_embeddings": model.shape.context}
    file.write_text(json.dumps({**json.loads(file.read_text()), **further}))
    with serve_repository(folder, "org/tiny") as hub:
        yield hub


def open_remote(hub: Hub, work: Path) -> Checkpoint:
    sizes = {path.name: path.stat().st_size for path in hub.folder.iterdir()}
    repository = Repository(name=hub.repository, commit=COMMIT, sizes=sizes)
    return open_repository(repository, work)


def watch(checkpoint: Checkpoint, at: Callable[[str], None]) -> HubShards:
    """Call ``at`` before and after every file that is fetched, and after every one that goes."""
    shards = checkpoint.shards
    assert isinstance(shards, HubShards)
    bring, drop = shards.bring, shards.drop

    def bring_watched(file: Path) -> None:
        if not file.exists():
            at("before")
            bring(file)
            at("after")

    def drop_watched(file: Path) -> None:
        drop(file)
        at("dropped")

    shards.bring, shards.drop = bring_watched, drop_watched
    return shards


def count_fetched(hub: Hub) -> dict[str, int]:
    names = [path.name for path in hub.folder.glob("*.safetensors")]
    return {name: hub.list_ranges(name).count(None) for name in names}


def read_manifest(store: Path) -> Any:
    return json.loads((store / MANIFEST).read_bytes())


def test_files_come_one_after_the_other_and_go_when_they_are_converted(tmp_path: Path) -> None:
    model = make_model({"shape": {"layers": 8}})
    with publish(tmp_path / "checkpoint", model, shards=8, in_order=True) as hub:
        work, there = tmp_path / "work", [0]

        def measure(event: str) -> None:
            there.append(sum(file.stat().st_blocks * 512 for file in work.glob("*.safetensors")))

        checkpoint = open_remote(hub, work)
        described = describe_checkpoint(checkpoint, "tiny").model
        assert set(count_fetched(hub).values()) == {0}  # headers alone have come
        watch(checkpoint, measure)
        convert_checkpoint(checkpoint, described, tmp_path / "store")

        whole = sum(file.stat().st_size for file in hub.folder.glob("*.safetensors"))
        assert max(there) < 0.4 * whole and there[-1] == 0
        assert set(count_fetched(hub).values()) == {1}
        convert_checkpoint(hub.folder, described, tmp_path / "own")
        assert read_manifest(tmp_path / "store") == read_manifest(tmp_path / "own")


@pytest.mark.parametrize("changes", [{}, MIXTURE], ids=["dense", "mixture"])
def test_what_lies_in_several_files_is_the_same(tmp_path: Path, changes: Any) -> None:
    # Query, key and value of a layer, and its experts, lie in files of their own.
    model = make_model(changes)
    with publish(tmp_path / "checkpoint", model, shards=5, in_order=False) as hub:
        convert_checkpoint(open_remote(hub, tmp_path / "work"), model, tmp_path / "store")
        assert set(count_fetched(hub).values()) == {1}
        convert_checkpoint(hub.folder, model, tmp_path / "own")
    assert read_manifest(tmp_path / "store") == read_manifest(tmp_path / "own")
    assert not list((tmp_path / "work").glob("*.safetensors"))


class Stopped(BaseException):
    """What a key of the user's does."""


def test_whatever_interrupts_a_job_it_goes_on_where_it_was(tmp_path: Path) -> None:
    model = make_model({"shape": {"layers": 2}})
    with publish(tmp_path / "checkpoint", model, shards=3, in_order=True) as hub:
        convert_checkpoint(hub.folder, model, tmp_path / "own")
        point, is_over = 0, False
        while not is_over:
            work, store = tmp_path / f"work-{point}", tmp_path / f"store-{point}"
            hub.asked.clear()
            events: list[str] = []

            def stop(event: str, events: list[str] = events, point: int = point) -> None:
                events.append(event)
                if len(events) == point + 1:
                    raise UserError.of("P763", "cut") if point % 2 else Stopped()

            checkpoint = open_remote(hub, work)
            watch(checkpoint, stop)
            try:
                convert_checkpoint(checkpoint, model, store)
                is_over = True
            except (Stopped, UserError):
                assert not store.exists()
                convert_checkpoint(open_remote(hub, work), model, store)
            assert read_manifest(store) == read_manifest(tmp_path / "own"), events
            assert set(count_fetched(hub).values()) == {1}, (events, count_fetched(hub))
            assert not list(work.glob("*.safetensors"))
            point += 1
        assert point > 8


@pytest.mark.parametrize("changes", [{}, MIXTURE], ids=["dense", "mixture"])
def test_a_gguf_file_is_made_file_by_file_too(tmp_path: Path, changes: Any) -> None:
    """Files go when they are quantised, and none is fetched twice, however often a job is cut."""
    model = make_model(changes)
    with publish(tmp_path / "checkpoint", model, shards=4, in_order=False) as hub:
        work, made, own = (tmp_path / name for name in ("work", "made.gguf", "own.gguf"))
        quantize_checkpoint(open_checkpoint(hub.folder), model, own, Wish(mixture="q4_k_m"))
        for point in (2, 2, 9):
            events: list[str] = []

            def stop(event: str, events: list[str] = events, point: int = point) -> None:
                assert len(list(work.glob("*.safetensors"))) < 2
                events.append(event)
                if events.count("after") == point:
                    raise Stopped

            checkpoint = open_remote(hub, work)
            watch(checkpoint, stop)
            if point == 9:
                quantize_checkpoint(checkpoint, model, made, Wish(mixture="q4_k_m"))
            else:
                with pytest.raises(Stopped):
                    quantize_checkpoint(checkpoint, model, made, Wish(mixture="q4_k_m"))
        assert set(count_fetched(hub).values()) == {1}
    assert made.read_bytes() == own.read_bytes()
    assert not list(tmp_path.glob(".made.gguf.*")) and not list(work.glob("*.safetensors"))


def test_a_file_without_room_is_refused_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model({"shape": {"layers": 4}})
    with publish(tmp_path / "checkpoint", model, shards=4, in_order=True) as hub:
        checkpoint = open_remote(hub, tmp_path / "work")
        full = type("usage", (), {"free": 0})
        with monkeypatch.context() as patch:
            patch.setattr("pi2.importing.hub.shutil.disk_usage", lambda _: full)
            with pytest.raises(UserError, match="P764"):
                convert_checkpoint(checkpoint, model, tmp_path / "store")
        assert set(count_fetched(hub).values()) == {0}
        convert_checkpoint(open_remote(hub, tmp_path / "work"), model, tmp_path / "store")
        assert set(count_fetched(hub).values()) == {1}


def test_a_few_rows_are_read_without_their_file(tmp_path: Path) -> None:
    with publish(tmp_path / "checkpoint", make_model(), shards=4, in_order=True) as hub:
        there = open_checkpoint(hub.folder)
        checkpoint = open_remote(hub, tmp_path / "work")
        for name, tensor in checkpoint.tensors.items():
            assert (tensor.read(1, 3) == there.tensors[name].read(1, 3)).all(), name
        assert set(count_fetched(hub).values()) == {0}
