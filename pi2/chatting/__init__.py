"""A conversation in a terminal (`pi2 chat`)."""
