# mvllm on CUDA devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet. From the top of the
# repository:
#
#   docker build -f ci/docker/cuda.Dockerfile -t mvllm:cuda .
#   docker run --rm --gpus all --ipc=host mvllm:cuda conformance --platform cuda
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
LABEL mvllm.tested-on-hardware="no"
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/mvllm
ENV PATH=/opt/mvllm/bin:$PATH
# On Linux the index's own build of torch is the one for CUDA.
RUN python3 -m pip install --no-cache-dir torch==2.13.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms/cuda platforms/cuda
COPY platforms/torch-gpu platforms/torch-gpu
COPY platforms/triton-kernels platforms/triton-kernels
RUN python3 -m pip install --no-cache-dir ".[testing]" ./platforms/triton-kernels ./platforms/torch-gpu ./platforms/cuda
RUN useradd --create-home mvllm
USER mvllm
WORKDIR /home/mvllm
ENTRYPOINT ["mvllm"]
CMD ["doctor"]
