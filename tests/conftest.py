"""What all tests share: hypothesis, quiet third parties, cores, threads and a compiler."""

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Two workers on two cores: threads of NumPy's matrix library that look for work take it from them.
# The library reads this once, when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from pi2.backends.compiler import cache
from pi2.caches import find_cache_folder
from tests.helpers.compiling import QUICK, make_common_folder, start_loaded_compiler
from tests.helpers.programs import Ask, Written
from tests.helpers.slow import mark_as_stated

if TYPE_CHECKING:
    from tests.helpers.models import TinyModel

# No deadline: other work on the machine makes single examples slow.  CI draws the same examples
# every time, so that a change is to blame for a failure; people draw others.
IN_CI = bool(os.environ.get("CI"))
for profile, examples in (("usual", 20), ("many", 150)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=examples,
        derandomize=IN_CI,
        suppress_health_check=[HealthCheck.too_slow] * IN_CI,
    )
settings.load_profile("usual")

# A shell starts what runs in its background with SIGINT ignored, and programs that tests start and
# interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown = mark_as_stated(items)
    # Of a file of which single tests are asked for, the others are not among the items.
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/slow.toml names what is not there: {unknown}")


@pytest.fixture(autouse=True)
def every_core() -> Iterator[None]:
    """A test that leaves its thread bound to some cores fails; later tests are not bound."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before, "the test left its thread on other cores"


@pytest.fixture(scope="session", autouse=True)
def compiler_at_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled by processes without TVM at first, each once for all workers.  Runs
    measure the memory's rate with few bytes, and nothing waits for a disk."""
    objects = make_common_folder(tmp_path_factory, "objects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "start_compiler", partial(start_loaded_compiler, objects))
        patch.setattr("pi2.machine.memory.MEASURED_BYTES", 1 << 20)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def quick_kernels() -> Iterator[None]:
    """Kernels of a module's tests are compiled without optimising, into a folder in which users'
    runs never look for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PI2_CACHE_DIR", str(find_cache_folder("kernels").parent / "tests"))
        patch.setenv(QUICK, "1")
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> "TinyModel":
    """A tiny random model with its store."""
    from tests.helpers.models import make_tiny

    return make_tiny(tmp_path)


@pytest.fixture
def plan(tmp_path: Path, tiny: "TinyModel") -> Path:
    """The plan of the tiny random model."""
    from tests.helpers.plans import write_plan

    return write_plan(tmp_path, tiny)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    from pi2.cli.main import run

    def call(words: Sequence[str], code: int = 0) -> Written:
        found = run(words)
        written = Written(*capsys.readouterr())
        assert found == code, written
        return written

    return call
