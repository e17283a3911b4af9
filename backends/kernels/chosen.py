"""Neurons and tokens that a call computes, where it does not compute all that its arrays hold."""

from __future__ import annotations

from dataclasses import dataclass

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

    def find_neuron(self, number: v.Expr) -> v.Expr:
        """Return the place of neuron ``number`` of the call."""
        return number if self.neurons is None else v.let(self.neurons[number])

    def find_token(self, number: v.Expr) -> v.Expr:
        """Return the place of token ``number`` of the call."""
        return number if self.tokens is None else v.let(self.tokens[number])


EVERYTHING = Chosen()
