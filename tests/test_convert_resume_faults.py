"""Conversions that end by an error, and two of them at the same time: what is kept, what is said, who is refused."""

import errno
import fcntl
import resource
import shutil
import signal
import threading
import time

import pytest
from convert_helpers import convert
from resume_helpers import complete, contents, interrupt, make_sources, partial_of, plan_of, stamps, start, words_of

from ruda_ds.checkpoint import hf, journal, resume, unfinished
from ruda_ds.checkpoint.journal import JOURNAL
from ruda_ds.checkpoint.unfinished import LOCK, RESULT, clear, held
from ruda_ds.checkpoint.writer import write_atomic
from ruda_ds.errors import CheckpointError, UnfinishedError


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """See make_sources."""
    return make_sources(tmp_path_factory.mktemp("sources"))


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_is_complete_and_says_so(sources, tmp_path, capsys):
    out, words = tmp_path / "out", words_of("from-hf", sources, tmp_path / "out")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))  # below a file of experts
    try:
        assert convert(*words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    kept, total = complete(out), len(plan_of("from-hf", sources).shards)
    message = capsys.readouterr().err
    assert "File too large" in message
    assert f"{len(kept)} of {total} files are complete in {partial_of(out)}: the same command goes on" in message
    assert 0 < len(kept) < total
    assert {path.name for path in (partial_of(out) / RESULT).iterdir()} == set(kept)  # the one without room is gone
    assert convert(*words) == 0
    assert kept.items() <= stamps(out).items()
    assert contents(out) == contents(sources / "from-hf whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_too_full_for_the_journal(sources, tmp_path, monkeypatch, capsys):
    out, calls = tmp_path / "out", []

    def write(path, content):
        calls.append(path)
        if len(calls) == 4:  # at the beginning, then after each file
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_atomic", write)
        assert convert(*words_of("to-hf", sources, out)) == 1
    assert "No space left on device; 2 of " in capsys.readouterr().err
    assert len(list((partial_of(out) / RESULT).iterdir())) == len(complete(out)) == 2
    assert convert(*words_of("to-hf", sources, out)) == 0
    assert "going on: 2 of " in capsys.readouterr().out
    assert contents(out) == contents(sources / "to-hf whole")


def test_ctrl_c_keeps_what_is_complete_and_says_so(sources, tmp_path, monkeypatch, capsys):
    out, written = tmp_path / "out", []

    def write(*arguments):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(arguments)
        hf.write_shard(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "write_shard", write)
        assert convert(*words_of("to-hf", sources, out)) == 130
        assert f"interrupted; 3 of {len(plan_of('to-hf', sources).shards)} files are" in capsys.readouterr().err
        shutil.rmtree(partial_of(out))  # to give up is to delete it
        assert convert(*words_of("to-hf", sources, out)) == 130  # the first file: nothing to keep
        assert capsys.readouterr().err == "ruda-convert: interrupted\n"
        assert not list(tmp_path.iterdir())
    assert convert(*words_of("to-hf", sources, out)) == 0
    assert "going on" not in capsys.readouterr().out


def test_which_errors_keep_what_is_complete(sources, tmp_path):
    plan, out = plan_of("to-hf", sources), tmp_path / "out"
    found = interrupt(plan, out, 4, OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(found, UnfinishedError)
    assert (found.folder, found.complete, found.total) == (partial_of(out), 4, len(plan.shards))
    assert type(interrupt(plan, out, 6, RuntimeError("can't allocate memory"))) is RuntimeError
    assert len(complete(out)) == 6
    assert type(interrupt(plan, out, 8, CheckpointError("the source is damaged"))) is CheckpointError
    assert not list(tmp_path.iterdir())


# --- two at the same time -------------------------------------------------------------------------------------------


def test_the_second_of_two_is_refused_and_the_first_unharmed(sources, tmp_path, capsys):
    out = tmp_path / "out"
    process = start(words_of("to-hf", sources, out), out, 5)
    process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    try:
        others = [words_of("to-hf", sources, out), words_of("from-hf", sources, out)]
        for words in others:
            assert convert(*words) == 1
            message = capsys.readouterr().err
            assert f"{partial_of(out)}: held by process {process.pid} on " in message
            assert "expected no other conversion to it" in message
        with pytest.raises(CheckpointError, match="held by"), held(out):
            raise AssertionError("two at once")
        assert time.monotonic() - begin < 5
    finally:
        process.send_signal(signal.SIGCONT)
    printed, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (0, ""), printed
    assert contents(out) == contents(sources / "to-hf whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_one_holds_the_folder_whenever_it_comes_and_goes(tmp_path):
    out, inside, wrong, entered = tmp_path / "out", [], [], []
    deadline = time.monotonic() + 1.5

    def contend():
        while time.monotonic() < deadline:
            try:
                with held(out) as partial:
                    inside.append(1)
                    if len(inside) != 1 or [path.name for path in partial.iterdir()] != [LOCK]:
                        wrong.append(list(inside))
                    (partial / RESULT).mkdir()
                    (partial / JOURNAL).touch()
                    clear(partial)
                    entered.append(1)
                    inside.pop()
            except CheckpointError:
                pass
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(entered) > 100
    assert not list(tmp_path.iterdir())


def test_a_target_that_another_has_finished_meanwhile_is_refused(tmp_path, monkeypatch):
    out, take = tmp_path / "out", unfinished._lock

    def late(partial):
        lock = take(partial)
        out.mkdir()
        (out / "theirs").touch()
        return lock

    monkeypatch.setattr(unfinished, "_lock", late)
    with pytest.raises(CheckpointError, match="something there already"), held(out):
        raise AssertionError("held")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_system_without_locks_warns_and_converts(sources, tmp_path, monkeypatch):
    def flock(number, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="has no locks"):
        assert convert(*words_of("to-hf", sources, tmp_path / "out")) == 0
    assert contents(tmp_path / "out") == contents(sources / "to-hf whole")


def test_another_command_to_the_same_target_starts_afresh_and_says_so(sources, tmp_path, capsys):
    out = tmp_path / "out"
    interrupt(plan_of("to-hf", sources), out, 4, KeyboardInterrupt())
    assert convert(*words_of("from-hf", sources, out)) == 0
    said = f"started afresh: {partial_of(out)} is of another plan: command to-hf, now from-hf"
    assert said in capsys.readouterr().out
    assert contents(out) == contents(sources / "from-hf whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
