"""Engines, results and documents of measure_real_models.py."""
