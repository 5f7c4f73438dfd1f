"""The client with which TRL's GRPOTrainer uses a server of mvllm: `use_mvllm()` before the trainer is created.

TRL's own client speaks the same routes (/v1/completions, /start_weight_update, /update_weights, ...), with two
differences: it refuses to start where vLLM is not installed, and it broadcasts weights with NCCL through vLLM's code,
from a CUDA device only. This one broadcasts them with a process group of torch.distributed, `gloo` by default, so that
trainer and server may be on any device and on any machines.

Written for TRL 1.16. The trainer's environment needs `trl`, `requests`, and `mvllm` for WeightTransferGroup.
"""

import atexit
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from trl.generation import vllm_client, vllm_generation

from mvllm import WeightTransferGroup, WeightTransferInfo

BACKEND = "gloo"


class MvllmClient(vllm_client.VLLMClient):
    """TRL's client, with the weight transfer of mvllm. The arguments are those of TRL's.

    An administrator's key of the server is read from the variable MVLLM_ADMIN_API_KEY.
    """

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """The first call of the constructor."""
        if key := os.environ.get("MVLLM_ADMIN_API_KEY"):
            self.session.headers["Authorization"] = f"Bearer {key}"
        super().check_server(*args, **kwargs)

    def get_server_info(self) -> dict[str, Any]:
        """The two facts that TRL reads, in the form in which it reads them."""
        info = self._get(f"{self.base_url}/server_info")
        return {
            "model_config": {"logprobs_mode": info["model"]["logprobs_mode"]},
            "weight_transfer_config": {"backend": BACKEND},
            "num_workers": info["num_workers"],
        }

    def get_world_size(self) -> int:
        """The number of the server's workers, of all replicas."""
        return self.get_server_info()["num_workers"]

    def init_communicator(self, device: object = 0) -> None:
        """Joins the server's workers. The trainer is rank 0 and listens on `group_port`."""
        info = {
            "master_address": _own_address(self.host),
            "master_port": self.group_port,
            "world_size": 1 + self.get_world_size(),
            "backend": BACKEND,
        }
        with ThreadPoolExecutor(1) as thread:  # the server joins at the same time
            joined = thread.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
            if wait([joined], timeout=0.5).done:  # before the trainer has joined: the server has refused it
                joined.result()
            self.communicator = WeightTransferGroup(WeightTransferInfo(**info))
            joined.result()
        atexit.register(self.close_communicator)

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Announces the tensors, then broadcasts them in the same order. One call is a whole update."""
        names, dtype_names, shapes = (list(field) for field in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        with ThreadPoolExecutor(1) as thread:
            updated = thread.submit(self._post, f"{self.base_url}/update_weights", json={"update_info": info})
            for named in named_params:
                if updated.done():  # before it has everything: the server has refused it
                    break
                self.communicator.send([named])
            updated.result()

    def close_communicator(self) -> None:
        """Leaves the group. Idempotent."""
        group, self.communicator = self.communicator, None
        if group is not None:
            group.close()


def use_mvllm() -> None:
    """Makes `GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=...)` use MvllmClient."""

    def is_available(min_version: str | None = None) -> bool:
        return True  # the routes of vLLM are, which is what TRL needs in this mode

    vllm_client.is_vllm_available = vllm_generation.is_vllm_available = is_available
    vllm_generation.VLLMClient = MvllmClient


def _own_address(server: str) -> str:
    """This machine's address on the way to the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server, 9))
        return probe.getsockname()[0]
