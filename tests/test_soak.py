"""Training with faults at random times, for two minutes; `soak.py` alone does it for as long as asked."""

from soak import soak


def test_two_minutes_with_faults_change_no_bit(tmp_path):
    # A stopped rank is noticed after 10 s and a start takes 6: sooner, most faults would hit the start (test_start.py).
    found = soak(tmp_path, ranks=4, steps=160, seconds=50, every=(17, 24), seed=3)
    assert found["faults"], "no fault came: the run was over before"
    assert found["tensors_equal"] > 0
    assert found["lives_watched"][0] == 4
    assert max(found["file_growth"]) <= 2
    assert max(found["memory_growth_mib"]) <= 16
