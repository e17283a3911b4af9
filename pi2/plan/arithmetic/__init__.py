"""A plan put together layer by layer, the bytes that it needs, and their cost."""
