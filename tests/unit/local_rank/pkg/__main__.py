from . import extract

__all__ = ["extract"]
