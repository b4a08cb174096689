"""Which texts a database can store: no NUL, which PostgreSQL refuses, and no lone surrogates."""

from onceward.errors import BodyInvalidError

__all__ = ["UNSTORABLE", "check_storable"]

UNSTORABLE = (
    "the request contains a character that a database cannot store: NUL (U+0000) or a lone "
    "surrogate"
)


def check_storable(*texts: str) -> None:
    """Raise ``BodyInvalidError`` for a text that a database cannot store.

    Before any statement, so that such a text is an error of its caller, not one of the database.
    """
    for text in texts:
        if "\x00" in text:
            raise BodyInvalidError(UNSTORABLE)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise BodyInvalidError(UNSTORABLE) from None
