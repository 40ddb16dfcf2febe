"""Splitting a long array gives the same elements as decoding it whole, wherever the pieces are cut."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syncfree.planner.errors import BadInput
from syncfree.profiler.readers import json_array
from syncfree.profiler.readers.json_array import ArrayPieces, repaired
from syncfree.profiler.readers.text import Limits


class Item(msgspec.Struct):
    n: int
    text: str = ""


class Blocks:
    """Text in blocks of a given size, as `Text` gives it."""

    def __init__(self, data, size, limits=None):
        self.path, self.limits, self.size = "memory", limits or Limits(), 0
        self.blocks = iter([data[i : i + size] for i in range(0, len(data), size)])

    def __iter__(self):
        for block in self.blocks:
            self.size += len(block)
            yield block


def pieces(text, block=64, piece=64, limits=None, odd=lambda raw: None):
    reader = ArrayPieces(Blocks(text, block, limits), b"", msgspec.json.Decoder(list[Item]), odd)
    before, json_array._PIECE = json_array._PIECE, piece
    try:
        return [item for batch in reader.batches() for item in batch], reader
    finally:
        json_array._PIECE = before


# What could be taken for a boundary: strings with `},{`, nested lists of objects, brackets, escapes.
nasty = st.sampled_from(["},{", "}, {", '"', "\\", "[{", "}]", "\n},\n{", "ü", " "])
names = st.lists(st.one_of(nasty, st.text(max_size=4)), max_size=6).map("".join)
extra = st.recursive(
    st.one_of(st.integers(), names, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(st.fixed_dictionaries({"a": inner}), max_size=3)),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(st.integers(0, 9), names, extra), max_size=25),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 200),
    st.integers(1, 300),
    st.sampled_from(["", ', "tail": [{"x": 1}, {"x": 2}]}']),
)
def test_any_array_in_any_blocks(rows, indent, block, piece, tail):
    elements = [{"n": n, "text": text, "extra": more} for n, text, more in rows]
    text = json.dumps(elements, indent=indent)[1:] + tail
    found, reader = pieces(text.encode(), block, piece)
    assert [(item.n, item.text) for item in found] == [(n, text) for n, text, _ in rows]
    assert reader.complete
    assert reader.tail.decode() == tail


@given(st.integers(0, 400), st.sampled_from([None, 1]), st.integers(1, 99))
def test_a_cut_array_gives_its_whole_elements(cut, indent, block):
    rows = [{"n": i, "text": "},{", "extra": [{"a": 1}, {"b": [i]}]} for i in range(8)]
    text = json.dumps(rows, indent=indent)[1:]
    cut = min(cut, len(text) - 1)
    found, reader = pieces(text[:cut].encode(), block)
    whole = [item.n for item in found]
    assert whole == list(range(len(whole)))
    ends = [len(json.dumps(rows[: i + 1], indent=indent)) - 2 - (indent is not None) for i in range(8)]
    assert len(whole) in (sum(end < cut for end in ends), sum(end <= cut for end in ends))
    assert not reader.complete


@pytest.mark.parametrize("space", ["", " ", "\n  "])
def test_a_trailing_comma_is_passed_over(space):
    found, reader = pieces(f'{{"n": 1}}, {{"n": 2}},{space}], "x": 1}}'.encode())
    assert [item.n for item in found] == [1, 2]
    assert (reader.complete, reader.mended > 0, reader.tail) == (True, True, b', "x": 1}')


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "nan", "-nan", "inf", "nan(ind)"])
def test_numbers_that_json_has_not_are_passed_over(value):
    text = f'{{"n": 1, "other": {value}}}, {{"n": 2, "l": [1, {value}], "text": "is {value}, so"}}]'
    found, reader = pieces(text.encode())
    assert [item.n for item in found] == [1, 2]
    assert reader.mended


def test_repairs_keep_every_place():
    text = b'{"a": NaN, "b": -Infinity, "c": "C:\\Users\\new \\\\ \x01", "d": "\t"}'
    mended = repaired(text)
    assert len(mended) == len(text)
    json.loads(mended)


def test_an_element_of_another_type_goes_to_its_own_care():
    odd = []
    found, _ = pieces(b'{"n": 1}, {"n": "x"}, 5, null, {"n": 2}]', odd=lambda raw: odd.append(raw))
    assert [item.n for item in found] == [1, 2]
    assert odd == [b'{"n": "x"}', b"5", b"null"]


def test_bytes_that_are_no_utf8_cost_a_character_not_the_piece():
    found, _ = pieces(b'{"n": 1, "text": "a\xffb"}, {"n": 2}]')
    assert [(item.n, item.text) for item in found] == [(1, "a?b"), (2, "")]


@pytest.mark.parametrize("half", ["\\ud83d", "\\ud83dx", "\\ude00", "\\ud83d\\n", "\\uD83D\\uD83D"])
def test_half_a_character_costs_a_character_not_the_piece(half):
    found, reader = pieces(f'{{"n": 1, "text": "a{half}"}}, {{"n": 2, "text": "\\ud83d\\ude00"}}]'.encode())
    assert [item.n for item in found] == [1, 2]
    assert found[0].text.startswith("a\N{REPLACEMENT CHARACTER}")
    assert found[1].text == "\N{GRINNING FACE}"
    assert reader.mended


@pytest.mark.parametrize(
    ("text", "place"), [(b'{"n": 1}, {"n" 2}]', 15), (b'{"n": 1} {"n": 2}]', 9), (b'{"n": 1, "m": tru}]', 15)]
)
def test_what_is_no_json_is_refused_with_its_place(text, place):
    with pytest.raises(BadInput, match=f"malformed JSON at byte {place} ") as error:
        pieces(text)
    assert "\n" not in str(error.value)


def test_an_endless_element_is_refused_at_the_limit():
    with pytest.raises(BadInput, match="events of at most 1 MiB"):
        pieces(b'{"text": "' + b"a" * (3 << 20), block=1 << 16, limits=Limits(item=1 << 20))


def test_nesting_without_end_is_refused():
    with pytest.raises(BadInput, match="nested too deep"):
        pieces(b'{"n": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", block=1 << 20)
