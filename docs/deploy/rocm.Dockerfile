# mvllm on ROCm devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet. From the top of
# the repository:
#
#   docker build -f docs/deploy/rocm.Dockerfile -t mvllm:rocm .
#   docker run --rm --init --device=/dev/kfd --device=/dev/dri --group-add video --ipc=host \
#       -p 127.0.0.1:8000:8000 -v mvllm-models:/models mvllm:rocm
#
# `conformance --platform rocm` at the end of the second command runs the conformance suite instead of the server.
FROM rocm/dev-ubuntu-24.04:7.2.3-complete
LABEL mvllm.tested-on-hardware="no"
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/mvllm
ENV PATH=/opt/mvllm/bin:$PATH VIRTUAL_ENV=/opt/mvllm
COPY ci/constraints/cpu.txt /src/constraints.txt
RUN python3 -m pip install --no-cache-dir -c /src/constraints.txt uv
# uv fetches torch from PyTorch's index of builds for this version of ROCm. Builds for 6.4 end with torch 2.9, and only
# builds for 7.0 and newer contain gfx950.
ARG TORCH_BACKEND=rocm7.2
RUN uv pip install --no-cache --torch-backend="$TORCH_BACKEND" torch
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms platforms
COPY plugins plugins
# Copies, not links to /src.
ENV UV_NO_EDITABLE=1
RUN uv pip install --no-cache ".[parts]" ./platforms/triton-kernels ./platforms/torch-gpu ./platforms/rocm
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
