"""The GPUs that the kernels' tests run on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pi2.backends.gpu.launchers.interface import Launcher
from tests.helpers.gpu import require_launcher


@pytest.fixture(params=["opencl", "webgpu", "cuda"])
def launcher(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Launcher:
    """A device of each API; in reports it says whether it is emulated."""
    found = require_launcher(request.param)
    record_property("device", found.facts.name + (" (emulated)" if found.facts.is_emulated else ""))
    return found
