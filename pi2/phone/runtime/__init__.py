"""The command line of a bundle.  What it runs is pi2's own engine."""
