"""Jobs on several threads: their order, their errors, and what they leave open."""

import os
import threading
import time

import pytest
import torch

from ruda_ds.checkpoint.parallel import MOST_WORKERS, in_parallel, one_at_a_time
from ruda_ds.checkpoint.pt_writer import HashedFile
from ruda_ds.checkpoint.reader import FILES


def test_results_come_in_the_jobs_order():
    def job(number):
        time.sleep(0.02 * (5 - number))
        return number

    assert in_parallel([lambda n=n: job(n) for n in range(6)]) == list(range(6))
    assert in_parallel([]) == []


def test_the_first_error_is_raised_and_nothing_begins_after_it():
    begun = []

    def job(number):
        begun.append(number)
        if number == 1:
            raise OSError("disk full")
        time.sleep(0.2)

    with pytest.raises(OSError, match="disk full"):
        in_parallel([lambda n=n: job(n) for n in range(40)])
    assert len(begun) <= 2 * MOST_WORKERS


def test_descriptors_are_a_threads_own_and_closed(tmp_path):
    path = tmp_path / "values"
    path.write_bytes(bytes(range(64)))
    before = len(os.listdir("/proc/self/fd"))

    def job(number):
        target = torch.empty(8, dtype=torch.uint8)
        FILES.read_into(path, 8 * number, target)
        return target.tolist()

    assert in_parallel([lambda n=n: job(n) for n in range(8)]) == [list(range(8 * n, 8 * n + 8)) for n in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_progress_is_told_by_one_thread_at_a_time():
    inside, total = threading.Lock(), [0]

    def advance(count):
        assert inside.acquire(blocking=False)
        before = total[0]
        time.sleep(0.001)
        total[0] = before + count
        inside.release()

    guarded = one_at_a_time(advance)
    in_parallel([lambda: [guarded(1) for _ in range(10)] for _ in range(4)])
    assert total == [40]


def test_what_a_write_does_wrong_is_raised_at_the_end_at_the_latest(tmp_path):
    stream = HashedFile(tmp_path / "file")
    stream._file.close()  # as a disk that is gone
    stream.write(b"x" * 100)
    with pytest.raises(ValueError, match="closed file"):
        stream.finish()
    stream.close()
