"""The training program, run as a person runs it: plain python, the deepspeed launcher, MPI, and each config."""

import csv
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "launch" / "train.py")
SMALL = [
    "--steps",
    "3",
    "--tokens-per-step",
    "700",
    "--seq-length",
    "64",
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--warmup",
    "1",
    "--sample",
    "",
]
TINY = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {
        **kept,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        **changes,
    }


def run(command: list[str], *, fails: bool = False, timeout: int = 170, **changes: str) -> str:
    done = subprocess.run(
        command, env=environment(**changes), cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, said[-4000:]
    return said


def run_forked(options: list[str]) -> str:
    """The program alone, in a process that has loaded torch and DeepSpeed already."""
    code, said = forked.run([TRAIN, *options], environment(), ROOT, 170)
    assert code == 0, said[-4000:]
    return said


def table(output: Path) -> list[dict[str, float]]:
    with (output / "metrics.csv").open(newline="") as lines:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Documents of very different lengths, so that micro-batches and ranks are uneven."""
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    lines = [json.dumps({"text": f"{number} " * (1 + number * number % 40)}) for number in range(60)]
    lines += [json.dumps({"prompt": "count " * (i % 9), "response": str(i)}) for i in range(40)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus) -> list[dict[str, float]]:
    output = tmp_path_factory.mktemp("one")
    said = run_forked(["--data", corpus, "--output", str(output), *SMALL])
    assert "one process" in said
    assert (output / "loss.png").read_bytes()[:4] == b"\x89PNG"
    return table(output)


def same_run(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted] == [1, 2, 3]
    for row, other in zip(found, wanted, strict=True):
        assert row["tokens"] == other["tokens"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_the_deepspeed_launcher_with_two_ranks_equals_one_process(tmp_path, corpus, one_process):
    from ruda_ds.launch import free_port

    said = run(
        [
            "deepspeed",
            "--num_gpus",
            "2",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(free_port()),
            TRAIN,
            "--deepspeed",
            "--deepspeed_config",
            "ds_configs/zero3_moe_cpu.json",
            "--data",
            corpus,
            "--output",
            str(tmp_path),
            *SMALL,
        ]
    )
    assert "2 ranks (started by: deepspeed or torchrun)" in said
    assert (tmp_path / "experts.png").read_bytes()[:4] == b"\x89PNG"
    same_run(table(tmp_path), one_process)


def shared_memory() -> set[str]:
    """DeepSpeed's buffers in shared memory."""
    return {path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpirun_with_three_ranks_equals_one_process(tmp_path, corpus, one_process):
    before = shared_memory()
    said = run(
        ["mpirun", "-n", "3", sys.executable, TRAIN, "--data", corpus, "--output", str(tmp_path), *SMALL],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    assert "3 ranks (started by: " in said
    assert not shared_memory() - before  # 69 MB a rank, which DeepSpeed leaves behind
    same_run(table(tmp_path), one_process)


CONFIGS = sorted(path.name for path in (ROOT / "ds_configs").glob("*.json") if "moe" not in path.name)


@pytest.fixture(scope="module")
def started(tmp_path_factory, corpus) -> dict[str, tuple[Path, str | None]]:
    """Config -> (output of a run with it as it stands, None; or why it could not run)."""
    folder = tmp_path_factory.mktemp("configs")

    def start(config: str) -> str | None:
        options = ["--deepspeed_config", f"ds_configs/{config}", "--data", corpus, "--output", str(folder / config)]
        try:
            run_forked([*options, *SMALL])
        except AssertionError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        return {c: (folder / c, wrong) for c, wrong in zip(CONFIGS, pool.map(start, CONFIGS), strict=True)}


@pytest.mark.parametrize("config", CONFIGS)
def test_each_config_starts_as_it_stands(started, config):
    output, wrong = started[config]
    if "fp16" in config:
        probe = "from deepspeed.accelerator import get_accelerator as a; print(bool(a().is_fp16_supported()))"
        if "\nFalse" in "\n" + run([sys.executable, "-c", probe]):
            assert "fp16 is not supported on your device" in str(wrong)
            return
    assert wrong is None, wrong
    losses = [row["loss"] for row in table(output)]
    assert losses[-1] < losses[0]


def test_a_folder_of_transformers_trains(tmp_path, corpus):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY)
    fresh, tuned = tmp_path / "fresh", tmp_path / "tuned"
    config.save_pretrained(fresh)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tuned)
    common = ["--data", corpus, "--gradient-checkpointing", *SMALL]
    outputs = {folder: tmp_path / f"{folder.name} run" for folder in (fresh, tuned)}
    for folder, output in outputs.items():
        run_forked([*common, "--model", str(folder), "--output", str(output)])
    first = [table(output)[0]["loss"] for output in outputs.values()]
    # Fresh weights of seed 0 and the saved ones of seed 0 are the same model.
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_a_mixtral_folder_is_split_over_two_ranks(tmp_path, corpus):
    """Each rank reads the experts that it owns; the losses are those of one process that holds them all."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TINY, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    settings = json.loads((ROOT / "ds_configs" / "zero3_moe_cpu.json").read_text())
    settings["ruda"]["experts"] = {"ep_size": 2, "ownership": [0, 1, 4]}
    (tmp_path / "split.json").write_text(json.dumps(settings))
    common = ["--model", str(tmp_path / "model"), "--data", corpus, *SMALL]
    split = ["--output", str(tmp_path / "two"), "--deepspeed_config", str(tmp_path / "split.json")]
    mpirun = [shutil.which("mpirun") or "mpirun", "-n", "2"]
    run_forked([*common, "--output", str(tmp_path / "one")])
    run([*mpirun, sys.executable, TRAIN, *common, *split])
    losses = [[row["loss"] for row in table(tmp_path / name)] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_bad_document_ends_the_run_with_its_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    assert "bad.jsonl, line 2: expected text" in run([sys.executable, TRAIN, "--data", str(bad), *SMALL], fails=True)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_a_rank_that_fails_alone_ends_the_mpirun(corpus, tmp_path):
    one = ["-n", "1", sys.executable, TRAIN, *SMALL, "--output", str(tmp_path), "--data"]
    said = run(
        ["mpirun", *one, corpus, ":", *one, str(tmp_path / "absent.jsonl")],
        fails=True,
        timeout=100,
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    assert "absent.jsonl: no such file or folder" in said


def test_two_epochs_use_every_target_twice_and_a_second_run_reports_only_itself(tmp_path):
    """Epochs of masked data differ in their windows, and DeepSpeed's monitor appends to what an earlier run left."""
    data = tmp_path / "prompts.jsonl"
    records = ({"prompt": "p" * (i * 37 % 300), "response": "r" * (1 + i * 53 % 90)} for i in range(30))
    data.write_text("\n".join(map(json.dumps, records)))
    options = ["--data", str(data), "--output", str(tmp_path / "run"), *SMALL[2:]]
    # A budget at which three orders of this data make 7, 8 and 8 windows.
    run_forked([*options, "--tokens-per-step", "200", "--epochs", "3"])
    assert len(table(tmp_path / "run")) == 23
    assert sum(row["tokens"] for row in table(tmp_path / "run")) == 3 * 1334
    said = run_forked([*options, "--steps", "2"])
    assert [row["step"] for row in table(tmp_path / "run")] == [1, 2]
    assert "in 2 windows" in said


@pytest.mark.parametrize("option", ["--steps", "--epochs", "--tokens-per-step", "--seq-length"])
def test_an_option_of_zero_is_refused(option):
    assert f"argument {option}: 0, expected at least 1" in run([sys.executable, TRAIN, option, "0"], fails=True)
