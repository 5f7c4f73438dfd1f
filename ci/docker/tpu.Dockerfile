# mvllm on TPU devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet. From the top of the
# repository:
#
#   docker build -f ci/docker/tpu.Dockerfile -t mvllm:tpu .
#   docker run --rm --privileged --net=host mvllm:tpu conformance --platform tpu
FROM python:3.12-slim
LABEL mvllm.tested-on-hardware="no"
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# The torch that torch_xla's last release stands on; name an index with builds for hosts, or it brings NVIDIA's libraries.
ARG PIP_EXTRA_INDEX_URL=""
RUN python3 -m pip install --no-cache-dir torch==2.9.1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms/tpu platforms/tpu
RUN python3 -m pip install --no-cache-dir ".[testing]" "./platforms/tpu[torch-xla]"
RUN useradd --create-home mvllm
USER mvllm
WORKDIR /home/mvllm
ENTRYPOINT ["mvllm"]
CMD ["doctor"]
