"""Connects the processes that run one model together, on one host or several.

XLA sends tensors between devices. All other messages go over one TCP connection per process, to
process 0, which plans (jsparse.machine.peers).
"""

import atexit
import functools
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from jsparse.machine.peers import NOTICED, Peer

# seconds within which processes must connect to each other
MEETING = 300
# seconds until XLA ends this process with a stack trace; a Peer ends it sooner, with one line
XLA_NOTICED = 4 * NOTICED
_ADDRESS_BYTES = 1024


# the address where processes connect, if it was given
_meeting: str | None = None


def join(nnodes: int, node_rank: int, master_addr: str, master_port: int) -> None:
    """Makes this process one of `nnodes`, which connect at the address of the one with rank 0."""
    global _meeting
    _meeting = master_addr
    _initialize(f"{master_addr}:{master_port}", nnodes, node_rank, how="deactivate")


def join_launched() -> None:
    """Makes this process one of those that Slurm, Open MPI or Kubernetes has started, if any."""
    known = os.environ
    by_slurm = "SLURM_STEP_NODELIST" in known and int(known.get("SLURM_NTASKS", 1)) > 1
    by_mpi = int(known.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    by_kubernetes = "KUBERNETES_SERVICE_HOST" in known and "JOB_COMPLETION_INDEX" in known
    if by_slurm or by_mpi or by_kubernetes:
        _initialize()


def _initialize(*where: Any, how: str | None = None) -> None:
    # the service would catch SIGTERM, for training
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        *where,
        cluster_detection_method=how,
        initialization_timeout=MEETING,
        heartbeat_timeout_seconds=XLA_NOTICED,
        shutdown_timeout_seconds=NOTICED,
    )
    link()


def index() -> int:
    """Returns the number of this process among those that have joined; 0 if none has."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


class Link:
    """The connections of this process: to process 0, or from process 0 to all others.

    Attributes:
        works: whether the processes run an engine, which they do until they exit.
        failed: whether this process has ended the others with an error.
    """

    def __init__(self, index: int, peers: Sequence[Peer]) -> None:
        self.index, self.peers = index, peers
        self.works = self.failed = False

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Returns the values of all processes; ValueError: another one gathers something else."""
        message = {what: value}
        if self.index:
            (leader,) = self.peers
            leader.send(message)
            return _about(what, leader.receive()[0], leader.name)
        values = [value, *(_about(what, peer.receive()[0], peer.name) for peer in self.peers)]
        for peer in self.peers:
            peer.send({what: values})
        return values

    def send(self, value: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        for peer in self.peers:
            peer.send(value, arrays)

    def messages(self) -> Iterator[tuple[Any, list[np.ndarray]]]:
        """Yields the messages of process 0, until it ends."""
        (leader,) = self.peers
        while "end" not in (message := leader.receive(to_the_end=True))[0]:
            yield message

    def end(self, error: BaseException | None = None) -> None:
        """Ends the other processes; `error`, if any, is why this process or its engine ends."""
        self.failed = self.failed or error is not None
        for peer in self.peers:
            if not peer.ended:
                peer.ended = True  # expected, so it is not reported as lost
                peer.send({"end": True} if error is None else {"failed": repr(error)}, last=True)


def _end(own: Link) -> None:
    """Runs when this process exits, before jax waits for the others, which may have ended."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_exc", None)
    early = own.index > 0 and not own.peers[0].ended  # process 0 still needs this one
    if early and error is None:
        error = RuntimeError("it ended before process 0, or could not start")
    failed = own.failed or error is not None
    own.end(error)
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _about(what: str, message: Any, name: str) -> Any:
    if what not in message:
        raise ValueError(
            f"{name} is at {sorted(message)}, this one at {what!r}: must have been started with "
            "the same arguments"
        )
    return message[what]


@functools.cache
def link() -> Link | None:
    """Connects the processes, if there are several; all must call it at the same point."""
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return None
    # autotuning is collective: a process with a cached program would not take part
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or jax would continue to use an open cache
    owners = [device.process_index for device in jax.devices()]
    devices = [owners.count(nth) for nth in range(count)]
    if len({*devices}) > 1:
        raise ValueError(f"processes have {devices} devices: all must have the same number")
    listening, secret = None, secrets.token_hex(16)
    packet = np.zeros(_ADDRESS_BYTES, np.uint8)
    if index == 0:
        listening = socket.create_server(("", 0), backlog=count)
        address = [_own_addresses(), listening.getsockname()[1], secret]
        text = json.dumps(address).encode()
        packet[: len(text)] = np.frombuffer(text, np.uint8)
    packet = multihost_utils.broadcast_one_to_all(packet)
    hosts, port, secret = json.loads(packet.tobytes().rstrip(b"\0"))
    if listening is None:
        peers = [Peer(_connected(hosts, port, _greeting(secret, index)), "process 0")]
    else:
        with listening:
            peers = _accepted(listening, secret, count - 1)
    made = Link(index, peers)
    atexit.register(_end, made)
    return made


def _own_addresses() -> list[str]:
    """Returns names under which other hosts may reach this one, the likeliest first."""
    found = [] if _meeting is None else [_meeting]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing
        found.append(probe.getsockname()[0])
    return [*found, socket.gethostname(), "127.0.0.1"]


def _greeting(secret: str, index: int) -> bytes:
    """Returns the first message of process `index`, of constant length."""
    return f"{secret}{index:8d}".encode()


def _connected(hosts: Sequence[str], port: int, greeting: bytes) -> socket.socket:
    for host in hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=5)
            connection.sendall(greeting)
            connection.settimeout(MEETING)  # other processes may be accepted first
            if connection.recv(1) == b"+":
                return connection
    raise ValueError(f"process 0 cannot be reached at port {port} of any of {hosts}")


def _accepted(listening: socket.socket, secret: str, count: int) -> list[Peer]:
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + MEETING
    while len(found) < count:
        listening.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, (host, *_) = listening.accept()
        except TimeoutError:
            raise ValueError(
                f"{count - len(found)} of {count} other processes have not connected to this one "
                f"within {MEETING} seconds"
            ) from None
        with suppress(OSError):
            given = _greeted(connection, len(_greeting(secret, 0)))
            for nth in range(1, count + 1):
                if nth not in found and secrets.compare_digest(given, _greeting(secret, nth)):
                    connection.sendall(b"+")
                    found[nth] = Peer(connection, f"process {nth} on {host}")
        if all(peer.connection is not connection for peer in found.values()):
            connection.close()
    return [found[nth] for nth in sorted(found)]


def _greeted(connection: socket.socket, size: int) -> bytes:
    """Returns `size` bytes, or those that arrived within two seconds."""
    given, deadline = b"", time.monotonic() + 2
    while len(given) < size and (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        if not (part := connection.recv(size - len(given))):
            break
        given += part
    return given
