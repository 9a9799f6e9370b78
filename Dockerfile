# An image that trains on CPUs:   docker build -t dtf .        docker run dtf
# on NVIDIA GPUs:                 docker build -t dtf --build-arg TORCH=cu130 .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# `cpu`, or a version of CUDA as PyTorch names its wheels; the driver is the host's
ARG TORCH=cpu
# further parts of dtf, such as pserver,ctr,parquet; see docs/dependencies.md
ARG EXTRAS=pserver,ctr

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN pip install torch torchvision --index-url "https://download.pytorch.org/whl/${TORCH}"

COPY pyproject.toml README.md LICENSE /src/
COPY dtf /src/dtf
COPY recipes /src/recipes
COPY conf /src/conf
RUN pip install "/src[${EXTRAS}]" && rm -r /src

# processes of a run need no rights; a volume for run folders must be writable for this user (docs/clusters/kubernetes.md)
RUN useradd --uid 1000 --create-home dtf
USER 1000
WORKDIR /home/dtf
CMD ["python", "-m", "dtf"]
