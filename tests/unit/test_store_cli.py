"""Commands about stores, and what makes a store another one."""

import json
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from pi2.fitting.check import check_file
from pi2.plan.documents.model import Model
from pi2.plan.reading.references import find_document
from pi2.store.identity import _OLDEST, _OTHERS, describe_weights
from tests.helpers.models import TinyModel
from tests.helpers.programs import Ask


def test_verify_notices_manifest_that_points_elsewhere_in_a_file(tiny: TinyModel, ask: Ask) -> None:
    # Hashes agree, but the manifest's offsets are not where Arrow finds the columns.
    file = tiny.store / "manifest.json"
    fields = json.loads(file.read_text())
    layer = next(item for item in fields["files"] if item["path"] == "layers/ffn-000.arrow")
    layer["neurons_offset"] -= 128
    fields["tensors"][0]["scales_offset"] += 64
    file.write_text(json.dumps(fields))
    assert ask(["store", "verify", str(tiny.store)], 1).out.count("error[P510]") == 2


def test_a_state_of_a_first_store_is_still_described_as_it_was() -> None:
    model = check_file(find_document("qwen3-next-80b-a3b", "model", Path())).document
    assert isinstance(model, Model) and model.recurrence is not None
    assert describe_weights(model)["recurrence"] == {
        "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4,
        "convolution_bias": False, "projection_bias": False, "norm_groups": 1, "shortest_step": 0.0,
    }  # fmt: skip


def test_every_table_says_which_options_its_first_stores_had() -> None:
    for part in set(Model.model_fields) - _OTHERS:
        kind = Model.model_fields[part].annotation
        tables = [
            kind
            for kind in get_args(kind) or (kind,)
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        # Of another RoPE only what differs from the defaults is described.
        assert not tables or part in _OLDEST or part == "other_rope", part
