"""Checkpoints: DeepSpeed's own with the pending window beside it, and what reads and converts them.

Importing this package is light: a module loads when a name of it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ruda_ds import lazy

_HOME = {
    "Manifest": "ruda_ds.checkpoint.manifest",
    "load_checkpoint": "ruda_ds.checkpoint.training",
    "load_pretrained": "ruda_ds.checkpoint.pretrained",
    "save_checkpoint": "ruda_ds.checkpoint.training",
}

__all__ = ["Manifest", "load_checkpoint", "load_pretrained", "save_checkpoint"]

if TYPE_CHECKING:
    from ruda_ds.checkpoint.manifest import Manifest
    from ruda_ds.checkpoint.pretrained import load_pretrained
    from ruda_ds.checkpoint.training import load_checkpoint, save_checkpoint
else:  # Unseen by a type checker, which would take any name as known.
    __getattr__, __dir__ = lazy.attributes(__name__, _HOME)
