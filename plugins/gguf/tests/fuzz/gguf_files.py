"""Feeds damaged GGUF files to `read_gguf` and `model_folder` for as long as asked.

    python -m plugins.gguf.tests.fuzz.gguf_files --minutes 60

A file is a small model that this program makes, after a few random changes: of its bytes, or of a key, value, list or
tensor before it is encoded, which reaches the code behind the header. A child process with limited memory reads it. A
file passes if it is read, or refused with a ModelError, in time. Any other exception, a killed or silent child is a
failure: the file is kept, its report printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from plugins.gguf.tests.encoded_files import ARRAY, F32, Q4_0, TEXT, U32, array, tensor, text, value

I32, FLOAT, BOOL, U64 = 5, 6, 7, 10
Q8_0, Q6_K = 8, 14
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", FLOAT: "f", BOOL: "B", U64: "Q", 11: "q", 12: "d"}
BYTES_PER_BLOCK = {F32: (1, 4), 1: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34), Q6_K: (256, 210)}
INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    31,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
NUMBERS = [*INTEGERS, -1, -(2**31), 0.0, -0.0, 1e-40, 1e38, float("nan"), float("inf"), float("-inf"), 0.5]
TEXTS = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"a" * 5000,
    "💥".encode(),
    b"1e999",
    b"../../x",
    b"<0x00>",
    b"<0xZZ>",
]
TEXTS += [b"{{ x }}", b"{% for i in range(9**9) %}", b"llama", b"gpt2", b"bert", b"gemma3", b"qwen2", b"mmproj"]
PARTS = ("mvllm_gguf.model_config", "mvllm_gguf.tokenizer", "mvllm_gguf.generation_config")


@dataclass
class Model:
    """A file before it is encoded: keys with type and content, tensors with sizes (columns first) and type.

    The content of a list is the type of its items and the items.
    """

    values: list[tuple[bytes, int, object]]
    tensors: list[tuple[bytes, tuple[int, ...], int]]
    part: str = field(default="m.gguf")

    def encode(self) -> bytes:
        values = [value(key, kind, _content(kind, content)) for key, kind, content in self.values]
        entries, data = [], 0
        for name, sizes, kind in self.tensors:
            entries.append(tensor(name, sizes, kind, data % 2**64))
            block_values, block_bytes = BYTES_PER_BLOCK.get(kind, (1, 1))
            size = 1
            for each in sizes:
                size *= each
            data += -(-size // block_values * block_bytes // 32) * 32
        header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(values)) + b"".join((*values, *entries))
        return header + bytes(-len(header) % 32 + min(data, 4 << 20))


def _content(kind: int, content: object) -> bytes:
    if kind == TEXT:
        return text(content if isinstance(content, bytes) else str(content).encode())
    if kind == ARRAY and isinstance(content, tuple):
        item, items = content
        return array(item, len(items), b"".join(_content(item, each) for each in items))
    return _packed(FORMS.get(kind, "I"), content if isinstance(content, int | float) else 0)


def _packed(form: str, number: int | float) -> bytes:
    if form in "fd":
        try:
            return struct.pack("<" + form, number)
        except OverflowError:
            return struct.pack("<" + form, float("inf"))
    size = struct.calcsize("<" + form)
    whole = int(number) if abs(number) < float("inf") else 0  # NaN is not less
    return (whole % (1 << 8 * size)).to_bytes(size, "little")


# ----------------------------------------------------------------------------------------------------------- good files


def make_models() -> list[Model]:
    """Small models of several architectures and tokenizers."""
    tokenizers = (_byte_level_tokenizer(), _sentencepiece_tokenizer())
    architectures = ("llama", "gemma3", "qwen2", "qwen3", "gemma2", "phi3")
    return [_model(name, tokenizers[i % 2]) for i, name in enumerate(architectures)]


def _model(architecture: str, tokenizer: list[tuple[bytes, int, object]]) -> Model:
    def key(name: str) -> bytes:
        return f"{architecture}.{name}".encode()

    values: list[tuple[bytes, int, object]] = [
        (b"general.architecture", TEXT, architecture.encode()),
        (b"general.type", TEXT, b"model"),
        (b"general.name", TEXT, b"Tiny"),
        (b"general.file_type", U32, 2),
        (b"general.alignment", U32, 32),
        (b"general.tags", ARRAY, (TEXT, [b"text-generation"])),
        (key("block_count"), U32, 1),
        (key("context_length"), U32, 512),
        (key("embedding_length"), U32, 64),
        (key("feed_forward_length"), U32, 64),
        (key("attention.head_count"), U32, 4),
        (key("attention.head_count_kv"), U32, 2),
        (key("attention.key_length"), U32, 16),
        (key("attention.value_length"), U32, 16),
        (key("attention.sliding_window"), U32, 128),
        (key("attention.layer_norm_rms_epsilon"), FLOAT, 1e-6),
        (key("rope.freq_base"), FLOAT, 1e4),
        (key("rope.dimension_count"), U32, 16),
        (key("rope.scaling.type"), TEXT, b"linear"),
        (key("rope.scaling.factor"), FLOAT, 2.0),
        *tokenizer,
    ]
    vocab = next(len(content[1]) for name, _, content in tokenizer if name == b"tokenizer.ggml.tokens")  # type: ignore[index]
    matrices = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64)}
    matrices |= {"ffn_gate": (64, 64), "ffn_up": (64, 64), "ffn_down": (64, 64)}
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    tensors = [(b"token_embd.weight", (64, vocab), Q8_0), (b"output_norm.weight", (64,), F32)]
    tensors += [(f"blk.0.{name}.weight".encode(), sizes, Q4_0) for name, sizes in matrices.items()]
    tensors += [(f"blk.0.{name}.weight".encode(), (64,), F32) for name in norms]
    return Model(values, tensors)


def _byte_level_tokenizer() -> list[tuple[bytes, int, object]]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(i) for i in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    merges = ["t h", "th e", "Ġ a"]
    tokens = [*letters, *("".join(merge.split()) for merge in merges), "<|end|>", "<|user|>"]
    return [
        (b"tokenizer.ggml.model", TEXT, b"gpt2"),
        (b"tokenizer.ggml.pre", TEXT, b"smollm"),
        (b"tokenizer.ggml.tokens", ARRAY, (TEXT, [token.encode() for token in tokens])),
        (b"tokenizer.ggml.token_type", ARRAY, (I32, [1] * (len(tokens) - 2) + [3, 4])),
        (b"tokenizer.ggml.merges", ARRAY, (TEXT, [merge.encode() for merge in merges])),
        *_common_of_tokenizers(len(tokens) - 2),
    ]


def _sentencepiece_tokenizer() -> list[tuple[bytes, int, object]]:
    special, singles = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["▁", "▁a", "th", "the", "▁the", "t", "h", "e", "a", "<start_of_turn>"]
    tokens = special + singles + pieces
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 1) + [4]
    return [
        (b"tokenizer.ggml.model", TEXT, b"llama"),
        (b"tokenizer.ggml.pre", TEXT, b"default"),
        (b"tokenizer.ggml.tokens", ARRAY, (TEXT, [token.encode() for token in tokens])),
        (b"tokenizer.ggml.scores", ARRAY, (FLOAT, [-float(i) for i in range(len(tokens))])),
        (b"tokenizer.ggml.token_type", ARRAY, (I32, kinds)),
        (b"tokenizer.ggml.unknown_token_id", U32, 0),
        (b"tokenizer.ggml.add_space_prefix", BOOL, 1),
        *_common_of_tokenizers(2),
    ]


def _common_of_tokenizers(end: int) -> list[tuple[bytes, int, object]]:
    return [
        (b"tokenizer.ggml.bos_token_id", U32, 1),
        (b"tokenizer.ggml.eos_token_id", U32, end),
        (b"tokenizer.ggml.eot_token_id", U32, end),
        (b"tokenizer.ggml.padding_token_id", U32, 0),
        (b"tokenizer.ggml.add_bos_token", BOOL, 1),
        (b"tokenizer.ggml.add_eos_token", BOOL, 0),
        (b"tokenizer.chat_template", TEXT, b"{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    ]


# -------------------------------------------------------------------------------------------------------------- changes


def change_model(model: Model, rng: random.Random, others: list[Model]) -> None:
    """Changes keys, values, lists or tensors in place."""
    i = rng.randrange(len(model.values))
    key, kind, content = model.values[i]
    match rng.randrange(9):
        case 0:
            del model.values[i]
        case 1:
            model.values.append(model.values[i])
        case 2:
            kind = rng.choice([*FORMS, TEXT, ARRAY, rng.randrange(2**32)])
            model.values[i] = (key, kind, content)
        case 3:
            model.values[i] = (key, kind, _other_content(kind, content, rng))
        case 4:
            model.values[i] = (rng.choice([*TEXTS, rng.choice(model.values)[0]]), kind, content)
        case 5:
            model.values[i] = rng.choice(rng.choice(others).values)
        case _:
            if not model.tensors:
                return
            j = rng.randrange(len(model.tensors))
            name, sizes, tensor_kind = model.tensors[j]
            match rng.randrange(6):
                case 0:
                    del model.tensors[j]
                case 1:
                    name = rng.choice([*TEXTS, rng.choice(model.tensors)[0], b"blk.999999999999.attn_q.weight"])
                    model.tensors[j] = (name, sizes, tensor_kind)
                case 2:
                    model.tensors[j] = (name, sizes, rng.choice([*BYTES_PER_BLOCK, rng.randrange(64)]))
                case 3:
                    k = rng.randrange(len(sizes))
                    model.tensors[j] = (name, (*sizes[:k], rng.choice(INTEGERS), *sizes[k + 1 :]), tensor_kind)
                case 4:
                    more = tuple(rng.choice([1, 2, 64]) for _ in range(rng.randrange(6)))
                    model.tensors[j] = (name, (*sizes, *more)[-6:], tensor_kind)
                case _:
                    model.tensors.append(rng.choice(rng.choice(others).tensors))


def _other_content(kind: int, content: object, rng: random.Random) -> object:
    if kind == TEXT:
        return rng.choice(TEXTS)
    if not isinstance(content, tuple):
        return rng.choice(NUMBERS)
    item, items = content
    items = list(items)
    match rng.randrange(6):
        case 0:
            items = items[: rng.randrange(len(items) + 1)]
        case 1:
            items = items * rng.choice([2, 3, 200 // (len(items) + 1) + 1])
        case 2:
            rng.shuffle(items)
        case 3:
            item = rng.choice([*FORMS, TEXT])
        case _:
            for _ in range(rng.choice([1, 1, 5])):
                if items:
                    chosen = rng.choice([*TEXTS, *items]) if item == TEXT else rng.choice(NUMBERS)
                    items[rng.randrange(len(items))] = chosen
    return item, items


def change_bytes(content: bytearray, rng: random.Random, others: list[bytes]) -> None:
    """Changes bytes in place, mostly in the header."""
    if not content:
        return
    at = rng.randrange(min(len(content), rng.choice([64, 2000, len(content)])))
    match rng.randrange(7):
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            content[at] = rng.randrange(256)
        case 2:
            new = _packed(rng.choice("BHIQ"), rng.choice(INTEGERS))
            content[at : at + len(new)] = new
        case 3:
            del content[at:]
        case 4:
            del content[at : at + rng.randrange(1, 64)]
        case 5:
            content[at:at] = rng.randbytes(rng.randrange(1, 64))
        case _:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            content[at : at + 64] = other[start : start + rng.randrange(1, 64)]


def make_case(rng: random.Random, models: list[Model], encoded: list[bytes]) -> bytes:
    """The content of one damaged file."""
    model = rng.choice(models)
    content = bytearray(encoded[models.index(model)])
    how = rng.randrange(4)
    if how:
        changed = copy.deepcopy(model)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            if changed.values:
                change_model(changed, rng, models)
        content = bytearray(changed.encode())
    if how in (0, 3):
        for _ in range(rng.choice([1, 1, 2, 5])):
            change_bytes(content, rng, encoded)
    return bytes(content)


# ---------------------------------------------------------------------------------------------------------------- child


def read_forever(folder: Path, memory: int) -> None:
    """The child: reads the file named by each line, and answers with one line."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["MVLLM_CACHE_DIR"] = str(folder)
    # Imported below the limit, as by an engine.
    from mvllm.errors import ModelError
    from mvllm_gguf.header import read_gguf
    from mvllm_gguf.model_folder import model_folder

    has_parts = all(map(find_spec, PARTS))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for i, line in enumerate(sys.stdin):
        path = Path(line.rstrip("\n"))
        try:
            read_gguf(path)
            if has_parts:
                model_folder(path, with_tokenizer=i % 4 > 0)
            answer = "read"
        except ModelError as e:
            answer = "refused: " + repr(str(e))
            if len(str(e)) > 5000:
                answer = f"failed: the message has {len(str(e))} characters"
        except BaseException:
            answer = "failed: " + traceback.format_exc().replace("\n", "\\n")
        print(answer, file=answers)


