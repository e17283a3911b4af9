"""What tells the cutoff of a layer's gates for a token, without computing a single gate.

The cutoff is mean + d deviation of the gates G u of all n neurons, with d of the model document.
Their mean is g u, g the mean of the rows of G; and their variance is that of (G - g) u, which is
|R u|^2 / n, where R is a triangular factor: R^T R = (G - g)^T (G - g).  So a matrix of at most
1 + hidden rows gives both: g, then the rows of R times |d| / sqrt(n).  It is exact, it is smaller
than the gates, and it does not matter which neurons are in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model

GATE_CUTOFF = "gate_cutoff"
"""The matrix, of layers whose gates have a cutoff."""


def list_cutoff_matrices(model: Model) -> dict[int, tuple[int, int]]:
    """Rows and length of the matrix of each layer that has one."""
    rows = count_cutoff_rows(model) * (2 if has_remainders(model) else 1)
    return dict.fromkeys(model.cut_layers, (rows, model.shape.stored_hidden))


def count_cutoff_rows(model: Model) -> int:
    """Numbers of which a cutoff is made: the mean, and those of which the deviation is the
    length."""
    return 1 + min(model.shape.ffn, model.shape.hidden)


def find_cutoff_precision(model: Model) -> Literal["int8", "fp16"]:
    """How these matrices are stored: an error of a cutoff is one of all gates."""
    return "fp16" if model.quantization.attention == "fp16" else "int8"


def has_remainders(model: Model) -> bool:
    """Whether as many rows follow that have what fp16 leaves of the first: stores of fp16 hold the
    published weights exactly, and cutoffs are none of them."""
    return find_cutoff_precision(model) == "fp16"
