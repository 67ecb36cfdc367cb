"""Load what DeepSpeed compiles at its first start, once, before any rank does.

Imported by the fork server: its ranks inherit the loaded library, so that one that is killed cannot leave the build's
lock behind, on which every later load waits for ever. Run as a command by the scripts in launch/.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

# A build takes a minute or two; a lock this old has lost its owner.
STALE_S = 600.0


def remove_stale_lock(folder: Path, age_s: float = STALE_S) -> bool:
    """Remove the build lock in an extension's folder if it is older than ``age_s``; whether there was one."""
    lock = folder / "lock"
    if not lock.exists() or time.time() - lock.stat().st_mtime < age_s:
        return False
    print(f"removing {lock}: left by a build that was killed more than {age_s:.0f} s ago", file=sys.stderr)
    lock.unlink(missing_ok=True)
    return True


def warm_up() -> None:
    """Build, or load, DeepSpeed's shared-memory collectives for the CPU; does nothing on another accelerator."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    from ruda_ds import _deepspeed

    if get_accelerator().device_name() != "cpu":
        return
    for folder in Path(get_default_build_root()).glob(f"*/{_deepspeed.SHARED_MEMORY_OP}"):
        remove_stale_lock(folder)
    _deepspeed.load_shared_memory_op()


warm_up()
