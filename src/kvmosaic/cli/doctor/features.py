"""Features of vLLM that users switch on, and which of them work together with the chunk cache."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

from kvmosaic.cli.doctor.row import Row, reason
from kvmosaic.engines.vllm.arguments import configuration, problems_of, served_dtype

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding without a draft model that has KV."""


@dataclass(frozen=True)
class Feature:
    """An argument of vLLM that switches something on."""

    argument: str
    """Its name in vLLM's ``EngineArgs``, where its default means that the feature is off."""
    limit: Callable[[Any], str] = lambda config: ""
    """What does not work, or not as well, in a ``VllmConfig``; empty if there is no limit."""

    @property
    def option(self) -> str:
        return f"--{self.argument.replace('_', '-')}"

    def value(self, args: Any) -> Any:
        """The argument's value; ``None`` if the feature is off, or the release does not have it."""
        value = getattr(args, self.argument, None)
        return None if value == self._off(args) else value

    def without(self, args: Any) -> Any:
        """A copy of the arguments in which the feature is off."""
        others = deepcopy(args)
        setattr(others, self.argument, self._off(args))
        return others

    def _off(self, args: Any) -> Any:
        return next((each.default for each in fields(args) if each.name == self.argument), None)


def _of_adapters(config: Any) -> str:
    if not config.parallel_config.enable_expert_parallel:
        return ""
    return (
        "with expert parallelism, ranks hold different parts of an adapter: requests with adapters are served plainly"
    )


def _of_drafts(config: Any) -> str:
    if config.speculative_config.method in WITHOUT_KV:
        return ""
    return "after reuse, fewer drafts are accepted, because the draft model's own KV of reused documents is missing"


def _of_stages(config: Any) -> str:
    return "learned sinks and window_tails are not used"


def _of_engines(config: Any) -> str:
    return "never tested; each rank keeps documents of its own in memory, and only disks and remote stores are shared"


def _of_experts(config: Any) -> str:
    return "never tested; compare answers with those at recompute_ratio=1.0 before relying on it"


def _of_sleep(config: Any) -> str:
    return (
        "while vLLM sleeps, the device pool and host memory of the chunk cache stay allocated; afterwards, documents "
        "come from disks and remote stores, or are computed again"
    )


FEATURES = (
    Feature("kv_cache_dtype"),
    Feature("enable_lora", _of_adapters),
    Feature("speculative_config", _of_drafts),
    Feature("pipeline_parallel_size", _of_stages),
    Feature("data_parallel_size", _of_engines),
    Feature("enable_expert_parallel", _of_experts),
    Feature("decode_context_parallel_size"),
    Feature("prefill_context_parallel_size"),
    Feature("kv_offloading_size"),
    Feature("kv_events_config"),
    Feature("enable_sleep_mode", _of_sleep),
)


class Trial:
    """vLLM's configuration with these ``EngineArgs``, made without starting anything, and the reasons that prevent
    it."""

    def __init__(self, args: Any) -> None:
        self._asked = {feature: feature.value(args) for feature in FEATURES if feature.value(args) is not None}
        self._refused: dict[Feature, str] = {}
        """Reasons of features that vLLM itself refuses here. The others are tried without these."""
        self._args = args
        self.error: Exception | None = None
        """Why there is no configuration, even without such features."""
        self.config = self._build()
        """vLLM's ``VllmConfig``; ``None`` if there is an error."""
        self._problems = [] if self.config is None else problems_of(self.config)
        self._due = {feature: self._due_to(feature) for feature in self._left()}

    def problems(self) -> Iterator[Row]:
        """A row for each problem that leaving out one feature does not solve."""
        due = {problem for problems in self._due.values() for problem in problems}
        for problem in self._problems:
            if problem not in due:
                yield Row("model in vLLM", "fail", "not supported", problem)

    def features(self) -> Iterator[Row]:
        """A row for each feature that is switched on."""
        for feature, value in self._asked.items():
            shown = _shown(value)
            if feature in self._refused:
                yield Row(feature.option, "fail", f"{shown}: vLLM refuses it", self._refused[feature])
            elif self.config is None:
                yield Row(feature.option, "warn", f"{shown}: not checked", "vLLM refuses the model, see there")
            elif problems := self._due[feature]:
                yield Row(feature.option, "fail", f"{shown}: refused at start", "; ".join(problems))
            elif limit := feature.limit(self.config):
                yield Row(feature.option, "warn", f"{shown}: works, with a limit", limit)
            else:
                yield Row(feature.option, "ok", f"{shown}: works")

    def _build(self) -> Any:
        while True:
            try:
                return build(self._args)
            except Exception as error:
                why = reason(error)
                culprit = next((feature for feature in self._left() if self._changes(why, feature)), None)
                if culprit is None:
                    self.error = error
                    return None
            self._refused[culprit] = why
            self._args = culprit.without(self._args)

    def _left(self) -> list[Feature]:
        return [feature for feature in self._asked if feature not in self._refused]

    def _changes(self, why: str, feature: Feature) -> bool:
        """Whether an error is another one, or gone, without a feature."""
        try:
            build(feature.without(self._args))
        except Exception as error:
            return reason(error) != why
        return True

    def _due_to(self, feature: Feature) -> list[str]:
        """The problems that are gone without a feature."""
        if not self._problems:
            return []
        try:
            left = problems_of(build(feature.without(self._args)))
        except Exception:  # another feature needs this one
            return []
        return [problem for problem in self._problems if problem not in left]


def build(args: Any) -> Any:
    """The ``VllmConfig`` of these ``EngineArgs``, as ``kvmosaic serve`` makes it. The arguments stay as they are."""
    used = deepcopy(args)
    used.dtype = served_dtype(used)
    return configuration(used)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "method" in value:
        return str(value["method"])
    return str(value) if isinstance(value, (str, int, float)) and value is not True else "on"
