"""Recordings of several ranks as one report: numbered apart, steps side by side, stragglers named."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .merge import merge_reports
from .recording import Recording
from .report import Note, Report, Step
from .windows import StepWindow

MIN_COMMON = 8  # steps that two ranks must share before they count as ranks of one engine
MAX_SHIFT = 64  # steps that one of them may have begun earlier
STRAGGLER_RATIO = 1.25
STRAGGLER_US = 100.0
STRAGGLER_SHARE = 0.75


def join(recordings: Sequence[Recording]) -> Report:
    """One report of all ranks.

    Ranks of different servers that have the same number get new ones (a note says which). Ranks that ran the same
    batches (tensor and pipeline parallel ones do) get the same index for the same step, and are compared: one that
    builds or steps clearly longer than the others is noted as a straggler.
    """
    if len(recordings) == 1:
        return recordings[0].build()
    renamed = _number_apart(recordings)
    groups = _align(recordings)
    reports = [recording.build() for recording in recordings]
    stragglers = [note for group in groups for note in straggler_notes([reports[i] for i in group])]
    merged = merge_reports(reports)
    merged.notes = _unique([*renamed, *stragglers, *merged.notes])
    return merged


def _number_apart(recordings: Sequence[Recording]) -> list[Note]:
    ranks = [recording.source.ranks[0] if recording.source.ranks else 0 for recording in recordings]
    if len(set(ranks)) == len(ranks):
        return []
    notes = []
    for new, (old, recording) in enumerate(zip(ranks, recordings, strict=True)):
        recording.source.ranks = [new]
        for step in recording.steps:
            step.rank = new
        notes.append(Note(kind="ranks", text=f"rank {new} here is rank {old} of its own server"))
    return notes


def _align(recordings: Sequence[Recording]) -> list[list[int]]:
    """Groups of recordings that ran the same batches; their steps get common indices."""
    groups: list[list[int]] = []
    for i, recording in enumerate(recordings):
        for group in groups:
            first = recordings[group[0]].steps
            shift = _shift(first, recording.steps)
            if shift is not None:
                _move(recording.steps, first[0].index - recording.steps[0].index + shift)
                group.append(i)
                break
        else:
            groups.append([i])
    for group in groups:
        lowest = min((step.index for i in group for step in recordings[i].steps), default=0)
        if lowest < 0:
            for i in group:
                _move(recordings[i].steps, -lowest)
    return [group for group in groups if len(group) > 1]


def _shift(one: list[StepWindow], two: list[StepWindow]) -> int | None:
    """How many steps later `two` began, if from there on both saw the same batches.

    A long run of equal decodes fits many ways: then the one whose steps began at about the same time.
    """
    shapes = [_shape(step) for step in one]
    others = [_shape(step) for step in two]
    found: list[tuple[int, int]] = []
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        skip, late = max(shift, 0), max(-shift, 0)
        common = min(len(shapes) - skip, len(others) - late)
        if common >= MIN_COMMON and shapes[skip : skip + common] == others[late : late + common]:
            found.append((abs(one[skip].start_ns - two[late].start_ns), shift))
    return min(found)[1] if found else None


def _shape(step: StepWindow) -> tuple[object, ...]:
    return (step.batch_class, step.num_reqs, step.num_tokens)


def _move(steps: list[StepWindow], by: int) -> None:
    for step in steps:
        step.index += by


def straggler_notes(reports: Sequence[Report]) -> list[Note]:
    """One note for each rank whose build or whole step takes clearly longer than the others', over the same steps."""
    by_rank = {report.steps[0].rank: {step.index: step for step in report.steps} for report in reports if report.steps}
    if len(by_rank) < 2:
        return []
    common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    common = [i for i in common if not any(steps[i].warmup for steps in by_rank.values())]
    if len(common) < MIN_COMMON:
        return []
    notes = []
    for name, figure in (("build", _build_us), ("step", _duration_us)):
        times = {rank: [figure(steps[i]) for i in common] for rank, steps in by_rank.items()}
        known = {rank: [value for value in values if value is not None] for rank, values in times.items()}
        known = {rank: values for rank, values in known.items() if len(values) == len(common)}
        for rank, mine in sorted(known.items()):
            others = [values for other, values in known.items() if other != rank]
            if others and _is_straggler(mine, others):
                theirs = median(median(values) for values in others)
                text = (
                    f"rank {rank} is a straggler: its {name} takes {median(mine) / 1e3:.2f} ms, the other ranks' "
                    f"{theirs / 1e3:.2f} ms (medians over {len(common)} common steps)"
                )
                notes.append(Note(kind="straggler", text=text, count=len(common)))
    return notes


def _is_straggler(mine: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Clearly longer in the middle, and longer than the others in most steps: a few slow ones make no straggler."""
    theirs = median(median(values) for values in others)
    longer = sum(value > median(values) for value, *values in zip(mine, *others, strict=True))
    clearly = median(mine) > STRAGGLER_RATIO * theirs and median(mine) - theirs > STRAGGLER_US
    return clearly and longer >= STRAGGLER_SHARE * len(mine)


def _build_us(step: Step) -> float | None:
    return step.phases["build"].duration_us if "build" in step.phases else None


def _duration_us(step: Step) -> float | None:
    return step.duration_us


def _unique(notes: Sequence[Note]) -> list[Note]:
    """Every text once: ranks of one server tell the same about their device."""
    return list({(note.kind, note.text, note.file, note.line): note for note in reversed(notes)}.values())[::-1]
