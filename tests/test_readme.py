"""What the README says of messages is what they say."""

import re
from pathlib import Path

import pytest
from fault_messages import SAYS

from ruda_ds.comm.exchange import REASONS, Status
from ruda_ds.errors import ExpertProtocolError, RankDisagreementError

TABLE = (Path(__file__).resolve().parent.parent / "README.md").read_text().partition("### When a rank fails")[2]


@pytest.mark.parametrize("what", SAYS)
def test_the_table_of_faults_quotes_what_the_tests_demand(what):
    assert re.search(SAYS[what], TABLE), SAYS[what]


def test_the_messages_of_exceptions():
    """Those of the others are seen by test_watchdog."""
    assert re.fullmatch(SAYS["bad input"], str(ExpertProtocolError(1, REASONS[Status.BAD_INPUT])))
    assert re.fullmatch(SAYS["other window"], str(RankDisagreementError("expert exchanges", 1, 6, 4)))