@dataclass
class Child:
    """A process that reads files."""

    start: Callable[[], subprocess.Popen[str]]
    process: subprocess.Popen[str] | None = None

    def read(self, path: Path, seconds: float) -> str:
        """The answer to a file; a child that does not answer is replaced."""
        if self.process is None:
            self.process = self.start()
            seconds += 60  # imports
        assert self.process.stdin and self.process.stdout
        try:
            print(path, file=self.process.stdin, flush=True)
            ready, _, _ = select.select([self.process.stdout], [], [], seconds)
            answer = self.process.stdout.readline().strip() if ready else f"failed: no answer in {seconds:.0f} s"
        except BrokenPipeError:
            answer = ""
        if not answer or answer.startswith("failed: no answer"):
            answer = answer or f"failed: the process ended with status {self.process.wait(30)}"
            self.stop()
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


def write_case(folder: Path, content: bytes, number: int) -> Path:
    """Writes a file whose modification time tells it from all others, however fast they follow each other."""
    path = folder / "case.gguf"
    path.write_bytes(content)
    os.utime(path, ns=(0, number))
    return path


def main() -> int:
    """Runs until the time is over; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="of the changes; by default the time")
    parser.add_argument("--memory", type=int, default=4 << 30, help="address space of the child in bytes")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each file")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "gguf-failures")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        read_forever(args.child, args.memory)
        return 0
    seed = int(time.time()) if args.seed is None else args.seed
    rng = random.Random(seed)
    models = make_models()
    encoded = [model.encode() for model in models]
    scratch = Path(tempfile.mkdtemp(prefix="gguf-fuzz-"))
    command = [sys.executable, "-m", "plugins.gguf.tests.fuzz.gguf_files", "--child", str(scratch / "cache")]
    command += ["--memory", str(args.memory)]
    child = Child(lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    counts: Counter[str] = Counter()
    reports: Counter[str] = Counter()
    print(f"seed {seed}; model_folder is {'' if all(map(find_spec, PARTS)) else 'not '}called")
    end = time.monotonic() + 60 * args.minutes
    try:
        for model, content in zip(models, encoded, strict=True):
            answer = child.read(write_case(scratch, content, counts.total()), args.seconds)
            counts[answer.partition(":")[0]] += 1
            if answer != "read":
                print(f"The unchanged {model.values[0][2]} was not read: {answer}".replace("\\n", "\n"))
        if not counts["read"]:
            return 1
        while time.monotonic() < end:
            content = make_case(rng, models, encoded)
            answer = child.read(write_case(scratch, content, counts.total()), args.seconds)
            kind = answer.partition(":")[0]
            counts[kind] += 1
            if kind == "failed":
                last = answer.split("\\n")
                report = " | ".join(line.strip() for line in last if line.strip())[-400:]
                reports[report] += 1
                if reports[report] == 1:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    kept = args.keep / f"{seed}-{counts.total()}.gguf"
                    kept.write_bytes(content)
                    print(f"\n{kept}\n{answer}".replace("\\n", "\n"), flush=True)
    finally:
        child.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{counts.total()} files: {dict(counts)}; {len(reports)} different failures")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
