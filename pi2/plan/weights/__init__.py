"""How neuron bundles lie in bytes."""
