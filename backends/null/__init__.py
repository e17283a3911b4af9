"""Computes nothing and counts everything: segments, cache and prefetch are real."""
