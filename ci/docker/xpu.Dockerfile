# mvllm on XPU devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet. From the top of the
# repository:
#
#   docker build -f ci/docker/xpu.Dockerfile -t mvllm:xpu .
#   docker run --rm --device=/dev/dri --group-add "$(getent group render | cut -d: -f3)" --ipc=host mvllm:xpu \
#        conformance --platform xpu
FROM intel/oneapi-basekit:2025.2.0-0-devel-ubuntu24.04
LABEL mvllm.tested-on-hardware="no"
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/mvllm
ENV PATH=/opt/mvllm/bin:$PATH
# The index that has builds of torch for XPU.
ARG TORCH_INDEX_URL
RUN python3 -m pip install --no-cache-dir --index-url "${TORCH_INDEX_URL:?pass --build-arg TORCH_INDEX_URL=...}" torch
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms/xpu platforms/xpu
COPY platforms/torch-gpu platforms/torch-gpu
COPY platforms/triton-kernels platforms/triton-kernels
RUN python3 -m pip install --no-cache-dir ".[testing]" ./platforms/triton-kernels ./platforms/torch-gpu ./platforms/xpu
RUN useradd --create-home mvllm
USER mvllm
WORKDIR /home/mvllm
ENTRYPOINT ["mvllm"]
CMD ["doctor"]
