"""ruda-report: what is installed, whether ruda_ds knows this DeepSpeed, and what it makes of a DeepSpeed config."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ruda_ds
from ruda_ds.errors import ConfigError, VersionError

PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "mpi4py")
# A refused setting is normally removed to find the next one; these are asked for and must be there.
REPAIRS: dict[str, Any] = {"zero_optimization.stage": 3, "fp16.loss_scale": 128.0}
AUTO = "auto (decided by the library that makes the engine)"


@contextlib.contextmanager
def deepspeed_notes_aside() -> Iterator[None]:
    """While DeepSpeed is imported, send what it logs to stderr: its logger would write into our standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401

        yield


def versions() -> dict[str, str]:
    """Version of each package that matters; "absent" where it is not installed."""
    found = {"ruda_ds": ruda_ds.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def machine() -> dict[str, str]:
    """Accelerator, devices and the communication backends that torch was built with."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind, count = accelerator.device_name(), accelerator.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)] if kind == "cuda" else [kind] * count
    backends = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    return {
        "accelerator": kind,
        "devices": ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none",
        "processor cores": str(os.cpu_count()),
        "communication": accelerator.communication_backend_name() or "none",
        "torch.distributed": ", ".join(name for name, there in backends.items() if there),
        "bf16": "yes" if accelerator.is_bf16_supported() else "no",
        "fp16": "yes" if accelerator.is_fp16_supported() else "no",
        "locked builds": "; ".join(map(lock_advice, build_locks())) or "none",
    }


def build_locks() -> list[Path]:
    """Locks in torch's folder of compiled extensions: torch's own ("lock"), and ours (beside the folder)."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted([*root.rglob("lock"), *root.rglob("ruda_*.lock")])


def lock_advice(lock: Path) -> str:
    """What a user is to do about a lock."""
    from ruda_ds.ops import build_lock

    if lock.suffix == ".lock":
        owner = build_lock.read_owner(lock) or {}
        return f"{lock} is held by {build_lock.describe(owner)}; the next load removes it if that is gone"
    return f"{lock} holds up every load of this operator: delete it unless a build is running"


def compiled_experts() -> dict[str, str]:
    """The compiled fused experts on this machine: which binaries there are, and what a build lacks.

    Builds nothing and loads nothing.
    """
    from ruda_ds.errors import BuildError
    from ruda_ds.ops.builder import FusedExpertsBuilder

    builder = FusedExpertsBuilder()
    try:
        ahead, ahead_reason = builder.ahead_of_time()
        cached, cached_reason = builder.cached()
        problem = builder.problem()
    except (BuildError, OSError) as error:
        return {builder.NAME: f"cannot be built: {error}"}
    built = "none" if ahead is None else f"{ahead}" if ahead_reason is None else f"not used: {ahead_reason}"
    return {
        "for": "CUDA and CPU" if builder.with_cuda else "CPU",
        "built ahead of time": built,
        "built at first use": str(cached) if cached_reason is None else f"not used: {cached_reason}",
        "can be built here": "yes" if problem is None else f"no: {problem}",
    }


def support() -> dict[str, str]:
    """ "ok", or the reason why not, for each thing of DeepSpeed that the hooks rest on."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    from ruda_ds import _deepspeed

    checks = {
        "DeepSpeed version": _deepspeed.require_supported_version,
        "ZeRO-3 hooks": lambda: _deepspeed.require_methods(
            stage3.DeepSpeedZeroOptimizer_Stage3, _deepspeed.STAGE3_METHODS
        ),
        "ZeRO-1/2 hooks": lambda: _deepspeed.require_methods(
            stage_1_and_2.DeepSpeedZeroOptimizer, _deepspeed.STAGE12_METHODS
        ),
        "engine hooks": lambda: _deepspeed.require_methods(DeepSpeedEngine, _deepspeed.ENGINE_METHODS),
    }
    found = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = "ok"
        except VersionError as error:
            found[name] = str(error)
    return found


def refusals(given: Mapping[str, Any]) -> list[ConfigError]:
    """Everything in a config that `ruda_ds.config.check` refuses, not only the first thing."""
    from ruda_ds import config

    trial = copy.deepcopy(dict(given))
    found: list[ConfigError] = []
    while True:
        try:
            config.check(trial)
            return found
        except ConfigError as error:
            if error.key in [earlier.key for earlier in found]:
                return found
            found.append(error)
            _repair(trial, error.key)


def _repair(trial: dict[str, Any], key: str) -> None:
    """Take the refused setting away, or set what is missing, so that the next one is found."""
    *path, last = key.split(".")
    section: Any = trial
    for name in path:
        section = section.setdefault(name, {}) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.pop(last, None)
        if key in REPAIRS:
            section[last] = REPAIRS[key]


def config_findings(path: str) -> tuple[dict[str, str], list[str]]:
    """(what `ruda_ds.initialize` would make of a config, what it would refuse: key, value and advice)."""
    from ruda_ds import _deepspeed, config

    try:
        given: Any = _deepspeed.load_config(path)
    except (ValueError, OSError) as error:
        return {}, [f"{path}: {error}"]
    if not isinstance(given, dict):
        return {}, [f"{path}: the file holds a {type(given).__name__}, expected a JSON object"]
    refused = [str(error).removeprefix("DeepSpeed config: ") for error in refusals(given)]
    if refused:
        return {}, refused
    section = config.check(given).accumulation
    clipping = given.get("gradient_clipping", "1 (DeepSpeed's default; 0 turns it off)")
    half_scale = config.lookup(given, "fp16.loss_scale") if _switch(given, "fp16") else None
    return {
        "ZeRO stage": str(config.lookup(given, "zero_optimization.stage")),
        "model dtype": _model_dtype(given),
        "pending sums": section.dtype,
        "loss scale": _number(section.loss_scale or half_scale or 1.0),
        "gradient clipping": _number(clipping),
        "micro-batches a window": _number(given.get("gradient_accumulation_steps", "1 (DeepSpeed's default)")),
        "window without a token": "skipped and reported" if section.skip_empty_window else "stepped with zeros",
        "filled in": "; ".join(_additions(given, config.complete(given))) or "nothing",
    }, []


def _switch(given: Mapping[str, Any], key: str) -> Any:
    """Whether a section is on: DeepSpeed's default is off; "auto" is neither."""
    section = given.get(key)
    return section.get("enabled", False) if isinstance(section, Mapping) else section


def _model_dtype(given: Mapping[str, Any]) -> str:
    switches = {"bfloat16": _switch(given, "bf16") or _switch(given, "bfloat16"), "float16": _switch(given, "fp16")}
    on = [name for name, value in switches.items() if value is True]
    return on[0] if on else AUTO if "auto" in switches.values() else "float32"


def _number(value: Any) -> str:
    if value == "auto":
        return AUTO
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _additions(given: Any, completed: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys, with their values, that ``completed`` has and ``given`` has not."""
    for key, value in completed.items():
        present = given.get(key) if isinstance(given, Mapping) else None
        if isinstance(value, Mapping):
            yield from _additions(present, value, f"{prefix}{key}.")
        elif present != value:
            yield f"{prefix}{key} = {json.dumps(value)}"


def operators() -> str:
    """DeepSpeed's own table of compiled operators with ours in it, without its colours where nobody sees them."""
    from deepspeed import env_report
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    from ruda_ds.ops.builder import FusedExpertsBuilder

    builder = FusedExpertsBuilder()
    ALL_OPS[builder.NAME] = builder
    env_report.installed_ops[builder.NAME] = compiled_experts().get("built ahead of time", "").endswith(".so")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        env_report.op_report(verbose=False)
    return text.getvalue() if sys.stdout.isatty() else re.sub(r"\x1b\[\d+m", "", text.getvalue())


def format_section(title: str, values: Mapping[str, str] | list[str]) -> str:
    """Names and values in two columns, or a list."""
    lines = [f"  {name:<24} {value}" for name, value in values.items()] if isinstance(values, Mapping) else values
    return "\n".join([title, *(line if isinstance(values, Mapping) else f"  {line}" for line in lines)])


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if something is not supported or a config is refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for flag, name in (("--cluster", "cluster"), ("--plan", "plan")):
        if flag in words:
            words.remove(flag)
            return importlib.import_module(f"ruda_ds.cli.{name}").main(words)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", action="store_true", help="under a launcher: check and measure all hosts")
    parser.add_argument("--plan", action="store_true", help="memory and traffic of a run that is not there yet")
    parser.add_argument("--deepspeed_config", metavar="FILE", help="a DeepSpeed JSON to look at")
    parser.add_argument("--json", action="store_true", help="print one JSON object, without the table of operators")
    args = parser.parse_args(words)
    report: dict[str, Any] = {"versions": versions()}
    with deepspeed_notes_aside():
        report |= {"machine": machine(), "support": support(), "fused experts": compiled_experts()}
        if args.deepspeed_config:
            report["config"], refused = config_findings(args.deepspeed_config)
            report["refused"] = refused
    failed = bool(report.get("refused")) or any(value != "ok" for value in report["support"].values())
    if args.json:
        print(json.dumps({"ok": not failed, **report}))
        return int(failed)
    print("\n\n".join(format_section(title, values) for title, values in report.items() if values))
    print("\n" + operators())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
