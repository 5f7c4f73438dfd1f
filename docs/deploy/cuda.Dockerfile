# mvllm on CUDA devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet. From the top of
# the repository:
#
#   docker build -f docs/deploy/cuda.Dockerfile -t mvllm:cuda .
#   docker run --rm --init --gpus all --ipc=host \
#       -p 127.0.0.1:8000:8000 -v mvllm-models:/models mvllm:cuda
#
# `conformance --platform cuda` at the end of the second command runs the conformance suite instead of the server.
#
# torch brings the CUDA libraries, and the container runtime the driver's, so no CUDA image is needed. Triton compiles
# its launchers with gcc. FlashInfer, an extra that is not installed here, compiles with nvcc: for it, begin with a
# `-devel` image of the CUDA that torch was built for.
FROM ubuntu:24.04
LABEL mvllm.tested-on-hardware="no"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/mvllm
ENV PATH=/opt/mvllm/bin:$PATH VIRTUAL_ENV=/opt/mvllm
COPY ci/constraints/cpu.txt /src/constraints.txt
RUN python3 -m pip install --no-cache-dir -c /src/constraints.txt uv
# On Linux the index's own build of torch is the one for CUDA.
RUN uv pip install --no-cache torch==2.13.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms platforms
COPY plugins plugins
# Copies, not links to /src.
ENV UV_NO_EDITABLE=1
RUN uv pip install --no-cache ".[parts]" ./platforms/triton-kernels ./platforms/torch-gpu ./platforms/cuda
COPY docs/deploy/healthcheck.py /usr/local/lib/mvllm/healthcheck.py
COPY docs/deploy/serve.yaml /etc/mvllm/serve.yaml
RUN useradd --create-home --uid 10001 mvllm \
    && install -d -o mvllm -g mvllm /models
ENV HF_HOME=/models/huggingface MVLLM_CACHE_DIR=/models/mvllm
VOLUME /models
USER 10001
WORKDIR /home/mvllm
EXPOSE 8000
# A large model may take half an hour to load; until then failures do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "/usr/local/lib/mvllm/healthcheck.py"]
ENTRYPOINT ["mvllm"]
CMD ["serve", "--config", "/etc/mvllm/serve.yaml"]
