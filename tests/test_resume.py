"""The training program, stopped by a signal or a kill and resumed, is the program that ran through."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from test_train import SMALL, TRAIN, environment, run_forked, table

from ruda_ds.checkpoint import Manifest
from ruda_ds.cli.convert import main as convert
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import RankFailedError

ROOT = Path(__file__).resolve().parent.parent
MIXTURE = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero3_moe_cpu.json")]
# 5 windows of several micro-batches on 2 ranks, in 2 epochs, and a checkpoint at the end.
RUN = [*SMALL[2:], "--tokens-per-step", "1500", "--steps", "5", "--save-every", "5", *MIXTURE]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Three windows an epoch, so that the run crosses from one into the next."""
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    records = [{"prompt": "p" * (i * 37 % 90), "response": "r" * (1 + i * 53 % 90)} for i in range(75)]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def go(arguments, rank, after, number):
    """The program in this process; one rank gets a signal in the middle of its micro-batch ``after``."""
    sys.path[:0] = [str(ROOT / "launch")]
    import resume
    import train
    from options import parse
    from stop import StopSignals

    done, calls = resume.Journey.micro_batch_done, []

    def micro_batch_done(journey):
        calls.append(0)
        if len(calls) == after and journey.engine.global_rank == rank:
            os.kill(os.getpid(), number)
        return done(journey)

    resume.Journey.micro_batch_done = micro_batch_done
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train.train(parse(None, arguments), StopSignals())
    return len(calls), said.getvalue()


def final(output: Path) -> dict[str, bytes]:
    """Every tensor and number of the last checkpoint's files, as bytes."""
    found: dict[str, bytes] = {}

    def walk(name, value):
        if isinstance(value, torch.Tensor):
            found[name] = str(value.dtype).encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                walk(f"{name}.{index}", inner)
        elif isinstance(value, (int, float, str)):
            found[name] = repr(value).encode()

    folder = output / "checkpoints" / "global_step5"
    Manifest.read(folder).check_files(folder)
    for path in sorted(folder.glob("*_states.pt")):
        walk(path.name, torch.load(path, weights_only=False))
    return {name: value for name, value in found.items() if "output_path" not in name}


def figures_of(output: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in table(output)]


@pytest.fixture(scope="module")
def through(tmp_path_factory, corpus):
    """The run that nobody stopped."""
    output = tmp_path_factory.mktemp("through")
    calls = run_ranks(go, 2, ["--data", corpus, "--output", str(output), *RUN], None, 0, 0)
    return output, calls[0][0]


def three_ranks_go_on(folder: Path, stopped: Path, arguments: list[str], wanted: list[dict[str, float]]) -> None:
    """From a checkpoint in mid-window of two ranks, resharded, with one rank without experts: the same figures."""
    place = "--world", "3", "--ep-size", "3", "--ownership", "0,2,2,8"
    assert convert(["reshard", str(stopped / "checkpoints"), str(folder / "checkpoints"), *place, "-q"]) == 0
    config = json.loads((ROOT / "ds_configs" / "zero3_moe_cpu.json").read_text())
    config["ruda"]["experts"] = {"ep_size": 3, "ownership": [0, 2, 2, 8]}
    (folder / "config.json").write_text(json.dumps(config))
    changes = ["--output", str(folder), "--deepspeed_config", str(folder / "config.json"), "--resume"]
    run_ranks(go, 3, [*arguments, *changes], None, 0, 0)
    begun = Manifest.read(stopped / "checkpoints" / (stopped / "checkpoints" / "latest").read_text()).global_steps
    found, wanted = figures_of(folder), wanted[begun:]
    assert [row["tokens"] for row in found] == [row["tokens"] for row in wanted]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in wanted], rel=1e-5)


