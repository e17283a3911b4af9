"""Trains activation predictors from what a model's own neurons do on text."""
