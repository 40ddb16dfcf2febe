"""The hooks themselves. The agent starts when a worker has its KV cache, the watch with its first `execute_model`.

While nobody records, a step costs a few attribute tests, plus the table of prefill lengths where requests come or go
(cached rows carry no prompt length, so it must have seen them arrive). Whatever goes wrong in here switches the hooks
off, with one line in the log; the server goes on as if they had never been there.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...profiler.agent import Agent

logger = logging.getLogger("syncfree")

TESTED = ("0.26", "0.32")


class Watch:
    """What one worker process knows: its agent's recorder, its requests, its stepping thread."""

    def __init__(self, runner: Any) -> None:
        from ...planner import Batch, PrefillTable, classify

        _check_version()
        self.pid = os.getpid()
        self.agent = start_agent(runner)
        self.recorder = self.agent.recorder
        self.recorder.planner = _planner_counters()
        self.table = PrefillTable()
        self.thread = threading.get_ident()
        self.open = False  # a step of ours is open
        self.in_forward = False
        self._read_batch = Batch.from_vllm_scheduler
        self._classify = classify
        self._runner: Any = None  # the one that `_threshold` is of
        self._threshold = 1
        for req_id, prefill_len in _running(runner):
            self.table.admit(req_id, prefill_len)

    def begin(self, runner: Any, step: Any) -> None:
        """A step begins: keep the table; while somebody records, classify and open a window."""
        recorder = self.recorder
        if recorder.session is None:
            if step.finished_req_ids or step.scheduled_new_reqs or _resumed(step):
                self.table.observe(step)
            return
        if not step.total_num_scheduled_tokens:
            self.table.observe(step)
            return
        if runner is not self._runner:
            self._runner, self._threshold = runner, _decode_threshold(runner)
        self.thread = threading.get_ident()
        batch = self._read_batch(step, self.table, decode_threshold=self._threshold)
        found = self._classify(batch)
        window = recorder.begin_step(
            str(found.batch_class),
            mixed=found.mixed,
            num_reqs=len(batch),
            num_tokens=step.total_num_scheduled_tokens,
        )
        self.open = window is not None

    def leave_forward(self) -> None:
        if self.in_forward:
            self.in_forward = False
            self.recorder.end_phase()

    def end(self) -> None:
        self.leave_forward()
        if self.open:
            self.open = False
            self.recorder.end_step()


def start_agent(runner: Any) -> Agent:
    """This process's agent."""
    from ...profiler.agent import ensure_agent

    return ensure_agent(rank=_rank(runner), engine=f"vllm {_version()}")


_watch: Watch | None = None
_off: str | None = None  # why the hooks of this process are switched off


def _switch_off(error: Exception) -> None:
    global _off
    if _off is None:
        _off = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("syncfree: switched off in this process (pid %d), vLLM goes on: %s", os.getpid(), _off)
        if _watch is not None:
            _watch.recorder.disabled = _off


def switched_off() -> str | None:
    """Why the hooks of this process are switched off; None while they work."""
    return _off


def prepare() -> None:
    """Import now what the first step would import: the process serves already."""
    from ... import planner
    from ...profiler import agent

    logger.debug("syncfree: %s and %s are here", planner.__name__, agent.__name__)


def forget() -> None:
    """The hooks are out: the next ones begin anew."""
    global _watch, _off
    _watch = _off = None


def current() -> Watch | None:
    """This process's watch, if it has stepped; a forked child has none of its own until it steps."""
    return _watch if _watch is not None and _watch.pid == os.getpid() else None


def _begin(runner: Any, step: Any) -> Watch | None:
    """The watch, with a step begun where somebody records; None where that failed."""
    global _watch
    watch = _watch
    try:
        if watch is None or watch.pid != os.getpid():
            watch = _watch = Watch(runner)
        watch.begin(runner, step)
    except Exception as error:  # noqa: BLE001 - the server must not notice
        _switch_off(error)
        return None
    return watch


def _end(watch: Watch) -> None:
    try:
        watch.end()
    except Exception as error:  # noqa: BLE001 - the server must not notice
        _switch_off(error)


# ------------------------------------------------------------------- wrapping


def wrap_ready(original: Callable[..., Any]) -> Callable[..., Any]:
    """`initialize_kv_cache`: from here on a worker can be found, also by who comes before its first request."""

    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _off is None:
            try:
                start_agent(self)
            except Exception as error:  # noqa: BLE001 - the server must not notice
                _switch_off(error)
        return result

    return _marked(initialize_kv_cache)


def wrap_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    """`execute_model`: a step begins, and ends here too unless sampling follows (then it returns None)."""

    @functools.wraps(original)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _off is not None or kwargs.get("dummy_run") or (len(args) > 2 and args[2]):
            return original(self, *args, **kwargs)
        watch = _begin(self, args[0] if args else kwargs.get("scheduler_output"))
        if watch is None or not watch.open:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            _end(watch)
            raise
        if result is None:
            watch.leave_forward()
        else:
            _end(watch)
        return result

    return _marked(execute_model)


def wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """`sample_tokens`, `pool`: the step ends."""

    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch
        if watch is None or not watch.open or _off is not None:
            return original(self, *args, **kwargs)
        watch.recorder.begin_phase("sample")
        try:
            return original(self, *args, **kwargs)
        finally:
            watch.recorder.end_phase()
            _end(watch)

    return _marked(sample_tokens)


