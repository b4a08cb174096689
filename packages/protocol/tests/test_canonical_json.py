"""Canonical JSON: golden cases, number format, rejected input."""

import hashlib
import json
import struct
import sys
import time
from pathlib import Path

import pytest

from onceward_protocol import fingerprint as canonical_json_module
from onceward_protocol.errors import BodyInvalidError
from onceward_protocol.fingerprint import canonical_json

GOLDEN = json.loads(
    (Path(__file__).parent / "fixtures" / "golden_hashes.json").read_text(encoding="utf-8")
)


def named(cases):
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", named(GOLDEN["cases"]))
def test_golden_case_has_its_canonical_form_and_hash(case):
    out = canonical_json(case["json"].encode())
    assert out == case["canonical"].encode()
    assert hashlib.sha256(out).hexdigest() == case["sha256"]


@pytest.mark.parametrize("case", named(GOLDEN["refused"]))
def test_ambiguous_json_is_rejected_with_one_line(case):
    with pytest.raises(BodyInvalidError) as caught:
        canonical_json(case["json"].encode())
    assert caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"),
        ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_numbers_of_rfc_8785_appendix_b(bits, text):
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(f"{number:.17e}".encode()) == text.encode()
    assert canonical_json(f'{{"n":[{number:.25e}]}}'.encode()) == f'{{"n":[{text}]}}'.encode()


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        ("1.0", "1"),
        ("1e3", "1000"),
        ("1E30", "1e+30"),
        ("4.50", "4.5"),
        ("2e-3", "0.002"),
        ("1e-27", "1e-27"),
        ("-0.0", "0"),
        ("-0", "0"),
        ("1e21", "1e+21"),
        ("1e16", "10000000000000000"),
        ("1e15", "1000000000000000"),
        ("123456789012345680000.0", "123456789012345680000"),
        ("1e-7", "1e-7"),
        ("0.0000001", "1e-7"),
        ("-0.0000001", "-1e-7"),
        ("0.000001", "0.000001"),
        ("0.00001", "0.00001"),
        ("10.0000005", "10.0000005"),
        ("999999999999.999", "999999999999.999"),
        ("9.767254256254973", "9.767254256254972"),
        ("-99999999999.999", "-99999999999.999"),
        ("0.1000000000000000055511151231257827", "0.1"),
        ("1.00000000000000000000000001", "1"),
        ("100", "100"),
        ("-9223372036854775809", "-9223372036854775809"),
        ("18446744073709551616", "18446744073709551616"),
    ],
)
@pytest.mark.parametrize("beside", ["1", "2.5", "5.0", "1e30", '"1.0,"'])
def test_number_format_does_not_depend_on_neighbours(literal, text, beside):
    alone = canonical_json(beside.encode()).decode()
    assert canonical_json(literal.encode()) == text.encode()
    assert canonical_json(f"[{literal},{beside}]".encode()) == f"[{text},{alone}]".encode()


def test_integers_that_share_a_double_stay_different():
    assert canonical_json(b"9007199254740993") != canonical_json(b"9007199254740992")


def test_integer_of_4300_digits_is_exact():
    digits = b"7" * 4300
    assert canonical_json(digits) == digits


@pytest.mark.parametrize("text", [b"7" * 4301, b'{"n":[-' + b"7" * 4301 + b"]}"])
def test_longer_integer_is_rejected_with_the_limit(text):
    with pytest.raises(BodyInvalidError, match="4300"):
        canonical_json(text)


@pytest.mark.parametrize("literal", ["1e309", "-1e309", "1e400", "9" * 400 + ".0", "1.0e999999999"])
@pytest.mark.parametrize("frame", ["%s", '{"a":[1.0,%s]}', '{"a":[2.5,%s]}'])
def test_number_too_large_for_a_double_is_rejected(literal, frame):
    with pytest.raises(BodyInvalidError, match="too large for a double"):
        canonical_json((frame % literal).encode())


@pytest.mark.parametrize(
    "text",
    [
        b'"\xff"',
        b'{"\xff":1}',
        b'"\xc0\x80"',
        b'"\xe2\x82"',
        b'"\xed\xa0\x80"',
        b'{"a":{"\xed\xa0\x80":1}}',
        b'"\xf4\x90\x80\x80"',
        b'["plain", "caf\xe9"]',
    ],
)
def test_invalid_utf_8_is_rejected(text):
    with pytest.raises(BodyInvalidError, match="UTF-8"):
        canonical_json(text)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_in_another_encoding_is_rejected(encoding):
    with pytest.raises(BodyInvalidError):
        canonical_json('{"a":1}'.encode(encoding))


