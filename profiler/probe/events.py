"""From the ring's records to `Call`s that the one counting rule understands."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ..apis import lookup
from ..calls import Call, Direction, Frame, Role
from .arena import (
    BIG_PAGEABLE,
    BLOCKING,
    BROKEN,
    COPY_NOTED,
    FRAME,
    JOINED,
    LOOP,
    PAIRED,
    RECORD,
    RECORD_FRAMES,
    Peek,
    code_names,
)

_DIRECTIONS = (None, Direction.H2D, Direction.D2H, Direction.D2D, Direction.H2H)
Stack = tuple[Frame, ...]


class Decoder:
    """Decodes records in ring order. `names`: entry points by number.

    The hooks record calls that wait, or may. What lay between two of them matters to the pairing rule, so a launch (or
    what else broke the pair) is put back as a call where leaving it out would join a copy with a later wait.
    """

    def __init__(self, names: list[str], peek: Peek) -> None:
        self._names = names
        self._code = code_names(peek)
        self._stacks: dict[bytes, Stack] = {}
        self._copied: dict[int, Call] = {}  # by thread, where the last call is a copy
        self._handed_over: set[int] = set()  # of these, the ones that a caller of `decode` has already
        self.blind: dict[tuple[str, Stack], int] = {}  # waits that are no syncs: (what, where) -> times

    def decode(self, records: Iterable[bytes]) -> list[Call]:
        calls: list[Call] = []
        self._handed_over = set(self._copied)
        for record in records:
            self._decode(record, calls)
        return calls

    def _stack(self, record: bytes, frames: int) -> Stack:
        raw = record[RECORD_FRAMES : RECORD_FRAMES + FRAME.size * frames]
        known = self._stacks.get(raw)
        if known is None:
            made = []
            for number, line in struct.iter_unpack("<Ii", raw):
                names = self._code(number)
                if names is not None:
                    made.append(Frame(names[0], line, names[1]))
            known = self._stacks[raw] = tuple(made)
        return known

    def _decode(self, record: bytes, calls: list[Call]) -> None:
        fields = RECORD.unpack_from(record)
        _, tid, ts, dur, nbytes, _, copy_dur, copy_nbytes, entry, copy_entry, broken_by = fields[:11]
        direction, copy_direction, flags, _, frames, _ = fields[11:]
        stack = self._stack(record, frames)
        name = self._names[entry]
        api = lookup(name)
        if flags & LOOP:
            self.blind["poll", stack] = self.blind.get(("poll", stack), 0) + 1
            return
        if flags & BIG_PAGEABLE:
            self.blind["pageable", stack] = self.blind.get(("pageable", stack), 0) + 1
        if api.role in (Role.ALLOC, Role.FREE):
            calls.append(Call(api=name, role=api.role, ts_ns=ts, dur_ns=dur, thread=tid, stack=stack))
            return
        if tid in self._copied and flags & BROKEN and not flags & PAIRED:
            breaker = self._names[broken_by]
            calls.append(Call(api=breaker, role=Role.LAUNCH, ts_ns=ts - 1, dur_ns=0, thread=tid))
        before = self._copied.pop(tid, None)
        if before is not None and flags & COPY_NOTED and flags & JOINED:
            # The pair is one by what its own thread did; both are blamed on who waits for it, where both can be.
            if tid in self._handed_over:
                stack = before.stack
            else:
                before.stack = stack
        self._handed_over.discard(tid)
        if flags & PAIRED and not flags & COPY_NOTED:
            calls.append(
                Call(
                    api=self._names[copy_entry],
                    role=Role.COPY,
                    ts_ns=ts - 1,  # the host waits there, perhaps in a later step than the copy's own
                    dur_ns=copy_dur,
                    thread=tid,
                    direction=_DIRECTIONS[copy_direction],
                    nbytes=copy_nbytes,
                    stack=stack,  # of the same source line, else it would be no pair
                )
            )
        copied = api.role is Role.COPY
        call = Call(
            api=name,
            role=api.role,
            ts_ns=ts,
            dur_ns=dur,
            thread=tid,
            wait=api.wait,
            direction=_DIRECTIONS[direction] if copied else None,
            nbytes=nbytes if copied else None,
            pageable=True if copied and not flags & BLOCKING else None,
            blocking=bool(flags & BLOCKING) if copied else api.blocking,
            stack=stack,
        )
        calls.append(call)
        if copied:
            self._copied[tid] = call
