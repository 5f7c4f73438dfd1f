"""`LLM`: inputs, outputs, errors and interrupts."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from mvllm import LLM, ConfigError, RequestError, SamplingParams
from mvllm.errors import EngineDeadError
from tests.unit.entrypoints.builders import ANSWER_TEXT, TOKENIZER, echo, save_model_folder, use_fake_engine

ALL = SamplingParams(max_tokens=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def clients(monkeypatch):
    return use_fake_engine(monkeypatch, echo)


@pytest.fixture
def llm(folder, clients):
    with LLM(folder) as llm:
        yield llm


def generate(llm, prompts, params=ALL, **kwargs):
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


def is_usable(llm):
    return generate(llm, "Hello")[0].outputs[0].text == "Hello"


class TestPrompts:
    def test_one_text(self, llm):
        (output,) = generate(llm, "Hello world")
        assert (output.prompt, output.outputs[0].text) == ("Hello world", "Hello world")

    def test_many_in_order_although_short_ones_end_first(self, llm):
        prompts = ["The cat sat on the mat", "cat", "The cat", "x"]
        assert [output.prompt for output in generate(llm, prompts)] == prompts
        assert [output.outputs[0].text for output in generate(llm, prompts)] == prompts

    def test_token_ids_of_one_prompt(self, llm):
        assert [output.prompt_token_ids for output in generate(llm, [5, 6, 7])] == [[5, 6, 7]]

    @pytest.mark.parametrize("prompt", [[np.int64(5), np.int64(6)], np.array([5, 6]), range(5, 7), (5, 6)])
    def test_token_ids_in_other_kinds_of_lists(self, llm, prompt):
        assert [output.prompt_token_ids for output in generate(llm, prompt)] == [[5, 6]]

    @pytest.mark.parametrize("prompt", [None, 5, 1.5, np.array(5), object()])
    def test_invalid_prompts_are_rejected(self, llm, prompt):
        with pytest.raises(RequestError, match="A prompt is"):
            generate(llm, prompt)

    def test_token_ids_of_several(self, llm):
        outputs = generate(llm, [[5, 6], {"prompt_token_ids": [7]}, "x", {"prompt": "y"}])
        assert [o.prompt_token_ids for o in outputs] == [[5, 6], [7], TOKENIZER.encode("x"), TOKENIZER.encode("y")]

    def test_one_dict(self, llm):
        assert generate(llm, {"prompt": "Hello"})[0].prompt == "Hello"

    def test_none_at_all(self, llm):
        assert generate(llm, []) == []

    @pytest.mark.parametrize("bad", [[-1], "", {"promt": "x"}, 5.0])
    def test_an_invalid_prompt_is_rejected_before_any_request_is_queued(self, llm, clients, bad):
        with pytest.raises(RequestError, match="Prompt 1 of 3"):
            generate(llm, ["Hello", bad, "x"])
        assert clients[0].requests == []
        assert is_usable(llm)


class TestParams:
    def test_one_for_all(self, llm):
        outputs = generate(llm, ["The cat sat", "The cat on the mat"], SamplingParams(max_tokens=2))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 2]

    def test_one_for_each(self, llm):
        outputs = generate(llm, ["The cat sat"] * 2, [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]

    def test_the_number_must_match(self, llm):
        with pytest.raises(RequestError, match="a list of 1 for 2 prompts"):
            generate(llm, ["a", "b"], [ALL])

    def test_given_parameters_are_not_modified(self, llm):
        params = SamplingParams(max_tokens=3)
        before = params.clone()
        generate(llm, ["a", "b"], params)
        assert params == before

    def test_none_means_the_models_defaults(self, tmp_path, clients):
        folder = save_model_folder(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 11}')
        with LLM(folder) as llm:
            generate(llm, "Hello", None)
            assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=11)
        assert clients[0].requests[0].sampling_params.top_k == 11

    def test_several_sequences(self, llm):
        (output,) = generate(llm, "The cat", SamplingParams(n=3, max_tokens=None))
        assert [(s.index, s.text) for s in output.outputs] == [(0, "The cat"), (1, "The cat"), (2, "The cat")]

    def test_priorities_reach_the_engine(self, folder, clients):
        with LLM(folder, scheduling_policy="priority") as llm:
            generate(llm, ["a", "b"], priority=[2, -1])
        assert [request.priority for request in clients[0].requests] == [2, -1]

    def test_priorities_must_match_in_number(self, llm):
        with pytest.raises(RequestError, match="priority is a list of 1"):
            generate(llm, ["a", "b"], priority=[2])


HELLO = [{"role": "user", "content": "Hello"}]


def test_a_thinking_budget_has_the_tags_that_the_template_shows(clients, tmp_path):
    """The outputs of DeepSeek-R1 begin within the thoughts, without a tag."""
    template = "{# <｜Assistant｜><think> </think> #}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = save_model_folder(tmp_path, template)
    with LLM(folder) as llm:
        limited = SamplingParams(max_tokens=None, thinking_token_budget=5)
        llm.chat(HELLO, limited, use_tqdm=False)
        generate(llm, ["a", "b"], [limited, SamplingParams(max_tokens=None)])
        generate(llm, "a", SamplingParams(max_tokens=None, thinking_token_budget=5, thinking_tags=["<a>", "</a>"]))
    chat, first, second, named = (request.sampling_params for request in clients[0].requests)
    for params in (chat, first):
        assert params.thinking_token_budget == 5 and not params.thinking_tokens.starts
        assert params.thinking_tokens.ends == [TOKENIZER.encode("</think>")]
    assert second.thinking_tokens is None and named.thinking_tokens.starts


class TestChat:
    def test_one_conversation(self, llm):
        (output,) = llm.chat(HELLO, ALL, use_tqdm=False)
        assert output.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids == TOKENIZER.encode(output.prompt, add_special_tokens=False)

    def test_several(self, llm):
        outputs = llm.chat([HELLO, [{"role": "user", "content": "x"}]], ALL, use_tqdm=False)
        assert ["Hello" in output.prompt for output in outputs] == [True, False]

    def test_parts_of_text_are_joined(self, llm):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        (output,) = llm.chat([{"role": "user", "content": parts}], ALL, use_tqdm=False)
        assert "user\na\nb<|im_end|>" in output.prompt

    def test_the_last_message_may_be_continued(self, llm):
        messages = [*HELLO, {"role": "assistant", "content": "I am"}]
        (output,) = llm.chat(messages, ALL, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
        assert output.prompt.endswith("assistant\nI am")

    def test_a_custom_template(self, llm):
        template = "{{ greeting }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
        (output,) = llm.chat(
            HELLO, ALL, use_tqdm=False, chat_template=template, chat_template_kwargs={"greeting": "Hi"}
        )
        assert output.prompt == "Hi[Hello]"

    @pytest.mark.parametrize(
        ("messages", "options", "words"),
        [
            ([], {}, "list of messages"),
            ([[]], {}, "no messages"),
            ("Hello", {}, "list of messages"),
            ([{"content": "x"}], {}, "needs a 'role'"),
            ([{"role": "user"}], {}, "no 'content'"),
            ([{"role": "user", "content": 5}], {}, "found 5"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
            (HELLO, {"continue_final_message": True}, "add_generation_prompt=False"),
            (HELLO, {"chat_template": "{{ 1 / 0 }}"}, "chat template failed in line 1"),
            (HELLO, {"chat_template": "folder/template.jinja"}, "a Jinja template itself, not its file"),
            (HELLO, {"chat_template": "{% for %}"}, "chat template failed in line 1"),
            (HELLO, {"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat template failed"),
            (HELLO, {"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
            (HELLO, {"chat_template_kwargs": {"messages": []}}, "may not set messages"),
            (HELLO, {"chat_template_kwargs": 5}, "must be a dict; found 5"),
            ([5], {}, "list of messages; found 5"),
            ([HELLO, 5], {}, "list of messages; found 5"),
            ([{"role": "user", "content": "a\ud800"}], {}, "lone surrogate"),
        ],
    )
    def test_invalid_conversations_are_rejected(self, llm, messages, options, words):
        with pytest.raises(RequestError, match=words):
            llm.chat(messages, ALL, use_tqdm=False, **options)
        assert is_usable(llm)

    def test_a_missing_template_is_an_error(self, tmp_path, clients):
        with LLM(save_model_folder(tmp_path, chat_template=None)) as llm:
            with pytest.raises(RequestError, match="no chat template"):
                llm.chat(HELLO, ALL, use_tqdm=False)


class TestProgress:
    def test_a_custom_progress_function_is_called(self, llm):
        bars = []

        class Bar:
            def __init__(self, total, desc, **kwargs):
                self.total, self.count, self.closed = total, 0, False
                bars.append(self)

            def update(self, n):
                self.count += n

            def set_postfix_str(self, text, refresh=True):
                self.text = text

            def close(self):
                self.closed = True

        llm.generate(["a", "b"], ALL, use_tqdm=Bar)
        (bar,) = bars
        assert (bar.total, bar.count, bar.closed) == (2, 2, True)
        assert "tokens/s" in bar.text

    def test_it_is_shown_unless_switched_off(self, llm, caplog):
        with caplog.at_level("INFO", logger="mvllm.progress"):
            llm.generate("a", ALL)
            assert "Processed prompts: 1 of 1 (100%)" in caplog.text
            caplog.clear()
            llm.generate("a", ALL, use_tqdm=False)
        assert not caplog.records


class TestRecovery:
    def test_after_an_error_in_the_middle(self, llm, clients):
        class Broken:
            def __init__(self, **kwargs):
                pass

            def update(self, n):
                raise OSError("terminal gone")

            def close(self):
                pass

        with pytest.raises(OSError, match="terminal gone"):
            llm.generate(["a", "The cat sat on the mat"], ALL, use_tqdm=Broken)
        assert not clients[0].has_requests()
        assert is_usable(llm)

    def test_after_ctrl_c(self, llm, clients):
        step = clients[0].step
        seen = []

        def interrupted_step():
            if not seen:
                os.kill(os.getpid(), signal.SIGINT)
            seen.append(step())  # the step is not interrupted
            return seen[-1]

        clients[0].step = interrupted_step
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["The cat sat on the mat", "Hello world"])
        assert len(seen) == 1
        assert not clients[0].has_requests()
        assert signal.getsignal(signal.SIGINT) is before
        assert is_usable(llm)

    def test_closing_may_be_repeated_and_later_use_is_an_error(self, folder, clients):
        llm = LLM(folder)
        llm.close()
        llm.close()
        assert clients[0].is_shut_down
        for use in (lambda: generate(llm, "Hello"), llm.get_tokenizer, lambda: llm.llm_engine, llm.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match="closed"):
                use()

    def test_the_context_manager_closes_it(self, folder, clients):
        with pytest.raises(ZeroDivisionError), LLM(folder):
            raise ZeroDivisionError
        assert clients[0].is_shut_down


def test_attributes_that_evaluation_tools_read(llm):
    assert llm.llm_engine.model_config.max_model_len == llm.model_config.max_model_len == 256
    assert llm.get_tokenizer().encode("Hello") == TOKENIZER.encode("Hello")
    assert llm.reset_prefix_cache()


def test_an_unknown_setting_names_the_nearest(folder, clients):
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(folder, max_model_length=5)
    assert clients == []


def test_the_output_text_is_that_of_the_core(folder, monkeypatch):
    use_fake_engine(monkeypatch)
    with LLM(folder) as llm:
        assert generate(llm, "x")[0].outputs[0].text == ANSWER_TEXT
