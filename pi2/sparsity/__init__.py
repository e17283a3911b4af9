"""Training-free sparsity of SiLU and GELU models: thresholds from what neurons do on text."""
