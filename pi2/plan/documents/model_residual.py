"""What layers have beside the residual stream: embeddings of their own, and further streams."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pi2.plan.documents.common import Count, Table
from pi2.plan.weights.layout import fill_groups


class LayerEmbedding(Table):
    """Embeddings that every layer has of its own (Gemma 4 E2B), in one table that stays
    on flash: a token needs one row of it.

    A layer's row, times ``factor``, and the norm of what a projection makes of the first layer's
    input, times ``projection_factor``, are added and divided by sqrt(2): e.  After its FFN the
    layer adds norm(output(act(gate x) * e)) to the residual stream x, with the FFN's activation.
    """

    width: Annotated[int, Field(ge=1, le=2**14, examples=[256])]
    """Elements of a token's embedding for one layer."""
    vocab: Count | None = Field(default=None, examples=[262144])
    """Rows of the table, where there are fewer than tokens: the others have the first row."""
    factor: float = Field(default=1.0, gt=0.0, examples=[16.0])
    """Factor of the table's rows."""
    projection_factor: float = Field(default=1.0, gt=0.0, examples=[0.0255])
    """Factor of what the projection gives, before its norm."""

    @property
    def stored_width(self) -> int:
        """Length of a layer's vectors in backends: zeros fill it up."""
        return fill_groups(self.width)


SMALLEST_SQUARE = 1e-5
"""What a mean square is taken for at least where `AltUp` gives a stream the first one's."""


class AltUp(Table):
    """Residual streams that predict each other, and LAuReL (Gemma 3n; arXiv 2301.13310 and
    2411.07501).

    A token has ``streams`` vectors h.  The first is its embedding; of that, projections make the
    others, each with the root mean square of the first.  A layer begins with predictions
    p = h + C h, whose coefficients C [streams, streams] are a projection of
    m = tanh(R norm(h[0]) / hidden).  Attention and the FFN change the first alone, x, and after
    attention LAuReL adds u + norm(output(input u)), where u is what attention reads, and all is
    divided by sqrt(2).  After the FFN, m is made anew, of x, and all streams become
    h = p + (1 + Q m) (x - p[0]).  A layer's own embedding is gated by the first of them, times a
    vector where ``scaled``, and added to the others.  After the last layer, projections of the
    others, each with the root mean square of the first, and the first are averaged.
    """

    streams: Annotated[int, Field(ge=2, le=16, examples=[4])]
    """Vectors of a token."""
    laurel_rank: Count
    """Rows of LAuReL's projection."""
    scaled: bool = True
    """Whether what gates a layer's own embedding is multiplied with a vector first."""
