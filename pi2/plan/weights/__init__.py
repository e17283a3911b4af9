"""How weights lie in bytes, and what tensors are called."""
