"""Signals that ask a run to save and end."""

from __future__ import annotations

import signal


class StopSignals:
    """SIGTERM and SIGUSR1, which may reach one rank alone, agreed on by all at the end of a micro-batch.

    Each micro-batch starts one small all-reduce and reads that of the micro-batch before, which has long arrived: a
    signal is answered one micro-batch later, and no rank waits. SIGUSR1, SLURM's warning, may come while the ranks
    still start, and is kept; SIGTERM then ends the process, as there is nothing to save.
    """

    def __init__(self) -> None:
        self.received = 0
        self._group: object = None
        self._pending: tuple | None = None
        self._before = {signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._note)}

    def _note(self, number: int, frame: object) -> None:
        self.received = number

    def begin(self) -> None:
        """The process group stands; a collective."""
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo")  # flags stay on the host, whatever the gradients travel by
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)

    def agreed(self) -> int:
        """The signal that some rank had received at the micro-batch before; 0 for none. The same on every rank."""
        import torch
        import torch.distributed as dist

        asked = self._read()
        if not asked:
            flag = torch.tensor([self.received])
            self._pending = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return asked

    def _read(self) -> int:
        from ruda_ds.comm.lost import naming_lost_ranks

        if self._pending is None:
            return 0
        flag, handle = self._pending
        self._pending = None
        with naming_lost_ranks(None, "the agreement on signals"):
            handle.wait()
        return int(flag)

    def close(self) -> None:
        """Give the signals back; a collective where an answer is still on the way."""
        self._read()
        for number, handler in self._before.items():
            signal.signal(number, handler)
