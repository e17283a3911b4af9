"""Whatever stands in a file that strangers have written, and whatever a disk does: a finding, or a
right result.

`tools/fuzz.py` tries the same with more cases; what it found is in tests/corpus.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing.documents import PLANS, read_documents
from fuzzing.targets import Target, make_targets
from tests.helpers.slow import keep_quick

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
CASES = sorted(CORPUS.glob("*/*.case"))

randoms = st.randoms(use_true_random=False)
some = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return make_targets(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trials of tokenizers are kept where the tests of this module alone look."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi2.sandbox.tokenizer.find_cache_folder", lambda kept: folder)
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_once_failed_does_so_no_more(targets: dict[str, Target], case: Path) -> None:
    targets[case.parent.name].run(case.read_bytes())


@pytest.mark.parametrize("name", keep_quick(PLANS, PLANS[:1]))
def test_the_documents_that_are_spoilt_are_sound(targets: dict[str, Target], name: str) -> None:
    _, text = read_documents(name)["plan"]
    case = json.dumps([name, "plan"]).encode() + b"\n" + text.encode()
    assert targets["document"].run(case) == "sound"


TRIALS = {
    "document": 50, "references": 25, "config": 150, "gguf": 125, "file-plan": 25, "companions": 40,
    "store": 100, "disk": 30, "tokenizer": 50, "template": 25,
}  # fmt: skip
"""Cases of each target; each push tries a twentieth."""


@pytest.mark.parametrize("part", keep_quick([20, 1], [20]))
@pytest.mark.parametrize("name", TRIALS)
def test_spoilt_cases_become_what_the_target_allows(
    targets: dict[str, Target], name: str, part: int
) -> None:
    @settings(some, max_examples=TRIALS[name] // part)
    @given(random=randoms)
    def run(random: Random) -> None:
        """Make a case and give it to pi2; the target itself says what may become of it."""
        assert targets[name].run(targets[name].make(random))

    run()
