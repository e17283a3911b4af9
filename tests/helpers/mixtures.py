"""A tiny mixture of experts with a plan that runs it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomlkit

from pi2.fitting.check import check_file
from pi2.importing.conversion_job import group_experts
from pi2.measuring.ordering import reorder_store
from pi2.plan.documents.device import Device
from pi2.plan.reading.references import find_document
from pi2.store.manifest import read_manifest
from pi2.store.reader import NeuronStore
from synthesis.blueprint import draw_blueprint
from synthesis.generation import write_synthetic_store
from synthesis.plan_file import PlanWish, write_plan
from synthesis.recipe import Recipe
from tests.helpers.models import MIXTURE, make_model

SHAPE = {"layers": 2, "hidden": 128, "ffn": 200, "vocab": 300}
"""200 neurons: an expert's biases do not begin at a multiple of 64 bytes."""


def make_mixture_plan(
    folder: Path,
    activation: str,
    changes: Mapping[str, Any] | None = None,
    order: Literal["hotness", "expert", "index"] = "hotness",
) -> Path:
    """A plan with everything in memory for a synthetic mixture, four experts of which two compute a
    token; ``changes`` are those of `make_model`, and neurons are stored in an ``order``."""
    model = make_model(
        {
            "shape": SHAPE,
            "ffn": {"activation": activation},
            **MIXTURE,
            "tied_head": False,
            **(changes or {}),
        }
    )
    store, plan = folder / "store", folder / "tiny.plan.toml"
    write_synthetic_store(store, draw_blueprint(model, Recipe(active=0.3, skew=0.4)))
    if order != "hotness":
        with NeuronStore.open(store) as opened:
            known = [layer.original for layer in opened.layers]
        orders = [
            np.sort(row) if order == "index" else group_experts(row, model.shape.ffn, 1)
            for row in known
        ]
        reorder_store(store, np.stack(orders), order)
    model_file = folder / "tiny.model.toml"
    model_file.write_text(tomlkit.dumps(model.model_dump(mode="json", exclude_none=True)))
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(device, Device)
    write_plan(
        plan, model=model, model_file=model_file, device=device, store=store,
        bundle=read_manifest(store).bundle.layout, store_bytes=0, wish=PlanWish(context=64),
    )  # fmt: skip
    return plan
