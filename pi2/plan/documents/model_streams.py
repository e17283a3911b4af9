"""Residual streams with gates of low rank, and rows that n-grams of tokens add to them."""

from typing import Annotated

from pydantic import Field

from pi2.plan.documents.common import Count, Table

_Whole = Annotated[int, Field(ge=0, le=2**53)]


class GatedStreams(Table):
    """Residual streams that attention, FFNs and the head read by gates (Qwen3.8 Flash Next).

    A token has ``streams`` vectors x, each its embedding at first.  n is all of them, each with a
    norm of its own.  With m = silu(down n / streams), an operator reads the mean of all streams of
    n sigmoid(up m).  With o, which it gives, stream j becomes x[j] + 2 sigmoid(w[j] / streams) o;
    w is inject n.  The head reads in the same way, without a further norm."""

    streams: Annotated[int, Field(ge=2, le=16, examples=[4])]
    """Vectors of a token."""
    rank: Count
    """Elements of m."""


SMALLEST_PRODUCT = 1e-6
"""Lower bound of |k q| / sqrt(hidden) in `Ngrams`; 0 stays 0."""


class Ngrams(Table):
    """Rows of a table, chosen by a token and those before it, which a layer adds to its streams.

    A token is number 0, the one before it 1, and so on.  From an end token on, and before the
    first token, all count as end tokens.  The hash of n of them is the exclusive or of their
    products with ``multipliers``, of 64 bits.  For each n from 2 on, equally many rows are looked
    up: number ``offsets[h]`` + hash mod ``sizes[h]`` is row h.  All of them together are e.

    With k = norm(key e), q = norm(x) and v = value e, stream j gets y[j] = sigmoid(s) v.  Here s is
    the root of |k[j] q[j]| / sqrt(hidden), with the sign of the product.  It also gets silu(c): c
    is a convolution of norm(y), which reads tokens whose distance is a multiple of the longest
    n."""

    layer: Annotated[int, Field(ge=0, examples=[1])]
    """The layer that begins with them."""
    rows: Annotated[int, Field(ge=1, le=2**31 - 1, examples=[8_000_000])]
    """Rows of the table."""
    kernel: Annotated[int, Field(ge=1, le=16, examples=[4])]
    """Tokens that the convolution reads."""
    end_token: Annotated[int, Field(ge=0, examples=[151643])]
    """Token that ends a text."""
    multipliers: Annotated[
        tuple[_Whole, ...], Field(min_length=2, max_length=8, examples=[[3, 5, 7]])
    ]
    """Factors of a token and those before it: as many as the longest n."""
    sizes: Annotated[tuple[Count, ...], Field(min_length=1, examples=[[499_979, 499_957]])]
    """Rows that a row is chosen from, of all n in turn."""
    offsets: Annotated[tuple[_Whole, ...], Field(min_length=1, examples=[[0, 499_979]])]
    """The first of these."""

    @property
    def length(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def count(self) -> int:
        """Rows of a token."""
        return len(self.sizes)

    @property
    def fits(self) -> bool:
        """Whether every n has equally many rows, and the table all of them."""
        if len(self.offsets) != self.count or self.count % (self.length - 1):
            return False
        pairs = zip(self.offsets, self.sizes, strict=True)
        return max(first + size for first, size in pairs) <= self.rows

    @property
    def window(self) -> int:
        """Tokens that the convolution reaches over, the token itself included."""
        return (self.kernel - 1) * self.length + 1
