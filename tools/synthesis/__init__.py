"""Stores of random weights that behave like a trained model: for measuring speed and memory.

How a neuron comes to fire as often as it should: the residual stream is a constant direction plus
what a token adds at random, and attention and FFN outputs are too small to disturb it.  So every
layer sees u = a c + s n, with c a vector of +-1, n standard normal by token, a^2 + s^2 = 1.  The
gate of neuron i is ``b_i c / (a d) + A_i B``, B a layer's random directions, orthogonal to c: its
product with u is ``b_i + A_i z``, a normal variable with mean b_i and deviation 1, and b_i decides
how often it is positive.  A predictor that holds B, A and b predicts it; what it does not know is
the rounding of the gate's weights.

In a mixture every expert has neurons of the same hotness, which take turns in the stored order.  A
router's rows are random and orthogonal to c: its scores are standard normal, every expert computes
as many tokens as any other, and what it chooses says nothing of which neurons fire.
"""
