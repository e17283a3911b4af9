"""How well a plan's model predicts text: perplexity, agreement with the dense model, recall."""
