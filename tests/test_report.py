"""ruda-report: run as a command, and what it finds in configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ruda_ds import _deepspeed
from ruda_ds.cli import report
from ruda_ds.ops import build_lock

ROOT = Path(__file__).resolve().parent.parent
ZERO3 = {"zero_optimization": {"stage": 3}}


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ruda_ds.cli.report", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def findings(tmp_path):
    def find(text: str | dict) -> tuple[dict[str, str], list[str]]:
        path = tmp_path / "config.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return report.config_findings(str(path))

    return find


def test_the_command_prints_one_json_object():
    done = run("--json", "--deepspeed_config", "ds_configs/zero3_fp16.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["refused"] == []
    assert set(found["support"].values()) == {"ok"}
    assert {"ruda_ds", "python", "torch", "deepspeed"} <= set(found["versions"])
    assert "gloo" in found["machine"]["torch.distributed"]
    assert found["config"]["loss scale"] == "128"
    assert found["config"]["model dtype"] == "float16"
    assert "data_types.grad_accum_dtype" in found["config"]["filled in"]
    assert set(found["fused experts"]) == {"for", "built ahead of time", "built at first use", "can be built here"}


def test_the_command_shows_every_refused_setting_and_the_operators(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}, "prescale_gradients": true}')
    done = run("--deepspeed_config", str(bad))
    assert done.returncode == 1
    for word in ("zero_optimization.zenflow", "remove it", "prescale_gradients", "op name", "DeepSpeed version"):
        assert word in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ruda_fused_experts")]
    found = report.compiled_experts()
    assert ("[YES]" in line) == found["built ahead of time"].endswith(".so")
    assert line.endswith("[OKAY]" if found["can be built here"] == "yes" else "[NO]")
    assert "\x1b" not in done.stdout


def test_all_refusals_are_found_at_once(findings):
    _, refused = findings(
        {
            "zero_optimization": {"stage": 0, "zenflow": {"topk_ratio": 0.1}},
            "fp16": {"enabled": True},
            "prescale_gradients": True,
            "ruda": {"accumulation": {"dtype": "half", "losscale": 2}, "extra": 1},
        }
    )
    keys = {line.split("'")[1] for line in refused}
    assert keys == {
        "zero_optimization.zenflow",
        "zero_optimization.stage",
        "fp16.loss_scale",
        "prescale_gradients",
        "ruda.accumulation.dtype",
        "ruda.accumulation.losscale",
        "ruda.extra",
    }


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {},
            {
                "model dtype": "float32",
                "loss scale": "1",
                "gradient clipping": "1 (DeepSpeed's default; 0 turns it off)",
            },
        ),
        ({"bf16": {"enabled": True}}, {"model dtype": "bfloat16", "loss scale": "1"}),
        ({"fp16": {"enabled": True, "loss_scale": 64}}, {"model dtype": "float16", "loss scale": "64"}),
        ({"fp16": {"enabled": False, "loss_scale": 64}}, {"model dtype": "float32", "loss scale": "1"}),
        (
            {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4},
            {"gradient clipping": "0.5", "micro-batches a window": "4"},
        ),
        (
            {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
            {"model dtype": report.AUTO, "gradient clipping": report.AUTO},
        ),
        (
            {"ruda": {"accumulation": {"dtype": "float64", "loss_scale": 8}}},
            {"pending sums": "float64", "loss scale": "8"},
        ),
        (
            {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
            {"filled in": "nothing"},
        ),
        (
            {"communication_data_type": "fp32", "data_types": {}},
            {"filled in": 'data_types.grad_accum_dtype = "fp32"'},
        ),
    ],
)
def test_a_config_is_read_as_the_engine_would(findings, changes, wanted):
    found, refused = findings({**ZERO3, **changes})
    assert refused == []
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(("text", "word"), [("[1]", "expected a JSON object"), ('{"a":', "config.json: ")])
def test_a_file_that_is_no_config_is_refused(findings, text, word):
    found, (line,) = findings(text)
    assert found == {}
    assert word in line


def test_a_missing_file_is_refused(tmp_path):
    _, (line,) = report.config_findings(str(tmp_path / "absent.json"))
    assert "absent.json" in line


def test_an_unknown_deepspeed_is_not_supported(monkeypatch, capsys):
    monkeypatch.setitem(_deepspeed.STAGE3_METHODS, "partition_grads", ["self"])
    monkeypatch.setitem(_deepspeed.ENGINE_METHODS, "no_such_method", ["self"])
    assert report.main(["--json"]) == 1
    support = json.loads(capsys.readouterr().out)["support"]
    assert "partition_grads takes" in support["ZeRO-3 hooks"]
    assert "no_such_method is missing" in support["engine hooks"]
    assert support["ZeRO-1/2 hooks"] == "ok"


def test_a_lock_left_by_a_killed_build_is_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert report.machine()["locked builds"] == "none"
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam" / "lock").touch()
    assert "fused_adam/lock" in report.machine()["locked builds"]


def test_a_lock_of_ours_names_its_owner(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "ruda_fused_experts_0123456789.lock").write_text(build_lock.owner_text())
    assert f"held by process {os.getpid()} on" in report.machine()["locked builds"]


def test_the_state_of_the_compiled_experts_is_shown_without_a_build(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = report.compiled_experts()
    assert found["built at first use"] == "not used: it has not been built yet"
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert report.compiled_experts()["can be built here"].startswith("no: no C++ compiler")
    assert not list(tmp_path.rglob("*.so"))
