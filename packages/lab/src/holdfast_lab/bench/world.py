"""Where the benchmarks run: one PostgreSQL, started when first asked for, and one folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.testing.servers import RealPostgres


@dataclass
class World:
    folder: Path
    rounds: int
    seconds: float
    # The largest table of the growth curves; other sizes follow from it.
    rows: int
    say: Callable[[str], None]
    _stack: ExitStack = field(default_factory=ExitStack)
    _server: RealPostgres | None = None

    @property
    def server(self) -> RealPostgres:
        if self._server is None:
            self.say("starting PostgreSQL")
            self._server = self._stack.enter_context(RealPostgres())
        return self._server

    def database(self) -> str:
        return self.server.create_database()

    def new_folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path

    def close(self) -> None:
        self._stack.close()


@contextmanager
def a_world(rounds: int, seconds: float, rows: int, say: Callable[[str], None]) -> Iterator[World]:
    with TemporaryDirectory(prefix="holdfast-bench-") as folder:
        world = World(Path(folder), rounds, seconds, rows, say)
        try:
            yield world
        finally:
            world.close()
