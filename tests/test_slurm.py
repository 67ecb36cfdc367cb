"""A real SLURM over several hosts: its own daemons in network namespaces, `launch/slurm.sbatch`, srun, and failures.

RUDA_HOST_TESTS=1 runs it (ten minutes) where SLURM's programs are installed.
"""

import csv
import os
import re
import signal

import pytest
from host_helpers import Hosts, finish
from host_training import ASKED_FOR, IMPOSSIBLE, SMALL, Running, if_asked, losses, names_the_lost_rank, on_hosts, train
from slurm_helpers import Slurm, why_no_slurm

from ruda_ds.cli.convert import main as convert

pytestmark = [on_hosts, if_asked, pytest.mark.slow]
if ASKED_FOR and IMPOSSIBLE is None:
    pytestmark.append(pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())))
SRUN = ["srun", "--kill-on-bad-exit=1"]
RANKS = ["python", "-m", "ruda_ds.launch"]
TRAIN = [*RANKS, "launch/train.py"]


def sbatch(*options: str) -> list[str]:
    """Up to the options of the training program; --wait gives the job's exit code."""
    return ["sbatch", "--wait", "--parsable", *options, "launch/slurm.sbatch"]


@pytest.mark.parametrize("slots", [[4], [2, 2], [2, 1, 1]])
def test_a_batch_job_equals_one_host_of_mpich(tmp_path, built, text, one_host, slots):
    with Hosts(len(slots), tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", slots):
        options = [f"--nodes={len(slots)}", "--ntasks=4", f"--output={tmp_path}/job.log"]
        hosts.settings["RUDA_OUTPUT"] = str(tmp_path / "run")
        found, _ = train(hosts, sbatch(*options), text, tmp_path)
    assert "4 ranks (started by: SLURM" in (tmp_path / "job.log").read_text()
    assert found == one_host


@pytest.mark.parametrize("pmi", ["none", "pmi2"])
def test_srun_with_and_without_pmi(tmp_path, built, text, one_host, pmi):
    with Hosts(2, tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", [3, 1]):
        found, said = train(hosts, [*SRUN, f"--mpi={pmi}", "--nodes=2", "--ntasks=4", *TRAIN], text, tmp_path)
    assert "4 ranks (started by: SLURM" in said
    assert found == one_host


def test_the_deepspeed_launcher_over_slurm(tmp_path, built, text, one_host):
    with Hosts(2, tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", [2, 2]):
        command = ["deepspeed", "--log_level", "error", "--hostfile", str(hosts.hostfile(tmp_path, [2, 2]))]
        command += ["--launcher", "slurm", "--launcher_args", "--kill-on-bad-exit=1 --nodes=2"]
        command += ["--master_addr", "10.99.0.1", "--master_port", "29511"]
        found, said = train(hosts, [*command, "launch/train.py", "--deepspeed"], text, tmp_path)
    assert "4 ranks (started by: SLURM" in said
    assert found == one_host


def test_the_cluster_is_looked_at_by_srun(tmp_path, built):
    with Hosts(2, tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", [2, 2]):
        report = ["-m", "ruda_ds.cli.report", "--cluster", "--png", str(tmp_path / "cluster.png")]
        log = tmp_path / "log"
        job = hosts.start([*SRUN, "--nodes=2", "--ntasks=4", *RANKS, *report], log)
        code, said, _ = finish(job, log, 150)
    assert code == 0, said[-4000:]
    assert "h0" in said
    assert "h1" in said
    assert (tmp_path / "cluster.png").stat().st_size


def test_two_jobs_on_the_same_hosts_do_not_meet(tmp_path, built, text, one_host):
    with Hosts(2, tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", [4, 4]):
        jobs = []
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            hosts.settings["RUDA_OUTPUT"] = str(folder / "run")
            options = ["--nodes=2", "--ntasks-per-node=2", f"--output={folder}/job.log"]
            command = [*sbatch(*options), "--data", str(text), "--steps", "3", *SMALL]
            jobs.append((hosts.start(command, folder / "log"), folder))
        for job, folder in jobs:
            code, said, _ = finish(job, folder / "log", 200)
            assert code == 0, said + (folder / "job.log").read_text()[-4000:]
            assert losses(folder / "run") == one_host


def test_the_warning_before_the_time_limit_saves_and_the_same_command_goes_on(tmp_path, built, text):
    """SLURM's own signal, at its own time: a minute is the least limit that it knows."""
    with Hosts(2, tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", [2, 2]):
        hosts.settings["RUDA_OUTPUT"] = str(tmp_path / "run")
        options = ["--nodes=2", "--ntasks=4", f"--output={tmp_path}/%j.log"]
        arguments = ["--data", str(text), *SMALL, "--steps"]
        first = hosts.start(
            [*sbatch(*options, "--time=1", "--signal=USR1@25"), *arguments, "100000"], tmp_path / "first"
        )
        code, said, _ = finish(first, tmp_path / "first", 150)
        log = (tmp_path / f"{said.split()[0]}.log").read_text()
        assert code == 0, log[-4000:]
        assert "SIGUSR1: saved after" in log
        saved = tmp_path / "run" / "checkpoints"
        assert convert(["verify", str(saved), "-q"]) == 0
        last = int(re.match(r"global_step(\d+)", (saved / "latest").read_text())[1])
        assert last > 0
        second = hosts.start([*sbatch(*options), *arguments, str(last + 2)], tmp_path / "second")
        code, said, _ = finish(second, tmp_path / "second", 150)
        assert code == 0, (tmp_path / f"{said.split()[0]}.log").read_text()[-4000:]
        with (tmp_path / "run" / "metrics.csv").open(newline="") as lines:
            assert [int(row["step"]) for row in csv.DictReader(lines)] == list(range(1, last + 3))


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["a rank is killed", "ranks are stopped", "the link goes down", "a host is killed"])
def test_a_host_fails(tmp_path, built, text, fault):
    slots = [2, 2]
    with Hosts(2, tmp_path, built) as hosts, Slurm(hosts, tmp_path / "slurm", slots) as slurm:
        job = sbatch("--nodes=2", "--ntasks=4", "--open-mode=append", f"--output={tmp_path}/log")
        run = Running(hosts, tmp_path, text, slots, job)
        ranks = hosts.ranks(run.last)
        if fault == "the link goes down":
            hosts.link(run.last, "down")
        elif fault == "a host is killed":  # slurmd too
            hosts.signal(run.last, signal.SIGKILL)
        else:
            for pid in ranks[:1] if fault == "a rank is killed" else ranks:
                os.kill(pid, signal.SIGKILL if fault == "a rank is killed" else signal.SIGSTOP)
        said = run.ends(slack_s=30)  # sbatch --wait asks every ten seconds
        if fault == "a rank is killed":
            assert re.search(rf"{run.last}: task \d: Killed", said), said[-4000:]
        else:
            names_the_lost_rank(said, [0, 1], run.last)
        if fault in ("a rank is killed", "ranks are stopped"):
            assert slurm.run("squeue", "--noheader").split() == []
