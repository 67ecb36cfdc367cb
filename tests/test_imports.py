"""What importing loads: the conversion's modules no DeepSpeed; each package's names only when they are used."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ruda_ds", "ruda_ds.accumulation", "ruda_ds.checkpoint", "ruda_ds.moe")


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_conversion_loads_no_deepspeed():
    # 95 MB and a second of a command that only reads files; torch alone loads no torch._dynamo either.
    run(
        "import sys, ruda_ds.cli.convert\n"
        "from ruda_ds.checkpoint import to_hf, from_hf, inspection, verify, reshard_disk\n"
        "bad = {'deepspeed', 'transformers', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_loads_neither_torch_nor_deepspeed_and_lists_every_name(package):
    run(
        f"import sys, {package}\n"
        f"package = sys.modules[{package!r}]\n"
        "missing = {*package.__all__, *package._HOME} - set(dir(package))\n"
        "assert not missing, missing\n"
        "bad = {'torch', 'deepspeed'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )


def test_every_name_resolves_to_what_its_home_defines():
    # One process for all four; each name is got as a user gets it, by the package alone.
    run(
        "import importlib, ruda_ds\n"
        "for package in (ruda_ds, ruda_ds.accumulation, ruda_ds.checkpoint, ruda_ds.moe):\n"
        "    assert set(package.__all__) - {'__version__'} <= set(package._HOME), package\n"
        "    for name, home in package._HOME.items():\n"
        "        found = getattr(package, name)\n"
        "        assert found is getattr(importlib.import_module(home), name, found), name\n"
        "        assert getattr(found, '__name__', name) == name or home.endswith(name), name\n"
        "    exec(f'from {package.__name__} import *', {})\n"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_refused_by_the_package(package):
    run(
        f"import sys, {package}\n"
        "try:\n"
        f"    sys.modules[{package!r}].no_such_name\n"
        "except AttributeError as error:\n"
        f"    assert str(error) == \"module '{package}' has no attribute 'no_such_name'\", error\n"
        "else:\n"
        "    raise AssertionError('found')\n"
    )
