# mvllm on processors. From the top of the repository:
#
#   docker build -f docs/deploy/cpu.Dockerfile -t mvllm:cpu .
#   docker run --rm --init --shm-size=1g -p 127.0.0.1:8000:8000 -v mvllm-models:/models mvllm:cpu
#
# The second command serves the small model of the package. Another model: append
# `serve MODEL --config /etc/mvllm/serve.yaml`. The volume keeps downloaded models; worker processes exchange data in
# shared memory, hence --shm-size. docs/how-to/containers-and-services.md has more.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY ci/constraints/cpu.txt constraints.txt
RUN pip install --no-cache-dir -c constraints.txt uv && python -m venv /opt/mvllm
# uv fetches torch from PyTorch's index of builds for processors. Empty: from the configured index, as other packages.
ARG TORCH_BACKEND=cpu
RUN VIRTUAL_ENV=/opt/mvllm uv pip install --no-cache ${TORCH_BACKEND:+--torch-backend=$TORCH_BACKEND} \
        "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY platforms platforms
COPY plugins plugins
# More distributions of this repository, such as ./plugins/ray-executor[serve]; docs/deploy/kubernetes/rayservice.yaml.
ARG EXTRA_PACKAGES=
# Copies, not links to /src: the image has /opt/mvllm only.
ENV UV_NO_EDITABLE=1
RUN VIRTUAL_ENV=/opt/mvllm uv pip install --no-cache -c constraints.txt \
        ${TORCH_BACKEND:+--torch-backend=$TORCH_BACKEND} ".[parts]" ./platforms/cpu $EXTRA_PACKAGES

FROM python:3.11-slim
ARG EXTRA_DEBIAN_PACKAGES=
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 $EXTRA_DEBIAN_PACKAGES \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/mvllm /opt/mvllm
ENV PATH=/opt/mvllm/bin:$PATH
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
