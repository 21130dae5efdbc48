# The rungs on NVIDIA GPUs, with the compilers that torch.compile and DeepSpeed call.
#
#   docker build --tag fabric-ladder .
#   docker run --rm --gpus all --ipc=host fabric-ladder                                # the doctor
#   mkdir -p runs
#   docker run --rm --gpus all --ipc=host --volume "$PWD/runs:/home/ubuntu/fabric-ladder/runs" \
#       fabric-ladder python src/2_grad_accum.py --config configs/quickstart.yaml
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libaio-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner 1000 --group 1000 /home/ubuntu/fabric-ladder /home/ubuntu/fabric-ladder/runs

USER 1000
WORKDIR /home/ubuntu/fabric-ladder
ENV PATH=/home/ubuntu/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1

# torch comes first and by its exact version, so that no other package's looser request picks another build; neither is
# installed again for a change of the sources
COPY --chown=1000:1000 requirements.txt ./
RUN python3 -m venv /home/ubuntu/venv \
    && pip install --no-cache-dir "$(grep '^torch==' requirements.txt)" \
    && sed '/^-e/d' requirements.txt > /tmp/packages.txt \
    && pip install --no-cache-dir --requirement /tmp/packages.txt

COPY --chown=1000:1000 . .
RUN pip install --no-cache-dir --no-deps --editable .

CMD ["python", "scripts/doctor.py"]
