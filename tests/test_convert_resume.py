"""Conversions that are interrupted go on with the same command, file by file, or say why they begin afresh."""

import errno
import multiprocessing
import os
import shutil
import signal

import pytest
from convert_helpers import convert, engine_of, windows
from kill_helpers import run_killed
from resume_helpers import (
    OWNERSHIP,
    SMALL,
    complete,
    contents,
    interrupt,
    make_sources,
    partial_of,
    plan_of,
    stamps,
    start,
    words_of,
)

import ruda_ds
from ruda_ds.checkpoint.from_hf import plan_from_hf
from ruda_ds.checkpoint.journal import JOURNAL
from ruda_ds.checkpoint.to_hf import open_origin, plan_to_hf
from ruda_ds.checkpoint.unfinished import RESULT
from ruda_ds.cli.ranks import run_ranks


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """See make_sources."""
    return make_sources(tmp_path_factory.mktemp("sources"))


# --- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "moments"), [("to-hf", (4, 25)), ("from-hf", (9,))])
def test_a_killed_command_goes_on(command, moments, sources, tmp_path, capsys):
    out, kept = tmp_path / "out", {}
    for files in moments:
        process = start(words_of(command, sources, out), out, files)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not out.exists()
        found = complete(out)
        assert kept.items() <= found.items()
        assert len(found) >= files - 1
        kept = found
    total = len(plan_of(command, sources).shards)
    assert len(kept) < total
    capsys.readouterr()
    assert convert(*words_of(command, sources, out)) == 0
    assert f"going on: {len(kept)} of {total} files are complete\n" in capsys.readouterr().out
    assert kept.items() <= stamps(out).items()
    assert contents(out) == contents(sources / f"{command} whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert convert("verify", out) == 0


@pytest.mark.parametrize("command", ["to-hf", "from-hf"])
def test_a_kill_at_any_operation_leaves_what_can_be_gone_on_from(command, sources, tmp_path):
    """Killed at each of many moments, then in going on, then left alone: the same bytes as ever."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ruda_ds.checkpoint.from_hf", "ruda_ds.cli.convert", "tqdm"])
    place, count = tmp_path / "place", tmp_path / "count"
    words = words_of(command, sources, place / "out")
    words[words.index("2KB")] = "30KB"  # fewer files
    wanted = tmp_path / "wanted"
    assert convert(*words[:2], wanted, *words[3:]) == 0

    def run(at):
        process = context.Process(target=run_killed, args=(str(place), at, [*map(str, words)], str(count)))
        process.start()
        process.join(60)
        return process.exitcode

    assert run(None) == 0
    operations = int(count.read_text())
    assert operations > 40
    for moment in range(12):
        shutil.rmtree(place)
        at = 1 + moment * operations // 12
        assert run(at) == -signal.SIGKILL
        assert not (place / "out").exists() or contents(place / "out") == contents(wanted)
        if not (place / "out").exists():
            assert run(1 + 5 * moment % 23) == -signal.SIGKILL
            assert run(None) == 0
            assert [path.name for path in place.iterdir()] == ["out"]
        assert contents(place / "out") == contents(wanted)


def test_taken_over_bytes_count_at_once(sources, tmp_path):
    plan, out, told = plan_of("to-hf", sources), tmp_path / "out", []
    interrupt(plan, out, 7, KeyboardInterrupt())
    sizes = {name: nbytes for name, nbytes, _ in plan.files()}
    kept = sum(sizes[name] for name in complete(out))
    notes = []
    plan.run(out, told.append, notes.append)
    assert told[0] == kept > 0
    assert sum(told) == plan.nbytes
    assert notes == [f"going on: 7 of {len(plan.shards)} files are complete"]


# --- what is not taken over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (("--dtype", "bf16"), "another plan: dtypes ['float32'], now ['bfloat16']"),
        (("--max-shard-size", "9KB"), "another plan: files "),
        (("--layout", "fused"), "another plan: tensors "),
    ],
)
def test_other_options_begin_afresh(changed, text, sources, tmp_path, capsys):
    interrupt(plan_of("to-hf", sources), tmp_path / "out", 5, KeyboardInterrupt())
    words = words_of("to-hf", sources, tmp_path / "out")
    words = words[:3] + list(changed) if changed[0] == SMALL[0] else [*words, *changed]
    assert convert(*words) == 0
    printed = capsys.readouterr().out
    assert f"started afresh: {partial_of(tmp_path / 'out')} is of {text}" in printed
    assert "going on" not in printed
    assert convert(*words[:2], tmp_path / "wanted", *words[3:]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_another_ownership_of_as_many_files_begins_afresh(sources, tmp_path, capsys):
    interrupt(plan_of("from-hf", sources), tmp_path / "out", 5, KeyboardInterrupt())
    words = ("from-hf", sources / "from-hf")
    assert convert(*words, tmp_path / "out", *SMALL, "--ownership", "0,3,3,6") == 0
    assert "another plan: sha256 of all recipes " in capsys.readouterr().out
    assert convert(*words, tmp_path / "wanted", *SMALL, "--ownership", "0,3,3,6") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


@pytest.mark.parametrize("way", ["touched", "replaced"])
def test_a_changed_source_begins_afresh(way, sources, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(sources / "from-hf", source)
    interrupt(plan_from_hf(source, [0, 2, 2, 6], shard_limit=2000), out, 5, KeyboardInterrupt())
    weights = source / "model.safetensors"
    if way == "touched":
        os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    else:  # with its size and time stamp
        shutil.copy2(weights, source / "new")
        os.replace(source / "new", weights)
    assert convert("from-hf", source, out, *OWNERSHIP, *SMALL) == 0
    printed = capsys.readouterr().out
    assert "started afresh" in printed
    assert "another source: model.safetensors [" in printed
    assert contents(out) == contents(sources / "from-hf whole")


def test_damaged_files_and_journals_are_not_taken_over(sources, tmp_path, capsys):
    out = tmp_path / "out"
    interrupt(plan_of("to-hf", sources), out, 8, KeyboardInterrupt())
    kept = complete(out)
    cut, lost, *_ = kept
    size = (partial_of(out) / RESULT / cut).stat().st_size
    os.truncate(partial_of(out) / RESULT / cut, size - 1)
    (partial_of(out) / RESULT / lost).unlink()
    (partial_of(out) / RESULT / "stray").write_text("not ours")
    assert convert(*words_of("to-hf", sources, out)) == 0
    printed = capsys.readouterr().out
    assert f"{cut}: found {size - 1} bytes, expected {size} bytes, as when it was complete: written again" in printed
    assert f"{lost}: found no file, " in printed
    assert "going on: 6 of " in printed
    again = stamps(out)
    assert {name for name in kept if again[name] != kept[name]} == {cut, lost}
    assert contents(out) == contents(sources / "to-hf whole")
    for number, damage in enumerate((lambda text: text[:-3], lambda text: "[]", lambda text: "")):
        out = tmp_path / str(number)
        interrupt(plan_of("to-hf", sources), out, 3, KeyboardInterrupt())
        path = partial_of(out) / JOURNAL
        path.write_text(damage(path.read_text()))
        assert convert(*words_of("to-hf", sources, out)) == 0
        assert "has no journal that can be read" in capsys.readouterr().out
        assert contents(out) == contents(sources / "to-hf whole")


def save(folder):
    """A training checkpoint."""
    engine = engine_of("mixtral", [0, 2, 6])
    windows(engine, 0, 1)
    ruda_ds.save_checkpoint(engine, folder, tag="t")


def test_a_training_checkpoint(tmp_path, capsys):
    run_ranks(save, 2, str(tmp_path / "saved"))
    words = ("to-hf", tmp_path / "saved")
    assert convert(*words, tmp_path / "wanted", *SMALL) == 0
    for name, change in (
        ("same", None),
        ("pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("m", "ruda_manifest.json"),
    ):
        out = tmp_path / name
        interrupt(plan_to_hf(open_origin(words[1]), shard_limit=2000), out, 6, OSError(errno.EIO, "bad disk"))
        if change:
            os.utime(tmp_path / "saved" / "t" / change)
        capsys.readouterr()
        assert convert(*words, out, *SMALL) == 0
        printed = capsys.readouterr().out
        assert (f"another source: {change} [" if change else "going on: 6 of ") in printed
        assert contents(out) == contents(tmp_path / "wanted")
