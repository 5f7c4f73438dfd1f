"""Latency of chats beside a prompt of 100,000 tokens, on simulated time: python -m tests.perf.long_prompt_fairness

A step takes base + tokens x cost of a token + attended positions x cost of a position. 64 chats of 50 to 600 prompt
tokens and 100 to 300 output tokens are always there. Prints the 99th percentile of the time between two tokens of a
chat, without and with the long prompt, and the time to the long prompt's first token, for the order of service, for
the limits of a program and for those of a server. These are counts of a simulation, the same on every machine.
"""

from __future__ import annotations

import argparse

from mvllm.config.engine_settings import SERVER_LONG_PREFILL_SLOWDOWN
from tests.unit.scheduler.simulated_load import SimulatedLoad, StepCost

DEVICES = {
    "8 ms + 30 us a token": StepCost(8e-3, 30e-6, 1e-10),
    "20 ms + 20 us a token": StepCost(20e-3, 20e-6),
    "60 ms + 1 ms a token": StepCost(60e-3, 1e-3, 2e-9),
}
SETTINGS = {
    "order of service": {"long_prefill_token_threshold": 0},
    "a program": {},
    "threshold 256": {"long_prefill_token_threshold": 256},
    "a server": {"long_prefill_slowdown": SERVER_LONG_PREFILL_SLOWDOWN},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-ms", type=float, help="a device of your own: milliseconds of a step")
    parser.add_argument("--token-us", type=float, default=20.0, help="microseconds of each token")
    parser.add_argument("--long", type=int, nargs="+", default=[100_000], help="lengths of the long prompts")
    parser.add_argument("--chats", type=int, default=64)
    args = parser.parse_args()
    devices = DEVICES
    if args.base_ms is not None:
        name = f"{args.base_ms:g} ms + {args.token_us:g} us a token"
        devices = {name: StepCost(args.base_ms / 1e3, args.token_us / 1e6)}
    print(f"{'a step takes':24}{'limits of':18}{'p99 alone':>10}{'p99 beside':>12}{'ratio':>7}{'long prompt':>13}")
    for device, cost in devices.items():
        for name, limits in SETTINGS.items():
            scale = max(1.0, cost.base / 8e-3)
            times = {"warm_up": 5 * scale, "max_seconds": 20 * scale, "num_chats": args.chats}
            alone = SimulatedLoad(cost, **times, **limits).run()
            times["max_seconds"] *= 100
            beside = SimulatedLoad(cost, long_prompts=tuple(args.long), **times, **limits).run()
            print(
                f"{device:24}{name:18}{alone.p99() * 1e3:7.1f} ms{beside.p99() * 1e3:9.1f} ms"
                f"{beside.p99() / alone.p99():7.2f}{max(beside.long_prompts):11.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
