"""The subclass: plans a step where it can, and hands everything else to vLLM's own builder."""

from __future__ import annotations

from typing import Any, ClassVar

from ....planner.environment import Environment, Limits
from ....planner.planner import Planner
from .adapter import Adapter, Unserved, drafts_in_flight, installed_release, require_aiter
from .batches import BATCHES
from .compare import Comparison
from .staging import Staging
from .tally import TALLY, Tally


class Attached:
    """The planner's side of one builder object.

    `environment` and `limits` default to what the builder was configured with. Raises what the checks raise.
    """

    def __init__(
        self,
        adapter: Adapter,
        builder: Any,
        environment: Environment | None = None,
        limits: Limits | None = None,
        tally: Tally = TALLY,
    ) -> None:
        installed_release()
        if adapter.needs_aiter:
            require_aiter()
        if environment is None or limits is None:
            environment, limits = adapter.settings(builder)
        adapter.prepare(builder, environment)
        self.adapter = adapter
        self.environment = environment
        self.planner = Planner(adapter.backend, environment, limits)
        self.staging = Staging(builder.device, tally)
        self.comparison = Comparison(adapter, tally)
        self._short_extends = not getattr(builder, "use_pcp", False)
        self._drafts = drafts_in_flight(builder)

    def plan(self, builder: Any, common: Any) -> tuple[Any, Any]:
        """The batch and its plan. Raises what planning raises."""
        threshold = builder.reorder_batch_threshold or 1
        batch = BATCHES.of(common, threshold, self._short_extends, self._drafts)
        return batch, self.planner.plan(batch)


class PlannedBuilder:
    """Goes before one of vLLM's builder classes; `planned_class` makes the two one."""

    adapter: ClassVar[Adapter]
    upstream: ClassVar[type]
    tally: ClassVar[Tally] = TALLY
    _attached: Attached | bool | None = None  # False: left to vLLM for good
    _passing = False  # a call of vLLM's own that ends in `build`

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Metadata of one step: planned, or vLLM's own."""
        mode = self.tally.mode
        if mode == "off" or fast_build or self._passing or self._attached is False:
            return self._upstream_build(common_prefix_len, common_attn_metadata, fast_build)
        if mode == "on":
            metadata = self._planned(common_attn_metadata)
            if metadata is not None:
                return metadata
        metadata = self._upstream_build(common_prefix_len, common_attn_metadata, fast_build)
        if mode == "shadow":
            self._compare(common_attn_metadata, metadata)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """vLLM's own: what a graph is captured with has made-up lengths, and its buffers are vLLM's."""
        return self._through("build_for_cudagraph_capture", common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        """vLLM's own: while drafting the host's lengths are those of the step before."""
        return self._through("build_for_drafting", common_attn_metadata, draft_index)

    def _through(self, method: str, *args: Any) -> Any:
        outer, self._passing = self._passing, True
        try:
            return getattr(super(), method)(*args)
        finally:
            self._passing = outer

    def _upstream_build(self, common_prefix_len: int, common: Any, fast_build: bool) -> Any:
        """The next class's build, with whatever subclass calls it makes passed through."""
        return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]

    def _attach(self) -> Attached | None:
        found = self._attached
        if found is None:
            try:
                found = self._attached = Attached(self.adapter, self, tally=self.tally)
            except Exception as error:  # noqa: BLE001 - a server must not notice that we cannot serve it
                self._attached = False
                self.tally.declined(self.adapter.backend.upstream, f"{type(error).__name__}: {error}".splitlines()[0])
                return None
        return found if isinstance(found, Attached) else None

    def _planned(self, common: Any) -> Any:
        attached = self._attach()
        if attached is None:
            return None
        try:
            batch, plan = attached.plan(self, common)
            metadata = attached.adapter.materialise(self, plan, batch, common, attached.staging, attached.environment)
        except Unserved:
            return None
        except Exception as error:  # noqa: BLE001 - vLLM serves what we cannot, whatever the reason
            self.tally.fell_back(self.adapter.backend.upstream, error)
            return None
        self.tally.planned += 1
        return metadata

    def _compare(self, common: Any, metadata: Any) -> None:
        attached = self._attach()
        if attached is None:
            return
        try:
            _, plan = attached.plan(self, common)
            attached.comparison.compare(plan, metadata)
        except Exception as error:  # noqa: BLE001 - vLLM's metadata is served whatever happens here
            self.tally.fell_back(self.adapter.backend.upstream, error)


def planned_class(upstream: type, adapter: Adapter, tally: Tally = TALLY) -> type:
    """A subclass of `upstream` with the planner in front; the name of the class stays."""
    namespace = {
        "adapter": adapter,
        "upstream": upstream,
        "tally": tally,
        "__module__": __name__,
        "__qualname__": f"Planned{upstream.__name__}",
    }
    return type(f"Planned{upstream.__name__}", (PlannedBuilder, upstream), namespace)
