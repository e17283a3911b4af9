"""A GGUF file with flipped bytes or cut short is refused or sound: never a traceback."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi2.weights.file_reading import FileFiller, check_document
from pi2.weights.gguf_weights import GgufWeights
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.models import MIXTURE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_random_gguf(tmp_path_factory.mktemp("whole"), {"layers": 2}, MIXTURE)
    assert FileFiller().runs_as_it_is(file)
    return file


def find_header(content: bytes | bytearray) -> int:
    """Bytes of metadata and of the list of tensors."""
    return content.rindex(b".weight") + 100


def check(file: Path) -> list[str]:
    """Codes of the errors of a file; also what can be read of it as weights is."""
    errors = [item.code for item in check_document(file).diagnostics if item.severity == "error"]
    if FileFiller().runs_as_it_is(file):
        with GgufWeights.open(file, has_texts=False) as weights:
            size = file.stat().st_size
            for _, _, tensor in weights.list_matrices():
                assert 0 < tensor.offset <= tensor.offset + tensor.size_bytes <= size
            weights.read_vector("final_norm")
    return errors


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=False))
def test_spoilt_headers_are_findings(whole: Path, tmp_path: Path, random: Random) -> None:
    content = bytearray(whole.read_bytes())
    header = find_header(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        width = random.choice((1, 1, 4, 8))
        place = random.choice((random.randrange(64), random.randrange(header)))
        values = (random.randbytes(width), b"\xff" * width, bytes(width - 1) + b"\x80")
        content[place : place + width] = random.choice(values)
    file = tmp_path / "spoilt.gguf"
    file.write_bytes(content)
    check(file)


@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(share=st.floats(0, 1), in_header=st.booleans())
def test_cut_files_are_refused(whole: Path, tmp_path: Path, share: float, in_header: bool) -> None:
    content = whole.read_bytes()
    end = find_header(content) if in_header else len(content)
    file = tmp_path / "cut.gguf"
    file.write_bytes(content[: min(int(share * end), len(content) - 64)])
    assert check(file) == ["P532"]