@pytest.mark.parametrize(
    "text",
    [
        r'"\ud800"',
        r'"\ud800x"',
        r'"\ud800 and a good deal of text after it"',
        r'"\udc00"',
        r'"\ud800\ud800"',
        r'"\ud800\u0041"',
        r'"\ud83d\\ude00"',
        r'"\uD83D\uD83D\uDE00"',
        r'{"a":{"\ud800":1}}',
        r'{"a":"\ud83d\ude00\ud83d"}',
    ],
)
def test_lone_surrogate_is_rejected_by_name(text):
    with pytest.raises(BodyInvalidError, match="surrogate pair"):
        canonical_json(text.encode())


def test_escaped_backslash_before_u_is_not_a_surrogate():
    assert canonical_json(rb'"\\ud800"') == rb'"\\ud800"'
    with pytest.raises(BodyInvalidError, match="ends too early"):
        canonical_json(rb'["\\ud800"')


def test_long_run_of_surrogate_pairs_is_accepted():
    assert canonical_json(rb'"%s"' % (rb"\ud83d\ude00" * 500)) == f'"{"😀" * 500}"'.encode()


def test_byte_order_mark_is_rejected_by_name():
    with pytest.raises(BodyInvalidError, match="byte order mark"):
        canonical_json(b"\xef\xbb\xbf{}")


@pytest.mark.parametrize(
    "text",
    [
        r'{"a":1,"a":1}',
        r'{"a":1,"a":1.0}',
        r'{"a":"\"","a":"\""}',
        r'{"a":"\u0022\u0022\u0022","a":1}',
        r'{"a":"\u0022\u0022","b":{"c":1,"c":""}}',
        r'{"a":"\\u0022","a":""}',
        r'{"\\u0022":1,"\u005cu0022":2}',
        r'{"\u0022":1,"\"":2}',
        r'[[{"a":{},"b":[],"a":[]}]]',
        '{"😀":1,"\\ud83d\\ude00":2}',
    ],
)
def test_duplicate_key_is_found_in_any_escaping(text):
    with pytest.raises(BodyInvalidError, match="same key twice"):
        canonical_json(text.encode())


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (r'{"\"":1,"\\\"":2}', r'{"\"":1,"\\\"":2}'),
        (r'{"\u0022":1,"\\u0022":2}', r'{"\"":1,"\\u0022":2}'),
        (r'{"b":"\\\u0022","a":"\u0022"}', r'{"a":"\"","b":"\\\""}'),
        (
            r'{"a":{"a":{"a":1}},"b":[{"a":1},{"a":1}]}',
            r'{"a":{"a":{"a":1}},"b":[{"a":1},{"a":1}]}',
        ),
        (r'{"a":1,"A":2}', r'{"A":2,"a":1}'),
    ],
)
def test_similar_keys_are_not_duplicates(text, canonical):
    assert canonical_json(text.encode()) == canonical.encode()


def nested(levels, opening="[", closing="]", inside=""):
    return f"{opening * levels}{inside}{closing * levels}".encode()


@pytest.mark.parametrize(
    "fits",
    [
        nested(128),
        nested(128, '{"a":', "}", "1"),
        nested(64, '[{"b":0,"a":', "}]", "1.0"),
        nested(127, "[[],", "]", "[]"),
    ],
    ids=["arrays", "objects", "both", "with-leaves"],
)
def test_128_levels_are_accepted_and_129_rejected(fits):
    assert canonical_json(fits)
    with pytest.raises(BodyInvalidError, match="deeper than 128"):
        canonical_json(b"[" + fits + b"]")


@pytest.mark.parametrize("levels", [129, 500, 5_000, 200_000])
def test_deep_nesting_is_rejected_without_a_recursion_error(levels):
    for text in (nested(levels), nested(levels, '{"a":', "}", "1"), b"[" * levels):
        with pytest.raises(BodyInvalidError):
            canonical_json(text)


def test_depth_counts_nesting_and_not_brackets():
    wide = b"[" + b",".join([b'{"a":[]}'] * 1000) + b"]"
    assert canonical_json(wide) == wide


def test_brackets_in_strings_do_not_count_as_depth():
    text = json.dumps({"a": "[" * 500, "b": '"[\\"{' * 200}, separators=(",", ":")).encode()
    assert canonical_json(text) == text


def test_depth_counts_inside_volatile_fields():
    text = b'{"v":' + nested(128) + b"}"
    with pytest.raises(BodyInvalidError, match="deeper than 128"):
        canonical_json(text, volatile=frozenset({"v"}))


def test_deep_call_stack_is_not_reported_as_a_deep_body():
    def descend(left):
        return canonical_json(nested(100)) if left == 0 else descend(left - 1)

    # RecursionError is right here: the stack is full, but not because of the body.
    frames_left = sys.getrecursionlimit() - 120
    for left in range(frames_left, frames_left - 60, -5):
        try:
            assert descend(left) == nested(100)
        except RecursionError:
            continue


