"""A run that is saved at any micro-batch and goes on in fresh processes is the run that never stopped, to the bit."""

import pytest
from checkpoint_helpers import MICROBATCHES, differing, end, make, microbatch, run, state

import ruda_ds
from ruda_ds.cli.ranks import run_ranks

WINDOWS = 4  # one before the saves, then three


def uninterrupted(folder, dtype, stage, prefix, zero):
    """Reports and states of a run that saves after each micro-batch of its second window; and what saving changed."""
    engine = make(dtype, stage, prefix, zero_optimization=zero, zero_force_ds_cpu_optimizer=False)
    reports = run(engine, (0, 0), 1)
    changed = []
    for number in range(MICROBATCHES + 1):
        before = state(engine)
        ruda_ds.save_checkpoint(engine, folder, tag=f"cut{number}", client_state={"cut": number})
        changed += differing(state(engine), before)
        if number < MICROBATCHES:
            microbatch(engine, 1, number)
    reports.append(end(engine))
    reports += run(engine, (2, 0), WINDOWS)
    return reports, state(engine), changed


def resumed(folder, dtype, stage, prefix, zero, cut):
    """The same from a tag, in an engine whose weights were others, the frozen one's too."""
    engine = make(dtype, stage, prefix, other=True, zero_optimization=zero, zero_force_ds_cpu_optimizer=False)
    _, client = ruda_ds.load_checkpoint(engine, folder, tag=f"cut{cut}")
    assert client == {"cut": cut}
    assert engine.accumulator.state.microbatches == cut
    return run(engine, (1, cut), WINDOWS), state(engine)


@pytest.mark.parametrize(
    ("dtype", "stage", "world", "prefix", "zero", "cuts"),
    [
        ("float32", 3, 2, [0, 3, 8], {}, range(5)),
        ("bfloat16", 3, 2, [0, 3, 8], {}, range(5)),
        ("float32", 3, 2, [0, 0, 8], {}, [2]),
        ("bfloat16", 3, 2, [0, 3, 8], {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 900}, [1]),
        ("bfloat16", 3, 4, [0, 3, 8], {}, [3]),
        ("float32", 2, 2, [0, 8], {}, [1, 4]),
        ("bfloat16", 2, 2, [0, 3, 8], {}, [2]),
        ("float32", 1, 2, [0, 5, 8], {}, [3]),
    ],
)
def test_fresh_processes_go_on_bit_for_bit(tmp_path, dtype, stage, world, prefix, zero, cuts):
    whole = run_ranks(uninterrupted, world, str(tmp_path), dtype, stage, prefix, zero)
    assert [changed for *_, changed in whole] == [[]] * world
    assert (tmp_path / "latest").read_text() == "cut4"
    for cut in cuts:
        results = run_ranks(resumed, world, str(tmp_path), dtype, stage, prefix, zero, cut)
        for rank, (reports, final) in enumerate(results):
            assert reports == whole[rank][0][1:], f"cut {cut}"
            assert differing(final, whole[rank][1]) == [], f"cut {cut}"
