"""Saves that fail or are killed: all ranks raise alike, and the last complete tag always loads."""

import hashlib
import os
import random
import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_helpers import differing, make, microbatch, state
from kill_helpers import KillAt

import ruda_ds
from ruda_ds.checkpoint.writer import TagFolder, interrupted, locate
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import CheckpointError, RankFailedError


def failing_saves(folder):
    """Each refused or failed save, on one engine; what all ranks say, and what it left."""
    rank, engine = dist.get_rank(), make()
    microbatch(engine, 0, 0)
    ruda_ds.save_checkpoint(engine, folder, tag="good")
    microbatch(engine, 0, 1)
    before, said = state(engine), {}

    def attempt(name, **keywords):
        with pytest.raises(CheckpointError) as caught:
            ruda_ds.save_checkpoint(engine, folder, **keywords)
        said[name] = str(caught.value)
        assert differing(state(engine), before) == []
        dist.barrier()
        assert sorted(os.listdir(folder)) == ["good", "latest", "zero_to_fp32.py", "zero_to_torch.py"], name
        dist.barrier()

    attempt("tags", tag=f"tag{rank}")
    attempt("reserved", tag="next", client_state={"module": 1} if rank else {})
    attempt("unpicklable", tag="next", client_state={"mine": lambda: 0} if rank else {})
    attempt("name", tag="../next")
    attempt("latest", tag="latest")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, tag, full in (("disk", "next", 1), ("disk_overwriting", "good", 0)):
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        attempt(name, tag=tag)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ruda_ds.save_checkpoint(engine, folder, tag="good", client_state={"when": "second"})
    fresh = make()
    _, client = ruda_ds.load_checkpoint(fresh, folder)
    assert client == {"when": "second"}
    assert differing(state(fresh), state(engine)) == []
    return said


def test_a_rank_that_cannot_save_stops_all_and_leaves_the_last_tag(tmp_path):
    first, second = run_ranks(failing_saves, 2, str(tmp_path))
    assert first == second
    assert "ranks disagree on tag: rank 1 has 'tag1', rank 0 'tag0'" in first["tags"]
    assert "rank 1 of 2: client_state has the key 'module'" in first["reserved"]
    assert "rank 1 of 2: " in first["unpicklable"]
    assert "pickle" in first["unpicklable"].lower()
    assert "tag is '../next', expected the name of a folder" in first["name"]
    assert "tag is 'latest'" in first["latest"]
    assert "rank 1 of 2: " in first["disk"]
    assert "rank 0 of 2: " in first["disk_overwriting"]


# --- kills ----------------------------------------------------------------------------------------------------------


def digest(engine) -> str:
    found = state(engine)
    return hashlib.sha256(b"".join(name.encode() + found[name] for name in sorted(found))).hexdigest()


def killed_while_saving(folder, notes, trial, tag, victim, at):
    """Load what the kill before has left, go on by a micro-batch, and be killed while saving."""
    rank, engine = dist.get_rank(), make(prefix=[0, 3, 8] if dist.get_world_size() == 2 else [0, 8])
    if trial:
        ruda_ds.load_checkpoint(engine, folder)
    loaded = digest(engine)
    microbatch(engine, trial, 0)
    (Path(notes) / f"{trial} {rank}").write_text(f"{loaded} {digest(engine)}")
    dist.barrier()
    killer = KillAt(folder, at if rank == victim else None)
    ruda_ds.save_checkpoint(engine, folder, tag=tag)
    return killer.count


@pytest.mark.parametrize(("world", "kills"), [(1, 10), (2, 10)])
def test_a_kill_at_any_moment_of_a_save_leaves_a_tag_that_loads(tmp_path, world, kills):
    folder, notes = tmp_path / "checkpoints", tmp_path / "notes"
    notes.mkdir()
    arguments = (str(folder), str(notes))
    fresh = run_ranks(killed_while_saving, world, *arguments, 0, "a", 0, None)
    again = run_ranks(killed_while_saving, world, *arguments, 1, "a", 0, None)
    moments = random.Random(world)
    for trial in range(2, kills + 2):
        victim = moments.randrange(world)
        tag, operations = moments.choice([("a", again), (f"new{trial}", fresh)])
        at = moments.randint(1, operations[victim])
        with pytest.raises(RankFailedError):
            run_ranks(killed_while_saving, world, *arguments, trial, tag, victim, at)
    run_ranks(killed_while_saving, world, *arguments, kills + 2, "a", 0, None)
    for rank in range(world):
        lines = [(notes / f"{trial} {rank}").read_text().split() for trial in range(kills + 3)]
        for (before, after), (loaded, _) in pairwise(lines):
            assert loaded in (before, after)
    assert not list(folder.glob("a.*"))


@pytest.mark.parametrize("crash", [1, 2, 3])
def test_a_tag_is_never_without_a_complete_folder_while_it_is_replaced(tmp_path, monkeypatch, crash):
    """The two renames and the one of ``latest``, each in turn the moment of a kill."""
    root = tmp_path / "root"
    for content in ("first", "second"):
        place = TagFolder(root, "a")
        place.begin()
        (place.incomplete / "content").write_text(content)
        if content == "first":
            place.commit()
    calls = []

    def dying(real):
        def call(*paths):
            calls.append(paths)
            if len(calls) == crash:
                raise KeyboardInterrupt
            real(*paths)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying(os.rename))
        patch.setattr(os, "replace", dying(os.replace))
        with pytest.raises(KeyboardInterrupt):
            place.commit()
    found = locate(root, None)
    assert (found / "content").read_text() == ("second" if crash == 3 else "first")
    assert [path.name for path in interrupted(root)] == (["a.incomplete"] if crash < 3 else [])
    again = TagFolder(root, "a")
    again.begin()
    assert (again.final / "content").read_text() == ("second" if crash == 3 else "first")
    (again.incomplete / "content").write_text("third")
    again.commit()
    assert sorted(path.name for path in root.iterdir()) == ["a", "latest"]
    assert (locate(root, None) / "content").read_text() == "third"
