"""The port that is held for ranks."""

import socket

import torch.distributed as dist
from sumgrad.launch.local.ports import held_port


def test_nobody_who_asks_for_any_port_is_given_a_held_one():
    with held_port() as port:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(300)]
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()


def test_rank_0_listens_at_it_in_the_meantime():
    with held_port() as port:
        for libuv in (True, False):
            store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, use_libuv=libuv)
            store.set("here", "yes")
            assert store.get("here") == b"yes"
            del store


def test_it_is_let_go():
    with held_port() as port:
        pass
    socket.create_server(("127.0.0.1", port)).close()
