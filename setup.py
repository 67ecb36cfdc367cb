"""Installation of ruda_ds. Imports neither torch nor deepspeed: pip runs this file before they are there.

RUDA_BUILD_OPS=1 pip install --no-build-isolation . compiles the operators too, instead of at their first use; only
then are torch and deepspeed imported, and have to be installed before.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "ruda_ds" / "__init__.py").read_text()).group(1)


def operators() -> dict:
    """What setup() needs to compile the operators now; nothing unless RUDA_BUILD_OPS=1."""
    if os.environ.get("RUDA_BUILD_OPS", "0") != "1":
        return {}
    sys.path.insert(0, str(ROOT))
    try:
        from ruda_ds.ops.build_ahead import extensions
    except ImportError as error:
        raise SystemExit(
            f"RUDA_BUILD_OPS=1 needs torch and deepspeed beforehand, and pip install --no-build-isolation: {error}"
        ) from error
    return extensions(ROOT)


setup(
    name="ruda_ds",
    version=VERSION,
    description="Exact gradient accumulation and dropless expert parallelism for DeepSpeed",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["ruda_ds", "ruda_ds.*"]),
    package_data={
        "ruda_ds": ["py.typed"],
        "ruda_ds.ops": ["csrc/*.cpp", "csrc/*/*.h", "csrc/*/*.cpp", "csrc/*/*.cu", "csrc/*/*.cuh", "_ruda_*.json"],
    },
    install_requires=[
        # The private names of ruda_ds/_deepspeed.py are those of this line.
        "deepspeed>=0.19.8,<0.20",
        "torch>=2.6",
        "safetensors>=0.4",
        "tqdm>=4.60",
    ],
    extras_require={
        "mpi": ["mpi4py>=4.0"],
        "train": ["transformers>=5.0", "tensorboard>=2.15", "matplotlib>=3.8"],
        "test": ["pytest>=8.0", "hypothesis>=6.100", "mpi4py>=4.0", "mpich>=4.3"],
        "dev": ["ruff>=0.6", "mypy>=1.11"],
    },
    entry_points={
        "console_scripts": [
            "ruda-convert = ruda_ds.cli.convert:main",
            "ruda-selftest = ruda_ds.cli.selftest:main",
            "ruda-report = ruda_ds.cli.report:main",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    **operators(),
)
