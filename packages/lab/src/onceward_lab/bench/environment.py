"""The environment of a benchmark run: options, a temporary directory, and one PostgreSQL server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from onceward_testing.servers import RealPostgres


@dataclass
class Environment:
    """Options of the run, and resources that are created on demand."""

    directory: Path
    rounds: int
    seconds: float
    # The size of the largest table in the growth curves; other sizes follow from it.
    rows: int
    # Called with a description of the current step.
    on_step: Callable[[str], None]
    # The sources of another commit, to compare with.
    baseline: Path | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _server: RealPostgres | None = None

    @property
    def server(self) -> RealPostgres:
        """The PostgreSQL server, started on first use."""
        if self._server is None:
            self.on_step("starting PostgreSQL")
            self._server = self._stack.enter_context(RealPostgres())
        return self._server

    def database(self) -> str:
        """Create a PostgreSQL database and return its URL."""
        return self.server.create_database()

    def new_directory(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir()
        return path

    def close(self) -> None:
        self._stack.close()


@contextmanager
def open_environment(
    rounds: int,
    seconds: float,
    rows: int,
    on_step: Callable[[str], None],
    baseline: Path | None = None,
) -> Iterator[Environment]:
    with TemporaryDirectory(prefix="onceward-bench-") as directory:
        environment = Environment(Path(directory), rounds, seconds, rows, on_step, baseline)
        try:
            yield environment
        finally:
            environment.close()
