"""Load what DeepSpeed and this package compile at their first start, once, before any rank does.

Imported by the fork server: its ranks inherit the loaded library, so that one that is killed cannot leave the build's
lock behind, on which every later load waits for ever. Run as a command by the scripts in launch/.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# A build takes a minute or two; a lock this old has lost its owner.
STALE_S = 300.0


def await_lock(folder: Path, stale_s: float = STALE_S) -> bool:
    """Wait while another process builds in an extension's folder; whether its lock was a dead one, now removed."""
    lock = folder / "lock"
    while True:
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return False
        if age >= stale_s:
            print(f"removing {lock}: left by a build that was killed {age:.0f} s ago", file=sys.stderr)
            lock.unlink(missing_ok=True)
            return True
        time.sleep(0.2)


def warm_up() -> None:
    """Build, or load, DeepSpeed's shared-memory collectives and the experts' kernels; for the CPU only."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    from ruda_ds import _deepspeed
    from ruda_ds.ops.builder import load_fused_experts

    if get_accelerator().device_name() != "cpu":
        return
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    pattern = _deepspeed.SHARED_MEMORY_OP if root else f"*/{_deepspeed.SHARED_MEMORY_OP}"
    for folder in Path(root or get_default_build_root()).glob(pattern):
        await_lock(folder)
    _deepspeed.load_shared_memory_op()
    load_fused_experts()


warm_up()
# A fork inherits what is still in the buffers, and would say it again, each rank once.
sys.stdout.flush()
sys.stderr.flush()
