# mvllm on TPU devices. NOT RUN ON HARDWARE: nobody has started this image on such a device yet. From the top of
# the repository:
#
#   docker build -f docs/deploy/tpu.Dockerfile -t mvllm:tpu .
#   docker run --rm --init --privileged --net=host -e MVLLM_API_KEY=... -v mvllm-models:/models mvllm:tpu
#
# With --net=host the server is reachable at every address of the machine, hence the key.
# `conformance --platform tpu` at the end of the second command runs the conformance suite instead of the server.
FROM python:3.12-slim
LABEL mvllm.tested-on-hardware="no"
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/mvllm
ENV PATH=/opt/mvllm/bin:$PATH VIRTUAL_ENV=/opt/mvllm
COPY ci/constraints/cpu.txt /src/constraints.txt
RUN python3 -m pip install --no-cache-dir -c /src/constraints.txt uv
# The torch that the last release of torch_xla needs, as a build without the libraries of other devices.
ARG TORCH_BACKEND=cpu
RUN uv pip install --no-cache ${TORCH_BACKEND:+--torch-backend=$TORCH_BACKEND} torch==2.9.1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms platforms
COPY plugins plugins
# Copies, not links to /src.
ENV UV_NO_EDITABLE=1
RUN uv pip install --no-cache ".[parts]" "./platforms/tpu[torch-xla]"
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
