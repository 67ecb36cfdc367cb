"""tests/gpu/run where there is no card, its checks on the CPU's operator, and the check that "auto" rests on."""

import contextlib
import subprocess
from pathlib import Path

import pytest
import torch

from ruda_ds.ops import self_check
from ruda_ds.ops.builder import load_fused_experts

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    import checks

    load_fused_experts(explicit=True)
    monkeypatch.setattr(checks, "device", lambda: CPU)
    monkeypatch.setattr(checks, "DTYPES", (torch.float32, torch.bfloat16))
    return checks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_stops_and_says_so(tmp_path):
    command = ["bash", "tests/gpu/run", "--results", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("tests/gpu/run: no CUDA card is visible to torch")
    assert "nothing was built, checked or measured" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repeatable", "unaligned_views", "chosen_gradients"])
def test_its_checks_pass_on_an_operator_that_is_right(checks, name):
    assert getattr(checks, name)() == "ok"


@pytest.mark.slow
def test_its_accuracy_check_tells_right_from_wrong(checks, monkeypatch):
    assert checks.accuracy(torch.float32, checks.SHAPES) == "ok"
    monkeypatch.setitem(self_check.LIMITS, torch.float32, 1e-9)
    assert checks.accuracy(torch.float32, checks.SHAPES).startswith("(40, 0, 15), H 40, F 72: output ")


def test_a_failing_check_is_a_result_not_an_end(checks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(checks, "SHAPES", [])
    found = {row["check"]: row["result"] for row in checks.run(quick=True)}
    assert found["bitwise repeatable"] == "ok"
    assert found["CUDA graph"] != "ok"
    assert len(found) == 12


def test_the_skewed_loads_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    import bench

    for rows, experts in ((8192, 64), (5, 3), (64, 64)):
        for skewed in (False, True):
            counts = bench.counts_of(rows, experts, skewed)
            assert (sum(counts), len(counts), min(counts) >= 0) == (rows, experts, True)
    assert sum(count == 0 for count in bench.counts_of(8192, 64, True)) >= 16


def test_the_self_check_says_what_is_wrong_and_where(monkeypatch):
    load_fused_experts(explicit=True)
    dtypes = (torch.float32, torch.bfloat16)
    assert self_check.check_operator(CPU, dtypes) is None
    monkeypatch.setitem(self_check.LIMITS, torch.bfloat16, 1e-4)
    found = self_check.check_operator(CPU, dtypes)
    assert found.startswith("bfloat16, rows [40, 0, 15], H 40, F 72: output is off by ")
    assert found.endswith("at most 1e-04 is allowed")
    found = self_check.check_operator(CPU, (torch.float16,))
    assert found.startswith("float16, rows [40, 0, 15], H 40, F 72: fused_experts: rows are Half")


def test_a_device_is_checked_once_and_not_while_a_graph_is_captured(monkeypatch):
    calls = []
    monkeypatch.setattr(self_check, "_FOUND", {})
    monkeypatch.setattr(self_check, "check_operator", lambda *given: calls.append(given) or "wrong")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "captured" in self_check.cuda_problem(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert self_check.cuda_problem(torch.device("cuda")) == "wrong"
    assert self_check.cuda_problem(torch.device("cuda", 1)) == "wrong"
    assert [device for device, _ in calls] == [torch.device("cuda", 1)]
    assert self_check.cuda_problem(torch.device("cuda", 0)) == "wrong"
    assert len(calls) == 2
