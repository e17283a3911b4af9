"""Documents that extend others, and values that the command line replaces."""
