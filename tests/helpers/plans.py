"""Plan files for tiny models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from pi2.plan.weights.layout import lay_out_bundle
from tests.helpers.models import TinyModel, merge


def write_plan(
    folder: Path, tiny: TinyModel, changes: Mapping[str, Mapping[str, Any] | Any] | None = None
) -> Path:
    """Write a plan for ``tiny`` on this machine beside its model file; return its path.

    An eighth of the neurons is hot, a quarter of a layer fits into the cold cache.  ``changes``
    replaces values, tables by key.
    """
    shape = tiny.model.shape
    layout = lay_out_bundle(shape.hidden, tiny.model.quantization.ffn)
    document: dict[str, Any] = {
        "schema_version": 3,
        "device": "host",
        "model": f"./{tiny.model.id}.model.toml",
        "weights": tiny.store.name,
        "backends": {"cpu": "reference"},
        "memory": {
            "budget": "2 GiB",
            "segments": {
                "runtime": "300 MiB", "attention": "64 MiB", "kv": "64 MiB", "predictor": "64 MiB",
                "hot": "64 MiB", "cold": f"{max(64, shape.ffn // 4) * layout.stride} B",
                "workspace": "64 MiB",
            },
        },
        "bundle": {"stride": f"{layout.stride} B"},
        "layers": {"split": {"cpu": 1.0}, "hot": 0.125},
        "prefill": {"chunk": 8},
        "decode": {"predictor": "low-rank"},
        "kv": {"context": shape.context},
    }  # fmt: skip
    merge(document, changes)
    model = tiny.model.model_dump(mode="json", exclude_none=True)
    (folder / f"{tiny.model.id}.model.toml").write_text(tomlkit.dumps(model))
    path = folder / "tiny.plan.toml"
    path.write_text(tomlkit.dumps(document))
    return path
