"""What users read after mistakes on the command line and in Python: cause and remedy in the words that they typed.

Every mistake is found before a worker starts. Messages about requests over HTTP are in `server/test_messages.py`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from mvllm.config.engine_keywords import EngineKeywords
from mvllm.errors import EngineDeadError, RequestFailedError
from tests.helpers.message_rows import Mistake, check_mistake, without_compat_hint, write_broken_models

GENERATE = "generate demo --prompt x"
BAD_JSON = "is not valid JSON (Expecting value at character 1). Give an object, such as '{\"key\": 1}'"
BAD_TEMPLATE = (
    "{models}/bad-template/chat_template.jinja, line 2: Encountered unknown tag 'endfr'. Jinja was looking for the "
    "following tags: 'endfor' or 'else'. The innermost block that needs to be closed is 'for'."
)
PAGE = "The page docs/reference/models.md lists all that are."

MISTAKES = [
    # --- models
    Mistake(
        "generate {models}/none --prompt x",
        "The model '{models}/none' was not found.\n  Folder: '{models}/none' does not exist ('{models}' does).\n"
        "  Hub: not asked, as this is no name of a repository (those read 'organisation/name').\nCheck the path.",
    ),
    Mistake(
        "generate demos --prompt x",
        "The model 'demos' was not found: '{cwd}/demos' does not exist, and the hub was not asked. Did you mean "
        "'demo', the packaged one?",
    ),
    Mistake(
        "generate {models}/empty --prompt x",
        "{models}/empty is not a model folder: it has no config.json. Pass a folder written by save_pretrained() or a "
        "model name from the hub.",
    ),
    Mistake(
        "generate {models}/bad-json --prompt x",
        "{models}/bad-json/config.json cannot be read as JSON: Expecting value: line 1 column 19 (char 18)",
    ),
    Mistake(
        "serve {models}/pickle --port 0",
        "{models}/pickle offers its weights only as pickle files (pytorch_model.bin), which can run code when they are "
        "opened and are refused. Convert them: load the model with transformers where you trust it, and call "
        "save_pretrained(folder), which writes safetensors; or take a revision of the model that has safetensors.",
    ),
    Mistake(
        "generate {models}/truncated --prompt x --engine-core-process",
        "{models}/truncated/model.safetensors is cut short: its header describes 4924472 bytes, the file has 1000000. "
        "The file is damaged: download or copy it again.",
    ),
    Mistake(
        "generate {models}/pointer --prompt x",
        "{models}/pointer/model.safetensors is a pointer of Git LFS, not the weights themselves. Run `git lfs pull` in "
        "its repository, or download the file.",
    ),
    Mistake(
        "generate {models}/shard --prompt x",
        "{models}/shard/model.safetensors.index.json names the file 'model-00001-of-00002.safetensors', which is "
        "missing from {models}/shard. Download the model again.",
    ),
    Mistake(
        "serve {models}/no-tokenizer --port 0 --api-server-count 2",
        "{models}/no-tokenizer holds no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json, spiece.model, "
        "tokenizer_config.json is there. Copy the tokenizer's files into it, or name a folder or model that has them "
        "with --tokenizer FOLDER.",
    ),
    Mistake(
        "generate {models}/unknown --prompt x --model-impl native",
        "{models}/unknown/config.json: the architecture 'LamaForCausalLM' is not supported. It has no class here, and "
        f"--model-impl is 'native'. Supported ones with similar names: LlamaForCausalLM, Llama4ForCausalLM. {PAGE}",
    ),
    Mistake(
        "generate {models}/t5 --prompt x",
        "{models}/t5/config.json: the architecture 'T5ForConditionalGeneration' is not supported. It is an encoder "
        f"with a decoder that attends to it; of such models only Whisper is supported. {PAGE}",
    ),
    Mistake(
        "generate {models}/own-code --prompt x --trust-remote-code --model-impl native",
        "{models}/own-code/config.json: the architecture 'MyNet' is not supported. It has no class here, and "
        "--model-impl is 'native'. The folder's own model code (auto_map) is never run, with or without "
        f"--trust-remote-code. {PAGE}",
    ),
    # --- commands and options
    Mistake("genrate demo", "unknown command 'genrate'. Did you mean generate?", 2),
    Mistake("fly", "unknown command 'fly'.", 2),
    Mistake("generate demo Once upon", "unrecognized arguments: Once upon. A text is given with --prompt", 2),
    Mistake("serve demo --port", "argument --port: a value is missing", 2),
    Mistake("generate demo --json", "unrecognized arguments: --json", 2),
    Mistake("generate demo --max-tokns 5", "unrecognized arguments: --max-tokns 5. Did you mean --max-tokens?", 2),
    Mistake("generate demo --temprature=1", "unrecognized arguments: --temprature=1. Did you mean --temperature?", 2),
    Mistake("generate", "no model is given; add one, as in `mvllm generate MODEL` or with --model", 2),
    Mistake("serve", "No model is given. Name one, as in `mvllm serve MODEL`, or several with --models FILE."),
    Mistake(
        f"{GENERATE} --dtype float8",
        "argument --dtype: invalid choice: 'float8' (choose from auto, float32, bfloat16, float16, half, float). "
        "Weights of fewer bits are a quantization: --quantization int8 or --quantization int4 makes them while "
        "loading.",
        2,
    ),
    Mistake(
        f"{GENERATE} --dtype fp16",
        "argument --dtype: invalid choice: 'fp16' (choose from auto, float32, bfloat16, float16, half, float). Did you "
        "mean float16?",
        2,
    ),
    Mistake(
        f"{GENERATE} --quantization awq",
        "--quantization is 'awq', which is a way to store weights, but {demo}/config.json names no quantization: the "
        "checkpoint is not quantized. Leave it out, or quantize while loading with --quantization int8 or "
        "--quantization int4.",
    ),
    Mistake(
        f"{GENERATE} --max-model-len 100000",
        "--max-model-len is 100000, but the model takes at most 1024 tokens (max_position_embeddings = 1024 in "
        "{demo}/config.json). Lower --max-model-len to 1024, or, if the model is known to do more, change that key "
        "with --hf-overrides.",
    ),
    Mistake(f"{GENERATE} --max-num-seqs -1", "--max-num-seqs must be an integer >= 1 and <= 65536, found -1."),
    Mistake(f"{GENERATE} --memory-utilization 90", "--memory-utilization must be a number > 0 and <= 1, found 90.0."),
    Mistake(
        f"{GENERATE} --gpu-memory-utilization=1.5", "--gpu-memory-utilization must be a number > 0 and <= 1, found 1.5."
    ),
    Mistake(
        f"{GENERATE} --tensor-parallel-size 5",
        "--tensor-parallel-size is 5, which does not divide the model's 6 attention heads. Choose 1 or 2.",
    ),
    Mistake(
        "serve demo --port 0 -tp 6",
        "--tensor-parallel-size is 6, which does not divide the model's intermediate_size of 512, the width of its "
        "MLPs. Choose 1 or 2.",
    ),
    Mistake(f"{GENERATE} --speculative-config ngram", f"argument --speculative-config: 'ngram' {BAD_JSON}", 2),
    Mistake(
        "serve demo --default-chat-template-kwargs x", f"argument --default-chat-template-kwargs: 'x' {BAD_JSON}", 2
    ),
    Mistake(f"{GENERATE} --temperature hot", "argument --temperature: must be a number, found 'hot'", 2),
    Mistake(f"{GENERATE} --temperature -1", "--temperature must be a finite number >= 0; got -1.0"),
    Mistake(f"{GENERATE} --seed abc", "argument --seed: must be an integer, found 'abc'", 2),
    Mistake("serve demo --port 99999", "--port is 99999; it must be from 0 to 65535."),
    Mistake("serve demo --host 192.0.2.1", "Cannot listen on 192.0.2.1, port 8000: Cannot assign requested address."),
    Mistake(
        "serve demo --chat-template {models}/none",
        "--chat-template: the file '{models}/none' cannot be read: No such file or directory.",
    ),
    Mistake(
        "serve demo --chat-template {%\N{NO-BREAK SPACE}fro\N{NO-BREAK SPACE}%}",
        "--chat-template, line 1: Encountered unknown tag 'fro'.",
    ),
    Mistake("serve {models}/bad-template --port 0", f"The chat template {BAD_TEMPLATE}"),
    Mistake("serve {models}/bad-template --port 0 --api-server-count 2", f"The chat template {BAD_TEMPLATE}"),
    Mistake(
        "serve demo --lora-modules a={models}/none",
        "--lora-modules needs --enable-lora. Add it, or leave --lora-modules out.",
    ),
    Mistake(
        "serve demo --port 0 --enable-lora --lora-modules a={models}/none",
        "--lora-modules a={models}/none: There is no adapter folder '{models}/none'. Give the path of a folder with "
        "adapter_config.json and adapter_model.safetensors; one from the hub has to be downloaded first.",
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_broken_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_on_the_command_line_says_cause_and_remedy_before_a_worker_starts(
    mistake: Mistake, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, models, monkeypatch, capsys)


# ------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: LLM("demo", max_model_length=5),  # type: ignore[call-arg]
            "There is no engine setting 'max_model_length'. Did you mean 'max_model_len'?",
        ),
        (
            lambda: LLM("demo", gpu_memory_utilization=1.5),
            "gpu_memory_utilization must be a number > 0 and <= 1, found 1.5.",
        ),
        (
            lambda: LLM("demo", dtype="bf16"),
            "dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', 'half', 'float', found 'bf16'. Did you "
            "mean bfloat16?",
        ),
        (
            lambda: SamplingParams(temprature=1),  # type: ignore[call-arg]
            "SamplingParams has no parameter 'temprature'. Did you mean 'temperature'?",
        ),
        (
            lambda: SamplingParams(0.5),  # type: ignore[misc]
            "SamplingParams takes parameters by name only, SamplingParams(name=value).",
        ),
        (
            lambda: LLM("demo", load_format="safetensor"),
            "load_format must be one of 'auto', 'safetensors', 'gguf', 'dummy', found 'safetensor'. Did you mean "
            "'safetensors'?",
        ),
        (lambda: SamplingParams(top_p=2), "top_p must be a number > 0 and <= 1; got 2"),
    ],
)
def test_a_mistake_in_python_names_the_nearest_keyword_or_what_is_permitted(call: Callable[[], Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert without_compat_hint(str(caught.value)).removesuffix(".0") == says


def test_the_constructor_lists_every_setting_with_its_type_and_default() -> None:
    """For `help(LLM)`, completion, and type checkers, which read EngineKeywords."""
    found = inspect.signature(LLM).parameters
    options = {option.name: option for option in EngineArgs.options()}
    assert set(found) == set(options)
    assert all(found[name].default == options[name].default for name in options if name != "model")
    assert "--" not in str(found["max_model_len"]) and "'auto'" in str(found["max_model_len"])
    keywords, settings = typing.get_type_hints(EngineKeywords), typing.get_type_hints(EngineArgs)
    names = {each: name for name, option in options.items() for each in (name, *option.aliases)}
    assert set(keywords) == set(names) - {"model"}
    wider = {name for name in keywords if keywords[name] != settings[names[name]]}
    assert wider == {"tokenizer", "generation_config", "dtype", "logits_processors", "allowed_media_domains"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", kv_cache_memory_bytes=16 << 20) as llm:
        yield llm


def test_the_repr_says_model_platform_and_state(llm: LLM) -> None:
    assert repr(llm) == "LLM('demo', platform cpu, ready)"
    llm.sleep()
    assert repr(llm) == "LLM('demo', platform cpu, asleep)"
    llm.wake_up()
    assert repr(llm.llm_engine) == "LLMEngine('demo', platform cpu, ready)"


def test_a_failed_prompt_raises_at_the_end_with_the_outputs_of_the_others(llm: LLM) -> None:
    good = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-"))
    with pytest.raises(RequestFailedError) as caught:
        llm.generate(["x", "y", "z"], [good, bad, good], use_tqdm=False)
    assert str(caught.value) == (
        "Prompt 1 of 3: structured_outputs: the regular expression cannot be used: unclosed character class, at "
        "character 1 of the regex '[a-'. The error's `outputs` has the outputs of all."
    )
    assert caught.value.parameter == "structured_outputs"
    assert [len(output.outputs[0].token_ids) for output in caught.value.outputs] == [3, 0, 3]
    with pytest.raises(RequestFailedError, match=r"^structured_outputs: the regular"):
        llm.chat([{"role": "user", "content": "x"}], bad, use_tqdm=False)
    outputs = llm.generate(["x", "y"], [good, bad], use_tqdm=False, raise_on_error=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.beam_search("x", None), "params must be BeamSearchParams; found None."),
        (lambda llm: llm.score("x", None), "data_2 must be a text, a dict, or a list of these; found None."),
        (lambda llm: llm.collective_rpc("fly"), "collective_rpc: workers have no method 'fly'. The setting"),
    ],
)
def test_arguments_of_another_type_are_named(llm: LLM, call: Callable[[LLM], Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(llm)
    assert str(caught.value).startswith(says)


def test_a_prompt_that_is_longer_than_the_model_permits_is_to_be_shortened(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"Shorten the prompt\.$"):
        llm.generate([5] * 2000, use_tqdm=False)


def test_a_misspelt_environment_variable_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MVLLM_PLATFROM", "cpu")
    with pytest.raises(ValueError):
        LLM("demo", tensor_parallel_size=5)
    assert "MVLLM_PLATFROM is not known and has no effect. Did you mean MVLLM_PLATFORM?" in caplog.text


def test_a_closed_llm_says_so() -> None:
    llm = LLM("demo", kv_cache_memory_bytes=16 << 20)
    llm.close()
    assert repr(llm) == "LLM('demo', closed)"
    with pytest.raises(EngineDeadError, match=r"This LLM has been closed; create a new one\."):
        llm.generate("x")
