"""Lets a command be one of several processes, on as many hosts, that run one model together."""

import socket
from typing import Annotated

from typer import Option

from jsparse.cli.options import require

NnodesOption = Annotated[
    int,
    Option(
        help="Number of processes, on as many hosts, whose GPUs the model is spread over. Under "
        "Slurm, Open MPI or in an indexed job of Kubernetes this and the next three are found."
    ),
]
NodeRankOption = Annotated[
    int, Option(help="Which of these this one is; 0 answers requests, and the others work for it.")
]
MasterAddrOption = Annotated[
    str | None, Option(help="Name or address of the host of the process with rank 0.")
]
MasterPortOption = Annotated[int, Option(help="Port at which processes meet there.")]
HeadlessOption = Annotated[
    bool,
    Option(
        "--headless", help="Answer no requests, as processes with a rank above 0 do in any case."
    ),
]


def join(
    tensor_parallel_size: int,
    data_parallel_size: int,
    *,
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int,
    headless: bool,
) -> bool:
    """Joins the processes that run one model; returns whether this one answers requests.

    Raises:
        ValueError: an option is out of its range, or does not go with the others.
    """
    several = nnodes > 1
    require("--nnodes", nnodes, nnodes >= 1, "at least 1")
    require("--node-rank", node_rank, 0 <= node_rank < nnodes, f"from 0 to {nnodes - 1}")
    require("--master-port", master_port, 1 <= master_port <= 65535, "from 1 to 65535")
    if not several:
        alone = "given with --nnodes above 1"
        require("--master-addr", master_addr, master_addr is None, alone)
    else:
        where = "the name or address of the host with rank 0"
        require("--master-addr", master_addr, master_addr is not None, where)
        size = tensor_parallel_size
        require("--tensor-parallel-size", size, size % nnodes == 0, f"a multiple of {nnodes}")
        one = "1 where --nnodes is above 1"
        require("--data-parallel-size", data_parallel_size, data_parallel_size == 1, one)
    require("--headless", "", not headless or node_rank > 0, "given with --node-rank above 0")
    if tensor_parallel_size == 1:
        return True
    from jsparse.machine import processes

    if several:
        assert master_addr is not None
        if node_rank == 0:
            require("--master-port", master_port, _is_free(master_port), "free on this host")
        processes.join(nnodes, node_rank, master_addr, master_port)
    elif data_parallel_size == 1:
        processes.join_launched()
    return processes.index() == 0


def _is_free(port: int) -> bool:
    """Returns whether a process may listen at a port; jax would crash."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
