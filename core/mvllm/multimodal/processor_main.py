"""Program that decodes and processes items: `python -m mvllm.multimodal.processor_main <parent pid>`.

Decoders of images and videos are large programs in C that read files from anywhere. They run here, under limits that
the kernel enforces: a crash, a loop or a bomb ends this process and one request, and nothing else.

    stdin   ProcessorStart, then ItemJobs, see pipe_process       stdout  an ItemResult for each job

The process ends with its parent, at the end of stdin, after a job that took too much memory, or if the model's
processor cannot be loaded.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import MvllmError, RequestError, plain_reason
from mvllm.executor.process.pipe_process import read_message, write_message
from mvllm.executor.process.process_utils import die_with_parent, limit_memory, limit_processor_time, set_process_name
from mvllm.messages.multimodal import EMBEDS, ArrayData
from mvllm.multimodal.decoding import DecodingLimits, decode
from mvllm.multimodal.frame_sampling import FrameSampling
from mvllm.multimodal.media_source import MediaSource, check_embeddings
from mvllm.multimodal.processor_messages import PLACEHOLDERS, ItemJob, ItemResult, ProcessorStart
from mvllm.multimodal.requested_sizes import check_requested_sizes
from mvllm.multimodal.torch_file import is_torch_file, read_tensor

MEMORY_BYTES = 4 << 30
"""Address space that jobs may add to the process."""
MAX_RESULT_BYTES = 1 << 30
"""Most bytes of the features of one item."""
MAX_KEPT = 4
"""Most decoded contents that are kept for jobs with other windows of them: of requests that take turns."""

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_MAX_ERROR_LENGTH = 1000
_SAMPLING = ("num_frames", "fps")
AUDIO_WINDOW = "audio_window"
"""The argument of families that take a window of a longer audio: its number."""


def main() -> None:
    """The program."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("ItemProcessor")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault(_AUTOLOAD, "0")  # torch, which transformers imports, opens no devices here
    jobs, results = sys.stdin.buffer, _take_stdout()
    try:
        jobs_server = JobServer(read_message(jobs, ProcessorStart))
        while True:
            job = read_message(jobs, ItemJob)
            answer = jobs_server.run(job)
            write_message(results, answer)
            if answer.is_last:
                break
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