@pytest.mark.parametrize(("after", "rank", "number"), [(5, 1, signal.SIGUSR1), (10, 0, signal.SIGTERM)])
def test_a_signal_to_one_rank_saves_in_the_window_and_the_run_goes_on_bit_for_bit(
    tmp_path, corpus, through, after, rank, number
):
    output, micro_batches = through
    arguments = ["--data", corpus, "--output", str(tmp_path), *RUN]
    stopped = run_ranks(go, 2, arguments, rank, after, number)
    assert [calls for calls, _ in stopped] == [after + 1] * 2  # the flags travel behind one micro-batch
    tag = (tmp_path / "checkpoints" / "latest").read_text()
    window = Manifest.read(tmp_path / "checkpoints" / tag).state
    assert window.microbatches > 0
    said = stopped[0][1]
    assert f"{number.name}: saved after micro-batch {window.microbatches} of window " in said
    assert f"--resume {tmp_path / 'checkpoints'} goes on from there" in said
    if number == signal.SIGUSR1:
        (tmp_path / "three").mkdir()
        three_ranks_go_on(tmp_path / "three", tmp_path, arguments, figures_of(output))
    resumed = run_ranks(go, 2, [*arguments, "--resume"], None, 0, 0)
    assert [calls for calls, _ in resumed] == [micro_batches - after - 1] * 2
    assert f"resumed from {tmp_path / 'checkpoints' / tag}" in resumed[0][1]
    found, wanted = final(tmp_path), final(output)
    assert sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)) == []
    assert figures_of(tmp_path) == figures_of(output)


def test_another_dataset_window_or_seed_is_refused_with_what_differs(tmp_path, corpus, through):
    other = tmp_path / "other.jsonl"
    other.write_text(Path(corpus).read_text() + '\n{"text": "one more"}')
    changed = [*RUN, "--seed", "7", "--rows-per-step", "9"]
    changed = [
        part for index, part in enumerate(changed) if "--tokens-per-step" not in changed[max(index - 1, 0) : index + 1]
    ]
    arguments = ["--data", str(other), "--output", str(tmp_path), *changed, "--resume", str(through[0] / "checkpoints")]
    with pytest.raises(RankFailedError) as caught:
        run_ranks(go, 2, arguments, None, 0, 0)
    said = str(caught.value)
    assert "ResumeError" in said
    assert "global_step5: the run that was saved is another one: data (sha256 of its tokens) was" in said
    assert "seed was 0, is 7; window was '1500 tokens', is '9 rows'" in said
    assert "sequence length" not in said


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)


def test_a_process_that_is_asked_to_end_ends_well_and_resumes(tmp_path, corpus):
    """Plain python, SIGUSR1 while it starts, SIGTERM at whatever moment later; the figures are those of one run."""
    command = [TRAIN, "--data", corpus, "--output", str(tmp_path), *SMALL[2:], "--tokens-per-step", "300"]
    running = subprocess.Popen(
        [sys.executable, *command, "--epochs", "500"],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while not catches(running.pid, signal.SIGUSR1):
        time.sleep(0.01)
    running.send_signal(signal.SIGUSR1)
    said = running.communicate(timeout=100)[0].decode()
    assert running.returncode == 0, said
    assert "SIGUSR1: saved after micro-batch 2 of window 1" in said
    resuming = forked.start([*command, "--resume", "--epochs", "500"], tmp_path / "log", environment(), ROOT)
    while not list((tmp_path / "monitor").glob("*loss.csv")) and resuming.is_alive():
        time.sleep(0.05)
    os.kill(resuming.pid, signal.SIGTERM)
    code, said = forked.wait(resuming, 100), (tmp_path / "log").read_text()
    assert code == 0, said
    assert "SIGTERM: saved after micro-batch" in said
    tag = (tmp_path / "checkpoints" / "latest").read_text()
    steps = Manifest.read(tmp_path / "checkpoints" / tag).global_steps
    (tmp_path / "monitor" / "Train_Window_loss.csv").open("a").write(f"{steps + 9},7.5\n")  # of a later window, lost
    assert f"resumed from {tmp_path / 'checkpoints' / tag}" in run_forked(
        [*command[1:], "--resume", "--epochs", "500", "--steps", str(steps + 2)]
    )
    assert [row["step"] for row in table(tmp_path)] == list(range(1, steps + 3))
    with (tmp_path / "metrics.csv").open() as lines:
        assert all(float(row["loss"]) < 7 for row in csv.DictReader(lines))
