"""A batch file gets the same responses as requests to a server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.server import SMALL

PROMPTS = ("Once upon a time", "The capital of France is", "The old dog")
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]


def test_a_batch_file_has_the_responses_of_the_server(client, tmp_path):
    requests = {
        f"{prompt}-{n}": ("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": 1})
        for prompt in PROMPTS
        for n in (1, 5, 14)
    }
    requests["chat"] = ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 9, "temperature": 0})
    requests["several"] = ("/v1/completions", {"prompt": list(PROMPTS), "max_tokens": 3, "temperature": 0})
    requests["vectors"] = ("/v1/embeddings", {"input": list(PROMPTS), "dimensions": 4})
    requests["bad"] = ("/v1/completions", {"prompt": "x", "top_p": 7})
    requests["long"] = ("/v1/completions", {"prompt": "word " * 4000})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"custom_id": i, "method": "POST", "url": u, "body": b}) for i, (u, b) in requests.items()]
    source.write_text("\n".join(lines * 3))
    command = [sys.executable, "-m", "mvllm.entrypoints.cli.main", "run-batch", "-i", str(source), "-o", str(target)]
    options = ["--served-model-name", "demo", "--max-concurrency", "8", "--max-num-seqs", "4", *SMALL]
    ran = subprocess.run(
        [*command, "--model", "demo", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"{3 * len(requests)} requests, 6 failed." in ran.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted([*requests] * 3)
    expected = {name: client.post(url, json=body) for name, (url, body) in requests.items()}
    for answer in answers:
        response, same = answer["response"], expected[answer["custom_id"]]
        assert response["status_code"] == same.status_code and answer["error"] is None
        if same.status_code != 200:
            assert response["body"] == same.json()
            continue
        if answer["custom_id"] == "vectors":
            for found, wanted in zip(response["body"]["data"], same.json()["data"], strict=True):
                assert found["embedding"] == pytest.approx(wanted["embedding"], abs=0.05)  # in bfloat16
            assert response["body"]["usage"] == same.json()["usage"]
            continue
        choices, wanted = response["body"]["choices"], same.json()["choices"]
        assert [choice.get("text") for choice in choices] == [choice.get("text") for choice in wanted]
        assert [choice.get("message") for choice in choices] == [choice.get("message") for choice in wanted]
        assert [choice["finish_reason"] for choice in choices] == [choice["finish_reason"] for choice in wanted]
        assert response["body"]["usage"]["completion_tokens"] == same.json()["usage"]["completion_tokens"]
