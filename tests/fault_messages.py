"""What the surviving ranks say, by what happens to another one: the tests demand it, and the README quotes it."""

RANK = r"rank \d+ \(host [\w.-]+\)"
SEEN = r"rank \d+ \(host [\w.-]+, last seen in {}\)"
CALL = r"to the roll call that rank \d+ made in [a-z ]+"
SAYS = {
    "raises": rf"{RANK} failed: ValueError: bad sample 17",
    "killed": rf"no answer from {SEEN.format('[a-z ]+')} {CALL}",
    "exits": rf"no answer from {SEEN.format('an orderly end')} {CALL}",
    "stopped": rf"{RANK} has given no sign of life for \d+ s; it was in [a-z ]+: killed, stopped, or its machine or "
    "network hangs",
    "rank 0 stopped": rf"rank 0, which keeps the rendezvous store, has not answered {RANK} for \d+ s: it was killed or "
    "stopped, or its machine or the network to it hangs",
    "loops": rf"{RANK} has waited \d+ s in a backward \(number \d+\); ranks that have not come: \[1\]. {RANK} is in "
    "its own code",
    "bad input": r"expert exchange: rank \d+ of the expert-parallel group: its input does not fit the layer \(dtype, "
    r"width or device\)",
    "other window": r"ranks disagree on [\w ]+: rank \d+ holds \d+, the others hold \d+; no rank has stepped and the "
    "window is unchanged",
}
