"""Rows of the table of models larger than memory: plans, runs, and the table itself."""
