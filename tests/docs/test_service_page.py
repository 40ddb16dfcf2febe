"""The wire format page against the messages themselves."""

import json
import re

import msgspec
import numpy as np
from snippets import ROOT, actions
from syncfree.backends.service import protocol
from syncfree.backends.service.desk import Desk
from syncfree.planner import Environment, Limits, MetadataPlan
from syncfree.planner.plan import _encode_array

PAGE = ROOT / "docs" / "service.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = [action.text.splitlines() for action in actions(PAGE) if action.kind == "picture"]
HELLO, PLAN, REPLY, ARRAY = EXAMPLES


def section(title):
    """Keys named in the first column of the table under a heading."""
    body = re.split(r"^#+ ", TEXT.partition(f"\n#### {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    first = body.split("| code | when")[0]
    return {key for row in re.findall(r"^\| (`[^|]+`) \|", first, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}


def test_the_examples_are_what_is_sent():
    for text, data in (HELLO, PLAN):
        assert msgspec.msgpack.encode(json.loads(text)).hex(" ") == data


def test_the_reply_begins_as_shown_and_holds_a_plan():
    desk = Desk()
    desk.handle(b"me", [bytes.fromhex(HELLO[1])])
    reply = desk.handle(b"me", [bytes.fromhex(PLAN[1])])
    assert reply.hex(" ").startswith(REPLY[0])
    plan = msgspec.msgpack.decode(reply)["plan"]
    assert plan.startswith(b"syncfree.plan/1\n")
    assert MetadataPlan.from_bytes(plan).batch_class == "decode"


def test_the_array_is_what_a_plan_holds():
    extension = _encode_array(np.array([0, 40], np.int32))
    assert msgspec.msgpack.encode(extension).hex(" ") == ARRAY[0]


def test_every_key_of_every_message_is_described_and_no_other():
    for kind in (
        protocol.Hello,
        protocol.Plan,
        protocol.Health,
        protocol.Stop,
        protocol.Welcome,
        protocol.Planned,
        protocol.Healthy,
        protocol.Stopping,
        protocol.Refused,
    ):
        assert section(kind.__name__.lower()) == set(kind.__struct_fields__) - {"id"}, kind.__name__


def test_codes_and_numbers_on_the_page_are_the_real_ones():
    codes = set(re.findall(r"^\| `(\w+)` \|", TEXT.partition("| code | when")[2].partition("### The bytes")[0], re.M))
    described = (protocol.Refused.__doc__ or "").partition(". `id`")[0]
    assert codes == set(re.findall(r"\w+", described.partition(": ")[2].replace(" or ", " ")))
    assert f"Protocol number: **{protocol.PROTOCOL}**" in TEXT
    assert f"at most {protocol.IN_FLIGHT} open at a time" in TEXT


def test_every_member_of_a_plan_is_named():
    body = TEXT.partition("### The bytes of a plan")[2]
    for name in MetadataPlan.__struct_fields__:
        assert f"`{name}`" in body
    for name in ("gfx", "num_cu", "vllm", "dtype"):
        assert name in Environment.__struct_fields__
    for name in ("num_heads", "num_kv_heads", "block_size"):
        assert name in Limits.__struct_fields__
