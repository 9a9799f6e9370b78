# An image that trains on GPUs and CPUs:          docker build -t dtf .        docker run dtf
# a slim one, 5 GB less, that trains on CPUs:     docker build -t dtf --build-arg TORCH_INDEX=URL .
# with the index of wheels for CPUs that PyTorch's page of installations names. Another version of CUDA has one, too.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# empty: pip's own, which bring CUDA; the driver is the host's
ARG TORCH_INDEX=
# further parts of dtf, such as pserver,ctr,parquet; see docs/dependencies.md
ARG EXTRAS=pserver,ctr

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN pip install torch torchvision ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"}

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
