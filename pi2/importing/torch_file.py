"""Reads PyTorch weight files: tensors only, no code.

Such a file is a pickle, which may name any function to be called when it is read.  torch's
weights-only reader refuses everything but tensors and plain containers; without torch the files are
not read at all.
"""

from __future__ import annotations

import importlib.util
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.arrays import Raw
from pi2.diagnostics import UserError
from pi2.importing.safetensors_file import SourceTensor
from pi2.regular_file import check_regular

if TYPE_CHECKING:
    from collections.abc import Mapping


_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTensor(SourceTensor):
    """A tensor of a PyTorch file, mapped into memory; ``offset`` means nothing here."""

    values: Any
    """torch.Tensor."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop``, as `SourceTensor.read_raw` returns them."""
        self.check_type()
        import torch

        values = self.values if self.shape else self.values.reshape(1)
        rows = values[start:stop].contiguous()
        if rows.dtype == torch.bfloat16:
            found: Raw = rows.view(torch.int16).numpy().view(np.uint16)
            return found
        plain: Raw = rows.numpy()
        return plain


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def list_torch_file(path: Path) -> Mapping[str, SourceTensor]:
    """Tensors of ``path`` by name; `UserError` P531 without torch, P532 if it cannot be read, P545
    if it holds more than tensors."""
    if not has_torch():
        raise UserError.of(
            "P531",
            f"{path} is a PyTorch file, and torch is not installed",
            help="install torch, or save the model as safetensors",
        )
    import torch

    try:
        # Files of old versions are no archives, and cannot be mapped.
        check_regular(path)
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # torch warns of pickles that it then refuses.
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = _find_name(str(error))
        raise UserError.of(
            "P545",
            f"{path} holds more than tensors{named}; nothing of it was run",
            help="save the model as safetensors, on a machine where you trust the file",
        ) from None
    except FileNotFoundError:
        raise _bad_file(path, "No such file or directory") from None
    except Exception as error:  # torch raises RuntimeError, EOFError, OSError and more
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _bad_file(path, reason) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise _bad_file(path, "it is not a table of tensors")
    return {
        str(name): _describe(path, str(name), values)
        for name, values in found.items()
        if isinstance(values, torch.Tensor)
    }


def _find_name(explanation: str) -> str:
    """Say which function a file would have had called, where torch's explanation names it."""
    found = re.search(r"GLOBAL ([\w.]{1,100})", explanation)
    return f": it names {found[1]}" if found else ""


def _describe(path: Path, name: str, values: Any) -> TorchTensor:
    kind = str(values.dtype).removeprefix("torch.")
    return TorchTensor(
        file=path,
        name=name,
        dtype=_NAMES.get(kind, kind),
        shape=tuple(values.shape),
        offset=0,
        size_bytes=values.numel() * values.element_size(),
        values=values.detach(),
    )


def _bad_file(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P532", f"cannot read {path}: {problem}", help="download or export the checkpoint again"
    )
