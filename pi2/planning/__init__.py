"""A plan's cost in time and memory, and the plan for a wish."""
