"""A number format is added by its file and its unpacking: converted to, stored, read, computed."""

from pathlib import Path

import pytest

from tests.helpers.additions import run_with

FORMAT = '''
"""Five bits with an fp16 scale for each group: codes from -15 to 15."""

from pi2.formats.packing import GROUP, Packing


class Toy(Packing):
    __slots__ = ()

    def find_codes(self, rows, scales_out):
        import numpy as np

        groups = rows.reshape(len(rows), -1, GROUP)
        scales_out[:] = np.abs(groups).max(axis=2) / 15
        scales = np.maximum(scales_out.astype(np.float32), np.float32(1e-30))
        codes = np.clip(np.rint(groups / scales[:, :, None]), -15, 15)
        return codes.astype(np.int8).reshape(rows.shape)


USES = frozenset({"tables", "projections", "neurons"})
PACKINGS = (Toy(name="toy5", bits=5, offset=16, top=15, uses=USES),)
'''
UNPACKING = '''
"""Four bits of a field in its own chunk, the highest in one for all."""

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.unpacking.unpacking import Nibbles
from pi2.formats import find_packing


class Toy(Nibbles):
    unrolls, begins_with_offset = True, False

    def unpack_word(self, isa, block, word, tile):
        def number(value):
            return v.constant(value, "int32", block.lanes)

        byte = block.first * self.group_bytes + 16 * block.lanes
        at = block.vector.weights_base + v.wide(byte)
        highest = v.let(v.load_as(block.vector.weights, at, "int32", block.lanes))
        turn = T.int32(tile) if isinstance(tile, int) else T.cast(tile, "int32")
        own = v.let(highest >> v.splat(turn, block.lanes))
        found = []
        for index in range(8):
            low = (word >> number(4 * index)) & number(15)
            bit = (own >> number(8 * (index // 2) + 4 * (index % 2))) & number(1)
            code = low + (bit << number(4)) - number(16)
            found.append(v.cast(code, "float32", block.lanes))
        return found

    def count_folded(self, isa, lanes):
        return 1

    def take_fields(self, dot, chunk):
        raw = v.let(chunk.load(chunk.byte, 4 * dot.width))
        highest = v.let(chunk.load(16 * chunk.lanes, 4 * dot.width))
        found = []
        for half, low in enumerate(self.split(dot, raw)):
            size, turn = 4 * dot.width, chunk.number + 4 * half
            pairs = v.reinterpret(highest, "uint16", size // 2)
            words = pairs >> v.constant(turn, "uint16", size // 2)
            bit = v.reinterpret(words, "uint8", size) & v.constant(1, "uint8", size)
            found.append(v.let(low + bit * v.constant(16, "uint8", size)))
        return found

    def finish(self, total, sums, width):
        return total + sums + sums

UNPACKINGS = {"toy5": Toy(find_packing("toy5"))}
'''
SCRIPT = """
import sys
from pathlib import Path

home = Path(sys.argv[1])

import numpy as np
import pi2
from pi2.cli.main import run
from pi2.formats import find_packing
from pi2.store.reader import NeuronStore
from tests.helpers.bundles import unpack_bundles
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import TinyModel, draw_weights, make_model
from tests.helpers.plans import write_plan

SHAPE = {"hidden": 128, "head_dim": 32}
model = make_model({"quantization": {"ffn": "toy5"}, "shape": SHAPE})
weights = draw_weights(model)
checkpoint = write_checkpoint(home / "checkpoint", model, weights)
tiny = TinyModel(model=model, store=home / "store", weights=weights, original=None)
plan = write_plan(home, tiny)
document = home / f"{model.id}.model.toml"
assert run(["convert", str(checkpoint), "--model", str(document), "-o", str(tiny.store)]) == 0
toy = find_packing("toy5")
with NeuronStore.open(tiny.store, model=model) as store:
    gates = weights[model.tensors.gate.format(layer=0)]
    found = unpack_bundles(store.layers[0].bundles, store.bundle)[0]
    assert np.array_equal(found, toy.dequantize(*toy.quantize(gates), 128))
    assert np.abs(found - gates).max() < 0.51 * np.abs(gates).max() / 15
found = {}
for backend in ("reference", "cpu"):
    with pi2.load(plan, set={"backends.cpu": backend}) as loaded:
        answer = loaded.generate("ab", max_tokens=12, temperature=0)
        list(answer)
        found[backend] = answer.result.token_ids, np.array(loaded.logits([256, 1, 2, 3, 4]))
(tokens, logits), (own_tokens, own_logits) = found.values()
assert tokens == own_tokens, found
assert np.abs(logits - own_logits).max() < 1e-3 * np.abs(logits).max()
"""


@pytest.mark.slow
def test_a_format_of_five_bits_needs_its_file_and_its_unpacking(tmp_path: Path) -> None:
    run_with(tmp_path, {"formats": FORMAT, "unpacking": UNPACKING}, SCRIPT)
