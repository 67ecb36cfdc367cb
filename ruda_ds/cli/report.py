"""ruda-report: what is installed, whether ruda_ds knows this DeepSpeed, and what it makes of a DeepSpeed config."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import platform
import sys
from typing import Any

import ruda_ds

PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "mpi4py")


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
    count = accelerator.device_count()
    backends = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    return {
        "accelerator": f"{accelerator.device_name()}, {count} device{'s' if count != 1 else ''}",
        "communication": accelerator.communication_backend_name() or "none",
        "torch.distributed": ", ".join(name for name, there in backends.items() if there),
        "bf16": "yes" if accelerator.is_bf16_supported() else "no",
        "fp16": "yes" if accelerator.is_fp16_supported() else "no",
    }


def support() -> dict[str, str]:
    """ "ok", or the reason why not, for each thing of DeepSpeed that the hooks rest on."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    from ruda_ds import _deepspeed
    from ruda_ds.errors import VersionError

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


def config_findings(path: str) -> dict[str, str]:
    """What `ruda_ds.initialize` would make of a config; the key "refused" is there if it would refuse it."""
    from ruda_ds import _deepspeed, config
    from ruda_ds.errors import ConfigError

    try:
        given: dict[str, Any] = _deepspeed.load_config(path)
        section = config.check(given).accumulation
    except (ConfigError, ValueError, OSError) as error:
        return {"refused": str(error)}
    completed = config.complete(given)
    filled = [f"{key} = {json.dumps(value)}" for key, value in completed.items() if given.get(key) != value]
    scale = section.loss_scale or config.lookup(given, "fp16.loss_scale") or 1.0
    clipping = given.get("gradient_clipping")
    return {
        "ZeRO stage": str(config.lookup(given, "zero_optimization.stage")),
        "pending sums": section.dtype,
        "loss scale": f"{scale:g}",
        "gradient clipping": f"{clipping:g}" if clipping is not None else "1 (DeepSpeed's default; 0 turns it off)",
        "window without a token": "skipped and reported" if section.skip_empty_window else "stepped with zeros",
        "filled in": "; ".join(filled) or "nothing",
    }


def operators() -> str:
    """DeepSpeed's own table of compiled operators."""
    from deepspeed import env_report

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        env_report.op_report(verbose=False)
    return text.getvalue()


def format_section(title: str, values: dict[str, str]) -> str:
    """Names and values in two columns."""
    return "\n".join([title, *(f"  {name:<24} {value}" for name, value in values.items())])


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if something is not supported or a config is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", metavar="FILE", help="a DeepSpeed JSON to look at")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    report: dict[str, dict[str, str]] = {"versions": versions(), "machine": machine(), "support": support()}
    if args.deepspeed_config:
        report["config"] = config_findings(args.deepspeed_config)
    failed = "refused" in report.get("config", {}) or any(value != "ok" for value in report["support"].values())
    if args.json:
        print(json.dumps({"ok": not failed, **report}))
    else:
        print("\n\n".join(format_section(title, values) for title, values in report.items()))
        print("\n" + operators())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
