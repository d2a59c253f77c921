"""verl 0.7.0 imports a class that transformers 5 has renamed, and uses it for vision models alone."""

from __future__ import annotations

_NAME = "AutoModelForVision2Seq"


def lend() -> bool:
    """Give transformers the old name, on the module's class: transformers replaces its module on import."""
    import transformers

    if hasattr(transformers, _NAME):
        return False
    setattr(type(transformers), _NAME, property(lambda module: module.AutoModelForImageTextToText))
    return True


def take_back() -> None:
    """Undo it."""
    import transformers

    delattr(type(transformers), _NAME)
