"""Models that other programs have fetched to this machine: of ollama, LM Studio, llama.cpp and the
hub's cache.  They run where they are; nothing is copied."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pi2.caches import find_cache_folder, find_home, has_gguf_suffix
from pi2.diagnostics import UserError
from pi2.modelfiles import Modelfile

OLLAMA, LM_STUDIO, LLAMA_CPP, HUB = "ollama:", "lmstudio:", "llama.cpp:", "hf:"
PREFIXES = (OLLAMA, LM_STUDIO, LLAMA_CPP, HUB)
"""Begin the names of models, by the program that has fetched them."""
_REGISTRY, _LIBRARY, _TAG = "registry.ollama.ai", "library", "latest"
_KIND = "application/vnd.ollama.image."


@dataclass(frozen=True, slots=True)
class FoundModel:
    name: str
    """With its prefix: ``ollama:qwen3:4b``."""
    file: Path
    """The GGUF file; of a split model the first part."""
    manifest: Path | None = None
    """What ollama states of it."""

    @property
    def size_bytes(self) -> int:
        return self.file.stat().st_size

    @property
    def plan(self) -> Path:
        """What runs it: the file itself, or a plan in the cache with what ollama states."""
        if self.manifest is None:
            return self.file
        folder = find_cache_folder("found")
        name = self.name.removeprefix(OLLAMA).replace("/", "-").replace(":", "-")
        path = folder / f"{name}.plan.toml"
        stated = read_manifest(self.manifest)
        text, _ = stated.write_plan()
        if not path.is_file() or path.read_text("utf-8") != text:
            from pi2.sharing.fetching import write_atomically

            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        return path


def list_found(environment: Mapping[str, str] | None = None) -> list[FoundModel]:
    """All models, by program and name."""
    values = os.environ if environment is None else environment
    found = {model.name: model for model in _list_all(values, find_home(values))}
    return [found[name] for name in sorted(found)]


def find_found(name: str) -> FoundModel | None:
    """The model of a name with a prefix, of which the ending may be left out where one model has
    it; None for other names.  UserError P735 if there is none."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    known = {model.name: model for model in list_found() if model.name.startswith(prefix)}
    if prefix == OLLAMA and ":" not in name.removeprefix(OLLAMA).rpartition("/")[2]:
        name = f"{name}:{_TAG}"
    near = [model for other, model in known.items() if other.startswith(f"{name}/")]
    if name in known or len(near) == 1:
        return known.get(name) or near[0]
    if prefix == HUB:
        return None
    listed = ", ".join(model.name for model in near) or ", ".join(known) or "none"
    raise UserError.of(
        "P735",
        f"{name} is not on this machine",
        help=f"found are: {listed}; `pi2 list --found` shows all",
    )


def _list_all(values: Mapping[str, str], home: Path) -> Iterator[FoundModel]:
    own = [Path(values["OLLAMA_MODELS"])] if values.get("OLLAMA_MODELS") else []
    for folder in (*own, home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")):
        yield from _list_ollama(folder)
    studio = [home / ".lmstudio", home / ".cache/lm-studio"]
    with suppress(OSError, ValueError):
        studio.append(Path((home / ".lmstudio-home-pointer").read_text("utf-8").strip()))
    for folder in studio:
        yield from _list_files(LM_STUDIO, folder / "models", "*/*")
    cache = Path(values.get("XDG_CACHE_HOME") or home / ".cache")
    yield from _list_files(LLAMA_CPP, Path(values.get("LLAMA_CACHE") or cache / "llama.cpp"), "")
    hub = Path(values.get("HF_HOME") or cache / "huggingface") / "hub"
    for snapshots in _list_folder(Path(values.get("HF_HUB_CACHE") or hub), "models--*/snapshots/*"):
        repository = snapshots.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        yield from _list_files(f"{HUB}{repository}/", snapshots, "")


def _list_files(prefix: str, folder: Path, pattern: str) -> Iterator[FoundModel]:
    """GGUF files of models in the folders of ``pattern``: no projectors, no further parts."""
    for path in _list_folder(folder, f"{pattern}/*" if pattern else "*"):
        is_part = "-of-" in path.stem and "-00001-of-" not in path.stem
        if has_gguf_suffix(path) and path.is_file() and not is_part:
            if not path.name.lower().startswith("mmproj"):
                yield FoundModel(f"{prefix}{path.relative_to(folder)}", path)


def _list_folder(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern)) if folder.is_dir() else []
    except OSError:
        return []


def _list_ollama(folder: Path) -> Iterator[FoundModel]:
    manifests = folder / "manifests"
    for path in _list_folder(manifests, "*/*/*/*"):
        host, space, name, tag = path.relative_to(manifests).parts
        places = [] if (host, space) == (_REGISTRY, _LIBRARY) else [space]
        shown = "/".join([*([] if host == _REGISTRY else [host]), *places, name])
        file = _find_layers(path).get("model")
        if file is not None and file.is_file():
            yield FoundModel(f"{OLLAMA}{shown}:{tag}", file, path)


def _find_layers(manifest: Path) -> dict[str, Path]:
    """Files of the parts that a manifest names, by kind; empty if it cannot be read."""
    blobs = manifest.parents[4] / "blobs"
    try:
        layers = json.loads(manifest.read_text("utf-8"))["layers"]
        return {
            str(layer["mediaType"]).removeprefix(_KIND): blobs
            / str(layer["digest"]).replace(":", "-").replace("/", "-")
            for layer in layers
            if str(layer["mediaType"]).startswith(_KIND)
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def read_manifest(manifest: Path) -> Modelfile:
    """What a manifest of ollama states.  UserError P736 for an adapter, P737 for a part that
    cannot be read."""
    layers = _find_layers(manifest)
    try:
        texts = {
            kind: layers[kind].read_text("utf-8")
            for kind in ("template", "system")
            if kind in layers
        }
        parameters = json.loads(layers["params"].read_text("utf-8")) if "params" in layers else {}
        listed = [
            (str(key), str(item))
            for key, value in parameters.items()
            for item in (value if isinstance(value, list) else [value])
        ]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError.of("P737", f"{manifest}: a part cannot be read: {error}") from None
    adapter = str(layers["adapter"]) if "adapter" in layers else None
    return Modelfile(
        weights=str(layers["model"]),
        parameters=listed,
        template=texts.get("template"),
        system=texts.get("system"),
        adapter=adapter,
        is_manifest=True,
    )
