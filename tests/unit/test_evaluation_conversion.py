"""What quantisation costs, by weights that are read layer by layer."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomlkit

from layerwise import CheckpointWeights
from measure_conversion import main, measure_conversion, score_layerwise
from pi2.cli.main import run
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.measuring.texts import Window, compute_losses
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.goldens import copy_checkpoint, list_goldens, read_golden
from tests.helpers.models import draw_weights, make_model
from tests.helpers.slow import keep_quick

TEXT = "What is rounded is not what was written, but it reads nearly the same. " * 8


@pytest.mark.parametrize("name", keep_quick(list_goldens(), list_goldens()[::3]))
def test_losses_by_checkpoints_weights_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    golden = read_golden(name)
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    model = describe_checkpoint(checkpoint).model
    weights = CheckpointWeights(open_checkpoint(checkpoint), model)
    prompt = tuple(int(token) for token in golden.prompt)
    # Two windows: the layers' state of one is not that of the other.  Both are longer than the 16
    # tokens beyond which one of the models has other positions.
    scores = score_layerwise(weights, model, [Window(prompt, 1), Window(prompt[:20], 4)])
    logits = np.concatenate([golden.logits[:-1], golden.logits[3:19]])
    targets = np.array([*prompt[1:], *prompt[4:20]])
    np.testing.assert_allclose(scores.losses, compute_losses(logits, targets), atol=2e-3)
    np.testing.assert_array_equal(scores.choices, logits.argmax(axis=1))


def test_the_tool_reports_perplexity_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model({"predictor": None})
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    document = tomlkit.dumps(model.model_dump(mode="json", exclude_none=True))
    (tmp_path / "tiny.model.toml").write_text(document)
    (tmp_path / "text.txt").write_text(TEXT)
    store = tmp_path / "store"
    command = ["convert", str(checkpoint), "--model", str(tmp_path / "tiny.model.toml")]
    assert run([*command, "-o", str(store)]) == 0
    capsys.readouterr()
    assert main([str(checkpoint), str(store), "--text", str(tmp_path / "text.txt"), "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["windows"] == 8 and cost["tokens"] == 8 * 63
    # int4 costs a random model something, but it is still the same model.
    assert 0 < cost["loss_change_error"] < abs(cost["loss_change"]) + 0.2
    assert cost["agreement"] > 0.3
    found = measure_conversion(checkpoint, model, store, [TEXT])
    assert found.before == cost["before"]
