"""Settings of sign-in: secrets, keys, issuers and audiences; part of the server's ``Settings``."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, SecretStr, model_validator

from onceward.errors import ConfigurationError

__all__ = ["MIN_SECRET_BYTES", "Secret", "SignInSettings"]

MIN_SECRET_BYTES: Final = 32
_PRODUCTION: Final = frozenset({"prod", "production"})


def _bytes_of(secret: str) -> int:
    return len(secret.encode("utf-8", "surrogatepass"))


def _check_secret_length(secret: SecretStr) -> SecretStr:
    """RFC 7518 §3.2 requires a key at least as long as the hash output."""
    if _bytes_of(secret.get_secret_value()) < MIN_SECRET_BYTES:
        raise ValueError("too short")
    return secret


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part for part in (piece.strip() for piece in (text or "").split(",")) if part)


def _check_names(text: str) -> str:
    if not _split(text):
        raise ValueError("empty")
    return text


Secret = Annotated[SecretStr, AfterValidator(_check_secret_length)]
Names = Annotated[str, AfterValidator(_check_names)]


class SignInSettings(BaseModel):
    """A secret or a JWKS. With neither, a development secret is created."""

    environment: str = Field(
        "development",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="a name of letters, digits, dots, dashes and underscores",
    )
    jwt_secret: Secret | None = Field(
        None,
        description=f"a random text of at least {MIN_SECRET_BYTES} bytes, or several of them "
        "separated by commas",
    )
    jwt_algorithm: Literal["HS256", "RS256", "ES256"] | None = Field(
        None, description="HS256, RS256 or ES256"
    )
    jwks_file: Path | None = Field(None, description="a file with a JWKS")
    jwks_url: str | None = Field(None, description="a URL")
    jwt_issuer: Names | None = Field(
        None, description="the issuer of the tokens, or several separated by commas"
    )
    jwt_audience: Names | None = Field(
        None, description="the audience of the tokens, or several separated by commas"
    )

    @model_validator(mode="after")
    def _check_authentication(self) -> Self:
        sources = [s for s in (self.jwt_secret, self.jwks_file, self.jwks_url) if s is not None]
        if len(sources) > 1:
            raise ConfigurationError(
                "set only one of ONCEWARD_JWT_SECRET, ONCEWARD_JWKS_FILE and ONCEWARD_JWKS_URL"
            )
        if self._has_jwks and self.jwt_algorithm == "HS256":
            raise ConfigurationError(
                "ONCEWARD_JWT_ALGORITHM should be RS256 or ES256 when keys come from a JWKS"
            )
        if not self._has_jwks and self.jwt_algorithm in ("RS256", "ES256"):
            raise ConfigurationError(
                f"ONCEWARD_JWT_ALGORITHM={self.jwt_algorithm} needs ONCEWARD_JWKS_FILE or "
                "ONCEWARD_JWKS_URL"
            )
        missing = [
            variable
            for variable, value in (
                ("ONCEWARD_JWT_ISSUER=https://sign-in.example", self.jwt_issuer),
                ("ONCEWARD_JWT_AUDIENCE=onceward", self.jwt_audience),
            )
            if value is None
        ]
        if self._has_jwks and missing:
            raise ConfigurationError(
                "the keys of a JWKS may sign tokens for other services too: set the issuer and the "
                f"audience that your tokens have, for example {' '.join(missing)}"
            )
        return self

    @property
    def _has_jwks(self) -> bool:
        return self.jwks_file is not None or self.jwks_url is not None

    @property
    def algorithm(self) -> str:
        """The only algorithm that tokens may be signed with."""
        if self.jwt_algorithm is not None:
            return self.jwt_algorithm
        return "RS256" if self._has_jwks else "HS256"

    @property
    def jwt_secrets(self) -> tuple[str, ...]:
        """The configured secrets: all are accepted, the first signs."""
        if self.jwt_secret is None:
            return ()
        whole = self.jwt_secret.get_secret_value()
        parts = tuple(part.strip() for part in whole.split(","))
        if len(parts) == 1 or any(_bytes_of(part) < MIN_SECRET_BYTES for part in parts):
            return (whole,)  # one secret that contains a comma
        # The whole text too: it may be one secret with a comma that other programs sign with.
        return (*parts, whole)

    @property
    def jwt_issuers(self) -> tuple[str, ...]:
        """The accepted issuers; none if every issuer is accepted."""
        return _split(self.jwt_issuer)

    @property
    def jwt_audiences(self) -> tuple[str, ...]:
        """The accepted audiences; none if every audience is accepted."""
        return _split(self.jwt_audience)

    @property
    def needs_development_secret(self) -> bool:
        """True if neither a secret nor a JWKS is set."""
        return self.jwt_secret is None and not self._has_jwks

    @property
    def is_production(self) -> bool:
        """True if ``ONCEWARD_ENVIRONMENT`` is production."""
        return self.environment.lower() in _PRODUCTION

    @property
    def public_secret(self) -> str | None:
        """Say why tokens can be signed by others than the operator; None if they cannot."""
        from onceward.sign_in.jwt_keys import SAMPLE_SECRETS  # noqa: PLC0415 - workers need no JWT

        if self.needs_development_secret:
            return "a development secret"
        if any(secret in SAMPLE_SECRETS for secret in self.jwt_secrets):
            return "a sample secret from the documentation"
        return None

    def check_production(self) -> None:
        """Raise ``ConfigurationError`` for a development or sample secret in production."""
        if self.is_production and (found := self.public_secret):
            raise ConfigurationError(
                f"ONCEWARD_ENVIRONMENT={self.environment} never runs on {found}: set "
                "ONCEWARD_JWT_SECRET to a random text (openssl rand -base64 48), or "
                "ONCEWARD_JWKS_FILE or ONCEWARD_JWKS_URL"
            )
