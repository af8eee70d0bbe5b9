"""Collects the /live data of replicas, once for all connected clients."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from jsparse.server.live import INTERVAL
from jsparse.server.replicas.replica import Replica


class Pictures:
    """The newest /live data of replicas, by number, collected while a client is connected."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.newest: dict[int, dict[str, Any]] = {}
        self._replicas, self._looking = replicas, 0
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def shown(self) -> AsyncGenerator[None]:
        """Keeps `newest` up to date in the meantime."""
        self._looking += 1
        if self._looking == 1:
            self._tasks = [asyncio.create_task(self._look(each)) for each in self._replicas]
        try:
            yield
        finally:
            self._looking -= 1
            if not self._looking:
                tasks, self._tasks = self._tasks, []
                self.newest.clear()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, replica: Replica) -> None:
        while True:
            async for picture in replica.pictures():
                self.newest[replica.nth] = picture
            self.newest.pop(replica.nth, None)
            await asyncio.sleep(INTERVAL)
