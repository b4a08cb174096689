"""The address of the one server that an outbox sends to, and whether a proxy stands before it."""

from typing import NamedTuple, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from holdfast.errors import ConfigurationError

__all__ = ["ServerAddress"]

_PORTS = {"http": 80, "https": 443}


class ServerAddress(NamedTuple):
    """Scheme, host and port, and the path in front of every request's."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, server: str) -> Self:
        """Read an address such as ``https://api.example/mobile``, or say why it is none."""
        try:
            url = urlsplit(server)
            host, port = url.hostname, url.port
            # Also what no header or log should carry.
            readable = server.isascii() and server.isprintable() and " " not in server
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the server's address cannot be read: {error}") from None
        if not readable:
            raise ConfigurationError(
                "the server's address has a character that no address has; "
                "write other letters as punycode (xn--…)"
            )
        if url.scheme not in _PORTS or not host:
            raise ConfigurationError("the server's address should be http://… or https://…")
        if url.username is not None or url.query or url.fragment or server.endswith(("?", "#")):
            raise ConfigurationError(
                "the server's address should have no user, password, query or fragment"
            )
        return cls(url.scheme, host, port or _PORTS[url.scheme], url.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """What the ``Host`` header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The address without a slash at its end."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def is_proxied(self) -> bool:
        """Whether the environment wants requests to this server to go through a proxy."""
        proxies = getproxies()
        return bool(proxies.get(self.scheme) or proxies.get("all")) and not proxy_bypass(self.host)