def _take_stdout() -> BinaryIO:
    """The pipe of the results. What libraries print goes nowhere."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return results


class JobServer:
    """Runs jobs. The model's processor is loaded for the first item that needs it.

    Args:
        start: The first message.
    """

    def __init__(self, start: ProcessorStart) -> None:
        self._start = start
        self._limits = DecodingLimits(start.max_pixels, start.max_audio_seconds)
        self._processor: Any = None
        self._is_limited = False
        self._kept: list[tuple[MediaSource, Any]] = []

    def run(self, job: ItemJob) -> ItemResult:
        """Runs one job. Errors are results."""
        try:
            if job.source.modality == EMBEDS:
                self._limit(job.seconds)
                return ItemResult(embeds=self._read_embeddings(job.source.data))
            if self._processor is None:
                self._lift_memory_limit()  # of earlier jobs with embeddings, which need no processor
                if (failed := self._load()) is not None:
                    return failed
            if job.source.modality == PLACEHOLDERS:
                return ItemResult(placeholders=self._processor.placeholders())
            self._limit(job.seconds)
            return self._process(job)
        except MemoryError:
            error = f"The {job.source.modality} takes more memory than the {MEMORY_BYTES >> 20} MB allowed."
            return ItemResult(error=error, parameter="multi_modal_data", is_last=True)
        except RequestError as e:
            is_memory = isinstance(e.__cause__, MemoryError)
            return ItemResult(error=_shortened(str(e)), parameter=e.parameter, is_last=is_memory)
        except MvllmError as e:  # a package or a file of the model is missing
            return ItemResult(error=_shortened(str(e)), parameter="multi_modal_data")
        except Exception as e:  # noqa: BLE001  (reported to the client of this process)
            error = f"The {job.source.modality} cannot be processed: {type(e).__name__}: {e}"
            return ItemResult(error=_shortened(error), parameter="multi_modal_data")

    def _limit(self, seconds: float) -> None:
        if not self._is_limited:
            self._is_limited = True
            limit_memory(MEMORY_BYTES)
        limit_processor_time(seconds)

    def _lift_memory_limit(self) -> None:
        """Loading the processor may take more than what jobs may add; the next job sets the limit anew."""
        if self._is_limited:
            self._is_limited = False
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def _load(self) -> ItemResult | None:
        """Loads the processor. Returns the error, with which the process ends."""
        from mvllm.multimodal.item_processor import ItemProcessor

        start = self._start
        try:
            self._processor = ItemProcessor(
                Path(start.path),
                start.architecture,
                msgspec.convert(start.model, MultiModalModel),
                HFConfig(json.loads(start.hf_config), f"{start.path}/config.json"),
                json.loads(start.processor_kwargs),
                trust_remote_code=start.trust_remote_code,
                float_dtype=start.float_dtype,
                model_impl=start.model_impl,
            )
            _use_one_thread()
        except Exception as e:  # noqa: BLE001  (code of the model's folder, or of transformers)
            reason = str(e) if isinstance(e, MvllmError) else f"The model's processor fails: {plain_reason(e)}."
            return ItemResult(
                error=_shortened(reason), parameter="multi_modal_data", is_last=True, is_load_failure=True
            )
        return None

    def _process(self, job: ItemJob) -> ItemResult:
        kwargs: dict[str, Any] = json.loads(job.kwargs)
        wanted = {name: value for name, value in kwargs.items() if name in _SAMPLING}
        engine_kwargs = json.loads(self._start.processor_kwargs)
        defaults = self._processor.family.frame_defaults() if job.source.modality == "video" else None
        sampling = FrameSampling.from_settings(wanted or engine_kwargs, defaults)
        kwargs = {name: value for name, value in kwargs.items() if name not in _SAMPLING}
        content = self._decoded(job.source, sampling, keeps=AUDIO_WINDOW in kwargs)
        if kwargs and job.source.modality != "audio":
            default_size = self._processor.default_size(job.source.modality)
            check_requested_sizes(kwargs, content, self._start.max_pixels, default_size)
        uuid = job.uuid
        if uuid is not None and wanted:  # names the whole video, and other frames of it are another content
            uuid = json.dumps([uuid, wanted], sort_keys=True)
        item = self._processor.process(job.source.modality, content, counts=job.counts, kwargs=kwargs, uuid=uuid)
        if len(item.token_ids) > self._start.max_embeddings:
            raise RequestError(
                f"The {item.modality} takes {len(item.token_ids)} tokens, but prompt and output together may have "
                f"{self._start.max_embeddings} (max_model_len). Send a smaller one.",
                parameter="multi_modal_data",
            )
        if item.num_bytes > MAX_RESULT_BYTES:
            raise RequestError(
                f"The processor makes {item.num_bytes >> 20} MB of the {item.modality}; {MAX_RESULT_BYTES >> 20} are "
                "allowed. Send a smaller one.",
                parameter="multi_modal_data",
            )
        depends = bool(self._processor.family.arguments(item.modality, job.counts))
        return ItemResult(item=item, depends_on_counts=depends)

    def _decoded(self, source: MediaSource, sampling: FrameSampling, *, keeps: bool) -> Any:
        """The content of a source. With `keeps` it is there for later jobs, which may be other windows of it."""
        if not keeps:
            return self._decode(source, sampling)
        for i, kept in enumerate(self._kept):
            if kept[0] == source:
                self._kept.append(self._kept.pop(i))
                return kept[1]
        del self._kept[: max(0, len(self._kept) + 1 - MAX_KEPT)]
        content = self._decode(source, sampling)
        self._kept.append((source, content))
        return content

    def _decode(self, source: MediaSource, sampling: FrameSampling) -> Any:
        rate = self._sampling_rate(source.modality)
        return decode(source, self._limits, sampling_rate=rate, sampling=sampling)

    def _sampling_rate(self, modality: str) -> int:
        return int(self._processor.family.sampling_rate()) if modality == "audio" else 0

    def _read_embeddings(self, data: bytes) -> ArrayData:
        found = read_array(data)
        if len(found) > self._start.max_embeddings:
            raise RequestError(
                f"prompt_embeds has {len(found)} rows; {self._start.max_embeddings} are allowed (max_model_len).",
                parameter="prompt_embeds",
            )
        return check_embeddings(found, self._start.hidden_size)


def read_array(data: bytes) -> Any:
    """The array in a file of numpy (`.npy`), of `torch.save`, or of safetensors with one tensor. None can run code.

    Raises:
        RequestError: It is none of them, or damaged.
    """
    import numpy as np

    try:
        if data.startswith(b"\x93NUMPY"):
            found = np.load(io.BytesIO(data), allow_pickle=False)
        elif is_torch_file(data):
            found = read_tensor(data)
        else:
            (found,) = _read_safetensors(data).values()
    except MemoryError:
        raise
    except Exception as e:
        raise RequestError(
            "prompt_embeds must be the base64 of a file of torch.save with one tensor, of a .npy file, or of a "
            f"safetensors file with one tensor; it cannot be read: {str(e) or type(e).__name__:.200}.",
            parameter="prompt_embeds",
        ) from e
    if found.dtype.kind != "f" or found.ndim not in (2, 3):
        raise RequestError(
            f"prompt_embeds must be floats of shape [tokens, hidden_size]; found {found.dtype} {list(found.shape)}.",
            parameter="prompt_embeds",
        )
    return found[0] if found.ndim == 3 and len(found) == 1 else found


def _read_safetensors(data: bytes) -> dict[str, Any]:
    """The tensors of a file as arrays of numpy, which has no bfloat16: those are float32."""
    import numpy as np
    from safetensors import deserialize

    found = {}
    for name, entry in deserialize(data):
        raw, dtype, shape = entry["data"], entry["dtype"], entry["shape"]
        if dtype == "BF16":
            array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])
        found[name] = array.reshape(shape)
    return found


def _use_one_thread() -> None:
    """The engine's processes need the cores; one item is small."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _shortened(error: str) -> str:
    return error[:_MAX_ERROR_LENGTH].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
