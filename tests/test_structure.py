"""The package's own rules: imports go one way, private DeepSpeed names live in one file, importing is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ruda_ds"
ROWS = {
    "errors": 0,
    "lazy": 0,
    "shapes": 0,
    "config": 1,
    "_deepspeed": 1,
    "ops": 1,
    "comm": 1,
    "accumulation": 2,
    "moe": 2,
    "checkpoint": 3,
    "integrations": 3,
    "engine": 4,
    "monitor": 4,
    "launch": 4,
    "cli": 5,
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


def row(path: Path) -> int:
    return ROWS[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stay_in_their_row_or_go_up(path):
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ruda_ds"):
            modules = [node.module] if node.module != "ruda_ds" else [f"ruda_ds.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith("ruda_ds")]
        for module in modules:
            top = module.split(".")[1] if "." in module else None
            if top in ROWS:
                assert ROWS[top] <= row(path), f"{path.name} (row {row(path)}) imports {module} (row {ROWS[top]})"


# Names that DeepSpeed does not promise to keep, as they would look in a call or an assignment.
PRIVATE = re.compile(
    r"_DeepSpeedZeroOptimizer|grad_partitions_flat_buffer|averaged_gradients|fp16_groups|bit16_groups|ipg_buckets"
    r"|partition_grads\b|_get_norm_groups|unscale_and_clip_grads|\._config\b|_running_engine_step|ds_process_group"
    r"|groups\._|override_loss_scale|process_gradients"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_deepspeed_names_live_in_one_file(path):
    if path.name in ("_deepspeed.py", "groups.py"):
        return
    assert not PRIVATE.findall(path.read_text())


def test_importing_the_package_loads_neither_torch_nor_deepspeed():
    code = (
        "import sys, ruda_ds; assert ruda_ds.__version__; "
        "bad = {'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad; "
        "assert 'initialize' in dir(ruda_ds); assert callable(ruda_ds.initialize); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


def test_setup_imports_nothing_heavy():
    # At its top; within functions it does, for a build ahead of time that was asked for.
    body = ast.parse((ROOT / "setup.py").read_text()).body
    names = {alias.name.split(".")[0] for node in body if isinstance(node, ast.Import) for alias in node.names} | {
        node.module.split(".")[0] for node in body if isinstance(node, ast.ImportFrom) and node.module
    }
    assert names <= {"os", "re", "sys", "pathlib", "setuptools"}


def test_the_top_level_is_the_agreed_one():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    allowed = {
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "ruda_ds",
        "ds_configs",
        "tests",
        "launch",
    }
    assert {top for top in tops if not top.startswith(".")} <= allowed


def public_definitions(body: list[ast.stmt]):
    """Public functions and classes, and the public methods of public classes."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_public_name_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not path.read_text().strip()
    assert [node.name for node in public_definitions(tree.body) if not ast.get_docstring(node)] == []
