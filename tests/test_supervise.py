"""launch/supervise: new starts from the last checkpoint, pauses that double, and when it gives up."""

import signal
import subprocess
import sys
import time
from pathlib import Path

SUPERVISE = Path(__file__).resolve().parent.parent / "launch" / "supervise"
# Fails until its counter has reached ``good``, writing a checkpoint at each start whose number is in ``saving``.
COMMAND = """
import pathlib, sys
folder, good, saving = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
log = folder / "log"
number = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as out:
    print("resumed" if "--resume" in sys.argv else "from the beginning", file=out)
if str(number) in saving:
    (folder / "latest").write_text(f"tag{number}")
sys.exit(0 if number == good else 7)
"""


def supervised(folder, good, saving, *options):
    command = [sys.executable, "-c", COMMAND, str(folder), str(good), saving]
    ran = subprocess.run(
        [str(SUPERVISE), "--checkpoints", str(folder), "--pause", "0.01", *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, (folder / "log").read_text().splitlines(), ran.stderr


def test_it_starts_again_from_the_last_checkpoint(tmp_path):
    code, starts, said = supervised(tmp_path, 3, "1")
    assert code == 0
    assert starts == ["from the beginning", "from the beginning", "resumed", "resumed"]
    assert "exit code 7; starting again from the beginning in 0.01 s (failure 1 since a checkpoint)" in said
    assert "starting again from tag1" in said


def test_it_gives_up_without_progress_and_a_checkpoint_is_progress(tmp_path):
    code, starts, said = supervised(tmp_path, 99, "2", "--retries", "3")
    assert code == 7
    assert len(starts) == 6  # two without, the one that saved counts as the first failure of three
    assert "giving up" in said
    assert said.count("in 0.02 s") == 2


def test_a_signal_reaches_the_command_and_ends_the_supervision(tmp_path):
    waits = f"import time, pathlib; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"
    process = subprocess.Popen(
        [str(SUPERVISE), "--checkpoints", str(tmp_path), "--", sys.executable, "-c", waits], stderr=subprocess.PIPE
    )
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM or process.returncode != 0
    assert b"starting again" not in process.stderr.read()
    process.stderr.close()


def test_a_signal_in_a_pause_ends_it(tmp_path):
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    process = subprocess.Popen(
        [str(SUPERVISE), "--checkpoints", str(tmp_path), "--pause", "100", "--", *fails], stderr=subprocess.PIPE
    )
    assert b"starting again" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    process.stderr.close()


def test_a_command_is_needed(tmp_path):
    ran = subprocess.run([str(SUPERVISE), "--checkpoints", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "no command" in ran.stderr
