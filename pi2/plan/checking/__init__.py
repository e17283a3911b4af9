"""Everything that is found in a plan, its device and its model; the rules."""
