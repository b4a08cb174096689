"""Parsing and validation of the Idempotency-Key header."""

import pytest

from onceward_protocol.errors import KeyInvalidError
from onceward_protocol.keys import KeyFormat, check_key, parse_key

UUID = "5f3c1e9a-7b2d-4c6e-9f10-2a3b4c5d6e7f"
OTHER = "00000000-0000-4000-8000-000000000000"
BOTH = list(KeyFormat)


def test_missing_header_is_no_key():
    assert parse_key([], KeyFormat.UUID4) is None
    assert parse_key([], KeyFormat.OPAQUE) is None


@pytest.mark.parametrize("key_format", BOTH)
@pytest.mark.parametrize(
    "value",
    [UUID, f'"{UUID}"', f"  {UUID}\t", f' "{UUID}" '],
    ids=["bare", "quoted", "ows", "both"],
)
def test_token_and_quoted_string_are_the_same_key(value, key_format):
    assert parse_key([value.encode()], key_format) == UUID


@pytest.mark.parametrize("key_format", BOTH)
def test_repeated_header_with_the_same_key_is_accepted(key_format):
    values = [UUID.encode(), f'"{UUID}"'.encode(), f" {UUID}".encode()]
    assert parse_key(values, key_format) == UUID


@pytest.mark.parametrize("key_format", BOTH)
def test_two_different_keys_are_rejected(key_format):
    with pytest.raises(KeyInvalidError, match="two different"):
        parse_key([UUID.encode(), OTHER.encode()], key_format)


@pytest.mark.parametrize("key_format", BOTH)
def test_invalid_key_next_to_a_valid_one_is_rejected(key_format):
    with pytest.raises(KeyInvalidError):
        parse_key([UUID.encode(), b""], key_format)


@pytest.mark.parametrize("key_format", BOTH)
@pytest.mark.parametrize(
    "value",
    [f"{UUID}, {OTHER}", f"{UUID}, {UUID}", f'"{UUID}", "{OTHER}"', f'"{UUID}","{UUID}"'],
)
def test_comma_separated_keys_are_rejected(value, key_format):
    with pytest.raises(KeyInvalidError):
        parse_key([value.encode()], key_format)


def test_opaque_key_may_contain_a_comma():
    assert parse_key([b"a,b"], KeyFormat.OPAQUE) == "a,b"


@pytest.mark.parametrize("key_format", BOTH)
@pytest.mark.parametrize("value", [b"", b"   ", b"\t", b'""', b'" "'])
def test_empty_value_is_rejected(value, key_format):
    with pytest.raises(KeyInvalidError):
        parse_key([value], key_format)


@pytest.mark.parametrize(
    "value",
    [
        b'"',
        b'"abc',
        b'"abc"def',
        b'"abc" ; q=1',
        b'"abc";',
        b'"abc";Q=1',
        b'"abc";q=',
        b'"abc";q="',
        b'"a"b"',
        rb'"a\b"',
        rb'"abc\"',
        b'"a\x7fb"',
        b'"a\tb"',
        b'"caf\xe9"',
    ],
)
def test_malformed_quoted_string_is_rejected(value):
    with pytest.raises(KeyInvalidError, match="quoted"):
        parse_key([value], KeyFormat.OPAQUE)


@pytest.mark.parametrize("key_format", BOTH)
@pytest.mark.parametrize("parameters", [";q=1", "; a;b=?0", ';a="x;y";b=:aGk=:;c=to/ken;d=-1.5'])
def test_parameters_after_a_quoted_key_are_ignored(parameters, key_format):
    assert parse_key([f'"{UUID}"{parameters}'.encode()], key_format) == UUID


def test_semicolon_of_a_bare_opaque_key_is_part_of_it():
    assert parse_key([b"a;b=1"], KeyFormat.OPAQUE) == "a;b=1"
    with pytest.raises(KeyInvalidError, match="two different"):
        parse_key([b"a;b=1", b'"a";b=1'], KeyFormat.OPAQUE)


def test_escapes_in_a_quoted_string_are_decoded():
    assert parse_key([rb'"a\"b\\c"'], KeyFormat.OPAQUE) == r'a"b\c'


def test_backslash_in_a_token_is_kept():
    assert parse_key([rb"a\\b"], KeyFormat.OPAQUE) == r"a\\b"


def test_opaque_key_with_a_space_is_rejected():
    with pytest.raises(KeyInvalidError, match="visible ASCII"):
        parse_key([b'"a b"'], KeyFormat.OPAQUE)


@pytest.mark.parametrize("variant", "89ab")
def test_variants_of_a_version_4_uuid_are_accepted(variant):
    key = f"5f3c1e9a-7b2d-4c6e-{variant}f10-2a3b4c5d6e7f"
    assert check_key(key, KeyFormat.UUID4) == key


@pytest.mark.parametrize(
    "key",
    [
        UUID.upper(),
        UUID[:-1] + "F",
        UUID.replace("-", ""),
        f"{{{UUID}}}",
        f"urn:uuid:{UUID}",
        UUID[:-1],
        UUID + "0",
        UUID + "\n",
        "\n" + UUID,
        UUID.replace("-4c6e", "-1c6e"),
        UUID.replace("-4c6e", "-7c6e"),
        UUID.replace("-9f10", "-7f10"),
        UUID.replace("-9f10", "-cf10"),
        "00000000-0000-0000-0000-000000000000",
        UUID.replace("5", "\u0665"),
        UUID.replace("5", "\uff15"),
        "",
        "abc",
    ],
)
def test_anything_but_a_lowercase_version_4_uuid_is_rejected(key):
    with pytest.raises(KeyInvalidError, match="lowercase UUID version 4"):
        check_key(key, KeyFormat.UUID4)


@pytest.mark.parametrize("key", ["!", "~", "a" * 128, UUID, UUID.upper(), 'x"y', "order:17/a"])
def test_visible_ascii_up_to_128_characters_is_an_opaque_key(key):
    assert check_key(key, KeyFormat.OPAQUE) == key
    assert parse_key([key.encode()], KeyFormat.OPAQUE) == key


@pytest.mark.parametrize("key", ["", "a" * 129, "a b", "a\n", "\x7f", "caf\u00e9", "a\x00b", "\t"])
def test_other_opaque_keys_are_rejected(key):
    with pytest.raises(KeyInvalidError, match="1 to 128 visible ASCII"):
        check_key(key, KeyFormat.OPAQUE)


@pytest.mark.parametrize("key_format", BOTH)
@pytest.mark.parametrize("value", [b"s3cret key", b'"s3cret', b"s3cret\xff"])
def test_error_is_one_line_without_the_key(value, key_format):
    with pytest.raises(KeyInvalidError) as caught:
        parse_key([value], key_format)
    assert "s3cret" not in repr(caught.value)
    assert "\n" not in caught.value.message
    assert caught.value.details == {}
