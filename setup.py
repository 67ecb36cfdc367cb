"""Installation of ruda_ds. Imports neither torch nor deepspeed: pip runs this file before they are there."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "ruda_ds" / "__init__.py").read_text()).group(1)

setup(
    name="ruda_ds",
    version=VERSION,
    description="Exact gradient accumulation and dropless expert parallelism for DeepSpeed",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["ruda_ds", "ruda_ds.*"]),
    package_data={"ruda_ds": ["py.typed"]},
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
            "ruda-selftest = ruda_ds.cli.selftest:main",
            "ruda-report = ruda_ds.cli.report:main",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
