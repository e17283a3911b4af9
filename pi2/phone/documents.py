"""A resolved plan as JSON, written with pydantic and read with its stand-in."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pi2.caches import check_regular
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.fitting.sources import find_source
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sources import FileFacts
from pi2.plan.arithmetic.units import Need, Needs
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.store.files import hash_file

FORMAT = "pi2-bundle"
FORMAT_VERSION = 1
INDEX = "bundle.json"
STORE = "store"
"""The folder of the weights in a bundle: a neuron store, with a manifest and checks of its own, or
a GGUF file with its parsed metadata."""
TABLE, NUMBERS = "weights.json", "vectors.f32"
"""Places of matrices in a GGUF file, and its vectors, float32 one after the other."""


Listed = Mapping[str, tuple[int, str]]
"""Bytes and SHA-256 of every file of a bundle but its list and the weights, by path."""


def write_index(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the list of all files below ``folder``, and some ``facts``."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != INDEX and not name.startswith(f"{STORE}/"):
            files[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    index = {"format": FORMAT, "format_version": FORMAT_VERSION, **facts, "files": files}
    text = json.dumps(index, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


def read_bundle(folder: Path) -> Listed:
    """Read the list; UserError P671 if there is none, or it is damaged."""
    file = folder / INDEX
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or found["format_version"] > FORMAT_VERSION:
            raise ValueError(f"it is no {FORMAT} of version {FORMAT_VERSION}")
        return {
            str(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in found["files"].items()
        }
    except OSError as error:
        problem = error.strerror or "it cannot be read"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = str(error)
    raise UserError.of(
        "P671",
        f"{folder} is not a bundle: {INDEX}: {problem}",
        help="give the folder that `pi2 build` has written",
    )


def check_bundle(folder: Path, files: Listed, *, hashed: bool) -> None:
    """Compare sizes, or contents if ``hashed``; UserError P672 lists all that differ."""
    findings = []
    for name, (size, digest) in files.items():
        path = folder / name
        problem = None
        try:
            if check_regular(path).st_size != size:
                problem = f"it has not {size} bytes"
            elif hashed and hash_file(path) != digest:
                problem = "its contents have changed: the SHA-256 differs"
        except OSError as error:
            problem = error.strerror or "it cannot be read"
        if problem is not None:
            findings.append(
                Diagnostic(
                    code="P672",
                    message=f"{name}: {problem}",
                    help="build the bundle again, or copy it again as a whole",
                    span=Span.of_file(str(path)),
                )
            )
    if findings:
        raise UserError(findings, exit_code=2)


PLAN = "plan.json"
"""File of a bundle."""


def write_resolved(resolved: ResolvedPlan) -> str:
    documents: dict[str, Any] = {
        "digest": resolved.digest,
        "plan": resolved.plan.model_dump(mode="json"),
        "device": resolved.device.model_dump(mode="json"),
        "model": resolved.model.model_dump(mode="json"),
        "thresholds": None
        if resolved.thresholds is None
        else resolved.thresholds.model_dump(mode="json"),
    }
    return json.dumps(documents, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def describe_file(facts: FileFacts) -> dict[str, Any]:
    """Return what a plan knows of its GGUF file, but for its place."""
    return {**asdict(replace(facts, weights=None)), "path": facts.path.name}


def read_file_facts(folder: Path, model: Model) -> FileFacts:
    """Read the facts about the GGUF file in a bundle's folder; raises as `read_resolved`."""
    from pi2.weights.gguf_weights import GgufWeights

    table = json.loads((folder / TABLE).read_text(encoding="utf-8"))
    facts: dict[str, Any] = table["facts"]
    needs = {name: Need(**own) for name, own in facts["needs"].items()}
    # In a bundle another module has this name.
    make: Any = GgufWeights
    facts |= {"path": folder / facts["path"], "needs": Needs(**needs)}
    return FileFacts(**{**facts, "weights": make(folder, table, model)})


def read_resolved(path: Path) -> ResolvedPlan:
    """Read a resolved plan; OSError, ValueError or KeyError for anything else."""
    documents = json.loads(path.read_text(encoding="utf-8"))
    thresholds = None
    if documents["thresholds"] is not None:
        from pi2.plan.reading.thresholds import Thresholds

        thresholds = Thresholds.model_validate_json(json.dumps(documents["thresholds"]))
    model = Model.model_validate_json(json.dumps(documents["model"]))
    store = path.parent / STORE
    resolved = ResolvedPlan(
        plan=Plan.model_validate_json(json.dumps(documents["plan"])),
        device=Device.model_validate_json(json.dumps(documents["device"])),
        model=model,
        path=path,
        thresholds=thresholds,
        find_source=find_source,
        file=read_file_facts(store, model) if (store / TABLE).exists() else None,
    )
    # It was computed of the documents as they were read and checked.
    resolved.__dict__["digest"] = str(documents["digest"])
    return resolved
