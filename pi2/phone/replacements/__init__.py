"""Modules that a bundle has in the place of pi2's own: `pi2.phone.contents` says which."""
