from .extract import p

__all__ = ["p"]
