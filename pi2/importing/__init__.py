"""From checkpoints to neuron stores: reading, checking, ordering, quantising."""
