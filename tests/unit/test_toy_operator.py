"""An operator is added by its file: read, converted, stored, counted, computed, refused."""

from pathlib import Path

from tests.helpers.additions import run_with

OPERATOR = '''
"""What a layer gives, times a number of its own to a power."""


class Toy:
    name = "toy"

    def find_fault(self, options):
        is_known = set(options) == {"power"} and options["power"] > 0
        return None if is_known else "it needs a power above 0"

    def list_tensors(self, at, options):
        yield at.vector("toy", 1, at.take("model.layers.{layer}.toy", 1))

    def compute(self, x, options, read):
        return x * read("toy")[0, 0] ** options["power"]


OPERATORS = (Toy(),)
'''
SCRIPT = """
import sys
from pathlib import Path

home = Path(sys.argv[1])

import numpy as np
import pytest
import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.model.tensors import list_tensors
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import TinyModel, draw_weights, make_model
from tests.helpers.plans import write_plan

factors = {0: 1.5, 1: 0.5, 2: 2.0}
found, stores = {}, {}
for key, name, own in (
    ("toy", "model.layers.{}.toy", {"operators": {"toy": {"power": 1.0}}}),
    ("layer_scale", "model.layers.{}.layer_scalar", {"layer_scale": True}),
):
    folder = home / key
    folder.mkdir()
    model = make_model({**own, "predictor": None})
    weights = draw_weights(model)
    weights |= {name.format(n): np.array([f], np.float32) for n, f in factors.items()}
    assert sum(f".{key}" in tensor.name for tensor in list_tensors(model)) == 3
    checkpoint = write_checkpoint(folder / "checkpoint", model, weights)
    tiny = TinyModel(model=model, store=folder / "store", weights=weights, original=None)
    plan = write_plan(folder, tiny, {"decode": {"predictor": "none"}})
    document = folder / f"{model.id}.model.toml"
    arguments = [str(checkpoint), "--model", str(document), "-o", str(tiny.store)]
    assert run(["convert", *arguments]) == 0
    with pi2.load(plan, set={"backends.cpu": "reference"}) as loaded:
        found[key] = np.array(loaded.logits([256, 1, 2, 3, 4]))
assert np.array_equal(found["toy"], found["layer_scale"])
plan = home / "toy" / "tiny.plan.toml"
with pytest.raises(UserError, match="does not know operators.toy"):
    pi2.load(next((home / "toy").glob("*.plan.toml")), set={"backends.cpu": "cpu"})
document = home / "toy" / "tiny.model.toml"
document.write_text(document.read_text().replace("power = 1.0", "power = -1.0"))
assert run(["validate", str(next((home / "toy").glob("*.plan.toml")))]) == 1
"""


def test_an_operator_needs_its_file(tmp_path: Path) -> None:
    run_with(tmp_path, {"model": OPERATOR}, SCRIPT)
