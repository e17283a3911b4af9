"""The command line of a bundle.  It runs pi2's own engine."""
