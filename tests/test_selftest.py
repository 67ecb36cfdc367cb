"""ruda-selftest and its verdicts."""

import json
import math

import pytest
import torch

from ruda_ds.cli import selftest
from ruda_ds.cli.oracle import ROWS, Case, data, shares, worst
from ruda_ds.errors import RankFailedError

CASE = Case("even", 1, "float32", "float32")


def test_ours_is_within_bounds_and_stock_far_off_where_counts_differ(capsys):
    code = selftest.main(["--world", "1,2", "--json"])
    said = capsys.readouterr().out
    assert code == 0, said
    report = json.loads(said)
    assert report["ok"]
    assert len(report["rows"]) == 2 * len(selftest.CASES)
    for row in report["rows"]:
        exact = 1e-6 if row["model"] == "float32" else 2e-2
        assert row["broken"] is None
        assert row["gradient"] <= exact
        if row["work"] == "float64" or row["model"] == "bfloat16":
            assert row["reduction"] == 0
        one_mean = row["world"] * row["microbatches"] == 1  # a mean of one mean is right
        if row["split"] == "even" or one_mean:
            assert row["stock"] <= exact
        else:
            assert row["stock"] > 1e-2


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", selftest.CASES[: len(selftest.SPLITS)], ids=lambda c: f"{c.split}-{c.microbatches}")
def test_a_split_deals_every_row_once_and_is_what_it_is_called(case, world):
    table = shares(case, world)
    tokens = [int(data(case)[1][share].sum()) for microbatch in table for share in microbatch]
    assert sorted(row for microbatch in table for share in microbatch for row in share) == list(range(ROWS))
    assert len(tokens) == case.microbatches * world
    if case.split == "even":
        assert len(set(tokens)) == 1
    elif len(tokens) > 1:
        assert len(set(tokens)) > 1
    if case.split == "empty":
        assert not any(table[-1])  # the last micro-batch, and the last rank of any
        assert world == 1 or not any(microbatch[-1] for microbatch in table)


@pytest.mark.parametrize(
    ("gradient", "reduction", "words"),
    [
        (2e-6, 0.0, ["gradient is 2.0e-06, bound 1e-06"]),
        (1e-7, 1e-6, ["reduction is 1.0e-06, bound 5e-07"]),
        (math.nan, math.inf, ["gradient is nan", "reduction is inf"]),
    ],
)
def test_a_broken_bound_is_named(gradient, reduction, words):
    row = selftest.judge(2, CASE, gradient, reduction, 0.5)
    assert all(word in row.broken for word in words)
    assert f"BROKEN: {words[0]}" in selftest.format_table([row])


def test_a_nan_in_any_parameter_is_the_worst_error():
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    wanted = {"a": good, "b": good, "c": good}
    assert worst(wanted, wanted) == 0
    for name in wanted:
        assert math.isnan(worst({**wanted, name: bad}, wanted))


def test_the_command_fails_when_a_bound_is_broken(monkeypatch, capsys):
    rows = [selftest.judge(1, CASE, math.nan, 0.0, 0.5), selftest.judge(1, CASE, 1e-8, 0.0, 0.5)]
    monkeypatch.setattr(selftest, "measure", lambda worlds, show_progress: rows)
    assert selftest.main(["--world", "1"]) == 1
    assert "1 of 2 rows break a bound" in capsys.readouterr().out
    assert selftest.main(["--world", "1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["rows"][0]["gradient"] is None
    assert "gradient is nan" in report["rows"][0]["broken"]


def test_the_command_fails_when_a_rank_does(monkeypatch, capsys, tmp_path):
    def fail(worlds, show_progress):
        raise RankFailedError("rank 1 of 2 failed")

    monkeypatch.setattr(selftest, "measure", fail)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    assert selftest.main([]) == 1
    out = capsys.readouterr().out
    assert "rank 1 of 2 failed" in out
    assert "deepspeed_shm_comm/lock holds up" in out


@pytest.mark.parametrize("worlds", ["0", "two", "1,,2", ""])
def test_a_world_that_is_no_number_of_ranks_is_refused(worlds, capsys):
    with pytest.raises(SystemExit):
        selftest.main(["--world", worlds])
    assert "expected numbers of ranks" in capsys.readouterr().err
