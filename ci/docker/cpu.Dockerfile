# mvllm on the processor. From the top of the repository:
#
#   docker build -f ci/docker/cpu.Dockerfile -t mvllm:cpu .
#   docker run --rm mvllm:cpu generate --model demo --prompt "Once upon a time"
#
# Several workers talk through shared memory: give them some with --shm-size=1g. Models of the hub are kept where a volume
# is mounted: -v mvllm-models:/home/mvllm/.cache/huggingface
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms/cpu platforms/cpu
RUN pip wheel --no-deps -w /wheels . ./platforms/cpu

FROM python:3.11-slim
# Where the index answers `torch==` with an accelerator build, name one that has builds for hosts.
ARG PIP_EXTRA_INDEX_URL=""
COPY ci/constraints/cpu.txt /tmp/constraints.txt
RUN torch="$(grep '^torch==' /tmp/constraints.txt)" \
    && pip install --no-cache-dir -c /tmp/constraints.txt "$torch"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt /wheels/*.whl && rm -r /wheels /tmp/constraints.txt
RUN useradd --create-home mvllm
USER mvllm
WORKDIR /home/mvllm
ENTRYPOINT ["mvllm"]
CMD ["doctor"]
