"""What a model document calls the tensors of its checkpoint: model_tensors.toml has the keys."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from pi2.plan.documents.common import Table

_KEYS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TENSOR_OPTIONS = frozenset(key for key, own in _KEYS.items() if "default" in own)
"""Keys of `Tensors` that are not names."""


def _describe(own: Mapping[str, Any]) -> tuple[Any, Any]:
    """Type and default of a key."""
    if "name" in own:
        return str, own["name"]
    if "example" in own:
        return str | None, Field(default=None, examples=[own["example"]])
    return Literal[tuple(own["choices"])] if "choices" in own else bool, own["default"]


def _make_class() -> type[Table]:
    found = {key: _describe(own) for key, own in _KEYS.items()}
    kinds = {key: kind for key, (kind, _) in found.items()}
    texts = {key: own["says"] for key, own in _KEYS.items()}
    values = {
        "__module__": __name__,
        "__qualname__": "Tensors",
        "__doc__": _TEXT,
        "__annotations__": {"TEXTS": ClassVar[Mapping[str, str]], **kinds},
        "TEXTS": texts,
        **{key: default for key, (_, default) in found.items()},
    }
    return new_class("Tensors", (Table,), exec_body=lambda names: names.update(values))


_TEXT = """Names of the checkpoint's tensors; ``{layer}`` stands for the layer's number, and
``{expert}`` for the expert's in the FFN's and predictors' names.  An FFN's name without
``{expert}`` means one tensor of all experts, [experts, ...]."""

if TYPE_CHECKING:

    class Tensors(Table):
        fused_order: Literal["stacked", "grouped"] = "stacked"
        fused_qkv: str | None = None
        fused_gate_up: str | None = None
        fused_shared: str | None = None
        fused_dense: str | None = None
        query_gate: str | None = None
        experts_turned: bool = False

        def __getattr__(self, name: str) -> str: ...

else:
    Tensors = _make_class()
