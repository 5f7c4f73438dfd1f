# mvllm on TPU devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet, and its platform package
# (platforms/tpu) has to be in the repository. From the top of the repository:
#
#   docker build -f ci/docker/tpu.Dockerfile -t mvllm:tpu .
#   docker run --rm --privileged --net=host mvllm:tpu conformance --platform tpu
FROM python:3.12-slim
LABEL mvllm.tested-on-hardware="no"
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# torch for hosts; the TPU comes with the platform package's own requirements.
ARG PIP_EXTRA_INDEX_URL=""
RUN python3 -m pip install --no-cache-dir torch==2.13.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms/tpu platforms/tpu
RUN python3 -m pip install --no-cache-dir ".[testing]" ./platforms/tpu
RUN useradd --create-home mvllm
USER mvllm
WORKDIR /home/mvllm
ENTRYPOINT ["mvllm"]
CMD ["doctor"]
