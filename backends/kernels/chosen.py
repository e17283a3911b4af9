"""Neurons and tokens that a call computes, where it does not compute all that its arrays hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pi2.backends.compiler import vectors as v


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Places of the n neurons in ``bundles``, and of the T tokens in a chunk; None: all of them.

    In a mixture, those of one expert.
    """

    neurons: v.Buffer | None = None
    """int32 [n]."""
    tokens: v.Buffer | None = None
    """int32 [T], ascending; where tokens are multiplied in pairs (`i8mm`), both of each, but for
    the last one of a chunk that has no other."""
    origin: v.Expr | None = None
    """Token from which numbers are counted; None: from the first."""

    def find_neuron(self, number: v.Expr) -> v.Expr:
        """Return the place of neuron ``number`` of the call."""
        return number if self.neurons is None else v.let(self.neurons[number])

    def find_token(self, number: v.Expr) -> v.Expr:
        """Return the place of token ``number`` of the call."""
        number = number if self.origin is None else self.origin + number
        return number if self.tokens is None else v.let(self.tokens[number])

    def count_from(self, token: v.Expr) -> Chosen:
        """Return the same neurons and tokens, of which ``token`` is number 0."""
        return replace(self, origin=token)


EVERYTHING = Chosen()
