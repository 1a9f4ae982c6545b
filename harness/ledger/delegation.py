"""What torch's ProcessGroup can be asked to do, and which method of the backend below does it.

Releases of torch call the same thing by other names, and bring new ones. What is in neither table
here is not known to be recorded: `unrecorded_operations` says so of the torch that is installed.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

# What our subclass overrides -> the backend's method of the same meaning.
DELEGATED = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "allgather": "allgather",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "allgather_coalesced": "allgather_coalesced",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
    "broadcast": "broadcast",
    "gather": "gather",
    "gather_single": "gather_single",
    "gather_into_tensor": "gather_single",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
    "monitored_barrier": "monitored_barrier",
}
REDUCING = {name for name in DELEGATED if "reduce" in name}
_ONE_BY_ONE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
# What moves no data of its own, in any of torch 2.11 to 2.15.
_NO_OPERATION = {
    "_add_ephemeral_timeout", "_backend_id", "_enable_collectives_timing", "_end_coalescing",
    "_get_backend", "_get_backend_name", "_get_sequence_number_for_group", "_has_hooks", "_id",
    "_pybind11_conduit_v1_", "_register_backend", "_register_on_completion_hook",
    "_set_default_backend", "_set_group_desc", "_set_group_name",
    "_set_sequence_number_for_group", "_start_coalescing", "_wait_for_pending_works", "abort",
    "BackendType", "boxed", "get_backend", "get_group_store", "get_reconfigure_handle",
    "merge_remote_group", "name", "rank", "register_abort_hook", "register_post_hook",
    "register_pre_hook", "set_timeout", "shutdown", "size", "split_group", "unbox",
    "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook",
    "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


def unrecorded_operations() -> set[str]:
    """Methods of this torch's ProcessGroup that may move data and that no ledger shows in full."""
    group = dist.ProcessGroup
    names = {n for n in dir(group) if not n.startswith("__") and callable(getattr(group, n))}
    return names - set(DELEGATED) - _NO_OPERATION


def operations_elsewhere() -> dict[tuple[str, str], int]:
    """(backend, group) -> operations so far, for groups that torch made without our class."""
    held = dist.distributed_c10d._world.pg_map
    foreign: list[tuple[Any, str]] = [
        (pg, backend) for pg, (backend, _) in held.items() if type(pg) is dist.ProcessGroup
    ]
    out = {}
    for pg, backend in foreign:
        if backend == "fake":
            continue  # torch's own, that sends nothing: for dimensions of one rank
        try:
            out[backend, str(pg.group_name)] = pg._get_sequence_number_for_group()
        except RuntimeError:  # it does not count: whether it was used is not known
            out[backend, str(pg.group_name)] = time.monotonic_ns()
    return out


def carry_out(inner: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on the backend below. Returns its work; None where it has none."""
    name = DELEGATED[op]
    if name == "gather_single":
        return _gather_single(inner, *args, **kwargs)
    if name not in _ONE_BY_ONE or hasattr(inner, name):
        return getattr(inner, name)(*args, **kwargs)
    outputs, inputs, *rest = args  # Gloo has no coalesced form
    works = [
        getattr(inner, _ONE_BY_ONE[name])(out, held, *rest, **kwargs)
        for out, held in zip(outputs, inputs, strict=True)
    ]
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _gather_single(inner: Any, output: Any, held: Any, opts: Any) -> Any:
    """Gloo has only the form with one tensor a rank: the parts of one are views of it."""
    root = inner.rank() == opts.rootRank
    parts = [list(output.view(-1).chunk(inner.size()))] if root else []
    return inner.gather(parts, [held.reshape(-1)], opts)