def wrap_phase(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A part of the step; nothing outside a step, and nothing in other threads than the stepping one."""

    @functools.wraps(original)
    def part(*args: Any, **kwargs: Any) -> Any:
        watch = _watch
        if watch is None or not watch.open or threading.get_ident() != watch.thread:
            return original(*args, **kwargs)
        watch.recorder.begin_phase(name)
        try:
            return original(*args, **kwargs)
        finally:
            watch.recorder.end_phase()

    return _marked(part)


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_model_forward` of V1: its phase lasts until `execute_model` returns, for the logits come after it."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        watch = _watch
        if watch is not None and watch.open and not watch.in_forward and threading.get_ident() == watch.thread:
            watch.in_forward = True
            watch.recorder.begin_phase("forward")
        return original(*args, **kwargs)

    return _marked(forward)


def wrap_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """`get_output` of asynchronous outputs: where the stepping thread itself waits for the tokens, the step that ended
    last goes on (with asynchronous scheduling that is the step after the one whose tokens these are)."""

    @functools.wraps(original)
    def get_output(*args: Any, **kwargs: Any) -> Any:
        watch = _watch
        if watch is None or watch.recorder.session is None or threading.get_ident() != watch.thread or _off is not None:
            return original(*args, **kwargs)
        recorder = watch.recorder
        reopened = not watch.open and recorder.reopen_step() is not None
        recorder.begin_phase("output")
        try:
            return original(*args, **kwargs)
        finally:
            recorder.end_phase()
            if reopened:
                recorder.end_step()

    return _marked(get_output)


class _PhaseContext:
    """A context manager of vLLM's, with a phase around its body."""

    def __init__(self, inner: Any, watch: Watch, name: str) -> None:
        self._inner = inner
        self._recorder = watch.recorder
        self._name = name

    def __enter__(self) -> Any:
        entered = self._inner.__enter__()
        self._recorder.begin_phase(self._name)
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self._recorder.end_phase()
        return self._inner.__exit__(kind, error, trace)


def wrap_context(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that returns a context manager; its body is the phase."""

    @functools.wraps(original)
    def context(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        watch = _watch
        if watch is None or not watch.open or threading.get_ident() != watch.thread:
            return inner
        return _PhaseContext(inner, watch, name)

    return _marked(context)


class _AllowedContext:
    """A region in which vLLM's own checker allows waits; the profiler tags them."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner = inner
        self._recorder = watch.recorder

    def __enter__(self) -> Any:
        self._recorder.begin_allowed()
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self._recorder.end_allowed()
        return self._inner.__exit__(kind, error, trace)


def wrap_allowed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`gpu_sync_allowed` as one module imported it."""

    @functools.wraps(original)
    def allowed(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        watch = _watch
        return inner if watch is None or watch.recorder.session is None else _AllowedContext(inner, watch)

    return _marked(allowed)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__syncfree__ = True  # type: ignore[attr-defined]  # a plugin may be loaded twice in one process
    return function


# ------------------------------------------------------------ reading the runner


def _resumed(step: Any) -> bool:
    cached = step.scheduled_cached_reqs
    resumed = getattr(cached, "resumed_req_ids", None)
    return bool(resumed) if resumed is not None else any(getattr(cached, "resumed_from_preemption", ()))


def _running(runner: Any) -> list[tuple[str, int]]:
    """(request, tokens to prefill) of what the runner serves already, where the hooks came later than the requests.

    V1 keeps the prompt's length: after a preemption before our time that is less than what was prefilled again.
    """
    states = getattr(runner, "req_states", None)
    if states is not None:
        lengths = getattr(states.prefill_len, "np", None)
        return [] if lengths is None else [(req_id, int(lengths[at])) for req_id, at in states.req_id_to_index.items()]
    requests = getattr(runner, "requests", None) or {}
    return [(req_id, int(request.num_prompt_tokens)) for req_id, request in requests.items()]


def _decode_threshold(runner: Any) -> int:
    """Longest query that builders treat as a decode: what they agreed on (V1), else 1 + speculative tokens."""
    agreed = getattr(runner, "reorder_batch_threshold", None)
    if isinstance(agreed, int) and agreed >= 1:
        return agreed
    length = getattr(runner, "decode_query_len", None)
    return length if isinstance(length, int) and length >= 1 else 1 + int(getattr(runner, "num_spec_tokens", 0) or 0)


def _planner_counters() -> Any:
    """What the planner counts in this process; None where it is off."""
    tally = sys.modules.get(f"{__package__}.planned.tally")
    return None if tally is None or tally.TALLY.mode == "off" else tally.TALLY


def _rank(runner: Any) -> int:
    parallel = getattr(getattr(runner, "vllm_config", None), "parallel_config", None)
    replica = getattr(parallel, "data_parallel_rank", 0) or 0
    return int(replica * (getattr(parallel, "world_size", 1) or 1) + (getattr(parallel, "rank", 0) or 0))


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def _check_version() -> None:
    version = _version()
    if not version.startswith(tuple(f"{known}." for known in TESTED)):
        logger.warning("syncfree: tested with vLLM %s; this is %s: trying all the same", " and ".join(TESTED), version)
