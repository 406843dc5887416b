"""Imported by its package."""


def where():
    return __name__