def test_volatile_fields_are_removed_at_the_top_level_only():
    text = b'{"t":1,"a":{"t":2},"s":"x"}'
    assert canonical_json(text, volatile=frozenset({"t", "s", "other"})) == b'{"a":{"t":2}}'


@pytest.mark.parametrize("value", ['"x"', '"\\""', '{"deep":["a","b"]}', "5.0", "1e30", "[]"])
def test_value_of_a_volatile_field_does_not_matter(value):
    text = f'{{"a":1.5,"token":{value},"b":"c"}}'.encode()
    assert canonical_json(text, volatile=frozenset({"token"})) == b'{"a":1.5,"b":"c"}'


@pytest.mark.parametrize(
    "text",
    [
        '{"token":1,"token":2}',
        '{"token":{"x":1,"x":2}}',
        '{"token":"\\u0022","a":1,"a":2}',
        '{"token":1e400}',
        '{"token":"\\ud800"}',
    ],
)
def test_invalid_json_in_a_volatile_field_is_rejected(text):
    with pytest.raises(BodyInvalidError):
        canonical_json(text.encode(), volatile=frozenset({"token"}))


@pytest.mark.parametrize("text", [b"[1]", b'"token"', b"null", b"5.0", b"{}"])
def test_volatile_fields_have_no_effect_without_an_object(text):
    assert canonical_json(text, volatile=frozenset({"token"})) == canonical_json(text)


def test_unterminated_json_with_many_escapes_is_rejected_quickly():
    # Would take minutes if each quote were tried as the start of a string.
    with pytest.raises(BodyInvalidError):
        canonical_json(b"[" * 2000 + b'"' + b'\\"' * 200_000)


@pytest.mark.parametrize(
    ("item", "canonical"),
    [
        (b"1.0", b"1"),
        (b"-0.0", b"0"),
        (b"1e16", b"10000000000000000"),
        (b"-1.5e20", b"-150000000000000000000"),
        (b"1e21", b"1e+21"),
        (b"1.5e-6", b"0.0000015"),
        (b"-1e-6", b"-0.000001"),
        (b"1e-7", b"1e-7"),
        (b"1e300", b"1e+300"),
        (b'"1.0,",1.0', b'"1.0,",1'),
        (b'"1e16,",1e16,true', b'"1e16,",10000000000000000,true'),
    ],
)
def test_numbers_of_large_bodies_are_formatted_like_those_of_small_ones(
    item: bytes, canonical: bytes
) -> None:
    times = 5000
    large = b"[" + b",".join([item] * times) + b"]"
    assert canonical_json(large) == b"[" + b",".join([canonical] * times) + b"]"
    assert canonical_json(b"[" + item + b"]") == b"[" + canonical + b"]"


@pytest.mark.parametrize("item", [b"1.0", b"1e300", b"5e-324", b"[" * 100 + b"]" * 100])
def test_no_body_of_one_mebibyte_takes_half_a_second_of_cpu(item: bytes) -> None:
    body = b"[" + b",".join([item] * (2**20 // (len(item) + 1) - 1)) + b"]"
    started = time.process_time()
    canonical_json(body)
    assert time.process_time() - started < 0.5


def test_a_number_too_large_for_a_double_is_refused_in_a_large_body() -> None:
    with pytest.raises(BodyInvalidError, match="too large"):
        canonical_json(b"[" + b"1e308," * 2000 + b"1e309]")


@pytest.mark.parametrize("piece_bytes", [1, 5, 40])
def test_canonical_form_does_not_depend_on_how_a_text_is_split(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward_protocol.fingerprint._PIECE_BYTES", piece_bytes)
    for case in GOLDEN["cases"]:
        assert canonical_json(case["json"].encode()) == case["canonical"].encode(), case["name"]
    for case in GOLDEN["refused"]:
        with pytest.raises(BodyInvalidError):
            canonical_json(case["json"].encode())
    text = b'{"b":[{"\xf0\x9f\x98\x80":1,"\xef\xbf\xbf":[1.0,-0.0,1e21]},"x.0,",[]],"a":{},"t":[1]}'
    expected = b'{"a":{},"b":[{"\xf0\x9f\x98\x80":1,"\xef\xbf\xbf":[1,0,1e+21]},"x.0,",[]]}'
    assert canonical_json(text, volatile=frozenset("t")) == expected


@pytest.mark.parametrize("item", [b"[" * 100 + b"]" * 100, b"9" * 4300, b'{"a":[1.0,"x.0,"]}'])
def test_no_more_than_64_kib_are_decoded_by_one_call(
    item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = canonical_json_module._decode_any

    def decode(raw: bytes) -> object:
        sizes.append(len(raw))
        return real(raw)

    monkeypatch.setattr(canonical_json_module, "_decode_any", decode)
    canonical_json(b'{"a":[' + b",".join([item] * (500_000 // len(item))) + b"]}")
    assert sum(sizes) > 400_000
    assert max(sizes) <= 64 * 1024
