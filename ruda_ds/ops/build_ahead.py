"""The operators as extension modules for setup.py: RUDA_BUILD_OPS=1 pip install --no-build-isolation .

Needs torch and DeepSpeed installed already, which is why pip must not build in an isolated environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import BuildExtension

from ruda_ds.ops import build_record
from ruda_ds.ops.builder import FusedExpertsBuilder, ahead_record


class BuildWithRecord(BuildExtension):
    """Writes, beside each binary, what it was built with: it is loaded only where that is the same."""

    def run(self) -> None:
        """Build, then write the records."""
        super().run()
        builder = FusedExpertsBuilder()
        binary = Path(self.get_ext_fullpath(builder.absolute_name()))
        build_record.write(ahead_record(binary), builder.record())


def extensions(root: Path) -> dict[str, Any]:
    """Arguments for setuptools.setup.

    Args:
        root: the folder of setup.py; setuptools wants sources relative to it.

    Raises:
        BuildError: something that the build needs is missing; an install that asked for it must not go on without.
    """
    from ruda_ds.errors import BuildError

    builder = FusedExpertsBuilder()
    if not builder.is_compatible():
        raise BuildError(f"RUDA_BUILD_OPS is set, but {builder.NAME} cannot be built: {builder.error_log}")
    extension = builder.builder()
    extension.sources = [os.path.relpath(source, root) for source in extension.sources]
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildWithRecord}}
