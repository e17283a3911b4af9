"""What the cpu backend compiles before a model has memory, and what it would load afterwards."""

from collections.abc import Callable

import pytest

from pi2.backends.cpu import backend
from pi2.backends.cpu.request import make_spec
from pi2.backends.executor import Executor
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.engine.loading import StoreWeights


class Stopped(Exception):
    """The executor would be built now."""


def watch_kernels(load: Callable[[], object]) -> tuple[list[KernelSpec], KernelSpec]:
    """Return the specs that are compiled until ``load`` takes memory, and that of the executor
    which it then builds; nothing is compiled, and ``load`` ends there."""
    early: list[KernelSpec] = []
    late: list[KernelSpec] = []

    def prepare(request: BuildRequest) -> Callable[[BuildRequest], Executor]:
        (late if has_begun else early).append(make_spec(request))
        return build

    def begin(*arguments: object) -> BuildRequest:
        has_begun.append(True)
        return begun(*arguments)  # type: ignore[arg-type]

    def build(request: BuildRequest) -> Executor:
        late.append(make_spec(request))
        raise Stopped

    has_begun: list[bool] = []
    begun = StoreWeights.complete_request
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "prepare", prepare)
        patch.setattr("pi2.engine.loading.StoreWeights.complete_request", begin)
        with pytest.raises(Stopped):
            load()
    (needed,) = late
    return early, needed
