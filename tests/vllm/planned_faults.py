"""One wrong element in one field of one plan: what the comparisons have to find."""

import numpy as np
from msgspec import structs
from syncfree.backends.vllm.planned.builder import Attached


class OneWrongElement:
    """Patches `Attached.plan` for builders in `mode`: one plan that has the field gets one element changed."""

    def __init__(self, monkeypatch, field, mode, *, skip=2, seed=0):
        self.field, self.mode, self.left, self.done = field, mode, skip, None
        self._rng = np.random.default_rng(seed)
        right = Attached.plan
        monkeypatch.setattr(
            Attached, "plan", lambda attached, *about: self._changed(attached, *right(attached, *about))
        )

    def _changed(self, attached, batch, plan):
        if self.done is not None or attached.staging._tally.mode != self.mode:
            return batch, plan
        found = plan.fields.get(self.field)
        if found is None or found.source != "host" or (isinstance(found.value, np.ndarray) and not found.value.size):
            return batch, plan
        if isinstance(found.value, list) and not found.value:
            return batch, plan
        self.left -= 1
        if self.left >= 0:
            return batch, plan
        self.done = (found.value, value := self._wrong(found.value))
        return batch, structs.replace(plan, fields=plan.fields | {self.field: structs.replace(found, value=value)})

    def _wrong(self, value):
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + 1_000_000
        if isinstance(value, list):
            changed = list(value)
            place = int(self._rng.integers(len(value)))
            changed[place] = self._wrong(value[place])
            return changed
        changed = value.copy()
        changed.flat[int(self._rng.integers(value.size))] += 1
        return changed
