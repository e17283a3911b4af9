"""Sharing documents: references to other places, fetching, the cache, and the lock file.

Only `pi2 profile` fetches.  Everything else reads `pi2.lock` and the cache, and never a network.
"""
