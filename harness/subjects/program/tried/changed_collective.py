"""What a step reduces at one line over ranks, done otherwise there: not at all, averaged, or over
the ranks of another axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sumgrad.ledger.backends import tensors_in
from sumgrad.ledger.process_group import Call, RecordingProcessGroup
from sumgrad.record.trial import Change


class ChangedCollective:
    """An interposer of the ledger's. group: over which it is to reduce."""

    def __init__(self, change: Change, group: dist.ProcessGroup) -> None:
        self._change, self._group = change, group

    def __call__(self, call: Call) -> Any:
        change = self._change
        own = "by" in call.event  # DDP's
        if own or (call.event["site"], call.op) not in change.places:
            return call.issue()
        if change.way == "over":
            assert isinstance(self._group, RecordingProcessGroup)
            return self._group.issue(call.op, call.args, call.kwargs, call.event)
        if change.way == "unsummed":
            copies = [[t.detach().clone() for t in tensors_in(call.args[:1])], *call.args[1:]]
            return call.issue(*copies)
        work = call.issue()
        work.wait()
        with torch.no_grad():
            for tensor in tensors_in(call.args[:1]):
                tensor.div_(call.group.size())
        return work
