"""The GPUs that the kernels' tests run on, and a folder for what is compiled."""

import os
from collections.abc import Callable, Iterator

import pytest

from pi2.backends.gpu.launchers.interface import Launcher
from tests.helpers.compiling import make_common_folder
from tests.helpers.gpu import require_launcher
from tests.helpers.slow import GPU_APIS


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled kernels of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if "PI2_CACHE_DIR" not in os.environ:
            patch.setenv("PI2_CACHE_DIR", str(make_common_folder(tmp_path_factory, "cache")))
        yield


@pytest.fixture(params=GPU_APIS)
def launcher(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Launcher:
    """A device of each API; in reports it says whether it is emulated."""
    found = require_launcher(request.param)
    record_property("device", found.facts.name + (" (emulated)" if found.facts.is_emulated else ""))
    return found
