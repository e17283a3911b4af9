"""A model is run and learned from: speed, perplexity, activations, predictors, thresholds."""
