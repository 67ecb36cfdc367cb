"""Checkpoints: DeepSpeed's own with the pending window beside it, and what reads and converts them.

Importing this package is light: a module loads when a name of it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Manifest": "ruda_ds.checkpoint.manifest",
    "load_checkpoint": "ruda_ds.checkpoint.training",
    "load_pretrained": "ruda_ds.checkpoint.pretrained",
    "save_checkpoint": "ruda_ds.checkpoint.training",
}

__all__ = ["Manifest", "load_checkpoint", "load_pretrained", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ruda_ds.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


if TYPE_CHECKING:
    from ruda_ds.checkpoint.manifest import Manifest
    from ruda_ds.checkpoint.pretrained import load_pretrained
    from ruda_ds.checkpoint.training import load_checkpoint, save_checkpoint
