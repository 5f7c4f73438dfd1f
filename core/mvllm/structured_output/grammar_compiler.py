"""Compiles grammars, and caches compiled ones."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.structured_outputs import StructuredOutputsParams
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.mask_worker import MaskTimeBudget, MaskWorker
from mvllm.structured_output.sandbox import GrammarSandbox
from mvllm.structured_output.sandbox_main import CompileJob
from mvllm.structured_output.schema_rewriting import keyword
from mvllm.structured_output.sequence_grammar import SequenceGrammar
from mvllm.structured_output.vocabulary import Vocabulary

logger = get_logger(__name__)

CACHE_BYTES = 256 << 20
CACHE_ENTRIES = 256
_OVERHEAD_BYTES = 64 << 10
_MAX_LOGGED = 128


class TransientCompileError(RequestError):
    """A compile error that does not depend on the grammar: a later request may succeed."""


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar in its initial state.

    Attributes:
        matcher: The library's matcher; copied for each sequence.
        first_bits: Tokens allowed in the initial state, a bit each.
        special_ids: Tokens that the library treats as end of text.
        memory: Approximate size in bytes.
        relaxations: What of a JSON schema it does not enforce.
    """

    matcher: Any
    special_ids: list[int]
    memory: int
    first_bits: bytes = b""
    relaxations: tuple[str, ...] = ()

    def start_sequence(
        self, request: EngineCoreRequest, worker: MaskWorker | None = None, budget: MaskTimeBudget | None = None
    ) -> SequenceGrammar:
        """A SequenceGrammar in the initial state. See there for `worker` and `budget`."""
        params = request.sampling_params
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)}
        return SequenceGrammar(
            request.request_id,
            self.matcher.deep_copy(),
            first_bits=self.first_bits,
            end_ids=sorted(ends),
            special_ids=self.special_ids,
            min_tokens=params.min_tokens,
            worker=worker,
            budget=budget,
            relaxations=self.relaxations,
        )


def make_compile_job(params: StructuredOutputsParams) -> CompileJob:
    """The compile job of a request. Requests with equal jobs share one compiled grammar."""
    whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern
    thoughts = (params.thoughts_start, params.thoughts_end)
    match params.form:
        case "json":
            return CompileJob("json", str(params.json), whitespace, *thoughts)
        case "json_object":
            return CompileJob("json", '{"type":"object"}', whitespace, *thoughts)
        case "choice":
            return CompileJob("choice", json.dumps(params.choice), None, *thoughts)
        case form:
            return CompileJob(form, str(getattr(params, form)), None, *thoughts)


class GrammarCompiler:
    """Compiles grammars for all compile threads.

    Args:
        load_vocabulary: Called once, for the first grammar.
    """

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Any = None
        self._logged: set[str] = set()

    def vocabulary(self) -> Vocabulary:
        """The tokens.

        Raises:
            RequestError: The model's tokenizer is not supported.
        """
        with self._loading:
            if self._vocabulary is None:
                vocabulary = self._load_vocabulary()
                self._tokenizer = vocabulary.build()
                self._vocabulary = vocabulary
            return self._vocabulary

    def compile(self, job: CompileJob, sandbox: GrammarSandbox) -> CompiledGrammar:
        """Compiles a grammar in `sandbox`, then in this process.

        Raises:
            RequestError: It cannot be compiled within the limits.
        """
        result = sandbox.run(job)
        if result.grammar is None:
            raise _compile_error(
                job, result.error or "", RequestError if result.is_permanent else TransientCompileError
            )
        api = llguidance_library.load()
        matcher = api.LLMatcher(self._tokenizer, result.grammar, log_level=0, limits=llguidance_library.limits(api))
        first_bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise _compile_error(job, str(matcher.get_error()))
        special_ids = [int(token) for token in self._tokenizer.eos_tokens]
        memory = result.memory + len(result.grammar) + len(first_bits) + _OVERHEAD_BYTES
        self._log_relaxations(result.relaxations)
        return CompiledGrammar(matcher, special_ids, memory, first_bits, result.relaxations)

    def _log_relaxations(self, relaxations: tuple[str, ...]) -> None:
        """Logs each keyword that is not enforced once. Names of formats come from clients, so there is a limit."""
        new = {keyword(each): each for each in relaxations}
        new = {name: each for name, each in new.items() if name not in self._logged}
        if not new or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.update(new)
        logger.warning(
            "A JSON schema has keywords that are not enforced while the output is generated: %s. Outputs are validated "
            "afterwards, except for formats. Logged once for each keyword.",
            ", ".join(new.values()),
        )


class GrammarCache:
    """The most recently used grammars and compile errors, within a limit of bytes and entries. Used from one thread."""

    def __init__(self) -> None:
        self._entries: OrderedDict[CompileJob, CompiledGrammar | RequestError] = OrderedDict()
        self._sizes: dict[CompileJob, int] = {}
        self.memory = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, job: CompileJob) -> CompiledGrammar | RequestError | None:
        """The cached result of `job`."""
        found = self._entries.get(job)
        if found is not None:
            self._entries.move_to_end(job)
        return found

    def put(self, job: CompileJob, result: CompiledGrammar | RequestError) -> None:
        """Adds a result, and evicts the least recently used ones beyond the limits."""
        size = len(job.text) + (result.memory if isinstance(result, CompiledGrammar) else _OVERHEAD_BYTES)
        self.memory += size - self._sizes.get(job, 0)
        self._entries[job], self._sizes[job] = result, size
        while len(self._entries) > CACHE_ENTRIES or self.memory > CACHE_BYTES:
            oldest, _ = self._entries.popitem(last=False)
            self.memory -= self._sizes.pop(oldest)


def _compile_error(job: CompileJob, reason: str, kind: type[RequestError] = RequestError) -> RequestError:
    return kind(
        f"structured_outputs: the {_WORDS[job.form]} cannot be used: {reason.removesuffix('.')}.",
        parameter="structured_outputs",
    )


_WORDS = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}
