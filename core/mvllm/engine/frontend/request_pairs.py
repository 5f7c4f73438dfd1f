"""Request pairs in the front end: which requests have a companion, and its prompt.

    SamplingParams ──pair_name──> entry point of `mvllm.request_pairs` ──make──> RequestPair, a field of the request
                                                                                      │
    scheduler: both sides in the same steps (scheduler/request_pairs.py)              v
    worker: the entry point `RequestPair.combiner` of `mvllm.logits_combiners` combines their logits

A package with a kind of pairs has one entry point of each group. Core knows none of the kinds, but that
`guidance_scale` asks for the kind `guidance`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mvllm import plugin_groups
from mvllm.config.engine_config import EngineConfig
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.errors import ConfigError, RequestError
from mvllm.installable import installable_parts
from mvllm.messages.field_checks import describe_value
from mvllm.messages.requests import RequestPair
from mvllm.messages.sampling_params import SamplingParams

EXTRA_ARG = "request_pair"
"""The key of `SamplingParams.extra_args` that names a kind of pairs."""

_GUIDANCE = "guidance"
_PARTS = {_GUIDANCE: "image-generation"}
"""Kinds of mvllm's own parts: known where the package is not installed."""


@dataclass(frozen=True)
class PairContext:
    """What a kind of pairs may use of an engine.

    Attributes:
        config: The engine's configuration.
        tokenizer: The model's tokenizer, if there is one.
        check_token_ids: Checks the token ids of a prompt, and returns them.
        check_length: Checks the number of tokens of a prompt, or a lower bound; its second argument says which.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None
    check_token_ids: Callable[[Sequence[int]], list[int]]
    check_length: Callable[[int, str], None]


class PairRequests(ABC):
    """One kind of request pairs, for the requests of one engine. Its module needs no torch.

    Attributes:
        combiner: The entry point of its LogitsCombiner.
        parameter, prompt_parameter: The parameters that ask for a pair and for the companion's prompt, for errors.
    """

    combiner: str
    parameter: str = "extra_args"
    prompt_parameter: str = "extra_args"

    def __init__(self, context: PairContext) -> None:
        self.context = context

    @abstractmethod
    def settings(self, params: SamplingParams) -> bytes:
        """What the combiner reads: for instance a msgspec.Struct, encoded. Values of `extra_args` are those of any HTTP
        client, so their types are checked here.

        Raises:
            RequestError: A parameter is not valid.
        """

    def shared_prompt(self, params: SamplingParams) -> list[int] | None:
        """The companion's prompt if it is the same for every prompt with these parameters; else None. Called once for
        all these prompts.

        Raises:
            RequestError: It is not valid.
        """
        return None

    def prompt_for(self, params: SamplingParams, prompt_token_ids: list[int]) -> list[int]:
        """The companion's prompt, without a `shared_prompt`.

        Raises:
            RequestError: There is none.
        """
        raise RequestError(f"{self.parameter} needs {self.prompt_parameter}.", parameter=self.prompt_parameter)


class PairRequestsOfEngine:
    """The kinds of pairs that the requests of one engine have asked for."""

    def __init__(self, context: PairContext) -> None:
        self._context = context
        self._kinds: dict[str, PairRequests] = {}

    def kind_of(self, params: SamplingParams) -> PairRequests | None:
        """The kind that a request asks for; None for most requests.

        Raises:
            RequestError: It is not installed, or cannot be combined with other parameters or settings.
        """
        name = pair_name(params)
        if name is None:
            return None
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = _load(name)(self._context)
        return kind


def pair_name(params: SamplingParams) -> str | None:
    """The name of the kind of pairs that a request asks for.

    Raises:
        RequestError: `extra_args` has something else than a name, or asks for another kind than `guidance_scale`.
    """
    name = params.extra_args.get(EXTRA_ARG) if params.extra_args else None
    if name is not None and not isinstance(name, str):
        raise RequestError(
            f"extra_args[{EXTRA_ARG!r}] must be the name of a kind of request pairs; got {describe_value(name)}",
            parameter="extra_args",
        )
    if not params.is_guided:
        return name
    if name not in (None, _GUIDANCE):
        raise RequestError(
            f"guidance_scale cannot be combined with extra_args[{EXTRA_ARG!r}] = {describe_value(name)}: a request has "
            "one companion. Omit one.",
            parameter="extra_args",
        )
    return _GUIDANCE


def make_pair(
    kind: PairRequests, params: SamplingParams, prompt_token_ids: list[int], shared: list[int] | None
) -> RequestPair:
    """The companion of a request.

    Args:
        shared: The result of `shared_prompt`.

    Raises:
        RequestError: A parameter is not valid.
    """
    return RequestPair(
        combiner=kind.combiner,
        prompt_token_ids=kind.prompt_for(params, prompt_token_ids) if shared is None else shared,
        settings=kind.settings(params),
        parameter=kind.parameter,
        prompt_parameter=kind.prompt_parameter,
    )


def _load(name: str) -> type[PairRequests]:
    """The class of a kind, whose combiner is installed: a worker that lacks it fails, and the engine with it."""
    parameter = "guidance_scale" if name == _GUIDANCE else "extra_args"
    try:
        source = plugin_groups.find(plugin_groups.REQUEST_PAIRS, name)
        if source is None:
            part = _PARTS.get(name)
            package = installable_parts().get(part or "")  # without a command: clients of a server read this, too
            hint = f"{parameter} needs the package {package}, which is not installed." if package else None
            names = ", ".join(plugin_groups.allowed_names(plugin_groups.REQUEST_PAIRS)) or "none"
            raise RequestError(
                hint or f"{parameter}: no installed package has request pairs {name[:40]!r}. There are: {names}.",
                parameter=parameter,
            )
        found = plugin_groups.load(plugin_groups.REQUEST_PAIRS, source)
    except ConfigError as e:
        raise RequestError(str(e), parameter=parameter) from e
    if not (isinstance(found, type) and issubclass(found, PairRequests)):
        raise RequestError(
            f"{source} must name a subclass of mvllm.extension_api.request_pairs.PairRequests.", parameter=parameter
        )
    try:
        plugin_groups.require(plugin_groups.LOGITS_COMBINERS, found.combiner)
    except ConfigError as e:
        raise RequestError(str(e), parameter=parameter) from e
    return found
