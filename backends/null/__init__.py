"""The null backend: computes nothing and counts everything.

A plan for a device that nobody has at hand still runs through the whole engine: segments, cache,
prefetch and counters are real, activations are drawn with the model's share of active neurons
and a power law over the stored order, weights are never read.
"""
