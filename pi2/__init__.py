"""pi2 runs large language models that do not fit into memory, from plan files.

>>> import pi2
>>> with pi2.load("plans/demo.plan.toml") as model:
...     text = model.generate("def ", max_tokens=8).result.text"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi2.diagnostics import UserError
    from pi2.engine.generation import Generation, GenerationResult
    from pi2.engine.loaded_model import LoadedModel
    from pi2.engine.statistics import RunStatistics
    from pi2.loading import load

__all__ = [
    "Generation",
    "GenerationResult",
    "LoadedModel",
    "RunStatistics",
    "UserError",
    "__version__",
    "load",
]

_HOMES = {
    "Generation": "pi2.engine.generation",
    "GenerationResult": "pi2.engine.generation",
    "LoadedModel": "pi2.engine.loaded_model",
    "RunStatistics": "pi2.engine.statistics",
    "UserError": "pi2.diagnostics",
    "load": "pi2.loading",
}


@contextmanager
def pause_collection() -> Iterator[None]:
    """Look for no garbage in what stays: that takes a tenth of a small model's load."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on and not gc.get_freeze_count():
            # All becomes old: else the first look would be at everything that was made here.
            gc.freeze()
            gc.unfreeze()
        if is_on:
            gc.enable()


def __getattr__(name: str) -> Any:
    # Imported on first use: `pi2 validate` and `--help` must not pay for numpy and pyarrow.
    if name == "__version__":
        from importlib.metadata import version

        return version("pi2")
    if name in _HOMES:
        from importlib import import_module

        with pause_collection():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pi2' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
