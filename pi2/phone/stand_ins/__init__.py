"""Modules that a bundle has in the place of packages that need no phone."""
