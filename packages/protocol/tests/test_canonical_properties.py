"""Properties of canonical JSON, compared with a naive implementation that shares no code."""

import json
import struct
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onceward_protocol.errors import BodyInvalidError
from onceward_protocol.fingerprint import canonical_json

quick = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
# Characters whose order or escaping differs between encodings, drawn more often than by default.
awkward = st.text(st.sampled_from('"\\/u0022.e,5]}\x00\x1f\x7f\u2028\ufb33\uffff😀\U00010000'))
strings = texts | awkward
doubles = st.floats(allow_nan=False, allow_infinity=False)
whole_doubles = st.integers(-(2**60), 2**60).map(float)
scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | doubles
    | whole_doubles | strings
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=15,
)


def reference(value):
    """Format a decoded value as in RFC 8785, without optimization."""
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda item: item[0].encode("utf-16-be"))
        return "{" + ",".join(f"{reference(k)}:{reference(v)}" for k, v in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(reference, value)) + "]"
    if isinstance(value, float):
        return ecmascript(value)
    return json.dumps(value, ensure_ascii=False)


def ecmascript(number):
    """Follow ECMAScript's Number::toString step by step; k, n and s are its names."""
    if number == 0:
        return "0"
    if number < 0:
        return "-" + ecmascript(-number)
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    s, k = "".join(map(str, digits)), len(digits)
    n = exponent + k
    if k <= n <= 21:
        return s + "0" * (n - k)
    if 0 < n <= 21:
        return s[:n] + "." + s[n:]
    if -6 < n <= 0:
        return "0." + "0" * -n + s
    e = f"e{'+' if n > 0 else '-'}{abs(n - 1)}"
    return s + e if k == 1 else s[0] + "." + s[1:] + e


def spell_number(draw, number):
    if isinstance(number, int):
        return str(number)
    spellings = [repr(number), f"{number:.17e}", f"{number:.20E}", f"{Decimal(number):.1100f}"]
    literal = draw(st.sampled_from(spellings))
    return literal if "." in literal or "e" in literal.lower() else literal + ".0"


def spell_string(draw, text):
    out: list[str] = []
    chosen = draw(st.integers(0, 2 ** len(text) - 1)) if text else 0
    for at, character in enumerate(text):
        if chosen >> at & 1:
            units = character.encode("utf-16-be")
            out.extend(f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", units))
        else:
            out.append(json.dumps(character, ensure_ascii=False)[1:-1])
    return '"' + "".join(out) + '"'


@st.composite
def spelled(draw, source=values):
    """Draw a value and a JSON text of it with random member order, spaces, escapes and numbers."""

    def spell(value):
        space = draw(st.sampled_from(["", "", " ", "\n\t", "\r\n"]))
        if isinstance(value, dict):
            members = draw(st.permutations(list(value.items())))
            inside = ",".join(f"{space}{spell_string(draw, k)}:{spell(v)}" for k, v in members)
            return f"{space}{{{inside}{space}}}"
        if isinstance(value, list):
            return f"{space}[{','.join(map(spell, value))}{space}]{space}"
        if isinstance(value, str):
            return space + spell_string(draw, value) + space
        if isinstance(value, bool) or value is None:
            return space + json.dumps(value)
        return spell_number(draw, value) + space

    value = draw(source)
    return value, spell(value).encode()


@settings(quick, max_examples=400)
@given(spelled())
def test_canonical_form_equals_that_of_a_naive_reference(drawn):
    value, text = drawn
    once = canonical_json(text)
    assert once == reference(value).encode()
    assert once == canonical_json(json.dumps(value).encode()), "not as it is spelled elsewhere"
    assert once == canonical_json(once), "not its own canonical form"
    assert reference(json.loads(once)) == reference(value), "does not mean the same"


@quick
@given(values, values)
def test_different_values_have_different_canonical_bytes(one, other):
    same = canonical_json(json.dumps(one).encode()) == canonical_json(json.dumps(other).encode())
    assert same == (reference(one) == reference(other))


@quick
@given(st.dictionaries(strings, values, min_size=1, max_size=5), st.data())
def test_any_change_of_one_field_changes_the_canonical_bytes(members, data):
    name = data.draw(st.sampled_from(sorted(members)))
    before = canonical_json(json.dumps(members).encode())
    changed = data.draw(values.filter(lambda new: reference(new) != reference(members[name])))
    assert canonical_json(json.dumps({**members, name: changed}).encode()) != before
    without = {key: value for key, value in members.items() if key != name}
    assert canonical_json(json.dumps(without).encode()) != before


@quick
@given(doubles)
def test_doubles_are_formatted_as_in_ecmascript(number):
    assert canonical_json(f"{number:.17e}".encode()) == ecmascript(number).encode()
    assert canonical_json(f"[{number:.17e},0.5]".encode()) == f"[{ecmascript(number)},0.5]".encode()


@quick
@given(st.from_regex(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}", fullmatch=True))
def test_decimal_literals_are_formatted_as_their_double(literal):
    expected = ecmascript(float(literal)).encode()
    assert canonical_json(literal.encode()) == expected
    # Next to an integral double, numbers are formatted one by one: another code path.
    assert canonical_json(f"[5.0,{literal}]".encode()) == b"[5,%s]" % expected


@quick
@given(st.dictionaries(strings, values, min_size=1, max_size=5), st.data())
def test_repeated_key_is_rejected(members, data):
    name = data.draw(st.sampled_from(sorted(members)))
    again = data.draw(values)
    pairs = [f"{json.dumps(k)}:{json.dumps(v)}" for k, v in members.items()]
    pairs.append(f"{spell_string(data.draw, name)}:{json.dumps(again)}")
    text = "{" + ",".join(data.draw(st.permutations(pairs))) + "}"
    wrapped = data.draw(st.sampled_from([text, f"[{text}]", f'{{"x":{{"y":[0,{text}]}}}}']))
    with pytest.raises(BodyInvalidError, match="same key twice"):
        canonical_json(wrapped.encode())


@quick
@given(st.dictionaries(strings, values, max_size=5), st.sets(strings, max_size=3), st.data())
def test_volatile_fields_are_ignored(members, names, data):
    kept = {name: value for name, value in members.items() if name not in names}
    sent = {**kept, **{name: data.draw(values) for name in names}}
    out = canonical_json(json.dumps(sent).encode(), volatile=frozenset(names))
    assert out == reference(kept).encode()


@quick
@given(st.binary(max_size=40) | st.text('[]{}",:\\u0022ed8.-1e \n', max_size=40).map(str.encode))
def test_any_bytes_are_canonicalized_or_rejected(raw):
    try:
        out = canonical_json(raw)
    except BodyInvalidError:
        return
    assert out == reference(json.loads(raw)).encode()
