"""A TCP proxy in front of PostgreSQL that loses the response to one statement."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit


class LosesTheAnswerTo:
    """Breaks right after the server has responded to one statement, or before it has got it."""

    def __init__(
        self,
        statement: bytes,
        url: str,
        *,
        after: bytes = b"INSERT INTO t",
        is_delivered: bool = True,
    ) -> None:
        """Migrations commit, too: the response to lose follows a statement with ``after``."""
        self._statement = statement
        self._after = after
        self._is_delivered = is_delivered
        self._url = urlsplit(url)
        self._writers: list[asyncio.StreamWriter] = []
        # How many connections were broken.
        self.cuts = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return self._url._replace(netloc=f"postgres@127.0.0.1:{port}").geturl()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _carry(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        server, there = await asyncio.open_connection("127.0.0.1", self._url.port)
        self._writers += [back, there]
        wrote = is_last = False

        async def responses() -> None:
            while (data := await server.read(65536)) and not is_last:
                back.write(data)
            back.close()

        responding = asyncio.create_task(responses())
        with suppress(ConnectionError):
            while data := await client.read(65536):
                wrote = wrote or self._after in data
                if not is_last and wrote and self._statement in data:
                    is_last = True
                    self.cuts += 1
                if is_last and not self._is_delivered:
                    break
                there.write(data)
        there.close()
        await responding
