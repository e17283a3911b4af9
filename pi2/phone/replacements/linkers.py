"""Linkers of a bundle: none, since its libraries are linked."""


def find_obstacles() -> list[str]:
    return []
