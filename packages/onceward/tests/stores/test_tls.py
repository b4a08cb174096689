"""URLs with TLS: the certificate is verified, for PostgreSQL on every driver and for Redis.

The servers of the test wheels are built without TLS, so a proxy in front of the real ones ends it.
"""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from onceward.errors import StoreError, UsageError
from onceward.ports import Store
from onceward.stores.postgres import PostgresStore
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.redis import RedisRecords
from onceward_testing.samples import NOW, a_record, commit
from onceward_testing.servers import RealPostgres, RealRedis

# What a client of PostgreSQL sends before TLS: the length, and the code of SSLRequest.
SSL_REQUEST = bytes((0, 0, 0, 8, 4, 210, 22, 47))


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for 127.0.0.1, which is its own authority."""

    path: Path
    context: ssl.SSLContext


def new_certificate(folder: Path, name: str) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key_path)
    return Certificate(path, context)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def tls_proxy(port: int, tls: ssl.SSLContext, *, is_postgres: bool) -> AsyncIterator[int]:
    """Accept TLS only, and pass the bytes on to a server on ``port``. Returns the proxy's port."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_postgres:
            if await reader.readexactly(8) != SSL_REQUEST:  # a client without TLS
                writer.close()
                return
            writer.write(b"S")
        try:
            await writer.start_tls(tls)
        except (ssl.SSLError, OSError):  # the client does not accept the certificate
            writer.close()
            return
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize("new_store", [PostgresStore, PsycopgStore, PsycopgSyncStore])
async def test_postgresql_url_with_sslmode_verifies_the_certificate(
    new_store: Callable[[str], Store],
    clean_postgres_url: str,
    postgres: RealPostgres,
    tmp_path: Path,
) -> None:
    good, other = (new_certificate(tmp_path, name) for name in ("good", "other"))
    async with tls_proxy(postgres.port, good.context, is_postgres=True) as port:
        url = clean_postgres_url.replace(f":{postgres.port}/", f":{port}/")
        store = new_store(f"{url}?sslmode=verify-full&sslrootcert={good.path}")
        await store.open()
        await commit(store, a_record())
        await store.close()

        for options in (f"sslmode=verify-full&sslrootcert={other.path}", "sslmode=disable"):
            refused = new_store(f"{url}?{options}")
            with pytest.raises((StoreError, UsageError)):
                await refused.open()


async def test_rediss_url_verifies_the_certificate(redis_server: RealRedis, tmp_path: Path) -> None:
    good, other = (new_certificate(tmp_path, name) for name in ("good", "other"))

    async def secret() -> bytes:
        return b"secret"

    def records(port: int, trusted: Certificate) -> RedisRecords:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={trusted.path}"
        return RedisRecords(url, environment="tls", secret=secret, timeout_seconds=2)

    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(
            tls_proxy(redis_server.port, good.context, is_postgres=False)
        )
        cache, refused = records(port, good), records(port, other)
        stack.push_async_callback(cache.close)
        stack.push_async_callback(refused.close)
        await cache.put(a_record(), NOW)
        assert await cache.get(a_record().id, NOW) == a_record()
        assert await refused.get(a_record().id, NOW) is None, "not connected, so a miss"
