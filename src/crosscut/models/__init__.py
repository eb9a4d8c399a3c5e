"""Whole language models: weights, real inputs, and the models split over ranks.

The libraries of the ``models`` extra (transformers, tokenizers, gguf) are loaded here and only when a function needs
them, so that everything else works without them.
"""

from __future__ import annotations

import importlib
from typing import Any

from crosscut.errors import UsageError


def import_extra(module: str) -> Any:
    """The library ``module`` of the ``models`` extra, imported now.

    Raises UsageError (``extra-missing``) when it is not installed, or is and cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"this needs the library {module!r}, which cannot be imported: {error}",
            code="extra-missing",
            fix="pip install 'crosscut[models]'",
        ) from None
