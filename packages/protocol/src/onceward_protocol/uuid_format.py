"""Format random or hashed digits as a UUID (RFC 9562)."""

__all__ = ["format_uuid"]


def format_uuid(digits: str, version: int) -> str:
    """Return the first 32 hexadecimal digits as a UUID, with its version and variant set."""
    variant = "89ab"[int(digits[16], 16) & 3]
    return (
        f"{digits[:8]}-{digits[8:12]}-{version}{digits[13:16]}"
        f"-{variant}{digits[17:20]}-{digits[20:32]}"
    )
