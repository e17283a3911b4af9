"""How float32 weights become the codes and scales of a store."""
