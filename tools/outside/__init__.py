"""Speeds of other engines that predictions are compared with."""
