"""Options for running one model with several processes, on one or more hosts."""

import socket
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from jsparse.cli.options import require


@dataclass(frozen=True)
class HostsOptions:
    """The index of a command among several processes."""

    nnodes: Annotated[
        int,
        Option(
            help="Number of processes, one per host, over whose GPUs the model is spread. "
            "Slurm, Open MPI and indexed jobs of Kubernetes set this and the next three."
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Option(help="Rank of this process; rank 0 serves requests, and the others work for it."),
    ] = 0
    master_addr: Annotated[str | None, Option(help="Name or address of the host of rank 0.")] = None
    master_port: Annotated[int, Option(help="Port on that host for the processes to connect.")] = (
        29500
    )
    headless: Annotated[
        bool,
        Option(
            "--headless",
            help="Serve no requests; always the case for ranks above 0.",
        ),
    ] = False

    def join(self, tensor_parallel_size: int, data_parallel_size: int) -> bool:
        """Joins the processes that run one model; returns whether this one serves requests."""
        nodes, rank, addr = self.nnodes, self.node_rank, self.master_addr
        port, size, several = self.master_port, tensor_parallel_size, nodes > 1
        require("--nnodes", nodes, nodes >= 1, "at least 1")
        require("--node-rank", rank, 0 <= rank < nodes, f"from 0 to {nodes - 1}")
        require("--master-port", port, 1 <= port <= 65535, "from 1 to 65535")
        if not several:
            require("--master-addr", addr, addr is None, "given with --nnodes above 1")
        else:
            where = "the name or address of the host with rank 0"
            require("--master-addr", addr, addr is not None, where)
            require("--tensor-parallel-size", size, size % nodes == 0, f"a multiple of {nodes}")
            one = "1 where --nnodes is above 1"
            require("--data-parallel-size", data_parallel_size, data_parallel_size == 1, one)
        headless = self.headless and rank == 0
        require("--headless", "", not headless, "given with --node-rank above 0")
        if size == 1:
            return True
        from jsparse.machine import processes

        if several:
            assert addr is not None
            if rank == 0:
                require("--master-port", port, _is_free(port), "free on this host")
            processes.join(nodes, rank, addr, port)
        elif data_parallel_size == 1:
            processes.join_launched()
        return processes.index() == 0


def _is_free(port: int) -> bool:
    """Returns whether a process can listen on a port; jax would crash."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
