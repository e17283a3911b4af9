"""Sharing documents: references, fetching, cache and lock; only `pi2 profile` uses a network."""
