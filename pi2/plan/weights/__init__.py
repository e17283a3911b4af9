"""Layout of neuron bundles in bytes."""
