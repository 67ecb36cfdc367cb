"""ruda-selftest and ruda-report, run as commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ruda_ds.cli.oracle import Case
from ruda_ds.cli.selftest import format_table, judge

ROOT = Path(__file__).resolve().parent.parent


def command(module: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"ruda_ds.cli.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_the_selftest_shows_ours_within_bounds_and_stock_far_off():
    done = command("selftest", "--world", "1,2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert {row["world"] for row in report["rows"]} == {1, 2}
    for row in report["rows"]:
        assert row["gradient"] <= (1e-6 if row["model"] == "float32" else 2e-2)
        if row["work"] == "float64":
            assert row["reduction"] == 0
        if row["split"] != "even":
            assert row["stock"] > 1e-2


@pytest.mark.parametrize(
    ("gradient", "reduction", "word"),
    [
        (2e-6, 0.0, "gradient is 2.0e-06, bound 1e-06"),
        (1e-7, 1e-6, "reduction is 1.0e-06, bound 5e-07"),
        (float("nan"), 0.0, "gradient is nan"),
    ],
)
def test_a_broken_bound_is_named(gradient, reduction, word):
    row = judge(2, Case("even", 1, "float32", "float32"), gradient, reduction, 0.5)
    assert word in row.broken
    assert f"BROKEN: {word}" in format_table([row])


def test_the_command_fails_when_a_bound_is_broken(monkeypatch, capsys):
    from ruda_ds.cli import selftest

    rows = [judge(1, Case("even", 1, "float32", "float32"), 1.0, 0.0, 0.5)]
    monkeypatch.setattr(selftest, "measure", lambda worlds, show_progress: rows)
    assert selftest.main(["--world", "1"]) == 1
    assert "1 of 1 rows break a bound" in capsys.readouterr().out


def test_the_report_shows_versions_support_and_a_config(tmp_path):
    done = command("report", "--json", "--deepspeed_config", "ds_configs/zero3_fp16.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["ok"]
    assert set(report["support"].values()) == {"ok"}
    assert report["config"]["loss scale"] == "128"
    assert "data_types" in report["config"]["filled in"]
    bad = tmp_path / "bad.json"
    bad.write_text('{"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}')
    refused = command("report", "--deepspeed_config", str(bad))
    assert refused.returncode == 1
    assert "zero_optimization.zenflow" in refused.stdout
    assert "remove it" in refused.stdout
